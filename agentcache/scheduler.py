"""Who goes into the next forward: one thread owns the device, many requests share it. Knows no prompts, only token ids.

Each round: requests that decode get one token each; then prompts are filled, short ones first, with what is left of the row budget. While
somebody decodes, that budget is what fits in about STEP_MS, so a long prefill does not stall others. A long prompt waits while another long
one is filled: it may find its own prefix computed when its turn comes.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from .errors import AgentCacheError, CancelledError, EngineClosedError, GenerationError, NonFiniteLogitsError
from .kv import PAGE_TOKENS, Sequence
from .model.numerics import MAX_ROWS
from .model.sampling import Sampler, TextStream
from .plan import Plan, make
from .receipt import Receipt
from .runner import Outcome, Runner, StockSequence, Work
from .store.store import Ids, Scope, Store, as_ids
from .types import FinishReason, Reason, Refusal, Sampling

STEP_MS = 300.0  # a round that also decodes should take about this long
MIN_FILL = 16  # tokens of a prompt that go along in any case


@dataclass(frozen=True, slots=True)
class Chunk:
    """Text that has become certain, and the ids decoded since the last chunk."""

    text: str
    ids: tuple[int, ...]


class Done:
    """Marks the end of a request's events."""


@dataclass(slots=True, eq=False)
class Request:
    """One request on its way. `ids` grow as tokens are decoded; `events` carry chunks, then Done or the error."""

    ids: list[int]
    namespace: str
    fingerprint: str
    sampling: Sampling
    sampler: Sampler
    text: TextStream
    stop_ids: frozenset[int]
    receipt: Receipt
    reuse: bool = True
    fill_only: bool = False
    forced: deque[int] = field(default_factory=deque)
    on_progress: Callable[[int, int], None] | None = None
    events: queue.SimpleQueue[Chunk | Done | AgentCacheError] = field(default_factory=queue.SimpleQueue)
    cancelled: threading.Event = field(default_factory=threading.Event)
    called: float = field(default_factory=time.perf_counter)
    # while it runs
    sequence: Sequence | StockSequence | None = None
    scope: Scope | None = None
    plan: Plan | None = None
    prompt: int = 0
    peeked: tuple[int, int] = (-1, 0)
    started: float = 0.0
    first: float = 0.0

    @property
    def remaining(self) -> int:
        """Tokens still to be run before the next one can be chosen."""
        return len(self.ids) - (self.sequence.length if self.sequence else 0)

    @property
    def decoding(self) -> bool:
        """Whether the prompt is filled."""
        return self.first > 0.0


class Scheduler:
    """The device's one thread. submit() from any thread; close() ends it after the running round."""

    def __init__(self, runner: Runner, store: Store, chunk_tokens: int) -> None:
        self.runner = runner
        self.store = store
        self.chunk_tokens = min(chunk_tokens, MAX_ROWS)
        self.ms_per_token = 0.0  # of prefill, smoothed
        self.rounds = 0
        self._decode_ms = 0.0
        self._inbox: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        self._waiting: list[Request] = []
        self._live: list[Request] = []
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="agentcache-device", daemon=True)
        self._thread.start()

    @property
    def live(self) -> int:
        """How many requests hold pages now."""
        return len(self._live)

    def submit(self, request: Request) -> None:
        """Hand a request to the device thread."""
        if self._closed.is_set():
            raise EngineClosedError("the engine is closed: create a new one")
        self._inbox.put(request)

    def close(self) -> None:
        """Stop after the running round; requests still there end with EngineClosedError."""
        self._closed.set()
        self._inbox.put(None)
        self._thread.join()

    # -- the loop --------------------------------------------------------------------------------------------------

    def _loop(self) -> None:
        while not self._closed.is_set():
            self._collect(block=not self._live and not self._waiting)
            self._drop_cancelled()
            self._start_waiting()
            pack = self._compose()
            if pack and not self._closed.is_set():
                self._round(pack)
        self._collect(block=False)
        for request in (*self._live, *self._waiting):
            self._fail(request, EngineClosedError("the engine was closed while this request ran"))

    def _collect(self, block: bool) -> None:
        while True:
            try:
                request = self._inbox.get(block)
            except queue.Empty:
                return
            if request is not None:
                self._waiting.append(request)
            block = False

    def _drop_cancelled(self) -> None:
        for request in [r for r in (*self._live, *self._waiting) if r.cancelled.is_set()]:
            request.receipt.finish_reason = "cancelled"
            self._fail(request, CancelledError("the stream was closed by its caller"))

    def _start_waiting(self) -> None:
        filling = any(not r.decoding and r.remaining > self.chunk_tokens for r in self._live)
        for request in list(self._waiting):
            if not filling or self._uncached(request) <= self.chunk_tokens:
                self._waiting.remove(request)
                self._start(request)
                filling = filling or request.remaining > self.chunk_tokens

    def _uncached(self, request: Request) -> int:
        """How much of a waiting prompt would be computed if it started now."""
        if request.peeked[0] != self.store.changes:
            scope = self._scope(request, len(request.ids))
            known = self.store.match(scope, as_ids(request.ids)).tokens if scope and request.reuse else 0
            request.peeked = (self.store.changes, known)
        return len(request.ids) - request.peeked[1]

    def _scope(self, request: Request, length: int) -> Scope | None:
        model = self.runner.model
        regime = model.rotary.regime(length) if model.rotary and model.support.paged else None
        return None if regime is None else Scope(request.namespace, request.fingerprint, regime)

    def _start(self, request: Request) -> None:
        request.started = time.perf_counter()
        request.prompt = len(request.ids)
        request.receipt.queue_ms = (request.started - request.called) * 1e3 - request.receipt.layout_ms
        self._attach(request)
        request.receipt.match_ms = (time.perf_counter() - request.started) * 1e3
        self._live.append(request)

    def _attach(self, request: Request) -> None:
        model, length = self.runner.model, len(request.ids)
        request.scope = self._scope(request, length)
        receipt = request.receipt
        if request.scope is None:
            regime = (Reason.ROPE_REGIME, f"no fixed frequencies beyond {model.rotary.original} tokens" if model.rotary else "")
            reason, detail = regime if model.support.paged else (Reason.LAYER_KIND, model.support.why)
            request.sequence, request.plan = StockSequence(), make(length, 0, reason, detail)
            receipt.path, receipt.bitwise = "stock", False
        else:
            assert model.spec is not None and model.numerics is not None
            sequence = Sequence(model.spec)
            found = self.store.match(request.scope, as_ids(request.ids)) if request.reuse else None
            if found and found.tokens:
                sequence.attach(list(found.pages), found.tokens)
            request.plan = make(length, found.tokens if found else 0, found.missed if found else Reason.REUSE_OFF)
            request.sequence = sequence
            receipt.path = "stepped" if model.stepped else "generic"
            other = bool(found and found.numerics - {model.numerics.digest})
            receipt.bitwise = model.bitwise and not other
            if other:
                receipt.refusals += (Refusal(Reason.NUMERICS, 0, found.tokens if found else 0, "computed with other threads or kernels"),)
            elif not model.bitwise:
                receipt.refusals += (Refusal(Reason.NOT_ROW_PURE, 0, length, "tokens are promised, bits are not"),)
        receipt.refusals += request.plan.refusals
        receipt.cached_tokens, receipt.computed_tokens = request.plan.cached_tokens, request.plan.computed_tokens
        receipt.copied_tokens = request.sequence.copied_tokens

    # -- one round -------------------------------------------------------------------------------------------------

    def _compose(self) -> list[tuple[Request, Work]]:
        pack = [(r, self._work(r, 1)) for r in self._live if r.decoding][: MAX_ROWS // 2]
        budget = self.chunk_tokens
        if pack:
            room = (STEP_MS - self._decode_ms) / self.ms_per_token if self.ms_per_token else MIN_FILL
            budget = max(MIN_FILL, min(budget, int(room)))
        budget = min(budget, MAX_ROWS - len(pack))
        for request in sorted((r for r in self._live if not r.decoding), key=lambda r: r.remaining):
            if budget <= 0:
                break
            count = min(budget, request.remaining)
            if isinstance(request.sequence, StockSequence):
                count = request.remaining  # its own cache decides what a chunk may be
            pack.append((request, self._work(request, count)))
            budget -= count
        return pack

    def _work(self, request: Request, count: int) -> Work:
        assert request.sequence is not None
        at = request.sequence.length
        count = min(count, len(request.ids) - at)
        regime = request.scope.regime if request.scope else ""
        return Work(request.sequence, request.ids[at : at + count], regime, wanted=at + count == len(request.ids) and not request.fill_only)

    def _round(self, pack: list[tuple[Request, Work]]) -> None:
        began = time.perf_counter()
        try:
            outcomes = self.runner.run([work for _, work in pack])
        except (RuntimeError, ValueError, TypeError, AssertionError) as error:
            # a fault of the model's code must reach its callers, not kill the thread that serves the others
            failure = GenerationError(f"the model failed: {type(error).__name__}: {error}")
            failure.__cause__ = error
            for request, _ in pack:
                self._fail(request, failure)
            return
        self.rounds += 1
        for (request, work), outcome in zip(pack, outcomes, strict=True):
            self._deliver(request, work, outcome)
        self._learn(pack, (time.perf_counter() - began) * 1e3)

    def _learn(self, pack: list[tuple[Request, Work]], took: float) -> None:
        """Smooth the cost of a decoding round and of a prefilled token."""
        filled = sum(len(work.ids) for _, work in pack if len(work.ids) > 1)
        if not filled:
            self._decode_ms = took if not self._decode_ms else 0.7 * self._decode_ms + 0.3 * took
        elif filled >= MIN_FILL:
            decoded = self._decode_ms if len(pack) > 1 else 0.0
            cost = max(took - decoded, 0.1 * took) / filled
            self.ms_per_token = cost if not self.ms_per_token else 0.5 * self.ms_per_token + 0.5 * cost

    def _deliver(self, request: Request, work: Work, outcome: Outcome) -> None:
        if outcome.error is not None:
            self._fail(request, outcome.error)
            return
        assert request.sequence is not None and request.plan is not None
        if outcome.retried:
            request.receipt.notes.append("ran alone after a pack did not fit in memory")
        filling = not request.decoding
        if filling:
            if request.on_progress:
                request.on_progress(min(request.sequence.length, request.prompt), request.prompt)
            self._keep(request, whole_only=request.remaining > 0)
        if request.fill_only and not request.remaining:
            self._end(request, "stop")
        elif outcome.logits is not None:
            self._choose(request, outcome.logits)

    def _choose(self, request: Request, logits: torch.Tensor) -> None:
        if not bool(torch.isfinite(logits).all()):
            assert request.plan is not None and request.sequence is not None
            at = request.sequence.length
            if request.scope and isinstance(request.sequence, Sequence):
                self.store.forget(request.scope, as_ids(request.ids), request.plan.cached_tokens)
                request.sequence.withdraw(request.plan.cached_tokens)
            self._fail(request, NonFiniteLogitsError(f"NaN or infinite logits behind token {at}: nothing of this request was kept"))
            return
        token = request.forced.popleft() if request.forced else request.sampler(logits, request.ids)
        now = time.perf_counter()
        if not request.decoding:
            request.first = now
            request.receipt.prefill_ms = (now - request.started) * 1e3 - request.receipt.match_ms
            request.receipt.ttft_ms = (now - request.called) * 1e3
        request.ids.append(token)
        request.receipt.completion_tokens += 1
        request.receipt.decode_ms = (now - request.first) * 1e3
        ended = token in request.stop_ids and not request.sampling.ignore_eos and not request.forced
        request.events.put(Chunk(request.text.push(token), (token,)))
        if ended or request.text.stopped:
            self._end(request, "stop")
        elif request.receipt.completion_tokens >= request.sampling.max_tokens:
            self._end(request, "length")
        else:
            self._cross_regime(request)

    def _cross_regime(self, request: Request) -> None:
        """A sequence that outgrows its rotary frequencies is computed again under the next ones, as transformers does."""
        rotary = self.runner.model.rotary
        if request.scope is None or rotary is None or rotary.limit(request.scope.regime) != len(request.ids) - 1:
            return
        assert request.sequence is not None
        self._keep(request)
        request.sequence.close()
        request.receipt.notes.append(f"computed again behind {len(request.ids) - 1} tokens: rotary frequencies change with the length")
        self._attach(request)

    # -- keeping and ending ----------------------------------------------------------------------------------------

    def _keep(self, request: Request, whole_only: bool = False) -> None:
        """Give the store what this sequence has computed so far; only its whole pages while it is still being filled."""
        sequence, scope = request.sequence, request.scope
        if scope is None or not isinstance(sequence, Sequence) or not request.reuse:
            return
        count = min(sequence.length, sequence.exact_until)
        if whole_only:
            count -= count % PAGE_TOKENS
        if count:
            numerics = self.runner.model.numerics
            assert numerics is not None
            ids: Ids = as_ids(request.ids[:count])
            self.store.admit(scope, ids, sequence.pages[: -(-count // PAGE_TOKENS)], numerics.digest)

    def _end(self, request: Request, reason: FinishReason) -> None:
        self._keep(request)
        tail = request.text.finish()
        if tail:
            request.events.put(Chunk(tail, ()))
        request.receipt.finish_reason = reason
        self._leave(request)
        request.events.put(Done())

    def _fail(self, request: Request, error: AgentCacheError) -> None:
        if isinstance(error, CancelledError) and request.sequence is not None:
            self._keep(request)  # what was computed is right and may serve the retry
        self._leave(request)
        request.events.put(error)

    def _leave(self, request: Request) -> None:
        if request.sequence is not None:
            request.receipt.exact_until = request.sequence.exact_until
            request.sequence.close()
            request.sequence = None
        for group in (self._live, self._waiting):
            if request in group:
                group.remove(request)
