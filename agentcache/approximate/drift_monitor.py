"""Segment reuse under observation: one in N requests that were served with segments is computed again in idle time. Knows no text.

Compared are the distributions of the last tokens of its prompt, after the pages that served it and after exact ones. Where they drift
beyond what the calibration allows, segment reuse is switched off for this engine, and says so.
"""

from __future__ import annotations

import logging
import warnings
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import torch

from ..calibration import Calibration
from ..counters import Stats, by_family, observed
from ..divergence import divergence
from ..errors import FAULTS, ReuseWarning
from ..kv import PAGE_TOKENS, Page, Sequence
from ..request import Running
from ..runner import Runner, Work
from ..store.keys import Ids, Scope
from ..store.store import Store

log = logging.getLogger("agentcache")

QUEUED = 2  # requests that may wait for an idle moment; more are not sampled
CHUNK = 128  # tokens computed at once: a request that arrives waits for no more
COMPARED = 8  # last tokens of the prompt whose next-token distributions are compared
ENOUGH = 3  # comparisons before anything is concluded
REMEMBERED = 16  # comparisons that the mean is taken over


@dataclass(slots=True)
class _Check:
    scope: Scope
    ids: Ids
    covered: int  # tokens that its scope is about
    pages: list[Page]
    calibration: Calibration
    exact: Sequence
    near: Sequence
    attached: bool = False
    kl: float = 0.0
    agreed: int = 0


class DriftMonitor:
    """Requests waiting to be checked. All calls on the device's thread.

    switch_off: called once, with the reason, when answers drift. checked: how many were compared.
    """

    def __init__(self, runner: Runner, store: Store, switch_off: Callable[[str], None]) -> None:
        self.runner = runner
        self.store = store
        self._switch_off: Callable[[str], None] | None = switch_off
        self.checked = 0
        self._served = 0
        self._counts: Counter[tuple[str, str]] = Counter()
        self._waiting: deque[_Check] = deque()
        self._seen: dict[tuple[str, str], deque[float]] = {}  # mean KL per token in nats, by what answered and its repair

    @property
    def pending(self) -> bool:
        """Tell whether an idle moment could be used."""
        return bool(self._waiting)

    def counts(self) -> Stats:
        """A histogram of KL per token, over all comparisons."""
        return by_family(sorted(self._counts.items()))

    def sample(self, running: Running, calibration: Calibration) -> None:
        """Queue one in `watch_one_in` requests that have segments in or before their prompt, while their sequence is still there."""
        spec, sequence, prompt = self.runner.model.spec, running.sequence, running.asked.prompt_tokens
        if running.scope is None or spec is None:
            return
        due = self._served % calibration.watch_one_in == 0
        self._served += 1
        enough = isinstance(sequence, Sequence) and COMPARED < prompt <= sequence.length
        if not due or not enough or len(self._waiting) >= QUEUED:
            return
        assert isinstance(sequence, Sequence)
        ids = running.ids.array(prompt).copy()
        pages = sequence.pages[: -(-len(ids) // PAGE_TOKENS)]
        exact, near = (Sequence(spec, adapter=sequence.adapter, acts_from=sequence.acts_from) for _ in range(2))
        self._waiting.append(_Check(running.scope, ids, running.covered_tokens, pages, calibration, exact, near))

    def step(self) -> None:
        """Compute a little of the oldest check."""
        if not self._waiting:
            return
        check = self._waiting[0]
        self.runner.follow_threads()
        try:
            done = self._go_on(check)
        except FAULTS:  # no memory for it, or other weights: another request will be checked
            self._drop()
            return
        if done:
            self._conclude(check)
            self._drop()  # last: once nothing is pending, the result is there

    def _go_on(self, check: _Check) -> bool:
        last = len(check.ids) - COMPARED
        if not check.attached:
            check.attached = True
            found = self.store.match(check.scope, check.ids[: min(last, check.covered) + 1], peek=True)
            if found.tokens and len(found.pages) * PAGE_TOKENS >= found.tokens:
                check.exact.attach(list(found.pages), found.tokens)
            check.near.attach(check.pages, last)
        at = check.exact.length
        if at < last:
            self._run(Work(check.exact, check.ids[at : min(at + CHUNK, last)].tolist(), check.scope.regime, False, check.scope.weights))
            return False
        token = [int(check.ids[at])]
        about = (check.scope.regime, True, check.scope.weights)
        one, other = self._run(Work(check.exact, token, *about), Work(check.near, token, *about))
        assert one is not None and other is not None
        check.kl += divergence(one, other)
        check.agreed += int(one.argmax() == other.argmax())
        return at + 1 == len(check.ids)

    def _run(self, *works: Work) -> list[torch.Tensor | None]:
        outcomes = self.runner.run(list(works))
        for outcome in outcomes:
            if outcome.error is not None or outcome.weights_changed:
                raise RuntimeError(str(outcome.error or "weights changed"))
        return [outcome.logits for outcome in outcomes]

    def _drop(self) -> None:
        check = self._waiting.popleft()
        check.exact.close()
        check.near.close()

    def _conclude(self, check: _Check) -> None:
        self.checked += 1
        self._counts += observed("watch_kl", check.kl / COMPARED)
        seen = self._seen.setdefault((check.calibration.fingerprint, check.calibration.repair), deque(maxlen=REMEMBERED))
        seen.append(check.kl / COMPARED)
        log.info("segment reuse: KL %.2e nats per token, %d of %d first choices equal", check.kl / COMPARED, check.agreed, COMPARED)
        mean, bound = sum(seen) / len(seen), check.calibration.kl
        if self._switch_off is None or len(seen) < ENOUGH or mean <= bound:
            return
        why = f"mean KL of {len(seen)} sampled prompts is {mean:.3g} nats per token, calibrated is {bound:.3g}"
        self._switch_off(why)
        self._switch_off = None  # once
        with suppress(ReuseWarning):  # an error where warnings are errors: not on the thread that serves all requests
            warnings.warn(f"segment reuse is switched off: {why}; run `agentcache calibrate` again", ReuseWarning, stacklevel=2)
