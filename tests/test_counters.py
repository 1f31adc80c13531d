"""Counts of an engine's requests: what stats() says, what it forgets, and the same for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from agentcache import Engine, Sampling, StoreOptions
from agentcache.counters import BOUNDS
from agentcache.errors import CancelledError
from agentcache.prometheus import EngineCollector
from tests import models
from tests.approximate.repeated_text import FIRST, GREEDY, OTHER
from tests.approximate.repeated_text import engine as near_engine
from tests.engines import chat, decode, engine, long_text, wait_until


@pytest.fixture
def running() -> Iterator[Engine]:
    with engine(store=None) as made:
        yield made


def test_tokens_are_counted_by_their_source(running: Engine) -> None:
    asked = chat("Is the lamp lit?")
    receipts = [running.generate(asked, sampling=decode(3)).receipt for _ in range(2)]
    told = running.stats()
    assert told["tokens"]["computed"] == sum(one.computed_tokens for one in receipts)
    assert told["tokens"]["memory"] == sum(one.cached_tokens for one in receipts) > 0
    assert told["tokens"]["completion"] == 6
    assert told["requests"] == {"length": 2}
    assert told["refusals"] == {"COLD": 1, "LAST_TOKEN": 1}
    assert told["queue"] == {"waiting": 0, "running": 0}
    assert told["store"]["pages"] > 0


def test_tokens_from_disk_and_audits_are_counted(tmp_path: Path) -> None:
    model, asked = models.build("qwen3", num_hidden_layers=2), chat(long_text(230))
    options = StoreOptions(tmp_path, check_one_in=1, refuse_slow=False)
    with engine(model=model, store=options) as first:
        first.generate(asked, sampling=decode(2))
    with engine(model=model, store=options) as second:
        receipt = second.generate(asked, sampling=decode(2)).receipt
        assert second.stats()["tokens"]["disk"] == receipt.disk_tokens > 0
        assert wait_until(lambda: second.stats()["audits"]["run"] == 1)
        assert second.stats()["audits"] == {"run": 1, "failed": 0, "tokens": receipt.cached_tokens}


def test_an_answer_that_calls_ends_as_any_other() -> None:
    tool = {"name": "get_invoice", "description": "Get an invoice.", "parameters": {"properties": {"number": {"type": "string"}}}}
    with Engine("embedded", store=None) as running:
        said = running.generate(chat("Get the invoice A-1204."), [{"type": "function", "function": tool}], sampling=Sampling(max_tokens=60))
        assert said.message.tool_calls
        assert running.stats()["requests"] == {"stop": 1}, "whoever reads the answer calls it tool_calls, at any time later"


def test_ends_that_are_no_answers_are_counted(running: Engine) -> None:
    running.warm("You keep a lighthouse.", name="lamp")
    stream = running.stream(chat("Tell all."), sampling=decode(400))
    next(stream)
    stream.close()
    with pytest.raises(CancelledError):
        _ = stream.completion
    assert wait_until(lambda: running.stats()["requests"] == {"filled": 1, "cancelled": 1})


def test_a_namespace_has_counts_of_its_own(running: Engine) -> None:
    for namespace in ("alice", "alice", "bob"):
        running.generate("Fog.", sampling=decode(2), namespace=namespace)
    assert running.stats("alice")["requests"] == {"length": 2}
    assert running.stats("bob")["requests"] == {"length": 1}
    assert running.stats("carol") == {}
    assert running.stats()["requests"] == {"length": 3}
    running.forget(namespace="alice")
    assert running.stats("alice") == {}
    assert running.stats()["requests"] == {"length": 3}, "sums stay"


def test_times_are_counted_once_for_each_answer(running: Engine) -> None:
    for tokens in (1, 4, 4):
        running.generate("Fog.", sampling=decode(tokens))
    told = running.stats()
    assert sum(count for bound, count in told["ttft_s"].items() if bound != "sum") == 3
    assert sum(count for bound, count in told["token_s"].items() if bound != "sum") == 2, "one token has no time between"
    assert told["ttft_s"]["sum"] > 0


def test_receipts_do_not_pile_up_uncounted(running: Engine) -> None:
    for number in range(70):
        running.generate("Fog.", sampling=Sampling(max_tokens=1), namespace=f"n{number % 3}")
    assert len(running.scheduler._receipts) < 64
    assert running.stats()["requests"] == {"length": 70}


def test_the_drift_of_watched_answers_is_a_histogram() -> None:
    with near_engine(watch_one_in=1) as watched:
        for prompt in (FIRST, OTHER):
            watched.generate(prompt, sampling=GREEDY)
        assert wait_until(lambda: not watched.approximate.monitor.pending and "watch_kl" in watched.stats())
        told = watched.stats()["watch_kl"]
    assert sum(count for bound, count in told.items() if bound != "sum") == 1
    assert told["sum"] > 0


def test_prometheus_reads_the_same_counts(running: Engine) -> None:
    registry = CollectorRegistry()
    registry.register(EngineCollector(lambda: {"lamp": running}))
    for _ in range(2):
        running.generate(chat("Fog?"), sampling=decode(3))
    told, lines = running.stats(), generate_latest(registry).decode().splitlines()
    assert f'agentcache_tokens_total{{model="lamp",source="memory"}} {float(told["tokens"]["memory"])}' in lines
    assert 'agentcache_refusals_total{model="lamp",reason="COLD"} 1.0' in lines
    assert 'agentcache_queue{model="lamp",state="running"} 0.0' in lines
    buckets = [float(line.split()[1]) for line in lines if line.startswith("agentcache_ttft_seconds_bucket")]
    assert len(buckets) == len(BOUNDS["ttft_s"])
    assert buckets == sorted(buckets), "each bucket holds those below it"
    assert 'agentcache_ttft_seconds_bucket{le="+Inf",model="lamp"} 2.0' in lines
    assert 'agentcache_ttft_seconds_count{model="lamp"} 2.0' in lines
