"""Counters of engines for prometheus-client: `REGISTRY.register(EngineCollector(lambda: {"name": engine}))`. Counts nothing itself.

Needs prometheus-client, of the extra `server`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from . import extras
from .counters import BOUNDS
from .engine import Engine

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

COUNTS = {
    "requests": ("agentcache_requests", "Requests that ended, by finish reason", "state"),
    "tokens": ("agentcache_tokens", "Tokens of prompts by where they came from, and of completions", "source"),
    "refusals": ("agentcache_refusals", "Ranges of tokens not reused", "reason"),
    "audits": ("agentcache_audits", "Hits from disk computed again in idle time", "what"),
}
HISTOGRAMS = {
    "ttft_s": ("agentcache_ttft_seconds", "Time to the first token"),
    "token_s": ("agentcache_token_seconds", "Time per decoded token"),
    "watch_kl": ("agentcache_watch_kl", "KL of sampled answers after segments, in nats per token"),
}
GAUGES = {
    "queue": ("agentcache_queue", "Requests that wait, and that run", "state"),
    "store": ("agentcache_store", "Counts of pages, bytes, pins and evictions", "what"),
}


class EngineCollector:
    """A collector over the engines that a function tells, by the name of their model."""

    def __init__(self, engines: Callable[[], Mapping[str, Engine]]) -> None:
        self._engines = engines
        self._metrics = extras.library("prometheus_client", "0.20", "server", "EngineCollector").metrics_core

    def collect(self) -> Iterable[Metric]:
        """All counters of engines that are open now."""
        told = {name: engine.stats() for name, engine in self._engines().items()}
        for kind, families in ((self._metrics.CounterMetricFamily, COUNTS), (self._metrics.GaugeMetricFamily, GAUGES)):
            for family, (metric, about, label) in families.items():
                found = kind(metric, about, labels=["model", label])
                for name, stats in told.items():
                    for value, count in stats.get(family, {}).items():
                        found.add_metric([name, value], count)
                yield found
        for family, (metric, about) in HISTOGRAMS.items():
            histogram = self._metrics.HistogramMetricFamily(metric, about, labels=["model"])
            for name, stats in told.items():
                counts, below, buckets = stats.get(family, {}), 0.0, []
                for bound in BOUNDS[family]:
                    below += counts.get(f"{bound:g}", 0)
                    buckets.append((f"{bound:g}".replace("inf", "+Inf"), below))
                histogram.add_metric([name], buckets, counts.get("sum", 0))
            yield histogram
