"""Tool groups that end by themselves: pinned until a time is over, for each lease that asked. Knows neither messages nor models."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakKeyDictionary, WeakValueDictionary

from .errors import ConfigError
from .shared_engines import EngineLease
from .store.tool_group import ToolGroup

Key = tuple[str, str]  # namespace and name


class Groups(Protocol):
    """The tool groups that are pinned now."""

    @property
    def all(self) -> tuple[ToolGroup, ...]: ...
    def release(self, namespace: str, name: str) -> bool: ...


@dataclass(slots=True, eq=False)
class _TimedPin:
    """One group, and until when each lease wants it, on the monotonic clock."""

    group: ToolGroup
    ends: WeakKeyDictionary[EngineLease, float]


class TimedPins:
    """The timed pins of one engine. Their time is looked at with each request. Safe to use from many threads."""

    def __init__(self, groups: Groups) -> None:
        self._groups = groups
        self._held: dict[Key, _TimedPin] = {}
        self._lock = threading.RLock()
        self._turns: WeakValueDictionary[Key, threading.Lock] = WeakValueDictionary()
        self._anyone = EngineLease()  # of those who ask without a lease
        self._process = os.getpid()

    def pin(
        self, pin: Callable[..., ToolGroup], key: Key, ttl_s: float, lease: EngineLease | None, asked: Mapping[str, Any], weights: str
    ) -> ToolGroup:
        """The group that `pin(**asked)` makes, named `key` and a digest of `asked`; one that is pinned only lasts longer.

        weights: the fingerprint under which a group is looked up.
        """
        if not isinstance(ttl_s, (int, float)) or isinstance(ttl_s, bool) or not ttl_s > 0:
            raise ConfigError(f"ttl_s={ttl_s!r}: must be a positive number of seconds; math.inf to pin until `release`")
        namespace, label = key
        key = namespace, f"{label}-{_digest((namespace, weights, sorted(asked.items())))}"
        with self._lock:
            turn = self._turns.setdefault(key, threading.Lock())
        with turn:  # the second of two that ask at once waits for the first
            if (known := self._claim(key, lease, ttl_s)) is not None:
                return known
            made = pin(**asked, name=key[1], namespace=namespace)
            self._claim(key, lease, ttl_s, made)
            return made

    def _claim(self, key: Key, lease: EngineLease | None, ttl_s: float, made: ToolGroup | None = None) -> ToolGroup | None:
        """Want this group, which is pinned already or was just made, for so long; None if it is not pinned."""
        with self._lock:
            held = self._held.get(key)
            if made is not None:
                held = self._held[key] = _TimedPin(made, held.ends if held else WeakKeyDictionary())
            elif held is None or held.group not in self._groups.all:
                return None
            user = lease or self._anyone
            held.ends[user] = max(held.ends.get(user, 0.0), time.monotonic() + ttl_s)
            if lease is not None:
                lease.add_pins(self)
            return held.group

    def lapse(self) -> None:
        """Unpin what no lease wants any more, or whose time is over."""
        if not self._held or self._process != os.getpid():  # in a forked child pins, and locks, are the parent's
            return
        now = time.monotonic()
        with self._lock:
            for key, held in list(self._held.items()):
                for lease in [lease for lease, end in held.ends.items() if end < now]:
                    del held.ends[lease]
                if not held.ends:
                    del self._held[key]
                    self._groups.release(*key)

    def drop(self, lease: EngineLease) -> None:
        """Unpin what only this lease wants pinned."""
        if self._process != os.getpid():
            return
        with self._lock:
            for held in self._held.values():
                held.ends.pop(lease, None)
        self.lapse()


def _digest(asked: tuple[Any, ...]) -> str:
    try:
        said = repr(asked)
    except RecursionError:  # refused where it is rendered
        said = ""
    return hashlib.blake2b(said.encode("utf-8", "surrogatepass"), digest_size=6).hexdigest()
