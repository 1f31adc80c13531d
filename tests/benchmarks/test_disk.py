"""Tool groups on disk: what is timed came from there, in this process and in another one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from agentcache.bench import latency, shapes
from agentcache.engine import Engine
from agentcache.errors import StoreError
from agentcache.store.disk.disk_tier import DiskTier
from agentcache.types import StoreOptions
from benchmarks import disk
from tests.bench.tiny_shape import TINY_SHAPE


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setitem(shapes.SHAPES, "small", ("qwen3", TINY_SHAPE))
    with Engine(*shapes.load("small"), store=StoreOptions(tmp_path / "store", refuse_slow=False)) as made:
        yield made


@pytest.mark.impatient
def test_a_slow_moment_of_the_disk_counts(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Elsewhere the engine computes instead of waiting for a stalled disk; a benchmark of the disk waits."""
    read, stalls = DiskTier.read, [0.2]
    scene = latency.prepare(engine, 2, latency.Options(tools=(2,), tail=40, repeats=1, slow_repeats=1, decode=1))
    assert scene is not None
    engine.flush()

    def stalled(self: DiskTier, rows: Any, pages: Any, stop: Any, progress: Any) -> Any:
        assert not stop.wait(stalls.pop() if stalls else 0.0), "left for computing"
        return read(self, rows, pages, stop, progress)

    monkeypatch.setattr(DiskTier, "read", stalled)
    done, receipt = disk.hit(engine, scene.namespace, scene.turns[0], scene.tools, 1, cold=False)
    assert not stalls
    assert receipt.disk_tokens == receipt.cached_tokens > 0
    assert done.ttft_ms > 200
    monkeypatch.setattr(DiskTier, "read", lambda self, rows, pages, stop, progress: StoreError("gone"))
    with pytest.raises(AssertionError, match="came from disk"):
        disk.hit(engine, scene.namespace, scene.turns[0], scene.tools, 1, cold=True)


def test_two_processes_find_the_group_on_disk(model_folder: Path, tmp_path: Path) -> None:
    options = ["--tools", "2", "--repeats", "2", "--slow-repeats", "1", "--tail", "30", "--dtype", "float32", "--store-dir", str(tmp_path)]
    done = CliRunner().invoke(disk.app, ["--model", str(model_folder), *options])
    assert done.exit_code == 0, (done.output, done.exception)
    (row,) = json.loads(done.stdout.splitlines()[-1])["rows"]
    assert all(row[f"{name}_ms"] > 0 for name in (*disk.METHODS, "read_cold", "read_warm"))
    for kind in ("cold", "warm"):
        assert row["second_process"][kind]["ttft_ms"] > 0
        assert row["second_process"][kind]["disk_tokens"] >= row["prefix_tokens"] - 2
    assert "2nd cold" in done.stdout
    assert not list(tmp_path.iterdir()), "the store of the run was left over"
