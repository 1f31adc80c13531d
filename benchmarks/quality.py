"""`python -m benchmarks.quality`: `agentcache bench quality` on freshly drawn cases, and what only the generator can ask.

speed        to the first token of a prompt of which nothing is kept, one at a time, and tokens a second from there: medians
variants     the same requests with tools shuffled, another system text, history in front: figures, and how many calls are the same
clock        per style and role: the same episodes with a clock at each prompt's tail and without; solved, and solved in one run only
sensitivity  see quality_spoil.py
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from agentcache.bench import quality, quality_asking, report
from agentcache.bench import quality_cases as kept
from agentcache.bench.options import Dtype, DtypeOption, JsonOption, Loading, ThreadsOption, ToolsDir, names, numbers
from agentcache.bench.quality_asking import Ask, all_solved, asking
from agentcache.bench.quality_cases import SPLITS, Episode
from agentcache.bench.quality_score import Said
from agentcache.engine import Engine
from agentcache.errors import ConfigError
from agentcache.terminal import report_errors
from agentcache.types import Sampling
from examples.embedded import cases as drawn

from . import quality_spoil

app = typer.Typer(add_completion=False)


@dataclass(frozen=True, slots=True)
class Parts:
    """variants, sensitivity: so many requests; clock: so many episodes per style; speed: so many one at a time, with nothing kept.

    tools: of the requests. agents: requests at a time.
    """

    variants: int = 0
    clock: int = 0
    sensitivity: int = 0
    speed: int = 0
    styles: Sequence[str] = ("hermes", "langchain", "llamaindex")
    tools: int = 20
    agents: int = 8


def more(engine: Engine, parts: Parts, source: drawn.Drawn, say: quality.Say, keep: quality.Keep = lambda part: None) -> dict[str, Any]:
    """The parts that are asked for; `keep` gets each row when it is there."""
    ask, found = asking(engine), quality.Found(keep)
    if parts.speed:
        found.add("speed", _speed(engine, parts, source, say))
    if parts.variants:
        _variants(ask, found, parts, source, say)
    for style in parts.styles if parts.clock else ():
        _clock(ask, found, source.episodes(style, parts.clock), parts.agents, say)
    if parts.sensitivity:
        for row in quality_spoil.run(engine, source.selections("unseen tools", parts.tools, parts.sensitivity), say):
            found.add("sensitivity", row)
    return {name: found.parts[name] for name in ("speed", "variants", "clock", "sensitivity")}


def _variants(ask: Ask, found: quality.Found, parts: Parts, source: drawn.Drawn, say: quality.Say) -> None:
    asked = drawn.variants("unseen tools", parts.tools, parts.variants, source.seed, source.held)
    plain: list[Said] = []
    for name in drawn.VARIANTS:
        row, said = quality.asked(ask, asked[name], parts.agents, name, say)
        plain = plain or said
        same = sum((one.name, one.arguments) == (other.name, other.arguments) for one, other in zip(plain, said))
        found.add("variants", {"variant": name, "tools": parts.tools, "same": same, **row})


def _clock(ask: Ask, found: quality.Found, plain: Sequence[Episode], agents: int, say: quality.Say) -> None:
    style = plain[0].style

    def solved(played: Sequence[Episode], what: str) -> list[bool]:
        steps = all_solved(ask, played, agents, lambda done: say(f"{style}, {what}: {done} of {len(played)}"))
        return [done == len(one.steps) for one, done in zip(played, steps)]

    without = solved(plain, "no clock")
    for role in ("user", "system"):
        clocked = solved([drawn.with_clock(one, role) for one in plain], f"a clock told by the {role}")
        lost, won = (sum(a > b for a, b in zip(one, other)) for one, other in ((without, clocked), (clocked, without)))
        row = {"style": style, "role": role, "n": len(plain), "without": sum(without), "with": sum(clocked), "lost": lost, "won": won}
        found.add("clock", row)


def _speed(engine: Engine, parts: Parts, source: drawn.Drawn, say: quality.Say) -> dict[str, Any]:
    tools, times = parts.tools, parts.speed
    cases = source.selections("unseen tools", tools, kept.PER_CATALOG * times)[:: kept.PER_CATALOG]
    calm = Sampling(max_tokens=quality_asking.ANSWER_TOKENS)
    found = [engine.generate(case.prompt, case.tools, sampling=calm, reuse="off").receipt for case in cases]
    say("speed")
    rates = [1e3 * (one.completion_tokens - 1) / one.decode_ms for one in found if one.decode_ms]
    prompt_tokens, ttft_ms = (statistics.median(getattr(one, name) for one in found) for name in ("prompt_tokens", "ttft_ms"))
    rate = statistics.median(rates) if rates else None
    return {"tools": tools, "n": times, "prompt_tokens": prompt_tokens, "ttft_ms": ttft_ms, "tokens_per_s": rate}


def tables(found: dict[str, Any]) -> list[Table]:
    """Of the parts that were asked for."""
    changed = [[row["variant"], str(row["tools"]), *quality.cells(row), str(row["same"])] for row in found["variants"]]
    clocks = [[str(row[name]) for name in ("style", "role", "n", "without", "with", "lost", "won")] for row in found["clock"]]
    speed = [
        [str(row["tools"]), *(report.number(row[name]) for name in ("prompt_tokens", "ttft_ms", "tokens_per_s"))] for row in found["speed"]
    ]
    spoilt = [
        [row["kind"], row["share"], str(row["n"]), quality.share(row, "tsa"), quality.share(row, "em")]
        + [report.number(row[name], 3) for name in ("cosine", "kl", "same")]
        for row in found["sensitivity"]
    ]
    columns = ["kind", "share", "n", "tsa", "em", "cosine", "KL", "same"]
    return [
        report.table("reuse off, one at a time", ["tools", "prompt tokens", "first token ms", "tokens/s"], speed),
        report.table("changed where it changes nothing", ["variant", "tools", "n", *quality.SHOWN, "same call"], changed),
        report.table("dialogues solved with a clock at the tail", ["style", "told by", "n", "without", "with", "lost", "won"], clocks),
        report.table("KV spoilt on purpose", columns, spoilt, "same: answers as with exact KV"),
    ]


@app.command()
def main(
    model: Annotated[str, typer.Option(help="Folder or Hugging Face id of a model; or the project's own small one.")] = "embedded",
    tools: Annotated[str, typer.Option(help="Tool counts, with commas.")] = "5,20,50",
    splits: Annotated[str, typer.Option(help="seen, held-out requests, unseen tools, unseen words.")] = "all",
    count: Annotated[int, typer.Option("--n", min=0, help="Requests per split and tool count.")] = 1000,
    episodes: Annotated[int, typer.Option(min=0, help="Dialogues of several calls, per style.")] = 480,
    styles: Annotated[str, typer.Option(help="Of hermes, langchain, langchain text, llamaindex.")] = "hermes,langchain,llamaindex",
    selection: Annotated[list[Path] | None, typer.Option(help="A file of cases (.jsonl); may be given several times.")] = None,
    tools_dir: ToolsDir = None,
    speed: Annotated[int, typer.Option(min=0, help="So many one at a time, with nothing kept: times.")] = 9,
    paired: Annotated[int, typer.Option(min=0, help="Also: so many requests with reuse and without, answers compared.")] = 0,
    sensitivity: Annotated[int, typer.Option(min=0, help="Also: so many requests with KV spoilt on purpose.")] = 0,
    variants: Annotated[int, typer.Option(min=0, help="Also: so many with tools shuffled, another system text, history in front.")] = 0,
    clock: Annotated[int, typer.Option(min=0, help="Also: so many dialogues per style with a clock at the tail and without.")] = 0,
    held: Annotated[str, typer.Option(help="Held-out part of the world: test, or validation.")] = kept.HELD,
    seed: Annotated[str, typer.Option(help="Another word draws other requests.")] = kept.SEED,
    agents: Annotated[int, typer.Option(min=1, help="Requests at a time.")] = 8,
    dtype: DtypeOption = Dtype.bfloat16,
    threads: ThreadsOption = None,
    json_file: JsonOption = None,
) -> None:
    """How well a model chooses tools, on as many cases as you like, drawn with any seed."""
    with report_errors():
        if held not in ("test", "validation"):
            raise ConfigError(f"held={held!r}: choose from 'test', 'validation'")
        named, files = names(splits) if splits != "all" else SPLITS, tuple(selection or ())
        wanted = quality.Options(numbers(tools, "tools"), named, count, episodes, names(styles), files, tools_dir, agents, paired)
        source, parts = drawn.Drawn(seed, held), Parts(variants, clock, sensitivity, speed, names(styles), agents=agents)
        with report.measuring("quality", Loading(model, None, dtype, threads), json_file) as run:
            run.keep({"held": held, "seed": seed})
            run.keep(quality.run(run.engine, wanted, source, run.say, run.keep))
            run.keep(more(run.engine, parts, source, run.say, run.keep))
            run.tables += [*quality.tables(run.found), *tables(run.found)]


if __name__ == "__main__":
    app()
