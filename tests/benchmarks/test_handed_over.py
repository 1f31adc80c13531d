"""`benchmarks.handed_over`: adapters that are trained, and prompts that go from one to another."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from benchmarks import handed_over


def test_a_row_for_each_pair_and_repair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handed_over, "REPAIRS", ("halo 8",))
    monkeypatch.setattr(handed_over, "ANSWER_TOKENS", 24)
    app = typer.Typer()
    app.command()(handed_over.main)
    saved = tmp_path / "report.json"
    done = CliRunner().invoke(app, ["--count", "1", "--tools", "4", "--lessons", "6", "--json", str(saved)])
    assert done.exit_code == 0, done.output
    rows = json.loads(saved.read_text())["rows"]
    assert [(row["pair"], row["repair"]) for row in rows] == [
        (pair, repair) for pair in ("caller from router", "caller from base", "base from caller") for repair in ("exact", "halo 8")
    ]
    for exact, near in zip(rows[::2], rows[1::2], strict=True):
        assert (exact["kl"], exact["same_ids"], exact["computed_tokens"]) == (0.0, 1.0, exact["prompt_tokens"])
        assert near["computed_tokens"] < near["prompt_tokens"] / 2
        assert near["kl"] > 0
