"""`agentcache bench rag`: options in, a table and one JSON line out. Loads torch only inside a command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ...bench.options import Dtype, DtypeOption, JsonOption, Loading, ThreadsOption, names
from ...terminal import report_errors


def rag(
    model: Annotated[str, typer.Option(help="Folder or Hugging Face id of a model; or the project's own small one.")] = "embedded",
    corpus: Annotated[Path | None, typer.Option(help="Passages (.json, .jsonl): texts, or objects with title and body.")] = None,
    questions: Annotated[Path | None, typer.Option(help="Questions as of HotpotQA or MultihopRAG; by default our own.")] = None,
    top: Annotated[int, typer.Option(min=1, help="Passages of a prompt.")] = 6,
    limit: Annotated[int | None, typer.Option(min=1, help="At most so many questions.")] = None,
    halos: Annotated[str, typer.Option(help="Approximate reuse repaired by these halos, with commas; 0 is no repair.")] = "0,2,4,8",
    calibration: Annotated[Path | None, typer.Option(help="Approximate reuse under this calibration instead.")] = None,
    tokens: Annotated[int, typer.Option(min=1, help="The longest answer.")] = 24,
    dtype: DtypeOption = Dtype.bfloat16,
    threads: ThreadsOption = None,
    json_file: JsonOption = None,
) -> None:
    """Questions over retrieved passages: their order, reuse and repair; computed tokens, first tokens, right answers."""
    with report_errors():
        from ...bench import report
        from ...calibration import Calibration
        from . import measure
        from . import questions as files

        asked = files.questions(corpus, questions, top)[:limit]
        tried = tuple(int(each) for each in names(halos) if each.isdecimal())
        given = None if calibration is None else Calibration.load(calibration)
        with report.measuring("rag", Loading(model, None, dtype, threads), json_file) as run:
            run.keep({"top": top, "rows": measure.run(run.engine, asked, measure.ways(run.engine, tried, given), run.say, tokens)})
            run.tables.append(report.rag_table(run.found["rows"]))
