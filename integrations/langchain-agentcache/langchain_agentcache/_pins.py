"""`cache_control`: the start of a prompt stays in memory for a while, whatever else is asked. Knows nothing of LangChain's messages.

A request's start is pinned once the request is answered: then it is there, and a pin costs next to nothing. Before that it would be a
computation that neither `timeout` nor cancelling ends. A pin ends when its time is over, which is looked at when the next one is made.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentcache import Engine, Message, Tool
from agentcache.errors import AgentCacheError

from ._told import tell
from .errors import ModelInvalidRequestError

_TTL_S = {"5m": 300.0, "1h": 3600.0}


@dataclass(frozen=True, slots=True)
class Wish:
    """What to pin, and how long: the start that messages and tools make. options: of `Engine.pin`, with the namespace."""

    engine: Engine
    messages: Sequence[Message]
    tools: Sequence[Tool]
    ttl: float
    label: str | None
    options: Mapping[str, Any]


_lock = threading.Lock()
_until: weakref.WeakKeyDictionary[Engine, dict[tuple[str, str], float]] = weakref.WeakKeyDictionary()


def seconds(cache_control: Mapping[str, Any]) -> float:
    """How long a pin lasts."""
    said = cache_control if isinstance(cache_control, Mapping) else {"type": cache_control}
    ttl = said.get("ttl", "5m")
    known = ttl in _TTL_S if isinstance(ttl, str) else isinstance(ttl, (int, float))
    if said.get("type", "ephemeral") not in ("ephemeral", "persistent") or not known:
        raise ModelInvalidRequestError(
            f"cache_control={cache_control!r}: must be {{'type': 'ephemeral', 'ttl': '5m'}}, with '5m', '1h' or a number of seconds"
        )
    return _TTL_S[ttl] if isinstance(ttl, str) else float(ttl)


def keep(wishes: Sequence[Wish]) -> None:
    """Pin what was wished for."""
    for wish in wishes:
        pin(wish)


def pin(wish: Wish) -> str | None:
    """Pin under a name with the label; prolong it if it is pinned. None if there is nothing to pin."""
    engine, namespace = wish.engine, str(wish.options["namespace"])
    if not wish.messages and not wish.tools:
        return None
    said = json.dumps([wish.messages, wish.tools, sorted(wish.options.items())], default=repr)
    name = f"{wish.label or 'pinned'}-{hashlib.blake2b(said.encode(), digest_size=6).hexdigest()}"
    now = time.monotonic()
    with _lock:
        pins = _until.setdefault(engine, {})
        over = [key for key, until in pins.items() if until < now and key != (namespace, name)]
        for key in over:
            del pins[key]
        known = (namespace, name) in pins
        pins[namespace, name] = now + wish.ttl
    for space, old in over:
        engine.release(old, namespace=space)
    if not known and not _pinned(wish, name):
        with _lock:
            pins.pop((namespace, name), None)
        return None
    return name


def _pinned(wish: Wish, name: str) -> bool:
    """Whether the prefix is pinned now. A pin is a wish: where it cannot be had, the answer stands without it."""
    try:
        wish.engine.pin(wish.messages, wish.tools, name=name, **wish.options)
    except AgentCacheError as error:
        tell(f"cache_control: nothing was pinned: {error}")
        return False
    return True
