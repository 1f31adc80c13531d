"""CachePoints: which start of a conversation one stands for and for how long it is held. Knows nothing of pages.

A point holds the prompt up to the end of its message, tools included; one among the leading system messages holds all of them, because
chat templates show them as one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from llama_index.core.base.llms.types import CachePoint, ChatMessage

from agentcache.errors import ConfigError

from .host import Host
from .requests import Ask
from .translate import LateSystem, cache_points, to_messages

_TTL = re.compile(r"(\d+)([smhd])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def pin_points(host: Host, messages: Sequence[ChatMessage], ask: Ask, late_system: LateSystem) -> tuple[str, ...]:
    """Pin what the messages' cache points ask for; returns what could not be done, in words."""
    leading = next((n for n, message in enumerate(messages) if message.role.value not in ("system", "developer")), len(messages))
    ends: dict[int, float] = {}
    for index, point in cache_points(messages):
        end = max(index + 1, leading)
        ends[end] = max(ends.get(end, 0.0), seconds_of(point))
    options = {key: ask.options[key] for key in ("namespace", "tools_order", "group", "adapter", "template_kwargs") if key in ask.options}
    notes = []
    for end, seconds in sorted(ends.items()):
        try:
            host.pin(to_messages(messages[:end], late_system), ask.offer.shown, name="cache-point", ttl_s=seconds, **options)
        except ConfigError as error:  # it is answered all the same
            notes.append(f"cache point not pinned: {error}")
    return tuple(notes)


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
