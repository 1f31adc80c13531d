"""`agentcache bench ...`: options in, tables and one JSON line out. Loads torch only inside a command."""

from __future__ import annotations

import statistics
import tempfile
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import ConfigError
from ..types import StoreOptions
from .cli_segments import segments
from .given import (
    Dtype,
    DtypeOption,
    JsonOption,
    ModelOption,
    Shape,
    ShapeOption,
    ThreadsOption,
    described,
    loaded,
    numbers,
    said_plainly,
    to_write,
)

app = typer.Typer(help="Measure against what is used today; each ends in one JSON line.", no_args_is_help=True, add_completion=False)
app.command()(segments)


@app.command()
def latency(
    model: ModelOption = None,
    shape: ShapeOption = None,
    tools: Annotated[str, typer.Option(help="Tool counts, with commas; empty: no such rows.")] = "5,10,20,50,100",
    tail: Annotated[int, typer.Option(min=1, help="Tokens behind the tools: user turn and generation prompt.")] = 70,
    repeats: Annotated[int, typer.Option(min=1, help="Medians of how many, interleaved.")] = 9,
    slow_repeats: Annotated[
        int | None, typer.Option(min=1, help="The same for what takes long: stock, static, off, a second process.")
    ] = None,
    decode: Annotated[int, typer.Option(min=1, help="Tokens decoded behind the first.")] = 8,
    dtype: DtypeOption = Dtype.bfloat16,
    threads: ThreadsOption = None,
    later_step: Annotated[bool, typer.Option("--later-step", help="Also: 190 new tokens behind 3-4k, against a kept cache.")] = False,
    decode_contexts: Annotated[str, typer.Option("--decode-contexts", "--contexts", help="Also: ms per token at these contexts.")] = "",
    mixed: Annotated[bool, typer.Option("--mixed", help="Also: time between tokens while another request prefills 3k.")] = False,
    agents: Annotated[int, typer.Option(min=0, help="Also: tokens per second of so many agents at once.")] = 0,
    overhead: Annotated[bool, typer.Option("--overhead", help="Also: layout, lookup and planning at 3k and 37k tokens.")] = False,
    admitting: Annotated[bool, typer.Option("--admitting", help="Also: what writing to disk costs a cold request.")] = False,
    memory: Annotated[bool, typer.Option("--memory", help="Also: peak memory against model and live KV.")] = False,
    everything: Annotated[bool, typer.Option("--all", help="All of these, at 2900 and 12000 tokens and with 8 agents.")] = False,
    second: Annotated[bool, typer.Option("--second-process/--no-second-process", help="Also ask a second process.")] = True,
    store_dir: Annotated[Path | None, typer.Option(help="Where the store of this run is made and removed; a disk, not memory.")] = None,
    json_file: JsonOption = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE.png", callback=to_write, help="Draw time to first token and speed-up.")] = None,
) -> None:
    """Time to first token and per token, ours against generate and its caches, for growing tool lists."""
    with said_plainly():
        from . import disk, report
        from . import latency as bench

        options = bench.Options(numbers(tools, "tools"), tail, repeats, repeats if slow_repeats is None else slow_repeats, decode)
        contexts = numbers(decode_contexts, "decode-contexts") or ((2900, 12000) if everything else ())
        wanted = {"memory": memory, "later_step": later_step, "mixed": mixed, "overhead": overhead, "admitting": admitting}
        chosen = [name for name, asked in wanted.items() if asked or everything]
        with (
            tempfile.TemporaryDirectory(dir=store_dir) as folder,
            loaded(model, shape, dtype, threads, store=StoreOptions(str(Path(folder) / "store"), refuse_slow=False)) as engine,
            report.Progress() as say,
        ):
            found: dict[str, Any] = {"bench": "latency", **described(engine)}

            def keep(part: dict[str, Any]) -> None:
                found.update(part)
                report.save(found, json_file)

            disk.allow_writing(engine, False)  # nothing goes to disk while something is timed
            _extras(engine, chosen, contexts, agents or (8 if everything else 0), options, say, keep)
            known = {"model": model, "shape": (shape or Shape.small).value, "dtype": dtype.value, "threads": threads}
            bench.run(engine, options, say, keep, partial(_second, options, known, folder) if second else None)
        if plot is not None:
            report.plot(found["rows"], plot, f"{found['model']['name']}, {found['model']['dtype']}, {found['machine']['threads']} threads")
        report.finish(found, [*report.latency_tables(found["rows"]), *report.extra_tables(found)], json_file)


def _second(options: Any, known: dict[str, Any], folder: str, scene: Any) -> dict[str, Any]:
    """The group's hit in other processes, each just started; medians over them. The tokens must be those of this one."""
    from . import disk, ours

    turns = (1, min(2, options.repeats))
    spec = {"store": str(Path(folder) / "store"), "namespace": scene.namespace, "tools": len(scene.tools), "tail": options.tail}
    scene.engine.store.clear(scene.namespace)  # what is mapped here cannot be dropped from the page cache there
    found = [disk.second_process({**known, **spec, "turns": turns, "new": 2}) for _ in range(options.slow_repeats)]
    for kind, turn in zip(("cold", "warm"), turns):
        own, _ = ours.ask(scene.engine, scene.turns[turn], scene.tools, 2, namespace=scene.namespace)
        for each in found:
            assert list(own.ids) == list(each[kind].pop("ids")), f"the second process drew other tokens ({kind})"
    return {kind: {name: statistics.median(each[kind][name] for each in found) for name in found[0][kind]} for kind in ("cold", "warm")}


def _extras(engine: Any, chosen: list[str], contexts: tuple[int, ...], agents: int, options: Any, say: Any, keep: Any) -> None:
    """The measurements on demand, each kept when it is done; memory first, while the process is still small."""
    from . import disk, extras

    ways: dict[str, Any] = {
        "memory": lambda: extras.memory(engine),
        "later_step": lambda: extras.later_step(engine, options.repeats),
        "mixed": lambda: extras.mixed(engine),
        "overhead": extras.overhead,
        "admitting": lambda: disk.admitting(engine, options.repeats),
    }
    for name, way in ways.items():
        if name in chosen:
            say(name)
            keep({name: way()})
    behind: list[Any] = []
    for context in contexts:
        say(f"decoding behind {context} tokens")
        behind.append(extras.decode_at(engine, context, options.decode, options.repeats))
        keep({"decode": behind})
    if agents:
        say(f"{agents} agents")
        keep({"agents": extras.agents(engine, agents, max(72, 3 * options.decode), min(5, options.repeats))})


@app.command()
def react(
    workload: Annotated[list[Path] | None, typer.Option(help="A recorded trace (.jsonl); may be given several times.")] = None,
    tools_dir: Annotated[Path | None, typer.Option(help="Folder of the catalogs that traces name; default: ../tools.")] = None,
    episodes: Annotated[int | None, typer.Option(min=1, help="At most so many of each trace.")] = None,
    calls: Annotated[int | None, typer.Option(min=1, help="At most so many model calls of each episode.")] = None,
    decode: Annotated[int, typer.Option(min=1, help="Tokens decoded and timed at each call before the recorded answer is forced.")] = 1,
    off: Annotated[bool, typer.Option("--off/--no-off", help="Also time each call with reuse off.")] = True,
    stock: Annotated[bool, typer.Option("--stock/--no-stock", help="Also time each call with stock generate (slow).")] = False,
    model: ModelOption = None,
    shape: ShapeOption = None,
    dtype: DtypeOption = Dtype.bfloat16,
    threads: ThreadsOption = None,
    json_file: JsonOption = None,
) -> None:
    """Replay recorded agent episodes: tokens computed against tokens new, and the time of every call."""
    with said_plainly():
        from . import react as bench
        from . import report, workloads

        if not workload:
            raise ConfigError("workload=None: name a recorded trace with --workload")
        families = {path.stem: list(workloads.read(path, tools_dir, episodes=episodes, calls=calls)) for path in workload}
        texts = [text for read in families.values() for text in workloads.texts(read)]
        with loaded(model, shape, dtype, threads, texts) as engine, report.Progress() as say:
            found = {"bench": "react", **described(engine)}
            found |= bench.run(engine, families, decode=decode, off=off, stock=stock, say=say)
        report.finish(found, [report.react_table(found["families"])], json_file)


@app.command()
def store(
    shape: Annotated[Shape, typer.Option(help="A known shape: how large its pages are.")] = Shape.qwen3_06b,
    tokens: Annotated[int, typer.Option(min=1, help="How long the stored prompt is.")] = 2850,
    repeats: Annotated[int, typer.Option(min=1, help="Medians of how many, interleaved.")] = 5,
    dtype: DtypeOption = Dtype.bfloat16,
    entries: Annotated[int, typer.Option(min=0, help="Also: opening and lookups with so many pages in the index.")] = 0,
    store_dir: Annotated[Path | None, typer.Option(help="Where the files are made and removed; a disk, not memory.")] = None,
    json_file: JsonOption = None,
) -> None:
    """Pages to disk and back: writing, reading and verifying against raw files, safetensors and torch.load."""
    with said_plainly():
        from . import report
        from . import store as bench
        from .load import machine, versions

        with tempfile.TemporaryDirectory(dir=store_dir) as folder, report.Progress() as say:
            about = {"bench": "store", "machine": machine(), "versions": versions(("torch", "safetensors", "blake3"))}
            found: dict[str, Any] = {**about, "shape": shape.value, "dtype": dtype.value}
            found |= bench.run(shape.value, dtype.value, tokens, repeats, Path(folder), say)
            tables = [report.store_table(found)]
            if entries:
                found["index"] = many = bench.lookups(entries, repeats, Path(folder), say)
                tables.append(report.index_table(many))
        report.finish(found, tables, json_file)


@app.command()
def drift(
    model: ModelOption = None,
    shape: ShapeOption = None,
    tokens: Annotated[int, typer.Option(min=1, help="How long the stored prompt is.")] = 1024,
    tail: Annotated[int, typer.Option(min=1, help="Tokens behind it at which answers are compared.")] = 64,
    dtype: DtypeOption = Dtype.bfloat16,
    threads: ThreadsOption = None,
    json_file: JsonOption = None,
) -> None:
    """What int8 and int4 storage does to a model's next tokens: KL and top-1 agreement against exact pages, and bytes."""
    with said_plainly():
        from . import drift as bench
        from . import report

        with loaded(model, shape, dtype, threads) as engine, report.Progress() as say:
            found: dict[str, Any] = {"bench": "drift", **described(engine), **bench.run(engine, tokens, tail, say)}
        report.finish(found, [report.drift_table(found)], json_file)


@app.command()
def quality(
    model: Annotated[str, typer.Option(help="Folder or Hugging Face id of a model; or the project's own small one.")] = "embedded",
    tools: Annotated[str, typer.Option(help="Tool counts, with commas.")] = "5,20,50",
    splits: Annotated[str, typer.Option(help="seen, held-out requests, unseen tools, unseen words.")] = "all",
    count: Annotated[int, typer.Option("--n", min=0, help="Requests per split and tool count; 1000 for figures to publish.")] = 200,
    episodes: Annotated[int, typer.Option(min=0, help="Dialogues of several calls, per style.")] = 100,
    styles: Annotated[str, typer.Option(help="Of hermes, langchain, langchain text, llamaindex.")] = "hermes,langchain,llamaindex",
    selection: Annotated[list[Path] | None, typer.Option(help="A file of cases (.jsonl); may be given several times.")] = None,
    tools_dir: Annotated[Path | None, typer.Option(help="Folder of the catalogs that cases name; default: ../tools.")] = None,
    sensitivity: Annotated[int, typer.Option(min=0, help="Also: so many requests with KV spoilt on purpose.")] = 0,
    speed: Annotated[int, typer.Option(min=0, help="So many one at a time, with nothing kept: times.")] = 9,
    variants: Annotated[int, typer.Option(min=0, help="Also: so many with tools shuffled, another system text, history in front.")] = 0,
    paired: Annotated[int, typer.Option(min=0, help="Also: so many requests with reuse and without, answers compared.")] = 0,
    clock: Annotated[int, typer.Option(min=0, help="Also: so many dialogues per style with a clock at the tail and without.")] = 0,
    held: Annotated[str, typer.Option(help="Held-out part of the world: test, or validation.")] = "test",
    seed: Annotated[str, typer.Option(help="Another word draws other requests.")] = "bench",
    agents: Annotated[int, typer.Option(min=1, help="Requests at a time.")] = 8,
    dtype: DtypeOption = Dtype.bfloat16,
    threads: ThreadsOption = None,
    json_file: JsonOption = None,
) -> None:
    """How well a model chooses tools and fills arguments, by greedy decoding: unseen tools and words, episodes, intervals, baselines."""
    with said_plainly():
        from . import quality as bench
        from . import report

        named = tuple(part.strip() for part in splits.split(",")) if splits != "all" else bench.SPLITS
        chosen = tuple(part.strip() for part in styles.split(",") if part.strip())
        wanted = bench.Options(
            numbers(tools, "tools"),
            named,
            count,
            episodes,
            styles=chosen,
            selection=tuple(selection or ()),
            tools_dir=tools_dir,
            held=held,
            seed=seed,
            agents=agents,
            sensitivity=sensitivity,
            speed=speed,
            variants=variants,
            paired=paired,
            clock=clock,
        )
        with loaded(model, None, dtype, threads) as engine, report.Progress() as say:
            found: dict[str, Any] = {"bench": "quality", **described(engine)}

            def keep(part: dict[str, Any]) -> None:
                found.update(part)
                report.save(found, json_file)

            found |= bench.run(engine, wanted, say, keep)
        report.finish(found, bench.tables(found), json_file)
