"""Metrics for Prometheus: what the engines of a server count, and its running requests. Knows no routes."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Gauge

from ..prometheus import EngineCollector
from .served_models import ServedModels
from .tenants import Tenants


def registry(models: ServedModels, tenants: Tenants) -> CollectorRegistry:
    """The registry of one server."""
    made = CollectorRegistry()
    made.register(EngineCollector(lambda: models.engines))  # type: ignore[arg-type]
    running = Gauge("agentcache_running_requests", "Requests that run now", registry=made)
    running.set_function(lambda: tenants.running)
    return made
