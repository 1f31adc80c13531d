"""Pages of a request on their way into the store: admitted if they are finite and the weights hold, withdrawn or quarantined if not.

Knows no other request, and nothing of how the pages were computed.
"""

from __future__ import annotations

from contextlib import suppress

import numpy as np

from .errors import StoreError
from .kv import PAGE_TOKENS, Sequence
from .page_check import CLOSE, alike, finite
from .request import Running
from .runner import Runner
from .store.keys import Scope
from .store.store import Store

LOSSY_CLOSE = 0.5  # relative error of a page stored with fewer bits, with room to spare


class Admission:
    """Between running requests and the store, on the device's one thread."""

    def __init__(self, runner: Runner, store: Store) -> None:
        self._runner = runner
        self._store = store

    def current(self, running: Running) -> bool:
        """Tell whether the weights are those that the request was made for, if that matters to it."""
        known = self._runner.model.fingerprint
        careless = running.asked.reuse == "off" or running.restless
        return careless or known is None or known.holds(running.provenance.fingerprint)

    def holds(self, running: Running) -> bool:
        """Tell whether the weights are still those of the request: before anything of it is admitted."""
        if running.provenance.holds and not self.current(running):
            running.provenance.holds = False
            running.account.record_note("weights, adapters or hooks changed while it ran: nothing more of it is kept")
        return running.provenance.holds

    def admit(self, running: Running, whole_only: bool = False) -> bool:
        """Give the store what the sequence has computed since; only whole pages while it is being filled. False: it is not finite."""
        sequence, scope, near = running.sequence, running.scope, running.ranges
        if scope is None or not isinstance(sequence, Sequence) or running.asked.reuse == "off" or running.suspects is not None:
            return True
        rest = sequence.length % PAGE_TOKENS if whole_only else 0
        if near is not None and near.scope is not None and near.admissible:  # what follows attached segments, in memory only
            known, count = max(near.admitted_tokens, sequence.exact_until), sequence.length - rest
            if not self._finite(running, known, count):
                return False
            if self._put(running, near.scope, known, count, running.numerics):
                near.admitted_tokens = count
        count = min(sequence.length, sequence.exact_until) if scope.precision == "exact" else sequence.length
        count -= count % PAGE_TOKENS if whole_only else 0
        if sequence.state is not None:  # tokens after it can be attached by nobody, and decoded ones have other bits than a prompt's
            count = min(count, sequence.checkpointed)
        if not self._finite(running, running.admitted_tokens, count):
            return False
        if self._put(running, scope, running.admitted_tokens, count, frozenset(running.provenance.numerics)):
            running.admitted_tokens = count
        return True

    def _finite(self, running: Running, known: int, count: int) -> bool:
        assert isinstance(running.sequence, Sequence)
        return count <= known or finite(running.sequence, known, count)

    def _put(self, running: Running, scope: Scope, known: int, count: int, numerics: frozenset[str]) -> bool:
        """Admit the first `count` tokens, if that is more than are known and the weights hold."""
        if count <= known or not self.holds(running):
            return False
        assert isinstance(running.sequence, Sequence)
        pages = running.sequence.pages[: -(-count // PAGE_TOKENS)]
        self._store.admit(scope, running.ids.array(count), pages, numerics, running.asked.layout.prefix_tokens, running.received)
        return True

    def pin(self, running: Running) -> None:
        """Pin the pages of a prompt that is only filled: before another admission could evict them."""
        if running.scope is not None:
            assert isinstance(running.sequence, Sequence)
            known = running.sequence.checkpointed
            running.pinned_pages = self._store.pin(running.scope, running.ids.array(known)) if known else 0

    def withdraw(self, running: Running) -> None:
        """Take back the pages that the request gave to others."""
        sequence, near = running.sequence, running.ranges.scope if running.ranges else None
        if isinstance(sequence, Sequence) and running.plan:
            since = running.plan.prefix_tokens
            for scope in filter(None, (near, running.scope)):
                self._store.forget(scope, running.ids.array(), since, sequence.pages[since // PAGE_TOKENS :])

    def quarantine_suspects(self, running: Running) -> None:
        """The prompt is computed without its suspects: if it is finite now, the first of them that differs is wrong, and quarantined."""
        suspects, sequence, running.suspects = running.suspects, running.sequence, None
        if suspects is None or not isinstance(sequence, Sequence) or not finite(sequence, 0, sequence.length):
            return
        for entry, page, own in zip(suspects.entries, suspects.pages, sequence.pages, strict=False):
            if running.scope is None or entry.scope.fingerprint != running.scope.fingerprint:
                return  # weights have changed since: nothing can be said
            tokens = min(suspects.tokens - entry.first, PAGE_TOKENS)
            if not alike(own, page, tokens, CLOSE if entry.scope.precision == "exact" else LOSSY_CLOSE):
                ids, why = np.concatenate([running.ids.array(entry.first), entry.ids]), "what is computed after it is NaN or infinite"
                with suppress(StoreError):  # memory has dropped it
                    self._store.quarantine(entry.scope, ids, entry.key, why)
                running.account.record_note(f"page {entry.place} of the kept prompt was wrong: {why}; it is not used again")
                return
