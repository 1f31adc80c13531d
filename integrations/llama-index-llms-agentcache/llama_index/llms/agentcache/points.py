"""CachePoints: which tool group one stands for and for how long it is held. Knows nothing of pages.

A cache point in a system message, or anywhere behind it, holds what every later request shares: the system text and the tools. What stands
between them and a later point is kept like every prompt, as long as there is room, but not pinned; the response's notes say so.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Sequence

from llama_index.core.base.llms.types import CachePoint, ChatMessage

from agentcache import Message
from agentcache.errors import ConfigError

from .host import Pins
from .requests import Ask
from .translate import cache_points

_TTL = re.compile(r"(\d+)([smhd])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def hold_points(pins: Pins, messages: Sequence[ChatMessage], ask: Ask) -> tuple[str, ...]:
    """Pin what the messages' cache points ask for; returns what could not be done, in words."""
    points = cache_points(messages)
    if not points:
        return ()
    system = "\n\n".join(text.content for text in _leading(ask)) or None
    seconds = max(seconds_of(point) for _, point in points)
    said = json.dumps([system, ask.offer.shown, ask.options.get("tools_order", "given")], default=str)
    name = f"cache-point-{hashlib.blake2b(said.encode('utf-8', 'surrogatepass'), digest_size=8).hexdigest()}"
    options = {key: ask.options[key] for key in ("namespace", "tools_order") if key in ask.options}
    notes = []
    if system or ask.offer.shown:
        notes.append(pins.hold(name, system, ask.offer.shown, seconds, options))
    if late := [index for index, _ in points if messages[index].role.value not in ("system", "developer")]:
        notes.append(f"cache points in messages {late}: system and tools are pinned, what follows them is kept as long as there is room")
    return tuple(note for note in notes if note)


def _leading(ask: Ask) -> list[Message]:
    assert not isinstance(ask.prompt, str)
    count = next((n for n, message in enumerate(ask.prompt) if message.role != "system"), len(ask.prompt))
    return list(ask.prompt[:count])


def seconds_of(point: CachePoint) -> float:
    """How long a cache point holds after it was last used."""
    control = point.cache_control
    if control.type == "persistent":
        return math.inf
    found = _TTL.fullmatch(control.ttl)
    if control.type != "ephemeral" or found is None:
        raise ConfigError(
            f"CacheControl(type={control.type!r}, ttl={control.ttl!r}): must be 'ephemeral' with a ttl like '5m' or '1h', or 'persistent'"
        )
    return int(found[1]) * _SECONDS[found[2]]
