"""Windows of cached prompts, found again by their signatures, in memory and in the index of the store on disk. Knows no models.

recorded after the answer: signed, cached in memory, written      a later process reads those of a scope when it first asks for them

They are not part of what can be made again from the blobs, which hold ids and no text: lost, they come again with use.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Iterable, Sequence

from blake3 import blake3

from ..store.deletion_log import Moment
from ..store.disk.disk_tier import DiskTier
from ..store.disk.folder import Folder
from ..store.disk.index_metadata import named, tick
from ..store.disk.schema import guard, unguard
from ..store.keys import Ids, Scope, chain
from ..store.store import Store
from ..types import PAGE_TOKENS
from .minhash import MOST, TAU, LSHIndex, Proposal, StoredText
from .windows import Window

MOST_ROWS = 65_536  # of 0.8 kB each, in all scopes together
YOUNG_S = 60.0
OF_SCOPE = "namespace = ? AND fingerprint = ? AND regime = ?"


class MinHashIndex:
    """Windows of one store's prompts, found again by this process and later ones; none without a disk. Thread safe.

    tau: least similarity of a proposal. ConfigError: it is wrong, or datasketch is not installed, which takes seconds to load.
    """

    def __init__(self, store: Store, tau: float = TAU) -> None:
        self.signatures = LSHIndex(tau)
        self.store = store
        self._read: dict[Scope, int] = {}  # up to which row
        self._lock = threading.Lock()
        store.on_deletion(lambda done: self.clear(done.namespace))
        store.on_renewal(self.clear)  # a new folder holds no signatures

    def retune(self, tau: float) -> None:
        """Lower `tau` to that of another calibration, whose proposals need a new index; a higher one changes nothing."""
        if tau < self.signatures.tau:
            self.signatures, self._read = LSHIndex(tau), {}

    # -- adding ----------------------------------------------------------------------------------------------------

    def add(self, scope: Scope, ids: Ids, windows: Sequence[Window], received: Moment | None = None) -> None:
        """Add the windows of a cached prompt, on the writing thread. received: when the prompt was; no effect if it was deleted since."""
        if windows and scope.precision == "exact" and (disk := self.store.disk):
            moment = received or self.store.apply_deletions()
            disk.writer.after(lambda: self.add_now(disk, scope, ids, windows, moment))

    def add_now(self, disk: DiskTier, scope: Scope, ids: Ids, windows: Sequence[Window], received: Moment) -> int:
        """Add them at once; returns how many were new."""
        keys = [scope.root, *chain(scope.root, ids)]
        new = []
        for window in windows:
            assert window.start < window.stop <= len(ids)
            page = (window.start + window.stop) // 2 // PAGE_TOKENS
            signature = self.signatures.signer.sign(window)
            kept = StoredText(
                signature, exact(ids, window), keys[page], page, window.start - page * PAGE_TOKENS, window.stop - window.start
            )
            if self.signatures.add(scope, kept):
                new.append(kept)
        self._put(disk, scope, ids, new, received)
        return len(new)

    def _put(self, disk: DiskTier, scope: Scope, ids: Ids, new: Sequence[StoredText], received: Moment) -> None:
        folder, key = disk.folder, _key(scope)
        names = [_name(folder, kept) for kept in new]
        sealed = [(name, guard(folder, kept.pack(), named("segment", *key, name))) for name, kept in zip(names, new, strict=True)]

        def put(connection: sqlite3.Connection) -> None:
            gone = disk.index.deletions_in(connection, received.generation)
            if any(done.covers_sequence(scope, ids, received.made) for done in gone):
                self.clear(scope.namespace)  # this process applied the deletion before these were added
                return
            first = tick(connection, len(sealed))
            connection.executemany(
                "INSERT INTO segments (namespace, fingerprint, regime, name, packed, created, used) VALUES (?, ?, ?, ?, ?, ?, ?) "
                "ON CONFLICT (namespace, fingerprint, regime, name) "
                "DO UPDATE SET packed = excluded.packed, created = excluded.created, used = excluded.used",
                [(*key, *segment, time.time(), first + i) for i, segment in enumerate(sealed)],
            )
            over = connection.execute("SELECT count(*) FROM segments").fetchone()[0] - MOST_ROWS
            if over > 0:
                connection.execute("DELETE FROM segments WHERE id IN (SELECT id FROM segments ORDER BY used LIMIT ?)", (over,))

        if sealed and folder.writable:
            disk.index.database.write(put)

    # -- finding ---------------------------------------------------------------------------------------------------

    def find(self, scope: Scope, ids: Ids, window: Window) -> list[Proposal]:
        """Propose cached prompts that say nearly the same as a window of ids, as far as `refresh` has read them; likest first."""
        return self.signatures.find(scope, self.signatures.signer.sign(window), exact(ids, window))

    def refresh(self, scope: Scope) -> int:
        """Read the windows that other processes have added since; returns how many. Blocks on the index: not for the device's thread."""
        if (disk := self.store.disk) is None:
            return 0
        with self._lock:
            read = self._read
            known = read.pop(scope, 0) if scope in self.signatures else 0  # what had to leave memory is read again
            read[scope], found = self._rows(disk, scope, known)
            if len(read) > MOST:
                del read[next(iter(read))]
        return sum(self.signatures.add(scope, kept) for kept in found)

    def _rows(self, disk: DiskTier, scope: Scope, after: int) -> tuple[int, list[StoredText]]:
        key = _key(scope)
        sql = f"SELECT id, name, packed FROM segments WHERE {OF_SCOPE} AND id > ? ORDER BY id DESC LIMIT {MOST}"
        rows = disk.index.database.read(lambda connection: connection.execute(sql, (*key, after)).fetchall())
        found = []
        for _, name, packed in reversed(rows):
            plain = unguard(disk.folder, packed, named("segment", *key, name))
            if plain is not None and (kept := StoredText.unpack(plain)) is not None:
                found.append(kept)
        return (rows[0][0] if rows else after), found

    # -- after a proposal ------------------------------------------------------------------------------------------

    def mark_used(self, scope: Scope, kept: Iterable[StoredText]) -> None:
        """Count texts as used now: the least recently used rows go first."""
        sql = f"UPDATE segments SET used = ? WHERE {OF_SCOPE} AND name = ?"
        if (disk := self.store.disk) and disk.folder.writable and (values := [(*_key(scope), _name(disk.folder, one)) for one in kept]):
            disk.writer.after(lambda: disk.index.database.write(lambda c: c.executemany(sql, [(tick(c), *row) for row in values])))

    def drop_missing(self, scope: Scope, kept: Iterable[StoredText]) -> None:
        """Drop texts whose pages are not on disk; rows younger than YOUNG_S stay, since their pages may be on their way."""
        for one in kept:
            self.signatures.drop(scope, one)
        sql = f"DELETE FROM segments WHERE {OF_SCOPE} AND name = ? AND created < ?"
        if (disk := self.store.disk) and disk.folder.writable:
            values = [(*_key(scope), _name(disk.folder, one), time.time() - YOUNG_S) for one in kept]
            disk.writer.after(lambda: disk.index.database.write(lambda c: c.executemany(sql, values)))

    def clear(self, namespace: str | None = None) -> None:
        """Forget what this process knows until it is asked for again; rows go with the pages of their namespace."""
        self.signatures.clear(namespace)
        # rows added next must not seem to be all that there are; another dict: a `refresh` that runs meanwhile fills the old one
        self._read = {scope: row for scope, row in self._read.copy().items() if namespace not in (None, scope.namespace)}


def _name(folder: Folder, kept: StoredText) -> bytes:
    """Name of a window that tells nothing of its text without the store's key."""
    return blake3(kept.name, key=folder.key).digest(length=16)


def exact(ids: Ids, window: Window) -> bytes:
    """Digest of a window's ids."""
    return blake3(ids[window.start : window.stop].tobytes()).digest(length=16)


def _key(scope: Scope) -> tuple[str, str, str]:
    return scope.namespace, scope.fingerprint, scope.regime
