"""Replays held against the oracle: what is new is computed, and nothing else; a tool group is cached once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from agentcache import traces as trace_files
from agentcache.bench import engine_timing, shapes
from agentcache.bench import react as bench
from agentcache.engine import Engine
from agentcache.store.keys import as_ids
from benchmarks import react
from benchmarks.oracle import Oracle
from tests.bench.recorded_episodes import write_traces
from tests.bench.tiny_shape import TINY_SHAPE


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    return write_traces(tmp_path)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setitem(shapes.SHAPES, "small", ("qwen3", TINY_SHAPE))
    with Engine(*shapes.load("small")) as made:
        yield made


def test_the_oracle_finds_the_longest_known_prefix() -> None:
    oracle = Oracle()
    assert oracle.known([1, 2, 3]) == 0
    for ids in ([1, 2, 3, 4], [1, 2, 9], [300, 2], [1, 2, 3, 4, 5], [1, 2]):
        oracle.add(ids)
    assert oracle.known([1, 2, 3, 4, 5, 6]) == 5
    assert oracle.known([1, 2, 9, 9]) == 3
    assert oracle.known([1, 2, 7]) == 2
    assert oracle.known([300]) == 1
    assert oracle.known([44]) == 0


def test_replay_computes_what_is_new(traces: Path, engine: Engine) -> None:
    families = {path.stem: list(trace_files.read(path)) for path in sorted(traces.glob("*.jsonl"))}
    found = bench.run(engine, families, kind=react.Held, off=False)["families"]
    for name, family in found.items():
        assert family["within_bound"], name
        assert family["new_tokens"] <= family["computed_tokens"] < family["prompt_tokens"]
    assert found["chat"]["tool_groups"] == 1
    assert found["chat"]["group_pages"] >= 1
    second = found["chat"]["episodes"][1]
    assert second["computed_tokens"] < second["prompt_tokens"] / 10  # what it shares with the first episode is not new


def test_a_second_copy_of_a_group_is_noticed(traces: Path, engine: Engine) -> None:
    replay = react.Held(engine, off=False)
    first, second = trace_files.read(traces / "chat.jsonl")
    replay.episode(first)
    call = first.calls[-1]
    ids = list(engine.renderer.render(call.prompt, call.tools, namespace="react").ids)
    kept = engine.store.match(engine_timing.scope_of(engine, replay.namespace, 2000), as_ids(ids))
    engine.store.clear()
    with pytest.raises(AssertionError, match="holds its own copy"):
        replay.episode(second)
    assert kept.tokens


def test_the_command_shows_the_bound(traces: Path, engine: Engine) -> None:
    arguments = ["--workload", str(traces / "text.jsonl"), "--shape", "small", "--no-off"]
    done = CliRunner().invoke(react.app, arguments)
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout.splitlines()[-1])["families"]["text"]["within_bound"]
    assert "(computed-calls)/new" in done.stdout
