"""Floors and parts of a request's time: they add up, and every part is seen."""

from __future__ import annotations

import json
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from agentcache.bench import shapes
from agentcache.model import steps
from benchmarks import floor
from tests.bench.tiny_shape import TINY_SHAPE


def test_parts_stand_within_the_forward_and_it_within_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(shapes.SHAPES, "small", ("qwen3", TINY_SHAPE))
    monkeypatch.setattr(floor, "BYTES", 1 << 22)
    monkeypatch.setattr(floor, "TRIES", 1)
    app, attended = typer.Typer(), steps.attended
    app.command()(floor.main)
    done = CliRunner().invoke(app, ["--shape", "small", "--tools", "2", "--repeats", "1", "--decode", "2"])
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert set(found["floor_ms"]) == set(found["parts_ms"]) == {"prefill", "hit", "decode"}
    assert all(ms > 0 for ms in (*found["floor_ms"].values(), *found["limits"].values()))
    for parts in found["parts_ms"].values():
        forward, whole = parts.pop("forward"), parts.pop("all")
        assert 0 < sum(parts.values()) < forward
        assert parts["attention"] > 0
        assert parts["products"] + parts["layers but attention"] > 0
        assert parts["head"] > 0
        assert whole > 0
    assert steps.attended is attended, "a clock was left"
