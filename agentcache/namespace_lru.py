"""Values used last, by namespace: bounded, and forgotten with what a namespace's owner deletes. Knows nothing of the values."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, Protocol, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Covering(Protocol):
    """A deletion on purpose."""

    def covers(self, namespace: str, made: float) -> bool:
        """Tell whether it covers an object of this namespace, made at that time."""


class NamespaceLRU(Generic[K, V]):
    """At most `most` values of all namespaces, of at most `most_size` as `size` counts them. Safe to use from many threads.

    made: when a value was made, by time.time(); 0 for one that is made again where it is forgotten.
    """

    def __init__(
        self, most: int, most_size: int = 0, size: Callable[[V], int] = lambda value: 0, made: Callable[[V], float] = lambda value: 0.0
    ) -> None:
        self._most, self._most_size, self._size, self._made = most, most_size, size, made
        self._values: OrderedDict[tuple[str, K], V] = OrderedDict()  # least recently used first
        self._sum = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._values)

    def get(self, namespace: str, key: K) -> V | None:
        """The value of that key; None if there is none."""
        with self._lock:
            found = self._values.get((namespace, key))
            if found is not None:
                self._values.move_to_end((namespace, key))
            return found

    def put(self, namespace: str, key: K, value: V) -> None:
        """Remember a value; the least recently used ones go when a bound is reached."""
        with self._lock:
            self._pop((namespace, key))
            self._values[namespace, key] = value
            self._sum += self._size(value)
            while len(self._values) > 1 and (len(self._values) > self._most or self._sum > self._most_size):
                self._pop(next(iter(self._values)))

    def forget(self, deletion: Covering) -> None:
        """Forget the values that a deletion covers."""
        with self._lock:
            for name in [name for name, value in self._values.items() if deletion.covers(name[0], self._made(value))]:
                self._pop(name)

    def _pop(self, name: tuple[str, K]) -> None:
        if (value := self._values.pop(name, None)) is not None:
            self._sum -= self._size(value)
