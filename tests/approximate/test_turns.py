"""`agentcache calibrate --turns`: what it finds of a model says which turns of it may be stored in fewer bits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from agentcache import Engine, StoreOptions, turn_precision
from agentcache.cli.app import app
from agentcache.errors import CalibrationError


def calibrated(store: Path, *more: str) -> dict[str, Any]:
    """Figures of the command, on six requests of the embedded model's world."""
    out = store.with_suffix(".json")
    given = ["calibrate", "--turns", "int8,int4", "--model", "embedded", "--made-up", "6", "--store", str(store)]
    done = CliRunner().invoke(app, [*given, "--json", str(out), *more])
    assert done.exit_code == 0, done.output
    return dict(json.loads(out.read_text()))


def test_int4_turns_are_stored_once_a_calibration_passed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turn_precision, "LEAST_CALLS", 4)
    store = tmp_path / "store"
    with Engine("embedded", store=StoreOptions(store, turns="int4")) as engine:
        with pytest.raises(CalibrationError, match="no calibration"):
            engine.session("alice")
        assert calibrated(store, "--kl", "0")["passed"] == []
        with pytest.raises(CalibrationError, match="did not pass .*KL"):
            engine.session("alice")
        said = calibrated(store)
        assert engine.session("alice").tokens == 0
    int8, int4 = (said["turns"][name] for name in ("int8", "int4"))
    assert said["passed"] == ["int8", "int4"]
    assert int8["answers"] == int4["answers"] == 6
    assert int8["calls"] >= 4
    assert 0 < int8["kl_mean"] < int4["kl_mean"], "fewer bits are farther off"
