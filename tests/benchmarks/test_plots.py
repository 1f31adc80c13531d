"""Pictures of reports: what a line of theirs is drawn from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

pytest.importorskip("matplotlib")

from benchmarks import plots


def row(reuse: str, repair: str, computed: int, agreement: float) -> dict[str, Any]:
    """A row of `bench rag` with these figures, of 100 prompt tokens."""
    made = {"order": "retrieved", "reuse": reuse, "repair": repair, "prompt_tokens": 100, "computed_tokens": computed}
    return {**made, "agreement": agreement, "kl": 0.0 if reuse == "off" else 0.1, "n": 500}


def test_agreement_is_drawn_against_what_is_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [row("off", "", 100, 1.0), row("approximate", "halo 4", 20, 0.9)]
    rows += [row("approximate", f"halo 4, {share} by {choice}", 30, 0.95) for choice in ("question", "deviation") for share in (0.1, 0.2)]
    report, picture = tmp_path / "rag.json", tmp_path / "rag.png"
    report.write_text(json.dumps({"bench": "rag", "rows": rows}))
    drawn: dict[str, list[list[float]]] = {}
    scales: list[Any] = []
    finish = plots._finish

    def heard(figure: Any, left: Any, right: Any, path: Path) -> None:
        drawn.update({line.get_label(): [list(map(float, data)) for data in line.get_data()] for line in left.get_lines()[:-1]})
        scales.append((right.get_yscale(), right.get_ylim()[0] < 0, right.get_ylabel(), right.get_lines()[0].get_ydata()))
        finish(figure, left, right, path)

    monkeypatch.setattr(plots, "_finish", heard)
    assert CliRunner().invoke(plots.app, [str(report), str(picture)]).exit_code == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert scales == [("symlog", True, "KL of the first answer token, nats (log above 0.0001)", [0.0])]
    line = [[0.2, 0.3, 0.3], [0.9, 0.95, 0.95]]
    assert drawn == {"retrieved order, off": [[1.0], [1.0]], "halo 4, more by question": line, "halo 4, more by deviation": line}
