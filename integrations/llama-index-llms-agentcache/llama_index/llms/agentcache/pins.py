"""Prefixes that are held because a CachePoint asked for it, until when, and by whom. Knows no prompts.

Models over one engine give equal prefixes equal names: a pin is let go when the last of those who asked for it does not hold it any more.
"""

from __future__ import annotations

import threading
import time
import weakref
from dataclasses import dataclass, field
from typing import Any

from agentcache import Engine, Message
from agentcache.errors import ConfigError

from .tools import Schema

Key = tuple[str, str]  # namespace and name


@dataclass(slots=True, eq=False)
class _Claims:
    """Of one engine: who holds what until when, on the monotonic clock."""

    until: dict[Key, dict[object, float]] = field(default_factory=dict)
    lock: threading.RLock = field(default_factory=threading.RLock)
    turn: threading.Lock = field(default_factory=threading.Lock)  # to pin; held for as long as a prompt takes


_engines: weakref.WeakKeyDictionary[Engine, _Claims] = weakref.WeakKeyDictionary()
_gate = threading.Lock()


class Pins:
    """What one model holds of an engine. Points whose time is over since they were last asked for are let go."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._me = object()
        self._closed = False
        with _gate:
            self._claims = _engines.setdefault(engine, _Claims())

    def hold(self, name: str, turns: list[Message], tools: tuple[Schema, ...], seconds: float, options: dict[str, Any]) -> str | None:
        """Pin what these turns and tools begin, as `name`; returns why not, if so. What cannot be pinned is answered all the same."""
        key = (options["namespace"], name)
        with self._claims.turn:  # the second of two that ask at once waits for the first
            held = self._claim(key, seconds)
            try:
                if not held:
                    self._engine.pin(turns, tools, name=name, **options)
                    held = True
            except ConfigError as error:
                return f"cache point not pinned: {error}"
            finally:
                if not held or self._closed:  # closed while it was computed
                    self._let_go(key, self._me)
        return None

    def _claim(self, key: Key, seconds: float) -> bool:
        """Hold it from now on; returns whether somebody does already."""
        now, claims = time.monotonic(), self._claims
        with claims.lock:
            over = [(one, who) for one, until in claims.until.items() for who, end in until.items() if end < now]
            for one, who in over:
                self._let_go(one, who)
            known = key in claims.until
            mine = claims.until.setdefault(key, {})
            mine[self._me] = max(mine.get(self._me, 0.0), now + seconds)
        return known

    def _let_go(self, key: Key, who: object) -> None:
        namespace, name = key
        with self._claims.lock:
            left = self._claims.until.pop(key, {})
            left.pop(who, None)
            if left:
                self._claims.until[key] = left
            else:
                self._engine.release(name, namespace=namespace)

    def close(self) -> None:
        """Let everything go that nobody else holds."""
        self._closed = True
        with self._claims.lock:
            for key in [key for key, until in self._claims.until.items() if self._me in until]:
                self._let_go(key, self._me)
