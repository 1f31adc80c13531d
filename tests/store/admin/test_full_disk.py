"""A disk that is full, and a store that others are filling: prune makes room, and what no row names counts."""

from __future__ import annotations

import functools
import os
import re
import sqlite3
import time
from pathlib import Path
from typing import Any

import pytest

from agentcache.errors import StoreFullError, StoreWarning
from agentcache.store.admin.check import verify
from agentcache.store.admin.prune import prune
from agentcache.store.disk import blob_files, database, process_identity
from agentcache.store.disk.folder import Folder
from agentcache.store.disk.index import Index
from agentcache.store.keys import Scope
from agentcache.store.store import Store
from agentcache.types import StoreOptions
from tests.store.index_rows import DEAD, random_ids
from tests.store.stocked_store import store_group
from tests.store.stored_pages import SPEC, noise_page

PAGE = SPEC.page_bytes + 8192  # on disk, at most


def admit(store: Store, number: int) -> None:
    """Two pages, in memory now and on disk later."""
    store.admit(Scope("tests", "weights"), random_ids(1024, number), [noise_page(), noise_page()], "n")


def size(folder: Folder) -> int:
    """Bytes of all blobs, finished or not."""
    return sum(file.bytes for file in blob_files.files(folder))


def leave(folder: Folder, writer: str, count: int, suffix: str = blob_files.PART) -> Path:
    """A file of so many bytes that no row names."""
    place = folder.blobs / "ab"
    place.mkdir(exist_ok=True)
    file = place / f"ab{'0' * 30}-{writer}{suffix}"
    file.write_bytes(bytes(count))
    return file


# -- room that is taken ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [blob_files.PART, blob_files.WHOLE])
def test_what_no_row_names_takes_room(tmp_path: Path, suffix: str) -> None:
    options = StoreOptions(tmp_path / "store", disk_bytes=6 * PAGE)
    folder = Folder.open(options.folder)
    Index(folder).close()
    others = leave(folder, process_identity.token(), 3 * PAGE, suffix)  # as another thread of a live process would, while it writes
    store = Store(1 << 26, options=options)
    for number in range(6):
        admit(store, number)
        assert store.flush()
        assert size(folder) <= options.disk_bytes
    assert others.exists()
    assert store.disk is not None
    assert 0 < store.disk.index.total()[1] <= 3 * PAGE
    store.close()


def test_files_that_leave_no_room_for_a_page_are_told(tmp_path: Path) -> None:
    options = StoreOptions(tmp_path / "store", disk_bytes=2 * PAGE)
    folder = Folder.open(options.folder)
    Index(folder).close()
    left = leave(folder, process_identity.token(), 3 * PAGE, blob_files.PART)
    store = Store(1 << 26, options=options)
    admit(store, 0)
    store.flush()
    assert store.disk is not None
    said = rf"disk_bytes={2 * PAGE}: one page takes \d+ bytes, files that no row of the index names take {left.stat().st_size}; raise it"
    assert re.fullmatch(said, store.disk.writer.failure)
    store.close()


def test_leftovers_of_an_open_store_go_within_a_minute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(1 << 26, options=StoreOptions(tmp_path / "store"))
    assert store.disk is not None
    assert store.flush()
    left = leave(store.disk.folder, DEAD, PAGE)
    admit(store, 1)
    assert store.flush()
    assert left.exists()
    monkeypatch.setattr("agentcache.store.disk.disk_tier.SWEEP_S", 0.0)
    admit(store, 2)
    assert store.flush()
    assert not left.exists()
    store.close()


def test_evicted_files_of_a_running_writer_go_after_an_hour(tmp_path: Path) -> None:
    """Another process that evicts may be killed between the row and its file."""
    folder = Folder.open(tmp_path / "store")
    with Index(folder) as index:
        left = leave(folder, process_identity.token(), PAGE, blob_files.WHOLE)
        assert prune(folder, index).orphans == 0  # its row may be on its way
        os.utime(left, (0, time.time() - blob_files.LATE_S - 60))
        assert prune(folder, index).orphans == 1
    assert not left.exists()


# -- a full disk -------------------------------------------------------------------------------------------------------


@pytest.fixture
def full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Folder:
    """A store of twelve pages, and no byte of room: as SQLite found it on a small file system.

    What processes share cannot be made, so a file that nobody has open opens only for one that locks all others out; what is written goes
    to the log, which cannot grow. Once a blob is gone there is room.
    """
    folder = Folder.open(tmp_path / "store")
    with Index(folder) as index:
        for seed in range(6):
            store_group(index, random_ids(700, seed), f"group {seed}")
        index.put_splices([("tests", b"k" * 32, b"abcd")])
    limit: list[int] = []  # what lies there once it is opened

    class Full(sqlite3.Connection):
        alone = False

        def execute(self, sql: str, *values: Any) -> sqlite3.Cursor:
            self.alone |= "EXCLUSIVE" in sql
            limit[:] = limit or [size(folder)]
            room = size(folder) < limit[0]
            if not room and not self.alone:
                raise sqlite3.OperationalError("disk I/O error")
            if not room and sql == "COMMIT":
                raise sqlite3.OperationalError("database or disk is full")
            return super().execute(sql, *values)

    monkeypatch.setattr(database, "LEAST_ROOM", 1 << 60)
    monkeypatch.setattr(sqlite3, "connect", functools.partial(sqlite3.connect, factory=Full))
    return folder


@pytest.mark.parametrize(
    "what", [{}, {"namespace": "tests"}, {"max_bytes": 4 * PAGE}, {"max_bytes": 0, "force": True}, {"older_than": -10.0}]
)
def test_prune_makes_room_on_a_full_disk(full: Folder, what: dict[str, Any]) -> None:
    before = size(full)
    with Index(full, unshared=True) as index:
        done = prune(full, index, **what)
        assert done.bytes > 0
        assert size(full) == before - done.bytes == index.total()[1]
    assert verify(full).problems == []


def test_what_dead_writers_left_goes_first(full: Folder) -> None:
    """Then rows go before their blobs, as ever."""
    left = leave(full, DEAD, PAGE)
    with Index(full, unshared=True) as index:
        done = prune(full, index, max_bytes=index.total()[1])
        assert (done.pages, done.orphans, left.exists()) == (0, 1, False)


def test_nothing_is_lost_where_nothing_may_go(full: Folder) -> None:
    with Index(full, unshared=True) as index:
        held = [row.id for row in index.rows()]
        with pytest.raises(StoreFullError, match="prune"):
            index.pin(held, process_identity.token())
        with pytest.raises(StoreFullError):
            index.put_splices([("tests", b"n" * 32, b"abcd")])
        assert len(list(index.rows())) == len(held) == 12


def test_an_engine_starts_on_a_full_disk(full: Folder) -> None:
    with pytest.warns(StoreWarning, match="nothing is kept on disk"):
        store = Store.open(1 << 24, 0, StoreOptions(full.path))
    assert store.disk is None
    store.close()


def test_a_disk_filled_by_killed_writers_is_swept_first(full: Folder) -> None:
    left = leave(full, DEAD, PAGE)
    store = Store.open(1 << 24, 0, StoreOptions(full.path))
    assert store.disk is not None
    assert not left.exists()
    store.close()
