"""`agentcache bench serve`: the same prompts over HTTP and in process; the transformers way is left to those who run it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner

pytest.importorskip("uvicorn")

from agentcache import Engine
from agentcache.bench import cli, servers
from agentcache.bench.serve import Told, figures
from agentcache.errors import ConfigError
from tests.bench.recorded_episodes import write_traces
from tests.serving import ready, serving

pytestmark = [pytest.mark.enable_socket, pytest.mark.allow_hosts(["127.0.0.1"])]


@pytest.fixture
def server_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server in this process instead of one in its own."""

    @contextmanager
    def agentcache(model: str) -> Iterator[object]:
        assert model == "embedded=embedded"
        with serving() as served:
            yield ready(served)

    monkeypatch.setattr(servers, "agentcache", agentcache)


@pytest.mark.usefixtures("server_here")
@pytest.mark.parametrize("trace", ["chat", "text", None])
def test_both_ways_answer_the_same_prompts(tmp_path: Path, trace: str | None) -> None:
    workload = ["--workload", str(write_traces(tmp_path) / f"{trace}.jsonl")] if trace else ["--tools", "2"]
    done = CliRunner().invoke(cli.app, ["serve", "--agents", "1,2", "--calls", "3", "--max-tokens", "2", *workload])
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout.splitlines()[-1])["rows"]
    assert [(row["way"], row["agents"]) for row in rows] == [(way, many) for way in ("engine", "agentcache serve") for many in (1, 2)]
    assert len({(row["calls"], row["prompt_tokens"]) for row in rows}) == 1
    assert all(not row["refused"] and row["tokens_per_s"] > 0 for row in rows)
    assert rows[0]["cached_share"] == rows[2]["cached_share"]
    assert (0.4 if trace else 0.8) < rows[0]["cached_share"] < 1 or trace == "text"


def test_figures_count_first_chunks_and_gaps() -> None:
    told = [Told(0.0, [0.5, 0.6, 0.9], 10, 5, 3), Told(1.0, [1.1], 10, 0, 1), Told(1.0)]
    found = figures(told, 2.0)
    assert (found["calls"], found["tokens_per_s"], found["cached_share"]) == (3, 2.0, 0.25)
    assert [round(found[name]) for name in ("ttft_p50_ms", "ttft_p95_ms", "gap_p50_ms", "gap_p95_ms")] == [100, 500, 100, 300]


def test_a_server_that_ends_says_why() -> None:
    command = [sys.executable, "-c", "raise SystemExit('no such way')"]
    with pytest.raises(ConfigError, match="no such way"), servers._running(command, "/", {}):
        pass


@pytest.mark.parametrize("missing", ["httpx", "fastapi", "prometheus_client", "uvicorn"])
def test_a_missing_library_is_named_before_anything_is_measured(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.delitem(sys.modules, "agentcache.bench.serve")
    monkeypatch.delattr("agentcache.bench.serve")
    monkeypatch.delattr(Engine, "stream")
    done = CliRunner().invoke(cli.app, ["serve"])
    assert done.exit_code == 1
    assert f"'{missing}' is missing: pip install 'agentcache-llm[client,server]'" in done.output
