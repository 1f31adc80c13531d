"""Metrics for Prometheus: requests, latencies, tokens by tier, refusals by reason, memory. Knows no routes."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from .records import Record
from .served_models import ServedModels
from .tenants import Tenants

TTFT_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 120.0)
TOKEN_S = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)


class Metrics:
    """Counters of one server, in a registry of its own."""

    def __init__(self, models: ServedModels, tenants: Tenants) -> None:
        self._models = models
        self.registry = registry = CollectorRegistry()
        self._requests = Counter("agentcache_requests", "Requests that ended", ["model", "path", "state"], registry=registry)
        self._ttft = Histogram("agentcache_ttft_seconds", "Time to the first token", ["model"], buckets=TTFT_S, registry=registry)
        self._decode = Histogram("agentcache_token_seconds", "Time per decoded token", ["model"], buckets=TOKEN_S, registry=registry)
        self._prompt = Counter("agentcache_prompt_tokens", "Prompt tokens by where they came from", ["model", "source"], registry=registry)
        self._completion = Counter("agentcache_completion_tokens", "Tokens of answers", ["model"], registry=registry)
        self._refusals = Counter("agentcache_refusals", "Ranges of tokens not reused, by reason", ["model", "reason"], registry=registry)
        running = Gauge("agentcache_running_requests", "Requests that run now", registry=registry)
        running.set_function(lambda: tenants.running)
        registry.register(self)  # type: ignore[arg-type]

    def record(self, record: Record) -> None:
        """Count a request that ended."""
        if record.state == "running":
            return
        model, receipt = record.model, record.receipt
        self._requests.labels(model, record.path, record.state).inc()
        if receipt is None:
            return
        self._ttft.labels(model).observe(receipt.ttft_ms / 1e3)
        if receipt.completion_tokens > 1:
            self._decode.labels(model).observe(receipt.decode_ms / 1e3 / (receipt.completion_tokens - 1))
        memory = receipt.cached_tokens - receipt.disk_tokens - receipt.segment_tokens
        sources = {"computed": receipt.computed_tokens, "memory": memory, "disk": receipt.disk_tokens, "segment": receipt.segment_tokens}
        for source, tokens in sources.items():
            self._prompt.labels(model, source).inc(max(0, tokens))
        self._completion.labels(model).inc(receipt.completion_tokens)
        for refusal in receipt.refusals:
            self._refusals.labels(model, str(refusal.reason)).inc()

    def collect(self) -> Iterable[Metric]:
        """Gauges of the stores, read when they are asked for."""
        held = GaugeMetricFamily("agentcache_store", "Counts of pages, bytes, pins and evictions", labels=["model", "what"])
        for model in self._models.all:
            if model.engine is not None and not model.engine.closed:
                for what, count in model.engine.store.tree.audit().items():
                    held.add_metric([model.name, what], count)
        yield held

    def text(self) -> bytes:
        """All of them, in Prometheus' text format."""
        return generate_latest(self.registry)
