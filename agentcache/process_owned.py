"""A resource of the process that made it: closed once, refused in a forked child, never copied. Knows not what it holds."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from .errors import ConfigError, EngineClosedError, EngineForkedError

OF_STORES = ("agentcache-writer", "agentcache-read")  # begin the names of threads that a store waits for when it is closed


def off_store_threads(end: Callable[..., None]) -> Callable[..., None]:
    """`end`, run by a new thread if a store's thread calls it, which would wait for itself: garbage is collected on any thread."""

    def call(*given: Any) -> None:
        if threading.current_thread().name.startswith(OF_STORES):
            threading.Thread(target=end, args=given, name="agentcache-end").start()
        else:
            end(*given)

    return call


class ProcessOwned(AbstractContextManager[Any]):
    """Base of both kinds of engine. Close it, or use it as a context manager.

    _HOLDS: what no other process can have, in words. _end: releases it at the first call.
    """

    _HOLDS = ""
    _end: Callable[[], Any]
    _closed = False

    def __init__(self) -> None:
        self._process = os.getpid()

    @property
    def _here(self) -> bool:
        """Tell whether this process made it, and has its threads."""
        return self._process == os.getpid()

    @property
    def closed(self) -> bool:
        """Tell whether requests are refused: it was closed, or this process was forked from the one that made it."""
        return self._closed or not self._here

    def check_open(self) -> None:
        """Raise EngineClosedError or EngineForkedError where a request would."""
        if not self._here:
            raise EngineForkedError.of(self._process)
        if self._closed:
            raise EngineClosedError("the engine is closed: create a new one")

    def close(self) -> None:
        """End running requests and release what it holds. Closing twice is fine."""
        self._closed = True
        self._end()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return the engine itself: a copy of an object that uses it uses the same one."""
        return self

    def __reduce__(self) -> str:
        name = getattr(self, "name", "")
        raise ConfigError(f"{type(self).__name__}({name!r}) cannot be pickled: it holds {self._HOLDS}; make one in each process, by name")

    def __exit__(self, *exc: object) -> None:
        self.close()
