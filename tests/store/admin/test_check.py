"""verify finds each kind of damage, --fix mends it and loses nothing else; prune deletes what it is told to and nothing that is in use."""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from agentcache.errors import StorePermissionError
from agentcache.store.admin import check
from agentcache.store.admin.check import pages_of, verify
from agentcache.store.admin.prune import finish_deletions, prune
from agentcache.store.disk import blob_files, blob_io, process_identity
from agentcache.store.disk.database import Database
from agentcache.store.disk.folder import Folder
from agentcache.store.disk.index import Index
from agentcache.store.disk.schema import Row
from agentcache.store.keys import Ids, Role, Scope
from tests.store.index_rows import DEAD, random_ids
from tests.store.stocked_store import blob_bytes, manifest_of, page_of_row, reads_back, rows_of_group, store_group
from tests.store.stored_pages import blob_path, edit_file

SCOPE = Scope("tests", "weights")
PROMPT = random_ids(1200)


@dataclass
class Shop:
    """A store with a tool group of three pages and another prompt of two."""

    folder: Folder
    rows: list[Row]
    others: list[Row]

    def index(self) -> Index:
        return Index(self.folder)


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shop:
    monkeypatch.delenv("AGENTCACHE_KEY", raising=False)
    folder = Folder.open(tmp_path / "store")
    with Index(folder) as index:
        rows = store_group(index, PROMPT, "harbour")
        others = store_group(index, random_ids(700, 1), role=Role.TURN)
        index.put_splices([("tests", b"k" * 32, b"abcd")])
    return Shop(folder, rows, others)


def flip(file: Path, at: int) -> None:
    def change(content: bytearray) -> None:
        content[at] ^= 1

    edit_file(file, change)


def orphan(folder: Folder, suffix: str = blob_files.WHOLE) -> Path:
    """A page without a row, written by a process that has ended."""
    wanted = rows_of_group(random_ids(512, 9), SCOPE)[0]
    written = blob_io.write(folder, wanted, page_of_row(wanted))
    dead = blob_path(folder, written).with_name(f"{written.blob.partition('-')[0]}-{DEAD}{suffix}")
    blob_path(folder, written).rename(dead)
    return dead


# -- a sound store -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fix", [False, True])
def test_a_sound_store_is_left_alone(shop: Shop, fix: bool) -> None:
    before, told = blob_bytes(shop.folder), []
    report = verify(shop.folder, fix=fix, progress=lambda done, total: told.append((done, total)))
    assert report.problems == []
    assert report.sound
    assert report.rebuilt is None
    assert (report.pages, report.bytes) == (5, sum(row.bytes for row in shop.rows + shop.others))
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert told[-1] == (report.bytes, report.bytes)
    assert blob_bytes(shop.folder) == before


def test_an_empty_store_is_sound(tmp_path: Path) -> None:
    assert verify(Folder.open(tmp_path / "new"), fix=True).sound


def test_a_read_only_store_is_verified_but_not_mended(shop: Shop) -> None:
    os.chmod(shop.folder.path, 0o500)
    try:
        folder = Folder.open(shop.folder.path)
        assert verify(folder).sound
        with pytest.raises(StorePermissionError, match="read-only"):
            verify(folder, fix=True)
    finally:
        os.chmod(shop.folder.path, 0o700)


# -- each damage -----------------------------------------------------------------------------------------------------


def in_a_layer(shop: Shop) -> None:
    flip(blob_path(shop.folder, shop.rows[1]), 5000)


def in_the_header(shop: Shop) -> None:
    flip(blob_path(shop.folder, shop.rows[1]), 100)


def in_the_macs(shop: Shop) -> None:
    flip(blob_path(shop.folder, shop.rows[1]), -1)


def cut_short(shop: Shop) -> None:
    edit_file(blob_path(shop.folder, shop.rows[1]), lambda content: content.__delitem__(slice(-100, None)))


def gone(shop: Shop) -> None:
    blob_path(shop.folder, shop.rows[1]).unlink()


def quarantined(shop: Shop) -> None:
    with shop.index() as index:
        index.quarantine(shop.rows[1].id, "computed otherwise")


BAD_PAGES = {in_a_layer: "page", in_the_header: "page", in_the_macs: "page", cut_short: "page", gone: "missing", quarantined: "quarantined"}


@pytest.mark.parametrize(("damage", "kind"), BAD_PAGES.items())
def test_a_bad_page_goes_and_nothing_else(shop: Shop, damage: Callable[[Shop], None], kind: str) -> None:
    damage(shop)
    before = blob_bytes(shop.folder)
    report = verify(shop.folder)
    assert [(problem.kind, problem.name, problem.mended) for problem in report.problems] == [(kind, shop.rows[1].blob, False)]
    assert not report.sound
    assert blob_bytes(shop.folder) == before
    report = verify(shop.folder, fix=True)
    assert [(problem.kind, problem.mended) for problem in report.problems] == [(kind, True)]
    assert report.sound
    assert not blob_path(shop.folder, shop.rows[1]).exists()
    left = [shop.rows[0], shop.rows[2], *shop.others]
    with shop.index() as index:
        assert [row.id for row in index.rows()] == [row.id for row in left]
        assert [row is None for row in pages_of(index, index.groups()[0])] == [False, True, False]
        assert index.splice("tests", b"k" * 32) == b"abcd"
    assert reads_back(shop.folder, left)
    assert verify(shop.folder).problems == []


@pytest.mark.parametrize(("suffix", "kind"), [(blob_files.WHOLE, "orphan"), (blob_files.PART, "part")])
def test_what_a_dead_process_left_is_swept(shop: Shop, suffix: str, kind: str) -> None:
    file = orphan(shop.folder, suffix)
    report = verify(shop.folder)
    assert [(problem.kind, problem.bytes, problem.mended) for problem in report.problems] == [(kind, file.stat().st_size, False)]
    assert file.exists()
    assert verify(shop.folder, fix=True).sound
    assert not file.exists()
    assert reads_back(shop.folder, shop.rows + shop.others)


def test_what_a_running_process_is_writing_is_left_alone(shop: Shop) -> None:
    wanted = rows_of_group(random_ids(512, 9), SCOPE)[0]
    whole = blob_path(shop.folder, blob_io.write(shop.folder, wanted, page_of_row(wanted)))
    part = blob_path(shop.folder, blob_io.write(shop.folder, wanted, page_of_row(wanted)))
    part = part.rename(part.with_suffix(blob_files.PART))
    assert verify(shop.folder, fix=True).problems == []
    assert whole.exists()
    assert part.exists()


def test_a_page_evicted_during_a_check_is_no_problem(shop: Shop) -> None:
    with shop.index() as index:

        def evict(done: int, total: int) -> None:
            for row in index.remove([shop.others[1].id]):
                blob_files.unlink(shop.folder, row.blob)

        assert verify(shop.folder, progress=evict).problems == []


@pytest.mark.parametrize("fix", [False, True])
def test_pages_that_are_being_deleted_are_no_problem(shop: Shop, index: Index, monkeypatch: pytest.MonkeyPatch, fix: bool) -> None:
    """Their blobs go first, in one transaction with their rows."""
    unlinked, looked, unlink, still, write = threading.Event(), threading.Event(), blob_files.unlink, check._still, Database.write

    def unlinks(*given: Any) -> bool:
        found = unlink(*given)
        unlinked.set()
        assert looked.wait(30)
        return found

    def stands(*given: Any) -> bool:
        found = still(*given)
        looked.set()
        return found

    def writes(*given: Any, **more: Any) -> Any:
        if threading.current_thread() is threading.main_thread() and unlinked.is_set():
            looked.set()  # it has to wait for the deletion
        return write(*given, **more)

    monkeypatch.setattr(blob_files, "unlink", unlinks)
    monkeypatch.setattr(check, "_still", stands)
    monkeypatch.setattr(check, "index_problems", lambda *given: [])
    monkeypatch.setattr(Database, "write", writes)
    with ThreadPoolExecutor(1) as other:
        done = other.submit(prune, shop.folder, index)
        assert unlinked.wait(30)
        assert verify(shop.folder, fix=fix).problems == []
        assert done.result().pages == 5


# -- the index -------------------------------------------------------------------------------------------------------


def overwritten(file: Path) -> None:
    edit_file(file, lambda content: content.__setitem__(slice(0, 4096), os.urandom(4096)))


def halved(file: Path) -> None:
    edit_file(file, lambda content: content.__delitem__(slice(len(content) // 2, None)))


def of_another_version(file: Path) -> None:
    connection = sqlite3.connect(file)
    connection.execute("PRAGMA user_version=99")
    connection.close()


def with_wrong_ids(file: Path) -> None:
    connection = sqlite3.connect(file)
    with connection:
        connection.execute("UPDATE pages SET ids = zeroblob(length(ids)) WHERE id = 1")
    connection.close()


@pytest.mark.parametrize("damage", [overwritten, halved, Path.unlink, of_another_version, with_wrong_ids])
def test_a_damaged_index_is_made_anew_from_the_pages(shop: Shop, damage: Callable[[Path], None]) -> None:
    damage(shop.folder.index)
    before = blob_bytes(shop.folder)
    report = verify(shop.folder)
    assert {problem.kind for problem in report.problems} == {"index"}
    assert not report.sound
    assert report.pages == 5
    assert blob_bytes(shop.folder) == before
    report = verify(shop.folder, fix=True)
    assert {problem.kind for problem in report.problems} == {"index"}
    assert report.sound
    assert report.rebuilt == 5
    assert blob_bytes(shop.folder) == before
    assert verify(shop.folder).problems == []
    with shop.index() as index:
        rows = list(index.rows())
        assert {row.page_key for row in rows} == {row.page_key for row in shop.rows + shop.others}
    assert reads_back(shop.folder, rows)


def test_a_damaged_index_and_a_damaged_page_at_once(shop: Shop) -> None:
    overwritten(shop.folder.index)
    in_a_layer(shop)
    flip(blob_path(shop.folder, shop.others[0]), 100)
    assert {problem.kind for problem in verify(shop.folder).problems} == {"index", "page"}
    report = verify(shop.folder, fix=True)
    assert [problem.kind for problem in report.problems] == ["index", "page"]
    assert report.sound
    assert report.rebuilt == 4
    with shop.index() as index:
        assert reads_back(shop.folder, list(index.rows()))
        assert index.total()[0] == 3


def test_a_damaged_manifest_is_found_and_goes(shop: Shop) -> None:
    connection = sqlite3.connect(shop.folder.index)
    with connection:
        connection.execute("UPDATE groups SET manifest = zeroblob(50)")
    connection.close()
    assert [problem.why for problem in verify(shop.folder).problems] == ["1 manifests of tool groups are damaged"]
    assert verify(shop.folder, fix=True).sound
    assert verify(shop.folder).problems == []
    assert reads_back(shop.folder, shop.rows + shop.others)


def test_an_index_in_use_is_not_made_anew(shop: Shop) -> None:
    with shop.index() as index:
        with_wrong_ids(shop.folder.index)
        report = verify(shop.folder, fix=True)
        assert not report.sound
        assert "in use" in report.problems[-1].why
        assert index.total()[0] == 5


# -- a group's pages -------------------------------------------------------------------------------------------------


def test_a_last_page_that_is_stored_longer_is_found(shop: Shop) -> None:
    with shop.index() as index:
        found = index.groups()[0]
        longer = random_ids(1400)
        index.remove([shop.rows[2].id])
        assert pages_of(index, found)[2] is None
        rows = store_group(index, longer)
        assert [row.id for row in pages_of(index, found) if row] == [rows[0].id, rows[1].id, rows[2].id]
        index.quarantine(rows[2].id, "bad")
        assert pages_of(index, found)[2] is None


def test_each_page_of_a_group_is_as_exact_as_possible(shop: Shop) -> None:
    with shop.index() as index:
        scope = Scope("tests", "weights", precision="int8")
        rows = store_group(index, PROMPT, scope=scope)
        found = index.groups()[0]
        assert {row.precision for row in pages_of(index, found) if row} == {"exact"}
        index.remove([shop.rows[2].id])
        assert [row.precision for row in pages_of(index, found) if row] == ["exact", "exact", "int8"]
        assert [row.id for row in pages_of(index, found, ["int8"] * 3) if row] == [row.id for row in rows]
        assert [row is None for row in pages_of(index, found, ["exact"] * 3)] == [False, False, True]


# -- prune -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def index(shop: Shop) -> Iterator[Index]:
    with shop.index() as opened:
        yield opened


@pytest.mark.parametrize(("step", "what"), [("record_deletion", {"older_than": 0.0}), ("remove", {"namespace": "tests"})])
def test_a_group_warmed_during_a_deletion_stays(
    shop: Shop, index: Index, monkeypatch: pytest.MonkeyPatch, step: str, what: dict[str, Any]
) -> None:
    real = getattr(index, step)

    def then_warm(*given: Any, **more: Any) -> Any:
        found = real(*given, **more)
        monkeypatch.undo()
        with shop.index() as other:
            store_group(other, random_ids(600, 2), "quay")
            store_group(other, PROMPT, "harbour")
            other.put_splices([("tests", b"l" * 32, b"abcd")])
        return found

    monkeypatch.setattr(index, step, then_warm)
    assert prune(shop.folder, index, **what).pages == 5
    assert {group.name for group in index.groups()} == {"harbour", "quay"}
    assert index.total()[0] == (2 if step == "record_deletion" else 5), "old pages of a new group go: it writes them again"
    assert index.splice("tests", b"k" * 32) is None
    if "older_than" in what:
        assert index.splice("tests", b"l" * 32)


@pytest.mark.parametrize("warmed", [PROMPT, PROMPT[:700], random_ids(600, 2)], ids=["same", "shorter", "other"])
def test_a_group_warmed_since_a_killed_deletion_stays(shop: Shop, index: Index, monkeypatch: pytest.MonkeyPatch, warmed: Ids) -> None:
    def kill(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as dying:
        dying.setattr(process_identity, "token", lambda: DEAD)
        dying.setattr(index, "remove", kill)
        with pytest.raises(KeyboardInterrupt):
            prune(shop.folder, index, group=index.groups()[0], force=True)
    told, new = index.generation(), store_group(index, warmed, "harbour")
    finish_deletions(shop.folder, index)
    assert index.generation() == told, "else running processes would unpin the new group"
    assert {row.id for row in index.rows()} == {row.id for row in [*new, *shop.others]}
    [group] = index.groups()
    assert (None not in pages_of(index, group), reads_back(shop.folder, new)) == (True, True)
    assert index.unfinished() == []
    assert verify(shop.folder).sound


def test_adapter_pages_written_since_a_killed_deletion_stay(shop: Shop, index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    def kill(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    scope = Scope("tests", "weights+adapter")
    store_group(index, PROMPT, "quay", scope=scope)
    with monkeypatch.context() as dying:
        dying.setattr(process_identity, "token", lambda: DEAD)
        dying.setattr(index, "remove", kill)
        with pytest.raises(KeyboardInterrupt):
            prune(shop.folder, index, group="adapter", force=True)
    told, new = index.generation(), store_group(index, random_ids(600, 2), "mole", scope=scope)
    finish_deletions(shop.folder, index)
    assert index.generation() == told
    assert {row.id for row in index.rows(fingerprint=scope.fingerprint)} == {row.id for row in new}
    assert {group.name for group in index.groups()} == {"harbour", "mole"}


def test_a_killed_deletion_leaves_no_row_without_its_blob(shop: Shop, index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    def kill(*given: Any) -> None:
        unlink(*given)
        raise KeyboardInterrupt

    unlink = blob_files.unlink
    with monkeypatch.context() as dying:
        dying.setattr(process_identity, "token", lambda: DEAD)
        dying.setattr(blob_files, "unlink", kill)
        with pytest.raises(KeyboardInterrupt):
            prune(shop.folder, index, group=index.groups()[0], force=True)
    store_group(index, PROMPT, "harbour")  # finds the rows
    finish_deletions(shop.folder, index)
    assert verify(shop.folder).sound
    assert [group.name for group in index.groups()] == ["harbour"]


def test_a_dry_run_deletes_nothing(shop: Shop, index: Index) -> None:
    file, before = orphan(shop.folder), blob_bytes(shop.folder)
    done = prune(shop.folder, index, dry_run=True)
    assert (done.pages, done.bytes, done.groups, done.orphans) == (5, index.total()[1], ["harbour"], 1)
    assert blob_bytes(shop.folder) == {**before, file: file.read_bytes()}
    assert index.total()[0] == 5


def test_all_goes(shop: Shop, index: Index) -> None:
    orphan(shop.folder)
    done = prune(shop.folder, index)
    assert (done.pages, done.groups, done.splices, done.orphans) == (5, ["harbour"], 1, 1)
    assert index.total() == (0, 0)
    assert blob_bytes(shop.folder) == {}
    assert index.groups() == []


def test_a_namespace_goes_alone(shop: Shop, index: Index) -> None:
    store_group(index, PROMPT, "harbour", scope=Scope("other", "weights"))
    index.put_splices([("other", b"o" * 32, b"efgh")])
    done = prune(shop.folder, index, namespace="other")
    assert (done.pages, done.groups, done.splices) == (3, ["harbour"], 1)
    assert index.splice("tests", b"k" * 32) == b"abcd"
    assert [found.namespace for found in index.groups()] == ["tests"]
    assert reads_back(shop.folder, list(index.rows()))
    assert index.total()[0] == 5


def test_what_is_old_goes_though_something_young_continues_it(shop: Shop, index: Index) -> None:
    old = store_group(index, random_ids(1024, 5), created=time.time() - 1000.0)
    young = store_group(index, random_ids(1300, 5))[2]
    index.put_group(manifest_of(random_ids(1024, 5), "old", SCOPE, created=time.time() - 1000.0))
    done = prune(shop.folder, index, older_than=500.0)
    assert (done.pages, done.groups, done.splices) == (2, ["old"], 0)
    assert not any(blob_path(shop.folder, row).exists() for row in old)
    assert young.id in {row.id for row in index.rows()}
    assert index.total()[0] == 6


def test_down_to_a_size_groups_go_last(shop: Shop, index: Index) -> None:
    most = sum(row.bytes for row in shop.rows)
    done = prune(shop.folder, index, max_bytes=most)
    assert (done.pages, done.groups) == (2, [])
    assert [row.id for row in index.rows()] == [row.id for row in shop.rows]
    assert prune(shop.folder, index, max_bytes=most).pages == 0
    assert reads_back(shop.folder, shop.rows)


def test_a_group_goes_with_its_continuations_but_not_shared_pages(shop: Shop, index: Index) -> None:
    prompt = PROMPT.copy()
    prompt[600:] = random_ids(600, 3)
    shared = store_group(index, prompt, "port")
    turn = store_group(index, random_ids(2000), role=Role.TURN)[-1]
    done = prune(shop.folder, index, group=index.groups("tests", "harbour")[0])
    left = {row.id for row in index.rows()}
    assert shop.rows[0].id == shared[0].id
    assert left == {row.id for row in shared} | {row.id for row in shop.others}
    assert turn.id not in left
    assert done.groups == ["harbour"]
    assert [found.name for found in index.groups()] == ["port"]
    assert reads_back(shop.folder, list(index.rows()))


@pytest.mark.parametrize("what", [{}, {"namespace": "tests"}, {"older_than": -10.0}, {"max_bytes": 0}, {"group": True}])
def test_what_a_running_process_has_pinned_stays(shop: Shop, index: Index, what: dict[str, object]) -> None:
    index.pin([shop.rows[1].id], process_identity.token())
    index.pin([shop.others[1].id], DEAD)
    what = {name: index.groups()[0] if name == "group" else value for name, value in what.items()}
    for dry_run in (True, False):
        done = prune(shop.folder, index, dry_run=dry_run, **what)  # type: ignore[arg-type]
        assert done.pages == (1 if "group" in what else 3)
        assert done.groups == []
        assert done.kept == (0 if "max_bytes" in what else 2)
    left = [row.id for row in index.rows()]
    assert left[:2] == [shop.rows[0].id, shop.rows[1].id]
    assert len(left) == (4 if "group" in what else 2)
    done = prune(shop.folder, index, force=True, **what)  # type: ignore[arg-type]
    assert done.pages == 2
    assert done.groups == ([] if "max_bytes" in what else ["harbour"])


def test_batches_are_removed_one_after_the_other(shop: Shop, index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentcache.store.admin.prune.BATCH", 2)
    assert prune(shop.folder, index).pages == 5
    assert blob_bytes(shop.folder) == {}


def test_nothing_deleted_stays_in_the_log(shop: Shop, index: Index) -> None:
    needle = shop.rows[1].ids[100:140].tobytes()
    prune(shop.folder, index, namespace="tests")
    for file in shop.folder.path.glob("index.sqlite*"):
        assert needle not in file.read_bytes(), file.name


def test_described_leaves_out_what_is_no_page(shop: Shop) -> None:
    flip(blob_path(shop.folder, shop.rows[0]), 100)
    assert len(list(check.rows_of_blobs(shop.folder))) == 4
