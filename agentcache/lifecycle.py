"""The life of one request on the device: attached to cached pages, filled, decoded, admitted, ended. Knows no other request.

Its pages go into the store if they are finite and the weights hold; those that turn out not to be are retracted or quarantined.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from .errors import FAULTS, AgentCacheError, CancelledError, EngineClosedError, GenerationError, NonFiniteLogitsError, WeightsChangedError
from .events import Chunk, Done, Progress
from .kv import Sequence
from .kv_spec import finite
from .matching import Matching
from .model.sampling import logprob_of
from .plan import Attach, Plan, make
from .request import Ended, Provenance, Running
from .runner import Drafts, Outcome, Runner, StockSequence
from .store.keys import Scope
from .store.store import Store
from .types import OF_BITS, PAGE_TOKENS, FinishReason, Reason, Refusal

if TYPE_CHECKING:
    import torch

    from .attached_ranges import AttachedRanges


class Lifecycle:
    """Every step of a request, on the device's one thread."""

    def __init__(self, runner: Runner, store: Store) -> None:
        self.runner, self.store = runner, store
        self.matching = Matching(runner.model, store)
        self.on_end: Callable[[Running], str] | None = None  # called once for each request; returns a note for its receipt

    def renew(self, running: Running) -> AgentCacheError | None:
        """Begin a request anew under the present weights, without reuse if they change too often. Returns the error once tokens are out."""
        fingerprint, answered = self.runner.model.fingerprint, running.completion_tokens
        assert fingerprint is not None
        running.provenance.weights_hold = False
        running.renewals += 1
        if answered:
            why = f"weights, adapters or hooks changed after {answered} tokens of the answer: ask again, and change them between requests"
            return WeightsChangedError(why)
        self._release(running)
        running.provenance = Provenance(fingerprint.whole, running.provenance.made)
        running.scope, running.plan, running.prefetch, running.ranges = None, None, None, None
        running.prefetch_asked, running.peeked, running.admitted_tokens = False, (-1, 0), 0
        running.account.reopen()
        running.account.record_note("weights, adapters or hooks changed while it waited or was filled: begun anew")
        return None

    # -- attaching -------------------------------------------------------------------------------------------------

    def start(self, running: Running) -> None:
        """Match, plan and attach; the account of the prompt is final afterwards, but for its times."""
        account = running.account
        if (prefetch := running.prefetch) is not None:
            account.record_prefetch(prefetch.ms, prefetch.bytes, prefetch.refusals, prefetch.notes, prefetch.tokens)
        account.record_start()
        self.runner.follow_threads()
        plan = self._attach(running)
        assert running.sequence is not None
        after_ranges = running.ranges is not None and running.ranges.admitted_tokens > 0  # its pages never came from disk
        account.record_attached(plan.refusals, 0 if after_ranges else plan.cached_tokens, running.sequence.copied_tokens)

    def _attach(self, running: Running) -> Plan:
        """Give the request a new sequence that starts from the longest cached prefix of all its ids; returns its plan."""
        model, length, ranges = self.runner.model, len(running.ids), running.ranges
        if running.sequence is not None:
            running.sequence.close()
        running.scope, asked = self.matching.scope(running), running.asked
        if ranges is not None:
            ranges.detach()
        if running.scope is None:
            running.plan = make(length, 0, *(unpaged := self.matching.why_unpaged(running)))
            weights = "" if unpaged[0] is Reason.FINGERPRINT else running.provenance.fingerprint
            running.sequence = StockSequence(adapter=asked.adapter, acts_from=asked.acts_from, fingerprint=weights)
            running.account.record_stock(length)
            return running.plan
        assert model.spec is not None and model.numerics is not None
        cuts = below = None
        running.sequence = sequence = Sequence(model.spec, state=model.new_state(), adapter=asked.adapter, acts_from=asked.acts_from)
        if asked.diagnose and model.experts:
            from .model.routes import Routes

            sequence.routes = Routes(model.experts)
        if sequence.state is not None:
            from .checkpoints import cuts_of, in_text, marks_of

            marks, known = marks_of(asked.layout, unit := sequence.state.alignment, whole=asked.fill_only), running.completion_tokens
            sequence.cuts = cuts = cuts_of(marks, length - known, unit, in_text(asked.layout), known)
            sequence.marks = frozenset(marks if asked.reuse != "off" else ())
        found = self.matching.match(running, cuts)
        computed_once = running.completion_tokens > 0 or bool(running.suspects)
        if model.adapters and not computed_once and not (ranges and ranges.scope):
            from .shared_layers import shared_layers

            below = shared_layers(model, self.store, running, found.tokens)
        attached = ranges.propose(found.tokens, below) if ranges is not None and not computed_once else ()
        below = None if attached else below
        running.attached = tuple(one for one in (found, below) if one is not None and one.tokens)
        running.provenance.attach(entry for one in running.attached for entry in one.entries)
        running.provenance.numerics = {model.numerics.digest}.union(*(one.numerics for one in running.attached))
        if below is not None:
            attached = (Attach(found.tokens, below.tokens, layers=below.layers, run=0),)
        running.plan = plan = make(length, found.tokens, found.missed, found.detail, attached)
        running.admitted_tokens = 0 if ranges is not None and ranges.scope else found.tokens
        if found.tokens:
            sequence.attach(list(found.pages), found.tokens)
        if running.grade != "exact":
            sequence.exact_until = 0
        resumed = (0, 0)
        if below is not None and below.layers is not None:
            resumed = below.tokens - found.tokens, below.layers
            sequence.attach_below(below.pages, below.tokens, below.layers)
        running.account.record_plan("stepped" if model.stepped else "generic", plan.cached_tokens, plan.computed_tokens, resumed)
        if model.adapters and not (ranges and ranges.scope):  # else it may hold parts of several
            from .shared_layers import attached_parts

            running.account.record_attached_parts(attached_parts(model, running))
        if ranges is not None:
            ranges.attach()
        self._record_grade(running)
        return plan

    def _record_grade(self, running: Running) -> None:
        """Tell the account how near the state is that the next token is read off."""
        model, length, grade = self.runner.model, len(running.ids), running.grade
        assert running.plan is not None
        kernels, refusals, adapter = len(running.numerics), [], running.asked.adapter
        pure = model.bitwise and (adapter is None or adapter.pure)
        taken = max([running.plan.prefix_tokens, *(segment.stop for segment in running.receipt.segments)])
        if running.ranges is not None and running.ranges.scope is not None:
            refusals.append(running.ranges.refusal())
        elif grade != "exact":
            refusals.append(Refusal(Reason.LOSSY, 0, taken, f"stored as {grade}: near the exact values, not equal"))
        if kernels > 1:
            refusals.append(Refusal(Reason.NUMERICS, 0, taken, "computed with other threads, kernels or pieces"))
        elif not pure:
            from .model.verdict import impurity

            refusals.append(Refusal(Reason.NOT_ROW_PURE, 0, length, f"tokens are promised, bits are not: {impurity(model, adapter)}"))
        running.account.record_grade(grade, pure and kernels == 1 and grade == "exact", refusals)

    # -- filling and decoding --------------------------------------------------------------------------------------

    def deliver(self, running: Running, outcome: Outcome) -> Ended:
        """Take in the outcome of one round: admit pages, choose tokens. Returns how the request ends, None if it goes on."""
        if outcome.error is not None:
            return outcome.error
        self._record_forward(running, outcome)
        if outcome.lost:  # on from the last checkpoint, in forwards that no other sequence shares
            self._attach(running)
            if isinstance(running.sequence, Sequence) and running.sequence.state is not None:
                running.sequence.state.packs_pieces = False
            return None
        if outcome.logits is not None and not finite(outcome.logits):
            return self._non_finite(running, "logits")
        if not running.filled:
            assert running.sequence is not None
            if running.asked.on_progress:
                running.events.put(Progress(running.sequence.length, running.asked.prompt_tokens))
            if not running.remaining:
                if running.scope is not None and not self.weights_current(running):  # before a token of an answer is out
                    outcome.weights_changed = True
                    return None
                self._quarantine_suspects(running)
            if not self._admit(running, whole_only=running.remaining > 0):
                return self._non_finite(running, "keys or values")
            if running.prefetch is not None and not running.remaining:
                running.prefetch.close()
            self._check_range(running)
        if running.asked.fill_only:
            sequence = running.sequence
            if not running.remaining and isinstance(sequence, Sequence) and sequence.checkpointed < max(sequence.marks, default=0):
                self._attach(running)  # in a page that it shares, others' checkpoints took the room of the one that is to be pinned
                return None
            outcome.weights_changed = not running.remaining and not self._check_weights(running)
            if running.remaining or outcome.weights_changed:
                return None
            running.filled = True
            running.account.record_filled()
            self._pin(running)
            return "stop"
        ended = self._choose(running, outcome.logits) if outcome.logits is not None else None
        return self._accept_drafts(running, outcome.drafts, ended) if outcome.drafts else ended

    def _accept_drafts(self, running: Running, drafts: Drafts, ended: Ended) -> Ended:
        """Choose further tokens, as long as each one is the drafted one. ended: after the first token; returns how the request ends."""
        sequence = running.sequence
        assert isinstance(sequence, Sequence)
        if not (sound := finite(drafts[1])):
            sequence.truncate(sequence.length)  # masked slots must stay finite
        for token, logits in zip(*drafts, strict=True):
            if not sound or ended is not None or running.ids.all[-1] != token:
                sequence.take_back()
                break
            sequence.advance(1)
            running.account.record_drafted()
            ended = self._choose(running, logits)
        return ended

    def _check_range(self, running: Running) -> None:
        """Check the attached range that was reached, if one was; the account learns of another grade."""
        if running.ranges is not None:
            before = running.grade
            running.ranges.advance()
            if running.grade != before:
                running.account.retract(OF_BITS)
                self._record_grade(running)

    def _record_forward(self, running: Running, outcome: Outcome) -> None:
        known, running.provenance.weights_checked = running.provenance.numerics, False
        if (numerics := self.runner.model.numerics) is not None and isinstance(running.sequence, Sequence):
            known.add(numerics.digest)
        running.account.record_forward(len(known) == 1, outcome.retried)
        if outcome.weights_changed and running.provenance.weights_hold:
            running.provenance.weights_hold = False
            running.account.record_note("weights, adapters or hooks changed while it ran: the answer may be of both")

    def _choose(self, running: Running, logits: torch.Tensor) -> Ended:
        asked, decoding, guide = running.asked, running.decoding, running.decoding.guide
        masked = guide.mask(logits) if guide else logits
        if masked is not None and running.ranges is not None and (why := running.ranges.doubt(masked)):
            self._compute_instead(running, Reason.UNSURE, why)
            return None
        if masked is None:
            return "stop"
        token = decoding.forced.popleft() if decoding.forced else decoding.sampler(masked, running.ids.all)
        if guide and not guide.fits(token):
            masked = guide.narrow(logits, token)
            if masked is None:
                return "length"
            token = decoding.sampler(masked, running.ids.all)
        if guide and (wrong := guide.accept(token)):
            return GenerationError(f"the constraint cannot be followed after token {len(running.ids)}: {wrong}; simplify it")
        if asked.on_logits is not None:
            asked.on_logits(logits)
        running.filled = True
        running.account.record_token()
        running.ids.append(token)
        ended = token in asked.stop_ids and not asked.sampling.ignore_eos and not decoding.forced
        if asked.sampling.logprobs is not None:
            decoding.logprobs.append(logprob_of(logits, token, asked.sampling.logprobs))
        running.events.put(Chunk(decoding.text.push(token), (token,)))
        if ended or decoding.text.stopped or (guide and guide.over):
            return "stop"
        if running.completion_tokens >= asked.sampling.max_tokens:
            return "length"
        self._cross_regime(running)
        return None

    def _compute_instead(self, running: Running, reason: Reason, why: str) -> None:
        """Attach the request anew without ranges: the tokens after its prefix are computed instead."""
        assert running.ranges is not None
        running.account.record_refusals([Refusal(reason, 0, len(running.ids), why)])
        running.ranges.detach(for_good=True)
        running.account.record_no_segments(self._attach(running).cached_tokens)

    def _cross_regime(self, running: Running) -> None:
        """A sequence that outgrows its rotary frequencies is computed again under the next ones, as transformers does."""
        rotary, length = self.runner.model.rotary, len(running.ids)
        if running.scope is None or rotary is None or rotary.regime(length) == running.scope.regime:
            return
        self._admit(running)
        again = self._attach(running).computed_tokens - 1
        running.account.record_note(f"{again} tokens computed again after {length - 1}: rotary frequencies change with the length")

    def _non_finite(self, running: Running, what: str) -> NonFiniteLogitsError | None:
        """Retract the pages that the request admitted, and zero those it wrote since: masked slots must stay finite. Attached pages may be
        the cause: their tokens are computed instead, once, unless part of the answer is out already."""
        sequence, at, ranges = running.sequence, len(running.ids), running.ranges
        if isinstance(sequence, Sequence):
            at = sequence.length
            self._retract(running)
            sequence.truncate(min(max(running.admitted_tokens, ranges.admitted_tokens if ranges else 0), sequence.length))
        if ranges is not None and ranges.scope is not None and not running.completion_tokens:
            self._compute_instead(running, Reason.NON_FINITE, f"NaN or infinite {what} after token {at}, computed after moved text")
            return None
        if running.attached and not running.suspects and not running.completion_tokens:
            running.suspects = running.attached
            running.account.record_recompute(self._attach(running).refusals)
            return None
        return NonFiniteLogitsError(f"NaN or infinite {what} after token {at}: nothing of this request was kept")

    # -- admitting -------------------------------------------------------------------------------------------------

    def weights_current(self, running: Running) -> bool:
        """Tell whether the weights are those that the request was made for, if that matters to it. Checks once after each forward."""
        fingerprint, origin = self.runner.model.fingerprint, running.provenance
        if origin.weights_checked or running.asked.reuse == "off" or running.weights_unstable or fingerprint is None:
            return True
        origin.weights_checked = fingerprint.sampled() == origin.fingerprint
        return origin.weights_checked

    def _check_weights(self, running: Running) -> bool:
        """Tell whether the weights are still those of the request, before its pages are admitted; the account notes a change."""
        if running.provenance.weights_hold and not self.weights_current(running):
            running.provenance.weights_hold = False
            running.account.record_note("weights, adapters or hooks changed while it ran: nothing more of it is kept")
        return running.provenance.weights_hold

    def _admit(self, running: Running, whole_only: bool = False, sound: bool = True) -> bool:
        """Give the store what the sequence has computed since; only whole pages while it is being filled. False: it is not finite."""
        sequence, scope, ranges = running.sequence, running.scope, running.ranges
        if scope is None or not isinstance(sequence, Sequence) or running.asked.reuse == "off" or running.suspects:
            return True
        if running.filled and sound:  # a fault may leave states with tokens that the sequence does not have
            sequence.mark_end()
        length = min(sequence.length, running.covered_tokens)
        if ranges is not None and ranges.scope is not None and ranges.admissible:  # what follows attached segments, in memory only
            count = length - length % PAGE_TOKENS * whole_only
            if not self._admit_pages(running, ranges, ranges.scope, count, running.numerics, sequence.exact_until):
                return False
        count = min(length, sequence.exact_until) if scope.precision == "exact" else length
        count = min(count - count % PAGE_TOKENS * whole_only, sequence.checkpointed)  # later tokens cannot be attached
        return self._admit_pages(running, running, scope, count, frozenset(running.provenance.numerics))

    def _admit_pages(
        self, running: Running, owner: Running | AttachedRanges, scope: Scope, count: int, numerics: frozenset[str], start: int = 0
    ) -> bool:
        """Admit the first `count` tokens, if `owner` has admitted fewer and the weights hold. False: those after `start` are not finite."""
        start = max(start, owner.admitted_tokens)
        assert isinstance(running.sequence, Sequence)
        if count <= start:
            return True
        if not running.sequence.finite(start, count):
            return False
        if self._check_weights(running):
            pages = running.sequence.pages[: -(-count // PAGE_TOKENS)]
            lasting = count if running.asked.fill_only else running.asked.layout.prefix_tokens  # its last checkpoint is to be pinned
            self.store.admit(scope, running.ids.array(count), pages, numerics, lasting, running.received)
            owner.admitted_tokens = count
        return True

    def _pin(self, running: Running) -> None:
        """Pin the pages of a prompt that is only filled: before another admission could evict them."""
        if isinstance(it := running.sequence, Sequence) and (tokens := it.checkpointed) and running.scope and not running.events.cancelled:
            running.pinned_pages = self.store.pin(running.scope, running.ids.array(tokens))

    def _retract(self, running: Running) -> None:
        """Take back the pages that the request admitted: later requests must not find them."""
        sequence, ranges_scope = running.sequence, running.ranges.scope if running.ranges else None
        if isinstance(sequence, Sequence) and running.plan:
            since = running.plan.prefix_tokens
            for scope in filter(None, (ranges_scope, running.scope)):
                self.store.retract(scope, running.ids.array(), since, sequence.pages[since // PAGE_TOKENS :])

    def _quarantine_suspects(self, running: Running) -> None:
        """The prompt is computed without its suspects: if it is finite now, one of them is wrong."""
        suspects, sequence, running.suspects = running.suspects, running.sequence, ()
        if suspects and isinstance(sequence, Sequence) and sequence.finite(0, sequence.length):
            from .page_check import quarantine

            quarantine(self.store, running, suspects, sequence)

    # -- ending ----------------------------------------------------------------------------------------------------

    def end(self, running: Running, reason: FinishReason) -> None:
        """Finish a request that is answered: admit its last pages, hand over the rest of its text."""
        self._admit(running)
        if running.ranges is not None:
            running.ranges.answered()
        if tail := running.decoding.text.finish():
            running.events.put(Chunk(tail, ()))
        self._finish(running, reason)
        running.events.put(Done())

    def fail(self, running: Running, error: AgentCacheError, reason: FinishReason | None = None) -> None:
        """Finish a request with an error. What it had computed is right all the same and may serve a retry, unless it was not finite."""
        if running.sequence is not None and not isinstance(error, (NonFiniteLogitsError, EngineClosedError)):
            with suppress(*FAULTS):  # the error that is under way is the one to tell
                self._admit(running, sound=isinstance(error, CancelledError))
        self._finish(running, reason)
        running.events.put(error)

    def _finish(self, running: Running, reason: FinishReason | None) -> None:
        if running.asked.diagnose and reason is not None:
            from .route_check import check_routes

            check_routes(self.runner, running)
        running.account.record_end(reason, running.sequence.exact_until if running.sequence else None)
        if self.on_end is not None and (note := self.on_end(running)):
            running.account.record_note(note)
        self._release(running)

    def _release(self, running: Running) -> None:
        """Free the request's pages and end their way from disk."""
        if running.sequence is not None:
            running.sequence.close()
            running.sequence = None
        if running.prefetch is not None:
            running.prefetch.close()
        if running.ranges is not None:
            running.ranges.close()
            running.ranges = None  # a circle of references, with pages in it: these are freed now, not by garbage collection
