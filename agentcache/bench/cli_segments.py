"""`agentcache calibrate` and `agentcache bench segments`: options in, tables and one JSON line out. Loads torch only inside a command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import CalibrationError, ConfigError
from .given import Dtype, DtypeOption, JsonOption, ModelOption, ShapeOption, ThreadsOption, described, loaded, said_plainly

Workloads = Annotated[list[Path] | None, typer.Option("--workload", help="A recorded trace (.jsonl); may be given several times.")]
MadeUp = Annotated[int, typer.Option("--made-up", min=0, help="Also so many requests of the embedded model's generated world.")]
Tools = Annotated[int, typer.Option("--tools", min=2, help="Tools of each of these.")]
ToolsDir = Annotated[Path | None, typer.Option(help="Folder of the catalogs that traces name; default: ../tools.")]
Cases = Annotated[int, typer.Option("--cases", min=1, help="At most so many per kind of shift.")]
Families = Annotated[str, typer.Option(help="Kinds of shifts, with commas; all: see docs/segments.md.")]
Answer = Annotated[int, typer.Option("--answer", min=1, help="Tokens of the recorded answer that are compared.")]


def _cases(
    workload: list[Path] | None, tools_dir: Path | None, families: str, count: int, made_up: int, tools: int
) -> tuple[list[Any], list[str]]:
    """The shifts of these traces, and texts for a tokenizer where the model brings none."""
    from . import shifts, workloads

    wanted = shifts.FAMILIES if families == "all" else tuple(part.strip() for part in families.split(",") if part.strip())
    if unknown := [name for name in wanted if name not in shifts.FAMILIES]:
        raise ConfigError(f"families={families!r}: {unknown[0]!r} is none of {', '.join(map(repr, shifts.FAMILIES))}")
    if not workload and not made_up:
        raise ConfigError("give recorded traces with --workload, or --made-up N")
    episodes = [one for path in workload or () for one in workloads.read(path, tools_dir, episodes=max(8, 4 * count))]
    episodes += shifts.made_up(made_up, tools)
    found = shifts.cases(episodes, count, wanted)
    if not found:
        raise ConfigError(f"families={families!r}: these workloads have no such prompts")
    return found, workloads.texts(episodes)


def calibrate(
    workload: Workloads = None,
    model: ModelOption = None,
    shape: ShapeOption = None,
    kl: Annotated[float, typer.Option(min=0.0, help="Mean KL allowed, in nats per token of the answer.")] = 0.02,
    top1: Annotated[float, typer.Option(min=0.0, max=1.0, help="Share of equal first choices asked for.")] = 0.98,
    cases: Cases = 4,
    answer: Answer = 16,
    families: Families = "all",
    tools_dir: ToolsDir = None,
    made_up: MadeUp = 0,
    tools: Tools = 8,
    store: Annotated[Path | None, typer.Option(help="The store to keep it in; default: AGENTCACHE_DIR, else the user's.")] = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the calibration here instead.")] = None,
    dtype: DtypeOption = Dtype.bfloat16,
    threads: ThreadsOption = None,
    json_file: JsonOption = None,
) -> None:
    """Find the cheapest repair of repeated text that keeps a model's answers, and keep it for reuse="approximate".

    Without one that keeps the bounds nothing is written, and approximate reuse goes on refusing. Give --dtype as the engine will load it.
    """
    with said_plainly():
        from ..calibration import place
        from ..store.folder import Folder
        from . import calibrate as bench
        from . import report
        from .segments import Bench

        found_cases, texts = _cases(workload, tools_dir, families, cases, made_up, tools)
        with loaded(model, shape, dtype, threads, texts) as engine, report.Progress() as say:
            known, seen = bench.calibrate(Bench(engine, answer, model is not None), found_cases, kl, top1, say)
            found: dict[str, Any] = {
                "bench": "calibrate",
                **described(engine),
                "cases": len(found_cases),
                "kl": kl,
                "top1": top1,
                "tried": seen,
            }
            found["chosen"] = known.measured["method"] if known else None
            if known is not None:
                target = out or place(Folder.open(store).path, known.fingerprint)
                known.save(target)
                found["written"] = str(target)
        report.finish(found, [report.segments_table("settings, over all kinds of shifts", seen)], json_file)
        if known is None:
            raise CalibrationError(f"no setting keeps kl={kl!r} and top1={top1!r}: nothing is written, approximate reuse stays refused")
        typer.echo(f"chosen: {found['chosen']}; written to {found['written']}")


def segments(
    workload: Workloads = None,
    model: ModelOption = None,
    shape: ShapeOption = None,
    calibration: Annotated[Path | None, typer.Option(help="What calibrate wrote; default: the cheapest setting is found first.")] = None,
    ablations: Annotated[bool, typer.Option("--ablations/--no-ablations", help="Also halos, shares, layers, a probe, each alone.")] = True,
    off: Annotated[bool, typer.Option("--off/--no-off", help="Also time each prompt with reuse off.")] = True,
    kl: Annotated[float, typer.Option(min=0.0, help="Mean KL allowed when a calibration is to be found.")] = 0.02,
    cases: Cases = 4,
    answer: Answer = 16,
    families: Families = "all",
    tools_dir: ToolsDir = None,
    made_up: MadeUp = 0,
    tools: Tools = 8,
    dtype: DtypeOption = Dtype.bfloat16,
    threads: ThreadsOption = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE.png", help="Draw speed-up against the share of reused tokens.")] = None,
    json_file: JsonOption = None,
) -> None:
    """Text at another position: reused tokens against what could be, time against the exact prefix, and how far the answers drift."""
    with said_plainly():
        from ..calibration import Calibration
        from . import calibrate as finding
        from . import report
        from . import segments as bench

        found_cases, texts = _cases(workload, tools_dir, families, cases, made_up, tools)
        with loaded(model, shape, dtype, threads, texts) as engine, report.Progress() as say:
            playing = bench.Bench(engine, answer, model is not None)
            known = Calibration.load(calibration) if calibration else None
            if known is None:
                known = finding.calibrate(playing, found_cases, kl, 0.0, say)[0] or playing.calibration(128)
            methods = bench.variations(playing, known) if ablations else {"bare": playing.calibration(0), "ours": known}
            rows = [row.plain() for row in playing.run(found_cases, methods, off, say)]
            found: dict[str, Any] = {"bench": "segments", **described(engine), "steps": known.steps, "share": known.share, "rows": rows}
        if plot is not None:
            report.segments_plot(rows, plot)
        report.finish(found, [report.segments_table("text at another position", rows)], json_file)
