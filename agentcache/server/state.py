"""Everything that the routes of one server share."""

from __future__ import annotations

from dataclasses import dataclass, field

from .metrics import Metrics
from .records import Records
from .registered_tools import RegisteredTools
from .responses import StoredResponses
from .served_models import ServedModels
from .tenants import Tenants


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of every request. Beyond them it is refused, never cut."""

    # of a request's body
    body_bytes: int = 32 << 20
    # until an answer is whole
    answer_s: float = 600.0


@dataclass(eq=False)
class ServerState:
    """One server's models, tenants, records, metrics, tool groups and stored responses."""

    models: ServedModels
    tenants: Tenants
    tools: RegisteredTools
    limits: Limits = field(default_factory=Limits)
    records: Records = field(default_factory=Records)
    responses: StoredResponses = field(default_factory=StoredResponses)
    metrics: Metrics = field(init=False)

    def __post_init__(self) -> None:
        self.metrics = Metrics(self.models, self.tenants)
        self.records.on_change(self.metrics.record)
