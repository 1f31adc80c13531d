"""`cache_control`: the start of a prompt stays in memory for a while, whatever else is asked. Knows nothing of LangChain's messages.

A request's start is pinned once the request is answered: then it is there, and a pin costs next to nothing. Before that it would be a
computation that neither `timeout` nor cancelling ends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentcache import Engine, Message, Tool
from agentcache.errors import AgentCacheError

from ._caller_warnings import caller_warnings
from .errors import ModelInvalidRequestError

_TTL_S = {"5m": 300.0, "1h": 3600.0}


@dataclass(frozen=True, slots=True)
class PinRequest:
    """What to pin, and how long: the start that messages and tools make. options: of `Engine.pin`."""

    engine: Engine
    messages: Sequence[Message]
    tools: Sequence[Tool]
    ttl_s: float
    label: str | None
    options: Mapping[str, Any]

    def pin(self) -> None:
        """Pin it, under a name with the label; where that cannot be, the answer stands without it."""
        if not self.messages and not self.tools:
            return
        try:
            self.engine.pin(self.messages, self.tools, name=self.label, ttl_s=self.ttl_s, **self.options)
        except AgentCacheError as error:
            caller_warnings.warn(f"cache_control: nothing was pinned: {error}")


def seconds(cache_control: Mapping[str, Any]) -> float:
    """How long a pin lasts."""
    said = cache_control if isinstance(cache_control, Mapping) else {"type": cache_control}
    ttl = said.get("ttl", "5m")
    known = ttl in _TTL_S if isinstance(ttl, str) else isinstance(ttl, (int, float)) and ttl > 0
    if said.get("type", "ephemeral") not in ("ephemeral", "persistent") or not known:
        raise ModelInvalidRequestError(
            f"cache_control={cache_control!r}: must be {{'type': 'ephemeral', 'ttl': '5m'}}, with '5m', '1h' or a number of seconds"
        )
    return _TTL_S[ttl] if isinstance(ttl, str) else float(ttl)


def pin_all(requests: Sequence[PinRequest]) -> None:
    """Pin what was asked for."""
    for each in requests:
        each.pin()
