"""`agentcache calibrate` and `agentcache bench segments`: options in, tables and one JSON line out. Loads torch only inside a command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import CalibrationError, ConfigError
from .given import Dtype, DtypeOption, JsonOption, ModelOption, ShapeOption, ThreadsOption, described, loaded, said_plainly, to_write

Workloads = Annotated[list[Path] | None, typer.Option("--workload", help="A recorded trace (.jsonl); may be given several times.")]
MadeUp = Annotated[int, typer.Option("--made-up", min=0, help="Also so many requests of the embedded model's generated world.")]
Tools = Annotated[int, typer.Option("--tools", min=2, help="Tools of each of these.")]
ToolsDir = Annotated[Path | None, typer.Option(help="Folder of the catalogs that traces name; default: ../tools.")]
Cases = Annotated[int, typer.Option("--cases", min=1, help="At most so many per kind of shift.")]
Families = Annotated[str, typer.Option(help="Kinds of shifts, with commas; all: see docs/segments.md.")]
Answer = Annotated[int, typer.Option("--answer", min=1, help="Tokens of the recorded answer that are compared.")]

TAIL = 64  # a question, or the end of a long result; most of the drift of the embedded model is in it

Margin = Annotated[
    float, typer.Option(min=0.0, help="A greedy choice closer than this (nats) is made behind everything computed; 0: never.")
]
Tail = Annotated[int, typer.Option(min=0, help="At most so many tokens of the last turn are always computed; a --calibration has its own.")]
MostTokens = Annotated[int, typer.Option(min=0, help="Leave out recorded prompts of more tokens (estimated); 0: none.")]


def _names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _wanted(families: str, known: tuple[str, ...]) -> tuple[str, ...]:
    """Kinds of shifts by name; ConfigError for one that there is not."""
    wanted = known if families == "all" else _names(families)
    if unknown := [name for name in wanted if name not in known]:
        raise ConfigError(f"families={families!r}: {unknown[0]!r} is none of {', '.join(map(repr, known))}")
    return wanted


def _shifted(
    workload: list[Path] | None,
    tools_dir: Path | None,
    wanted: tuple[str, ...],
    count: int,
    made: list[Any],
    most_tokens: int,
    required: bool = True,
) -> tuple[list[Any], list[str]]:
    """The shifts of these traces and made-up episodes, and texts for a tokenizer where the model brings none."""
    from . import shifts, workloads

    if required and not workload and not made:
        raise ConfigError("give recorded traces with --workload, or --made-up N")
    episodes = [one for path in workload or () for one in workloads.read(path, tools_dir, episodes=max(8, 4 * count))]
    episodes += made
    found = shifts.cases(episodes, count, wanted, most_tokens=most_tokens) if count else []
    if required and not found:
        raise ConfigError(f"families={', '.join(wanted)!r}: these workloads have no such prompts")
    return found, workloads.texts(episodes)


def calibrate(
    workload: Workloads = None,
    model: ModelOption = None,
    shape: ShapeOption = None,
    kl: Annotated[float, typer.Option(min=0.0, help="Mean KL allowed, in nats per token of the answer.")] = 0.02,
    top1: Annotated[float, typer.Option(min=0.0, max=1.0, help="Share of equal first choices asked for.")] = 0.98,
    margin: Margin = 0.0,
    tail: Tail = TAIL,
    cases: Cases = 4,
    answer: Answer = 16,
    families: Families = "all",
    most_tokens: MostTokens = 8192,
    tools_dir: ToolsDir = None,
    made_up: MadeUp = 0,
    tools: Tools = 8,
    store: Annotated[Path | None, typer.Option(help="The store to keep it in; default: AGENTCACHE_DIR, else the user's.")] = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", callback=to_write, help="Write the calibration here instead.")] = None,
    dtype: DtypeOption = Dtype.bfloat16,
    threads: ThreadsOption = None,
    json_file: JsonOption = None,
) -> None:
    """Find the fastest repair of repeated text that keeps a model's answers, and keep it for reuse="approximate".

    Without one that keeps the bounds nothing is written, and approximate reuse goes on refusing. Give --dtype as the engine will load it.
    """
    with said_plainly():
        from ..calibration import place
        from ..store.disk.folder import Folder
        from . import calibrate as bench
        from . import report, shifts
        from .segments import Bench

        wanted, given = _wanted(families, shifts.FAMILIES), {"margin": margin, "tail": tail}
        found_cases, texts = _shifted(workload, tools_dir, wanted, cases, shifts.made_up(made_up, tools), most_tokens)
        keeps = None if out else Folder.open(store).path  # before anything is measured
        with loaded(model, shape, dtype, threads, texts) as engine, report.Progress() as say:
            known, seen = bench.calibrate(Bench(engine, answer, model is not None), found_cases, kl, top1, say, given)
            found: dict[str, Any] = {
                "bench": "calibrate",
                **described(engine),
                "cases": len(found_cases),
                "kl": kl,
                "top1": top1,
                **given,
                "tried": seen,
            }
            found["chosen"] = known.measured["method"] if known else None
            if known is not None:
                target = out if keeps is None else place(keeps, known.fingerprint)
                assert target is not None
                known.save(target)
                found["written"] = str(target)
        report.finish(found, [report.segments_table("settings, over all kinds of shifts", seen)], json_file)
        if known is None:
            within = f"kl={kl!r} and top1={top1!r} and is no slower than the exact prefix"
            raise CalibrationError(f"no setting keeps {within}: nothing is written, approximate reuse stays refused")
        typer.echo(f"chosen: {found['chosen']}; written to {found['written']}")
        if known.doubt:
            typer.secho(f"warning: {known.doubt}", err=True)


Paired = Annotated[int, typer.Option(min=0, help="Also so many made-up requests answered whole, beside their answers without reuse.")]
Episodes = Annotated[int, typer.Option(min=0, help="Also so many made-up dialogues per style, beside reuse off and the exact prefix.")]
Sampled = Annotated[int, typer.Option(min=0, help="Also so many requests drawn with 5 seeds; deviation of their keys and values.")]
RowsFile = Annotated[
    Path | None, typer.Option("--rows", metavar="FILE.jsonl", callback=to_write, help="Keep single results; an ended run goes on from it.")
]
Plot = Annotated[Path | None, typer.Option(metavar="FILE.png", callback=to_write, help="Draw speed-up against the share of reused tokens.")]
Find = Annotated[int, typer.Option(min=0, help="Also what finds text, on N episodes of each trace: windows 32, 64, 128; tau 0.6 to 0.9.")]
Halo = Annotated[int | None, typer.Option(min=0, help="This halo, and no search for a setting. Default with a --shape: 16.")]


def segments(
    workload: Workloads = None,
    model: ModelOption = None,
    shape: ShapeOption = None,
    calibration: Annotated[Path | None, typer.Option(help="What calibrate wrote; default: the fastest setting is found first.")] = None,
    halo: Halo = None,
    ablations: Annotated[bool, typer.Option("--ablations/--no-ablations", help="Also halos, shares, layers, a probe, each alone.")] = True,
    off: Annotated[bool, typer.Option("--off/--no-off", help="Also time each prompt with reuse off.")] = True,
    kl: Annotated[float, typer.Option(min=0.0, help="Mean KL allowed when a calibration is to be found.")] = 0.02,
    margin: Margin = 0.0,
    tail: Tail = TAIL,
    cases: Annotated[int, typer.Option("--cases", min=0, help="At most so many per kind of shift; 0: no such rows.")] = 4,
    repeats: Annotated[int, typer.Option(min=1, help="Askings of each case, interleaved; times are their medians.")] = 1,
    answer: Answer = 16,
    families: Families = "all",
    most_tokens: MostTokens = 8192,
    tools_dir: ToolsDir = None,
    made_up: MadeUp = 0,
    tools: Tools = 8,
    paired: Paired = 0,
    episodes: Episodes = 0,
    sampled: Sampled = 0,
    styles: Annotated[str, typer.Option(help="Of the dialogues: hermes, langchain, langchain text, llamaindex; with commas.")] = "hermes",
    agents: Annotated[int, typer.Option(min=1, help="Requests of --paired at a time.")] = 8,
    rows_file: RowsFile = None,
    find: Find = 0,
    dtype: DtypeOption = Dtype.bfloat16,
    threads: ThreadsOption = None,
    plot: Plot = None,
    json_file: JsonOption = None,
) -> None:
    """Text at another position: reused tokens against what could be, time against the exact prefix, and how far the answers drift."""
    with said_plainly():
        from . import report, segments_parts, segments_show, segments_verdicts, shifts
        from . import segments as bench

        wanted = _wanted(families, shifts.EVERY)
        options = segments_parts.Options(paired, episodes, sampled, _names(styles), tools, wanted, agents, rows_file, ablations)
        made = shifts.made_up(max(made_up, 8 if options.any and not workload else 0), tools)
        found_cases, texts = _shifted(workload, tools_dir, wanted, cases, made, most_tokens, required=not (options.any or find))
        with loaded(model, shape, dtype, threads, texts) as engine, report.Progress() as say:
            playing, given = bench.Bench(engine, answer, model is not None, repeats), {"margin": margin, "tail": tail}
            known = _setting(playing, calibration, segments_parts.begun(rows_file), halo, found_cases, made, kl, given, say, model is None)
            found: dict[str, Any] = {"bench": "segments", **described(engine), "shape": shape.value if shape else None, "repeats": repeats}
            if lacking := sorted(set(wanted) - {case.family for case in found_cases}) if cases else []:
                say(f"no recorded prompt of at most {most_tokens or 'any number of'} tokens has: {', '.join(lacking)}")
            found |= {"lacking": lacking, **_said(known), "moved": segments_verdicts.moved(engine), "rows": []}

            def keep(part: dict[str, Any]) -> None:
                found.update(part)
                found["verdicts"] = segments_verdicts.verdicts(found)
                report.save(found, json_file)

            methods = bench.variations(playing, known) if ablations else {"bare": playing.calibration(0), "ours": known}
            keep({"rows": [row.plain() for row in playing.run(found_cases, methods, off, say)]})
            if find:
                keep({"find": segments_parts.finding(workload or (), tools_dir, find, made if made_up else [], engine.tokenizer, say)})
            single = segments_parts.run(engine, playing, known, options, say, keep)
        _draw(found["rows"], single, plot)
        report.finish(found, segments_show.tables(found), json_file)


def _said(known: Any) -> dict[str, Any]:
    """What of a setting the JSON line has."""
    return {"steps": known.steps, "tail": known.tail, "share": known.share, "margin": known.margin}


def _draw(rows: list[Any], single: Any, plot: Path | None) -> None:
    from . import report, segments_show

    if plot is not None:
        report.segments_plot(rows, plot)
        if single:
            segments_show.paired_plot(single, plot.with_name(f"{plot.stem}-paired{plot.suffix}"))


def _setting(
    playing: Any,
    file: Path | None,
    begun: Any,
    halo: int | None,
    found: list[Any],
    made: list[Any],
    kl: float,
    given: dict[str, Any],
    say: Any,
    shaped: bool,
) -> Any:
    """The setting that is measured: the one given, the one begun with, a plain halo, or the fastest within the bound."""
    from dataclasses import replace

    from ..calibration import Calibration
    from . import calibrate as finding
    from . import shifts

    if file is not None:
        known = Calibration.load(file)
        return replace(known, margin=given["margin"]) if given["margin"] else known
    if halo is not None or (begun is None and shaped):  # random weights: drift says nothing, so there is nothing to look for
        return playing.calibration(16 if halo is None else halo, **given)
    if begun is not None:
        return begun
    some = [case for case in found if case.family != shifts.NOTHING] or shifts.cases(made, 1)
    return finding.calibrate(playing, some, kl, 0.0, say, given)[0] or playing.calibration(128, **given)
