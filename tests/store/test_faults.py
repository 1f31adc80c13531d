"""Faults of disks, processes and people: in each the answer is right, the refusal has a name, and the next engine goes on."""

from __future__ import annotations

import errno
import os
import random
import re
import select
import shutil
import signal
import sqlite3
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agentcache import Engine, Reason
from agentcache.errors import BlobError, StoreError, StoreFormatError, StoreFullError, StorePermissionError, StoreWarning
from agentcache.kv import Page
from agentcache.kv_spec import KVSpec
from agentcache.store.disk import blob_files, blob_io, process_identity, writer
from agentcache.store.disk.disk_tier import DiskTier
from agentcache.store.disk.folder import Folder
from agentcache.store.disk.index import Index
from agentcache.store.entry import Match
from agentcache.store.keys import Role, Scope, as_ids
from agentcache.store.store import Store
from agentcache.types import StoreOptions
from tests import models
from tests.engines import chat, check_store, decode, engine, long_text, wait_until

TURNS = chat(long_text(230))  # three pages
SPEC = KVSpec(2, 1, 8, torch.bfloat16)
SCOPE = Scope("faults", "weights")


@pytest.fixture(scope="module")
def model() -> Any:
    return models.build("qwen3", num_hidden_layers=2)


@pytest.fixture(scope="module")
def made(model: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, tuple[int, ...]]:
    """A store that holds TURNS, and what the model answers to them."""
    folder = tmp_path_factory.mktemp("made") / "store"
    with engine(model=model, store=folder) as running:
        ids = running.generate(TURNS, sampling=decode(4)).ids
    return folder, ids


@pytest.fixture
def store(made: tuple[Path, tuple[int, ...]], tmp_path: Path) -> Path:
    """A copy of it to be damaged."""
    shutil.copytree(made[0], tmp_path / "store")
    return tmp_path / "store"


def blobs(store: Path) -> list[Path]:
    """The files of its pages, in the order of the prompt."""
    with sqlite3.connect(store / "index.sqlite") as connection:
        names = [name for (name,) in connection.execute("SELECT blob FROM pages ORDER BY place")]
    connection.close()
    return [store / "blobs" / name[:2] / f"{name}.safetensors" for name in names]


def reasons(receipt: Any) -> set[Reason]:
    return {refusal.reason for refusal in receipt.refusals}


# -- pages of a store without a model: what they hold follows from their ids -----------------------------------------------


def content(page: Page, ids: np.ndarray) -> None:
    """Fill a page with numbers that only these ids have."""
    noise = torch.Generator().manual_seed(int(ids[0]) * 7 + len(ids))
    page.keys[..., : len(ids)] = torch.randn(page.keys[..., : len(ids)].shape, generator=noise).to(SPEC.dtype)
    page.values[..., : len(ids), :] = torch.randn(page.values[..., : len(ids), :].shape, generator=noise).to(SPEC.dtype)
    page.filled = len(ids)


def prompt(number: int) -> np.ndarray:
    """Two whole pages and a part of a third."""
    return as_ids(list(range(10_000 * number, 10_000 * number + 1024 + 50 + number % 7)))


def admit(store: Store, number: int, pages_of_it: int = 3, prefix_tokens: int = 512) -> None:
    ids = prompt(number)[: 512 * pages_of_it]
    pages = [Page(SPEC) for _ in range(pages_of_it)]
    for page, start in zip(pages, range(0, len(ids), 512), strict=True):
        content(page, ids[start : start + 512])
    store.admit(SCOPE, ids, pages, "n", prefix_tokens)


def served(disk: DiskTier, number: int) -> tuple[int, list[StoreError]]:
    """Read what the disk has of a prompt, compare every byte; how many tokens were right, and what was refused."""
    ids = prompt(number)
    found = disk.find(SCOPE, as_ids([*ids.tolist(), 1]), Match(0, (), Reason.COLD), SPEC)
    if found is None:
        return 0, []
    pages = [Page(SPEC) for _ in found.rows]
    errors = blob_io.read_many(disk.folder, [(row, page, row.tokens) for row, page in zip(found.rows, pages, strict=True)])
    tokens = 0
    for row, page, error in zip(found.rows, pages, errors, strict=True):
        if error is not None:
            assert page.filled == 0
            assert not page.keys.any()
            continue
        wanted = Page(SPEC)
        content(wanted, row.ids)
        assert torch.equal(page.keys, wanted.keys), "bytes were served that nobody wrote"
        assert torch.equal(page.values, wanted.values)
        tokens += page.filled
    return tokens, [error for error in errors if error is not None]


def forked(work: Callable[[], None]) -> int:
    """Run `work` in a child made by fork; its pid. The child leaves by os._exit, without anybody's cleaning up."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        torch.set_num_threads(1)  # no pool of threads survives a fork
        work()
        code = 0
    finally:
        if code:
            traceback.print_exc()  # a child's assertion is seen nowhere else
        os._exit(code)


def fork_quietly(work: Callable[[], None]) -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn of threads; the child touches none of them
        return forked(work)


def kill_writers(folder: Path, times: int) -> tuple[int, int]:
    """Kill children while they admit pages, and check everything that can be read after each. Returns pages served and left-overs."""
    options = StoreOptions(folder)
    chance = random.Random(times)
    DiskTier(options).close()
    served_tokens = left = 0
    for number in range(times):
        began, begin = os.pipe()

        def write(number: int = number, begin: int = begin) -> None:
            store = Store(1 << 24, options=options)
            store.flush()  # what those before it left is swept
            os.write(begin, b"!")
            for at in range(100):
                admit(store, 100 * number + at)
                store.flush()

        pid = fork_quietly(write)
        if number % 4:  # the others may be killed before their store is open
            select.select([began], [], [], 60)
        time.sleep(chance.uniform(0.0, 0.06))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(began)
        os.close(begin)
        with Index(Folder.open(folder)) as index:
            left += len(blob_files.orphans(index.folder, index.has_blobs)[0])
        disk = DiskTier(options)
        try:
            for at in range(4):
                tokens, errors = served(disk, 100 * number + at)
                assert not errors, "a row stands for a blob that is not complete"
                served_tokens += tokens
            if number % 10 == 9 or number == times - 1:
                assert disk.index.check() == []
                assert disk.writer.flush()
                names = {file.name for file in blob_files.files(disk.folder)}
                assert names == {row.blob for row in disk.index.rows()}, "rows and blobs are the same once dead writers are swept"
        finally:
            disk.close()
    return served_tokens, left


def test_writers_killed_at_any_point_leave_only_whole_pages(tmp_path: Path) -> None:
    tokens, _ = kill_writers(tmp_path / "store", 20)
    assert tokens > 1000, "nothing was ever written before the kill: this test shows nothing"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_five_hundred_writers_killed(tmp_path: Path) -> None:
    tokens, left = kill_writers(tmp_path / "store", 500)
    assert tokens > 10_000
    assert left > 10, "no kill hit the middle of a write: this test shows nothing"


def test_a_kill_behind_each_step_of_admission(tmp_path: Path) -> None:
    """Not by chance: at each of the calls that change something on disk."""
    options = StoreOptions(tmp_path / "store")
    DiskTier(options).close()
    steps = [(os, "pwritev"), (os, "fsync"), (os, "rename"), (Index, "add"), (blob_io, "write"), (blob_files, "unlink")]
    for number, (owner, name) in enumerate(steps):
        for after in (False, True):

            def write(owner: Any = owner, name: str = name, after: bool = after, number: int = number) -> None:
                call = getattr(owner, name)
                calls = iter(range(100))

                def killed(*args: Any, **more: Any) -> Any:
                    found = call(*args, **more) if after else None
                    if next(calls) >= 1 or name == "unlink":
                        os.kill(os.getpid(), signal.SIGKILL)
                    return found if after else call(*args, **more)

                setattr(owner, name, killed)
                store = Store(1 << 24, options=options)
                admit(store, 2 * number + after)
                store.flush()
                store.close()

            pid = fork_quietly(write)
            _, status = os.waitpid(pid, 0)
            assert os.WIFSIGNALED(status) or name == "unlink", f"{name} was never called"
            disk = DiskTier(options)
            tokens, errors = served(disk, 2 * number + after)
            assert not errors
            assert disk.index.check() == []
            store = Store(1 << 24, options=options)
            admit(store, 2 * number + after)
            assert store.flush()
            assert served(disk, 2 * number + after)[0] == len(prompt(2 * number + after)) >= tokens
            store.close()
            disk.close()


# -- damage ------------------------------------------------------------------------------------------------------------------


def flip(file: Path, at: int) -> None:
    with open(file, "r+b") as opened:
        opened.seek(at)
        byte = opened.read(1)
        opened.seek(at)
        opened.write(bytes([byte[0] ^ 0x55]))


def ask(running: Engine, ids: tuple[int, ...]) -> Any:
    done = running.generate(TURNS, sampling=decode(4))
    assert done.ids == ids, "another answer"
    return done.receipt


def test_every_part_of_a_served_blob_flipped_or_cut(model: Any, store: Path, made: Any) -> None:
    _, ids = made
    with engine(model=model, store=StoreOptions(store, check_one_in=0)) as running:  # a check would hold pages of files that are cut here
        whole = ask(running, ids)
        assert whole.disk_tokens > 1000
        disk = running.store.disk
        assert disk
        size = blobs(store)[1].stat().st_size
        layer = (size - 4096 - 4 * 512 - 3 * 32) // 2
        places = [0, 7, 9, 200, 4000, 4096, 4096 + layer // 2, 4096 + layer, size - 4 * 512 - 90, size - 90, size - 1]
        damages: list[Callable[[Path], object]] = [lambda f, at=at: flip(f, at) for at in places]  # type: ignore[misc]
        damages += [lambda f, at=at: os.truncate(f, at) for at in (0, 5, 4095, 4096, 4096 + layer, size - 1)]  # type: ignore[misc]
        damages += [lambda f: os.truncate(f, size + 1), lambda f: f.unlink(), lambda f: (f.unlink(), f.mkdir())]
        for number, damage in enumerate(damages):
            running.store.clear()
            file = blobs(store)[1]
            damage(file)
            receipt = ask(running, ids)
            assert Reason.BAD_BLOB in reasons(receipt), f"damage {number}"
            assert receipt.disk_tokens == 512, "what stands before the damage is used"
            assert receipt.bitwise
            assert running.flush()
            rows = list(disk.index.rows())
            assert len(rows) == len(blobs(store)) >= 3
            assert not any(row.bad for row in rows), "computed again, it took the bad page's place"
            running.store.clear()
            assert ask(running, ids).disk_tokens == whole.disk_tokens, "written again"
            if file.is_dir():
                file.rmdir()
        check_store(running.store)


def test_two_bad_blobs_in_one_request(model: Any, store: Path, made: Any) -> None:
    _, ids = made
    for at in (0, 2):
        flip(blobs(store)[at], 6000)
    with engine(model=model, store=store) as running:
        receipt = ask(running, ids)
        assert receipt.cached_tokens == receipt.disk_tokens == 0
        bad = [refusal for refusal in receipt.refusals if refusal.reason == Reason.BAD_BLOB]
        assert len(bad) == 1
        assert "was changed since it was written" in bad[0].detail
        disk = running.store.disk
        assert disk
        assert running.flush()
        running.store.clear()
        assert ask(running, ids).disk_tokens > 1000


def test_a_bad_page_nobody_computes_again_stays_quarantined(model: Any, store: Path, made: Any) -> None:
    flip(blobs(store)[0], 6000)
    with engine(model=model, store=StoreOptions(store, write_bytes_per_hour=0)) as running:
        ask(running, made[1])
        assert running.flush()
        disk = running.store.disk
        assert disk
        (bad,) = disk.index.rows(bad=True)
        assert bad.bad
        assert "was changed" in bad.bad
        running.store.clear()
        assert Reason.BAD_BLOB not in reasons(ask(running, made[1])), "it is not even looked at"


def damaged_index(store: Path, how: str) -> None:
    index = store / "index.sqlite"
    size = index.stat().st_size
    if how == "header":
        flip(index, 3)
    elif how == "schema page":
        for at in range(100, 200):
            flip(index, at)
    elif how == "every page":
        for at in range(4096, size, 4096):
            for more in range(0, 60):
                flip(index, at + more)
    elif how == "cut":
        os.truncate(index, size // 2)
    elif how == "empty":
        os.truncate(index, 0)
    elif how == "gone":
        index.unlink()
    else:
        index.write_bytes(b"garbage" * 1000)


HOW = ["header", "schema page", "every page", "cut", "empty", "gone", "garbage"]


def log_away(store: Path) -> None:
    """All of the index in its one file, so that damage is not mended by its log."""
    connection = sqlite3.connect(store / "index.sqlite")
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()


@pytest.mark.parametrize("how", HOW)
def test_an_engine_goes_without_a_damaged_index_and_says_so(model: Any, store: Path, made: Any, how: str) -> None:
    log_away(store)
    damaged_index(store, how)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", StoreWarning)
        with engine(model=model, store=store) as running:
            ask(running, made[1])
            running.flush()
            assert bool(said) == (running.store.disk is None)
    assert all("verify --fix" in str(warning.message) for warning in said)


@pytest.mark.parametrize("how", HOW)
def test_an_index_damaged_while_it_is_used(model: Any, store: Path, made: Any, how: str) -> None:
    log_away(store)
    with engine(model=model, store=store) as running:
        ask(running, made[1])
        running.store.clear()
        damaged_index(store, how)
        for salt in range(2):
            ask(running, made[1])
            running.generate(chat(long_text(130, salt)), sampling=decode(1))
            running.flush(5)
            running.store.clear()
        running.warm("A keeper. " + long_text(20), name="a")
        check_store(running.store)


def test_an_index_replaced_by_garbage_before_the_first_request(model: Any, store: Path, made: Any) -> None:
    """Nothing is known about the cost of a token yet, and asking for it fails, too."""
    with engine(model=model, store=store) as running:
        (store / "new").write_bytes(b"garbage" * 1000)
        (store / "new").replace(store / "index.sqlite")
        receipt = ask(running, made[1])
        assert Reason.BAD_BLOB in reasons(receipt)
        assert "damaged" in next(r.detail for r in receipt.refusals if r.reason == Reason.BAD_BLOB)
        assert not running.flush(5)


# -- full, read-only, foreign ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["pwritev", "fsync", "rename", "open"])
def test_a_full_disk_at_every_write(model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    real = getattr(os, call)

    def full(*args: Any, **more: Any) -> Any:
        if call == "open" and not (len(args) > 1 and args[1] & os.O_CREAT and str(args[0]).endswith(".part")):
            return real(*args, **more)
        raise OSError(errno.ENOSPC, "No space left on device")

    with engine(model=model, store=tmp_path / "store") as running:
        with monkeypatch.context() as patch:
            patch.setattr(os, call, full)
            ids = running.generate(TURNS, sampling=decode(4)).ids
            assert not running.flush(10), "nobody may believe that it is written"
            assert running.store.disk
            assert "No space left" in running.store.disk.writer.failure
            assert running.generate(TURNS, sampling=decode(4)).ids == ids
        assert list((tmp_path / "store" / "blobs").rglob("*.*")) == [], "no part is left on a full disk"
        assert running.store.disk.index.total() == (0, 0)
        running.store.disk.writer._paused_until = 0.0
        again = running.generate(TURNS, sampling=decode(4))
        assert again.ids == ids
        assert running.flush(), "it goes on once there is room"
        assert running.store.disk.index.total()[0] >= 3


@pytest.mark.parametrize("asks_again", [True, False])
def test_a_full_disk_is_told_once(model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asks_again: bool) -> None:
    def full(*args: Any, **more: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        with engine(model=model, store=tmp_path / "store") as running, monkeypatch.context() as patch:
            patch.setattr(os, "pwritev", full)
            running.generate(TURNS, sampling=decode(4))
            assert not running.flush(10)
            if asks_again:  # else the end of the engine tells it
                for _ in range(2):
                    running.stream(TURNS, sampling=decode(4)).close()
                assert heard, "told by the next request"
    told = [each for each in heard if each.category is StoreWarning]
    assert [each.filename for each in told] == [__file__ if asks_again else engine.__wrapped__.__code__.co_filename]
    said = [str(each.message) for each in told]
    assert re.match("pages are not written to .*/store', later processes compute them again: .*No space left on device; free", said[0])


def test_an_index_that_cannot_grow(model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with engine(model=model, store=tmp_path / "store") as running:
        disk = running.store.disk
        assert disk
        with monkeypatch.context() as patch:

            def full(self: Index, *_: Any) -> Any:
                def grow(connection: sqlite3.Connection) -> None:
                    pages = connection.execute("PRAGMA page_count").fetchone()[0]
                    connection.execute(f"PRAGMA max_page_count={pages}")
                    connection.execute("INSERT INTO meta VALUES ('big', zeroblob(1000000))")

                return self.database.write(grow)

            patch.setattr(Index, "add", full)
            ids = running.generate(TURNS, sampling=decode(4)).ids
            assert not running.flush(10)
            assert "cannot grow" in disk.writer.failure
        assert list((tmp_path / "store" / "blobs").rglob("*.safetensors")) == [], "no blob without a row"
        assert running.generate(TURNS, sampling=decode(4)).ids == ids


@pytest.fixture
def read_only(store: Path) -> Iterator[Path]:
    paths = [store, *store.rglob("*")]
    modes = [path.stat().st_mode for path in paths]
    for path in paths:
        path.chmod(0o500 if path.is_dir() else 0o400)
    yield store
    for path, mode in zip(paths, modes, strict=True):
        path.chmod(mode)


def test_a_read_only_store_is_read(model: Any, read_only: Path, made: Any) -> None:
    before = {path: path.stat().st_mtime_ns for path in read_only.rglob("*")}
    with engine(model=model, store=read_only) as running:
        assert ask(running, made[1]).disk_tokens > 1000
        running.generate(chat(long_text(200, 5)), sampling=decode(2))
        assert running.flush()
        group = running.warm("A keeper. " + long_text(20), name="a")
        assert group.pages
        assert not running.flush(), "what is pinned is not on disk, nor will it be"
    assert {path: path.stat().st_mtime_ns for path in read_only.rglob("*")} == before


def test_a_read_only_stores_bad_page_is_read_once(model: Any, read_only: Path, made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    file = blobs_read_only(read_only)[0]
    file.chmod(0o600)
    flip(file, 6000)
    file.chmod(0o400)
    with engine(model=model, store=read_only) as running:
        assert Reason.BAD_BLOB in reasons(ask(running, made[1]))
        running.store.clear()
        monkeypatch.setattr(blob_io, "read_many", lambda *_, **__: pytest.fail("read again"))
        assert ask(running, made[1]).disk_tokens == 0


def blobs_read_only(store: Path) -> list[Path]:
    connection = sqlite3.connect(f"{(store / 'index.sqlite').as_uri()}?mode=ro&immutable=1", uri=True)
    names = [name for (name,) in connection.execute("SELECT blob FROM pages ORDER BY place")]
    connection.close()
    return [store / "blobs" / name[:2] / f"{name}.safetensors" for name in names]


def test_somebody_elses_store_is_refused_by_name(model: Any, store: Path, made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(kind: type[StoreError], folder: Any, match: str) -> None:
        with pytest.raises(kind, match=match), engine(model=model, store=folder):
            pass

    before = {path: path.stat().st_mtime_ns for path in store.rglob("*")}
    store.chmod(0o755)
    refused(StorePermissionError, store, "chmod 700")
    store.chmod(0o700)
    refused(StoreFormatError, StoreOptions(store, encryption_key=b"k" * 32), "not encrypted")
    sealed = store.parent / "sealed"
    with engine(model=model, store=StoreOptions(sealed, encryption_key=b"k" * 32)) as running:
        assert running.generate(TURNS, sampling=decode(4)).ids == made[1]
    refused(StoreFormatError, sealed, "give its key")
    refused(StoreFormatError, StoreOptions(sealed, encryption_key=b"x" * 32), "another key")
    with engine(model=model, store=StoreOptions(sealed, encryption_key=b"k" * 32)) as running:
        assert ask(running, made[1]).disk_tokens > 1000
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: 12345)
        refused(StorePermissionError, store, "belongs to user")
    assert {path: path.stat().st_mtime_ns for path in store.rglob("*")} == before, "nothing was touched"
    (store / "format").write_text("agentcache store 99\n")
    refused(StoreFormatError, store, "agentcache store 99")


def test_the_default_folder_only_warns(model: Any, store: Path, made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (store / "format").write_text("agentcache store 99\n")
    monkeypatch.setenv("AGENTCACHE_DIR", str(store))
    with pytest.warns(StoreWarning, match="agentcache store 99"):
        running = Engine(model, models.toy_tokenizer())
    with running:
        assert running.store.disk is None
        assert ask(running, made[1]).cached_tokens == 0


def test_another_stores_page_is_no_page_here(model: Any, store: Path, made: Any, tmp_path: Path) -> None:
    """Its MAC was made with another key, whatever its header says."""
    with engine(model=model, store=tmp_path / "other") as other:
        other.generate(TURNS, sampling=decode(4))
    shutil.copy(blobs(tmp_path / "other")[0], blobs(store)[0])
    with engine(model=model, store=store) as running:
        assert Reason.BAD_BLOB in reasons(ask(running, made[1]))


@pytest.mark.parametrize("jump", [-10 * 365 * 86400.0, 10 * 365 * 86400.0])
def test_clocks_may_jump(model: Any, store: Path, made: Any, monkeypatch: pytest.MonkeyPatch, jump: float) -> None:
    real = time.time
    with engine(model=model, store=StoreOptions(store, disk_bytes=4_500_000)) as running:
        monkeypatch.setattr(time, "time", lambda: real() + jump)
        assert ask(running, made[1]).disk_tokens > 1000
        running.warm("A keeper. " + long_text(130), name="a")
        for salt in range(4):
            running.generate(chat(long_text(130, salt)), sampling=decode(1))
        assert running.flush(), running.store.disk.writer.failure
        assert running.store.disk
        rows = list(running.store.disk.index.rows())
        assert sum(row.bytes for row in rows) <= 4_500_000
        keeper = {row.id for row in rows if row.role == Role.GROUP}
        assert keeper
        assert running.store.disk.index.pinned() == keeper
    with engine(model=model, store=store) as second:
        last = second.generate(chat(long_text(130, 3)), sampling=decode(1)).receipt
        assert last.disk_tokens > 400, "what was used last is still there, whatever the clock said"


# -- many processes ------------------------------------------------------------------------------------------------------------------


def crowd(folder: Path, processes: int, seconds: float) -> None:
    """Processes that admit, evict, match and check every byte at the same time, in a store that is too small for them."""
    DiskTier(StoreOptions(folder)).close()
    options = StoreOptions(folder, disk_bytes=60 * (SPEC.page_bytes + 8192))

    def work(seed: int) -> None:
        chance = random.Random(seed)
        store = Store(1 << 22, options=options)
        disk = store.disk
        assert disk
        end, read = time.monotonic() + seconds, 0
        while time.monotonic() < end:
            number = chance.randrange(40)
            if chance.random() < 0.5:
                admit(store, number)
                assert store.flush(60), (disk.writer.counts, disk.writer.failure)
                assert not disk.writer.counts["failed"], disk.writer.failure
            else:
                tokens, errors = served(disk, number)
                read += tokens
                for error in errors:  # evicted between the look and the reading: gone, never wrong
                    assert isinstance(error, BlobError)
                    assert "No such file" in str(error)
        store.close()
        assert read, "nothing was ever found"

    pids = [fork_quietly(lambda seed=seed: work(seed)) for seed in range(processes)]  # type: ignore[misc]
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0] * processes
    disk = DiskTier(options)
    assert disk.index.check() == []
    assert disk.index.total()[1] <= options.disk_bytes + processes * 17 * SPEC.page_bytes
    assert disk.index.pinned() == set()
    names = {file.name for file in blob_files.files(disk.folder)}
    assert names == {row.blob for row in disk.index.rows()}, "no blob without a row, no row without a blob"
    for number in range(40):
        assert served(disk, number)[1] == []
    disk.close()


def test_a_page_that_is_evicted_at_once_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(1 << 22, options=StoreOptions(tmp_path / "store"))
    disk = store.disk
    assert disk
    insert = disk._insert

    def evicted(*asked: Any) -> bool:
        wanted = insert(*asked)
        blob_files.remove(disk.folder, disk.index.remove([row.id for row in disk.index.rows()], force=True))  # as another process does
        return wanted

    monkeypatch.setattr(disk, "_insert", evicted)
    admit(store, 1)
    assert store.flush(60)
    assert disk.writer.counts == {"evicted": 1, "parent missing": 2}
    store.close()


def test_a_pin_that_cannot_be_released_is_released_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It held its pages until the process ended."""
    monkeypatch.setattr(writer, "PAUSE_S", 0.1)
    store = Store(1 << 24, options=StoreOptions(tmp_path / "store"))
    assert store.disk
    release, left = store.disk.index.release_pins, [StoreFullError("full")]

    def refused(*asked: Any) -> None:
        if left:
            raise left.pop()
        release(*asked)

    monkeypatch.setattr(store.disk.index, "release_pins", refused)
    admit(store, 1)
    store.pin(SCOPE, prompt(1))
    assert store.flush(60)
    store.release_pin(SCOPE.pin_name(prompt(1)))
    assert not store.flush(60)
    assert wait_until(lambda: store.flush(60))
    assert store.audit()["disk_pins"] == 0
    store.close()


def test_conversations_make_room_among_unused_prefixes(tmp_path: Path) -> None:
    """Their own first pages were chosen to go, spared, and counted all the same."""
    store = Store(1 << 24, options=StoreOptions(tmp_path / "store"))
    assert store.disk
    for number in range(8):
        admit(store, number, 1)
    assert store.flush(60)
    store.disk.options = replace(store.disk.options, disk_bytes=store.disk.index.total()[1])
    for count in (1, 2, 3):
        admit(store, 9, count, prefix_tokens=0)
        assert store.flush(60), store.disk.writer.failure
    store.close()


def test_eight_processes_on_one_store(tmp_path: Path) -> None:
    crowd(tmp_path / "store", 8, 2.0)


@pytest.mark.slow
def test_eight_processes_on_one_store_for_a_minute(tmp_path: Path) -> None:
    crowd(tmp_path / "store", 8, 60.0)


def test_a_killed_process_pins_and_holds_nothing(tmp_path: Path) -> None:
    options = StoreOptions(tmp_path / "store")

    def hold() -> None:
        store = Store(1 << 24, options=options)
        admit(store, 1)
        store.pin(SCOPE, prompt(1))
        assert store.flush()
        assert store.disk
        assert store.disk.leases.take(b"k" * 32, "weights") is None
        (tmp_path / "holds").touch()
        threading.Event().wait()

    pid = fork_quietly(hold)
    while not (tmp_path / "holds").exists():
        time.sleep(0.01)
    disk = DiskTier(options)
    assert len(disk.index.pinned()) == 3
    holder = disk.leases.take(b"k" * 32, "weights")
    assert holder is not None
    assert process_identity.alive(holder.process)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert disk.index.pinned() == set()
    assert disk.leases.take(b"k" * 32, "weights") is None
    disk.close()


@pytest.mark.parametrize("unfinished", [True, False])
def test_opening_a_store_sweeps_leftovers_of_killed_writers(tmp_path: Path, unfinished: bool) -> None:
    """Once a day it was: a crash loop could fill a disk."""
    options = StoreOptions(tmp_path / "store", disk_bytes=2 * (SPEC.page_bytes + 8192))

    def die() -> None:
        rename = os.rename

        def last(*args: Any, **more: Any) -> None:
            if not unfinished:
                rename(*args, **more)
            os.kill(os.getpid(), signal.SIGKILL)

        os.rename = last  # type: ignore[assignment]
        store = Store(1 << 24, options=options)
        admit(store, 1)
        store.flush()

    folder = Folder.open(options.folder)
    for _ in range(5):
        os.waitpid(fork_quietly(die), 0)
        assert [file.suffix == blob_files.PART for file in blob_files.files(folder)] == [unfinished], (
            "each sweeps what the one before it left"
        )
    disk = DiskTier(options)
    assert disk.writer.flush()
    assert list(blob_files.files(folder)) == []
    disk.close()
