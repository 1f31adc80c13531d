"""A damaged index: named, and made anew from what the pages say of themselves."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

import pytest

from agentcache.errors import StoreCorruptError, StoreError, StoreFormatError, StoreFullError
from agentcache.store.admin.check import verify
from agentcache.store.admin.rebuild import rebuild
from agentcache.store.disk import database
from agentcache.store.disk.folder import Folder
from agentcache.store.disk.index import Index
from agentcache.store.disk.schema import VERSION
from agentcache.store.tool_group import ToolGroup
from tests.store.index_rows import SCOPE, added_rows, forks, random_ids, rows_of_prompt, run_in_forks, run_sql

GROUP = ToolGroup("tools", "ns", "fp", "", 600, ("ab" * 32,), ("a",), "model", (), 5.0)


def test_a_full_disk_leaves_the_old_index(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Closing the new index moves its log into the file, and says nothing where there is no room for that."""
    ids = random_ids(600)
    with Index(folder) as index:
        rows = added_rows(index, ids)
        index.put_group(GROUP)
    before = folder.index.read_bytes()
    for way in (lambda self: False, lambda self: (_ for _ in ()).throw(StoreFullError("full"))):
        monkeypatch.setattr(database.Database, "empty_log", way)
        with pytest.raises(StoreFullError):
            rebuild(folder, rows)
        assert folder.index.read_bytes() == before
        assert not list(folder.path.glob("*.new*"))
    with Index(folder) as index:
        assert len(index.longest(SCOPE, ids, 600)) == 2


def test_a_log_that_others_read_is_not_emptied(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "BUSY_S", 0.1)
    with Index(folder) as index, Index(folder) as reader:
        index.add(rows_of_prompt(random_ids(600)))
        assert index.database.empty_log()

        def meanwhile(connection: sqlite3.Connection) -> bool:
            connection.execute("BEGIN")
            connection.execute("SELECT count(*) FROM pages").fetchone()
            index.add(rows_of_prompt(random_ids(600, 1)))
            emptied = index.database.empty_log()
            connection.execute("ROLLBACK")
            return emptied

        assert not reader.database.read(meanwhile)


@pytest.mark.parametrize("ahead", [1 - VERSION, -1, 1, database.FORESEEN])
def test_an_index_of_another_version_is_left_alone(folder: Folder, ahead: int) -> None:
    with Index(folder) as index:
        rows = added_rows(index, random_ids(600))
    run_sql(folder, "CREATE TABLE more (id INTEGER)")  # with the tables of this one the number is damage
    run_sql(folder, f"PRAGMA user_version={VERSION + ahead}")
    before = folder.index.read_bytes()
    with pytest.raises(StoreFormatError, match=f"version {VERSION + ahead}, this one reads {VERSION}"):
        Index(folder)
    with pytest.raises(StoreFormatError):
        verify(folder, fix=True)
    assert folder.index.read_bytes() == before
    assert rows


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder.open(tmp_path / "store")


def damaged(folder: Folder, how: str) -> None:
    content = bytearray(folder.index.read_bytes())
    if how == "magic":
        content[3] ^= 0xFF
    elif how == "version":
        content[63] ^= 0xFF
    elif how == "foreign":
        content[70] ^= 0xFF
    elif how == "schema":
        content[100:4096] = os.urandom(3996)
    elif how == "pages":
        content[4096:] = os.urandom(len(content) - 4096)
    elif how == "cut":
        del content[5000:]
    elif how == "empty":
        content.clear()
    folder.index.write_bytes(content)


def use(folder: Folder) -> None:
    with Index(folder) as index:
        index.longest(SCOPE, random_ids(600), 600)
        index.stats()
        index.add(rows_of_prompt(random_ids(600, 1)))
        if said := index.check():
            raise StoreCorruptError(f"{said[0]} verify --fix")


@pytest.mark.parametrize("how", ["magic", "version", "foreign", "schema", "pages", "cut", "empty", "gone"])
def test_a_damaged_index_is_named_and_made_anew(folder: Folder, how: str) -> None:
    ids = random_ids(600)
    with Index(folder) as index:
        rows = added_rows(index, ids)
    (folder.blobs / "ab").mkdir()
    (folder.blobs / "ab" / "x.safetensors").touch()
    if how == "gone":
        folder.index.unlink()
    else:
        damaged(folder, how)
    with pytest.raises(StoreCorruptError, match="verify --fix"):
        use(folder)
    assert rebuild(folder, rows) == 2
    with Index(folder) as index:
        assert [common for _, common in index.longest(SCOPE, ids, 600)] == [512, 88]
        assert index.check() == []
        assert index.total() == (2, 200)
    assert not list(folder.path.glob("*.new*"))


def test_rebuilding_keeps_what_only_the_index_knew(folder: Folder) -> None:
    with Index(folder) as index:
        bare, late = rows_of_prompt(random_ids(600)), rows_of_prompt(random_ids(600, 1))
        index.add(bare + late)
        first = next(index.rows())
        index.promote([first.id], 2)
        index.touch([first.id])
        index.quarantine(first.id, "wrong")
        index.put_group(GROUP)
        index.put_splices([("ns", b"a", b"1234"), ("ns", b"b", b"5678")])
        index.set_meta("rate", "1.5")
        index.add_counters({"hits": 3})
        order = [row.page_key for row in index.victims(1 << 40)]
    run_sql(folder, "UPDATE splices SET ids = x'00' WHERE key = ?", b"b")
    run_sql(folder, "UPDATE pages SET ids = x'00' WHERE parent = ? AND place = 1", late[0].page_key)
    assert rebuild(folder, iter([*late, *bare, *bare])) == 4
    with Index(folder) as index:
        again = index.row(first.page_key, "fp")
        assert again is not None
        assert (again.role, again.bad, again.hits) == (2, "wrong", 1)
        order.remove(late[1].page_key)  # damaged: nobody knows when it was used
        assert [row.page_key for row in index.victims(1 << 40)] == [late[1].page_key, *order]
        assert (index.groups(), index.get_meta("rate"), index.counters()) == ([GROUP], "1.5", {"hits": 3})
        assert (index.splice("ns", b"a"), index.splice("ns", b"b")) == (b"1234", None)
        newest = added_rows(index, random_ids(20, 5))[0]
        assert newest.used > max(row.used for row in index.rows() if row.id != newest.id)


@forks
def test_an_index_in_use_is_not_replaced(folder: Folder) -> None:
    with Index(folder) as index:
        index.add(rows_of_prompt(random_ids(600)))
        with pytest.raises(StoreError, match="in use"):
            rebuild(folder, [])
        run_in_forks(lambda: index.total() and None)  # a child that ends leaves the lock alone
        with pytest.raises(StoreError, match="in use"):
            rebuild(folder, [])
    assert rebuild(folder, rows_of_prompt(random_ids(20))) == 1
    lock = database.lock_index(folder)
    with pytest.raises(StoreError, match="rebuilt"):
        Index(folder)
    os.close(lock)
    with Index(folder) as index:
        assert index.total()[0] == 1
