"""`agentcache bench segments`: options in, a table and one JSON line out. Loads torch only inside the command."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from .given import (
    AllowedKl,
    Answer,
    CalibrationFile,
    Dtype,
    DtypeOption,
    Families,
    Halo,
    JsonOption,
    MadeUp,
    Margin,
    ModelOption,
    MostTokens,
    Off,
    ShapeOption,
    Tail,
    ThreadsOption,
    Tools,
    ToolsDir,
    Workloads,
    described,
    loaded,
    report_errors,
)


def segments(
    workload: Workloads = None,
    model: ModelOption = None,
    shape: ShapeOption = None,
    calibration: CalibrationFile = None,
    halo: Halo = None,
    off: Off = True,
    kl: AllowedKl = 0.02,
    margin: Margin = 0.0,
    tail: Tail = 64,
    cases: Annotated[int, typer.Option("--cases", min=1, help="At most so many per kind of shift.")] = 4,
    repeats: Annotated[int, typer.Option(min=1, help="Askings of each case, interleaved; times are their medians.")] = 1,
    answer: Answer = 16,
    families: Families = "all",
    most_tokens: MostTokens = 8192,
    tools_dir: ToolsDir = None,
    made_up: MadeUp = 0,
    tools: Tools = 8,
    dtype: DtypeOption = Dtype.bfloat16,
    threads: ThreadsOption = None,
    json_file: JsonOption = None,
) -> None:
    """Text at another position: reused tokens against what could be, time against the exact prefix, and how far the answers drift."""
    with report_errors():
        from ..calibrate import search, shifts
        from ..calibrate.trials import Trials
        from . import quality_cases, report

        wanted, bounds = shifts.named(families, shifts.EVERY), search.Bounds(kl, 0.0, margin, tail)
        made = quality_cases.made_up(tools, made_up)
        found_cases, texts = shifts.Wanted(workload or (), wanted, cases, most_tokens, tools_dir, made).required()
        with loaded(model, shape, dtype, threads, texts) as engine, report.Progress() as say:
            trials = Trials(engine, answer, model is not None, repeats)
            known = search.setting(trials, found_cases, bounds, say, calibration, halo, model is None)
            found: dict[str, Any] = {"bench": "segments", **described(engine), "shape": shape.value if shape else None, "repeats": repeats}
            if lacking := sorted(set(wanted) - {case.family for case in found_cases}):
                say(f"no recorded prompt of at most {most_tokens or 'any number of'} tokens has: {', '.join(lacking)}")
            found |= {"lacking": lacking, "steps": known.steps, "tail": known.tail, "share": known.share, "margin": known.margin}
            rows = trials.run(found_cases, {"bare": trials.calibration(0), "ours": known}, off, say)
            found["rows"] = [row.plain() for row in rows]
        report.finish(found, [report.segments_table("text at another position", found["rows"])], json_file)
