"""Metadata of the index: deletions, pins, tool groups, splices, segments, rates, counters. Knows no pages but their ids.

Pins belong to processes (process_identity.py) and end with them; nothing has to tidy up.
"""

from __future__ import annotations

import functools
import math
import sqlite3
import struct
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from blake3 import blake3

from ...errors import StoreError
from ..deletion import Deletion
from ..deletion_log import MOST
from ..keys import Ids
from ..tool_group import ToolGroup
from . import process_identity
from .database import Database, T, Use, corrupt
from .folder import Folder
from .schema import counted, guard, sound, totals, unguard

MOST_SPLICES = 100_000
MOST_GONE = 1000  # groups and sessions without a page: what is left of them is the order of their tools
KEY_BYTES = 32
DELETING = "deleting"  # begins keys of what is being deleted: a number, and the process
DELETION = "namespace, before, forced, name, fingerprint, keys, prefix_tokens"
TEXT = struct.Struct("<16x16s32s4xiI")  # of a row of text: digest of its ids, key of the page before, its start, tokens (docs/format.md)


def tick(connection: sqlite3.Connection, count: int = 1) -> int:
    """The first of `count` new values of the counter that orders uses. In a transaction."""
    connection.execute("UPDATE totals SET clock = clock + ?", (count,))
    return connection.execute("SELECT clock FROM totals").fetchone()[0] - count + 1


def pinned(connection: sqlite3.Connection) -> set[int]:
    """Pages that running processes hold."""
    newest = connection.execute("SELECT process, max(since) FROM pins GROUP BY process").fetchall()
    live = [name for name, since in newest if process_identity.alive(name, since)]
    return {page for name in live for (page,) in connection.execute("SELECT page FROM pins WHERE process = ?", (name,))}


class IndexMetadata:
    """The index but for its pages. In a read-only folder nothing is written, nor raised for that. path, unshared: see Database.

    generation_offset: added to the store's numbers of deletions, in a process that has used another store before.
    """

    def __init__(self, folder: Folder, path: Path | None = None, *, unshared: bool = False) -> None:
        self.folder = folder
        self.generation_offset = 0
        self.database = Database(folder, path, unshared=unshared)
        try:
            if self.database.read(totals) is None:
                raise corrupt(folder.index, "its totals cannot be")
        except StoreError:
            self.close()
            raise

    def close(self) -> None:
        self.database.close()

    # -- deletions -------------------------------------------------------------------------------------------------

    def record_deletion(self, deletion: Deletion) -> None:
        """Number a deletion, before its pages go: writers know of it from now on."""
        if self.folder.writable:
            self.folder.write_generation(self.database.write(lambda connection: _record(connection, deletion)))

    def deletions(self, since: int) -> list[Deletion]:
        """The deletions after a generation, in order; one of everything where they are not all known any more."""
        return self.database.read(lambda connection: self.deletions_in(connection, since))

    def deletions_in(self, connection: sqlite3.Connection, since: int) -> list[Deletion]:
        """The same in a transaction."""
        sql = f"SELECT {DELETION}, generation FROM deletions WHERE generation > ? ORDER BY generation"
        found = [_deletion(record) for record in connection.execute(sql, (since - self.generation_offset,))]
        newest = found[-1].generation if found else _generation(connection)
        if len(found) != newest - since + self.generation_offset:  # not all are known any more: of everything
            found = [Deletion(generation=_generation(connection))]
        return [replace(one, generation=one.generation + self.generation_offset) for one in found]

    def generation(self) -> int:
        """The number of the last one."""
        return self.database.read(_generation) + self.generation_offset

    # -- pins ------------------------------------------------------------------------------------------------------

    def pin(self, ids: Iterable[int], holder: str) -> list[int]:
        """Keep these pages while process `holder` runs, until they are released as often; returns those that are (still) there."""
        wanted = list(ids)

        def pins(connection: sqlite3.Connection) -> list[int]:
            sql = (
                "INSERT INTO pins SELECT id, ?, 1, ? FROM pages WHERE id = ? "
                "ON CONFLICT (page, process) DO UPDATE SET count = count + 1, since = excluded.since"
            )
            return [id for id in wanted if connection.execute(sql, (holder, time.time(), id)).rowcount]

        return self._write(pins, wanted)

    def release_pins(self, ids: Iterable[int], holder: str) -> None:
        """Release one pin of each."""
        wanted = [(holder, id) for id in ids]

        def release(connection: sqlite3.Connection) -> None:
            connection.executemany("UPDATE pins SET count = count - 1 WHERE process = ? AND page = ?", wanted)
            connection.executemany("DELETE FROM pins WHERE process = ? AND page = ? AND count <= 0", wanted)

        self._write(release, None)

    def pinned(self) -> set[int]:
        """Pages that running processes hold."""
        return self.database.read(pinned)

    def drop_dead_pins(self) -> int:
        """Forget pins and leases of processes that have ended; returns how many."""

        def drop(connection: sqlite3.Connection) -> int:
            gone = 0
            for table in ("pins", "leases"):
                for name, since in connection.execute(f"SELECT process, max(since) FROM {table} GROUP BY process").fetchall():
                    if not process_identity.alive(name, since):
                        gone += connection.execute(f"DELETE FROM {table} WHERE process = ?", (name,)).rowcount
            return gone

        return self._write(drop, 0)

    # -- tool groups -----------------------------------------------------------------------------------------------

    def put_group(self, group: ToolGroup, since: int | None = None) -> None:
        """Keep a manifest, in place of an older one of that name; not if that was deleted after generation `since`."""
        about = (group.namespace, group.name, group.fingerprint)

        def put(connection: sqlite3.Connection) -> None:
            gone = self.deletions_in(connection, since) if since is not None else ()
            if any(deletion.covers_group(group) for deletion in gone):
                return
            last = group.merge(next(iter(self._groups(connection, *about)), None))
            sealed = guard(self.folder, last.to_json().encode(), named("group", *about))
            values = (*about, last.regime, sealed, last.tip, last.created or time.time(), tick(connection))
            connection.execute("INSERT OR REPLACE INTO groups VALUES (?, ?, ?, ?, ?, ?, ?, ?)", values)
            self._drop_gone(connection)

        self._write(put, None)

    def _drop_gone(self, connection: sqlite3.Connection) -> None:
        """Forget manifests whose last page is not here, with the model's own ids that they name, beyond the MOST_GONE latest recorded."""
        here = "EXISTS (SELECT 1 FROM pages WHERE page_key = tip AND pages.fingerprint = groups.fingerprint)"
        sql = f"SELECT namespace, name, fingerprint, manifest FROM groups WHERE NOT {here} ORDER BY used DESC LIMIT -1 OFFSET ?"
        for namespace, name, fingerprint, manifest in connection.execute(sql, (MOST_GONE,)).fetchall():
            condition, values = where(namespace=namespace, name=name, fingerprint=fingerprint)
            connection.execute(f"DELETE FROM groups{condition}", values)
            if (found := self._group(namespace, name, fingerprint, manifest)) is not None and found.splices:
                others = {key for other in self._groups(connection, namespace, None) for key in other.splices}  # forks share them
                ids = [(namespace, bytes.fromhex(key)) for key in found.splices if key not in others]
                connection.executemany("DELETE FROM splices WHERE namespace = ? AND key = ?", ids)

    def group(self, namespace: str, name: str, fingerprint: str) -> ToolGroup | None:
        """The manifest of that name; None if there is none, or it is damaged."""
        return next(iter(self.database.read(lambda connection: self._groups(connection, namespace, name, fingerprint))), None)

    def groups(self, namespace: str | None = None, name: str | None = None) -> list[ToolGroup]:
        """All manifests (of a namespace, of a name) that are not damaged, the latest recorded last."""
        return self.database.read(lambda connection: self._groups(connection, namespace, name))

    def _groups(
        self, connection: sqlite3.Connection, namespace: str | None, name: str | None, fingerprint: str | None = None
    ) -> list[ToolGroup]:
        condition, values = where(namespace=namespace, name=name, fingerprint=fingerprint)
        records = connection.execute(f"SELECT namespace, name, fingerprint, manifest FROM groups{condition} ORDER BY used", values)
        return [found for record in records.fetchall() if (found := self._group(*record)) is not None]

    def _group(self, namespace: str, name: str, fingerprint: str, manifest: object) -> ToolGroup | None:
        plain = unguard(self.folder, manifest, named("group", namespace, name, fingerprint))
        try:
            return None if plain is None else ToolGroup.from_json(plain.decode())
        except StoreError:
            return None

    def drop_group(self, namespace: str, name: str, fingerprint: str | None = None, until: float = math.inf) -> int:
        """Forget the manifests of that name that were made until then, not their pages; returns how many."""
        condition, values = where(namespace=namespace, name=name, fingerprint=fingerprint)
        return self._execute(f"DELETE FROM groups{condition} AND created <= ?", (*values, until))

    # -- the model's own ids ---------------------------------------------------------------------------------------

    def put_splices(self, splices: Iterable[tuple[str, bytes, bytes]], since: int | None = None, made: float | None = None) -> None:
        """Keep (namespace, key, ids), made at that time, but those deleted after generation `since`; beyond MOST_SPLICES the longest
        unused go."""
        now = time.time() if made is None else made
        known = [(namespace, key, guard(self.folder, ids, named("splice", namespace, key))) for namespace, key, ids in splices]

        def put(connection: sqlite3.Connection) -> None:
            gone = self.deletions_in(connection, since) if since is not None else ()
            first = tick(connection, len(known))
            connection.executemany(
                "INSERT INTO splices VALUES (?, ?, ?, ?, ?) "
                "ON CONFLICT (namespace, key) DO UPDATE SET ids = excluded.ids, used = excluded.used",
                [(*splice, now, first + i) for i, splice in enumerate(known) if not any(one.covers(splice[0], now) for one in gone)],
            )
            over = connection.execute("SELECT splices FROM totals").fetchone()[0] - MOST_SPLICES
            if over > 0:
                connection.execute("DELETE FROM splices WHERE rowid IN (SELECT rowid FROM splices ORDER BY used LIMIT ?)", (over,))

        if known:
            self._write(put, None)

    def splice(self, namespace: str, key: bytes) -> bytes | None:
        """The ids under that key; None if there are none, or they are damaged."""
        found = self._all("SELECT ids FROM splices WHERE namespace = ? AND key = ?", namespace, key)
        return unguard(self.folder, found[0][0], named("splice", namespace, key)) if found else None

    def drop_texts(self, table: Literal["splices", "segments"], namespace: str | None = None, before: float | None = None) -> int:
        """Forget generated ids, or rows by which repeated text is found, of a namespace (None: of all), made before that time (None: at any
        time); returns how many."""
        condition, values = where(before, namespace=namespace)
        return self._execute(f"DELETE FROM {table}{condition}", values)

    def drop_named_splices(self, namespace: str, names: Iterable[str]) -> int:
        """Forget the generated ids of these names, in hexadecimal; returns how many."""
        wanted = [(namespace, bytes.fromhex(name)) for name in names]
        sql = "DELETE FROM splices WHERE namespace = ? AND key = ?"
        return self._write(lambda connection: connection.executemany(sql, wanted).rowcount, 0) if wanted else 0

    def drop_segments_under(self, namespace: str, fingerprint: str, staying: Mapping[bytes, Sequence[Ids]]) -> int:
        """Delete the rows of all text in pages under these keys, but that of pages which stay there, by their ids; returns how many."""

        @functools.cache  # passages of a corpus begin at few places
        def said(parent: bytes, start: int, stop: int) -> set[bytes]:
            return {blake3(ids[start:stop].tobytes()).digest(length=16) for ids in staying[parent] if stop <= len(ids)}

        def stays(plain: bytes) -> bool:
            exact, parent, slot, tokens = TEXT.unpack_from(plain)
            return parent not in staying or (slot >= 0 and exact in said(parent, slot, slot + tokens))

        def drop(connection: sqlite3.Connection) -> int:
            sql, gone = "SELECT id, regime, name, packed FROM segments WHERE namespace = ? AND fingerprint = ?", []
            for id, regime, name, packed in connection.execute(sql, (namespace, fingerprint)):
                plain = unguard(self.folder, packed, named("segment", namespace, fingerprint, regime, name))
                if plain is None or not stays(plain):
                    gone.append((id,))
            connection.executemany("DELETE FROM segments WHERE id = ?", gone)
            return len(gone)

        return self._write(drop, 0) if staying else 0

    # -- rates and counters ----------------------------------------------------------------------------------------

    def get_meta(self, key: str) -> str | None:
        """Value that any process has set; None if none has, or it is damaged."""
        found = self._all("SELECT value FROM meta WHERE key = ?", key)
        plain = unguard(self.folder, found[0][0], named("meta", key)) if found else None
        return None if plain is None else plain.decode()

    def set_meta(self, key: str, value: str) -> None:
        """Remember a value for all processes."""
        self._execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, guard(self.folder, value.encode(), named("meta", key))))

    def unfinished(self) -> list[tuple[str, str]]:
        """Keys and values of deletions whose processes ended amid them."""
        sql = f"SELECT key FROM meta WHERE key >= '{DELETING}/' AND key < '{DELETING}0'"
        dead = [key for (key,) in self._all(sql) if not process_identity.alive(key.split("/")[-1], 0.0)]
        return [(key, self.get_meta(key) or "") for key in dead]

    def drop_meta(self, key: str) -> None:
        self._execute("DELETE FROM meta WHERE key = ?", (key,))

    def add_counters(self, counts: Mapping[str, int]) -> None:
        sql = "INSERT INTO counters VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET value = value + excluded.value"
        self._write(lambda connection: connection.executemany(sql, list(counts.items())), None)

    def counters(self) -> dict[str, int]:
        return dict(self._all("SELECT name, value FROM counters ORDER BY name"))

    def restore_lists(self, lists: Mapping[str, Iterable[tuple[Any, ...]]]) -> None:
        """Take over the sound records of groups, splices, meta and counters (records of all columns) from a damaged index."""
        vouched: dict[str, Callable[[tuple[Any, ...]], bool]] = {
            "groups": lambda v: self._group(v[0], v[1], v[2], v[4]) is not None,
            "splices": lambda v: unguard(self.folder, v[2], named("splice", *v[:2])) is not None,
            "meta": lambda v: unguard(self.folder, v[1], named("meta", v[0])) is not None,
            "counters": lambda v: True,
        }

        def put(connection: sqlite3.Connection) -> None:
            for name, vouches in vouched.items():
                for values in (v for v in lists.get(name, ()) if sound(name, v) and vouches(v)):
                    connection.execute(f"INSERT OR IGNORE INTO {name} VALUES ({', '.join('?' * len(values))})", values)
            connection.execute(
                "UPDATE totals SET clock = max(clock, "
                "(SELECT coalesce(max(used), 0) FROM groups), (SELECT coalesce(max(used), 0) FROM splices))"
            )

        self._write(put, None)

    def stats(self) -> dict[str, object]:
        """Count all that is stored: pages by role, precision and namespace, and everything else."""

        def count(c: sqlite3.Connection) -> dict[str, object]:
            rows, size, splices, _ = c.execute("SELECT * FROM totals").fetchone()
            found: dict[str, object] = {"rows": rows, "bytes": size, "splices": splices}
            found["tokens"] = c.execute("SELECT coalesce(sum(tokens), 0) FROM pages").fetchone()[0]
            found["quarantined"] = c.execute("SELECT count(*) FROM pages WHERE bad IS NOT NULL").fetchone()[0]
            for name in ("groups", "segments", "pins", "leases"):
                found[name] = c.execute(f"SELECT count(*) FROM {name}").fetchone()[0]
            for name in ("role", "precision", "namespace"):
                records = c.execute(f"SELECT {name}, count(*), sum(bytes) FROM pages GROUP BY {name} ORDER BY {name}")
                found[f"by_{name}"] = {key: {"rows": number, "bytes": size} for key, number, size in records}
            return found

        return {**self._snapshot(count), "counters": self.counters()}

    def recount(self) -> None:
        """Correct wrong totals: making room trusts them, and would evict all pages for too large ones."""

        def wrong(connection: sqlite3.Connection) -> tuple[int, ...] | None:
            known, right = totals(connection), counted(connection)
            return right if known and known[:3] != right else None

        def mend(connection: sqlite3.Connection) -> None:
            if right := wrong(connection):
                connection.execute("UPDATE totals SET rows = ?, bytes = ?, splices = ?", right)

        if self._snapshot(wrong):
            self.database.write(mend)

    def _snapshot(self, use: Use[T]) -> T:
        """Several reads of one state of the file."""

        def transact(connection: sqlite3.Connection) -> T:
            connection.execute("BEGIN")
            try:
                return use(connection)
            finally:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")

        return self.database.read(transact)

    def _all(self, sql: str, *values: object) -> list[tuple[Any, ...]]:
        return self.database.read(lambda connection: connection.execute(sql, values).fetchall())

    def _execute(self, sql: str, values: Sequence[object]) -> int:
        """One statement that writes; returns how many rows it touched."""
        return self._write(lambda connection: connection.execute(sql, values).rowcount, 0)

    def _write(self, use: Use[Any], otherwise: Any) -> Any:
        """Return what `use` does in a transaction of its own; `otherwise` in a read-only folder."""
        return self.database.write(use) if self.folder.writable else otherwise


def _record(connection: sqlite3.Connection, done: Deletion) -> int:
    """Add a deletion; returns its generation."""
    values = (done.namespace, done.before, done.forced, done.group, done.fingerprint, b"".join(done.keys), done.prefix_tokens)
    number = connection.execute(f"INSERT INTO deletions ({DELETION}) VALUES (?, ?, ?, ?, ?, ?, ?)", values).lastrowid
    assert number is not None
    connection.execute("DELETE FROM deletions WHERE generation <= ?", (number - MOST,))
    return number


def _generation(connection: sqlite3.Connection) -> int:
    """The number of the last deletion."""
    found = connection.execute("SELECT max(generation) FROM deletions").fetchone()[0]
    return found if isinstance(found, int) else 0


def _deletion(record: tuple[Any, ...]) -> Deletion:
    """Read a row; a damaged one is of everything, whose pages are computed again."""
    namespace, before, forced, name, fingerprint, keys, tokens, generation = record
    texts = all(isinstance(text, str | None) for text in (namespace, name)) and isinstance(before, float | None)
    if not texts or (type(fingerprint), type(keys), type(tokens)) != (str, bytes, int) or len(keys) % KEY_BYTES:
        return Deletion(generation=generation)
    split = tuple(keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES))
    return Deletion(namespace, before, bool(forced), name, fingerprint, split, tokens, generation)


def where(before: float | None = None, **wanted: object) -> tuple[str, list[object]]:
    """SQL's WHERE clause for rows with these columns, created before that time (None: any), and its values."""
    given = {f"{name} = ?": value for name, value in wanted.items()} | {"created < ?": before}
    given = {term: value for term, value in given.items() if value is not None}
    return f" WHERE {' AND '.join(('1', *given))}", list(given.values())


def named(*parts: str | bytes) -> bytes:
    """Context that guarded data is bound to."""
    return repr(parts).encode("utf-8", "surrogatepass")
