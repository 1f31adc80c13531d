"""One request's pages on their way into memory: read from disk, or awaited from another process that computes them. Knows no models.

looking ──> reading ──> ready                 a bad blob: what is verified before it is kept, the rest looked for once more
   │           └──────> ready                 slower than computing: left behind, with the reason
   └──> awaiting ──> looking ...              another live process computes this prefix: until it is done, dead, or slower than we are
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from ..errors import FAULTS, StoreBusyError, StoreError, StoreLostError
from ..kv import PAGE_TOKENS, KVSpec, Page
from ..types import Precision, Reason, Refusal
from .disk.disk_tier import DiskMatch, cpu_page
from .disk.index_metadata import waited
from .entry import Match
from .keys import Ids, Scope, chain
from .policy import HUNG_MS, give_up, too_slow

if TYPE_CHECKING:
    from .store import Store

LOOK_S = 0.05  # how often an awaited prefix is looked for
AWAIT = 1.5  # an awaited process may take so many times as long as we would


class PagePrefetch:
    """Ask `pending()` until it is False, on one thread; then `adopt()` puts what came into memory.

    tokens, bytes, ms: what was read from disk. refusals: what was not, and why. wake: called from the reading thread when it is done.
    """

    def __init__(
        self, store: Store, scope: Scope, ids: Ids, prefix_tokens: int, ms_per_token: float, spec: KVSpec, wake: Callable[[], None],
    ) -> None:  # fmt: skip
        assert store.disk is not None
        self.store, self.disk, self.scope, self.ids, self.spec = store, store.disk, scope, ids, spec
        assert scope.precision != "approximate", "only memory holds such pages"
        self.precision: Precision = scope.precision
        self.prefix_tokens = min(prefix_tokens, len(ids))
        if ms_per_token:
            self.disk.note_compute(scope.fingerprint, ms_per_token)
        self.ms_per_token = (ms_per_token or self.disk.compute_ms(scope.fingerprint)) if self.disk.options.refuse_slow else 0.0
        self.tokens = self.bytes = 0
        self.ms = 0.0
        self.refusals: list[Refusal] = []
        self.notes: list[str] = []
        self.lease: bytes | None = None
        self._waited: bytes | None = None
        self._wake = wake
        self._began = time.perf_counter()
        self._look_again = 0.0
        self._awaiting_until = 0.0
        self._retried = False
        self._found: DiskMatch | None = None
        self._generation = 0
        self._pages: list[Page] = []
        self._stop = threading.Event()
        self._over = threading.Event()
        self._failed: tuple[Reason, str] | None = None
        self._read_bytes = 0
        self._asked = self._read_began = self._read_ended = 0.0
        self._state = "looking"

    def pending(self) -> bool:
        """Whether it is worth waiting on. Never blocks for longer than a lookup."""
        if self._state == "ready":
            return False
        try:
            waits = self._step()
        except (StoreBusyError, StoreLostError) as error:
            self.notes.append(f"nothing was read from disk: {error}")
            waits = False
        except StoreError as error:  # a damaged index: computed instead, and said
            self._refuse(Reason.BAD_BLOB, 0, str(error))
            waits = False
        except FAULTS as error:  # no memory for its pages, no thread to read them: computed, as without a disk
            self.notes.append(f"nothing was read from disk: {type(error).__name__}: {error}")
            waits = False
        if not waits:
            self._state = "ready"
            self._stop_waiting()
            self.ms = (time.perf_counter() - self._began) * 1e3
        return waits

    def _step(self) -> bool:
        if self._state == "looking":
            self._look()
        if self._state == "reading" and (self._over.is_set() or self._too_slow()):
            self._arrived()
        if self._state == "awaiting" and time.monotonic() >= self._look_again:
            self._await()
        return self._state != "ready"

    # -- from disk -------------------------------------------------------------------------------------------------

    def _known(self) -> Match:
        return self.store.tree.match(self.scope, self.ids, peek=True)

    def _look(self) -> None:
        known, self._generation = self._known(), self.store.deletions.generation
        self._found = found = self.disk.find(self.scope, self.ids, known, self.spec, self.precision)
        if found is None:
            self._claim(known)
            return
        if self.precision != "exact" and found.tokens <= self._exactly_known():
            self._state = "ready"
            return
        compute_ms = self._compute_ms(found, known)
        if load_ms := too_slow(found.bytes, compute_ms, self.disk.read_rate):
            self._refuse(
                Reason.SLOW_DISK, known.tokens, f"reading {found.bytes} bytes takes about {load_ms:.0f} ms, computing {compute_ms:.0f} ms"
            )
            self._state = "ready"
            return
        self._pages = pages = [cpu_page(self.spec, count) for count in found.counts]
        self._over.clear()
        self._stop = stop = threading.Event()
        self._failed, self._read_bytes, self._read_began, self._read_ended = None, 0, 0.0, 0.0
        self._asked = time.perf_counter()
        self._state = "reading"
        self.store.read(lambda: self._read(found, pages, stop))  # these, even if it starts when nobody waits any more

    def _exactly_known(self) -> int:
        """Tokens that memory holds exactly, where less would do."""
        return self.store.tree.match(replace(self.scope, precision="exact"), self.ids, peek=True).tokens

    def _compute_ms(self, found: DiskMatch, known: Match) -> float:
        return (found.tokens - known.tokens) * self.ms_per_token

    def _read(self, found: DiskMatch, pages: list[Page], stop: threading.Event) -> None:
        """On a reading thread: fill the pages."""
        self._read_began = time.perf_counter()
        try:
            self._failed = self.disk.read(found, pages, stop, self._progress)
        except (OSError, MemoryError, RuntimeError) as error:  # a StoreError too: the index could not be told what was wrong
            self._failed = Reason.EVICTED if isinstance(error, StoreLostError) else Reason.BAD_BLOB, str(error)
        finally:
            self._read_ended = time.perf_counter()
            self._over.set()
            self._wake()

    def _progress(self, count: int) -> None:
        self._read_bytes += count

    def _too_slow(self) -> bool:
        found = self._found
        assert found is not None
        compute_ms = self._compute_ms(found, self._known())
        if not self._read_began:  # others are read first: that says nothing about the rate, but it may be for ever
            waited_ms = (time.perf_counter() - self._asked) * 1e3
            if waited_ms <= max(HUNG_MS, compute_ms):
                return False
            self._stop.set()
            self._refuse(
                Reason.SLOW_DISK, 0, f"other requests' pages were read for {waited_ms:.0f} ms, computing takes {compute_ms:.0f} ms"
            )
            return True
        elapsed = (time.perf_counter() - self._read_began) * 1e3
        if not give_up(elapsed, self._read_bytes, found.bytes, compute_ms, self.disk.read_rate):
            return False
        self._stop.set()
        if compute_ms:
            self.disk.read_rate.forbid(found.bytes, compute_ms)
        self._refuse(
            Reason.SLOW_DISK, 0, f"{self._read_bytes} of {found.bytes} bytes read in {elapsed:.0f} ms, computing takes {compute_ms:.0f} ms"
        )
        return True

    def _arrived(self) -> None:
        """Keep the pages that are verified; after a bad one look once more."""
        found, took = self._found, (self._read_ended - self._read_began) * 1e3  # not until this thread had time to look
        assert found is not None
        good = 0
        while good < len(self._pages) and self._pages[good].filled == found.counts[good]:
            good += 1
        stopped = self._stop.is_set()
        self._stop.set()
        if good:
            self._keep(found, good)
            if not stopped:
                self.disk.read_rate.learn(sum(row.bytes for row in found.rows[:good]), took)
        failed, self._failed, self._pages, self._found = self._failed, None, [], None
        if failed is not None and not stopped:
            self._refuse(failed[0], (found.place + good) * PAGE_TOKENS, failed[1])
            if not self._retried:
                self._retried = True
                self._state = "looking"
                self._look()
                return
        if stopped:
            self._state = "ready"
        else:
            self._claim(self._known())

    def _keep(self, found: DiskMatch, good: int) -> None:
        known = self._known()
        if known.tokens // PAGE_TOKENS < found.place:
            return  # what they continue was evicted meanwhile
        rows, pages = found.rows[:good], self._pages[:good]
        before = found.place * PAGE_TOKENS
        end = before + sum(found.counts[:good])
        entries = self.store.adopt(self.scope, self.ids[:end].tolist(), [*known.pages[: found.place], *pages], rows, self._generation)
        assert len(entries) == len(rows) or not entries
        self.tokens += max(0, min(end, len(self.ids) - 1) - known.tokens)
        self.bytes += sum(row.bytes for row in rows)

    # -- from another process --------------------------------------------------------------------------------------

    def _claim(self, known: Match) -> None:
        """Say that we compute this prefix, or wait for who said so before."""
        self._state = "ready"
        missing = self.prefix_tokens - known.tokens
        if missing < PAGE_TOKENS or not self.disk.folder.writable or self.lease is not None:
            return
        if self.disk.precision != self.precision:
            return  # what another process stores is not what this request could use
        key = chain(self.scope.root, self.ids[: self.prefix_tokens])[-1]
        try:
            holder = self.disk.claim(key, self.scope.fingerprint)
        except StoreBusyError:
            self.notes.append("the index was busy: not asked whether another process computes this prefix")
            return
        if holder is None:
            self.lease = key
            return
        if holder.process == self.disk.process:
            return
        now = time.monotonic()
        own_s = missing * self.ms_per_token / 1e3
        if not self._awaiting_until:
            self._waited = key
            with suppress(StoreBusyError):  # it will be written behind the other's answer
                self.disk.index.await_claimed(key, self.scope.fingerprint, self.disk.process)
            self._awaiting_until = now + AWAIT * own_s - max(0.0, time.time() - holder.since)
            self._await_began = now
        if not own_s or now >= self._awaiting_until:
            self.notes.append(f"another process computes this prefix too: not awaited longer than {max(0.0, AWAIT * own_s):.1f} s")
            return
        self._state = "awaiting"
        self._look_again = now + LOOK_S

    def _await(self) -> None:
        known = self._known()
        found = self.disk.find(self.scope, self.ids, known, self.spec, self.precision)
        if found is not None and found.tokens >= self.prefix_tokens - self.prefix_tokens % PAGE_TOKENS:  # the rest grows with the answer
            self.notes.append(f"waited {time.monotonic() - self._await_began:.1f} s for another process that computed this prefix")
            self._state = "looking"
            self._look()
            return
        self._claim(known)
        if self._state == "ready" and found is not None:
            self._state = "looking"
            self._look()

    # -- the end ---------------------------------------------------------------------------------------------------

    def _refuse(self, reason: Reason, start: int, detail: str) -> None:
        self.refusals.append(Refusal(reason, start, len(self.ids), detail))

    def _stop_waiting(self) -> None:
        if self._waited is not None:
            key, self._waited = self._waited, None
            self.disk.writer.after(lambda: self.disk.index.release(waited(key), self.scope.fingerprint, self.disk.process))

    def settle(self) -> None:
        """The prefix is computed, or will not be: whoever waits for it may look as soon as it is written."""
        self._stop.set()
        self._stop_waiting()
        if self.lease is not None:
            key, self.lease = self.lease, None
            self.disk.settle(key, self.scope.fingerprint)
