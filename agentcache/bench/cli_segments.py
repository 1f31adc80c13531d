"""`agentcache bench segments`: options in, a table and one JSON line out. Loads torch only inside the command."""

from __future__ import annotations

from typing import Annotated

import typer

from ..cli_print import report_errors
from .options import (
    AllowedKl,
    Answer,
    CalibrationFile,
    Dtype,
    DtypeOption,
    Families,
    Halo,
    JsonOption,
    Loading,
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
        from ..approximate.calibrate import search, shifts
        from ..approximate.calibrate import trials as asking
        from . import quality_cases, report

        wanted, bounds = shifts.named(families, shifts.EVERY), search.Bounds(kl, 0.0, margin, tail)
        made = quality_cases.made_up(tools, made_up)
        found_cases, texts = shifts.Wanted(workload or (), wanted, cases, most_tokens, tools_dir, made).required()
        with report.measuring("segments", Loading(model, shape, dtype, threads), json_file, texts) as run:
            trials = asking.Trials(run.engine, answer, model is not None, repeats)
            known = search.setting(trials, found_cases, bounds, run.say, calibration, halo, model is None)
            if lacking := sorted(set(wanted) - {case.family for case in found_cases}):
                run.say(f"no recorded prompt of at most {most_tokens or 'any number of'} tokens has: {', '.join(lacking)}")
            about = {"shape": shape.value if shape else None, "repeats": repeats, "lacking": lacking}
            run.keep({**about, "steps": known.steps, "tail": known.tail, "share": known.share, "margin": known.margin})
            rows = asking.rows(trials.run(found_cases, {"bare": trials.calibration(0), "ours": known}, off, run.say))
            run.keep({"rows": rows})
            run.tables.append(report.segments_table("text at another position", rows))
