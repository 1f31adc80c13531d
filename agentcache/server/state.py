"""Everything that the routes of one server share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Annotated

from fastapi import Depends, Request
from prometheus_client import CollectorRegistry, Gauge

from ..errors import AgentCacheError
from ..prometheus import EngineCollector
from .records import Records
from .registered_tools import Registered, RegisteredTools
from .served_models import ServedModel, ServedModels, adapter_of
from .stored_responses import StoredResponses
from .tenants import Tenant, Tenants

if TYPE_CHECKING:
    from ..engine import Engine


@dataclass(eq=False)
class ServerState:
    """One server's models, tenants, records, metrics, tool groups and stored responses. A request beyond a bound is refused, never cut."""

    models: ServedModels
    tenants: Tenants
    tools: RegisteredTools
    # bounds of every request: its body, and the time until its answer is whole
    body_bytes: int = 16 << 20  # a million tokens of escaped Chinese are 9 MB; nothing else runs on the loop while a body is read as JSON
    answer_s: float = 600.0
    records: Records = field(default_factory=Records)
    responses: StoredResponses = field(default_factory=StoredResponses)
    metrics: CollectorRegistry = field(default_factory=CollectorRegistry)
    # set when the server is about to end: running answers end with an error
    closing: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.metrics.register(EngineCollector(lambda: self.models.engines))  # type: ignore[arg-type]
        running = Gauge("agentcache_running_requests", "Requests that run now", registry=self.metrics)
        running.set_function(lambda: self.tenants.running)
        self.models.keep = self._unpin_lapsed
        for model in self.models.all:
            model.open = partial(self._opened, model, model.open)

    def _opened(self, model: ServedModel, open_engine: Callable[[Callable[[str], None]], Engine], say: Callable[[str], None]) -> Engine:
        """An engine that holds the tool groups that were registered for it, in an earlier process too."""
        engine = open_engine(say)
        for group in self.tools.of(None):
            if self.models.owner(group.model) == model.name and group.pinned:
                say("computing the tool groups")  # unnamed: /health tells it without a key
                self.tools.use(group.namespace, group.name)
                with suppress(AgentCacheError):  # a group that no longer fits is computed, and refused, when it is asked for
                    adapter = adapter_of(engine, group.model)
                    engine.warm(group.system or None, group.tools, name=group.name, namespace=group.namespace, adapter=adapter)
        return engine

    @contextmanager
    def admit(self, tenant: Tenant) -> Iterator[None]:
        """Count one running request, and let those who follow the status see that it is over. ServerError 429: as of `Tenants.admit`."""
        try:
            with self.tenants.admit(tenant):
                yield
        finally:
            self.records.wake()

    def groups(self, namespace: str | None) -> list[Registered]:
        """The tool groups of a namespace, None for all: those that are registered, then those that clients pinned through /v1/engine."""
        registered = self.tools.of(namespace)
        known = {(self.models.owner(group.model), group.namespace, group.name) for group in registered}
        held = [(name, group) for name, engine in self.models.engines.items() for group in engine.groups]
        pinned = [
            Registered(group.name, group.namespace, model, "", [{"name": tool} for tool in group.tools], registered=False)
            for model, group in held
            if namespace in (None, group.namespace) and (model, group.namespace, group.name) not in known
        ]
        return registered + pinned

    def group(self, namespace: str, name: str) -> Registered:
        """The tool group of that name. ServerError 404: this namespace has none."""
        return next((group for group in self.groups(namespace) if group.name == name), None) or self.tools.find(namespace, name)

    def _unpin_lapsed(self) -> None:
        for group in self.tools.lapsed():
            engine = self.models.engines.get(self.models.owner(group.model))
            if engine is not None:
                engine.release(group.name, namespace=group.namespace)


async def _serving(request: Request) -> ServerState:
    state: ServerState = request.app.state.server
    return state


async def _caller(request: Request) -> Tenant:
    tenant: Tenant = request.state.tenant
    return tenant


Serving = Annotated[ServerState, Depends(_serving)]
Caller = Annotated[Tenant, Depends(_caller)]
