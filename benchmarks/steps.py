"""`python -m benchmarks.steps`: what an agent's later steps cost beside their prefill. Each part is a measurement of steps_parts.py."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from agentcache.bench import baselines, report
from agentcache.bench.options import (
    Dtype,
    DtypeOption,
    JsonOption,
    Loading,
    ModelOption,
    RepeatsOption,
    ShapeOption,
    ThreadsOption,
    numbers,
)
from agentcache.bench.report import number, table
from agentcache.terminal import report_errors
from agentcache.types import StoreOptions

from . import disk, steps_parts

app = typer.Typer(add_completion=False)


def tables(found: Mapping[str, Any]) -> list[Table]:
    """What was measured on demand; nothing for what was not."""
    made = []
    if step := found.get("later_step"):
        cells = [
            number(step["prompt_tokens"]),
            number(step["new_tokens"]),
            number(step["ms"]),
            number(step["kept_ms"]),
            f"{step['ratio']:.2f}",
        ]
        made.append(table("a later step, ms to the first token", ["prompt", "new", "ours", "kept", "ours/kept"], [cells]))
    if decode := found.get("decode"):
        lines = [
            [
                number(d["context_tokens"]),
                *(number(d[key], 1) for key in ("stock_ms", "static_ms", "ms", "stock_over_ours", "static_over_ours")),
            ]
            for d in decode
        ]
        made.append(table("decoding, ms per token", ["context", "stock", "static", "ours", "stock/ours", "static/ours"], lines))
    if mixed := found.get("mixed"):
        gaps = [number(mixed[f"gap_{key}_ms"], 1) for key in ("alone", "median", "p95")]
        cells = [number(mixed["prefill_tokens"]), f"{mixed['prefill_over_alone']:.2f}", *gaps]
        title = "ms between tokens while another request prefills"
        made.append(table(title, ["prefill", "of its time alone", "alone", "median", "p95"], [cells]))
    if rounds := found.get("rounds"):
        lines = [[number(row["rows"]), number(row.get("alone_ms", 0.0), 1), number(row["with_token_ms"], 1)] for row in rounds]
        made.append(table("ms of a round with rows of a prompt", ["rows", "alone", "and a token of another"], lines))
    if agents := found.get("agents"):
        cells = [number(agents["agents"]), number(agents["one_per_s"], 1), number(agents["all_per_s"], 1), f"{agents['ratio']:.2f}x"]
        made.append(table("agents decoding at once, tokens per second", ["agents", "one", "all", "ratio"], [cells]))
    if admitting := found.get("admitting"):
        cells = [*(number(admitting[key]) for key in ("prompt_tokens", "without_ms", "ms")), f"{admitting['ratio']:.3f}"]
        title = "a cold request and its answer, ms, without and with writing its pages to disk"
        made.append(table(title, ["prompt", "without", "with", "with/without"], [cells]))
    if overhead := found.get("overhead"):
        lines = [
            [number(o["prompt_tokens"]), *(number(o[key], 2) for key in ("layout_ms", "match_ms", "ms", "worst_ms"))]
            for o in overhead.values()
        ]
        made.append(table("around the forwards, ms per step", ["prompt", "layout", "match", "both", "worst"], lines))
    if kept := found.get("checkpoints"):
        sizes = [number(kept[f"{name}_bytes"] / 1e6, 1) for name in ("group", "memory", "disk")]
        cells = [number(kept["prompt_tokens"]), *sizes, *(f"{kept[f'{name}_share']:.0%}" for name in ("memory", "disk"))]
        title = "checkpoints of an agent of 20 steps, MB, and their share of all its bytes"
        made.append(table(title, ["prompt", "group", "memory", "disk", "of memory", "of disk"], [cells]))
    if memory := found.get("memory"):
        names = ("before", "live_kv", "chunk_buffer", "bound", "peak")
        cells = [*(number(memory[f"{name}_bytes"] / 1e6) for name in names), "yes" if memory["within"] else "NO"]
        title = "peak resident memory, MB: before + live KV x 1.15 + one chunk buffer = bound"
        made.append(table(title, ["before", "live KV", "chunk buffer", "bound", "peak", "within"], [cells]))
    return made


@app.command()
def steps(
    model: ModelOption = None,
    shape: ShapeOption = None,
    repeats: RepeatsOption = 9,
    decode: Annotated[int, typer.Option(min=1, help="Tokens decoded.")] = 8,
    dtype: DtypeOption = Dtype.bfloat16,
    threads: ThreadsOption = None,
    later_step: Annotated[bool, typer.Option("--later-step", help="190 new tokens behind 3-4k, against a kept cache.")] = False,
    decode_contexts: Annotated[str, typer.Option("--decode-contexts", "--contexts", help="ms per token at these contexts.")] = "",
    mixed: Annotated[bool, typer.Option("--mixed", help="Time between tokens while another request prefills 3k.")] = False,
    rounds: Annotated[bool, typer.Option("--rounds", help="Rounds with rows of a prompt, with and without a decoded token.")] = False,
    agents: Annotated[int, typer.Option(min=0, help="Tokens per second of so many agents at once.")] = 0,
    overhead: Annotated[bool, typer.Option("--overhead", help="Layout, lookup and planning at 3k and 37k tokens.")] = False,
    admitting: Annotated[bool, typer.Option("--admitting", help="What writing to disk costs a cold request.")] = False,
    checkpoints: Annotated[bool, typer.Option("--checkpoints", help="Bytes of checkpoints after 20 steps.")] = False,
    memory: Annotated[bool, typer.Option("--memory", help="Peak memory against model and live KV.")] = False,
    everything: Annotated[bool, typer.Option("--all", help="All of these, at 2900 and 12000 tokens and with 8 agents.")] = False,
    store_dir: Annotated[Path | None, typer.Option(help="Where the store of this run is made and removed; a disk, not memory.")] = None,
    json_file: JsonOption = None,
) -> None:
    """Later steps, decoding, packing, what stands around the forwards, and memory."""
    with report_errors():
        contexts = numbers(decode_contexts, "decode-contexts") or ((2900, 12000) if everything else ())
        wanted = {
            "memory": memory,
            "later_step": later_step,
            "mixed": mixed,
            "rounds": rounds,
            "overhead": overhead,
            "admitting": admitting,
        }
        wanted["checkpoints"] = checkpoints
        loading = Loading(model, shape, dtype, threads)
        with (
            tempfile.TemporaryDirectory(dir=store_dir) as folder,
            report.measuring("steps", loading, json_file, store=StoreOptions(str(Path(folder) / "store"), refuse_slow=False)) as run,
        ):
            disk.allow_writing(run.engine, False)  # nothing goes to disk while something is timed
            for name, part in _parts(run.engine, repeats).items():  # memory first, while the process is still small
                if wanted[name] or everything:
                    run.say(name)
                    run.keep({name: part()})
            stock = baselines.rival(run.engine.model)
            for context in contexts:
                run.say(f"decoding behind {context} tokens")
                row = steps_parts.decode_at(run.engine, context, decode, repeats, stock)
                run.keep({"decode": [*run.found.get("decode", ()), row]})
            if count := agents or (8 if everything else 0):
                run.say(f"{count} agents")
                run.keep({"agents": steps_parts.agents(run.engine, count, max(72, 3 * decode), min(5, repeats))})
            run.tables += tables(run.found)


def _parts(engine: Any, repeats: int) -> dict[str, Callable[[], Any]]:
    return {
        "memory": lambda: steps_parts.memory(engine),
        "later_step": lambda: steps_parts.later_step(engine, repeats),
        "mixed": lambda: steps_parts.mixed(engine),
        "rounds": lambda: steps_parts.rounds(engine, repeats),
        "overhead": steps_parts.overhead,
        "admitting": lambda: steps_parts.admitting(engine, repeats),
        "checkpoints": lambda: steps_parts.checkpoints(engine),
    }


if __name__ == "__main__":
    app()
