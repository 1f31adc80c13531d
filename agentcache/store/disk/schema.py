"""The tables of the index, and a page's row in them. Knows nothing of how rows are found.

The index may be lost: what cannot be made again from the pages is small (groups, splices, counters), or comes again with use (segments),
and authenticated on its own.
"""

from __future__ import annotations

import functools
import json
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
from blake3 import blake3

from ...errors import BlobError
from ...types import PAGE_TOKENS
from ..keys import Ids, Role, page_key
from .folder import Folder

VERSION = 6
HEAD_TOKENS = 8  # ids by which continuations of a page are told apart before they are compared
TAG_BYTES = 16

# bad: why a page is never served. used: of a counter that only grows, because clocks jump. created: wall clock, for ages.
# triggers keep the totals: counting 100,000 rows at every write would read all their ids.
SCHEMA = """
CREATE TABLE segments (
    id INTEGER PRIMARY KEY AUTOINCREMENT, namespace TEXT NOT NULL, fingerprint TEXT NOT NULL, regime TEXT NOT NULL, name BLOB NOT NULL,
    packed BLOB NOT NULL, created REAL NOT NULL, used INTEGER NOT NULL, UNIQUE (namespace, fingerprint, regime, name));;
CREATE INDEX segments_order ON segments (used);;
CREATE INDEX segments_created ON segments (created);;
CREATE TABLE deletions (
    generation INTEGER PRIMARY KEY AUTOINCREMENT, namespace TEXT, before REAL, forced INTEGER NOT NULL, name TEXT,
    fingerprint TEXT NOT NULL, keys BLOB NOT NULL, prefix_tokens INTEGER NOT NULL);;
CREATE TABLE pages (
    id INTEGER PRIMARY KEY AUTOINCREMENT, page_key BLOB NOT NULL, parent BLOB NOT NULL, namespace TEXT NOT NULL,
    fingerprint TEXT NOT NULL, regime TEXT NOT NULL, place INTEGER NOT NULL, tokens INTEGER NOT NULL, ids BLOB NOT NULL,
    numerics TEXT NOT NULL, precision TEXT NOT NULL, role INTEGER NOT NULL, dtype TEXT NOT NULL, widths TEXT NOT NULL,
    checkpoint_bytes INTEGER NOT NULL, blob TEXT NOT NULL, bytes INTEGER NOT NULL, created REAL NOT NULL, used INTEGER NOT NULL,
    hits INTEGER NOT NULL, bad TEXT, head BLOB NOT NULL,
    UNIQUE (page_key, fingerprint, precision));;
CREATE INDEX pages_under ON pages (parent, fingerprint, precision, head, used, tokens);;
CREATE INDEX pages_order ON pages (role, used);;
CREATE INDEX pages_namespace ON pages (namespace, role, precision, tokens, bytes);;
CREATE INDEX pages_blob ON pages (blob);;
CREATE INDEX pages_created ON pages (created);;
CREATE INDEX pages_bad ON pages (role, used) WHERE bad IS NOT NULL;;
CREATE TABLE totals (rows INTEGER NOT NULL, bytes INTEGER NOT NULL, splices INTEGER NOT NULL, clock INTEGER NOT NULL);;
INSERT INTO totals VALUES (0, 0, 0, 0);;
CREATE TRIGGER pages_more AFTER INSERT ON pages BEGIN UPDATE totals SET rows = rows + 1, bytes = bytes + new.bytes; END;;
CREATE TRIGGER pages_less AFTER DELETE ON pages BEGIN UPDATE totals SET rows = rows - 1, bytes = bytes - old.bytes; END;;
CREATE TABLE pins (
    page INTEGER NOT NULL REFERENCES pages (id) ON DELETE CASCADE, process TEXT NOT NULL, count INTEGER NOT NULL, since REAL NOT NULL,
    PRIMARY KEY (page, process)) WITHOUT ROWID;;
CREATE TABLE leases (
    key BLOB NOT NULL, fingerprint TEXT NOT NULL, process TEXT NOT NULL, since REAL NOT NULL,
    PRIMARY KEY (key, fingerprint)) WITHOUT ROWID;;
CREATE TABLE groups (
    namespace TEXT NOT NULL, name TEXT NOT NULL, fingerprint TEXT NOT NULL, regime TEXT NOT NULL, manifest BLOB NOT NULL, tip BLOB NOT NULL,
    created REAL NOT NULL, used INTEGER NOT NULL, PRIMARY KEY (namespace, name, fingerprint)) WITHOUT ROWID;;
CREATE TABLE splices (
    namespace TEXT NOT NULL, key BLOB NOT NULL, ids BLOB NOT NULL, created REAL NOT NULL, used INTEGER NOT NULL, UNIQUE (namespace, key));;
CREATE INDEX splices_order ON splices (used);;
CREATE INDEX splices_created ON splices (created);;
CREATE TRIGGER splices_more AFTER INSERT ON splices BEGIN UPDATE totals SET splices = splices + 1; END;;
CREATE TRIGGER splices_less AFTER DELETE ON splices BEGIN UPDATE totals SET splices = splices - 1; END;;
CREATE TABLE meta (key TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID;;
CREATE TABLE counters (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;;
"""


Widths = tuple[tuple[int, int, int], ...]  # heads, width of keys and width of values of each layer


@dataclass(frozen=True, slots=True)
class Row:
    """One stored page."""

    id: int  # 0: not in the index yet
    page_key: bytes
    parent: bytes
    namespace: str
    fingerprint: str
    regime: str
    place: int  # page i holds positions [512·i, ..)
    tokens: int
    ids: Ids = field(compare=False, repr=False)  # the key says it
    numerics: frozenset[str]
    precision: str
    role: int
    dtype: str
    widths: Widths  # of each layer
    checkpoint_bytes: int = 0  # of the section after the layers, where the page has checkpoints
    blob: str = ""
    bytes: int = 0
    created: float = 0.0  # time.time()
    used: int = 0  # a counter that only grows
    hits: int = 0
    bad: str | None = None  # the reason of its quarantine

    @property
    def kind(self) -> tuple[str, Widths]:
        """Number type and widths: those of `KVSpec.kind`."""
        return self.dtype, self.widths

    @property
    def sections(self) -> int:
        """Layers, and one more where there are checkpoints: each is authenticated on its own."""
        return len(self.widths) + bool(self.checkpoint_bytes)


NAMES = tuple(column.name for column in fields(Row))
COLUMNS = ", ".join(NAMES)
_TYPES = {
    "namespace": str, "fingerprint": str, "regime": str, "numerics": str, "precision": str, "dtype": str, "blob": str, "widths": str,
    "page_key": bytes, "parent": bytes, "ids": bytes, "created": float,
}  # fmt: skip
MOST_LAYERS, MOST_WIDTH = 1 << 16, 4096
MOST_CHANNELS = 1 << 16  # of a layer's keys: 0.1 GB a page in fp32
MOST = 1 << 53  # no number of ours is larger: sums of them stay whole numbers, in SQLite too
_RECORDS = {tuple(_TYPES.get(name, int) for name in NAMES[:-1]) + (bad,) for bad in (str, type(None))}
_AT = {name: at for at, name in enumerate(NAMES)}
KEY, PARENT, TOKENS, IDS = (_AT[name] for name in ("page_key", "parent", "tokens", "ids"))
_NUMERICS, _ROLE, _WIDTHS = _AT["numerics"], _AT["role"], _AT["widths"]
_ROLES = frozenset(map(int, Role))
_LISTS = {  # what stands in the columns of the other tables
    "segments": (int, str, str, str, bytes, bytes, float, int),
    "pins": (int, str, int, float),
    "leases": (bytes, str, str, float),
    "groups": (str, str, str, str, bytes, bytes, float, int),
    "splices": (str, bytes, bytes, float, int),
    "meta": (str, bytes),
    "counters": (str, int),
}


def head(folder: Folder, ids: Ids) -> bytes:
    """Hash by which the first ids are found."""
    return blake3(ids[:HEAD_TOKENS].tobytes(), key=folder.key).digest(length=8)


def encode(folder: Folder, row: Row, used: int) -> tuple[object, ...]:
    """A row as it is inserted: every column but `id`, then `head`."""
    values = {name: getattr(row, name) for name in NAMES[1:]}
    values["ids"] = folder.seal(row.ids.astype("<u4", copy=False).tobytes(), b"ids" + row.page_key)
    values["numerics"] = ",".join(sorted(row.numerics))
    values["role"], values["used"], values["widths"] = int(row.role), used, json.dumps(row.widths)
    return (*values.values(), head(folder, row.ids))


def decode(folder: Folder, record: tuple[Any, ...]) -> Row:
    """A row as it was selected by COLUMNS; BlobError if it cannot be one."""
    right = tuple(map(type, record)) in _RECORDS and _in_range(record) and len(record[KEY]) == len(record[PARENT]) == 32
    if not right or not 0 < record[TOKENS] <= PAGE_TOKENS or record[_ROLE] not in _ROLES:
        raise BlobError(f"row {record[0]!r} of the index is damaged")
    values = list(record)
    values[IDS] = np.frombuffer(decode_ids(folder, record[KEY], record[TOKENS], record[IDS]), dtype="<u4").astype(np.uint32, copy=False)
    values[_NUMERICS] = frozenset(filter(None, record[_NUMERICS].split(",")))
    try:
        values[_WIDTHS] = _decode_widths(record[_WIDTHS])
    except (ValueError, RecursionError):
        raise BlobError(f"row {record[0]!r} of the index is damaged") from None
    return Row(*values)


def readable(folder: Folder, records: Iterable[tuple[Any, ...]]) -> Iterator[Row]:
    """Those of these records that are rows; `check` finds the others."""
    for record in records:
        with suppress(BlobError):
            yield decode(folder, record)


@functools.lru_cache  # a row is decoded for every page of a prompt
def _decode_widths(text: str) -> Widths:
    return widths_of(json.loads(text))


def widths_of(found: Any) -> Widths:
    """Widths of layers, as they were read; ValueError unless they can be those of a page."""
    if type(found) is not list or not 0 < len(found) <= MOST_LAYERS:
        raise ValueError("widths")
    for shape in found:
        if type(shape) is not list or list(map(type, shape)) != [int] * 3 or min(shape) < 0 or not shape[0] * shape[1]:
            raise ValueError("widths")
        if max(shape) > MOST_WIDTH or shape[0] * max(shape[1:]) > MOST_CHANNELS:
            raise ValueError("widths")
    return tuple((heads, keys, values) for heads, keys, values in found)


def decode_ids(folder: Folder, key: bytes, tokens: int, sealed: bytes) -> bytes:
    """The ids of a row, four bytes each; BlobError if they are not as many as it says."""
    if type(key) is not bytes or type(sealed) is not bytes:
        raise BlobError("a row of the index has no ids or no key")
    plain = folder.open_sealed(sealed, b"ids" + key)
    if len(plain) != 4 * tokens:
        raise BlobError(f"a row of the index has {len(plain)} bytes of ids for {tokens!r} tokens")
    return plain


def _in_range(record: tuple[Any, ...]) -> bool:
    return all(0 <= value < MOST for value in record if isinstance(value, (int, float)))


def sound(table: str, record: tuple[Any, ...]) -> bool:
    """Tell whether a row of another table (all its columns) can be one."""
    return tuple(map(type, record)) == _LISTS[table] and _in_range(record)


def totals(connection: sqlite3.Connection) -> tuple[int, ...] | None:
    """The totals: rows, their bytes, splices and the clock; None if they cannot be."""
    found = connection.execute("SELECT * FROM totals").fetchall()
    return found[0] if len(found) == 1 and set(map(type, found[0])) == {int} and _in_range(found[0]) else None


def counted(connection: sqlite3.Connection) -> tuple[int, ...]:
    """Count what the first three totals should be. Reads an index over the pages, not their ids."""
    pages = connection.execute("SELECT count(*), coalesce(sum(bytes), 0) FROM pages").fetchone()
    return (*pages, *connection.execute("SELECT count(*) FROM splices").fetchone())


def faults(folder: Folder, connection: sqlite3.Connection) -> list[str]:
    """Faults of the file and its rows, in words."""
    found = [str(said) for (said,) in connection.execute("PRAGMA integrity_check") if said != "ok"]
    for record in connection.execute(f"SELECT {COLUMNS}, head FROM pages"):
        try:
            row = decode(folder, record[:-1])
        except BlobError as error:
            found.append(str(error))
            continue
        if page_key(row.parent, row.ids) != row.page_key or head(folder, row.ids) != record[-1]:
            found.append(f"row {row.id!r} of the index does not have the ids its key was made from")
    for table in _LISTS:
        damaged = sum(not sound(table, record) for record in connection.execute(f"SELECT * FROM {table}"))
        found += [f"{damaged} rows of {table!r} in the index are damaged"] * bool(damaged)
    found += misnumbered(connection)
    known, right = totals(connection), counted(connection)
    return found if known and known[:3] == right else [*found, f"the totals of the index are {known!r}, not {right!r}"]


def misnumbered(connection: sqlite3.Connection) -> list[str]:
    """Name the tables whose next row can have no number, or one that was used before."""
    found = []
    for table, column in (("pages", "id"), ("segments", "id"), ("deletions", "generation")):
        numbers = f"SELECT coalesce(max({column}), 0), (SELECT seq FROM sqlite_sequence WHERE name = ?) FROM {table}"
        last, given = connection.execute(numbers, (table,)).fetchone()
        given = 0 if given is None else given
        if not (type(last) is type(given) is int and 0 <= last <= given < MOST):
            found.append(f"the last row of {table!r} in the index has the number {last!r}, and {given!r} was given last")
    return found


def guard(folder: Folder, data: bytes, context: bytes) -> bytes:
    """Data as it is stored where no blob vouches for it: sealed, or else authenticated."""
    return folder.seal(data, context) if folder.encrypted else _tag(folder, data, context) + data


def unguard(folder: Folder, data: object, context: bytes) -> bytes | None:
    """Data that was guarded with this context; None if it was not, or is damaged."""
    if not isinstance(data, bytes):
        return None
    if folder.encrypted:
        try:
            return folder.open_sealed(data, context)
        except BlobError:
            return None
    plain = data[TAG_BYTES:]
    return plain if _tag(folder, plain, context) == data[:TAG_BYTES] else None


def _tag(folder: Folder, data: bytes, context: bytes) -> bytes:
    return blake3(len(context).to_bytes(8, "little") + context + data, key=folder.key).digest(length=TAG_BYTES)
