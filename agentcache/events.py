"""Events of one request, from the thread that computes it to its caller, in order. Knows no requests."""

from __future__ import annotations

import queue
from collections.abc import Callable
from dataclasses import dataclass

from .errors import AgentCacheError


@dataclass(frozen=True, slots=True)
class Chunk:
    """Text that has become certain, and the ids decoded since the last chunk."""

    text: str
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Progress:
    """Number of prompt tokens that are filled."""

    done: int
    total: int


class Done:
    """Marks the end of a request's events."""


Event = Chunk | Progress | Done | AgentCacheError


class Events:
    """The events of one request: put by the device's thread, taken by its caller, which may ask to be woken instead of waiting.

    cancelled: the caller wants no more events.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._wake: Callable[[], None] | None = None
        self.cancelled = False

    def put(self, event: Event) -> None:
        """Add an event, and wake the listener."""
        self._queue.put(event)
        if (wake := self._wake) is not None:
            wake()

    def get(self) -> Event:
        """Return the next event; wait for it."""
        return self._queue.get()

    def take(self) -> Event | None:
        """Return the next event, None if there is none yet."""
        try:
            return self._queue.get_nowait()
        except queue.Empty:
            return None

    def listen(self, wake: Callable[[], None] | None) -> None:
        """Call `wake`, in the device's thread, after each event that comes. It must return at once and raise nothing."""
        self._wake = wake

    def cancel(self) -> None:
        """Say that the caller wants no more events."""
        self.cancelled = True
