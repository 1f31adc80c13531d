"""Recorded answers with drafts and without: a row counts forwards, and an answer that is another one is noticed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer import Typer
from typer.testing import CliRunner

from agentcache import Engine
from agentcache.bench import shapes
from benchmarks import drafts
from tests.bench.recorded_episodes import write_traces
from tests.bench.tiny_shape import TINY_SHAPE


def test_the_command_counts_forwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(shapes.SHAPES, "small", ("qwen3", TINY_SHAPE))
    forwards = {0: 0, 7: 0}
    generate = Engine.generate

    def counted(self: Engine, *given: Any, **options: Any) -> Any:
        before = self.scheduler.rounds
        done = generate(self, *given, **options)
        forwards[options["sampling"].draft_tokens] += len(done.ids) - done.receipt.drafted_tokens
        assert self.scheduler.rounds - before >= len(done.ids) - done.receipt.drafted_tokens
        return done

    monkeypatch.setattr(Engine, "generate", counted)
    app = Typer()
    app.command()(drafts.main)
    done = CliRunner().invoke(app, [str(write_traces(tmp_path) / "chat.jsonl"), "--shape", "small"])
    assert done.exit_code == 0, done.output
    [row] = json.loads(done.output.splitlines()[-1])["rows"]
    assert row["tokens"] > row["answers"] > 0
    assert forwards[7] < forwards[0] == row["tokens"] + row["answers"]
    assert row["per_forward"] == pytest.approx(row["tokens"] / (forwards[7] - row["answers"]))
