"""Segments of one request: found in kept prompts, attached where consent and calibration allow, repaired, checked, refused.

windows   the new text of a prompt; stored pages that say the same are asked for, and this prompt's are noted for later
propose   repeated runs after the exact prefix, in the same namespace, over the same weights: of the request's own adapter, or another's
attach    moved to where they are wanted; their heads (halo) are left to be computed
advance   at each junction, once the halo is computed: does it agree with the stored keys? which tokens differ most?
doubt     at each greedy choice: is it clear enough to be the choice after everything computed, too?
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import torch

from ..ahead import Ahead
from ..calibration import Calibration
from ..errors import CalibrationError, ConfigError
from ..kv import Sequence as PageTable
from ..kv import stored_states
from ..plan import Attach
from ..request import Running
from ..scheduler import Scheduler
from ..store.deletion_log import Moment
from ..store.entry import Match
from ..store.keys import Ids, Scope, as_ids
from ..types import Layout, Precision, Reason, Refusal, Reuse, Segment, check_reuse
from .calibrations import Calibrations, Given
from .drift_monitor import DriftMonitor
from .minhash import TAU
from .minhash_index import MinHashIndex
from .moved_pages import attach, run_below, stored_keys
from .ngram_index import Run, stored_repeats
from .question_attention import most_attended
from .segment_prefetch import SegmentPrefetch, SegmentQuery, prefetch
from .windows import TokenTexts, Window, windows

if TYPE_CHECKING:
    from ..model.adapters import Adapter
    from ..model.hf import HFModel

PROBED = 4  # tokens of a halo, the last ones, that are compared with the stored ones


def ranges(runs: Sequence[tuple[Run, frozenset[int]]], calibration: Calibration) -> tuple[list[Attach], list[Segment]]:
    """Decide how much of each run is taken, and from which layer on the rest is computed. With each run: layers whose inputs it holds."""
    steps, segments = [], []
    for number, (run, kept) in enumerate(runs):
        counts = {"whole": 0, "resumed": 0, "halo": 0}
        for start, stop, layer in calibration.parts(run.stop - run.start, kept):
            kind = "halo" if not layer else "whole" if layer == calibration.layers else "resumed"
            counts[kind] += stop - start
            if layer:
                taken = start + run.start, stop + run.start, run.shift, None if kind == "whole" else layer
                steps.append(Attach(*taken, number, run.pages, run.base))
        counted = counts["whole"], counts["resumed"], counts["halo"]
        segments.append(Segment(run.start, run.stop, run.shift, *counted, run.precision, run.entries[0].scope.adapter))
    return steps, segments


class Segments:
    """Segment reuse of one engine, from the first request on whose caller consents to it.

    given: the engine's calibration, or its path. off: why segment reuse is switched off; empty: it is on. monitor: switches it off.
    """

    def __init__(self, scheduler: Scheduler, tokenizer: Any, given: Given, model: str) -> None:
        self.runner, self.store, self._lifecycle = scheduler.runner, scheduler.store, scheduler.lifecycle
        self.off = ""
        self.monitor = DriftMonitor(self.runner, self.store, self._switch_off)
        self._text: MinHashIndex | None = None
        folder, dtype = self.store.disk.folder.path if self.store.disk else None, str(self.runner.model.dtype).removeprefix("torch.")
        self._texts, self._calibrations = TokenTexts(tokenizer), Calibrations(given, folder, model, dtype)
        scheduler.idle.append(self.monitor)

    @property
    def text(self) -> MinHashIndex | None:
        """The index over text of prompts on disk; None where there is no disk, or none any more."""
        return self._text if self.store.disk else None

    def _open_index(self, tau: float | None) -> None:
        """Open the index over text of prompts, where there is a disk, or lower its `tau`. None: the present one."""
        if self._text is not None and tau is not None:
            self._text.retune(tau)
        elif self._text is None and self.store.disk is not None:
            self._text = MinHashIndex(self.store, tau or TAU)

    def index_text(self, layout: Layout, scope: Scope, received: Moment) -> None:
        """Index the text of a pinned prefix: later processes, and requests after its eviction from memory, find it at other positions."""
        if self.text is not None:
            self.text.add(scope, as_ids(layout.ids), windows(layout, partial(self._texts, namespace=scope.namespace)), received)

    def _switch_off(self, why: str) -> None:
        self.off = why
        self.store.clear(grade="approximate")  # pages after segments: no request takes them any more

    def calibrate(self, given: Calibration | None = None, adapter: Adapter | None = None) -> Sequence[Calibration]:
        """The calibrations of the base or an adapter, or the one given, with model and store prepared for them.

        Empty if the model cannot be paged: there is nothing to attach. CalibrationError: there is none.
        """
        model = self.runner.model
        if given is not None and not isinstance(given, Calibration):
            check_reuse(given)
        if model.fingerprint is None or model.spec is None:
            return ()
        if model.unrotated is None:
            raise ConfigError(
                f"reuse='approximate': keys of {model.support.name!r} cannot be re-indexed to other positions; use reuse='exact'"
            )
        known = self._calibrations.of(model.fingerprint.whole, given, adapter, dict(model.adapters))
        for one in known:
            model.keep_boundaries(one.boundaries, f"segments {one.adapters} {'given' if given else ''}")  # beside the engine's own
        self._open_index(None if given else known[0].tau)
        return known

    def begin(self, running: Running, consent: Reuse | Calibration | None = None) -> SegmentReuse | None:
        """Prepare a request, in the caller's thread. consent: the request's own, perhaps a calibration; None: its engine's, under which an
        adapter without a calibration takes no segments (returns None)."""
        asked, given = running.asked, None if isinstance(consent, str) else consent
        try:
            calibrations = self.calibrate(given, asked.adapter)
        except CalibrationError as error:
            if consent is not None or asked.adapter is None:
                raise
            running.account.record_note(str(error))
            return None
        if not calibrations:
            return None
        reuse = SegmentReuse(self, running, calibrations)
        scope = self._lifecycle.matching.scope(running)
        if scope is not None and self.text is not None:
            reuse.windows = windows(asked.layout, partial(self._texts, namespace=asked.namespace), reuse.known_tokens(scope))
        return reuse


class SegmentReuse:
    """Segment reuse of one request (agentcache.attached_ranges). calibrations: those it may use, one for each source of pages; none once
    it is computed instead. calibration: the one in use.

    windows: the new text of its prompt, until the disk was searched for it; `_searched`: the same text afterwards.
    """

    def __init__(self, owner: Segments, running: Running, calibrations: Sequence[Calibration]) -> None:
        self.scope: Scope | None = None
        self.admitted_tokens = 0
        self._calibrations, self.calibration = calibrations, calibrations[0]
        self.windows: Sequence[Window] = ()
        self._searched: Sequence[Window] = ()
        self._owner, self._running = owner, running
        self._model, self._store = owner.runner.model, owner.store
        self._steps: list[Attach] = []
        self._kernels: list[frozenset[str]] = []
        self._segments: list[Segment] = []
        self._attended: list[int] = []  # positions that the question attends to most
        self._prefetch: SegmentPrefetch | None = None

    @property
    def admissible(self) -> bool:
        """Tell whether pages after attached segments may be kept."""
        return not self._owner.off

    @property
    def numerics(self) -> frozenset[str]:
        """Digests of the kernels that computed the attached segments."""
        return frozenset[str]().union(*self._kernels)

    # -- finding ---------------------------------------------------------------------------------------------------

    def _near(self, scope: Scope) -> list[tuple[int, Calibration]]:
        """Count the tokens of the prompt in memory after segments, under each calibration; empty if it takes no such pages."""
        ids, known = self._running.covered_ids, () if self._owner.off else self._calibrations
        return [(self._store.match(approximate_scope(scope, one), ids, peek=True).tokens, one) for one in known]

    def known_tokens(self, scope: Scope) -> int:
        """Count the tokens of a waiting prompt that are in memory, exact or as near as the request accepts."""
        exact = self._store.match(scope, self._running.covered_ids, peek=True).tokens
        return max([exact, *(tokens for tokens, _ in self._near(scope))])

    def pending(self, scope: Scope | None, ms_per_token: float, wake: Callable[[], None]) -> bool:
        """Tell whether pages that the prompt repeats are on their way from disk."""
        spec, calibration = self._model.spec, self.calibration  # from disk come pages of its first source
        if not self.windows or scope is None or spec is None or self._owner.off or not self._calibrations:
            return False
        stored: Precision = disk.written if (disk := self._store.disk) else "exact"
        text = self._owner.text
        if self._prefetch is None and text is not None and stored in calibration.precisions:
            known, scope = self.known_tokens(scope), replace(source_scope(scope, calibration), precision=stored)
            ids = self._attachable(calibration)
            wanted = tuple(window for window in self.windows if window.stop <= len(ids))
            self._prefetch = prefetch(text, SegmentQuery(scope, ids, wanted, ms_per_token, spec, known, calibration.min_tokens), wake)
        if (reading := self._prefetch) is not None:
            if reading.pending():
                return True
            self._running.account.record_prefetch(reading.ms, reading.bytes, reading.refusals, reading.notes)
        self._searched, self.windows = self.windows, ()
        return False

    def match(self, scope: Scope, tokens: int) -> Match | None:
        """Find a prefix longer than `tokens` among pages that follow segments; the request goes on from it."""
        longest, calibration = max(self._near(scope), key=itemgetter(0), default=(0, self.calibration))
        if longest <= tokens:
            return None
        near = approximate_scope(scope, calibration)
        found = self._store.match(near, self._running.covered_ids)
        if found.tokens <= tokens:
            return None
        self.scope, self.admitted_tokens, self.calibration = near, found.tokens, calibration
        return found

    def propose(self, prefix_tokens: int, below: Match | None) -> Sequence[Attach]:
        """Ranges after the prefix to attach, from the source that has most of them; none if they spare no more than `below` does."""
        running = self._running
        if not self._calibrations or running.scope is None:
            return ()
        if self._owner.off:
            running.account.record_refusals([Refusal(Reason.DRIFT, prefix_tokens, len(running.ids), self._owner.off)])
            return ()
        options = [(self._runs(one, prefix_tokens), one) for one in ([self.calibration] if self.scope else self._calibrations)]
        runs, calibration = max(options, key=lambda option: sum(run.stop - run.start for run in option[0]))
        spared = (below.tokens - prefix_tokens) * (below.layers or 0) / calibration.layers if below is not None else 0
        if sum(run.stop - run.start for run in runs) <= spared:
            return ()
        self.calibration, found = calibration, []
        layers = calibration.boundaries if self._model.stepped else ()
        for run in runs:
            end = run.source + run.stop - run.start
            held = frozenset(layer for layer in layers if stored_states(run.pages, run.base, layer, run.source, end) is not None)
            found.append((run, held))
            running.provenance.attach(run.entries)
            self._kernels.append(run.numerics)
        self._steps, self._segments = ranges(found, calibration)
        return self._steps

    def _runs(self, calibration: Calibration, since: int) -> list[Run]:
        """Runs of the prompt after its first `since` tokens that repeat cached pages of a calibration's source."""
        assert self._running.scope is not None
        ids, scope = self._attachable(calibration), source_scope(self._running.scope, calibration)
        return stored_repeats(self._store, scope, ids, since, calibration.min_tokens, calibration.precisions)

    def _attachable(self, calibration: Calibration) -> Ids:
        """The prompt up to its tail, and one token more: the last one of a lookup is always computed.

        The tail begins with the last turn, or in it; somewhere in a prompt whose turns are not known.
        """
        ids = self._running.ids.array()
        turn = max((span.start for span in self._running.asked.layout.spans if span.kind == "turn"), default=0)
        return ids[: min(max(turn, len(ids) - calibration.tail), self._running.covered_tokens) + 1]

    # -- attaching -------------------------------------------------------------------------------------------------

    def attach(self) -> None:
        """Put the proposed ranges into the request's pages; from the first one on nothing is exact."""
        running, calibration = self._running, self.calibration
        if not self._steps:
            return
        assert isinstance(running.sequence, PageTable) and running.scope is not None
        held = bool(calibration.probe or (calibration.share and self._model.stepped))
        regime = running.scope.regime
        attach(self._model, running.sequence, self._steps, regime, held)
        if calibration.share_by == "question" and calibration.share and self._model.stepped:
            self._attended = most_attended(self._model, running.sequence, running.ids.all, self._steps, regime, calibration.share)
        running.account.record_segments(tuple(self._segments))
        self.scope = approximate_scope(running.scope, calibration)
        self.advance()

    def advance(self) -> None:
        """Check the junction that was reached, if one was, and go on: with the segment, with less of it, or without it.

        If no segment is left and the sequence is exact so far, it is exact from here on.
        """
        running, calibration = self._running, self.calibration
        while isinstance(running.sequence, PageTable) and (junction := running.sequence.junction) is not None:
            sequence = running.sequence
            spans = [span for span in sequence.ahead if span.run == junction.run]
            if why := self._disagrees(sequence, junction):
                segment = self._segments[junction.run]
                running.account.record_refused_segment(segment, Refusal(Reason.PROBE, segment.start, segment.stop, why))
                spans = []
            elif calibration.share and self._model.stepped:
                spans = self._repair(sequence, spans, calibration)
            if not running.receipt.segments and sequence.exact_until == sequence.length:
                self.scope, self._kernels = None, []
            sequence.resolve([replace(span, held=False) for span in spans])

    def _disagrees(self, sequence: PageTable, junction: Ahead) -> str:
        assert self._running.scope is not None
        segment, bound = self._segments[junction.run], self.calibration.probe
        tokens = min(PROBED, junction.start - segment.start)
        if not bound or not tokens:
            return ""
        step, regime = next(step for step in self._steps if step.run == junction.run), self._running.scope.regime
        found = _difference(self._model, sequence, step, junction.start - tokens, junction.start, regime)
        return "" if found <= bound else f"keys of its recomputed head differ by {found:.3f} from the stored ones, allowed are {bound:.3f}"

    def _repair(self, sequence: PageTable, spans: list[Ahead], calibration: Calibration) -> list[Ahead]:
        """The spans without the tokens that are chosen to be computed again."""
        running = self._running
        left: list[Ahead] = []
        for span in spans:
            if span.entry is not None:
                left.append(span)
                continue
            places = self._chosen(sequence, span, calibration)
            at = span.start
            for place in places:
                left += [replace(span, start=at, stop=place)] if at < place else []
                at = place + 1
            left += [replace(span, start=at)] if at < span.stop else []
            if places:
                running.account.record_recomputed(len(places))
        return left

    def _chosen(self, sequence: PageTable, span: Ahead, calibration: Calibration) -> list[int]:
        """Positions of a whole span that are computed again, in order."""
        running = self._running
        if calibration.share_by == "question":
            return [place for place in self._attended if span.start <= place < span.stop]
        if not (count := round(calibration.share * (span.stop - span.start))):
            return []
        assert running.scope is not None
        deviation = _deviations(self._model, sequence, running.ids.all[span.start : span.stop], span.start, running.scope.regime)
        return sorted((deviation.topk(count).indices + span.start).tolist())

    # -- choosing and ending ---------------------------------------------------------------------------------------

    def doubt(self, logits: torch.Tensor) -> str:
        """Say why the next choice is too close to be made after moved text, which may have decided it; empty if it is clear."""
        running, decoding = self._running, self._running.decoding
        margin = self.calibration.margin if self._calibrations and self.scope and not decoding.forced else 0.0
        if not margin or (gap := decoding.sampler.gap(logits, running.ids.all)) >= margin:
            return ""
        return f"first choices after token {len(running.ids)} are {gap:.3f} nats apart, asked for are {margin:.3f}"

    def refusal(self) -> Refusal:
        """The refusal of all tokens after the exact ones."""
        running = self._running
        exact = running.sequence.exact_until if running.sequence else 0
        detail = "after segments from other positions: near the exact values, not equal"
        return Refusal(Reason.APPROXIMATE, exact, len(running.ids), detail)

    def detach(self, for_good: bool = False) -> None:
        """Forget the attached ranges: the sequence begins anew. for_good: the request is computed from now on."""
        if for_good:
            self._running.account.retract((Reason.APPROXIMATE,))
        self.scope, self.admitted_tokens, self._kernels, self._steps = None, 0, [], []
        self._calibrations = () if for_good else self._calibrations

    def answered(self) -> None:
        """Index the exactly cached text of the prompt for later processes, and let the drift monitor sample the request."""
        running, kept = self._running, self._running.admitted_tokens
        if self.scope is not None and self._calibrations:
            self._owner.monitor.sample(running, self.calibration)
        if isinstance(running.sequence, PageTable) and running.scope and kept and (text := self._owner.text):
            known = [window for window in self._searched if window.stop <= min(kept, running.asked.prompt_tokens)]
            text.add(running.scope, running.ids.array(kept), known, running.received)

    def close(self) -> None:
        """Stop reading pages from disk."""
        if self._prefetch is not None:
            self._prefetch.close()


def approximate_scope(scope: Scope, calibration: Calibration) -> Scope:
    """The scope of pages that were computed after segments.

    Each repair has its own, as each rotary regime has: pages that keep one calibration's bounds may break another's.
    """
    return replace(scope, precision="approximate", regime=f"{scope.regime} {calibration.repair}")


def source_scope(scope: Scope, calibration: Calibration) -> Scope:
    """The scope of the pages that segments are taken from."""
    return replace(scope, fingerprint=calibration.source or scope.fingerprint)


@torch.inference_mode()
def _difference(model: HFModel, sequence: PageTable, step: Attach, start: int, stop: int, regime: str) -> float:
    """Distance of the keys computed for positions [start, stop) from the stored ones, re-indexed: relative, in the middle layer."""
    layer = sequence.spec.layers // 2
    computed = sequence.read(layer, start, stop)[0].permute(1, 2, 0).float()
    return float((computed - stored_keys(model, step, layer, start, stop, regime)).norm() / computed.norm())


@torch.inference_mode()
def _deviations(model: HFModel, sequence: PageTable, ids: list[int], start: int, regime: str) -> torch.Tensor:
    """Distance of layer 1's values, of tokens ahead from `start` on, from those that this context gives: relative, [tokens].

    Runs two layers over them, which leaves the true keys and values there.
    """
    stop = start + len(ids)
    stored = sequence.read(1, start, stop)[1].float()
    run_below(model, sequence, ids, start, regime, layers=2)
    found = sequence.read(1, start, stop)[1].float()
    return (found - stored).flatten(1).norm(dim=1) / found.flatten(1).norm(dim=1).clamp_min(1e-9)
