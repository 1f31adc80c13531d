"""The writing thread beside others: what grows, is taken back or is deleted between two of its steps."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agentcache.errors import StoreBusyError, StoreError, StoreFullError
from agentcache.store.disk import blob_io, writer
from agentcache.store.disk.folder import Folder
from agentcache.store.disk.index import Index
from agentcache.store.entry import Entry
from agentcache.store.keys import Scope, as_ids
from agentcache.store.store import Store
from agentcache.types import StoreOptions
from tests.engines import MB
from tests.store.stocked_store import manifest_of
from tests.store.stored_pages import noise_page, read_page, same_numbers

SCOPE = Scope("tests", "weights")
IDS = as_ids(range(200))
LONG, SHORT = noise_page(tokens=200), noise_page(tokens=200)
SHORT.filled = 100


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = Store(64 * MB, options=StoreOptions(tmp_path))
    yield opened
    opened.close()


class Contended:
    """A lock that tells when another thread waits for it."""

    def __init__(self, lock: Any, waits: threading.Event) -> None:
        self._lock, self._waits = lock, waits

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            self._waits.set()
            self._lock.acquire()

    def __exit__(self, *exc: object) -> None:
        self._lock.release()


class Interrupted:
    """An entry; before its `name` is looked at, or set, another thread goes on until it is through or has to wait."""

    def __init__(self, entry: Entry, store: Store, name: str, other: Callable[[], object]) -> None:
        moved = threading.Event()
        store.deletions.lock = Contended(store.deletions.lock, moved)  # type: ignore[assignment]
        thread = threading.Thread(target=lambda: (other(), moved.set()))
        vars(self).update(entry=entry, name=name, thread=thread, moved=moved)

    def _interrupt(self, name: str) -> None:
        if name == self.name and self.thread.ident is None:
            self.thread.start()
            assert self.moved.wait(30)

    def __getattr__(self, name: str) -> Any:
        self._interrupt(name)
        return getattr(self.entry, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._interrupt(f"set {name}")
        setattr(self.entry, name, value)


@pytest.mark.parametrize("name", ["ids", "set row"], ids=["while it is offered", "once it is written"])
def test_a_page_that_grows_meanwhile_is_written_whole(store: Store, name: str) -> None:
    assert store.disk
    store.admit(SCOPE, IDS[:100], [SHORT], "n")
    [entry] = store.tree.path(SCOPE, IDS[:100])

    def grow() -> None:  # as `Store.admit` does, before it offers the page
        with store.deletions.lock:
            store.tree.admit(SCOPE, IDS, [LONG], "n")

    growing: Any = Interrupted(entry, store, name, grow)
    writer = store.disk.writer
    writer.discard(frozenset([entry.key]))
    writer.after(lambda: writer.write([growing]))
    assert store.flush(), writer.failure
    growing.thread.join(30)
    store.admit(SCOPE, IDS, [LONG], "n")
    assert store.flush(), writer.failure
    assert store.disk.index.check() == []
    [row] = store.disk.index.rows()
    assert row.tokens == 200
    assert same_numbers(read_page(store.disk.folder, row), LONG, 200)


def test_a_page_cut_while_it_is_offered_is_sound(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    assert store.disk
    store.admit(SCOPE, IDS[:100], [SHORT], "n")
    [entry] = store.tree.path(SCOPE, IDS[:100])
    cut: Any = Interrupted(entry, store, "key", lambda: store.retract(SCOPE, IDS[:100], 50, [SHORT]))
    writer = store.disk.writer
    writer.discard(frozenset([entry.key]))
    monkeypatch.setattr(store.disk, "retract", lambda *_: cut.moved.set())
    writer.after(lambda: writer.write([cut]))
    assert store.flush(), writer.failure
    cut.thread.join(30)
    assert store.disk.index.check() == []


def test_a_wrong_page_that_pinning_writes_is_quarantined(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    disk, seen = store.disk, threading.Event()
    assert disk
    store.admit(SCOPE, IDS, [noise_page(tokens=200)], "n")
    assert store.flush()
    [row] = disk.index.rows()
    disk.index.remove([row.id], force=True)  # as another process that needed room
    quarantining = threading.Thread(target=store.quarantine, args=(SCOPE, IDS, row.page_key, "wrong"))
    write, wait, quarantine = blob_io.write, disk.writer._changed.wait, disk.quarantine

    def waits(seconds: float | None = None) -> bool:
        if threading.current_thread() is quarantining:
            seen.set()
        return wait(seconds)

    def written(*given: Any) -> Any:
        quarantining.start()
        assert seen.wait(30)
        return write(*given)

    monkeypatch.setattr(blob_io, "write", written)
    monkeypatch.setattr(disk.writer._changed, "wait", waits)
    monkeypatch.setattr(disk, "quarantine", lambda *given: (quarantine(*given), seen.set()))
    assert store.pin(SCOPE, IDS) == 1
    store.flush()
    quarantining.join(30)
    assert [one.bad for one in disk.index.rows()] in ([], ["wrong"])


def test_a_prefix_released_during_a_flush_is_not_pinned(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    assert store.disk
    index, unwritten = store.disk.index, store._unwritten
    store.admit(SCOPE, IDS, [LONG], "n")
    assert store.pin(SCOPE, IDS) == 1
    assert store.flush()
    assert len(index.pinned()) == 1
    index.remove([row.id for row in index.rows()], force=True)  # as `agentcache prune --force`

    def then_released(*given: Any) -> Any:
        found = unwritten(*given)
        monkeypatch.undo()
        store.release_pin(SCOPE.pin_name(IDS))
        return found

    monkeypatch.setattr(store, "_unwritten", then_released)
    store.flush()
    assert index.pinned() == set()


def failing_first(inner: Callable[..., Any], *errors: StoreError) -> Callable[..., Any]:
    """The same function, whose first calls raise these."""
    left = list(errors)

    def called(*given: Any, **more: Any) -> Any:
        if left:
            raise left.pop(0)
        return inner(*given, **more)

    return called


@pytest.mark.parametrize("error", [StoreFullError, StoreBusyError])
def test_a_manifest_is_written_once_the_disk_takes_it(store: Store, monkeypatch: pytest.MonkeyPatch, error: type[StoreError]) -> None:
    assert store.disk
    index = store.disk.index
    monkeypatch.setattr(writer, "PAUSE_S", 0.0)
    monkeypatch.setattr(index, "put_group", failing_first(index.put_group, error("no"), error("no")))
    store.record(manifest_of(IDS, "first", SCOPE))
    store.record(manifest_of(IDS, "second", SCOPE))
    store.flush()  # whose refusals may have come before it
    assert store.flush()
    assert {group.name for group in index.groups()} == {"first", "second"}


def test_what_a_disk_refused_is_tried_again_at_the_end(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    assert store.disk
    options, index = store.disk.options, store.disk.index
    monkeypatch.setattr(index, "put_group", failing_first(index.put_group, StoreFullError("no")))
    store.record(manifest_of(IDS, "first", SCOPE))
    assert not store.flush()
    store.record(manifest_of(IDS, "second", SCOPE))
    store.close()  # within the pause that follows an error
    with Index(Folder.open(options.folder)) as later:
        assert {group.name for group in later.groups()} == {"first", "second"}


def test_a_manifest_that_had_to_wait_replaces_no_later_one(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    assert store.disk
    index = store.disk.index
    monkeypatch.setattr(writer, "PAUSE_S", 0.0)
    monkeypatch.setattr(index, "put_group", failing_first(index.put_group, StoreFullError("no")))
    earlier, later = (manifest_of(ids, "group", SCOPE) for ids in (IDS[:100], IDS))
    store.record(earlier)
    store.record(later)
    assert not store.flush()
    assert store.flush()
    assert index.group(later.namespace, "group", later.fingerprint) == later


def test_pins_of_a_prefix_that_did_not_fit_are_released(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    assert store.disk
    index, ids = store.disk.index, as_ids(range(600))
    monkeypatch.setattr(writer, "PAUSE_S", 0.0)
    store.admit(SCOPE, ids, [noise_page(), noise_page(tokens=88)], "n")
    assert store.flush()
    index.remove([list(index.rows())[-1].id])  # as another process that needed room
    monkeypatch.setattr(blob_io, "write", failing_first(blob_io.write, *[StoreFullError("no")] * 9))
    assert store.pin(SCOPE, ids) == 2
    assert not store.flush()
    assert index.stats()["pins"] == 1
    store.release_pin(SCOPE.pin_name(ids))
    store.flush()
    assert index.stats()["pins"] == 0


def test_a_lease_ends_once_the_disk_takes_it(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    assert store.disk
    index, leases = store.disk.index, store.disk.leases
    monkeypatch.setattr(writer, "PAUSE_S", 0.0)
    assert leases.take(b"prefix", "weights") is None
    assert store.flush()
    monkeypatch.setattr(index.database, "write", failing_first(index.database.write, StoreFullError("no")))
    leases.release(b"prefix", "weights")
    assert not store.flush()
    assert store.flush()
    assert (index.stats()["leases"], leases.held) == (0, frozenset())


def test_a_look_without_memory_ends_no_writing(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    assert store.disk
    leases, looked = store.disk.leases, threading.Event()
    leases._computed.add((b"prefix", "weights"))

    def starved(*_: object) -> bool:
        looked.set()
        raise MemoryError

    monkeypatch.setattr(leases, "is_awaited", starved)
    store.disk.writer.quiet.clear()
    store.admit(SCOPE, IDS, [noise_page(tokens=200)], "n")
    assert looked.wait(30)
    assert store.flush()
    assert store.disk.index.stats()["rows"] == 1
