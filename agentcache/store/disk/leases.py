"""Leases of this process: prefixes that it computes while others wait, and prefixes that it waits for. Knows no pages.

taken ──> computed ──> written ──> released        a writer learns from `awaited` that another process waits for one of them
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from blake3 import blake3

from ...errors import FAULTS, StoreBusyError
from . import process_identity
from .index import Index

Prefix = tuple[bytes, str]  # the key of its last page, and the fingerprint


class Lease(NamedTuple):
    """A process that computes a prefix, and since when (time.time())."""

    process: str
    since: float


class Leases:
    """take() and release() from any thread. after: runs a job on the writing thread once everything offered before is written.

    held: prefixes that this process has said it computes.
    """

    def __init__(self, index: Index, process: str, after: Callable[[Callable[[], object]], None]) -> None:
        self._index, self._process, self._after = index, process, after
        self.held: set[Prefix] = set()
        self._computed: set[Prefix] = set()  # of these, those whose pages are on their way to the disk

    def take(self, key: bytes, fingerprint: str) -> Lease | None:
        """Take the lease of a prefix that this process computes. None: it is taken; else the lease of the live process that has it.

        StoreBusyError at once, if another process holds the file: the answer waits for no write.
        """
        if not self._index.folder.writable:
            return None

        def take(connection: sqlite3.Connection) -> Lease | None:
            known = connection.execute("SELECT process, since FROM leases WHERE key = ? AND fingerprint = ?", (key, fingerprint)).fetchone()
            if known is not None and process_identity.alive(*known):
                return Lease(*known)
            connection.execute(TAKE, (key, fingerprint, self._process, time.time()))
            return None

        other = self._index.database.write(take, brief=True)
        if other is None:
            self.held.add((key, fingerprint))
        return other

    def awaited(self) -> bool:
        """Tell whether another process waits for a prefix that is computed here, but not written yet."""
        with suppress(*FAULTS):  # then it waits as long as it would; the writing thread goes on
            return any(self.is_awaited(*prefix) for prefix in tuple(self._computed))
        return False

    def is_awaited(self, key: bytes, fingerprint: str) -> bool:
        """Tell whether a process waits for this prefix."""
        sql = "SELECT count(*) FROM leases WHERE key = ? AND fingerprint = ?"
        return bool(self._index.database.read(lambda connection: connection.execute(sql, (_waited(key), fingerprint)).fetchone()[0]))

    def release(self, key: bytes, fingerprint: str) -> None:
        """Release a prefix that is computed, or will not be, once its pages are written."""
        self._computed.add((key, fingerprint))
        self._after(lambda: self._release(key, fingerprint))

    def _release(self, key: bytes, fingerprint: str) -> None:
        self._give_back(key, fingerprint)
        for prefixes in (self._computed, self.held):
            prefixes.discard((key, fingerprint))

    def _give_back(self, key: bytes, fingerprint: str) -> None:
        """Delete a row of this process."""
        sql = "DELETE FROM leases WHERE key = ? AND fingerprint = ? AND process = ?"
        if self._index.folder.writable:
            self._index.database.write(lambda connection: connection.execute(sql, (key, fingerprint, self._process)))

    def close(self) -> None:
        for prefix in tuple(self.held):
            self._release(*prefix)

    # -- those of others -------------------------------------------------------------------------------------------

    def wait(self, key: bytes, fingerprint: str) -> None:
        """Let the process that computes a prefix know that this one waits; where the index is busy, it writes after its answer."""
        values = (_waited(key), fingerprint, self._process, time.time())
        with suppress(StoreBusyError):
            self._index.database.write(lambda connection: connection.execute(TAKE, values), brief=True)

    def stop_waiting(self, key: bytes, fingerprint: str) -> None:
        self._after(lambda: self._give_back(_waited(key), fingerprint))


TAKE = "INSERT OR REPLACE INTO leases VALUES (?, ?, ?, ?)"


def _waited(key: bytes) -> bytes:
    """The key under which those are written down who wait for the prefix `key`."""
    return blake3(b"waited" + key).digest()
