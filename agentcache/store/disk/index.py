"""Index of the pages on disk: the longest stored prefix of a prompt, pages to evict or delete. Knows no bytes of pages.

a blob is written first, its row last; a row is removed first, its blob last, by the process that removed the row
found by    page_key = BLAKE3(parent key ‖ ids) for whole pages, then under the last one by the first 8 ids; ids are always compared
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from typing import Any

import numpy as np

from ...errors import BlobError
from ...types import PAGE_TOKENS
from ..entry import common
from ..keys import Ids, Scope, chain
from . import schema
from .index_metadata import IndexMetadata, pinned, tick, where
from .schema import COLUMNS, KEY, NAMES, Row, decode, decode_ids, encode, readable

CHILDREN = 256  # partial pages under one parent; also how many continuations a lookup compares
ASKED = 32  # whole pages looked up by one statement
LISTED = 256  # rows read at once
SAME = "page_key = ? AND fingerprint = ? AND precision = ?"
BY_ID = f"SELECT {COLUMNS} FROM pages WHERE id = ?"
CHILD = "SELECT 1 FROM pages WHERE parent = ? AND fingerprint = ? LIMIT 1"
UNDER = "parent = ? AND fingerprint = ? AND precision = ?"


class Index(IndexMetadata, AbstractContextManager["Index"]):
    """The index of one store. Thread safe; many processes may hold it at once, and a fork of one may go on using it.

    StoreCorruptError: the file is damaged, `rebuild` makes it anew. In a read-only folder methods that write do nothing.
    """

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- looking up ------------------------------------------------------------------------------------------------

    def longest(
        self, scope: Scope, ids: Ids, limit: int, precision: str = "exact", *, start: int = 0, parent: bytes | None = None
    ) -> list[tuple[Row, int]]:
        """Rows that hold the longest known prefix of ids[start:limit], each with how many of its tokens are common; quarantined ones never.
        Of `precision`, or exact ones, which come first.

        start: a multiple of 512, of a prefix with the key `parent`. A continuation that differs within its first 8 ids is not found.
        """
        assert start % PAGE_TOKENS == 0
        above = scope.root if parent is None else parent
        limit = min(limit, len(ids))
        found: list[tuple[Row, int]] = []
        at = start
        while limit - at >= PAGE_TOKENS:
            rows = self._whole(scope, ids[at:limit], precision, above, at // PAGE_TOKENS)
            found += [(row, PAGE_TOKENS) for row in rows]
            at += len(rows) * PAGE_TOKENS
            above = rows[-1].page_key if rows else above
            if len(rows) < ASKED:
                break
        if limit > at:
            found += self._partial(scope, ids[at : min(limit, at + PAGE_TOKENS)], precision, above, at // PAGE_TOKENS)
        return found

    def _whole(self, scope: Scope, ids: Ids, precision: str, above: bytes, place: int) -> list[Row]:
        """Up to ASKED whole pages in a row from the start of ids."""
        count = min(ASKED, len(ids) // PAGE_TOKENS)
        keys = chain(above, ids[: count * PAGE_TOKENS])
        marks = ", ".join("?" * count)
        sql = f"SELECT {COLUMNS} FROM pages WHERE page_key IN ({marks}) AND fingerprint = ? AND precision = ? AND bad IS NULL"
        kinds = dict.fromkeys((precision, "exact"))  # each once
        by_key = {record[KEY]: record for kind in kinds for record in self._all(sql, *keys, scope.fingerprint, kind)}
        rows: list[Row] = []
        for i, (key, parent) in enumerate(zip(keys, (above, *keys))):
            row = self._decoded(by_key.get(key), scope, parent, place + i)
            if row is None or row.ids.tobytes() != ids[i * PAGE_TOKENS : (i + 1) * PAGE_TOKENS].tobytes():
                break
            rows.append(row)
        return rows

    def _partial(self, scope: Scope, ids: Ids, precision: str, above: bytes, place: int) -> list[tuple[Row, int]]:
        """The page under `above` that has most in common with ids; of equals the shortest, which is read fastest."""
        head = schema.head(self.folder, ids)
        sql = f"SELECT id, page_key, tokens, ids FROM pages WHERE {UNDER} AND head = ? AND bad IS NULL ORDER BY used DESC LIMIT {CHILDREN}"
        kinds = dict.fromkeys(("exact", precision))  # each once
        records = [record for kind in kinds for record in self._all(sql, above, scope.fingerprint, kind, head)]
        best, shortest, chosen, wanted = 0, 0, 0, ids.tobytes()
        for id, *sealed in records:
            try:
                known = decode_ids(self.folder, *sealed)
            except BlobError:  # `check` finds it
                continue
            if known[: 4 * best + 4] == wanted[: 4 * best + 4] and 4 * best < len(wanted):
                best, shortest, chosen = common(np.frombuffer(known, dtype=ids.dtype), ids), len(known), id
            elif len(known) < shortest and known[: 4 * best] == wanted[: 4 * best]:
                shortest, chosen = len(known), id
        record = self._all(BY_ID, chosen) if best else []
        row = self._decoded(record[0] if record else None, scope, above, place)
        return [] if row is None else [(row, best)]

    def continuations(self, scope: Scope, above: bytes, first: Ids, known: Collection[bytes]) -> dict[bytes, Ids]:
        """The ids of each page under `above` that begins with `first`, by key, but for those known; quarantined ones never."""
        sql = f"SELECT page_key, tokens, ids FROM pages WHERE {UNDER} AND namespace = ? AND regime = ? AND bad IS NULL"
        values: list[object] = [above, scope.fingerprint, scope.precision, scope.namespace, scope.regime]
        if len(first) >= schema.HEAD_TOKENS:
            sql, values = f"{sql} AND head = ?", [*values, schema.head(self.folder, first)]
        found: dict[bytes, Ids] = {}
        for key, tokens, sealed in self._all(f"{sql} ORDER BY used DESC LIMIT {CHILDREN}", *values):
            if key in known:
                continue
            with suppress(BlobError):  # `check` finds it
                ids = np.frombuffer(decode_ids(self.folder, key, tokens, sealed), dtype=np.uint32)
                if common(ids, first) == len(first):
                    found[key] = ids
        return found

    def elsewhere(self, scope: Scope, ids: Ids) -> str:
        """The fingerprint of other weights under which a page begins as this prompt does, if these weights have none such; else ""."""
        sql = "SELECT DISTINCT fingerprint FROM pages WHERE parent = ? AND head = ? AND bad IS NULL ORDER BY fingerprint"
        found = [fingerprint for (fingerprint,) in self._all(sql, scope.root, schema.head(self.folder, ids))]
        return "" if any(one.partition("+")[0] == scope.weights for one in found) else next(iter(found), "")

    def _decoded(self, record: tuple[Any, ...] | None, scope: Scope, above: bytes, place: int) -> Row | None:
        """A row, if it belongs where it was found."""
        for row in readable(self.folder, filter(None, (record,))):
            if (row.namespace, row.regime, row.parent, row.place) == (scope.namespace, scope.regime, above, place):
                return row
        return None

    def row(self, key: bytes, fingerprint: str, precision: str = "exact") -> Row | None:
        """The row of one page, quarantined or not; None if there is none."""
        sql = f"SELECT {COLUMNS} FROM pages WHERE {SAME}"
        found = self._all(sql, key, fingerprint, precision)
        return decode(self.folder, found[0]) if found else None

    def rows(
        self, *, namespace: str | None = None, fingerprint: str | None = None, parent: bytes | None = None,
        key: bytes | None = None, bad: bool | None = None, before: float | None = None,
    ) -> Iterator[Row]:  # fmt: skip
        """All rows with these properties, in the order in which they came; damaged ones are left out (check). before: by time.time()."""
        condition, values = where(before, namespace=namespace, fingerprint=fingerprint, parent=parent, page_key=key)
        if bad is not None:
            condition += f" AND bad IS {'NOT ' if bad else ''}NULL"
        ids = self._all(f"SELECT id FROM pages{condition} ORDER BY id", *values)
        for first in range(0, len(ids), LISTED):
            some = [id for (id,) in ids[first : first + LISTED]]
            sql = f"SELECT {COLUMNS} FROM pages WHERE id IN ({', '.join('?' * len(some))}) ORDER BY id"
            yield from self._sound(self._all(sql, *some))

    def has_pages(self, keys: Sequence[str], fingerprint: str) -> bool:
        """Tell whether all these pages (keys in hexadecimal) have rows that are not quarantined."""
        sql = "SELECT 1 FROM pages WHERE page_key = ? AND fingerprint = ? AND bad IS NULL"
        asked = [(bytes.fromhex(key), fingerprint) for key in keys]
        return self.database.read(lambda connection: all(connection.execute(sql, one).fetchone() for one in asked))

    def total(self) -> tuple[int, int]:
        """Number of rows, and the bytes of their blobs."""
        return self.database.read(lambda connection: connection.execute("SELECT rows, bytes FROM totals").fetchone())

    def present(self, ids: Iterable[int]) -> set[int]:
        """The subset of these row ids that exist and are not quarantined."""
        wanted = list(ids)
        sql = "SELECT 1 FROM pages WHERE id = ? AND bad IS NULL"
        return self.database.read(lambda connection: {id for id in wanted if connection.execute(sql, (id,)).fetchone()})

    def has_blobs(self, names: Iterable[str]) -> set[str]:
        """The subset of these blob names that a row has."""
        wanted = list(names)
        sql = "SELECT 1 FROM pages WHERE blob = ?"
        return self.database.read(lambda connection: {name for name in wanted if connection.execute(sql, (name,)).fetchone()})

    # -- adding ----------------------------------------------------------------------------------------------------

    def add(self, rows: Sequence[Row], wanted: Callable[[sqlite3.Connection], bool] = lambda connection: True) -> list[Row]:
        """Insert rows. Returns all whose blobs are to be unlinked now: of `rows` those that were known already, and those that gave way.

        wanted: asked in the same transaction; if not, none is inserted.

        A page gives way to a longer one under its parent that begins with its ids, and to newer ones if there are too many partial pages
        under their parent; never if it is pinned, or serves a higher role. A page that is known already keeps the higher of both roles.
        """

        def insert(connection: sqlite3.Connection) -> list[Row]:
            if not wanted(connection):
                return list(rows)
            spare: list[Row] = []
            held = pinned(connection)
            for row in rows:
                twin = connection.execute("SELECT max(role) FROM pages WHERE page_key = ? AND fingerprint = ?", _key(row)[:2]).fetchone()[0]
                row = replace(row, role=max(int(row.role), twin or 0))  # what it does in fewer bits it does exactly
                if self._insert(connection, row, tick(connection)):
                    spare += self._covered(connection, row, held)
                    spare += self._crowded(connection, row, held)
                elif not connection.execute(f"SELECT 1 FROM pages WHERE {SAME} AND blob = ?", (*_key(row), row.blob)).fetchone():
                    spare.append(row)
            return spare

        return self._write(insert, list(rows))

    def _insert(self, connection: sqlite3.Connection, row: Row, used: int) -> bool:
        names = ", ".join((*NAMES[1:], "head"))
        marks = ", ".join("?" * len(NAMES))
        sql = f"INSERT INTO pages ({names}) VALUES ({marks}) ON CONFLICT (page_key, fingerprint, precision) DO NOTHING"
        if connection.execute(sql, encode(self.folder, row, used)).rowcount:
            return True
        connection.execute(f"UPDATE pages SET role = ? WHERE {SAME} AND role < ?", (int(row.role), *_key(row), int(row.role)))
        return False

    def _covered(self, connection: sqlite3.Connection, row: Row, held: set[int]) -> list[Row]:
        """Delete shorter partial pages that `row` begins with, and the same page in fewer bits; returns them. A page of fewer numerics
        stays: it is bitwise for more machines."""
        same = "(precision = ? AND tokens < ?)" if row.precision != "exact" else "(precision = ? AND tokens < ? OR precision != 'exact')"
        sql = f"SELECT {COLUMNS} FROM pages WHERE parent = ? AND fingerprint = ? AND {same} AND head = ? AND role <= ?"
        head = schema.head(self.folder, row.ids)
        values = (row.parent, row.fingerprint, row.precision, row.tokens, head, int(row.role))
        shorter = self._sound(connection.execute(sql, values).fetchall())
        gone = [
            other
            for other in shorter
            if other.id not in held and common(other.ids, row.ids) == other.tokens and row.numerics <= other.numerics and not row.bad
        ]
        return _delete(connection, gone)

    def _crowded(self, connection: sqlite3.Connection, row: Row, held: set[int]) -> list[Row]:
        """Delete the least recently used partial pages under the parent of `row`, beyond CHILDREN; returns them. They have no children."""
        if row.tokens == PAGE_TOKENS:
            return []
        beside = (row.parent, row.fingerprint, row.precision)
        count = connection.execute(f"SELECT count(*) FROM pages WHERE {UNDER} AND tokens < {PAGE_TOKENS}", beside).fetchone()[0]
        if count <= CHILDREN:
            return []
        sql = f"SELECT {COLUMNS} FROM pages WHERE {UNDER} AND tokens < {PAGE_TOKENS} AND role <= ? ORDER BY bad IS NULL, role, used"
        others = self._sound(connection.execute(sql, (*beside, int(row.role))))
        gone = [other for other in others if other.id not in held and other.page_key != row.page_key]
        return _delete(connection, gone[: count - CHILDREN])

    def restore(self, rows: Sequence[Row]) -> int:
        """Insert rows as they are, uses and quarantine included, and let nothing give way; returns how many were new."""

        def insert(connection: sqlite3.Connection) -> int:
            connection.execute("UPDATE totals SET clock = max(clock, ?)", (max((row.used for row in rows), default=0),))
            return sum(self._insert(connection, row, row.used) for row in rows)

        return self._write(insert, 0)

    def touch(self, ids: Iterable[int]) -> set[int]:
        """Count rows as used now, in this order; returns those that are gone."""
        used = list(ids)

        def touches(connection: sqlite3.Connection) -> set[int]:
            first = tick(connection, len(used))
            sql = "UPDATE pages SET used = ?, hits = hits + 1 WHERE id = ?"
            return {id for i, id in enumerate(used) if not connection.execute(sql, (first + i, id)).rowcount}

        return self._write(touches, set()) if used else set()

    def exchange(self, row: Row, new: Row) -> Row:
        """Let a row name the blob of `new`, of the same page with other checkpoints, or in fewer bits. Returns whose blob is to be unlinked
        now: the old one's, or that of `new` where the row is gone or another meanwhile, or is pinned and would lose bits."""

        def exchanges(connection: sqlite3.Connection) -> Row:
            sql = "UPDATE pages SET blob = ?, bytes = ?, checkpoint_bytes = ?, precision = ?, numerics = ? WHERE id = ? AND blob = ?"
            values = new.blob, new.bytes, new.checkpoint_bytes, new.precision, ",".join(sorted(new.numerics)), row.id, row.blob
            lossy = new.precision != row.precision
            if (lossy and row.id in pinned(connection)) or not connection.execute(sql, values).rowcount:
                return new
            connection.execute("UPDATE totals SET bytes = bytes + ?", (new.bytes - row.bytes,))
            return row

        return self._write(exchanges, new)

    def promote(self, ids: Iterable[int], role: int) -> list[Row]:
        """Let pages serve at least this role. Returns shorter pages that give way to them now, whose blobs are to be unlinked."""
        wanted = list(ids)

        def promotes(connection: sqlite3.Connection) -> list[Row]:
            connection.executemany("UPDATE pages SET role = ? WHERE id = ? AND role < ?", [(int(role), id, int(role)) for id in wanted])
            found = [connection.execute(BY_ID, (id,)).fetchone() for id in wanted]
            held = pinned(connection)
            return [gone for row in self._sound(filter(None, found)) for gone in self._covered(connection, row, held)]

        return self._write(promotes, [])

    # -- removing --------------------------------------------------------------------------------------------------

    def remove(self, ids: Iterable[int], force: bool = False, freeing: Callable[[Row], object] | None = None) -> list[Row]:
        """Remove rows, in this order; returns those removed, for the caller to unlink their blobs.

        Left alone unless forced: what running processes pin, and what still has children. freeing: unlinks each blob before the rows are
        gone for good; where a process that ends between the two may leave rows without blobs.
        """
        wanted = list(ids)

        def removes(connection: sqlite3.Connection) -> list[Row]:
            held = set() if force else pinned(connection)
            gone: list[Row] = []
            for id in wanted:
                key = connection.execute("SELECT page_key, fingerprint FROM pages WHERE id = ?", (id,)).fetchone()
                if key is None or id in held or (not force and connection.execute(CHILD, key).fetchone()):
                    continue
                gone += self._sound(connection.execute(BY_ID, (id,)).fetchall())
                connection.execute("DELETE FROM pages WHERE id = ?", (id,))
            if freeing is not None:
                for row in gone:
                    freeing(row)
            return gone

        return self._write(removes, []) if wanted else []

    def victims(self, need_bytes: int, spared: Collection[int] = ()) -> list[Row]:
        """Choose pages to evict for so many bytes, in order: quarantined ones, then by role and last use, a page never before its children.

        Pages that running processes pin, and those spared, are left out; all there is, if that does not suffice.
        """
        from . import eviction_order  # most requests make no room

        def choose(connection: sqlite3.Connection) -> list[Row]:
            chosen = eviction_order.victims(connection, need_bytes, pinned(connection).union(spared))
            return self._sound(connection.execute(BY_ID, (id,)).fetchone() for id in chosen)

        return self._snapshot(choose)

    def quarantine(self, id: int, why: str) -> bool:
        """Never serve this page again; returns whether it was there."""
        return bool(self._execute("UPDATE pages SET bad = ? WHERE id = ?", (why or "quarantined", id)))

    # -- damage ----------------------------------------------------------------------------------------------------

    def check(self) -> list[str]:
        """Faults of the file and its rows, in words; empty if it is sound. Reads all of it. `rebuild` mends them."""
        return self._snapshot(lambda connection: schema.faults(self.folder, connection))

    def _sound(self, records: Iterable[tuple[Any, ...]]) -> list[Row]:
        return list(readable(self.folder, records))


def _delete(connection: sqlite3.Connection, rows: list[Row]) -> list[Row]:
    connection.executemany("DELETE FROM pages WHERE id = ?", [(row.id,) for row in rows])
    return rows


def _key(row: Row) -> tuple[bytes, str, str]:
    return row.page_key, row.fingerprint, row.precision
