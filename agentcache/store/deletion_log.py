"""Deletions on purpose, numbered: how every running process drops the pages that another one, or a command, deleted. Knows no contents.

    record first, in the index ──> then rows and blobs go ──> a running process sees another `generation` file, and reads the new rows

The number of the last one is the store's generation. A page of a request that was received before a deletion is never written after it: the
writing transaction asks for the deletions since then.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from .keys import Ids, Scope

if TYPE_CHECKING:
    from .deletion import Deletion

MOST = 1024  # deletions that are remembered; a process that has missed more drops everything


class Moment(NamedTuple):
    """When something was received or made: after which deletion, and by time.time()."""

    generation: int
    made: float


class DeletionLog:
    """The deletions that this process has applied. Thread safe.

    lock: held while pages are dropped or admitted, and while the writing thread reads several fields of a page in memory.
    generation: number of the last deletion that is applied.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.generation = 0
        self._applied: deque[Deletion] = deque(maxlen=MOST)
        self._under_way: list[Deletion] = []

    @contextmanager
    def under_way(self, deletion: Deletion) -> Iterator[None]:
        """Count a deletion of this process as later than any moment, from before it is recorded on disk until it is applied."""
        with self.lock:
            self._under_way.append(deletion)
        try:
            yield
        finally:
            with self.lock:
                self._under_way.remove(deletion)

    def add(self, deletion: Deletion) -> None:
        """Note that a deletion is applied."""
        self._applied.append(deletion)
        self.generation = deletion.generation

    def since(self, generation: int) -> list[Deletion]:
        """Return the deletions after a generation, and those under way."""
        if generation == self.generation:
            return self._under_way.copy()  # another thread may end one while this one looks
        from .deletion import EVERYTHING

        later = [deletion for deletion in self._applied if deletion.generation > generation]
        return later + self._under_way if len(later) >= self.generation - generation > 0 else [EVERYTHING]

    def everything_deleted(self, namespace: str, received: Moment) -> bool:
        """Tell whether everything of a namespace that was received at that moment has been deleted since."""
        return any(deletion.covers(namespace, received.made) for deletion in self.since(received.generation))

    def deleted(self, scope: Scope, ids: Ids, received: Moment) -> bool:
        """Tell whether a page of a sequence that was received at that moment has been deleted since."""
        return any(deletion.covers_sequence(scope, ids, received.made) for deletion in self.since(received.generation))
