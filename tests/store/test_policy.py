"""When loading is worth it, checks in idle time, and processes that wait for one another: the decisions, and what they cost."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from agentcache import Engine, Reason
from agentcache.errors import StoreBusyError, StoreWarning
from agentcache.hit_audit import HitAudit, due
from agentcache.kv import Page
from agentcache.kv_spec import KVSpec
from agentcache.lifecycle import Lifecycle
from agentcache.model.hf import HFModel
from agentcache.store import page_prefetch, policy
from agentcache.store.disk import blob_io
from agentcache.store.disk.disk_tier import DiskTier
from agentcache.store.disk.leases import Leases
from agentcache.store.entry import PageQuery
from agentcache.store.keys import Scope, as_ids, chain
from agentcache.store.page_prefetch import PagePrefetch, State
from agentcache.store.policy import HUNG_MS, LEAST_TRUST_MS, LOOK_S, RETRY_S, Rate, WriteBudget, give_up, slow_load_ms
from agentcache.store.store import Store
from agentcache.types import StoreOptions
from tests import models
from tests.engines import SYSTEM, chat, decode, engine, long_text, wait_until
from tests.store import stored_pages

MB = 1 << 20
LONG = chat(long_text(260))

# -- as functions ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("load", "compute_ms", "rate", "refused"),
    [
        (100 * MB, 1000, MB, False),  # 100 ms against 1 s
        (1000 * MB, 999, MB, True),
        (1000 * MB, 1001, MB, False),
        (1000 * MB, 0, MB, False),  # nobody knows what computing costs
        (1000 * MB, 1, 0, False),  # nobody knows how fast the disk is
    ],
)
def test_too_slow(load: int, compute_ms: float, rate: float, refused: bool) -> None:
    assert bool(slow_load_ms(load, compute_ms, Rate(rate))) is refused


def test_a_rate_that_forbids_is_tried_again_some_day() -> None:
    old = Rate(1.0, time.monotonic() - RETRY_S - 1)
    assert not slow_load_ms(1000, 1, old)
    assert slow_load_ms(1000, 1, Rate(1.0))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, as whoever asks for it is told: nothing here depends on how fast this machine is."""
    now = [1000.0]
    for name in ("monotonic", "time"):
        monkeypatch.setattr(time, name, lambda: now[0])
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


def test_one_slow_computation_does_not_revive_a_disk(clock: list[float]) -> None:
    rate = Rate()
    rate.forbid(100 * MB, 1000)
    assert slow_load_ms(100 * MB, 1200, rate)
    assert not slow_load_ms(100 * MB, 1300, rate)


@pytest.mark.parametrize(
    ("elapsed", "read", "load", "compute", "rate", "given_up"),
    [
        # of an unknown disk: watched for a tenth of the computing time
        (LEAST_TRUST_MS - 1, 1, 100 * MB, 100, 0, False),
        (LEAST_TRUST_MS + 1, 1, 100 * MB, 100, 0, True),
        (999, MB, 1000 * MB, 10_000, 0, False),
        (1001, MB, 1000 * MB, 10_000, 0, True),
        (1001, 10 * MB, 100 * MB, 10_000, 0, False),  # 9 s left against 10 s
        (1001, 9 * MB, 100 * MB, 10_000, 0, True),  # a little more left than that
        (999, 0, 100 * MB, 10_000, 0, False),
        (1001, 0, 100 * MB, 10_000, 0, True),  # silent
        # of one that reads all of it in a hundredth of the computing time: a reader that had to wait is no slow disk
        (25, 0, 100 * MB, 1000, 10 * MB, False),
        (99, 0, 100 * MB, 1000, 10 * MB, False),
        (101, 0, 100 * MB, 1000, 10 * MB, True),
        (25, MB, 100 * MB, 1000, 10 * MB, False),
        (500, MB, 100 * MB, 1000, 10 * MB, False),
        # of one that needs half the computing time: what is seen decides sooner
        (120, 4 * MB, 100 * MB, 1000, 0.2 * MB, False),  # 24 of 220 ms expected seen: 0.11 MB/ms, 880 ms left
        (200, 4 * MB, 100 * MB, 1000, 0.2 * MB, True),
        (1999, 0, 100 * MB, 10_000, 2048, False),  # slow, but this slow is known: 1 s until the first word
        (2049, 0, 100 * MB, 10_000, 2048, True),
        (1001, 99 * MB, 100 * MB, 1000, 0, True),  # has taken as long as computing: it was fast and became slow
        (1001, 99 * MB, 100 * MB, 1000, 10 * MB, True),
        (HUNG_MS - 1, 0, 100 * MB, 0, 0, False),  # nobody knows what computing costs
        (HUNG_MS + 1, 0, 100 * MB, 0, 0, True),
        (1e6, 1, 100 * MB, 0, 0, False),
    ],
)
def test_give_up(elapsed: float, read: int, load: int, compute: float, rate: float, given_up: bool) -> None:
    assert give_up(elapsed, read, load, compute, Rate(rate)) is given_up


def test_rates_come_from_loads_that_are_large_enough() -> None:
    rate = Rate()
    rate.learn(1000, 10)
    assert rate.value == 0, "a small load tells nothing"
    rate.learn(10 * MB, 10)
    assert rate.value == MB
    rate.learn(1000, 10)
    assert rate.value == MB, "a small load never makes it look slow"
    rate.learn(2 * MB, 100)
    assert rate.value == 0.51 * MB
    rate.learn(0, 5)
    rate.learn(5 * MB, 0)
    assert rate.value == 0.51 * MB


def test_an_abandoned_disk_is_tried_again_ever_later(clock: list[float]) -> None:
    """One load that was given up forbade the next ones for five minutes, at a rate that no load had shown."""
    rate = Rate(10.0 * MB, clock[0])
    waits = []
    for _ in range(8):
        rate.forbid(100 * MB, 1000)
        assert rate.value == 10 * MB, "no load has shown that"
        began = clock[0]
        while slow_load_ms(100 * MB, 1000, rate):
            rate.at = clock[0]
            clock[0] += LOOK_S / 2
        waits.append(clock[0] - began)
    assert waits == [1, 4, 16, 64, 256, RETRY_S, RETRY_S, RETRY_S]
    assert rate.believed == 10 * MB
    rate.forbid(100 * MB, 1000)
    rate.learn(100 * MB, 10)
    assert rate.believed == 10 * MB, "a load that came through takes back all doubt"
    rate.forbid(100 * MB, 1000)
    clock[0] += LOOK_S
    assert rate.believed == 10 * MB


def test_the_next_process_inherits_a_disks_measurements(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    rate = Rate(3.0, clock[0])
    clock[0] += 7
    rate.forbid(100 * MB, 1000)
    left = rate.packed()
    clock[0] += 5
    monkeypatch.setattr(time, "monotonic", lambda: clock[0] - 900)  # another boot
    known = Rate.unpacked(left)
    assert (known.value, known.at, known.most, known.given_up, known.given_up_at) == (3.0, 100.0, rate.most, 1, 107.0)
    clock[0] -= 1e6
    assert Rate.unpacked(left).believed == 0.0, "what was measured in the future deserves another try"
    for text in ("", "fast", "1 2 3"):
        assert Rate.unpacked(text).believed == 0.0


def test_the_write_budget_refills(clock: list[float]) -> None:
    budget = WriteBudget(3600)
    assert budget.take(3600)
    assert not budget.take(1)
    clock[0] += 10
    assert budget.take(10)
    assert not budget.take(1)
    clock[0] += 1e6
    assert not budget.take(3601)
    assert budget.take(3600)


# -- a load under a clock that the test sets ---------------------------------------------------------------------------

SHAPE = KVSpec(8, 2, 64, torch.bfloat16)  # a page has 2 MB
WANTED = as_ids(range(1024))


@pytest.fixture
def reader(monkeypatch: pytest.MonkeyPatch, clock: list[float]) -> tuple[threading.Event, threading.Event]:
    """Set while nothing is read, and to let the reading go on."""
    waits, goes = threading.Event(), threading.Event()
    read_many = blob_io.read_many

    def gated(*args: Any, **more: Any) -> Any:
        waits.set()
        goes.wait(20)
        waits.clear()
        clock[0] += 0.002
        return read_many(*args, **more)

    monkeypatch.setattr(blob_io, "read_many", gated)
    return waits, goes


@pytest.fixture
def shelf(tmp_path: Path, clock: list[float]) -> Iterator[Store]:
    """A store that has WANTED on disk, and reads a page in a millisecond."""
    store = Store(1 << 26, options=StoreOptions(tmp_path / "store"))
    store.admit(Scope("tests", "weights"), WANTED, [stored_pages.noise_page(SHAPE), stored_pages.noise_page(SHAPE)], "n")
    assert store.flush()
    store.clear()
    assert store.disk
    store.disk.read_rate = Rate(2.0 * MB, clock[0])
    yield store
    store.close()


def fetch(store: Store, more: int = 1) -> PagePrefetch:
    """Ask for WANTED, which takes a second to compute, and so many tokens more."""
    wanted = PageQuery(Scope("tests", "weights"), as_ids([*WANTED.tolist(), *[1] * more]), 1000 / 1024, SHAPE, 1024)
    found = store.prefetch(wanted, lambda: None)
    assert found is not None
    return found


@pytest.mark.impatient
def test_a_reader_without_processor_is_no_slow_disk(shelf: Store, reader: Any, clock: list[float]) -> None:
    """After 20 ms without a byte it was given up, on a disk known to read all of it in two."""
    waits, goes = reader
    asked = fetch(shelf)
    assert asked.pending()
    assert waits.wait(20)
    for _ in range(3):
        clock[0] += 0.03
        assert asked.pending()
    goes.set()
    assert wait_until(lambda: not asked.pending())
    assert (asked.tokens, asked.refusals) == (1024, [])


@pytest.mark.impatient
def test_a_disk_that_was_silent_once_is_looked_at_again(shelf: Store, reader: Any, clock: list[float]) -> None:
    waits, goes = reader
    asked = fetch(shelf)
    assert asked.pending()
    assert waits.wait(20)
    clock[0] += 0.11
    assert not asked.pending()
    assert [refusal.reason for refusal in asked.refusals] == [Reason.SLOW_DISK]
    again = fetch(shelf)
    assert not again.pending()
    assert "takes about" in again.refusals[0].detail
    goes.set()
    clock[0] += LOOK_S
    later = fetch(shelf)
    assert wait_until(lambda: not later.pending())
    assert (later.tokens, later.refusals) == (1024, [])
    assert shelf.disk
    assert shelf.disk.read_rate.given_up == 0


@pytest.mark.impatient
def test_a_slow_disk_is_blamed_for_its_own_tokens(shelf: Store, reader: Any, clock: list[float]) -> None:
    waits, goes = reader
    asked = fetch(shelf, 5000)
    assert asked.pending()
    assert waits.wait(20)
    clock[0] += 0.11
    assert not asked.pending()
    again = fetch(shelf, 5000)
    assert not again.pending()
    assert [(why.reason, why.start, why.stop) for why in asked.refusals + again.refusals] == [(Reason.SLOW_DISK, 0, 1024)] * 2
    goes.set()


# -- a throttled disk --------------------------------------------------------------------------------------------------


def wide(layers: int) -> Any:
    """A page has megabytes, and a prompt takes a fraction of a second with two layers."""
    sizes = {"hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}
    return models.build("qwen3", num_hidden_layers=layers, **sizes)


@pytest.fixture(scope="module")
def large() -> Any:
    return wide(2)


@pytest.fixture
def throttle(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """throttle(bytes per ms): from now on reading takes so long; 0: it never says anything, inf: as fast as it is."""
    read_many = blob_io.read_many
    rate = [float("inf")]

    def slow(folder: Any, jobs: Any, *, stop: threading.Event, progress: Callable[[int], None]) -> Any:
        while rate[0] == 0 and not stop.wait(0.01):
            pass

        def told(count: int) -> None:
            stop.wait(count / rate[0] / 1e3 if rate[0] else 0.0)
            progress(count)

        return read_many(folder, jobs, stop=stop, progress=told)

    monkeypatch.setattr(blob_io, "read_many", slow)
    return lambda value: rate.__setitem__(0, value)


def remember(model: Any, folder: Path) -> tuple[Path, float, tuple[int, ...]]:
    """A store that holds LONG; how long computing it takes, and what comes of it."""
    with engine(model=model, store=folder) as running:
        times = [running.generate(LONG, sampling=decode(2), reuse="off").receipt.ttft_ms for _ in range(2)]
        ids = running.generate(LONG, sampling=decode(2)).ids
    return folder, min(times), ids


def fix_price(monkeypatch: pytest.MonkeyPatch, compute_ms: float) -> None:
    """Let the prompt cost so much: it is measured again with each request, and who shares the cores would decide what looks worth it."""
    prefetch = Store.prefetch

    def at_one_price(store: Store, wanted: PageQuery, wake: Any) -> Any:
        return prefetch(store, replace(wanted, ms_per_token=compute_ms / len(wanted.ids)), wake)

    monkeypatch.setattr(Store, "prefetch", at_one_price)


@pytest.fixture(scope="module")
def remembered(large: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float, tuple[int, ...]]:
    return remember(large, tmp_path_factory.mktemp("policy") / "store")


@pytest.mark.impatient
@pytest.mark.slow  # it compares times, and another process on the same cores may turn them around
def test_a_slow_disk_costs_next_to_nothing(tmp_path: Path, throttle: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first request finds out, which takes a while: its prompt is one of seconds, as those are that a disk is for."""
    model = wide(16)
    folder, off_ms, ids = remember(model, tmp_path / "store")
    fix_price(monkeypatch, off_ms)
    monkeypatch.setattr(policy, "LOOK_S", RETRY_S)
    with engine(model=model, store=folder) as running:
        size = sum(row.bytes for row in running.store.disk.index.rows())
        throttle(size / (3 * off_ms))
        lost: list[float] = []
        known: list[bool] = []
        for _ in range(3):
            done = running.generate(LONG, sampling=decode(2))
            receipt = done.receipt
            assert done.ids == ids
            assert receipt.bitwise
            (slow,) = [refusal for refusal in receipt.refusals if refusal.reason == Reason.SLOW_DISK]
            known.append("takes about" in slow.detail)
            lost_ms = receipt.ttft_ms - receipt.prefill_ms - receipt.layout_ms  # computing itself takes what it takes on a busy machine
            lost.append(lost_ms)
            assert receipt.disk_tokens <= 512
            running.store.clear()
        assert known == [False, True, True], "the first request found it out"
        assert min(lost) < 0.03 * off_ms + 3 * LEAST_TRUST_MS, lost
        assert max(lost) < 0.5 * off_ms, lost
        rate = running.store.disk.read_rate.most
    with engine(model=model, store=folder) as second:
        assert second.store.disk.read_rate.most == rate > 0, "the rate outlives the process"
        receipt = second.generate(LONG, sampling=decode(2)).receipt
        (slow,) = [refusal for refusal in receipt.refusals if refusal.reason == Reason.SLOW_DISK]
        throttle(float("inf"))
        for _ in range(3):  # a reader that the machine lets wait for 20 ms is a disk that shows nothing
            second.store.clear()
            second.store.disk.read_rate.given_up_at -= RETRY_S + 1
            receipt = second.generate(LONG, sampling=decode(2)).receipt
            if receipt.disk_tokens:
                break
        assert receipt.disk_tokens > 1000, receipt.refusals  # tried again, and it was fast
        assert Reason.SLOW_DISK not in {refusal.reason for refusal in receipt.refusals}


@pytest.mark.impatient
def test_a_refusal_does_not_outlive_its_time_in_short_processes(large: Any, remembered: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, _, _ = remembered
    with engine(model=large, store=folder) as running:
        running.store.disk.read_rate = Rate(1.0)
        running.generate("x", sampling=decode(1))
    real = time.time
    for ahead in (RETRY_S + 1, -1e6):
        monkeypatch.setattr(time, "time", lambda ahead=ahead: real() + ahead)
        with engine(model=large, store=folder) as running:
            assert running.store.disk.read_rate.believed == 0.0
    monkeypatch.setattr(time, "time", real)
    with engine(model=large, store=folder) as running:
        assert running.store.disk.read_rate.believed == 1.0
        running.store.disk.read_rate = Rate(1e5)


@pytest.mark.impatient
def test_a_silent_disk_is_left(large: Any, remembered: Any, throttle: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look takes 1/1024 s by this clock, however long it takes on a busy machine."""
    folder, _, ids = remembered
    looks = itertools.count()
    monkeypatch.setattr(page_prefetch, "time", SimpleNamespace(perf_counter=lambda: next(looks) / 1024, monotonic=time.monotonic))
    fix_price(monkeypatch, 100.0)
    throttle(0)
    with engine(model=large, store=folder) as running:
        running.store.disk.read_rate = Rate()
        done = running.generate(LONG, sampling=decode(2))
    assert done.ids == ids
    (slow,) = [refusal for refusal in done.receipt.refusals if refusal.reason == Reason.SLOW_DISK]
    assert slow.detail.endswith(f"bytes read in {LEAST_TRUST_MS + 1:.0f} ms, computing takes 100 ms")


@pytest.mark.impatient
def test_a_fast_disk_is_used(large: Any, remembered: Any, throttle: Any) -> None:
    folder, _, ids = remembered
    with engine(model=large, store=folder) as running:
        running.store.disk.read_rate = Rate()
        done = running.generate(LONG, sampling=decode(2))
        assert done.ids == ids
        assert done.receipt.disk_tokens > 1000
        assert running.store.disk.read_rate.value > 0


def test_a_killed_process_leaves_the_cost_of_a_token(large: Any, tmp_path: Path) -> None:
    with engine(model=large, store=tmp_path / "store") as running:
        for number in range(2):
            running.generate(chat(long_text(30, number)), sampling=decode(1))
        assert running.flush()
        other = DiskTier(StoreOptions(tmp_path / "store"))
        assert other.compute_ms(running.fingerprint.whole) > 0
        other.close()


# -- checks in idle time -------------------------------------------------------------------------------------------------


TURNS = chat(long_text(230))


@pytest.fixture(scope="module")
def small() -> Any:
    return models.build("qwen3", num_hidden_layers=2)


def written(model: Any, folder: Path) -> tuple[int, ...]:
    with engine(model=model, store=folder) as running:
        return running.generate(TURNS, sampling=decode(4)).ids


def tamper(model: Any, folder: Path, place: int) -> None:
    """Wrong numbers with a right MAC, as only a fault of ours could write them."""
    disk = DiskTier(StoreOptions(folder))
    row = next(row for row in disk.index.rows() if row.place == place)
    with engine(model=model) as running:
        spec = running.model.spec
    assert spec
    page = Page(spec)
    stored_pages.fill_page(disk.folder, row, page, tokens=row.tokens)
    page.values[-1, 0, 3, 0] += 1
    wrong = blob_io.write(disk.folder, row, page)
    stored_pages.blob_path(disk.folder, wrong).replace(stored_pages.blob_path(disk.folder, row))
    disk.close()


def checked(folder: Path) -> StoreOptions:
    return StoreOptions(folder, check_one_in=1)


def found_wrong(running: Engine, between: Callable[[], object] = lambda: None) -> None:
    """Ask, and wait until the check that follows has found something."""
    running.generate(TURNS, sampling=decode(4))
    between()
    assert wait_until(lambda: running.scheduler.hit_audit.wrong_pages == 1 and not running.scheduler.hit_audit.pending)


def test_a_wrong_page_is_found_reported_and_computed(small: Any, tmp_path: Path) -> None:
    ids = written(small, tmp_path / "store")
    tamper(small, tmp_path / "store", 1)
    with engine(model=small, store=checked(tmp_path / "store")) as running:
        with pytest.warns(StoreWarning, match=r"page 1 .*verify --fix"):
            found_wrong(running)
        disk = running.store.disk
        assert {row.place for row in disk.index.rows(bad=True)} == {1, 2}, "what continues it may have been computed from it"
        again = running.generate(TURNS, sampling=decode(4))
        assert again.ids == ids
        assert again.receipt.cached_tokens == 512
        assert Reason.BAD_BLOB in {refusal.reason for refusal in again.receipt.refusals}
        assert running.flush()
        assert not list(disk.index.rows(bad=True)), "a right page took its place"
        assert disk.index.counters()["audit_wrong"] == 1
    with engine(model=small, store=checked(tmp_path / "store")) as second:
        assert second.generate(TURNS, sampling=decode(4)).ids == ids
        assert wait_until(lambda: second.scheduler.hit_audit.checked_tokens > 1024 and not second.scheduler.hit_audit.pending)
        assert second.scheduler.hit_audit.wrong_pages == 0


def test_a_wrong_page_dropped_by_memory_is_quarantined(small: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(small, tmp_path / "store")
    tamper(small, tmp_path / "store", 0)
    dropped = threading.Event()
    step = HitAudit.step
    monkeypatch.setattr(HitAudit, "step", lambda self: step(self) if dropped.is_set() else None)  # the thread that drops
    with engine(model=small, store=checked(tmp_path / "store")) as running:

        def drop() -> None:
            running.store.clear()
            dropped.set()

        with pytest.warns(StoreWarning, match="page 0 "):
            found_wrong(running, drop)
        assert {row.place for row in running.store.disk.index.rows(bad=True)} == {0, 1, 2}


def test_a_warning_that_is_an_error_ends_nobody(small: Any, tmp_path: Path) -> None:
    ids = written(small, tmp_path / "store")
    tamper(small, tmp_path / "store", 1)
    with warnings.catch_warnings(), engine(model=small, store=checked(tmp_path / "store")) as running:
        warnings.simplefilter("error")
        found_wrong(running)
        assert running.generate(TURNS, sampling=decode(4)).ids == ids


def test_right_pages_are_not_accused(small: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(small, tmp_path / "store")
    with engine(model=small, store=checked(tmp_path / "store")) as running:
        running.generate(TURNS, sampling=decode(4))
        assert wait_until(lambda: running.scheduler.hit_audit.checked_tokens > 1024 and not running.scheduler.hit_audit.pending)
        assert running.scheduler.hit_audit.wrong_pages == 0
        assert running.flush()
        assert running.store.disk.index.counters()["audit_checked"] == 1
        running.store.clear()
        hold = threading.Event()
        step = HitAudit.step
        monkeypatch.setattr(HitAudit, "step", lambda self: (hold.wait(10), step(self)))
        running.generate(TURNS, sampling=decode(4))
        numerics = HFModel.numerics.fget(running.model)  # type: ignore[attr-defined]
        changed = type(numerics)(**{**{n: getattr(numerics, n) for n in numerics.__slots__}, "digest": "other"})
        monkeypatch.setattr(HFModel, "numerics", property(lambda self: changed))
        before = running.scheduler.hit_audit.checked_tokens
        hold.set()
        assert wait_until(lambda: not running.scheduler.hit_audit.pending)
        assert running.scheduler.hit_audit.checked_tokens == before, "other kernels than at the hit: nothing can be said"


def test_a_request_interrupts_a_check_within_one_chunk(small: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(small, tmp_path / "store")
    steps: list[int] = []
    streams: list[Any] = []
    started_at: list[int] = []
    step, start = HitAudit.step, Lifecycle.start
    with engine(model=small, store=checked(tmp_path / "store")) as running:

        def counted(self: HitAudit) -> None:
            if self.pending:
                steps.append(1)
                if len(steps) == 2:
                    streams.append(running.stream(chat("hello"), sampling=decode(3), reuse="off"))
            step(self)

        def noted(self: Lifecycle, request: Any) -> None:
            started_at.append(len(steps))
            start(self, request)

        monkeypatch.setattr(HitAudit, "step", counted)
        monkeypatch.setattr(Lifecycle, "start", noted)
        running.generate(TURNS, sampling=decode(4))
        assert wait_until(lambda: streams)
        assert len(streams[0].completion.ids) == 3
        assert started_at == [0, 2]
        assert wait_until(lambda: not running.scheduler.hit_audit.pending)
        assert len(steps) > 8, "it goes on afterwards"
        assert running.scheduler.hit_audit.checked_tokens > 1024


def test_by_chance_one_in_n() -> None:
    assert 50 < sum(due(8) for _ in range(800)) < 160
    assert not any(due(0) for _ in range(100))


# -- one computes, the others wait -----------------------------------------------------------------------------------------


PREFIX = chat("hi", system=SYSTEM + long_text(300))


class Holder:
    """Another process that has said it computes the prefix of PREFIX, and writes it when told."""

    def __init__(self, model: Any, folder: Path) -> None:
        self.go = folder.parent / "go"
        with engine(model=model) as running:
            self.ids = running.generate(PREFIX, sampling=decode(3)).ids
            layout = running.renderer.render(PREFIX)
            assert running.fingerprint
            scope, ids = Scope("default", running.fingerprint.whole), as_ids(layout.ids)
            found = running.store.tree.match(scope, ids, peek=True)
        prefix = layout.prefix_tokens
        self.prefix_tokens = prefix
        key = chain(scope.root, ids[:prefix])[-1]
        DiskTier(StoreOptions(folder)).close()

        def work() -> None:
            torch.set_num_threads(1)
            store = Store(1 << 26, options=StoreOptions(folder))
            assert store.disk
            assert store.disk.leases.take(key, scope.fingerprint) is None
            (folder.parent / "holds").touch()
            while not self.go.exists():
                time.sleep(0.005)
            store.admit(scope, ids[: found.tokens], found.pages, found.numerics, prefix)
            store.flush()
            store.close()

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            self.pid = os.fork()
        if not self.pid:
            try:
                work()
            finally:
                os._exit(0)
        assert wait_until((folder.parent / "holds").exists)

    def kill(self) -> None:
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            self.pid = 0


@pytest.fixture
def holder(small: Any, tmp_path: Path) -> Iterator[Holder]:
    made = Holder(small, tmp_path / "store")
    yield made
    made.kill()


def awaiting(running: Engine) -> bool:
    return any(one.prefetch is not None and one.prefetch.state is State.AWAITING for one in list(running.scheduler._waiting))


def test_who_comes_second_waits_and_loads(small: Any, tmp_path: Path, holder: Holder) -> None:
    with engine(model=small, store=tmp_path / "store") as running:
        running.scheduler.ms_per_token = 20.0  # so it would take 20 s
        stream = running.stream(PREFIX, sampling=decode(3))
        assert wait_until(lambda: awaiting(running))
        assert len(running.generate(chat("x"), sampling=decode(2), reuse="off").ids) == 2, "others go on meanwhile"
        running.scheduler.ms_per_token = 20.0
        holder.go.touch()
        done = stream.completion
        assert done.ids == holder.ids
        assert done.receipt.disk_tokens >= holder.prefix_tokens - holder.prefix_tokens % 512  # the last page may still be growing
        assert any("waited" in note for note in done.receipt.notes)
        assert done.receipt.load_ms > 0


def test_a_holder_that_dies_is_not_waited_for(small: Any, tmp_path: Path, holder: Holder) -> None:
    with engine(model=small, store=tmp_path / "store") as running:
        running.scheduler.ms_per_token = 20.0
        stream = running.stream(PREFIX, sampling=decode(3))
        assert wait_until(lambda: awaiting(running))
        holder.kill()
        done = stream.completion
        assert done.ids == holder.ids
        assert done.receipt.cached_tokens == 0
        assert running.flush()
        assert running.store.disk.index.stats()["leases"] == 0


def test_nobody_waits_longer_than_it_may_pay(small: Any, tmp_path: Path, holder: Holder) -> None:
    with engine(model=small, store=tmp_path / "store") as running:
        running.scheduler.ms_per_token = 0.01
        done = running.generate(PREFIX, sampling=decode(3))
        assert done.ids == holder.ids
        assert any("not awaited" in note for note in done.receipt.notes)
        assert done.receipt.load_ms < 2000


def test_nobody_waits_without_knowing_what_computing_costs(small: Any, tmp_path: Path, holder: Holder) -> None:
    with engine(model=small, store=tmp_path / "store") as running:
        done = running.generate(PREFIX, sampling=decode(3))
        assert done.ids == holder.ids
        assert any("not awaited" in note for note in done.receipt.notes)
        assert done.receipt.load_ms < 1000


def test_what_the_other_stores_must_be_of_use(small: Any, tmp_path: Path, holder: Holder) -> None:
    """In a store of int8 pages an exact request finds nothing, however long it waits."""
    with engine(model=small, store=StoreOptions(tmp_path / "store", precision="int8")) as running:
        running.scheduler.ms_per_token = 20.0
        done = running.generate(PREFIX, sampling=decode(3))
        assert done.ids == holder.ids
        assert done.receipt.load_ms < 5000


def test_a_cancelled_request_gives_its_lease_back(small: Any, tmp_path: Path) -> None:
    with engine(model=small, store=tmp_path / "store", chunk_tokens=16) as running:
        stream = running.stream(PREFIX, sampling=decode(3))
        assert wait_until(lambda: running.store.disk.index.stats()["leases"] == 1)
        stream.close()
        # not live any more comes first, what it had computed is kept next, the lease is given back after that
        assert wait_until(lambda: running.flush() and running.store.disk.index.stats()["leases"] == 0)


# -- what a request must not wait for ----------------------------------------------------------------------------------


def test_pages_that_a_stuck_disk_never_gets_to_are_computed(small: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both reading threads hang in the kernel; whoever comes behind them goes on."""
    ids = written(small, tmp_path / "store")
    monkeypatch.setattr("agentcache.store.page_prefetch.HUNG_MS", 50.0)
    monkeypatch.setattr(DiskTier, "submit", lambda self, job: None)
    with engine(model=small, store=tmp_path / "store") as running:
        done = running.generate(TURNS, sampling=decode(4))
        assert done.ids == ids
        [slow] = [refusal for refusal in done.receipt.refusals if refusal.reason == Reason.SLOW_DISK]
        assert "other requests' pages were read for" in slow.detail
        assert running.store.disk.read_rate.value == 0, "nothing was read: that says nothing about the rate"


def test_a_busy_device_thread_makes_no_slow_disk(small: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(small, tmp_path / "store")
    learnt: list[float] = []
    took: list[float] = []
    monkeypatch.setattr(Rate, "learn", lambda self, amount, ms, load_bytes=None: learnt.append(ms))
    arrived = PagePrefetch._finish_read

    def late(self: PagePrefetch, read: Any) -> None:
        assert read.over.wait(20)
        took.append((time.perf_counter() - read.asked) * 1e3)  # once it is over; what comes later is none of reading's
        time.sleep(0.5)
        arrived(self, read)

    monkeypatch.setattr(PagePrefetch, "_finish_read", late)
    with engine(model=small, store=tmp_path / "store") as running:
        assert running.generate(TURNS, sampling=decode(4)).receipt.disk_tokens > 0
    assert learnt
    assert all(ms <= most for ms, most in zip(learnt, took, strict=True))


def test_a_locked_index_is_no_reason_to_wait(small: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def locked(*_: Any) -> Any:
        raise StoreBusyError("locked")

    monkeypatch.setattr(Leases, "take", locked)
    with engine(model=small, store=tmp_path / "store") as running:
        done = running.generate(PREFIX, sampling=decode(3)).receipt
        assert any("the index was busy" in note for note in done.notes)
        assert Reason.BAD_BLOB not in {refusal.reason for refusal in done.refusals}


def test_what_nobody_thought_of_is_no_requests_trouble(small: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = written(small, tmp_path / "store")

    def odd(*_: Any, **__: Any) -> Any:
        raise ValueError("87 is not a valid Role")

    monkeypatch.setattr(Store, "adopt", odd)
    with engine(model=small, store=tmp_path / "store") as running:
        done = running.generate(TURNS, sampling=decode(4))
        assert done.ids == ids
        assert any("87 is not a valid Role" in note for note in done.receipt.notes)


@pytest.mark.parametrize("waits", [True, False])
def test_an_awaited_prefix_is_written_during_its_answer(small: Any, tmp_path: Path, waits: bool) -> None:
    with engine(model=small, store=tmp_path / "store") as running:
        disk = running.store.disk
        ended = threading.Event()
        stream = running.stream(PREFIX, sampling=decode(2000), on_logits=lambda row: ended.wait(0.01))  # longer than what is waited for
        next(stream)
        other = DiskTier(StoreOptions(tmp_path / "store"))
        [(key, fingerprint)] = disk.leases.held
        if waits:
            assert wait_until(lambda: (other.leases.wait(key, fingerprint), disk.leases.is_awaited(key, fingerprint))[1]), (
                "the index may be busy"
            )
            assert wait_until(lambda: disk.index.total()[0] >= 1), "it would have been written behind the answer"
            assert not disk.writer.quiet.is_set()
            assert wait_until(lambda: not disk.leases.held), "given back once all of it is written"
            other.leases.stop_waiting(key, fingerprint)
            assert wait_until(lambda: disk.index.stats()["leases"] == 0)
        else:
            time.sleep(0.7)
            assert not disk.writer.quiet.is_set()
            assert disk.index.total()[0] == 0, "an answer gives way to nobody's writing without need"
        ended.set()
        stream.close()
        other.close()


@pytest.mark.parametrize("warmed", [False, True])
def test_what_somebody_has_pruned_is_written_again(small: Any, tmp_path: Path, warmed: bool) -> None:
    system = SYSTEM + long_text(300)
    with engine(model=small, store=tmp_path / "store") as running:
        running.generate(chat("hi", system=system), sampling=decode(2))
        assert running.flush()
        disk = running.store.disk
        before = {row.page_key for row in disk.index.rows()}
        assert len(before) > 1
        disk.index.remove([row.id for row in disk.index.rows()], force=True)
        if warmed:
            running.warm(system, name="tools")
            assert running.flush()
            assert {row.id for row in disk.index.rows()} == disk.index.pinned()
        else:
            for _ in range(2):  # the first one finds out
                running.generate(chat("hi", system=system), sampling=decode(2))
                assert running.flush()
            assert {row.page_key for row in disk.index.rows()} >= before
