"""Segments of one request: found in kept prompts, attached where consent and calibration allow, repaired, looked at, refused.

look      what is new in the prompt; which pages on disk say the same is asked, and noted for later
find      repeated runs behind the exact prefix, in the same namespace and under the same weights
attach    moved to where they are wanted; their heads (halo) are left to be computed
decide    at each junction, once the halo is computed: does it agree with what was stored? which tokens differ most?
unsure    at each greedy choice: is it clear enough to be the choice behind everything computed, too?
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from .calibration import Calibration
from .kv import PAGE_TOKENS, Ahead, Sequence
from .layout.windows import Texts, windows
from .plan import Attach, Repeat
from .request import Request
from .runner import Runner, Source
from .store.keys import Ids, Scope
from .store.segment_prefetch import SegmentQuery
from .store.store import Store
from .types import Layout, Precision, Reason, Refusal

PROBED = 4  # tokens of a halo, the last ones, that are compared with what was stored


class Segments:
    """Segment reuse, on the device's one thread. off: why it is switched off, empty while it is not."""

    def __init__(self, runner: Runner, store: Store) -> None:
        self.runner = runner
        self.store = store
        self.off = ""

    def look(self, request: Request, scope: Scope | None, layout: Layout, texts: Texts) -> None:
        """In the caller's thread: what is new in a prompt, as windows by which pages on disk are found, this one's later."""
        if request.calibration is not None and scope is not None and self.store.signed is not None:
            request.windows = windows(layout, texts, self.known(request, scope))

    def near(self, request: Request, scope: Scope) -> Scope | None:
        """Among whose pages lies what was computed behind segments; None if the request takes no such pages."""
        return None if self.off or request.calibration is None else behind(scope, request.calibration)

    def known(self, request: Request, scope: Scope) -> int:
        """How much of a waiting prompt is in memory, exact or as near as it accepts."""
        scopes = filter(None, (scope, self.near(request, scope)))
        return max(self.store.match(each, request.array(), peek=True).tokens for each in scopes)

    def waits(self, request: Request, scope: Scope | None, ms_per_token: float, wake: Callable[[], None]) -> bool:
        """Whether pages that the prompt repeats are on their way from disk."""
        spec = self.runner.model.spec
        if not request.windows or scope is None or spec is None or self.off or request.calibration is None:
            return False
        stored: Precision = disk.precision if (disk := self.store.disk) else "exact"
        if request.bring is None and stored in request.calibration.precisions:
            known, least, scope = self.known(request, scope), request.calibration.least, replace(scope, precision=stored)
            ids = _attachable(request, request.calibration)
            windows = tuple(window for window in request.windows if window.stop <= len(ids))
            request.bring = self.store.prefetch_segments(SegmentQuery(scope, ids, windows, ms_per_token, spec, known, least), wake)
        if request.bring is not None and request.bring.pending():
            return True
        if request.bring is not None:
            receipt, brought = request.receipt, request.bring
            receipt.refusals += tuple(brought.refusals)
            receipt.notes += brought.notes
            receipt.load_ms += brought.ms
            receipt.disk_bytes += brought.bytes
        request.note, request.windows = request.windows, ()
        return False

    def note(self, request: Request) -> None:
        """The request is answered: what its prompt says and is kept exactly can be found by later processes."""
        sequence = request.sequence
        if isinstance(sequence, Sequence) and request.scope and request.scope.precision == "exact" and request.note and request.kept:
            kept = [window for window in request.note if window.stop <= min(request.kept, request.prompt)]
            self.store.note(request.scope, request.array(request.kept), kept, request.received)

    def find(self, request: Request, prefix_tokens: int) -> list[Repeat]:
        """Runs behind the prefix that may be attached; `request.sources` are where they lie."""
        calibration, scope = request.calibration, request.scope
        if calibration is None or scope is None:
            return []
        if self.off:
            request.receipt.refusals += (Refusal(Reason.DRIFT, prefix_tokens, len(request.ids), self.off),)
            return []
        found = []
        ids = _attachable(request, calibration)
        for run in self.store.repeats(scope, ids, prefix_tokens, calibration.least, calibration.precisions):
            kernels = frozenset().union(*(entry.numerics for entry in run.entries))
            source = Source(run.pages, run.source // PAGE_TOKENS * PAGE_TOKENS, kernels)
            layers = calibration.boundaries if self.runner.model.stepped else ()
            kept = frozenset(layer for layer in layers if source.states(layer, run.source, run.source + run.stop - run.start) is not None)
            request.stands_on(run.entries)
            precision = run.entries[0].scope.precision
            assert precision != "approximate"
            found.append(Repeat(run.start, run.stop, run.shift, kept, precision))
            request.sources.append(source)
        return found

    def attach(self, request: Request) -> None:
        """Put the plan's segments into the request's pages; from the first one on nothing is exact."""
        sequence, plan, calibration = request.sequence, request.plan, request.calibration
        assert isinstance(sequence, Sequence) and plan is not None and calibration is not None and request.scope is not None
        steps = [step for step in plan.steps if isinstance(step, Attach) and step.source == "segment"]
        held = bool(calibration.probe or (calibration.share and self.runner.model.stepped))
        self.runner.attach(sequence, steps, request.sources, request.scope.regime, held)
        receipt = request.receipt
        receipt.precision, receipt.segments = "approximate", plan.segments
        receipt.segment_tokens = plan.segment_tokens
        receipt.halo_tokens = sum(segment.halo_tokens for segment in plan.segments)
        request.near = self.near(request, request.scope)
        self.decide(request)

    def decide(self, request: Request) -> None:
        """If a junction is reached, look at it and go on: with the segment, with less of it, or without.

        Where none is left and what it would have stood behind is exact, all that follows is.
        """
        sequence = request.sequence
        while isinstance(sequence, Sequence) and (junction := sequence.junction) is not None:
            spans = [span for span in sequence.ahead if span.run == junction.run]
            if why := self._disagrees(request, sequence, junction):
                self._refuse(request, spans, why)
                spans = []
            elif request.calibration is not None and request.calibration.share and self.runner.model.stepped:
                spans = self._repair(request, sequence, spans, request.calibration.share)
            if not request.receipt.segments and sequence.exact_until == sequence.length:
                request.receipt.precision, request.near, request.sources = "exact", None, []
            sequence.settle([replace(span, held=False) for span in spans])

    def unsure(self, request: Request, logits: torch.Tensor) -> bool:
        """Whether the next choice is too close to be made behind moved text: what is kept here may have tipped it."""
        margin = request.calibration.margin if request.calibration and request.near and not request.forced else 0.0
        if not margin or (gap := request.sampler.gap(logits, request.ids)) >= margin:
            return False
        why = f"first choices behind token {len(request.ids)} are {gap:.3f} nats apart, asked for are {margin:.3f}"
        self.renounce(request, Reason.UNSURE, why)
        return True

    def renounce(self, request: Request, reason: Reason, why: str) -> None:
        """Make the request ready to begin anew without segments, with the ids that it has."""
        assert request.sequence is not None
        receipt = request.receipt
        receipt.refusals = tuple(known for known in receipt.refusals if known.reason != Reason.APPROXIMATE)
        receipt.refusals += (Refusal(reason, 0, len(request.ids), why),)
        request.sequence.close()
        request.calibration = None

    def settle(self, request: Request) -> None:
        """The account of a request that has begun anew: its prompt's exact prefix is cached, the rest computed."""
        assert request.plan is not None
        receipt = request.receipt
        receipt.cached_tokens = min(request.plan.cached_tokens, request.prompt - 1)
        receipt.computed_tokens = request.prompt - receipt.cached_tokens
        receipt.segments, receipt.segment_tokens, receipt.halo_tokens = (), 0, 0

    def _disagrees(self, request: Request, sequence: Sequence, junction: Ahead) -> str:
        assert request.calibration is not None and request.plan is not None and request.scope is not None
        segment = request.plan.segments[junction.run]
        tokens, bound = min(PROBED, junction.start - segment.start), request.calibration.probe
        if not bound or not tokens:
            return ""
        source = request.sources[junction.run]
        found = self.runner.differs(sequence, source, junction.start - tokens, junction.start, segment.shift, request.scope.regime)
        return "" if found <= bound else f"keys of its recomputed head differ by {found:.3f} from the stored ones, allowed are {bound:.3f}"

    def _refuse(self, request: Request, spans: list[Ahead], why: str) -> None:
        assert request.plan is not None
        receipt, segment = request.receipt, request.plan.segments[spans[0].run]
        receipt.refusals += (Refusal(Reason.PROBE, segment.start, segment.stop, why),)
        receipt.segments = tuple(other for other in receipt.segments if other != segment)
        receipt.segment_tokens -= segment.whole_tokens
        receipt.halo_tokens -= segment.halo_tokens
        receipt.cached_tokens -= segment.whole_tokens
        receipt.computed_tokens += segment.whole_tokens

    def _repair(self, request: Request, sequence: Sequence, spans: list[Ahead], share: float) -> list[Ahead]:
        """The spans without the share of their whole tokens that deviates most: these are left to be computed."""
        assert request.scope is not None
        left: list[Ahead] = []
        for span in spans:
            if span.entry is not None or not (count := round(share * (span.stop - span.start))):
                left.append(span)
                continue
            ids = request.ids[span.start : span.stop]
            deviation = self.runner.deviations(sequence, ids, span.start, request.scope.regime)
            at = span.start
            for place in sorted((deviation.topk(count).indices + span.start).tolist()):
                left += [replace(span, start=at, stop=place)] if at < place else []
                at = place + 1
            left += [replace(span, start=at)] if at < span.stop else []
            request.receipt.segment_tokens -= count
            request.receipt.cached_tokens -= count
            request.receipt.computed_tokens += count
        return left


def _attachable(request: Request, calibration: Calibration) -> Ids:
    """The prompt up to its tail, and one token more: of what is looked up, the last one is always computed.

    The tail begins with the last turn, or in it; somewhere in a prompt whose turns are not known.
    """
    ids = request.array()
    turn = max((span.start for span in request.receipt.spans if span.kind == "turn"), default=0)
    return ids[: max(turn, len(ids) - calibration.tail) + 1]


def behind(scope: Scope, calibration: Calibration) -> Scope:
    """Among whose pages lies what was computed behind segments.

    Each repair has its own, as each rotary regime has: what one calibration lets pass may be too far off for another.
    """
    return replace(scope, precision="approximate", regime=f"{scope.regime} {calibration.repair}")


def numerics(request: Request) -> frozenset[str]:
    """Digests of all kernels that had a part in what a request stands behind, its segments' own included."""
    return frozenset(request.numerics).union(*(source.numerics for source in request.sources))
