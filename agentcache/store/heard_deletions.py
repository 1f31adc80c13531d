"""Deletions on purpose, numbered: how every process that runs lets go of what one of them, or a command, deleted. Knows no contents.

    record first, in the index ──> then rows and blobs go ──> a running process sees another `generation` file, and reads the new rows

The number of the last one is the store's generation. Whatever was received before a deletion is never written after it: what writes asks,
in its own transaction, for the deletions since then.
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

MOST = 1024  # deletions that are remembered; who has missed more lets go of everything


class Moment(NamedTuple):
    """When something was received: up to which deletion that is known, and by time.time()."""

    generation: int
    made: float


class Deletions:
    """Those that this process has heard of. Thread safe. lock: held while it lets go, while pages are admitted that may have to go, and
    while the writing thread looks at more than one thing of a page in memory.

    generation: up to which deletion it has let go.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.generation = 0
        self._heard: deque[Deletion] = deque(maxlen=MOST)
        self._under_way: list[Deletion] = []

    @contextmanager
    def under_way(self, deletion: Deletion) -> Iterator[None]:
        """Count a deletion of this process as one of any moment, from before it is recorded on disk until it is heard."""
        with self.lock:
            self._under_way.append(deletion)
        try:
            yield
        finally:
            with self.lock:
                self._under_way.remove(deletion)

    def hear(self, deletion: Deletion) -> None:
        """It is let go of."""
        self._heard.append(deletion)
        self.generation = deletion.generation

    def since(self, generation: int) -> list[Deletion]:
        """Those after a generation, and those under way."""
        if generation == self.generation:
            return self._under_way.copy()  # another thread may end one while this one looks
        from .deletion import EVERYTHING

        found = [deletion for deletion in self._heard if deletion.generation > generation]
        return found + self._under_way if len(found) >= self.generation - generation > 0 else [EVERYTHING]

    def cover(self, namespace: str, received: Moment) -> bool:
        """Tell whether all that was received then in this namespace has been deleted since."""
        return any(deletion.covers(namespace, received.made) for deletion in self.since(received.generation))

    def meet(self, scope: Scope, ids: Ids, received: Moment) -> bool:
        """Tell whether something of a sequence that was received then has been deleted since."""
        return any(deletion.meets(scope, ids, received.made) for deletion in self.since(received.generation))
