"""Audit of hits: one in N exact hits from disk is computed again while nothing else runs, and compared. Knows no requests' text.

What differs is quarantined, on disk too, and said: a warning now, a counter for `agentcache stats`.
"""

from __future__ import annotations

import random
import warnings
from collections import deque
from contextlib import suppress
from dataclasses import dataclass

from .errors import StoreError, StoreWarning
from .kv import PAGE_TOKENS, Page, Sequence
from .page_check import CLOSE, alike
from .request import Running
from .runner import FAULTS, Runner, Work
from .store.keys import Ids, Scope
from .store.store import Store

QUEUED = 4  # hits that may wait for an idle moment; more are not sampled
CHUNK = 32  # tokens computed at once: a request that arrives waits for no more, unless a state's bits depend on pieces


@dataclass(slots=True)
class _Check:
    scope: Scope
    ids: Ids
    pages: tuple[Page, ...]
    keys: tuple[bytes, ...]
    bitwise: bool
    numerics: str
    sequence: Sequence


class HitAudit:
    """Hits waiting to be checked. All calls on the device's thread.

    checks: how many came to an end. checked_tokens: compared so far. wrong_pages: found by them.
    """

    def __init__(self, runner: Runner, store: Store) -> None:
        self.runner = runner
        self.store = store
        self.checks = self.checked_tokens = self.wrong_pages = 0
        self._waiting: deque[_Check] = deque()

    @property
    def pending(self) -> bool:
        """Tell whether an idle moment could be used."""
        return bool(self._waiting)

    def sample(self, running: Running) -> None:
        """Queue one in `check_one_in` requests that have just been attached to pages from disk."""
        disk, receipt, spec, scope = self.store.disk, running.receipt, self.runner.model.spec, running.scope
        if disk is None or spec is None or not receipt.disk_tokens or scope is None or scope.precision != "exact":
            return
        if len(self._waiting) >= QUEUED or not due(disk.options.check_one_in):
            return
        count = running.admitted_tokens  # without tokens from other positions
        found = self.store.tree.match(scope, running.ids.array(count + 1), peek=True)
        if len(found.pages) * PAGE_TOKENS >= count:
            own, numerics = running.sequence, self.runner.model.numerics
            assert isinstance(own, Sequence) and numerics is not None
            ids, keys = running.ids.array(count).copy(), tuple(entry.key for entry in found.entries)
            marks = frozenset(at * PAGE_TOKENS + slots for at, page in enumerate(found.pages) for slots in page.checkpoints)
            state = self.runner.model.new_state()
            sequence = Sequence(spec, state=state, cuts=own.cuts, marks=marks, adapter=own.adapter, acts_from=own.acts_from)
            self._waiting.append(_Check(scope, ids, found.pages, keys, receipt.bitwise, numerics.digest, sequence))

    def step(self) -> None:
        """Compute a few tokens of the oldest check; compare each page once it is computed."""
        if not self._waiting:
            return
        check = self._waiting[0]
        self.runner.follow_threads()
        numerics = self.runner.model.numerics
        if check.bitwise and (numerics is None or numerics.digest != check.numerics):
            self._drop()  # other kernels than at the time of the hit: nothing could be said
            return
        start = check.sequence.length
        page = start // PAGE_TOKENS
        stop = min(len(check.ids), (page + 1) * PAGE_TOKENS)
        if (state := check.sequence.state) is None or state.alignment == 1:
            stop = min(stop, start + CHUNK)
        if state is not None:  # the pieces of the request: others would give other bits
            stop = min(stop, check.sequence.next_cut() or stop)
        count = stop - start
        try:
            ids, scope = check.ids[start : start + count].tolist(), check.scope
            [outcome] = self.runner.run([Work(check.sequence, ids, scope.regime, False, scope.weights)])
        except FAULTS:
            outcome = None
        if outcome is None or outcome.error is not None or outcome.weights_changed:
            self._drop()  # no memory for it, or other weights: another hit will be checked
            return
        done = start + count
        if done % PAGE_TOKENS == 0 or done == len(check.ids):
            self.checked_tokens += done - page * PAGE_TOKENS
            close = 0.0 if check.bitwise else CLOSE
            if not alike(check.sequence.pages[page], check.pages[page], done - page * PAGE_TOKENS, close):
                self._quarantine(check, done, page) if self._weights_hold(check) else self._drop()
                return
        if done == len(check.ids):
            self.checks += 1
            self._count(checked=1)
            self._drop()

    def counts(self) -> dict[str, dict[str, float]]:
        """Checks of hits that were run, tokens compared, and pages found wrong."""
        return {"audits": {"run": self.checks, "failed": self.wrong_pages, "tokens": self.checked_tokens}}

    def _weights_hold(self, check: _Check) -> bool:
        """Tell whether the weights are still those of the hit: else the pages are right and the comparison is not."""
        known = self.runner.model.fingerprint
        with suppress(*FAULTS):
            return known is not None and known.sampled() == check.scope.weights
        return False

    def _drop(self) -> None:
        self._waiting.popleft().sequence.close()

    def _quarantine(self, check: _Check, tokens: int, page: int) -> None:
        why = f"page {page} of a prompt's KV on disk is not what computing it gives"
        self._drop()
        try:
            self.store.quarantine(check.scope, check.ids[:tokens], check.keys[page], why)
            self._count(wrong=1)
        except StoreError as error:
            why += f"; it could not be quarantined: {error}"
        with suppress(StoreWarning):  # an error where warnings are errors: not on the thread that serves all requests
            warnings.warn(f"{why}: it is not used again; `agentcache verify --fix` removes it", StoreWarning, stacklevel=2)
        self.checks += 1
        self.wrong_pages += 1

    def _count(self, **counts: int) -> None:
        if disk := self.store.disk:
            disk.writer.after(lambda: disk.index.add_counters({f"audit_{name}": count for name, count in counts.items()}))


def due(every: int) -> bool:
    """Tell whether a hit is the one in so many that is recomputed, by chance: many processes end before their Nth. 0: none is."""
    return bool(every) and random.randrange(every) == 0
