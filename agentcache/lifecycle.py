"""The life of one request on the device: attached to what is known, filled, decoded, kept for others, ended. Knows no other request."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import torch

from .errors import FAULTS, AgentCacheError, EngineClosedError, GenerationError, NonFiniteLogitsError, WeightsChangedError
from .finite import accuse, finite
from .kv import PAGE_TOKENS, Sequence
from .model.sampling import logprob_of
from .plan import make
from .receipt import Receipt
from .request import Chunk, Done, Progress, Request
from .runner import Outcome, Runner, StockSequence
from .segments import Segments, numerics
from .store.entry import Match
from .store.keys import Scope
from .store.page_prefetch import PageQuery
from .store.store import Store
from .types import FinishReason, Precision, Reason, Refusal

RENEWALS = 5  # a request begins anew so often because weights changed
OF_BITS = (Reason.APPROXIMATE, Reason.LOSSY, Reason.NUMERICS, Reason.NOT_ROW_PURE)  # refusals that say how near a prompt is to exact


class Lifecycle:
    """What happens to a request, on the device's one thread."""

    def __init__(self, runner: Runner, store: Store) -> None:
        self.runner = runner
        self.store = store
        self.segments = Segments(runner, store)

    # -- attaching -------------------------------------------------------------------------------------------------

    def scope(self, request: Request, length: int) -> Scope | None:
        """Among whose pages a sequence of this length finds its own; None if its state cannot be paged."""
        model = self.runner.model
        regime = model.rotary.regime(length) if model.rotary and model.support.paged else None
        refused = model.fingerprint is not None and model.fingerprint.refusal
        return None if regime is None or refused else Scope(request.namespace, request.fingerprint, regime)

    def waits(self, request: Request, ms_per_token: float, wake: Callable[[], None]) -> bool:
        """Whether the request should not start yet: its pages are on their way from disk, or another process computes them."""
        if not request.looked:
            request.looked = True
            scope, spec, disk = self.scope(request, len(request.ids)), self.runner.model.spec, self.store.disk
            if scope is not None and spec is not None and disk is not None and request.reuse:
                precision: Precision = disk.precision if request.lossy else "exact"
                scope = replace(scope, precision=precision)
                wanted = PageQuery(scope, request.array(), ms_per_token, spec, request.prefix_tokens)
                request.fetch = self.store.prefetch(wanted, wake)
        if request.fetch is not None and request.fetch.pending():
            return True
        return self.segments.waits(request, self.scope(request, len(request.ids)), ms_per_token, wake) if request.windows else False

    def current(self, request: Request) -> bool:
        """Whether the weights are those that the request was made for."""
        known = self.runner.model.fingerprint
        return known is None or known.holds(request.fingerprint)

    def renew(self, request: Request) -> AgentCacheError | None:
        """Begin a request anew under the weights of now. The error instead, if some of its answer is out, or weights do not rest."""
        known, receipt = self.runner.model.fingerprint, request.receipt
        assert known is not None
        request.stands = False  # whatever the sequence holds
        request.renewals += 1
        if receipt.completion_tokens or request.renewals > RENEWALS:
            when = f"after {receipt.completion_tokens} tokens of the answer" if receipt.completion_tokens else f"{RENEWALS} times"
            return WeightsChangedError(f"weights, adapters or hooks changed {when}: ask again, and change them between requests")
        self._take_back(request)
        self._let_go(request)
        request.fingerprint, request.scope, request.near, request.plan = known.whole, None, None, None
        request.fetch, request.bring, request.looked, request.peeked = None, None, False, (-1, 0)
        request.calibration, request.windows, request.note, request.sources = None, (), (), []
        request.kept, request.near_kept, request.numerics, request.stands = 0, 0, set(), True
        receipt.clear()
        receipt.notes.append("weights, adapters or hooks changed while it waited or was filled: begun anew")
        return None

    def uncached(self, request: Request) -> int:
        """How much of a waiting prompt would be computed if it started now."""
        if request.peeked[0] != self.store.changes:
            scope = self.scope(request, len(request.ids))
            known = self.segments.known(request, scope) if scope and request.reuse else 0
            request.peeked = (self.store.changes, known)
        return len(request.ids) - request.peeked[1]

    def start(self, request: Request) -> None:
        """Match, plan and attach; the account of the prompt is final afterwards, but for its times."""
        request.started = time.perf_counter()
        request.prompt = len(request.ids)
        receipt = request.receipt
        if request.fetch is not None:
            fetch = request.fetch
            receipt.load_ms, receipt.disk_tokens = receipt.load_ms + fetch.ms, fetch.tokens
            receipt.disk_bytes += fetch.bytes
            receipt.refusals += tuple(fetch.refusals)
            receipt.notes += fetch.notes
        receipt.queue_ms = max(0.0, (request.started - request.called) * 1e3 - receipt.layout_ms - receipt.load_ms)
        self.runner.follow_threads()
        self._attach(request)
        assert request.plan is not None and request.sequence is not None
        receipt.refusals += request.plan.refusals
        taken = 0 if request.near_kept else request.plan.cached_tokens  # pages near the exact ones never come from disk
        receipt.disk_tokens = min(receipt.disk_tokens, taken)  # a small memory may have dropped some again
        receipt.copied_tokens = request.sequence.copied_tokens
        receipt.match_ms = (time.perf_counter() - request.started) * 1e3

    def _attach(self, request: Request) -> None:
        """Give the request a sequence that starts from the longest known prefix of all its ids."""
        model, length, receipt = self.runner.model, len(request.ids), request.receipt
        request.scope, request.near, request.near_kept, request.sources = self.scope(request, length), None, 0, []
        if request.scope is None:
            reason, detail = Reason.LAYER_KIND, model.support.why
            if model.fingerprint is not None and model.fingerprint.refusal:
                reason, detail = Reason.FINGERPRINT, model.fingerprint.refusal
            elif model.support.paged:
                reason, detail = Reason.ROPE_REGIME, f"no fixed frequencies beyond {model.rotary.original if model.rotary else 0} tokens"
            request.sequence, request.plan = StockSequence(), make(length, 0, reason, detail)
            receipt.path, receipt.bitwise = "stock", False
            receipt.computed_tokens = receipt.computed_tokens or length
            return
        assert model.spec is not None and model.numerics is not None
        found = self._match(request)
        request.attached = found
        request.stands_on(found.entries)
        request.sequence = sequence = Sequence(model.spec)
        request.numerics = {*found.numerics, model.numerics.digest}
        again = receipt.completion_tokens > 0  # the account of the prompt is closed
        said = (receipt.precision, receipt.bitwise) if again else ("exact", True)  # how near what was chosen so far is
        runs = [] if again or request.suspects else self.segments.find(request, found.tokens)
        request.plan = make(length, found.tokens, found.missed, found.detail, runs, request.calibration)
        request.kept, request.near_kept = (0, found.tokens) if request.near else (found.tokens, 0)
        if found.tokens:
            sequence.attach(list(found.pages), found.tokens)
        receipt.precision = (request.near or request.scope).precision
        if receipt.precision != "exact":
            sequence.exact_until = 0
        receipt.path = "stepped" if model.stepped else "generic"
        if not again:
            receipt.cached_tokens, receipt.computed_tokens = request.plan.cached_tokens, request.plan.computed_tokens
        if runs:
            self.segments.attach(request)
        self._state_bits(request)
        receipt.precision = receipt.precision if said[0] == "exact" else said[0]
        receipt.bitwise = receipt.bitwise and said[1]

    def _match(self, request: Request) -> Match:
        """The longest prefix in memory: an exact one, unless the request allows for less and finds more there."""
        assert request.scope is not None
        if not request.reuse:
            return Match(0, (), Reason.REUSE_OFF)
        if request.suspects is not None:
            detail = f"NaN or infinity behind {request.suspects.tokens} tokens that were attached: computed again without reuse"
            return Match(0, (), Reason.NON_FINITE, detail=detail)
        found = self.store.match(request.scope, request.array())
        if request.lossy and (disk := self.store.disk):
            lossy = replace(request.scope, precision=disk.precision)
            other = self.store.match(lossy, request.array())
            if other.tokens > found.tokens:
                request.scope, found = lossy, other
        elif near := self.segments.near(request, request.scope):
            other = self.store.match(near, request.array())
            if other.tokens > found.tokens:
                request.near, found = near, other
        return found

    def _state_bits(self, request: Request) -> None:
        model, receipt = self.runner.model, request.receipt
        assert request.plan is not None
        computed = numerics(request)
        receipt.bitwise = model.bitwise and len(computed) == 1 and receipt.precision == "exact"
        taken = max([request.plan.prefix_tokens, *(segment.stop for segment in receipt.segments)])
        if receipt.precision == "approximate":
            exact = request.sequence.exact_until if request.sequence else 0
            detail = "behind segments from other positions: near the exact values, not equal"
            receipt.refusals += (Refusal(Reason.APPROXIMATE, exact, len(request.ids), detail),)
        elif receipt.precision != "exact":
            receipt.refusals += (Refusal(Reason.LOSSY, 0, taken, f"stored as {receipt.precision}: near the exact values, not equal"),)
        if len(computed) > 1:
            receipt.refusals += (Refusal(Reason.NUMERICS, 0, taken, "computed with other threads or kernels"),)
        elif not model.bitwise:
            receipt.refusals += (Refusal(Reason.NOT_ROW_PURE, 0, len(request.ids), "tokens are promised, bits are not"),)

    # -- filling and decoding --------------------------------------------------------------------------------------

    def deliver(self, request: Request, outcome: Outcome) -> AgentCacheError | FinishReason | None:
        """Take the result of one round: the error or reason with which the request ends, None if it goes on."""
        if outcome.error is not None:
            return outcome.error
        self._note(request, outcome)
        if outcome.logits is not None and not bool(torch.isfinite(outcome.logits).all()):
            return self._non_finite(request, "logits")
        if request.first == 0.0:
            assert request.sequence is not None
            if request.on_progress:
                request.events.put(Progress(request.sequence.length, request.prompt))
            if not request.remaining:
                accuse(self.store, request)
            if not self.keep(request, whole_only=request.remaining > 0):
                return self._non_finite(request, "keys or values")
            if request.fetch is not None and not request.remaining:
                request.fetch.close()
            self._decide(request)
        if request.fill_only:
            outcome.moved = not request.remaining and not self._stands(request)
            return self._filled(request) if not request.remaining and not outcome.moved else None
        return self._choose(request, outcome.logits) if outcome.logits is not None else None

    def _decide(self, request: Request) -> None:
        """Look at the junction that was reached, if one was; if that leaves nothing near, the account says so."""
        before, receipt = request.receipt.precision, request.receipt
        self.segments.decide(request)
        if receipt.precision != before:
            receipt.refusals = tuple(known for known in receipt.refusals if known.reason not in OF_BITS)
            self._state_bits(request)

    def _note(self, request: Request, outcome: Outcome) -> None:
        numerics = self.runner.model.numerics
        if numerics is not None and isinstance(request.sequence, Sequence):
            request.numerics.add(numerics.digest)
            request.receipt.bitwise = request.receipt.bitwise and len(request.numerics) == 1
        if outcome.retried and outcome.retried not in request.receipt.notes:
            request.receipt.notes.append(outcome.retried)

    def _filled(self, request: Request) -> FinishReason:
        self._first_token(request)
        if request.scope is not None:
            request.pinned = self.store.pin(request.scope, request.array())  # here: before another admission could evict it
        return "stop"

    def _first_token(self, request: Request) -> float:
        request.first = now = time.perf_counter()
        request.receipt.prefill_ms = (now - request.started) * 1e3 - request.receipt.match_ms
        request.receipt.ttft_ms = (now - request.called) * 1e3
        return now

    def _choose(self, request: Request, logits: torch.Tensor) -> AgentCacheError | FinishReason | None:
        guide = request.guide
        masked = guide.mask(logits) if guide else logits
        if masked is not None and self.segments.unsure(request, masked):
            self._begin_anew(request)
            return None
        if request.on_logits is not None:
            request.on_logits(logits)
        if masked is None:
            return "stop"
        token = request.forced.popleft() if request.forced else request.sampler(masked, request.ids)
        if guide and (wrong := guide.accept(token)):
            return GenerationError(f"the constraint cannot be followed behind token {len(request.ids)}: {wrong}; simplify it")
        now = time.perf_counter() if request.first else self._first_token(request)
        receipt: Receipt = request.receipt
        request.ids.append(token)
        receipt.completion_tokens += 1
        receipt.decode_ms = (now - request.first) * 1e3
        ended = token in request.stop_ids and not request.sampling.ignore_eos and not request.forced
        if request.sampling.logprobs is not None:
            request.logprobs.append(logprob_of(logits, token, request.sampling.logprobs))
        request.events.put(Chunk(request.text.push(token), (token,)))
        if ended or request.text.stopped or (guide and guide.over):
            return "stop"
        if receipt.completion_tokens >= request.sampling.max_tokens:
            return "length"
        self._cross_regime(request)
        return None

    def _begin_anew(self, request: Request) -> None:
        """Compute what stood behind segments, which the request has renounced."""
        self._attach(request)
        self.segments.settle(request)

    def _cross_regime(self, request: Request) -> None:
        """A sequence that outgrows its rotary frequencies is computed again under the next ones, as transformers does."""
        rotary, length = self.runner.model.rotary, len(request.ids)
        if request.scope is None or rotary is None or rotary.regime(length) == request.scope.regime:
            return
        assert request.sequence is not None
        self.keep(request)
        request.sequence.close()
        self._attach(request)
        assert request.plan is not None
        again = request.plan.computed_tokens - 1
        request.receipt.notes.append(f"{again} tokens computed again behind {length - 1}: rotary frequencies change with the length")

    # -- keeping and ending ----------------------------------------------------------------------------------------

    def keep(self, request: Request, whole_only: bool = False) -> bool:
        """Give the store what this sequence has computed since; only whole pages while it is being filled. False: it is not finite."""
        sequence, scope = request.sequence, request.scope
        if scope is None or not isinstance(sequence, Sequence) or not request.reuse or request.suspects is not None:
            return True
        count = min(sequence.length, sequence.exact_until) if scope.precision == "exact" else sequence.length
        if request.near is not None and not self._keep_near(request, sequence, whole_only):
            return False
        if whole_only:
            count -= count % PAGE_TOKENS
        if count <= request.kept:
            return True
        if not finite(sequence, request.kept, count):
            return False
        if not self._stands(request):
            return True
        pages = sequence.pages[: -(-count // PAGE_TOKENS)]
        self.store.admit(scope, request.array(count), pages, frozenset(request.numerics), request.prefix_tokens, request.received)
        request.kept = count
        return True

    def _stands(self, request: Request) -> bool:
        """Whether the weights are still those of the request: before anything of it is kept."""
        if request.stands and not self.current(request):
            request.stands = False
            request.receipt.notes.append("weights, adapters or hooks changed while it ran: nothing more of it is kept")
        return request.stands

    def _keep_near(self, request: Request, sequence: Sequence, whole_only: bool) -> bool:
        """Keep what is behind attached segments for those who accept such pages, in memory only. False: it is not finite."""
        count = sequence.length - (sequence.length % PAGE_TOKENS if whole_only else 0)
        known = max(request.near_kept, sequence.exact_until)
        if request.near is None or self.segments.off or count <= known:
            return True
        if not finite(sequence, known, count):
            return False
        if not self._stands(request):
            return True
        pages = sequence.pages[: -(-count // PAGE_TOKENS)]
        self.store.admit(request.near, request.array(count), pages, numerics(request), request.prefix_tokens, request.received)
        request.near_kept = count
        return True

    def _non_finite(self, request: Request, what: str) -> NonFiniteLogitsError | None:
        """Take back what the request gave, and scrub what it wrote and never gave: masked slots must stay finite.

        What was attached may be why: it is computed instead, once, unless some of the answer is out already.
        """
        sequence, at = request.sequence, len(request.ids)
        if isinstance(sequence, Sequence):
            at = sequence.length
            self._take_back(request)
            sequence.withdraw(min(max(request.kept, request.near_kept), sequence.length))
        if request.near is not None and not request.receipt.completion_tokens:
            self.segments.renounce(request, Reason.NON_FINITE, f"NaN or infinite {what} behind token {at}, computed behind moved text")
            self._begin_anew(request)
            return None
        if request.attached and request.attached.tokens and not request.suspects and not request.receipt.completion_tokens:
            request.suspects = request.attached
            assert request.sequence is not None
            request.sequence.close()
            self._attach(request)
            assert request.plan is not None
            request.receipt.refusals += request.plan.refusals
            request.receipt.disk_tokens = 0
            return None
        return NonFiniteLogitsError(f"NaN or infinite {what} behind token {at}: nothing of this request was kept")

    def _take_back(self, request: Request) -> None:
        """Forget the pages that the request gave to others."""
        sequence = request.sequence
        if isinstance(sequence, Sequence) and request.plan:
            since = request.plan.prefix_tokens
            for scope in filter(None, (request.near, request.scope)):
                self.store.forget(scope, request.array(), since, sequence.pages[since // PAGE_TOKENS :])

    def end(self, request: Request, reason: FinishReason) -> None:
        """The request is answered."""
        self.keep(request)
        self.segments.note(request)
        tail = request.text.finish()
        if tail:
            request.events.put(Chunk(tail, ()))
        request.receipt.finish_reason = reason
        self._leave(request)
        request.events.put(Done())

    def fail(self, request: Request, error: AgentCacheError) -> None:
        """The request ends with an error. What it had computed is right all the same and may serve a retry, unless it was not finite."""
        if request.sequence is not None and not isinstance(error, (NonFiniteLogitsError, EngineClosedError)):
            with suppress(*FAULTS):  # the error that is under way is the one to tell
                self.keep(request)
        self._leave(request)
        request.events.put(error)

    def _leave(self, request: Request) -> None:
        if request.sequence is not None:
            request.receipt.exact_until = request.sequence.exact_until
        self._let_go(request)

    def _let_go(self, request: Request) -> None:
        """Free the request's pages and end their way from disk."""
        if request.sequence is not None:
            request.sequence.close()
            request.sequence = None
        for coming in (request.fetch, request.bring):
            if coming is not None:
                coming.close()
