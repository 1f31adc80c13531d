"""The index under many processes, threads and forks, without room, without rights, damaged, and large."""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from agentcache.errors import StoreBusyError, StoreError, StoreFullError
from agentcache.store.admin.rebuild import rebuild
from agentcache.store.disk import database
from agentcache.store.disk.folder import Folder
from agentcache.store.disk.index import Index
from agentcache.store.tool_group import ToolGroup
from tests.store.index_rows import FORK, ME, SCOPE, added_rows, forks, leases_of, random_ids, rows_of_prompt, run_in_forks

GROUP = ToolGroup("tools", "ns", "fp", "", 600, ("ab" * 32,), ("a",), "model", (), 5.0)


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder.open(tmp_path / "store")


@pytest.fixture
def index(folder: Folder) -> Iterator[Index]:
    with Index(folder) as opened:
        yield opened


# -- many at once --------------------------------------------------------------------------------------------------


def test_two_that_make_an_index_together_both_have_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another one makes it whole before each statement with which this one looks whether it is there."""
    connect = sqlite3.connect

    class Late(sqlite3.Connection):
        def execute(self, statement: str, *given: Any) -> sqlite3.Cursor:
            met.append(statement)
            if len(met) == last and not self.in_transaction:
                with monkeypatch.context() as patch:
                    patch.setattr(database.sqlite3, "connect", connect)
                    Index(folder).close()
            return super().execute(statement, *given)

    for last in range(1, 16):
        met, folder = list[str](), Folder.open(tmp_path / str(last))
        with monkeypatch.context() as patch:
            patch.setattr(database.sqlite3, "connect", lambda *given, **more: connect(*given, factory=Late, **more))
            with Index(folder) as index:
                assert not list(index.rows())
        assert len(met) > last
        with Index(folder) as again:
            assert not list(again.rows())


@forks
def test_no_row_is_lost_or_doubled_among_processes(folder: Folder, index: Index, tmp_path: Path) -> None:
    """Six admit the same and their own prompts, read, evict and count at once. Who is told to unlink a blob is the only one told."""

    def child(number: int) -> None:
        with open(tmp_path / f"said{number}", "w") as said, Index(folder) as own:
            for turn in range(12):
                same, mine = rows_of_prompt(random_ids(1100, turn)), rows_of_prompt(random_ids(600, 1000 * number + turn))
                gone = own.add(same + mine)
                print(*(row.blob for row in same + mine), file=said, flush=True)
                gone += own.remove([row.id for row in own.victims(300)]) if turn % 3 == 2 else []
                print(*("-" + row.blob for row in gone), file=said, flush=True)
                own.longest(SCOPE, random_ids(1100, turn), 1099)
                own.touch([row.id for row, _ in own.longest(SCOPE, random_ids(600, 1000 * number), 600)])
                own.add_counters({"turns": 1})

    run_in_forks(*[lambda number=number: child(number) for number in range(1, 7)])  # type: ignore[misc]
    words = [word for path in tmp_path.glob("said*") for word in path.read_text().split()]
    written = {word for word in words if not word.startswith("-")}
    unlinked = [word[1:] for word in words if word.startswith("-")]
    assert len(unlinked) == len(set(unlinked))
    assert {row.blob for row in index.rows()} == written - set(unlinked)
    assert index.counters() == {"turns": 72}
    assert index.check() == []


def test_threads_have_connections_of_their_own(index: Index) -> None:
    ids = random_ids(600)
    index.add(rows_of_prompt(ids))
    failures: list[str] = []

    def work(number: int) -> None:
        try:
            for turn in range(10):
                index.add(rows_of_prompt(random_ids(40, 100 * number + turn + 1)))
                if len(index.longest(SCOPE, ids, 600)) != 2:
                    failures.append("lost")
        except StoreError as error:
            failures.append(str(error))

    for _ in range(2):
        threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert failures == []
    assert index.total()[0] == 62
    late = threading.Thread(target=index.total)
    late.start()
    late.join()
    assert len(index.database._links) == 2  # those of threads that ended are closed
    connections = [link.connection for link in index.database._links]
    index.close()
    for connection in filter(None, connections):
        with pytest.raises(sqlite3.ProgrammingError):
            connection.execute("SELECT 1")
    with pytest.raises(StoreError, match="closed"):
        index.total()
    index.close()


class ClosedBefore:
    """A lock of a database that is closed by another thread before it is taken."""

    def __init__(self, index: Index) -> None:
        self.index, self.lock = index, index.database._lock

    def __enter__(self) -> None:
        self.index.database._lock = self.lock
        self.index.close()
        self.lock.acquire()

    def __exit__(self, *exc: object) -> None:
        self.lock.release()


def test_a_thread_that_comes_while_it_closes_locks_nothing(folder: Folder, index: Index) -> None:
    index.database._lock = ClosedBefore(index)  # type: ignore[assignment]
    with ThreadPoolExecutor(1) as late, pytest.raises(StoreError, match="closed"):
        late.submit(index.total).result()
    os.close(database.lock_index(folder))  # StoreError: the index is in use


def test_a_write_is_whole_or_not_at_all(index: Index) -> None:
    def fails(connection: sqlite3.Connection) -> None:
        connection.execute("DELETE FROM pages")
        raise KeyboardInterrupt

    index.add(rows_of_prompt(random_ids(600)))
    with pytest.raises(KeyboardInterrupt):
        index.database.write(fails)
    assert index.total()[0] == 2
    assert len(list(index.rows())) == 2
    index.add(rows_of_prompt(random_ids(600, 1)))


def test_an_interrupt_amid_a_transaction_ends_it(index: Index) -> None:
    """It may come between two statements of Python, where nothing undoes the transaction."""

    def interrupted(connection: sqlite3.Connection) -> None:
        connection.execute("BEGIN IMMEDIATE")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        index.database.read(interrupted)
    with closing(sqlite3.connect(index.database.path, timeout=0.0, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")  # "database is locked", were it open still
        other.execute("ROLLBACK")
    index.add(rows_of_prompt(random_ids(600)))
    assert index.stats()["rows"] == 2


def test_one_writes_at_a_time_from_the_beginning(index: Index) -> None:
    """Two that read before they write would both have to start again."""
    order: list[str] = []
    second = threading.Thread(target=lambda: index.database.write(lambda connection: order.append("second")))

    def first(connection: sqlite3.Connection) -> None:
        second.start()
        time.sleep(0.2)
        order.append("first")

    index.database.write(first)
    second.join()
    assert order == ["first", "second"]


def test_who_waits_for_a_lock_waits_no_longer_than_that(folder: Folder, index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "BUSY_S", 0.4)
    index.close()
    ids = random_ids(600)
    with Index(folder) as index, closing(sqlite3.connect(folder.index, isolation_level=None)) as other:
        index.add(rows_of_prompt(ids))
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreError, match="locked by other processes"):
            index.add(rows_of_prompt(random_ids(600, 1)))
        assert len(index.longest(SCOPE, ids, 600)) == 2  # readers wait for nobody
        threading.Timer(0.1, lambda: None).start()
        other.execute("ROLLBACK")
        index.add(rows_of_prompt(random_ids(600, 1)))
        assert index.total()[0] == 4


def test_who_claims_a_prefix_waits_for_nobody(folder: Folder, index: Index) -> None:
    """The device thread asks: all streams would stand still."""
    with closing(sqlite3.connect(folder.index, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        began = time.monotonic()
        with pytest.raises(StoreBusyError, match="locked by other processes"):
            leases_of(index, "me").take(b"k" * 32, "fp")
        assert time.monotonic() - began < database.BUSY_S / 4
        other.execute("ROLLBACK")
        assert leases_of(index, "me").take(b"k" * 32, "fp") is None
    patience, log = (
        index.database.read(lambda c, name=name: c.execute(f"PRAGMA {name}").fetchone()[0])
        for name in ("busy_timeout", "wal_autocheckpoint")
    )
    assert (patience, log) == (20, 0), "nor may it have to move the log into the file"
    index.add(rows_of_prompt(random_ids(600)))
    assert index.database.read(lambda c: c.execute("PRAGMA wal_autocheckpoint").fetchone()[0]) == database.LOG_PAGES


# -- forks ---------------------------------------------------------------------------------------------------------


@pytest.mark.alone
@forks
def test_a_fork_goes_on_with_connections_of_its_own(folder: Folder, index: Index, tmp_path: Path) -> None:
    """While two threads of the parent write: a child that inherited their locks would wait for ever, or drop them."""
    index.add(rows_of_prompt(random_ids(600)))
    stop = threading.Event()
    counts = [0, 0]

    def write(number: int) -> None:
        while not stop.is_set():
            index.add(rows_of_prompt(random_ids(512, 1_000_000 * (number + 1) + counts[number])))
            counts[number] += 1

    def child(number: int) -> None:
        began = time.monotonic()
        for turn in range(5):
            index.add(rows_of_prompt(random_ids(512, 10_000 * (number + 1) + turn)))
        assert len(index.longest(SCOPE, random_ids(600), 600)) == 2
        assert time.monotonic() - began < database.BUSY_S
        if number % 2:
            index.close()

    threads = [threading.Thread(target=write, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    try:
        for number in range(6):
            run_in_forks(lambda number=number: child(number))  # type: ignore[misc]
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert index.total()[0] == 2 + sum(counts) + 30
    assert index.check() == []


@forks
def test_no_connection_is_open_while_a_process_forks(folder: Folder, index: Index) -> None:
    """SQLite believes a child to hold the locks of its parent: then the parent, closing, would delete the WAL under the child."""
    index.add(rows_of_prompt(random_ids(20)))
    ready, done = FORK.Event(), FORK.Event()

    def child() -> None:
        index.add(rows_of_prompt(random_ids(20, 1)))
        ready.set()
        done.wait(30)
        index.add(rows_of_prompt(random_ids(20, 2)))
        assert index.total()[0] == 3

    worker = FORK.Process(target=child)
    worker.start()
    assert ready.wait(30)
    wal = folder.path / "index.sqlite-wal"
    before = wal.stat().st_ino
    index.close()
    assert wal.stat().st_ino == before
    done.set()
    worker.join(30)
    assert worker.exitcode == 0
    with Index(folder) as again:
        assert again.total()[0] == 3
        assert again.check() == []


def test_a_fork_without_python_is_noticed(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    index.add(rows_of_prompt(random_ids(20)))
    links = index.database._links
    inherited = links[0].connection
    assert inherited is not None
    monkeypatch.setattr(os, "getpid", lambda: 1)
    index.add(rows_of_prompt(random_ids(20, 1)))
    assert index.database._links is not links
    assert inherited.execute("SELECT 1").fetchone() == (1,)  # neither used nor closed
    inherited.close()


# -- no room, no rights --------------------------------------------------------------------------------------------


def test_a_full_disk(index: Index) -> None:
    index.add(rows_of_prompt(random_ids(600)))
    size = index.database.read(lambda connection: connection.execute("PRAGMA page_count").fetchone()[0])
    index.database.read(lambda connection: connection.execute(f"PRAGMA max_page_count={size + 2}").fetchall())
    with pytest.raises(StoreFullError, match="cannot grow"):
        index.add(rows_of_prompt(random_ids(10_000, 1)))
    assert index.total()[0] == 2
    index.database.read(lambda connection: connection.execute("PRAGMA max_page_count=1000000").fetchall())
    assert index.add(rows_of_prompt(random_ids(10_000, 1))) == []
    assert index.check() == []


@pytest.mark.parametrize("wal", [False, True])
def test_a_read_only_folder(folder: Folder, wal: bool) -> None:
    ids = random_ids(600)
    first = Index(folder)
    rows = added_rows(first, ids)
    first.put_group(GROUP)
    first.put_splices([("ns", b"a", b"1234")])
    if not wal:
        first.close()
    folder.path.chmod(0o500)
    try:
        closed = Folder.open(folder.path)
        before = {path.name: path.read_bytes() for path in folder.path.iterdir() if path.is_file()}
        with Index(closed) as index:
            assert [row.id for row, _ in index.longest(SCOPE, ids, 600)] == [row.id for row in rows]
            assert (index.groups(), index.splice("ns", b"a")) == ([GROUP], b"1234")
            assert len(index.victims(1 << 40)) == 2
            assert index.check() == []
            more = rows_of_prompt(random_ids(600, 1))
            assert index.add(more) == more
            assert index.remove([rows[1].id]) == []
            assert index.pin([rows[1].id], ME) == [rows[1].id]
            assert leases_of(index, ME).take(b"k", "fp") is None
            assert (index.drop_dead_pins(), index.drop_group("ns", "tools"), index.restore(more)) == (0, 0, 0)
            index.touch([rows[0].id])
            index.release_pins([rows[1].id], ME)
            index.quarantine(rows[0].id, "x")
            index.promote([rows[0].id], 2)
            index.put_group(ToolGroup("b", "ns", "fp", "", 600, ("ab" * 32,), (), "model"))
            index.put_splices([("ns", b"b", b"1234")])
            index.set_meta("a", "b")
            index.add_counters({"a": 1})
            index.drop_texts("splices", "ns")
            assert index.total() == (2, 200)
            assert index.stats()["groups"] == 1
        assert before == {path.name: path.read_bytes() for path in folder.path.iterdir() if path.is_file()} or wal
        with pytest.raises(StoreError, match="read-only"):
            rebuild(closed, [])
    finally:
        folder.path.chmod(0o700)
        first.close()


def test_a_reader_without_rights_sees_what_others_write(folder: Folder) -> None:
    with Index(folder) as index:
        index.add(rows_of_prompt(random_ids(600)))
    folder.path.chmod(0o500)
    closed = Folder.open(folder.path)
    folder.path.chmod(0o700)
    with Index(closed) as reader:
        assert reader.total()[0] == 2
        with Index(folder) as index:
            index.add(rows_of_prompt(random_ids(600, 1)))
            assert reader.total()[0] == 4
        assert reader.total()[0] == 4


def test_a_read_only_folder_without_an_index_is_empty(tmp_path: Path) -> None:
    place = Folder.open(tmp_path / "store").path
    place.chmod(0o500)
    try:
        with Index(Folder.open(place)) as index:
            assert index.longest(SCOPE, random_ids(600), 600) == []
            assert index.total() == (0, 0)
        assert not (place / "index.sqlite").exists()
    finally:
        place.chmod(0o700)


def test_the_index_is_private(folder: Folder, index: Index) -> None:
    index.add(rows_of_prompt(random_ids(600)))
    for path in folder.path.glob("index*"):
        assert path.stat().st_mode & 0o077 == 0, path
