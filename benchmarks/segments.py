"""`python -m benchmarks.segments`: what reusing text at another position brings, how far answers drift, and what each hypothesis is worth.

`agentcache bench segments` is its first part, on a model of yours; here ablations, the made-up world and the table of hypotheses are added.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from agentcache import traces
from agentcache.approximate.calibrate import search, shifts
from agentcache.approximate.calibrate.cli import (
    AllowedKl,
    Answer,
    CalibrationFile,
    Families,
    Halo,
    MadeUp,
    Margin,
    MostTokens,
    Off,
    Tail,
    Tools,
    Workloads,
)
from agentcache.approximate.calibrate.trials import Trials, rows
from agentcache.bench import report
from agentcache.bench.options import (
    Dtype,
    DtypeOption,
    JsonOption,
    Loading,
    ModelOption,
    ShapeOption,
    ThreadsOption,
    ToolsDir,
    names,
    to_write,
)
from agentcache.bench.quality_cases import recorded
from agentcache.terminal import report_errors
from examples.embedded.cases import MADE_UP, selections

from . import segments_parts, segments_show, segments_verdicts

app = typer.Typer(add_completion=False)
SOME = 8  # made-up requests for a setting to be looked for on, where nothing else is given

RowsFile = Annotated[
    Path | None, typer.Option("--rows", metavar="FILE.jsonl", callback=to_write, help="Keep single results; an ended run goes on from it.")
]


def made_up(count: int, tools: int) -> list[traces.Episode]:
    """So many requests of the generated world on so many tools."""
    split, _, seed = MADE_UP
    return recorded(selections(split, tools, count, seed)) if count else []


def finding(workload: Sequence[Path], tools_dir: Path | None, count: int, made: list[traces.Episode]) -> dict[str, list[traces.Episode]]:
    """Episodes of each file, at most four calls of each, and those that were made up."""
    found = {path.stem: list(traces.read(path, tools_dir, episodes=count, calls=4)) for path in workload}
    return {**found, **({"made up": made} if made else {})}


@app.command()
def segments(
    workload: Workloads = None,
    model: ModelOption = None,
    shape: ShapeOption = None,
    calibration: CalibrationFile = None,
    halo: Halo = None,
    ablations: Annotated[bool, typer.Option("--ablations/--no-ablations", help="Also halos, shares, layers, a probe, each alone.")] = True,
    off: Off = True,
    kl: AllowedKl = 0.02,
    margin: Margin = 0.0,
    tail: Tail = 64,
    cases: Annotated[int, typer.Option("--cases", min=0, help="At most so many per kind of shift; 0: no such rows.")] = 4,
    repeats: Annotated[int, typer.Option(min=1, help="Askings of each case, interleaved; times are their medians.")] = 1,
    answer: Answer = 16,
    families: Families = "all",
    most_tokens: MostTokens = 8192,
    tools_dir: ToolsDir = None,
    made: MadeUp = 0,
    tools: Tools = 8,
    paired: Annotated[int, typer.Option(min=0, help="So many made-up requests answered whole, beside their answers without reuse.")] = 0,
    episodes: Annotated[int, typer.Option(min=0, help="So many made-up dialogues per style, beside reuse off and the exact prefix.")] = 0,
    sampled: Annotated[int, typer.Option(min=0, help="So many requests drawn with 5 seeds; deviation of their keys and values.")] = 0,
    styles: Annotated[str, typer.Option(help="Of the dialogues: hermes, langchain, langchain text, llamaindex; with commas.")] = "hermes",
    agents: Annotated[int, typer.Option(min=1, help="Requests of --paired at a time.")] = 8,
    rows_file: RowsFile = None,
    find: Annotated[int, typer.Option(min=0, help="What finds text, on N episodes of each trace: windows 32 to 128; tau 0.6 to 0.9.")] = 0,
    dtype: DtypeOption = Dtype.bfloat16,
    threads: ThreadsOption = None,
    json_file: JsonOption = None,
) -> None:
    """Text at another position: reused tokens against what could be, time against the exact prefix, and how far the answers drift."""
    with report_errors():
        named, bounds = shifts.named(families, shifts.EVERY), search.Bounds(kl, 0.0, margin=margin, tail=tail)
        options = segments_parts.Options(paired, episodes, sampled, names(styles), tools, named, agents, rows_file, ablations)
        drawn = made_up(max(made, SOME if options.any and not workload else 0), tools)
        required = not (options.any or find)
        found_cases, texts = shifts.gathered(workload or (), named, cases, most_tokens, tools_dir, drawn, required=required)
        with report.measuring("segments", Loading(model, shape, dtype, threads), json_file, texts) as run:
            trials = Trials(run.engine, answer, model is not None, repeats)
            begun = segments_parts.begun(rows_file) if calibration is None and halo is None else None
            some = found_cases or shifts.cases(drawn, 1)
            known = begun or search.setting(trials, some, bounds, run.say, calibration, halo, model is None)
            if lacking := sorted(set(named) - {case.family for case in found_cases}) if cases else []:
                run.say(f"no recorded prompt of at most {most_tokens or 'any number of'} tokens has: {', '.join(lacking)}")
            about: dict[str, Any] = {"shape": shape.value if shape else None, "repeats": repeats, "lacking": lacking}
            about |= {"steps": known.steps, "tail": known.tail, "share": known.share, "margin": known.margin}
            run.keep({**about, "moved": segments_verdicts.moved(run.engine), "rows": []})

            def keep(part: dict[str, Any]) -> None:
                run.keep({**part, "verdicts": segments_verdicts.verdicts({**run.found, **part})})

            methods = segments_parts.variations(trials, known) if ablations else {"bare": trials.calibration(0), "ours": known}
            keep({"rows": rows(trials.run(found_cases, methods, off, run.say))})
            if find:
                told = finding(workload or (), tools_dir, find, drawn if made else [])
                keep({"find": segments_parts.finding(told, run.engine.tokenizer, run.say)})
            segments_parts.run(trials, known, options, run.say, keep)
            run.tables += segments_show.tables(run.found)


if __name__ == "__main__":
    app()
