"""A new index in place of a damaged one, made from what the pages say of themselves. Knows no pages' contents.

What only the index knew (uses, quarantine, tool groups, splices, rates, counters) is taken over as far as the damaged one can be read.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from ...errors import StoreError, StoreFullError
from ..disk.database import lock_index
from ..disk.folder import Folder
from ..disk.index import Index
from ..disk.schema import COLUMNS, Row, readable

BATCH = 256
LISTS = ("groups", "splices", "meta", "counters")


def rebuild(folder: Folder, rows: Iterable[Row]) -> int:
    """Make the index anew from `rows`, as blobs describe them (blob.describe); returns how many it has.

    StoreError if a process, this one included, has the index open. Until the new one is complete the old one stays.
    """
    if not folder.writable:
        raise StoreError(f"the store {str(folder.path)!r} is read-only: make it writable to rebuild its index")
    lock, part = lock_index(folder), Path(f"{folder.index}.new")
    try:
        _unlink(part)
        found = readable(folder, _records(folder, f"SELECT {COLUMNS} FROM pages"))
        known = {(row.page_key, row.fingerprint, row.precision): row for row in found}
        with Index(folder, part) as index:
            count = _fill(index, rows, known)
            index.restore_lists({name: list(_records(folder, f"SELECT * FROM {name}")) for name in LISTS})
            emptied = index.database.empty_log()
        if not emptied or Path(f"{part}-wal").exists():  # closing tries too, and keeps to itself that the disk is full
            raise StoreFullError(f"the index of {str(folder.path)!r} cannot be rebuilt: no room for the new one; the old one stays")
        for suffix in ("-wal", "-shm"):
            Path(f"{folder.index}{suffix}").unlink(missing_ok=True)
        part.replace(folder.index)
        return count
    except StoreError:
        raise
    except OSError as error:
        raise StoreError(f"the index of {str(folder.path)!r} cannot be rebuilt: {error}") from error
    finally:
        _unlink(part)
        os.close(lock)


def _fill(index: Index, rows: Iterable[Row], known: Mapping[tuple[bytes, str, str], Row]) -> int:
    def merged() -> Iterator[Row]:
        for row in rows:
            old = known.get((row.page_key, row.fingerprint, row.precision))
            if old is not None:
                row = replace(row, role=max(row.role, old.role), used=old.used, hits=old.hits, bad=old.bad)
            yield row

    count, left = 0, merged()
    while batch := list(islice(left, BATCH)):
        count += index.restore(batch)
    return count


def _records(folder: Folder, sql: str) -> Iterator[tuple[Any, ...]]:
    """Read the records of a damaged index that can be read."""
    try:
        with closing(sqlite3.connect(f"{folder.index.as_uri()}?mode=rw", uri=True)) as connection:
            connection.text_factory = lambda data: data.decode("utf-8", "replace")
            connection.execute("PRAGMA writable_schema=ON")  # tables whose text can be read are, though another's cannot
            yield from connection.execute(sql)
    except (sqlite3.Error, ValueError):  # records after the damage are lost
        return


def _unlink(path: Path) -> None:
    for suffix in ("", "-wal", "-shm"):
        Path(f"{path}{suffix}").unlink(missing_ok=True)
