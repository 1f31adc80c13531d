"""`cache_control`: the start of a prompt stays in memory for a while, whatever else is asked. Knows nothing of LangChain's messages.

A pin costs nothing beyond the request itself: what it computes is what the request would compute. It ends when its time is over, which is
looked at when the next request comes.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
import warnings
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from agentcache import Engine, Message, Tool
from agentcache.errors import AgentCacheError

from .errors import ModelInvalidRequestError

_TTL_S = {"5m": 300.0, "1h": 3600.0}

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


def pin(
    engine: Engine,
    messages: Sequence[Message],
    tools: Sequence[Tool],
    cache_control: Mapping[str, Any],
    label: str | None,
    options: Mapping[str, Any],
) -> str | None:
    """Pin what messages and tools begin, under a name with `label`; prolong it if it is pinned. None if there is nothing to pin.

    options: of `Engine.pin`, with the namespace.
    """
    ttl, namespace = seconds(cache_control), str(options["namespace"])
    if not messages and not tools:
        return None
    said = json.dumps([messages, tools, sorted(options.items())], default=repr)
    name = f"{label or 'pinned'}-{hashlib.blake2b(said.encode(), digest_size=6).hexdigest()}"
    now = time.monotonic()
    with _lock:
        pins = _until.setdefault(engine, {})
        over = [key for key, until in pins.items() if until < now and key != (namespace, name)]
        for key in over:
            del pins[key]
        known = (namespace, name) in pins
        pins[namespace, name] = now + ttl
    for space, old in over:
        engine.release(old, namespace=space)
    if not known and not _pinned(engine, messages, tools, name, options):
        with _lock:
            pins.pop((namespace, name), None)
        return None
    return name


def _pinned(engine: Engine, messages: Sequence[Message], tools: Sequence[Tool], name: str, options: Mapping[str, Any]) -> bool:
    """Whether the prefix is pinned now. A pin is a wish: where it cannot be had, the request goes on without it."""
    try:
        engine.pin(messages, tools, name=name, **options)
    except AgentCacheError as error:
        warnings.warn(f"cache_control: nothing was pinned: {error}", stacklevel=2)
        return False
    return True
