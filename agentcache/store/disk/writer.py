"""Writing back: pages of the memory tier go to disk after the answers, in one thread. Knows neither requests nor models.

    offered ──> waiting (most important first) ──> written ──> row in the index
                  │ whole pages when no request is being computed, the growing last page of a sequence once it has settled
                  └ left out: over the write budget, over the queue's bound, no room on disk, parent not written

An entry is written once, and again when it is to have other checkpoints on disk; the answer never waits for it.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...errors import FAULTS, StoreBusyError, StoreFullError
from ...kv import PAGE_TOKENS, Page
from ...openmp import use_one_thread
from ..deletion import Deletion
from ..deletion_log import DeletionLog
from ..entry import Entry
from ..keys import Ids, Role, Scope
from ..policy import WriteBudget

if TYPE_CHECKING:
    from ...checkpoints import Checkpoint

SETTLE_S = 2.0  # the last page of a sequence that has not grown for so long is worth writing
PATIENCE_S = 30.0  # so long a write gives way to requests that are being computed
PAUSE_S = 30.0  # after a disk error nothing is tried for so long
QUEUED_BYTES = 1 << 30  # of pages that wait: beyond it the least important are left out
TOUCH_S = 5.0  # uses are told to the index in batches
QUEUED_JOBS = 10_000  # beyond it, what need not be remembered is not


Name = tuple[Scope, bytes]  # of a page that waits


@dataclass(slots=True, eq=False)
class PendingWrite:
    """One page on its way: as it was when it was offered, because it may be evicted or grow meanwhile."""

    entry: Entry
    ids: Ids
    page: Page
    key: bytes
    due: float
    number: int
    since: float
    settled: bool
    role: Role
    numerics: frozenset[str]
    checkpoints: dict[int, Checkpoint]
    rewritten: bool
    generation: int

    @property
    def checkpoint_bytes(self) -> int:
        if not self.checkpoints:
            return 0
        from . import checkpoint_bytes

        return checkpoint_bytes.size(self.checkpoints, len(self.ids))

    @property
    def name(self) -> Name:
        return (self.entry.scope, self.key)

    @property
    def order(self) -> tuple[int, int]:
        return (-int(self.role), self.number)


# Writes one page; returns its row, 0 where there is none, and in a word what became of it.
Save = Callable[[PendingWrite], tuple[int, str]]


class Writer:
    """The one thread that writes. offer() and after() from any thread; flush() waits; close() flushes.

    save: writes one page. touch: counts rows as used and returns those that are gone. awaited: whether other processes wait for a
    prefix. counts: pages by outcome, in a word. budget: bytes that `save` may write. quiet: set while no request is computed. failure: the
    last disk error, in words. deletions: those that offered pages have survived.
    """

    def __init__(
        self, save: Save, budget: WriteBudget, touch: Callable[[list[int]], set[int]], awaited: Callable[[], bool], deletions: DeletionLog
    ) -> None:
        self.counts: Counter[str] = Counter()
        self.quiet = threading.Event()
        self.quiet.set()
        self.failure = ""
        self._save = save
        self._touch = touch
        self._awaited = awaited
        self._deletions = deletions
        self.budget = budget
        self._numbers = itertools.count()
        self._pending: dict[Name, PendingWrite] = {}
        self._jobs: list[tuple[int, Callable[[], object]]] = []  # to be done once all pages offered before are settled
        self._used: dict[int, Entry] = {}
        self._touched = time.monotonic()
        self._changed = threading.Condition()
        self._closing = self._abandoned = False
        self._urgent = 0  # how many wait in flush
        self._busy = False
        self._writing = b""
        self._paused_until = 0.0
        self._thread = threading.Thread(target=self._loop, name="agentcache-writer", daemon=True)
        try:
            self._thread.start()
        except BaseException:  # an interrupt once it has started
            self.abandon()
            raise

    def __len__(self) -> int:
        """Number of pages that wait."""
        return len(self._pending)

    # -- asking ----------------------------------------------------------------------------------------------------

    def offer(self, path: list[Entry], settled: bool = False) -> None:
        """Queue the entries, root first, that are not on disk; the last one, if it may still grow, is written once it has settled."""
        now = time.monotonic()
        with self._deletions.lock, self._changed:  # else an entry may grow between two looks at it
            if self._closing:
                return
            generation = self._deletions.generation
            for entry in path:
                if entry.row:
                    self._used[entry.row] = entry
                if entry.row and not entry.rewritten:
                    continue
                page, ids, key, numerics = entry.page, entry.ids, entry.key, entry.numerics  # others may drop the page meanwhile
                checkpoints = {slots: one for slots, one in (page.checkpoints if page else {}).items() if slots not in entry.passing}
                if (known := self._pending.get((entry.scope, key))) is not None:
                    known.role, known.rewritten = max(known.role, entry.role), known.rewritten or entry.rewritten
                    if known.page is page is not None:  # a checkpoint of other pieces may have come: both or none
                        known.numerics, known.checkpoints = numerics, checkpoints
                if page is None or (known is not None and not settled):
                    continue
                for shorter in [p for p in self._pending.values() if p.entry is entry and not p.settled]:
                    del self._pending[shorter.name]
                whole = settled or len(ids) == PAGE_TOKENS
                due = now if whole else now + SETTLE_S
                number, role = next(self._numbers), entry.role
                new = PendingWrite(entry, ids, page, key, due, number, now, whole, role, numerics, checkpoints, entry.rewritten, generation)
                self._pending[new.name] = new
            self._bound()
            self._changed.notify_all()

    def after(self, job: Callable[[], object], vital: bool = True) -> None:
        """Run `job` on the writing thread once everything offered so far that needs no settling is written or left out.

        vital: also while so many jobs wait that the disk must be stuck.
        """
        with self._changed:
            if not self._closing and (vital or len(self._jobs) < QUEUED_JOBS):
                self._jobs.append((next(self._numbers), job))
                self._changed.notify_all()

    def run_until_done(self, job: Callable[[], object]) -> None:
        """Run `job` as `after` does, and again as long as the disk is full, or other processes keep the index busy."""

        def attempt() -> None:
            try:
                job()
            except (StoreBusyError, StoreFullError):
                self.after(attempt)
                raise

        self.after(attempt)

    def discard(self, keys: frozenset[bytes]) -> None:
        """Take wrong pages out of the queue; one that is being written now is on disk once this returns."""
        with self._changed:
            for known in [p for p in self._pending.values() if p.key in keys]:
                del self._pending[known.name]
            while self._writing in keys:
                self._changed.wait()

    def drop(self, deletion: Deletion) -> None:
        """Take deleted pages out of the queue. One that is being written now is refused by the index."""
        with self._changed:
            for known in [p for p in self._pending.values() if deletion.covers_lineage(p.entry)]:
                del self._pending[known.name]
            self._changed.notify_all()

    def flush(self, timeout_s: float | None = None) -> bool:
        """Write everything that waits, settled or not, and wait for it. False: it took too long, or the disk or its budget refuses."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            refused = self._refused()
            self._urgent += 1
            self._changed.notify_all()
            try:
                while self._pending or self._jobs or self._busy:
                    left = None if deadline is None else deadline - time.monotonic()
                    if (left is not None and left <= 0) or not self._thread.is_alive() or self._paused_until > time.monotonic():
                        return False
                    self._changed.wait(0.5 if left is None else min(left, 0.5))
                return self._refused() == refused
            finally:
                self._urgent -= 1

    def _refused(self) -> int:
        return self.counts["failed"] + self.counts["no room"]

    def abandon(self) -> None:
        """Empty the queue, and end the thread after the page that is being written."""
        with self._changed:
            self._closing = self._abandoned = True
            self._pending.clear()
            self._jobs.clear()
            self._used.clear()
            self._changed.notify_all()

    def close(self, timeout_s: float = 30.0) -> None:
        """Flush, then end the thread. An interrupt ends the waiting, and the writing."""
        self._paused_until = 0.0  # the last chance of what a disk error put off
        try:
            self.flush(timeout_s)
            with self._changed:
                self._closing = True
                self._changed.notify_all()
            self._thread.join(timeout_s)
        except BaseException:
            self.abandon()
            raise

    # -- the thread ------------------------------------------------------------------------------------------------

    def _loop(self) -> None:
        use_one_thread()
        while True:
            awaited = not self.quiet.is_set() and bool(self._pending) and self._awaited()  # not under the lock: offers wait for no index
            with self._changed:
                found = self._next(awaited)
                if found is None and self._closing:
                    break
                if found is None:
                    self._changed.wait(self._idle_s())
                    continue
                self._busy = True
                self._writing = found.key if isinstance(found, PendingWrite) else b""
            try:
                self._do(found)
            finally:
                with self._changed:
                    self._busy, self._writing = False, b""
                    self._changed.notify_all()
        self._do(self.tell_uses)

    def _next(self, awaited: bool) -> PendingWrite | Callable[[], object] | None:
        """Take out the next page or job. Called with the lock held. awaited: prefixes give way to no request."""
        now, urgent = time.monotonic(), bool(self._urgent)
        if self._used and (urgent or now - self._touched > TOUCH_S):
            return self.tell_uses
        if now < self._paused_until:
            return None
        quiet = self.quiet.is_set()

        def may_go(p: PendingWrite) -> bool:
            return quiet or now - p.since > PATIENCE_S or (awaited and p.role >= Role.PREFIX)

        ready = [p for p in self._pending.values() if urgent or (p.due <= now and may_go(p))]
        settling = {p.number for p in self._pending.values() if p.due > now and not urgent}
        if self._jobs:
            number, job = self._jobs[0]
            if not any(p.number < number and p.number not in settling for p in self._pending.values()):
                self._jobs.pop(0)
                return job
        if not ready:
            return None
        first = min(ready, key=lambda p: p.order)
        del self._pending[first.name]
        return first

    def _idle_s(self) -> float | None:
        if not self._pending and not self._jobs and not self._used:
            return None
        return 0.1 if not self.quiet.is_set() else 0.25

    def _do(self, found: PendingWrite | Callable[[], object]) -> None:
        try:
            if isinstance(found, PendingWrite):
                self._write(found)
            else:
                found()
        except FAULTS as error:  # what could not be written is computed again some day: never a request's trouble, nor the thread's end
            self.failure = str(error) or type(error).__name__
            self.counts["failed"] += 1
            self._paused_until = time.monotonic() + PAUSE_S

    def _write(self, pending: PendingWrite) -> None:
        entry = pending.entry
        parent = entry.parent
        assert parent is not None
        if entry.row and entry.key == pending.key and not pending.rewritten:
            return
        if parent.parent is not None and not parent.row:
            self.counts["parent missing"] += 1
            return
        row, what = self._save(pending)
        with self._deletions.lock, self._changed:  # else it may have grown since the look at its key
            if entry.key == pending.key and not self._abandoned:
                again = self._pending.get(pending.name)
                entry.row, entry.rewritten = row, again is not None and again.rewritten  # other checkpoints came meanwhile
        self.counts[what] += 1

    def write(self, path: Sequence[Entry]) -> bool:
        """Write these entries now, root first; whether all are on disk. On the writing thread."""
        self.offer(list(path), settled=True)
        for entry in path:
            with self._changed:
                pending = self._pending.pop((entry.scope, entry.key), None)
                self._writing = pending.key if pending is not None else b""
            try:
                if pending is not None:
                    self._write(pending)
            finally:
                with self._changed:
                    self._writing = b""
                    self._changed.notify_all()
        return all(entry.row for entry in path)

    def tell_uses(self) -> None:
        """Tell the index now which rows were used since the last time; rows that are gone may be written again. On the writing thread."""
        with self._changed:
            used, self._used, self._touched = self._used, {}, time.monotonic()
        for row in self._touch(list(used)) if used else ():
            if used[row].row == row:
                used[row].row = 0

    def _bound(self) -> None:
        """Leave out the least important pages that wait beyond the bound. Called with the lock held."""
        waiting = sorted(self._pending.values(), key=lambda p: p.order)
        held = 0
        for pending in waiting:
            held += pending.page.bytes
            if held > QUEUED_BYTES:
                del self._pending[pending.name]
                self.counts["queue full"] += 1
