"""`python -m benchmarks.drafts TRACE ...`: what drafts save where the answers are those of recorded agents.

Physics: a token reads all weights, and so do a few rows of one forward. The recorded answer is forced, so that each token is what a real
model said: drafts prove right as often as they would there. Times are of tokens after the first.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Annotated, Any

import typer

from agentcache import Engine, Sampling
from agentcache.bench import report
from agentcache.bench.options import Dtype, DtypeOption, JsonOption, Loading, ModelOption, ShapeOption, ThreadsOption, ToolsDir
from agentcache.terminal import report_errors
from agentcache.traces import Answers, Call, read, texts

DRAFTED = (0, Sampling().draft_tokens)


def answered(engine: Engine, call: Call, ids: tuple[int, ...], turn: int) -> dict[str, Any]:
    """One recorded answer, decoded with drafts and without; which comes first changes with the turn."""
    found: dict[str, Any] = {"tokens": len(ids) - 1}
    for drafts in DRAFTED if turn % 2 else DRAFTED[::-1]:
        sampling = Sampling(max_tokens=len(ids), forced=ids, ignore_eos=True, draft_tokens=drafts)
        done = engine.generate(call.prompt, call.tools, sampling=sampling)
        assert done.ids == ids, "the recorded answer was not what was decoded"
        found |= {"drafted_ms" if drafts else "ms": done.receipt.decode_ms}
        found |= {"drafted_tokens": done.receipt.drafted_tokens} if drafts else {}
    return found


def row(name: str, answers: list[dict[str, Any]]) -> dict[str, Any]:
    """Sums of a trace's answers. speedup: of all its tokens; least, median: of single answers."""
    total = {key: sum(one[key] for one in answers) for key in answers[0]}
    each = [one["ms"] / one["drafted_ms"] for one in answers]
    return {
        "trace": name,
        "answers": len(answers),
        "tokens": total["tokens"],
        "per_forward": total["tokens"] / (total["tokens"] - total["drafted_tokens"]),
        "token_ms": total["ms"] / total["tokens"],
        "drafted_token_ms": total["drafted_ms"] / total["tokens"],
        "speedup": total["ms"] / total["drafted_ms"],
        "median_speedup": statistics.median(each),
        "least_speedup": min(each),
    }


def main(
    traces: Annotated[list[Path], typer.Argument(help="Recorded episodes, as `bench react` reads them.")],
    tools_dir: ToolsDir = None,
    episodes: Annotated[int, typer.Option(min=1, help="Episodes of each trace.")] = 2,
    calls: Annotated[int, typer.Option(min=1, help="Calls of each episode.")] = 6,
    longest: Annotated[int, typer.Option(min=64, help="Tokens of a prompt; longer ones are left out.")] = 8192,
    model: ModelOption = None,
    shape: ShapeOption = None,
    dtype: DtypeOption = Dtype.bfloat16,
    threads: ThreadsOption = None,
    json_file: JsonOption = None,
) -> None:
    """Times of recorded answers with drafts and without."""
    with report_errors():
        known = {path.stem: list(read(path, tools_dir, episodes=episodes, calls=calls)) for path in traces}
        words = texts([episode for found in known.values() for episode in found])
        with report.measuring("drafts", Loading(model, shape, dtype, threads), json_file, words) as run:
            answers, rows, turn = Answers(run.engine.tokenizer), list[dict[str, Any]](), 0
            for name, found in known.items():
                made = list[dict[str, Any]]()
                for call in (call for episode in found for call in episode.calls):
                    run.say(f"{name}: answer {len(made) + 1}")
                    ids = tuple(answers.ids(call))
                    prompt = run.engine.renderer.render(call.prompt, call.tools)
                    if len(ids) > 1 and len(prompt.ids) + len(ids) <= longest:
                        turn += 1
                        made.append(answered(run.engine, call, ids, turn))
                if made:
                    rows.append(row(name, made))
                    run.keep({"rows": rows})
            columns = {"trace": lambda row: str(row["trace"]), "answers": report.of("answers"), "tokens": report.of("tokens")}
            columns |= {name: report.of(name, 2) for name in ("per_forward", "speedup", "median_speedup", "least_speedup")}
            columns |= {name: report.of(name, 1) for name in ("token_ms", "drafted_token_ms")}
            run.tables.append(report.drawn("recorded answers, with drafts and without", columns, rows))


if __name__ == "__main__":
    typer.run(main)
