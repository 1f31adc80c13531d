"""The text of prompts that only the disk has: windows noted, asked for, and their pages brought into memory. Knows no requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..store.deletion import Moment
from ..store.keys import Ids, Scope
from ..store.store import Store
from .minhash import TAU, datasketch
from .minhash_index import MinHashIndex
from .segment_prefetch import SegmentPrefetch, SegmentQuery
from .windows import Window


class StoredText:
    """Text of one store's prompts. index: of their windows, None before `sign` and without a disk."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._index: MinHashIndex | None = None
        store.add_index(self)
        store.on_renewal(self._renew)

    def _renew(self) -> None:
        """A new folder holds no signatures."""
        if (index := self._index) is not None:
            self._index = None
            self.sign(index.signatures.tau)

    @property
    def index(self) -> MinHashIndex | None:
        """The index that finds windows; None where there is no disk, or none any more."""
        return self._index if self._store.disk is not None else None

    def clear(self, namespace: str | None) -> None:
        """Forget what this process has read of a namespace, or all, until it is asked for again."""
        if self._index is not None:
            self._index.clear(namespace)

    def sign(self, tau: float | None = None) -> None:
        """Keep signatures of what prompts say from now on, where there is a disk; those that are there can be asked for.

        tau: least similarity of a proposal, None for the present one. Loads a library for some seconds. ConfigError: it is not
        installed, or tau is wrong.
        """
        disk, index = self._store.disk, self.index
        if disk is not None and (index is None or tau not in (None, index.signatures.tau)):
            datasketch()
            self._index = MinHashIndex(disk.index, disk.writer.after, tau or TAU)

    def note(self, scope: Scope, ids: Ids, windows: Sequence[Window], received: Moment | None = None) -> None:
        """Remember the windows of an admitted prompt, after the answer; no effect before `sign`, nor if it was deleted since."""
        if (index := self.index) and scope.precision == "exact":
            index.note(scope, ids, windows, received or self._store.heed())

    def prefetch(self, wanted: SegmentQuery, wake: Callable[[], None]) -> SegmentPrefetch | None:
        """Bring pages into memory that repeat some of a prompt's text, if there may be any; None before `sign`."""
        store = self._store
        with store.deletions.lock:
            if (index := self.index) is None or store.disk is None or wanted.scope.precision == "approximate":
                return None
            if not store.tree.budget_bytes or not wanted.windows:
                return None
            return SegmentPrefetch(wanted, wake, index, store)
