"""Deleting under running engines: what was forgotten is not found again, nor written again, by any of them."""

from __future__ import annotations

import gc
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import FrameType, FunctionType, ModuleType
from typing import Any

import pytest

from agentcache import Constraint, Engine, Forgotten, Reason, private
from agentcache.errors import ConfigError, EngineClosedError, GenerationError, StoreBusyError, StoreWarning
from agentcache.store.admin.prune import finish_deletions, prune
from agentcache.store.disk import blob_files, blob_io, process_identity
from agentcache.store.disk.database import Database
from agentcache.store.disk.folder import Folder
from agentcache.store.disk.index import Index
from agentcache.store.disk.index_metadata import IndexMetadata
from agentcache.store.keys import Role, as_ids
from agentcache.store.page_prefetch import PagePrefetch
from agentcache.types import PAGE_TOKENS, Message, StoreOptions
from tests.chat_templates import TOOL_TEMPLATES
from tests.engines import SYSTEM, TOOLS, chat, check_store, decode, engine, long_text, tool, wait_until
from tests.store import stored_pages

TURNS = chat(long_text(150), "North, four.", "And the tide? " + long_text(60, 1))
ALICE = {"namespace": "alice", "sampling": decode(4)}
NO_NAMES: list[Any] = [[], {}, 5, ["a"], "a\ud800", 10**5000]


def outside(folder: Path, **what: Any) -> Any:
    """As `agentcache prune` in another process does it: with an index of its own."""
    opened = Folder.open(folder)
    with Index(opened) as index:
        if "group" in what:
            [what["group"]] = index.groups(what.pop("namespace"), what["group"])
        return prune(opened, index, **what)


def spaces(running: Engine) -> set[str]:
    """Whose pages lie on disk, once all is written."""
    assert running.flush()
    assert running.store.disk
    return {row.namespace for row in running.store.disk.index.rows()}


# -- what goes ---------------------------------------------------------------------------------------------------------


def test_a_namespace_is_forgotten_in_memory_and_on_disk(running: Engine) -> None:
    for namespace in ("alice", "bob"):
        first = running.generate(TURNS, namespace=namespace, sampling=decode(4))
    running.warm(SYSTEM, TOOLS, name="hers", namespace="alice")
    running.flush()
    gone = running.forget(namespace="alice")
    assert gone.memory_pages >= 2
    assert gone.memory_bytes == gone.memory_pages * running.model.spec.page_bytes
    assert [group.name for group in running.groups] == []
    if running.store.disk:
        assert spaces(running) == {"bob"}
        assert gone.pages >= 2
        assert gone.groups == ("hers",)
        assert gone.splices == 1
        assert running.store.disk.index.groups() == []
    check_store(running.store)
    assert running.generate(TURNS, namespace="bob", sampling=decode(4)).receipt.computed_tokens == 1
    again = running.generate(TURNS, **ALICE)
    assert again.receipt.cached_tokens == 0, "nothing is left of it"
    assert again.receipt.refusals[0].reason == Reason.DELETED
    assert again.ids == first.ids
    assert running.generate(TURNS, **ALICE).receipt.computed_tokens == 1, "what comes after it is kept"
    assert running.forget(namespace="nobody") == Forgotten()


def test_the_ids_that_the_model_wrote_are_forgotten(running: Engine) -> None:
    done = running.generate(TURNS, **ALICE)
    longer = [*TURNS, done.message, {"role": "user", "content": "Go on."}]
    assert running.generate(longer, **ALICE).receipt.spliced_tokens
    running.flush()
    running.forget(namespace="alice")
    assert not running.generate(longer, **ALICE).receipt.spliced_tokens
    assert not running.generate(longer, **ALICE).receipt.spliced_tokens, "not from disk either"


def test_one_tool_group_is_forgotten_and_what_others_share_stays(running: Engine) -> None:
    system = SYSTEM + long_text(200)
    kept = running.warm(system, name="kept")
    running.warm(system, TOOLS, name="gone")
    ask = {"tools": TOOLS, "sampling": decode(4)}
    running.generate(chat("hi", system=system), **ask)
    assert running.flush()
    gone = running.forget(group="gone")
    assert gone.groups == ("gone",)
    assert gone.memory_pages >= 1
    assert [group.name for group in running.groups] == ["kept"]
    receipt = running.generate(chat("hi", system=system), **ask).receipt
    assert 0 < receipt.cached_tokens <= kept.prefix_tokens
    plain = running.generate(chat("hi", system=system), sampling=decode(4)).receipt
    assert plain.cached_tokens >= kept.prefix_tokens, "the other group is whole"
    with pytest.raises(ConfigError, match="not warm"):
        running.generate(chat("hi"), TOOLS, tools_order="sticky", group="gone")
    check_store(running.store)
    assert running.forget(group="gone") == Forgotten()


def test_only_what_is_old_is_forgotten(running: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    for namespace in ("alice", "bob"):
        running.generate(TURNS, namespace=namespace, sampling=decode(4))
    assert running.flush()
    for entry in running.store.tree.entries("alice"):
        entry.made -= 3600
    if running.store.disk:
        running.store.disk.index.database.write(lambda c: c.execute("UPDATE pages SET created = created - 3600 WHERE namespace = 'alice'"))
    assert running.forget(older_than=7200) == Forgotten()
    gone = running.forget(older_than=1800)
    assert gone.memory_pages > 1
    assert gone.pages == (gone.memory_pages if running.store.disk else 0)
    assert running.generate(TURNS, namespace="bob", sampling=decode(4)).receipt.computed_tokens == 1
    assert running.generate(TURNS, **ALICE).receipt.cached_tokens == 0
    assert running.forget(older_than=0).memory_pages > 1, "everything"
    assert not len(running.store)


def test_a_group_goes_with_pages_older_than_itself(running: Engine) -> None:
    running.generate(TURNS, **ALICE)
    for entry in running.store.tree.entries("alice"):
        entry.made -= 3600
    timed = {"namespace": "alice", "ttl_s": 60.0}
    running.pin(TURNS[:1], name="desk", namespace="alice")
    running.pin(TURNS[:1], **timed)
    assert running.store.tree.audit()["pins"] == 2
    running.forget(older_than=1800)
    assert (running.groups, running.store.tree.audit()["pins"]) == ((), 0)
    running.pin(TURNS[:1], **timed)
    assert running.store.tree.audit()["pins"] == 1, "computed again"


def test_a_clock_set_back_leaves_nothing_of_everything(running: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time
    with monkeypatch.context() as ahead:
        ahead.setattr(time, "time", lambda: now() + 3600)
        running.generate(TURNS, **ALICE)
        running.warm(SYSTEM, TOOLS, name="tools")
        running.flush()
    for entry in running.store.tree.entries():
        entry.made += 3600
    running.forget(older_than=0)
    assert (len(running.store), running.groups) == (0, ())
    left = running.store.audit()
    assert [left.get(name, 0) for name in ("disk_pages", "groups", "splices")] == [0, 0, 0]


def test_forgetting_goes_on_where_the_folder_was_deleted(model: Any, tmp_path: Path) -> None:
    with engine(model=model, store=tmp_path / "store") as running:
        running.generate(TURNS, **ALICE)
        running.flush()
        shutil.rmtree(tmp_path / "store")
        with pytest.warns(StoreWarning, match="deleted"):
            assert running.forget(namespace="alice").memory_pages > 1
        assert not len(running.store)


def test_nothing_is_forgotten_by_mistake(running: Engine) -> None:
    wrong: list[dict[str, Any]] = [
        {},
        {"older_than": -1},
        {"older_than": True},
        {"older_than": float("nan")},
        {"group": "a", "older_than": 1},
        {"older_than": "1h"},
        {"older_than": [1]},
        *({name: value} for name in ("namespace", "group") for value in NO_NAMES),
        *({"namespace": value, "older_than": 0} for value in NO_NAMES),
    ]
    running.generate(TURNS, **ALICE)
    pages = len(running.store)
    for options in wrong:
        with pytest.raises(ConfigError, match=r"forget|older_than=|(namespace|group)=.* a string"):
            running.forget(**options)
    assert len(running.store) == pages
    running.close()
    with pytest.raises(EngineClosedError):
        running.forget(namespace="alice")


@pytest.mark.parametrize("value", NO_NAMES, ids=lambda value: type(value).__name__)
def test_impossible_names_of_groups_and_namespaces_are_refused(running: Engine, value: Any) -> None:
    asked: list[tuple[str, Callable[[], Any]]] = [
        ("group", lambda: running.generate(TURNS, group=value, sampling=decode(1))),
        ("namespace", lambda: running.generate(TURNS, namespace=value, sampling=decode(1))),
        ("namespace", lambda: running.generate(TURNS, namespace=value, group="a", sampling=decode(1))),
        ("name", lambda: running.warm(SYSTEM, name=value)),
        ("namespace", lambda: running.pin(TURNS, namespace=value, ttl_s=1.0)),
        ("name", lambda: running.release(value)),
        ("namespace", lambda: running.release("a", namespace=value)),
    ]
    for setting, ask in asked:
        with pytest.raises(ConfigError, match=f"^{setting}=.*: must be a string"):
            ask()


def test_pages_pinned_by_another_group_stay(running: Engine) -> None:
    start = [{"role": "system", "content": SYSTEM + long_text(30)}, {"role": "user", "content": "Hello."}]
    longer = [*start, {"role": "assistant", "content": "Yes?"}, {"role": "user", "content": long_text(20, 3)}]
    kept = running.pin(start, name="kept")
    gone = running.pin(longer, name="gone")
    assert kept.prefix_tokens < gone.prefix_tokens < 512, "one page holds both"
    assert running.flush()
    running.forget(group="gone")
    [entry] = running.store.tree.entries("default")
    assert (len(entry.ids), entry.pins, entry.role) == (kept.prefix_tokens, 1, Role.GROUP)
    assert running.flush()
    if running.store.disk:
        assert max(row.tokens for row in running.store.disk.index.rows()) <= kept.prefix_tokens
    assert running.generate(longer, sampling=decode(2)).receipt.cached_tokens == kept.prefix_tokens
    check_store(running.store)


# -- while others run --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("force", [True, False])
def test_the_next_request_misses_pages_another_process_pruned(model: Any, tmp_path: Path, force: bool) -> None:
    with engine(model=model, store=tmp_path / "store") as running:
        for namespace in ("alice", "bob"):
            running.generate(TURNS, namespace=namespace, sampling=decode(4))
        running.warm(SYSTEM + long_text(200), TOOLS, name="hers", namespace="alice")
        assert running.flush()
        outside(tmp_path / "store", namespace="alice", force=force)
        receipt = running.generate(TURNS, **ALICE).receipt
        assert receipt.cached_tokens < 512, "at most the head that her pinned group holds too"
        assert receipt.refusals[0].reason == Reason.DELETED
        assert [group.name for group in running.groups] == ([] if force else ["hers"]), "what runs has pinned it: without force it stays"
        assert running.generate(TURNS, namespace="bob", sampling=decode(4)).receipt.computed_tokens == 1
        outside(tmp_path / "store", older_than=0, force=True)
        assert running.generate(TURNS, namespace="bob", sampling=decode(4)).receipt.cached_tokens == 0
        assert running.groups == ()


def test_a_group_pruned_elsewhere_is_not_held_any_more(model: Any, tmp_path: Path) -> None:
    system = SYSTEM + long_text(200)
    with engine(model=model, store=tmp_path / "store") as running:
        running.warm(system, TOOLS, name="tools", namespace="alice")
        assert running.flush()
        outside(tmp_path / "store", namespace="alice", group="tools", force=True)
        receipt = running.generate(chat("hi", system=system), TOOLS, **ALICE).receipt
        assert receipt.cached_tokens == 0
        assert running.groups == ()


@pytest.mark.parametrize("step", [(blob_files, "unlink"), (Index, "drop_texts"), (Database, "empty_log")], ids=lambda step: step[1])
def test_a_killed_deletion_is_finished_by_the_next_opening(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: tuple[Any, str]
) -> None:
    """The writer of the pages still runs: nothing but the deletion itself tells that its files are left over."""

    def kill(*_: object) -> None:
        raise KeyboardInterrupt

    with engine(model=model, store=tmp_path) as running:
        ids = running.renderer.render([Message(**one) for one in TURNS], namespace="alice").ids
        running.generate(TURNS, **ALICE)
        assert running.flush()
        pid, start, machine = process_identity.token().split(".")
        with monkeypatch.context() as dying:
            dying.setattr(process_identity, "token", lambda: f"{pid}.{int(start) + 1}.{machine}")
            dying.setattr(*step, kill)
            with pytest.raises(KeyboardInterrupt):
                outside(tmp_path, namespace="alice")
        folder = Folder.open(tmp_path)
        with Index(folder) as index:
            assert index.unfinished()
            finish_deletions(folder, index)
            assert index.unfinished() == list(index.rows()) == []
        assert list(folder.blobs.glob("*/*.safetensors")) == []
        told = as_ids(ids[:8]).tobytes()
        assert not any(told in file.read_bytes() for file in tmp_path.iterdir() if file.is_file())
        assert running.generate(TURNS, **ALICE).receipt.cached_tokens == 0


def test_killed_making_of_room_leaves_no_row_alone(model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing tells the next opening of it: files without rows are swept, rows without files would be taken for damage."""

    def kill(*_: object) -> None:
        raise KeyboardInterrupt

    with engine(model=model, store=tmp_path) as running:
        running.generate(TURNS, **ALICE)
        assert running.flush()
        with monkeypatch.context() as dying:
            dying.setattr(blob_files, "unlink", kill)
            with pytest.raises(KeyboardInterrupt):
                outside(tmp_path, max_bytes=0)
        assert running.store.disk
        assert list(running.store.disk.index.rows()) == []


def test_files_of_forgotten_pages_are_overwritten(model: Any, tmp_path: Path) -> None:
    with engine(model=model, store=StoreOptions(tmp_path, overwrite=True)) as running, ExitStack() as files:
        running.generate(TURNS, **ALICE)
        assert running.flush()
        kept = [files.enter_context(path.open("rb")) for path in tmp_path.glob("blobs/*/*")]
        assert kept
        running.forget(namespace="alice")
        assert not any(map(any, (file.read() for file in kept)))
        assert list(tmp_path.glob("blobs/*/*")) == []


def test_mapped_files_are_overwritten_once_they_are_free(model: Any, tmp_path: Path) -> None:
    options = StoreOptions(tmp_path, overwrite=True, refuse_slow=False, check_one_in=0)
    turns = chat(long_text(500))
    with engine(model=model, store=options) as first, engine(model=model, store=options) as reader:
        first.generate(turns, **ALICE)
        assert first.flush()
        done = reader.generate(turns, **ALICE)
        assert done.receipt.disk_tokens >= PAGE_TOKENS
        with pytest.raises(StoreBusyError, match="deleted pages are not overwritten"):
            first.forget(namespace="alice")
        assert {path.suffix for path in tmp_path.glob("blobs/*/*")} == {blob_files.DELETED}
        told = as_ids(first.renderer.render([Message(**one) for one in turns], namespace="alice").ids[:8]).tobytes()
        assert not any(told in file.read_bytes() for file in tmp_path.iterdir() if file.is_file()), "in the index or its log"
        again = reader.generate(turns, **ALICE)
        assert (again.ids, again.receipt.cached_tokens) == (done.ids, 0)
        reader.forget(namespace="alice")
        assert list(tmp_path.glob("blobs/*/*")) == []


def test_a_file_that_another_thread_overwrites_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writing, waited = threading.Event(), threading.Event()

    def write_from(fd: int, buffers: Sequence[memoryview], at: int) -> int:
        writing.set()
        assert waited.wait(30)
        return os.pwritev(fd, buffers, at) + at

    def lock(fd: int, *, shared: bool = False, wait: bool = False) -> None:
        if wait and writing.is_set():
            waited.set()
        private.lock(fd, shared=shared, wait=wait)

    def late() -> None:  # after what lay there was swept
        deleted.append(writer.submit(blob_files.unlink, folder, name))
        assert writing.wait(30)

    deleted: list[Future[bool]] = []
    folder = Folder.open(tmp_path, overwrite=True)
    with Index(folder) as index, ThreadPoolExecutor(1) as writer:
        assert index.total() == (0, 0)
        with blob_files.new_file(folder) as (name, fd):
            os.write(fd, b"text")
        for target, what in ((blob_files, write_from), (blob_files, lock), (index, late)):
            monkeypatch.setattr(target, "drop_dead_pins" if what is late else what.__name__, what)
        prune(folder, index)
        assert deleted[0].result(30)
        assert list(blob_files.files(folder)) == []


def test_threads_that_overwrite_one_file_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writing, others, waiting = threading.Event(), threading.Event(), threading.Semaphore(0)
    both = threading.Barrier(2, timeout=30)

    def write_from(fd: int, buffers: Sequence[memoryview], at: int) -> int:
        writing.set()
        assert others.wait(30)
        return os.pwritev(fd, buffers, at) + at

    def lock(fd: int, *, shared: bool = False, wait: bool = False) -> None:
        if wait and writing.is_set():
            waiting.release()
        private.lock(fd, shared=shared, wait=wait)
        if shared and wait:
            both.wait()  # each of them shares it when the first one wants it alone

    folder = Folder.open(tmp_path, overwrite=True)
    with blob_files.new_file(folder) as (name, fd):
        os.write(fd, b"text")
    monkeypatch.setattr(blob_files, "write_from", write_from)
    monkeypatch.setattr(blob_files, "lock", lock)
    with ThreadPoolExecutor(3) as threads:
        deleted = [threads.submit(blob_files.unlink, folder, name)]
        assert writing.wait(30)
        deleted += [threads.submit(blob_files.unlink, folder, name, blob_files.DELETED) for _ in range(2)]
        assert all(waiting.acquire(timeout=30) for _ in range(2))
        others.set()
    assert {one.result() for one in deleted} <= {True, False}, "StoreBusyError would mean that a process reads it"
    assert list(blob_files.files(folder)) == []


@pytest.mark.parametrize("told", ["before it goes on", "after it went on", "once it is forgotten", "before another branch"])
def test_a_session_takes_answers_of_other_processes_along(model: Any, tmp_path: Path, told: str) -> None:
    turns = chat(long_text(40))
    with engine(model=model, store=tmp_path) as first, engine(model=model, store=tmp_path) as second:
        done = first.generate(turns, session="s", **ALICE)
        if told.startswith("before"):
            assert first.flush()
        more = [*turns, done.message, {"role": "user", "content": "Go on."}]
        later = chat(long_text(40, 1)) if told == "before another branch" else more
        longer = second.generate(later, session="s", **ALICE).receipt
        assert (longer.cached_tokens > 0) == told.startswith("before")
        assert second.flush()
        if told == "after it went on":
            assert first.flush()
        (first if told == "before another branch" else second).forget(session="s", namespace="alice")
        if told != "once it is forgotten":
            assert spaces(second) == set()
        assert first.generate(turns, **ALICE, reuse="exact").receipt.cached_tokens == 0
        second.forget(namespace="alice")
        assert spaces(first) == set()


def test_a_request_that_runs_keeps_nothing_of_what_is_forgotten(running: Engine) -> None:
    stream = running.stream(TURNS, namespace="alice", sampling=decode(40))
    next(stream)
    assert running.forget(namespace="alice").memory_pages > 0
    assert len(stream.completion.ids) == 40, "it goes on"
    assert wait_until(lambda: not running.scheduler.live)
    assert running.store.tree.entries("alice") == []
    if running.store.disk:
        assert spaces(running) == set()
        assert running.store.disk.index.stats()["splices"] == 0
    done = stream.completion
    longer = [*TURNS, done.message, {"role": "user", "content": "Go on."}]
    assert running.generate(longer, **ALICE).receipt.spliced_tokens == 0


@pytest.mark.parametrize("ends", ["later", "while the disk deletes"])
def test_a_request_on_forgotten_pages_admits_nothing(running: Engine, monkeypatch: pytest.MonkeyPatch, ends: str) -> None:
    done = running.generate(TURNS, **ALICE)
    assert running.flush()
    for entry in running.store.tree.entries("alice"):
        entry.made -= 3600
    longer = [*TURNS, done.message, {"role": "user", "content": "Go on. " + long_text(20, 2)}]
    stream = running.stream(longer, namespace="alice", sampling=decode(200))
    next(stream)
    assert stream.receipt.cached_tokens > 512

    def end() -> None:
        assert len(stream.completion.ids) == 200
        assert wait_until(lambda: not running.scheduler.live)

    if ends == "while the disk deletes":
        monkeypatch.setattr("agentcache.store.admin.prune.prune", lambda *given, **more: (end(), prune(*given, **more))[1])
    assert running.forget(older_than=1800).memory_pages
    end()
    assert running.store.tree.entries("alice") == [], "what it computed continues what is gone"


def test_pruned_pages_in_the_writers_queue_are_dropped(model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, at, go = blob_io.write, threading.Event(), threading.Event()

    def slow(*given: Any) -> Any:
        at.set()
        assert go.wait(20)
        return write(*given)

    monkeypatch.setattr(blob_io, "write", slow)
    with engine(model=model, store=tmp_path / "store") as running:
        running.generate(TURNS, **ALICE)
        assert at.wait(20), "one page is being written, the others wait"
        outside(tmp_path / "store", namespace="alice", force=True)
        go.set()
        assert spaces(running) == set()
        assert running.store.disk.index.stats()["splices"] == 0
        assert stored_pages.files_under_blobs(running.store.disk.folder) == []
        assert running.store.disk.writer.counts["deleted"] >= 1
        assert running.generate(TURNS, **ALICE).receipt.cached_tokens == 0
        assert spaces(running) == {"alice"}, "what was received later is written"


def test_pages_deleted_while_being_read_are_not_cached(model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with engine(model=model, store=tmp_path / "store") as running:
        wanted = running.generate(TURNS, **ALICE).ids
    read_many = blob_io.read_many

    def late(*given: Any, **more: Any) -> Any:
        found = read_many(*given, **more)
        outside(tmp_path / "store", namespace="alice")
        running.store.apply_deletions()
        return found

    with engine(model=model, store=tmp_path / "store") as running:
        monkeypatch.setattr(blob_io, "read_many", late)
        done = running.generate(TURNS, **ALICE)
        assert done.ids == wanted
        assert done.receipt.cached_tokens == 0
        assert running.store.tree.entries("alice") == [], "what it computed was received before the deletion"


class ThenForgotten:
    """A lock; once it was held for the first time, old pages are forgotten before anything else is done."""

    def __init__(self, running: Engine) -> None:
        self.running, self.lock = running, running.store.deletions.lock

    def __enter__(self) -> None:
        self.lock.acquire()

    def __exit__(self, *exc: object) -> None:
        self.lock.release()
        self.running.store.deletions.lock = self.lock
        assert self.running.forget(older_than=1800).pages


def test_old_pages_forgotten_as_they_are_read_are_not_cached(model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with engine(model=model, store=tmp_path) as running:
        running.generate(TURNS, **ALICE)
        assert running.flush()
        disk, adopt = running.store.disk, running.store.adopt
        disk.index.database.write(lambda connection: connection.execute("UPDATE pages SET created = created - 3600"))
        running.store.clear()

        def adopted(*given: Any) -> Any:
            monkeypatch.undo()
            running.store.deletions.lock = ThenForgotten(running)
            return adopt(*given)

        monkeypatch.setattr(running.store, "adopt", adopted)
        assert running.generate(TURNS, **ALICE).receipt.disk_bytes, "it was read"
        assert min(entry.made for entry in running.store.tree.entries("alice")) > time.time() - 1800


def test_old_pages_forgotten_before_they_have_children_stay_forgotten(model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with engine(model=model, store=tmp_path) as running:
        text = long_text(300)
        running.generate(text, **ALICE)
        assert running.flush()
        disk, adopt, keep = running.store.disk, running.store.adopt, PagePrefetch._keep
        disk.index.database.write(lambda connection: connection.execute("UPDATE pages SET created = created - 3600 WHERE place = 0"))
        running.store.clear()
        assert running.generate(text[: len(text) // 3], **ALICE).receipt.disk_tokens >= PAGE_TOKENS
        assert len(running.store.tree.entries("alice")) < disk.index.total()[0], "of some pages the children are on disk alone"
        forgetting = threading.Thread(target=running.forget, kwargs={"older_than": 1800})

        def adopted(*given: Any) -> Any:
            forgetting.start()
            forgetting.join(0.5)  # it waits until they hang in the tree
            return adopt(*given)

        def kept(*given: Any) -> None:
            keep(*given)
            forgetting.join()

        monkeypatch.setattr(running.store, "adopt", adopted)
        monkeypatch.setattr(PagePrefetch, "_keep", kept)
        assert running.generate(text, **ALICE).receipt.cached_tokens == 0


def test_a_tool_group_forgotten_during_warming_says_so(model: Any) -> None:
    with engine(model=model, store=None, chunk_tokens=64) as running:
        forgotten = []

        def during(done: int, total: int) -> None:
            if done > 512 and not forgotten:
                forgotten.append(running.forget(namespace="alice"))

        with pytest.raises(GenerationError, match="'hers' was forgotten while it was computed: warm it again"):
            running.warm(SYSTEM + long_text(300), TOOLS, name="hers", namespace="alice", on_progress=during)
        assert running.groups == ()
        assert all(entry.pins == 0 for entry in running.store.tree.entries("alice"))
        running.warm(SYSTEM + long_text(300), TOOLS, name="hers", namespace="alice")
        assert {entry.role for entry in running.store.tree.entries("alice")} == {Role.GROUP}


def test_a_tool_group_forgotten_once_it_is_pinned_stays_nowhere(running: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {"system": SYSTEM + long_text(300), "tools": TOOLS, "name": "hers", "namespace": "alice"}
    running.warm(**asked)
    pin = running.store.pin

    def pinned(*given: Any) -> int:
        pages = pin(*given)
        monkeypatch.undo()
        assert running.forget(group="hers", namespace="alice").groups == ("hers",)
        return pages

    monkeypatch.setattr(running.store, "pin", pinned)
    with pytest.raises(GenerationError, match="'hers' was forgotten while it was computed"):
        running.warm(**asked)
    assert running.groups == ()
    assert running.flush()
    held = running.store.audit()
    assert [held.get(name, 0) for name in ("pages", "pins", "pinned_pages", "disk_pages", "disk_pins")] == [0] * 5


def test_a_request_asks_the_index_only_after_a_deletion(model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, looked = [], []
    deletions, generation = IndexMetadata.deletions, Folder.generation_stat
    monkeypatch.setattr(IndexMetadata, "deletions", lambda *given: asked.append(1) or deletions(*given))
    monkeypatch.setattr(Folder, "generation_stat", property(lambda self: looked.append(1) or generation.fget(self)))
    with engine(model=model, store=tmp_path / "store") as running:
        looked.clear()
        running.generate(TURNS, **ALICE)
        assert (len(looked), asked) == (1, [])
        outside(tmp_path / "store", namespace="bob")
        running.generate(TURNS, **ALICE)
        assert len(asked) == 1
        assert running.generate(TURNS, **ALICE).receipt.computed_tokens == 1
        assert len(asked) == 1


# -- texts in memory ---------------------------------------------------------------------------------------------------

SECRET = "zqxj-lighthouse-4711"


def remembered(running: Engine) -> list[str]:
    """Where the engine, or a module of the package, holds the secret: the way to it."""
    roots = [("engine", running), *((name, module) for name, module in sys.modules.items() if name.partition(".")[0] == "agentcache")]
    seen, way, found = {id(remembered)}, [(name, root, None) for name, root in roots], []
    while way:
        at = way.pop()
        for each in gc.get_referents(at[1]):
            if isinstance(each, str):
                if SECRET in each:
                    found.append(named(at))
            elif not isinstance(each, (int, bytes)) and id(each) not in seen and not foreign(each):
                seen.add(id(each))
                way.append((type(each).__name__, each, at))
    return found


def foreign(each: Any) -> bool:
    """Whether this is a module, or a class or function of another package: what those hold is no engine's."""
    home = getattr(each, "__module__", None) if isinstance(each, (type, FunctionType)) else None
    return isinstance(each, (ModuleType, FrameType, threading.Thread)) or (home is not None and not str(home).startswith("agentcache"))


def named(at: Any) -> str:
    """A way from its start."""
    parts = []
    while at is not None:
        parts.append(at[0])
        at = at[2]
    return " > ".join(reversed(parts))


def secrets(word: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Messages and tools of a request that says the secret everywhere, and `word`."""
    parts = [{"type": "text", "text": f"Rules of {SECRET}.", "cache_control": {}}, {"type": "text", "text": f"It is {word} at {SECRET}."}]
    asked = {"role": "user", "content": f"{word}: {SECRET}, and 2026-01-02 10:00."}
    return [{"role": "system", "content": parts}, asked], [tool("open_account", f"of_{SECRET}")]


@pytest.mark.parametrize("store", [None, "store"])
def test_no_text_of_a_forgotten_namespace_stays_in_the_process(model: Any, tmp_path: Path, store: str | None) -> None:
    options = {"chat_template": TOOL_TEMPLATES["chatml"], "store": store and tmp_path / store}
    with engine(model=model, **options) as running:
        for word in ("one", "two"):
            running.generate(*secrets(word), constraint=Constraint(tool_choice="any"), namespace="alice", sampling=decode(120))
        spent = running.renderer.render(*secrets("three"), namespace="bob").tokenised_chars
        running.flush()
        assert remembered(running), "it is found where it is"
        running.forget(older_than=0)
        assert remembered(running) == []
        assert running.renderer.render(*secrets("three"), namespace="bob").tokenised_chars == spent, "its ids neither"


def test_a_running_request_leaves_no_forgotten_text(running: Engine) -> None:
    stream = running.stream(chat(SECRET), namespace="alice", sampling=decode(40))
    next(stream)
    running.forget(namespace="alice")
    assert len(stream.completion.ids) == 40
    del stream
    assert wait_until(lambda: not running.scheduler.live)
    assert remembered(running) == []


class Late(list):
    """Messages that are forgotten while they are rendered."""

    def __init__(self, running: Engine) -> None:
        super().__init__(chat(SECRET))
        self.running = running

    def __iter__(self) -> Iterator[Any]:
        self.running.forget(namespace="alice")
        return super().__iter__()


@pytest.mark.parametrize("ask", ["generate", "pin"])
def test_what_is_forgotten_while_it_is_rendered_leaves_no_text(running: Engine, ask: str) -> None:
    if ask == "generate":
        running.generate(Late(running), **ALICE)
    else:
        with pytest.raises(GenerationError, match="forgotten"):
            running.pin(Late(running), namespace="alice")
    assert wait_until(lambda: not running.scheduler.live)
    assert remembered(running) == []
