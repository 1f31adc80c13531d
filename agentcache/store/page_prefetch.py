"""One prompt's pages on their way into memory: read from disk, or awaited from another process that computes them. Knows no models.

LOOKING ──> READING ──> DONE                  a bad blob: pages verified before it are adopted, the index is asked once more
   │           └──────> DONE                  slower than computing: given up, with the reason
   └──> AWAITING ──> LOOKING ...              another live process computes this prefix: until it is done, dead, or slower than we are
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import Enum, auto

from ..errors import FAULTS, BlobError, StoreBusyError, StoreCorruptError, StoreError, StoreFormatError, StoreLostError
from ..kv import PAGE_TOKENS, Page
from ..kv_spec import KVSpec
from ..types import Precision, Reason, Refusal
from .disk.disk_tier import DiskMatch, DiskTier, cpu_page
from .disk.index import Row
from .entry import Entry, Match, PageQuery
from .keys import Ids, Scope, chain
from .memory.prefix_tree import PrefixTree
from .policy import HUNG_MS, give_up, slow_load_ms

LOOK_S = 0.05  # how often an awaited prefix is looked for
AWAIT_FACTOR = 1.5  # an awaited process may take so many times as long as we would


class State(Enum):
    """State of a prefetch."""

    LOOKING = auto()  # the index says what the disk adds to memory
    READING = auto()  # a reading thread fills pages
    AWAITING = auto()  # another process computes the prefix
    DONE = auto()


Adopt = Callable[[Scope, Ids, Sequence[Page], Sequence[Row], int], list[Entry]]  # admits verified pages into memory


def lend(tree: PrefixTree, scope: Scope, ids: Ids) -> None:
    """Drop changed pages of a prompt, so that they are read again for this very request; let a scope of fewer bits hold the exact ones,
    where memory has more of those. Their memory is shared."""
    tree.drop_changed(scope, ids)
    if scope.precision == "exact":
        return
    with tree.lock:
        exact = tree.match(replace(scope, precision="exact"), ids, peek=True)
        if exact.tokens <= tree.match(scope, ids, peek=True).tokens:
            return
        path = tree.admit(scope, ids[: exact.tokens], exact.pages, exact.numerics, evict=False)
        for entry, own in zip(path, exact.entries, strict=True):
            entry.role, entry.made = max(entry.role, own.role), min(entry.made, own.made)
            if entry.key == own.key:
                entry.row = entry.row or own.row


class _Read:
    """One disk match, filled into pages on a reading thread. generation: when it was found. wake: called there once it is over."""

    def __init__(self, disk: DiskTier, found: DiskMatch, generation: int, spec: KVSpec, wake: Callable[[], None]) -> None:
        self.found, self.generation = found, generation
        self.pages = [cpu_page(spec, count) for count in found.counts]
        self.stop, self.over = threading.Event(), threading.Event()
        self.failed: tuple[Reason, str] | None = None
        self.slow = ""  # why it was stopped
        self.bytes = 0
        self.asked = time.perf_counter()
        self.began = self.ended = 0.0
        self._disk, self._wake = disk, wake
        disk.submit(self._run)

    def _run(self) -> None:
        self.began = time.perf_counter()
        try:
            self.failed = self._disk.read(self.found, self.pages, self.stop, self._progress)
        except (OSError, MemoryError, RuntimeError) as error:  # a StoreError too: the index could not take the quarantine
            self.failed = Reason.EVICTED if isinstance(error, StoreLostError) else Reason.BAD_BLOB, str(error)
        finally:
            self.ended = time.perf_counter()
            self.over.set()
            self._wake()

    def _progress(self, count: int) -> None:
        self.bytes += count

    @property
    def good(self) -> int:
        """Number of pages, from the first on, that are verified."""
        return next((i for i, page in enumerate(self.pages) if page.filled != self.found.counts[i]), len(self.pages))

    @property
    def ms(self) -> float:
        """Time of reading alone, without the time until the request looked."""
        return (self.ended - self.began) * 1e3


class PagePrefetch:
    """Ask `pending()` until it is False, on one thread: by then memory holds what came. `close()` ends it.

    tokens, bytes, ms: of reading from disk. refusals: of reading. wake: called from the reading thread when it is done.
    adopt: admits pages that were read. state: READING and AWAITING go on by themselves.
    """

    def __init__(self, wanted: PageQuery, wake: Callable[[], None], tree: PrefixTree, disk: DiskTier, adopt: Adopt) -> None:
        precision = wanted.scope.precision
        assert precision in ("exact", "int8", "int4"), "only memory holds other pages"
        self.state = State.LOOKING
        self.tokens = self.bytes = 0
        self.ms = 0.0
        self.refusals: list[Refusal] = []
        self.notes: list[str] = []
        self.lease: bytes | None = None
        self._wanted, self._wake, self._tree, self._disk, self._adopt = wanted, wake, tree, disk, adopt
        self._scope, self._ids = wanted.scope, wanted.ids
        self._precision: Precision = precision
        self._prefix_tokens = min(wanted.prefix_tokens, len(wanted.ids))
        self._ms_per_token = disk.cost(self._scope.fingerprint, wanted.ms_per_token)
        self._began = time.perf_counter()
        self._awaited_key: bytes | None = None
        self._look_again = self._awaiting_until = self._await_began = 0.0
        self._retried = False
        self._read: _Read | None = None

    def pending(self) -> bool:
        """Tell whether pages are still on their way, and worth waiting for. Never blocks for longer than a lookup."""
        if self.state is State.DONE:
            return False
        try:
            self._step()
        except (StoreCorruptError, StoreFormatError, BlobError) as error:  # computed instead, and said
            self._refuse(str(error), reason=Reason.BAD_BLOB)
            self.state = State.DONE
        except StoreError as error:  # busy, gone, full: nothing is damaged
            self._fail(f"nothing was read from disk: {error}")
        except FAULTS as error:  # no memory for its pages, no thread to read them: computed, as without a disk
            self._fail(f"nothing was read from disk: {type(error).__name__}: {error}")
        if self.state is State.DONE:
            self._stop_waiting()
            self.ms = (time.perf_counter() - self._began) * 1e3
        return self.state is not State.DONE

    def _fail(self, note: str) -> None:
        self.notes.append(note)
        self.state = State.DONE

    def _step(self) -> None:
        if self.state is State.READING:
            assert self._read is not None
            if self._read.over.is_set() or self._too_slow(self._read):
                self._finish_read(self._read)
        elif self.state is State.AWAITING and time.monotonic() >= self._look_again:
            self._look_for_awaited()
        if self.state is State.LOOKING:
            self._look()

    # -- from disk -------------------------------------------------------------------------------------------------

    def _match_memory(self) -> Match:
        return self._tree.match(self._scope, self._ids, peek=True)

    def _match_disk(self, known: Match) -> DiskMatch | None:
        return self._disk.find(self._scope, self._ids, known, self._wanted.spec, self._precision)

    def _look(self) -> None:
        known, generation = self._match_memory(), self._disk.deletions.generation
        found = self._match_disk(known)
        if found is None:
            if known.missed is Reason.COLD:
                self._look_elsewhere()
            self._take_lease(known)
            return
        if self._precision != "exact" and found.tokens <= self._match_exact().tokens:
            self.state = State.DONE
            return
        compute_ms = self._compute_ms(found, known)
        if load_ms := slow_load_ms(found.bytes, compute_ms, self._disk.read_rate):
            self._refuse_slow(f"reading {found.bytes} bytes takes about {load_ms:.0f} ms, computing {compute_ms:.0f} ms", found)
            self.state = State.DONE
            return
        self.state = State.READING
        self._read = _Read(self._disk, found, generation, self._wanted.spec, self._wake)

    def _look_elsewhere(self) -> None:
        """Let the receipt say so where the disk has this prompt under other weights alone: the model of that name was exchanged."""
        if other := self._disk.index.elsewhere(self._scope, self._ids):
            with self._tree.lock:
                self._tree.log.add_head(self._scope.root, self._ids, other, Reason.FINGERPRINT)

    def _match_exact(self) -> Match:
        """The longest exact prefix in memory, for a request that accepts fewer bits."""
        return self._tree.match(replace(self._scope, precision="exact"), self._ids, peek=True)

    def _compute_ms(self, found: DiskMatch, known: Match) -> float:
        gain_ms = self._wanted.gain_ms
        return (found.tokens - known.tokens) * self._ms_per_token if gain_ms is None else gain_ms

    def _too_slow(self, read: _Read) -> bool:
        found = read.found
        compute_ms = self._compute_ms(found, self._match_memory())
        if not read.began:  # others are read first: that says nothing about the rate, but it may be for ever
            waited_ms = (time.perf_counter() - read.asked) * 1e3
            if waited_ms <= max(HUNG_MS, compute_ms):
                return False
            read.stop.set()
            read.slow = f"other requests' pages were read for {waited_ms:.0f} ms, computing takes {compute_ms:.0f} ms"
            return True
        elapsed = (time.perf_counter() - read.began) * 1e3
        if not give_up(elapsed, read.bytes, found.bytes, compute_ms, self._disk.read_rate):
            return False
        read.stop.set()
        if compute_ms:
            self._disk.read_rate.forbid(found.bytes, compute_ms)
        read.slow = f"{read.bytes} of {found.bytes} bytes read in {elapsed:.0f} ms, computing takes {compute_ms:.0f} ms"
        return True

    def _finish_read(self, read: _Read) -> None:
        """Adopt the pages that are verified; after a bad one look once more."""
        self._read, stopped, good = None, read.stop.is_set(), read.good
        read.stop.set()
        if good:
            self._keep(read, good)
            if not stopped:
                self._disk.read_rate.learn(sum(row.bytes for row in read.found.rows[:good]), read.ms)
        if stopped:
            self._refuse_slow(read.slow, read.found)
            self.state = State.DONE
            return
        if read.failed is not None:
            reason, detail = read.failed
            self._refuse(detail, (read.found.place + good) * PAGE_TOKENS, reason=reason)
            if not self._retried:
                self._retried, self.state = True, State.LOOKING
                return
        self._take_lease(self._match_memory())

    def _keep(self, read: _Read, good: int) -> None:
        with self._disk.deletions.lock:  # the parents that are found are not deleted before their children hang in the tree
            known, found = self._match_memory(), read.found
            if known.tokens // PAGE_TOKENS < found.place:
                return  # their parent was evicted meanwhile
            if self._precision != "exact":
                self._keep_exact(read, good)
            end = self._admit(self._scope, known, read, good)
        self.tokens += max(0, min(end, len(self._ids) - 1) - known.tokens)
        self.bytes += sum(row.bytes for row in found.rows[:good])

    def _keep_exact(self, read: _Read, good: int) -> None:
        """Admit leading pages that are exact on disk as exact: they are lent to this request, which is exact so far."""
        known, found = self._match_exact(), read.found
        count = next((at for at, row in enumerate(found.rows[:good]) if row.precision != "exact"), good)
        if count and known.tokens // PAGE_TOKENS >= found.place:
            self._admit(replace(self._scope, precision="exact"), known, read, count)

    def _admit(self, scope: Scope, known: Match, read: _Read, count: int) -> int:
        """Admit the first pages that were read, after those that memory has; returns the token at which they end."""
        found = read.found
        end, pages = found.place * PAGE_TOKENS + sum(found.counts[:count]), [*known.pages[: found.place], *read.pages[:count]]
        entries = self._adopt(scope, self._ids[:end], pages, found.rows[:count], read.generation)
        assert len(entries) in (0, count)
        return end

    # -- from another process --------------------------------------------------------------------------------------

    def _take_lease(self, known: Match) -> None:
        """Say that we compute this prefix, or wait for the process that said so before."""
        self.state = State.DONE
        missing = self._prefix_tokens - known.tokens
        if missing < PAGE_TOKENS or not self._disk.folder.writable or self.lease is not None:
            return
        if self._disk.written != self._precision:
            return  # what another process stores is not what this request could use
        key = chain(self._scope.root, self._ids[: self._prefix_tokens])[-1]
        try:
            holder = self._disk.leases.take(key, self._scope.fingerprint)
        except StoreBusyError:
            self.notes.append("the index was busy: not asked whether another process computes this prefix")
            return
        if holder is None:
            self.lease = key
            return
        if holder.process == self._disk.process:
            return
        now = time.monotonic()
        own_s = missing * self._ms_per_token / 1e3
        if not self._awaiting_until:
            self._awaited_key = key
            self._disk.leases.wait(key, self._scope.fingerprint)
            self._awaiting_until = now + AWAIT_FACTOR * own_s - max(0.0, time.time() - holder.since)
            self._await_began = now
        if not own_s or now >= self._awaiting_until:
            self.notes.append(f"another process computes this prefix too: not awaited longer than {max(0.0, AWAIT_FACTOR * own_s):.1f} s")
            return
        self.state = State.AWAITING
        self._look_again = now + LOOK_S

    def _look_for_awaited(self) -> None:
        known = self._match_memory()
        found = self._match_disk(known)
        if found is not None and found.tokens >= self._prefix_tokens - self._prefix_tokens % PAGE_TOKENS:  # the rest grows with the answer
            self.notes.append(f"waited {time.monotonic() - self._await_began:.1f} s for another process that computed this prefix")
            self.state = State.LOOKING
            return
        self._take_lease(known)
        if self.state is State.DONE and found is not None:
            self.state = State.LOOKING

    # -- the end ---------------------------------------------------------------------------------------------------

    def _refuse(self, detail: str, start: int = 0, *, reason: Reason) -> None:
        self.refusals.append(Refusal(reason, start, len(self._ids), detail))

    def _refuse_slow(self, detail: str, found: DiskMatch) -> None:
        """Record a refusal of the tokens that the disk has and memory has not: a faster disk would spare those alone."""
        self.refusals.append(Refusal(Reason.SLOW_DISK, min(self._match_memory().tokens, found.tokens), found.tokens, detail))

    def _stop_waiting(self) -> None:
        if self._awaited_key is not None:
            key, self._awaited_key = self._awaited_key, None
            self._disk.leases.stop_waiting(key, self._scope.fingerprint)

    def restart_clock(self) -> None:
        """Start the clock of `ms` again, as a request takes this prefetch over."""
        self._began = time.perf_counter()

    def close(self) -> None:
        """Stop reading: the prefix is computed, or will not be. Its lease is released once its pages are written."""
        self.state = State.DONE
        if self._read is not None:
            self._read.stop.set()
        self._stop_waiting()
        if self.lease is not None:
            key, self.lease = self.lease, None
            self._disk.leases.release(key, self._scope.fingerprint)
