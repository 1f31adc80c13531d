"""The lab's commands on a running engine and a store: figures are whole, and assertions fire when something else was timed."""

from __future__ import annotations

import json
import mmap
import time
from pathlib import Path
from typing import Any

import pytest
from typer import Typer
from typer.testing import CliRunner

from agentcache import checkpoints
from agentcache.bench import environment, families, shapes
from agentcache.engine import Engine
from agentcache.types import StoreOptions
from benchmarks import drift, llama_cpp, plots, process_figures, steps, steps_parts, store
from tests import models
from tests.bench.tiny_shape import TINY_SHAPE


@pytest.fixture(autouse=True)
def tiny_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """`--shape small` becomes tinier, and its tokenizer learns less."""
    monkeypatch.setitem(shapes.SHAPES, "small", ("qwen3", TINY_SHAPE))


@pytest.fixture
def engine(tmp_path: Path) -> Any:
    with Engine(*shapes.load("small"), store=StoreOptions(tmp_path / "store", refuse_slow=False)) as made:
        yield made


def run(app: Typer, *arguments: str) -> tuple[dict[str, Any], str]:
    """A command that must succeed: what its last line says, and all it printed."""
    done = CliRunner().invoke(app, arguments)
    if done.exception and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout.splitlines()[-1]), done.stdout


def refused(app: Typer, *arguments: str) -> str:
    """A command that must fail: what it says."""
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 1, done.output
    return done.stderr


def test_drift_of_fewer_bits() -> None:
    said, shown = run(drift.app, "--shape", "small", "--tokens", "300", "--tail", "6", "--dtype", "float32")
    eight, four = said["rows"]
    assert 0 <= eight["mean_kl"] < four["mean_kl"]
    assert 0.2 < four["share"] < eight["share"] < 0.6
    assert "same top-1" in shown
    assert "tokens=90000000" in refused(drift.app, "--shape", "small", "--tokens", "90000000")


def test_extras_by_command() -> None:
    options = (
        "--repeats",
        "1",
        "--decode",
        "3",
        "--later-step",
        "--decode-contexts",
        "700",
        "--agents",
        "2",
        "--memory",
        "--admitting",
    )
    said, shown = run(steps.app, *options)
    assert said["admitting"]["ratio"] > 0
    assert said["later_step"]["new_tokens"] < 220 < 3000 < said["later_step"]["prompt_tokens"]
    assert said["decode"][0]["context_tokens"] == 700
    assert {"stock_ms", "static_ms", "ms"} <= set(said["decode"][0])
    assert said["agents"]["all_per_s"] > 0
    assert said["memory"]["peak_bytes"] >= said["memory"]["before_bytes"]
    assert "chunk buffer" in shown


def test_bytes_of_checkpoints_after_some_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("_TOOLS", 2), ("STEPS", 5)):
        monkeypatch.setattr(steps_parts, name, value)
    monkeypatch.setattr(checkpoints, "SHARE", 0.0)
    model = families.build("qwen3_5_text", max_position_embeddings=16384)
    with Engine(model, models.toy_tokenizer(), store=StoreOptions(tmp_path / "store", refuse_slow=False)) as engine:
        found = steps_parts.checkpoints(engine)
    assert found["memory_count"] == 1 + checkpoints.LAST  # of the group, and the last ones
    assert 0 < found["group_bytes"] < found["disk_bytes"] < found["memory_bytes"]
    assert 0 < found["memory_share"] < 1
    assert 0 < found["disk_share"] < 1
    assert [column.header for column in steps.tables({"checkpoints": found})[0].columns][-1] == "of disk"


def test_time_between_tokens_during_a_prefill(engine: Engine) -> None:
    found = steps_parts.mixed(engine, prefill_tokens=2500)
    assert 2000 < found["prefill_tokens"] <= 2500
    assert found["gap_p95_ms"] >= found["gap_median_ms"] > 0


def test_rounds_with_and_without_a_token(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    run, ran = engine.scheduler.runner.run, list[list[tuple[int, int]]]()
    monkeypatch.setattr(
        engine.scheduler.runner, "run", lambda works: ran.append([(one.sequence.length, len(one.ids)) for one in works]) or run(works)
    )
    first, *others = steps_parts.rounds(engine, repeats=1, context=64)
    assert ran[-3:] == [[(2899, 1), (64, 128)], [(64, 256)], [(2899, 1), (64, 256)]]
    assert first["rows"] == 0
    assert [row["rows"] for row in others] == [16, 32, 48, 64, 96, 128, 256]
    assert all(min(row["alone_ms"], row["with_token_ms"]) > 0 for row in others)
    assert [column.header for column in steps.tables({"rounds": [first, *others]})[0].columns][0] == "rows"


def test_overhead_on_a_one_layer_model() -> None:
    [figures] = steps_parts.overhead(sizes=(3000,), steps=2).values()
    assert figures["prompt_tokens"] > 2800
    assert figures["ms"] >= figures["layout_ms"] > 0


def test_filled_contexts_are_used(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.store, "admit", lambda *_: None)
    with pytest.raises(AssertionError, match="the pages were not used"):
        steps_parts.decode_at(engine, 600, 2, 1, engine.model.model)


def test_percentile_by_nearest_rank() -> None:
    assert environment.percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert environment.percentile(list(range(1, 101)), 0.95) == 95
    assert environment.percentile([7.0], 0.95) == 7.0


def test_peak_memory_is_seen() -> None:
    def work() -> None:
        with mmap.mmap(-1, 64 << 20) as held:  # not from an allocator, which may have as much left of what tests before this one freed
            held.write(b"x" * len(held))
            time.sleep(0.05)

    before, peak = process_figures.peak_bytes(work)
    assert peak - before > 50 << 20


def test_the_lab_adds_llama_cpp_and_a_large_index(tmp_path: Path) -> None:
    options = ("--shape", "small", "--tokens", "700", "--repeats", "1", "--entries", "1500")
    said, shown = run(store.app, *options, "--store-dir", str(tmp_path))
    assert said["index"]["rows"] == 2400
    assert min(said["index"].values()) > 0
    assert "an index of 2,400 pages" in shown
    assert [row["way"] for row in said["rows"]][:5] == ["raw", "agentcache", "verify", "safetensors", "torch.load"]
    assert ("llama.cpp" in said["rows"][-1]["way"]) == llama_cpp.installed()
    assert all(row["cold_ms"] > 0 and row["warm_ms"] > 0 for row in said["rows"])
    assert said["bytes"] > 700 * 2 * 2 * 2 * 16 * 2  # keys and values, layers, heads, channels, bytes
    assert "warm/raw" in shown
    assert not list(tmp_path.iterdir())


def test_nothing_is_shown_of_what_was_not_measured() -> None:
    assert steps.tables({}) == []


def test_a_report_without_rows_is_not_drawn(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    report.write_text(json.dumps({"bench": "latency", "rows": []}))
    assert "has no row of" in refused(plots.app, str(report), str(tmp_path / "out.png"))
    assert "cannot be read" in refused(plots.app, str(tmp_path / "none.json"), str(tmp_path / "out.png"))
