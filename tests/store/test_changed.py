"""What others do to a store under a running engine: pages evicted, the folder deleted, files written to. It is noticed, and told."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentcache import Engine, Reason
from agentcache.errors import StoreLostError, StoreWarning
from agentcache.store.admin.check import verify
from agentcache.store.admin.prune import prune
from agentcache.store.deletion import Deletion
from agentcache.store.disk import blob_files, blob_io
from agentcache.store.disk.disk_tier import DiskTier
from agentcache.store.disk.folder import Folder
from agentcache.store.disk.index import Index
from agentcache.store.keys import Scope, as_ids
from agentcache.store.store import Store
from agentcache.types import StoreOptions
from tests import models
from tests.engines import SYSTEM, TOOLS, chat, check_store, decode, engine, long_text
from tests.store import stored_pages

PROMPT = chat(long_text(300))
ASK = {"sampling": decode(4)}


@pytest.fixture(scope="module")
def model() -> Any:
    return models.build("qwen3", num_hidden_layers=2)


def reasons(done: Any) -> set[Reason]:
    return {refusal.reason for refusal in done.receipt.refusals}


def unread(folder: Path) -> Any:
    """Options under which nothing but the request itself reads pages."""
    return StoreOptions(folder, check_one_in=0)


# -- what is pinned is on disk -----------------------------------------------------------------------------------------


def others_evict(disk: DiskTier, times: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Another process makes room with the last page, so often, between its being written and its being pinned."""
    pin, gone = Index.pin, []

    def late(index: Index, ids: Any, holder: str) -> list[int]:
        wanted = list(ids)
        if len(gone) < times and wanted:
            gone.append(wanted[-1])
            stolen = index.remove(wanted[-1:])
            assert stolen, "nobody had pinned it"
            for row in stolen:
                blob_files.remove(disk.folder, [row])
        return pin(index, wanted, holder)

    monkeypatch.setattr(Index, "pin", late)
    return gone


def whole(running: Engine) -> bool:
    disk = running.store.disk
    [(_, path)] = running.store.tree.pinned()
    rows = {row.id: row for row in disk.index.rows()}
    return all(entry.row in rows and rows[entry.row].page_key == entry.key for entry in path)


@pytest.mark.parametrize("times", [1, 3])
def test_a_page_evicted_before_its_pin_is_rewritten(model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    with engine(model=model, store=tmp_path / "store") as running:
        gone = others_evict(running.store.disk, times, monkeypatch)
        running.warm(SYSTEM + long_text(300), TOOLS, name="tools")
        assert running.flush()
        assert len(gone) == times
        assert whole(running)
        assert running.store.disk.index.pinned() == {row.id for row in running.store.disk.index.rows()}


def test_flush_reports_a_missing_pinned_page(model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with engine(model=model, store=tmp_path / "store") as running:
        with monkeypatch.context() as patch:
            others_evict(running.store.disk, 1000, patch)
            running.warm(SYSTEM + long_text(300), TOOLS, name="tools")
            assert not running.flush()
        assert running.flush(), "nobody takes it away any more"
        assert whole(running)


def test_pruned_pinned_pages_are_rewritten_or_reported_by_flush(model: Any, tmp_path: Path) -> None:
    with engine(model=model, store=tmp_path / "store") as running:
        running.warm(SYSTEM + long_text(300), TOOLS, name="tools")
        assert running.flush()
        opened = Folder.open(tmp_path / "store")
        with Index(opened) as index:
            prune(opened, index, max_bytes=0, force=True)  # for room: nothing is forgotten
            assert index.total() == (0, 0)
        assert running.flush()
        assert whole(running)


# -- evicted and pruned pages are told as such ---------------------------------------------------------------------------


def being_deleted(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread deletes: blobs are gone and their rows are not, until this one has quarantined a row."""
    unlinked, quarantined, unlink, quarantine = threading.Event(), threading.Event(), blob_files.unlink, Index.quarantine

    def unlinks(*given: Any) -> bool:
        found = unlink(*given)
        unlinked.set()
        assert quarantined.wait(30)
        return found

    def delete() -> None:
        with Index(Folder.open(folder.path)) as index:
            prune(folder, index, namespace="default")

    monkeypatch.setattr(blob_files, "unlink", unlinks)
    monkeypatch.setattr(Index, "quarantine", lambda *given: (quarantined.set(), quarantine(*given))[1])
    threading.Thread(target=delete).start()
    assert unlinked.wait(30)


@pytest.mark.parametrize("how", ["evicted", "deleted", "being deleted", "lost"])
def test_a_page_that_vanishes_before_reading_is_named_so(model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    with engine(model=model, store=unread(tmp_path / "store")) as running:
        wanted = running.generate(PROMPT, **ASK).ids
    with engine(model=model, store=unread(tmp_path / "store")) as running:
        read_many, disk = blob_io.read_many, running.store.disk

        def late(folder: Folder, jobs: Any, **more: Any) -> Any:
            monkeypatch.setattr(blob_io, "read_many", read_many)
            if how == "being deleted":
                being_deleted(folder, monkeypatch)
            with Index(Folder.open(folder.path)) as index:
                if how == "evicted":
                    prune(folder, index, max_bytes=0)
                elif how == "deleted":
                    prune(folder, index, namespace="default")
            if how == "lost":
                for file in stored_pages.files_under_blobs(folder):
                    file.unlink()
            return read_many(folder, jobs, **more)

        monkeypatch.setattr(blob_io, "read_many", late)
        done = running.generate(PROMPT, **ASK)
        assert done.ids == wanted
        told = {"evicted": Reason.EVICTED, "lost": Reason.BAD_BLOB}.get(how, Reason.DELETED)
        assert told in reasons(done)
        assert (Reason.BAD_BLOB in reasons(done)) == (how == "lost"), "a row without its file is damage"
        assert (disk.audit()["refused_pages"] > 0) == (how == "lost")


# -- the folder is deleted -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["deleted", "deleted bit by bit", "emptied", "made anew", "made anew, then closed"])
def test_an_engine_of_a_deleted_folder_uses_the_new(model: Any, tmp_path: Path, how: str) -> None:
    place = tmp_path / "store"
    with engine(model=model, store=place) as running:
        wanted = running.generate(PROMPT, **ASK).ids
        running.warm(SYSTEM, TOOLS, name="tools")
        assert running.flush()
        key = (place / "key").read_bytes()
        if how == "emptied":
            for path in place.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        else:
            if how == "deleted bit by bit":
                (place / "generation").unlink()
                assert running.generate(PROMPT, **ASK).ids == wanted
            shutil.rmtree(place)
        if how.startswith("made anew"):
            with engine(model=model, store=place) as fresh:
                fresh.generate(chat("hi"), **ASK)
                assert fresh.flush()
                if how == "made anew":
                    later(running, wanted)
        if how != "made anew":
            later(running, wanted)
        assert (place / "key").read_bytes() != key
        assert running.generate(chat(long_text(200, 3)), **ASK).receipt.computed_tokens > 512
        assert running.flush()
        check_store(running.store)
    folder = Folder.open(place)
    assert verify(folder).problems == [], "nothing under the old key"
    with engine(model=model, store=place) as other:
        assert other.generate(PROMPT, **ASK).receipt.disk_tokens > 512, "what memory held was written once more"
        assert other.generate(chat(long_text(200, 3)), **ASK).receipt.disk_tokens > 512
        assert other.generate(chat("hi"), TOOLS, group="tools", **ASK).receipt.cached_tokens > 0, "the tool group is recorded again"


def test_too_many_open_files_are_no_lost_store(model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with engine(model=model, store=tmp_path / "store") as running:
        wanted = running.generate(PROMPT, **ASK).ids
        assert running.flush()
        running.store.clear()
        disk = running.store.disk
        assert disk is not None
        for link in disk.index.database._links:  # the next use opens the file
            link.close()
        with monkeypatch.context() as few:
            few.setattr(Path, "read_bytes", refuse)
            done = running.generate(PROMPT, **ASK)
        assert done.ids == wanted
        assert Reason.BAD_BLOB not in reasons(done), "no page is damaged"
        assert any(os.strerror(errno.EMFILE) in note for note in done.receipt.notes)
        assert not any("was deleted" in note for note in done.receipt.notes)
        assert running.store.disk is disk


def refuse(path: Path) -> bytes:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path))


def later(running: Engine, wanted: tuple[int, ...]) -> None:
    """The request that notices, and one after it."""
    with pytest.warns(StoreWarning, match="was deleted, or made anew, while it was in use: what is used from now on"):
        done = running.generate(PROMPT, **ASK)
    assert done.ids == wanted
    assert done.receipt.computed_tokens == 1, "memory is as it was"
    assert Reason.BAD_BLOB not in reasons(done)
    assert running.flush(), "pinned pages too"
    assert running.generate(PROMPT, **ASK).ids == wanted


@pytest.mark.parametrize("why", ["is a symbolic link", "AGENTCACHE_KEY: must be 64 hexadecimal digits"])
def test_without_a_folder_an_engine_goes_on_in_memory(model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    place = tmp_path / "store"
    with engine(model=model, store=place) as running:
        wanted = running.generate(PROMPT, **ASK).ids
        assert running.flush()
        shutil.rmtree(place)
        if why.startswith("AGENTCACHE_KEY"):
            monkeypatch.setenv("AGENTCACHE_KEY", "another by now")
        else:
            (tmp_path / "elsewhere").mkdir()
            place.symlink_to(tmp_path / "elsewhere")
        with pytest.warns(StoreWarning, match=f"nothing is read from disk nor written to it for now: .*{why}"):
            done = running.generate(PROMPT, **ASK)
        assert (done.ids, done.receipt.computed_tokens) == (wanted, 1)
        assert not running.flush()
        assert running.generate(PROMPT, **ASK).ids == wanted
        assert not list(tmp_path.rglob("*.safetensors"))
        monkeypatch.delenv("AGENTCACHE_KEY", raising=False)
        place.unlink(missing_ok=True)
        assert running.generate(PROMPT, **ASK).ids == wanted
        assert not running.flush(), "not tried with every request"
        monkeypatch.setattr(running.store, "_renew_at", 0.0)
        assert running.generate(PROMPT, **ASK).ids == wanted
        assert running.flush()
        assert list(place.rglob("*.safetensors"))


def test_deleted_pages_are_not_written_to_a_new_folder(tmp_path: Path) -> None:
    """Numbers of deletions begin anew with a folder; what an older store's number says is not mistaken for the new one's."""
    store = Store(1 << 26, options=StoreOptions(tmp_path / "store"))
    scope, ids = Scope("alice", "weights"), as_ids(range(512))
    received = store.apply_deletions()
    (tmp_path / "store").rename(tmp_path / "gone")  # at once: the store's own thread may be writing
    with Index(Folder.open(tmp_path / "store")) as other:
        with pytest.warns(StoreWarning):
            store.apply_deletions()
        assert store.disk is not None
        store.admit(scope, ids, [stored_pages.noise_page()], "n", received=received)
        assert len(store) == 0, "received under a store that is gone: nobody knows what was deleted since"
        kept = store.apply_deletions()
        other.record_deletion(Deletion("alice"))
        store.apply_deletions()
        store.admit(scope, ids, [stored_pages.noise_page()], "n", received=kept)
        assert len(store) == 0, "deleted in the new one since"
        store.admit(scope, ids, [stored_pages.noise_page()], "n", received=store.apply_deletions())
        assert len(store) == 1
        assert store.flush()
        assert other.total()[0] == 1
    store.close()


def test_another_folders_index_never_opens_with_the_old_key(tmp_path: Path) -> None:
    folder = Folder.open(tmp_path / "store")
    with Index(folder) as index:
        index.set_meta("a", "b")
        shutil.rmtree(folder.path)
        with Index(Folder.open(folder.path)) as other:
            with pytest.raises(StoreLostError, match="open it again"):
                index.set_meta("a", "b")
            assert other.get_meta("a") is None


# -- mapped files that somebody writes to --------------------------------------------------------------------------------


def mapped(running: Engine) -> list[Any]:
    """The pages in memory that lie in files."""
    return [entry for entry in running.store.tree.entries("default") if entry.page.file is not None]


def over(file: Path, content: bytes) -> None:
    """As `rsync --inplace` and `cp` do it: the same file, never shorter."""
    with file.open("r+b") as opened:
        opened.write(content)


@pytest.fixture
def read(model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """An engine whose pages lie in files, and what it answered."""
    monkeypatch.setattr(blob_files, "local", lambda path: True)
    with engine(model=model, store=unread(tmp_path / "store")) as running:
        wanted = running.generate(PROMPT, **ASK).ids
    with engine(model=model, store=unread(tmp_path / "store")) as running:
        assert running.generate(PROMPT, **ASK).receipt.disk_tokens > 512
        assert mapped(running)
        yield running, wanted


def test_bytes_changed_in_place_are_refused(read: Any) -> None:
    running, wanted = read
    entry = min(mapped(running), key=lambda entry: entry.place)
    file, size = Path(entry.page.file.path), running.model.spec.page_bytes
    over(file, file.read_bytes()[:4096] + bytes(size // 2))
    done = running.generate(PROMPT, **ASK)
    assert done.ids == wanted
    assert done.receipt.cached_tokens == 0
    assert Reason.BAD_BLOB in reasons(done), "it was read again, and refused"
    assert running.generate(PROMPT, **ASK).receipt.computed_tokens == 1
    check_store(running.store)


def test_the_same_bytes_written_again_are_verified_again(read: Any) -> None:
    running, wanted = read
    entry = min(mapped(running), key=lambda entry: entry.place)
    file = Path(entry.page.file.path)
    over(file, file.read_bytes())
    done = running.generate(PROMPT, **ASK)
    assert done.ids == wanted
    assert done.receipt.disk_tokens > 512, "read anew"
    assert done.receipt.computed_tokens == 1
    assert Reason.BAD_BLOB not in reasons(done)


@pytest.mark.parametrize("how", ["deleted", "replaced"])
def test_a_deleted_or_replaced_file_stays_mapped(read: Any, how: str) -> None:
    running, wanted = read
    for entry in mapped(running):
        file = Path(entry.page.file.path)
        if how == "replaced":
            other = file.with_suffix(".copy")
            other.write_bytes(bytes(file.stat().st_size))
            os.replace(other, file)
        else:
            file.unlink()
    done = running.generate(PROMPT, **ASK)
    assert (done.ids, done.receipt.computed_tokens, done.receipt.disk_tokens) == (wanted, 1, 0)


def test_a_damaged_group_is_pinned_once_it_is_warmed_again(model: Any, tmp_path: Path) -> None:
    system = SYSTEM + long_text(300)
    with engine(model=model, store=unread(tmp_path / "store")) as running:
        running.warm(system, name="tools")
    with engine(model=model, store=unread(tmp_path / "store")) as running:
        running.warm(system, name="tools")
        for file in (tmp_path / "store" / "blobs").rglob("*.safetensors"):
            over(file, file.read_bytes()[:4096] + bytes(512))
        assert running.generate(chat("Hi", system=system), **ASK).receipt.cached_tokens == 0
        running.warm(system, name="tools")
        assert running.flush()
        assert whole(running)
        assert running.store.audit()["pinned_pages"] == running.groups[0].pages


def test_a_changed_page_is_never_written_as_right(read: Any) -> None:
    running, wanted = read
    for entry in mapped(running):
        file = Path(entry.page.file.path)
        over(file, file.read_bytes()[:4096] + bytes(running.model.spec.page_bytes // 2))
    path, disk = running.store.tree.entries("default"), running.store.disk
    disk.index.remove([row.id for row in disk.index.rows()], force=True)
    for entry in path:
        entry.row = 0
    disk.writer.offer(sorted(path, key=lambda entry: entry.place), settled=True)
    assert running.flush()
    assert disk.writer.counts["changed"] >= 1
    assert running.generate(PROMPT, **ASK).ids == wanted


def test_a_page_written_to_while_it_is_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Folder.open(tmp_path / "store")
    monkeypatch.setattr(blob_files, "local", lambda path: True)
    row = blob_io.write(folder, stored_pages.unstored_row(), stored_pages.noise_page())
    bring_in = blob_files.bring_in

    def late(*given: Any) -> None:
        bring_in(*given)
        over(stored_pages.blob_path(folder, row), stored_pages.blob_path(folder, row).read_bytes())

    with monkeypatch.context() as patch:
        patch.setattr(blob_files, "bring_in", late)
        assert "was written to while it was read" in str(stored_pages.refused_read(folder, row))
    assert stored_pages.same_numbers(stored_pages.read_page(folder, row), stored_pages.noise_page(), 512)


def test_a_file_whose_name_is_being_taken_away_is_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a moment of its deletion another process finds it by its name, without links and changed just now."""
    folder = Folder.open(tmp_path / "store")
    row = blob_io.write(folder, stored_pages.unstored_row(), stored_pages.noise_page())
    fd, _ = blob_files.open_file(folder, row.blob)
    opened = replace(blob_files.Opened.of(folder, row.blob, fd), times=(0, 0))
    assert opened.changed()
    blob_files.remove(folder, [row])
    monkeypatch.setattr(blob_files.os, "stat", lambda *_, **__: os.fstat(fd))
    assert not opened.changed()
    os.close(fd)
