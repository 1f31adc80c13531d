"""`python -m benchmarks.handed_over`: a conversation handed to another adapter, which takes its pages by consent. Times nothing.

Two LoRAs of the embedded model are trained on its generated world: a router, which says a tool's name, and a caller, which makes the call.
Each prompt is answered by one of them; then another is asked the same, once exactly and once by each repair.
"""

from __future__ import annotations

import statistics
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table

from agentcache.approximate.calibrate import search
from agentcache.approximate.calibrate.trials import Trials, nothing_kept
from agentcache.bench import report
from agentcache.bench.options import Dtype, DtypeOption, JsonOption, Loading, ThreadsOption
from agentcache.bench.quality import ANSWER_TOKENS, hermes
from agentcache.bench.quality_cases import Case, recorded
from agentcache.bench.quality_score import right
from agentcache.divergence import divergence
from agentcache.engine import Engine
from agentcache.model.loading import load
from agentcache.terminal import report_errors
from agentcache.traces import Answers
from agentcache.types import Sampling
from examples.embedded.cases import selections

PAIRS: tuple[tuple[str | None, str | None], ...] = (("caller", "router"), ("caller", None), (None, "caller"))  # who takes whose pages
REPAIRS = ("halo 0", "halo 8", "halo 32", "halo 128", "halo 8, share 0.16", "halo 8, probe 0.1")
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj"]
BATCH = 4
Row = dict[str, Any]


def train(folder: Path, engine: Engine, pairs: Sequence[tuple[list[int], list[int]]], rank: int) -> Path:
    """A folder with a LoRA that has learnt to give these answers to these prompts, as ids."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    settings = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=TARGETS, task_type="CAUSAL_LM")
    model: Any = get_peft_model(load(engine.name, dtype="float32")[0], settings)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=2e-3)
    for batch in (pairs[at : at + BATCH] for at in range(0, len(pairs), BATCH)):
        longest = max(len(prompt) + len(answer) for prompt, answer in batch)
        ids, labels = (torch.full((len(batch), longest), filler) for filler in (0, -100))
        for row, (prompt, answer) in enumerate(batch):
            ids[row, : len(prompt) + len(answer)] = torch.tensor([*prompt, *answer])
            labels[row, len(prompt) : len(prompt) + len(answer)] = torch.tensor(answer)
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    return folder


def lessons(engine: Engine, cases: Sequence[Case]) -> Mapping[str, list[tuple[list[int], list[int]]]]:
    """Prompts and answers, as ids, of the router and of the caller."""
    answers, found = Answers(engine.tokenizer), {"router": [], "caller": []}  # type: ignore[var-annotated]
    for case, episode in zip(cases, recorded(cases), strict=True):
        call = episode.calls[0]
        prompt = list(engine.renderer.render(call.prompt, call.tools).ids)
        said = f"{case.right.name if case.right else 'none'}{engine.tokenizer.eos_token}"
        found["router"].append((prompt, engine.tokenizer(said, add_special_tokens=False)["input_ids"]))
        found["caller"].append((prompt, answers.ids(call)))
    return found


def ask(engine: Engine, case: Case, space: str, adapter: str | None, reuse: Any, ids: Sequence[int] = ()) -> tuple[Any, list[torch.Tensor]]:
    """A completion, or one that is forced to say `ids`, and the logits of each token."""
    logits: list[torch.Tensor] = []
    sampling = Sampling(max_tokens=len(ids) or ANSWER_TOKENS, forced=tuple(ids), ignore_eos=bool(ids))
    asked = {"sampling": sampling, "namespace": space, "adapter": adapter, "reuse": reuse}
    done = engine.generate(list(case.prompt), case.tools, on_logits=lambda row: logits.append(row.clone()), **asked)  # type: ignore[arg-type]
    return done, logits


def compared(engine: Engine, cases: Sequence[Case], pair: tuple[str | None, str | None], say: Callable[[str], None]) -> Iterator[Row]:
    """A row for each repair of a pair: figures over all cases, beside those of exact answers."""
    adapter, lender = pair
    name = f"{adapter or 'base'} from {lender or 'base'}"
    known = search.settings(Trials(engine, adapter=adapter, lender=lender), {"tail": 64})
    ways: dict[str, Any] = {"exact": "exact", **{repair: known[repair] for repair in REPAIRS}}
    figures: dict[str, dict[str, list[float]]] = {way: {} for way in ways}
    for number, case in enumerate(cases):
        say(f"{name}: {number + 1} of {len(cases)}")
        space, exact, logits = f"{name} {number}", None, []
        ask(engine, case, space, lender, "exact")
        with nothing_kept(engine):
            for way, reuse in ways.items():
                done, seen = ask(engine, case, space, adapter, reuse)
                if exact is None:
                    exact, logits = done, seen
                said, was = hermes(done.message), hermes(exact.message)
                rows = ask(engine, case, space, adapter, reuse, exact.ids)[1] if way != "exact" else logits
                found = {
                    "prompt_tokens": done.receipt.prompt_tokens,
                    "computed_tokens": done.receipt.computed_tokens,
                    "kl": statistics.fmean(divergence(one, other) for one, other in zip(logits, rows, strict=True)),
                    "same_tool": said.name == was.name,
                    "same_ids": done.ids == exact.ids,
                    "right": right(case, said),
                }
                for key, value in found.items():
                    figures[way].setdefault(key, []).append(float(value))
        engine.store.clear(space)
    for way, found in figures.items():
        yield {"pair": name, "repair": way, "n": len(cases), **{key: statistics.fmean(values) for key, values in found.items()}}


def shown(rows: Sequence[Row]) -> Table:
    """A line for each pair and repair."""
    columns: dict[str, report.Cell] = {"pair": lambda row: str(row["pair"]), "repair": lambda row: str(row["repair"]), "n": report.of("n")}
    columns |= {"prompt": report.of("prompt_tokens"), "computed": report.of("computed_tokens"), "KL": report.of("kl", 4)}
    columns |= {"same tool": report.of("same_tool", 3), "same ids": report.of("same_ids", 3), "right": report.of("right", 3)}
    return report.drawn("an adapter takes another's pages", columns, rows, "means per request; KL: nats per token")


def main(
    count: Annotated[int, typer.Option(min=1, help="Requests that are handed over.")] = 200,
    tools: Annotated[int, typer.Option(min=2, help="Tools of each.")] = 20,
    lesson_count: Annotated[int, typer.Option("--lessons", min=1, help="Requests that each adapter learns from.")] = 800,
    rank: Annotated[int, typer.Option(min=1, help="Rank of the adapters.")] = 8,
    dtype: DtypeOption = Dtype.bfloat16,
    threads: ThreadsOption = None,
    json_file: JsonOption = None,
) -> None:
    """KL, tool choice and computed tokens of an adapter that takes another's pages, against exact answers."""
    with report_errors(), report.measuring("handed-over", Loading("embedded", None, dtype, threads), json_file) as run:
        with tempfile.TemporaryDirectory() as place, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PEFT reads what transformers deprecates
            for name, taught in lessons(run.engine, selections("seen", 8, lesson_count, seed="handed over")).items():
                run.say(f"training the {name}")
                run.engine.add_adapter(name, train(Path(place) / name, run.engine, taught, rank))
        cases, rows = selections("unseen tools", tools, count), list[Row]()
        for pair in PAIRS:
            rows += compared(run.engine, cases, pair, run.say)
            run.keep({"rows": rows})
        run.tables.append(shown(rows))


if __name__ == "__main__":
    typer.run(main)
