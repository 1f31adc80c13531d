"""Leases of this process: prefixes that it computes while others wait, and those that it waits for. Knows no pages.

taken ──> computed ──> written ──> released        a writer learns from `awaited` that another process waits for one of them
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from ...errors import StoreBusyError, StoreError
from .index import Index
from .index_metadata import Lease

Prefix = tuple[bytes, str]  # the key of its last page, and the fingerprint


class Leases:
    """take() and release() from any thread. after: runs a job on the writing thread once everything offered before is written."""

    def __init__(self, index: Index, process: str, after: Callable[[Callable[[], object]], None]) -> None:
        self._index, self._process, self._after = index, process, after
        self._held: set[Prefix] = set()
        self._computed: set[Prefix] = set()  # of these, those whose pages are on their way to the disk

    @property
    def held(self) -> frozenset[Prefix]:
        """Prefixes that this process has said it computes."""
        return frozenset(self._held)

    def take(self, key: bytes, fingerprint: str) -> Lease | None:
        """Say that this process computes a prefix. None: it does, from now on; else the lease of the process that said so before."""
        other = self._index.take_lease(key, fingerprint, self._process)
        if other is None:
            self._held.add((key, fingerprint))
        return other

    def awaited(self) -> bool:
        """Tell whether another process waits for a prefix that is computed here, but not written yet."""
        with suppress(StoreError):  # then it waits as long as it would
            return any(self._index.awaited(*prefix) for prefix in tuple(self._computed))
        return False

    def release(self, key: bytes, fingerprint: str) -> None:
        """Give back a prefix that is computed, or will not be, once its pages are written."""
        self._computed.add((key, fingerprint))
        self._after(lambda: self._release(key, fingerprint))

    def _release(self, key: bytes, fingerprint: str) -> None:
        for prefixes in (self._computed, self._held):
            prefixes.discard((key, fingerprint))
        self._index.release_lease(key, fingerprint, self._process)

    def close(self) -> None:
        """Give back all of them now."""
        for prefix in tuple(self._held):
            self._release(*prefix)

    # -- those of others -------------------------------------------------------------------------------------------

    def wait(self, key: bytes, fingerprint: str) -> None:
        """Let the process that computes a prefix know that this one waits; where the index is busy, it writes after its answer."""
        with suppress(StoreBusyError):
            self._index.await_lease(key, fingerprint, self._process)

    def stop_waiting(self, key: bytes, fingerprint: str) -> None:
        """Wait no longer."""
        self._after(lambda: self._index.stop_awaiting(key, fingerprint, self._process))
