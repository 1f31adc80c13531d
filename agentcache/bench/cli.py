"""`agentcache bench ...`: options in, tables and one JSON line out. Loads torch only inside a command."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack, closing
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import ConfigError
from ..terminal import Verbs
from .options import (
    DeviceOption,
    Dtype,
    DtypeOption,
    IsaOption,
    JsonOption,
    Loading,
    ModelOption,
    OwnModelOption,
    RepeatsOption,
    Shape,
    ShapeOption,
    TailOption,
    ThreadsOption,
    ToolsDir,
    WeightsOption,
    names,
    numbers,
    to_write,
    write,
)

if TYPE_CHECKING:
    from ..traces import Episode

app = typer.Typer(cls=Verbs, help="Measure a model of yours; each ends in one JSON line.", no_args_is_help=True, add_completion=False)


@app.command()
def latency(
    model: ModelOption = None,
    shape: ShapeOption = None,
    tools: Annotated[str, typer.Option(help="Tool counts, with commas.")] = "5,10,20,50,100",
    tail: TailOption = 70,
    repeats: RepeatsOption = 9,
    slow_repeats: Annotated[int | None, typer.Option(min=1, help="The same for what takes long: stock, static, off.")] = None,
    decode: Annotated[int, typer.Option(min=1, help="Tokens decoded after the first.")] = 8,
    dtype: DtypeOption = Dtype.bfloat16,
    stock_dtype: Annotated[
        Dtype | None, typer.Option(help="Type of the weights for stock transformers; by default float32 where it emulates 16-bit products.")
    ] = None,
    bits: Annotated[int | None, typer.Option(help="Quantize a --model's weights with bitsandbytes: 4 (NF4) or 8 (int8).")] = None,
    weights: WeightsOption = None,
    device: DeviceOption = "cpu",
    threads: ThreadsOption = None,
    isa: IsaOption = None,
    with_llama_cpp: Annotated[
        bool, typer.Option("--llama-cpp", help="Also time llama.cpp on the same weights, BF16 and Q8_0, its prefix resident.")
    ] = False,
    json_file: JsonOption = None,
) -> None:
    """Time to first token and per token, for growing tool lists. Ours against generate and its caches."""
    import torch

    from . import baselines, llama_cpp, report
    from . import latency as bench

    options = bench.Options(numbers(tools, "tools"), tail, repeats, repeats if slow_repeats is None else slow_repeats, decode)
    loading = Loading(model, shape, dtype, threads, bits, weights, device)
    rival = getattr(torch, stock_dtype.value) if stock_dtype else None
    with report.measuring("latency", loading, json_file) as run:
        with ExitStack() as stack:
            others = stack.enter_context(llama_cpp.started(run.engine.model, run.keep)) if with_llama_cpp else {}
            bench.run(run.engine, options, run.say, run.keep, baselines.rival(run.engine.model, rival), others)
        run.tables += report.latency_tables(run.found["rows"])


@app.command()
def react(
    workload: Annotated[list[Path] | None, typer.Option(help="A recorded trace (.jsonl); may be given several times.")] = None,
    tools_dir: ToolsDir = None,
    episodes: Annotated[int | None, typer.Option(min=1, help="At most so many of each trace.")] = None,
    calls: Annotated[int | None, typer.Option(min=1, help="At most so many model calls of each episode.")] = None,
    off: Annotated[bool, typer.Option("--off/--no-off", help="Also time each call with reuse off.")] = True,
    stock: Annotated[bool, typer.Option("--stock/--no-stock", help="Also time each call with stock generate (slow).")] = False,
    model: ModelOption = None,
    shape: ShapeOption = None,
    dtype: DtypeOption = Dtype.bfloat16,
    device: DeviceOption = "cpu",
    threads: ThreadsOption = None,
    isa: IsaOption = None,
    json_file: JsonOption = None,
) -> None:
    """Replay recorded agent episodes: computed tokens and times. Tokens computed of those sent, and the time of every call."""
    from .. import traces
    from . import react as bench
    from . import report

    if not workload:
        raise ConfigError("workload=None: name a recorded trace with --workload; `agentcache.Recorder` writes one of your own agent")
    families = _recorded(workload, tools_dir, episodes, calls)
    texts = [text for read in families.values() for text in traces.texts(read)]
    with report.measuring("react", Loading(model, shape, dtype, threads, device=device), json_file, texts) as run:
        run.keep(bench.run(run.engine, families, run.say, off=off, stock=stock))
        run.tables.append(report.react_table(run.found["families"]))


def _recorded(workload: list[Path], tools_dir: Path | None, episodes: int | None, calls: int | None) -> dict[str, list[Episode]]:
    """The episodes of traces, by the names of their files. ConfigError: a trace has none."""
    from .. import traces

    found: dict[str, list[Episode]] = {}
    for path in workload:
        read = list(traces.read(path, tools_dir, episodes=episodes, calls=calls))
        if not any(one.calls for one in read):
            raise ConfigError(f"--workload={str(path)!r}: no recorded call with its answer is in it; `agentcache.Recorder` writes some")
        found.setdefault(path.stem, []).extend(read)
    return found


@app.command()
def serve(
    workload: Annotated[list[Path] | None, typer.Option(help="A recorded trace (.jsonl); by default one prompt again and again.")] = None,
    tools_dir: ToolsDir = None,
    agents: Annotated[str, typer.Option(help="How many at once, with commas.")] = "1,8,32",
    tools: Annotated[int, typer.Option(min=0, help="Made-up tools of the repeated prompt.")] = 20,
    calls: Annotated[int, typer.Option(min=1, help="Calls of each agent; of a trace, at most so many of an episode.")] = 8,
    episodes: Annotated[int | None, typer.Option(min=1, help="At most so many of each trace.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer.")] = 16,
    model: OwnModelOption = "embedded",
    transformers: Annotated[
        str | None, typer.Option(metavar="DTYPE", help="Also ask transformers serve, with weights of this type: auto, bfloat16, float32.")
    ] = None,
    json_file: JsonOption = None,
) -> None:
    """Many agents at one server: first tokens and tokens per second. Over HTTP, in process, and from transformers serve."""
    try:
        from . import serve as bench

        for needed in ("fastapi", "prometheus_client", "uvicorn"):  # by the server, which starts after the first measurement
            import_module(needed)
    except ImportError as error:
        raise ConfigError(f"bench serve: {error.name!r} is missing: pip install 'agentcache-llm[client,server]'") from error
    from . import report
    from .environment import machine, versions

    wanted = bench.Options(numbers(agents, "agents"), max_tokens, transformers)
    recorded = [one for read in _recorded(workload or [], tools_dir, episodes, calls).values() for one in read]
    with report.Progress() as say:
        run = report.Run(None, say, {"bench": "serve", "machine": machine(), "versions": versions(), "model": model}, json_file)
        bench.run(model, recorded or bench.repeated(tools, calls, max(wanted.agents)), wanted, say, run.keep)
    report.finish(run.found, [report.serve_table(run.found["rows"])], json_file)


@app.command()
def store(
    shape: Annotated[Shape, typer.Option(help="A known shape: how large its pages are.")] = Shape.qwen3_06b,
    tokens: Annotated[int, typer.Option(min=1, help="How long the stored prompt is.")] = 2850,
    repeats: RepeatsOption = 5,
    dtype: DtypeOption = Dtype.bfloat16,
    store_dir: Annotated[Path | None, typer.Option(help="Where the files are made and removed; a disk, not memory.")] = None,
    json_file: JsonOption = None,
) -> None:
    """Pages to disk and back, against raw files. Writing, reading and verifying."""
    from . import report
    from . import store as bench
    from .environment import machine, versions

    with tempfile.TemporaryDirectory(dir=store_dir) as folder, report.Progress() as say:
        about = {"bench": "store", "machine": machine(), "versions": versions(("torch", "blake3"))}
        found: dict[str, Any] = {**about, "shape": shape.value, "dtype": dtype.value}
        with closing(bench.Files(bench.spec_of(shape.value, dtype.value), tokens, Path(folder))) as files:
            found |= bench.run(files, repeats, say)
    report.finish(found, [report.store_table(found)], json_file)


@app.command()
def adapters(
    model: ModelOption = None,
    shape: ShapeOption = None,
    tools: Annotated[int, typer.Option(min=1, help="Tools before the turn.")] = 20,
    tail: TailOption = 70,
    rank: Annotated[int, typer.Option(min=1, help="Rank of the adapters.")] = 16,
    repeats: RepeatsOption = 3,
    count: Annotated[int, typer.Option("--adapters", min=1, help="Adapters that take turns on one tool group.")] = 8,
    steps: Annotated[int, typer.Option(min=1, help="Requests of each of them.")] = 5,
    dtype: DtypeOption = Dtype.bfloat16,
    device: DeviceOption = "cpu",
    threads: ThreadsOption = None,
    isa: IsaOption = None,
    json_file: JsonOption = None,
) -> None:
    """Change of adapter at a long prompt. First tokens and computed tokens, against a base hit and a cold prompt."""
    from . import adapters as bench
    from . import report

    options = bench.Options(tools, tail, rank, repeats, count, steps)
    with report.measuring("adapters", Loading(model, shape, dtype, threads, device=device), json_file) as run:
        bench.run(run.engine, options, run.say, run.keep)
        run.tables.append(report.adapters_table(run.found["rows"]))


@app.command()
def families(
    only: Annotated[str | None, typer.Option(help="Names of families, with commas; by default all.")] = None,
    dtype: DtypeOption = Dtype.float32,
    device: DeviceOption = "cpu",
    threads: ThreadsOption = None,
    markdown: Annotated[
        Path | None, typer.Option(metavar="FILE", callback=to_write, help="Also write a table for docs, like outcomes in one line.")
    ] = None,
    json_file: JsonOption = None,
) -> None:
    """Reuse of every known family on a tiny random model. Tool group, next step, second process, against reuse off."""
    import torch

    from ..model.loading import place
    from . import families as known
    from . import family_reuse as bench
    from . import report
    from .environment import machine, versions

    if threads is not None:
        torch.set_num_threads(threads)
    like = torch.empty(0, dtype=getattr(torch, dtype.value), device=place(device))
    about = {"machine": {**machine(like.device), "threads": torch.get_num_threads()}, "versions": versions(), "dtype": dtype.value}
    with report.Progress() as say:
        run = report.Run(None, say, {"bench": "families", **about}, json_file)
        bench.run(names(only) if only else tuple(known.TINY), like, say, run.keep)
    report.finish(run.found, [report.families_table(run.found)], json_file)
    if markdown is not None:
        write(markdown, bench.markdown(run.found["rows"]))


@app.command()
def quality(
    model: OwnModelOption = "embedded",
    tools: Annotated[str, typer.Option(help="Tool counts, with commas.")] = "5,20,50",
    splits: Annotated[str, typer.Option(help="seen, held-out requests, unseen tools, unseen words.")] = "all",
    count: Annotated[int, typer.Option("--n", min=0, help="Requests per split and tool count.")] = 200,
    episodes: Annotated[int, typer.Option(min=0, help="Dialogues of several calls, per style.")] = 100,
    styles: Annotated[str, typer.Option(help="Of hermes, langchain, langchain text, llamaindex.")] = "hermes,langchain,llamaindex",
    selection: Annotated[list[Path] | None, typer.Option(help="A file of cases (.jsonl); may be given several times.")] = None,
    tools_dir: ToolsDir = None,
    agents: Annotated[int, typer.Option(min=1, help="Requests at a time.")] = 8,
    dtype: DtypeOption = Dtype.bfloat16,
    weights: WeightsOption = None,
    device: DeviceOption = "cpu",
    threads: ThreadsOption = None,
    json_file: JsonOption = None,
) -> None:
    """Choice of tools and their arguments, by greedy decoding. Unseen tools and words, episodes, intervals."""
    from . import quality as bench
    from . import report

    named = names(splits) if splits != "all" else bench.SPLITS
    files = tuple(selection or ())
    wanted = bench.Options(numbers(tools, "tools"), named, count, episodes, names(styles), files, tools_dir, agents)
    with report.measuring("quality", Loading(model, None, dtype, threads, quantized=weights, device=device), json_file) as run:
        bench.run(run.engine, wanted, run.say, run.keep)
        run.tables += bench.tables(run.found)
