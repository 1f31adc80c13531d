"""Reports of `python -m benchmarks.segments` as one page: docs/notes/segments-measured.md, from the JSON lines beside it. Measures nothing.

python -m benchmarks.segments_text docs/benchmarks/*-segments-*.json > docs/notes/segments-measured.md
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .segments_verdicts import together

Report = Mapping[str, Any]
Named = Sequence[tuple[str, Report]]
HEAD = """# Text at another position: what was measured

Written by `python -m benchmarks.segments_text` from the JSON lines of `python -m benchmarks.segments` in `docs/benchmarks`; do not edit.
[approximate.md](../approximate.md) explains the words, [segments.md](segments.md) gives the commands.
"""
RULE = """A hypothesis takes the worst figure of the reports that may speak of it: times come from known shapes (`--shape`), answers from
trained weights, tokens from all.
"""
UNMEASURED = """## What cannot be measured here

Drift, tool choice and task success on models that people use: their weights are not here. Random weights (`--shape`) tell time and tokens
only. On a machine that has them:

    agentcache calibrate --model MODEL --dtype bfloat16 --workload TRACES.jsonl
    python -m benchmarks.segments --model MODEL --workload TRACES.jsonl --calibration FILE --paired 1000 --rows rows.jsonl
"""


def markdown(reports: Named) -> str:
    """The whole page. reports: name of the file and what it holds."""
    return "\n".join([HEAD, "## Hypotheses\n", RULE, _verdicts(together(reports)), "## Reports\n", _runs(reports), UNMEASURED])


def _table(columns: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    return "\n".join(["| " + " | ".join(line) + " |" for line in (columns, ["---"] * len(columns), *cells)]) + "\n"


def _verdicts(rows: Sequence[Mapping[str, Any]]) -> str:
    said = {"holds": "holds", "fails": "**fails**", "not measured": "not measured"}
    figures = ["-" if row["figure"] is None else format(row["figure"], ".3g") for row in rows]
    cells = [[row["hypothesis"], figure, said[row["verdict"]], row["reason"], row["report"]] for row, figure in zip(rows, figures)]
    return _table(["hypothesis", "figure", "verdict", "of what", "from"], cells)


def _runs(reports: Named) -> str:
    cells = []
    for name, report in reports:
        model, machine = report["model"], report["machine"]
        weights = "random" if report.get("shape") else "trained"
        size = f"{model['parameters'] / 1e6:,.1f} million, {model['dtype']}"
        cells.append([name, model["name"], weights, size, machine["processor"], str(machine["threads"])])
    return _table(["report", "model", "weights", "parameters", "processor", "threads"], cells)


def main(files: Sequence[str]) -> None:
    """Print it."""
    print(markdown([(Path(file).stem, json.loads(Path(file).read_text(encoding="utf-8"))) for file in sorted(files)]))


if __name__ == "__main__":
    main(sys.argv[1:])
