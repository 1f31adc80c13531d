"""`agentcache calibrate`, `bench segments` and `bench rag`: options in, a table and one JSON line out. Torch is loaded inside a command."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...bench import options
from ...errors import CalibrationError, ConfigError

if TYPE_CHECKING:
    from ...calibration import Calibration
    from ...engine import Engine

BASE = "base"  # in the place of an adapter's path
Workloads = Annotated[list[Path] | None, typer.Option("--workload", help="A recorded trace (.jsonl); may be given several times.")]
Families = Annotated[str, typer.Option(help="Kinds of shifts, with commas; all: see docs/approximate.md.")]
Answer = Annotated[int, typer.Option("--answer", min=1, help="Tokens of the recorded answer that are compared.")]
Margin = Annotated[
    float, typer.Option(min=0.0, help="A greedy choice closer than this (nats) is made after computing everything; 0: never.")
]
Tail = Annotated[int, typer.Option(min=0, help="At most so many tokens of the last turn are always computed; a --calibration has its own.")]
MostTokens = Annotated[int, typer.Option(min=0, help="Leave out recorded prompts of more tokens (estimated); 0: none.")]
MadeUp = Annotated[int, typer.Option("--made-up", min=0, help="Also so many requests of the embedded model's generated world.")]
Tools = Annotated[int, typer.Option("--tools", min=2, help="Tools of each of these.")]
Halo = Annotated[int | None, typer.Option(min=0, help="This halo, and no search for a setting. Default with a --shape: 16.")]
CalibrationFile = Annotated[Path | None, typer.Option(help="What calibrate wrote; default: the fastest setting is found first.")]
Off = Annotated[bool, typer.Option("--off/--no-off", help="Also time each prompt with reuse off.")]
AllowedKl = Annotated[float, typer.Option(min=0.0, help="Mean KL allowed, in nats per token of the answer.")]
AnsweringAdapter = Annotated[str, typer.Option("--adapter", metavar="PATH", help="The adapter that answers, or base.")]
LendingAdapter = Annotated[
    str | None,
    typer.Option("--from", metavar="PATH", help="Whose pages it takes: another adapter, or base; default: those it keeps itself."),
]
Corpus = Annotated[Path | None, typer.Option(help="Passages (.json, .jsonl): texts, or objects with title and body.")]
Top = Annotated[int, typer.Option(min=1, help="Passages of a prompt.")]
Turns = Annotated[str, typer.Option("--turns", help="Instead: which of int8, int4 keep all tool calls; --kl bounds the 99th percentile.")]
StoreFolder = Annotated[Path | None, typer.Option(help="The store to keep it in; default: AGENTCACHE_DIR, else the user's.")]
Cases = Annotated[int, typer.Option("--cases", min=1, help="At most so many per kind of shift.")]


def calibrate(
    workload: Workloads = None,
    corpus: Corpus = None,
    questions: Annotated[Path | None, typer.Option(help="Questions as of HotpotQA or MultihopRAG, over retrieved passages.")] = None,
    top: Top = 6,
    model: options.ModelOption = None,
    shape: options.ShapeOption = None,
    kl: AllowedKl = 0.02,
    top1: Annotated[float, typer.Option(min=0.0, max=1.0, help="Share of equal first choices asked for.")] = 0.98,
    decision: Annotated[float, typer.Option(min=0.0, max=1.0, help="Share of answers asked for that are equal, token by token.")] = 0.0,
    margin: Margin = 0.0,
    tail: Tail = 64,
    cases: Cases = 4,
    answer: Answer = 16,
    families: Families = "all",
    turns: Turns = "",
    most_tokens: MostTokens = 8192,
    tools_dir: options.ToolsDir = None,
    made_up: MadeUp = 0,
    tools: Tools = 8,
    adapter: AnsweringAdapter = BASE,
    lender: LendingAdapter = None,
    store: StoreFolder = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", callback=options.to_write, help="Write the calibration here instead.")] = None,
    dtype: options.DtypeOption = options.Dtype.bfloat16,
    threads: options.ThreadsOption = None,
    device: options.DeviceOption = "cpu",
    json_file: options.JsonOption = None,
) -> None:
    """Find the repair of repeated text that keeps a model's answers. The fastest one is stored for reuse="approximate".

    Without one that keeps the bounds nothing is written, and approximate reuse goes on refusing. Give --dtype as the engine will load it.
    """
    loading = options.Loading(model, shape, dtype, threads, device=device)
    if turns:
        return _calibrate_turns(turns, workload or (), loading, kl, tools_dir, (tools, made_up), store, out, json_file)
    from ...bench import quality_cases, report
    from ...store.disk.folder import Folder
    from ..calibrations import path_of
    from . import questions as files
    from . import search, shifts
    from .trials import Trials

    wanted = shifts.named(families, (*([shifts.HANDED] if lender else []), *shifts.FAMILIES, *shifts.DOCUMENTS))
    bounds, made = search.Bounds(kl, top1, decision, margin, tail), quality_cases.made_up(tools, made_up)
    asked = files.cases(files.questions(corpus, questions, top), cases, wanted) if corpus or questions else []
    found_cases, texts = shifts.gathered(workload or (), wanted, cases, most_tokens, tools_dir, made, asked)
    keeps = out or Folder.open(store).path  # before anything is measured
    with report.measuring("calibrate", loading, json_file, texts) as run:
        answering, lending = _added(run.engine, "adapter", adapter), _added(run.engine, "lender", lender or adapter)
        trials = Trials(run.engine, answer, model is not None, adapter=answering, lender=lending)
        known, seen = search.calibrate(trials, found_cases, bounds, run.say)
        found = {"cases": len(found_cases), "kl": kl, "top1": top1, "decision": decision, **bounds.given, "tried": seen}
        run.keep({**found, "chosen": known.measured["method"] if known else None, "adapters": run.engine.adapters})
        if known is not None:
            known.save(target := out or path_of(keeps, known.fingerprint, known.source))
            run.keep({"written": str(target)})
        run.tables.append(report.segments_table("settings, over all kinds of shifts", seen))
    _tell(known, run.found, f"kl={kl!r}, top1={top1!r} and decision={decision!r}")


def _tell(known: Calibration | None, found: dict[str, Any], bounds: str) -> None:
    """Tell what was chosen. CalibrationError: nothing keeps the bounds."""
    if known is None:
        said = f"no setting keeps {bounds} and is no slower than the exact prefix"
        raise CalibrationError(f"{said}: nothing is written, approximate reuse stays refused")
    typer.echo(f"chosen: {found['chosen']}; written to {found['written']}")
    if known.doubt:
        typer.secho(f"warning: {known.doubt}", err=True)


def _added(engine: Engine, role: str, source: str) -> str | None:
    """The name of an adapter, added for its role; None for the base."""
    if source == BASE:
        return None
    engine.add_adapter(role, source)
    return role


def _calibrate_turns(
    turns: str, workload: Sequence[Path], loading: options.Loading, kl: float, tools_dir: Path | None, made_up: tuple[int, int],
    store: Path | None, out: Path | None, json_file: Path | None,
) -> None:  # fmt: skip
    """Hold answers after turns in fewer bits against exact ones, and write down which precisions keep them."""
    from ... import turn_precision
    from ...bench import quality_cases, report
    from ...store.disk.folder import Folder
    from ...traces import read
    from . import shifts
    from . import turns as trial

    wanted = shifts.named(turns, trial.PRECISIONS)
    episodes = [*(one for path in workload for one in read(path, tools_dir)), *quality_cases.made_up(*made_up)]
    if not episodes:
        raise ConfigError("give recorded traces with --workload, or --made-up N")
    keeps = None if out else Folder.open(store).path  # before anything is measured
    with report.measuring("calibrate", loading, json_file, shifts.texts(episodes)) as run:
        asked = [call for episode in episodes for call in episode.calls]
        found = trial.measure(run.engine, asked, wanted, run.say)
        weights = run.engine.fingerprint.whole if run.engine.fingerprint else ""
        target = out if keeps is None else turn_precision.path_of(keeps, weights)
        assert target is not None
        passed = turn_precision.save(target, weights, kl, found)
        run.keep(
            {"kl_p99_allowed": kl, "turns": {name: asdict(one) for name, one in found.items()}, "passed": passed, "written": str(target)}
        )
        run.tables.append(report.turns_table(found, passed))
    typer.echo(f"passed: {', '.join(passed) or 'none'}; written to {target}")


def segments(
    workload: Workloads = None,
    model: options.ModelOption = None,
    shape: options.ShapeOption = None,
    calibration: CalibrationFile = None,
    halo: Halo = None,
    off: Off = True,
    kl: AllowedKl = 0.02,
    margin: Margin = 0.0,
    tail: Tail = 64,
    cases: Cases = 4,
    repeats: Annotated[int, typer.Option(min=1, help="Askings of each case, interleaved; times are their medians.")] = 1,
    answer: Answer = 16,
    families: Families = "all",
    most_tokens: MostTokens = 8192,
    tools_dir: options.ToolsDir = None,
    made_up: MadeUp = 0,
    tools: Tools = 8,
    dtype: options.DtypeOption = options.Dtype.bfloat16,
    threads: options.ThreadsOption = None,
    device: options.DeviceOption = "cpu",
    json_file: options.JsonOption = None,
) -> None:
    """Text at another position: reused tokens, times and drift. Against what could be, the exact prefix, and answers of reuse off."""
    from ...bench import quality_cases, report
    from . import search, shifts
    from .trials import Trials, rows

    wanted, bounds = shifts.named(families, shifts.EVERY), search.Bounds(kl, 0.0, margin=margin, tail=tail)
    made = quality_cases.made_up(tools, made_up)
    found_cases, texts = shifts.gathered(workload or (), wanted, cases, most_tokens, tools_dir, made)
    with report.measuring("segments", options.Loading(model, shape, dtype, threads, device=device), json_file, texts) as run:
        trials = Trials(run.engine, answer, model is not None, repeats)
        known = search.setting(trials, found_cases, bounds, run.say, calibration, halo, model is None)
        if lacking := sorted(set(wanted) - {case.family for case in found_cases}):
            run.say(f"no recorded prompt of at most {most_tokens or 'any number of'} tokens has: {', '.join(lacking)}")
        about = {"shape": shape.value if shape else None, "repeats": repeats, "lacking": lacking}
        run.keep({**about, "steps": known.steps, "tail": known.tail, "share": known.share, "margin": known.margin})
        found = rows(trials.run(found_cases, {"bare": trials.calibration(0), "ours": known}, off, run.say))
        run.keep({"rows": found})
        run.tables.append(report.segments_table("text at another position", found))


def rag(
    model: options.OwnModelOption = "embedded",
    corpus: Corpus = None,
    questions: Annotated[Path | None, typer.Option(help="Questions as of HotpotQA or MultihopRAG; by default our own.")] = None,
    top: Top = 6,
    limit: Annotated[int | None, typer.Option(min=1, help="At most so many questions.")] = None,
    orders: Annotated[int, typer.Option(min=1, help="Orders of the passages in which each question is asked, the retriever's first.")] = 1,
    halos: Annotated[str, typer.Option(help="Approximate reuse repaired by these halos, with commas; 0 is no repair.")] = "0,2,4,8",
    shares: Annotated[str, typer.Option(help="Also with such shares of the other tokens computed again, with commas.")] = "",
    calibration: Annotated[Path | None, typer.Option(help="Approximate reuse under this calibration instead.")] = None,
    tokens: Annotated[int, typer.Option(min=1, help="The longest answer.")] = 24,
    dtype: options.DtypeOption = options.Dtype.bfloat16,
    threads: options.ThreadsOption = None,
    device: options.DeviceOption = "cpu",
    json_file: options.JsonOption = None,
) -> None:
    """Questions over retrieved passages: order, reuse and repair. Computed tokens, first tokens, right answers."""
    from ...bench import report
    from ...calibration import Calibration
    from . import passages
    from . import questions as files

    asked = files.in_orders(files.questions(corpus, questions, top)[:limit], orders)
    tried = tuple(int(each) for each in options.names(halos) if each.isdecimal())
    given = None if calibration is None else Calibration.load(calibration)
    with report.measuring("rag", options.Loading(model, None, dtype, threads, device=device), json_file) as run:
        chosen = passages.ways(run.engine, tried, [float(each) for each in options.names(shares)], given)
        rows: list[passages.Row] = []
        for found in passages.run(run.engine, asked, chosen, run.say, tokens):
            rows.append(found)
            run.keep({"top": top, "rows": rows})
        run.tables.append(report.rag_table(rows))
