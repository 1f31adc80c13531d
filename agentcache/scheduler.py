"""The choice of requests for the next forward: one thread owns the device, many requests share it. Knows no prompts, only token ids.

Each round: requests that decode get one token each; then prompts are filled, short ones first, with the rest of the row budget. STEP
bounds it while a request decodes. Of long prompts one is filled at a time: the next may find its own prefix computed.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import torch

from .drafts import DRAFT_ROWS, draft
from .errors import AgentCacheError, CancelledError, ConfigError, EngineClosedError, shown
from .lifecycle import Lifecycle
from .model.numerics import MAX_ROWS
from .openmp import release_team
from .page_memory import Shapes, pool, prepared
from .request import Running
from .runner import FAULTS, Outcome, Runner, StockSequence, Work, as_failure
from .store.entry import PageQuery
from .store.store import Store
from .types import FinishReason

if TYPE_CHECKING:
    from collections.abc import Callable

    from .counters import Counters, Stats
    from .hit_audit import HitAudit
    from .read_ahead import ReadAhead
    from .receipt import Receipt
    from .receipt_log import ReceiptLog

log = logging.getLogger("agentcache")

STEP = 4.0  # times as long as a round that only decodes: the bound of one that also fills a prompt
POLL_S = 0.002  # between two looks at a request whose pages are on their way, while nothing else runs
MIN_FILL = 4  # tokens of a prompt that join a round in any case
PATIENCE = 4  # rounds in which shorter prompts may go first
UNCOUNTED = 64  # receipts that may wait to be counted
GPU_ROWS = 2048  # of a forward: fewer leave a GPU waiting for its next launch
MAX_DECODING = MAX_ROWS // 2  # requests that get a token in one round; with more, they take turns

Pack = list[tuple[Running, Work]]


class IdleWork(Protocol):
    """Work that the device does, a little at a time, while no request runs."""

    @property
    def pending(self) -> bool:
        """Tell whether an idle moment could be used."""

    def step(self) -> None:
        """Do one short piece of it."""

    def counts(self) -> Stats:
        """Counts of what it found so far, by family and label."""


class Scheduler:
    """The device's one thread. submit() from any thread; close() ends it after the running round.

    rounds: forwards so far. ms_per_token: cost of prefill, smoothed. idle: work for idle moments. live: requests that hold pages now.
    """

    def __init__(self, runner: Runner, store: Store, chunk_tokens: int | None = None, log: ReceiptLog | None = None) -> None:
        self.runner = runner
        self.store = store
        self.lifecycle = Lifecycle(runner, store)
        self._log = log
        self.lifecycle.on_end = self._log_receipt
        self._receipts: deque[tuple[Receipt, str]] = deque()  # of requests that ended, until they are counted
        self._counters: Counters | None = None
        self.hit_audit: HitAudit | None = None
        if store.disk:
            from .hit_audit import HitAudit

            self.hit_audit = HitAudit(runner, store)
        self.read_ahead: ReadAhead | None = None  # of sessions
        self.idle: list[IdleWork] = [self.hit_audit] if self.hit_audit else []
        if runner.model.spec is not None and runner.model.spec.recurrent:
            from .copy_memory import copies

            self.idle.append(copies)
        self.most_rows = MAX_ROWS if runner.model.device.type == "cpu" else GPU_ROWS
        self.chunk_tokens = min(chunk_tokens or self.most_rows, self.most_rows)
        self.ms_per_token = 0.0
        self.rounds = 0
        self._decode_ms = 0.0
        self._inbox: queue.SimpleQueue[Running | None] = queue.SimpleQueue()
        self._waiting: list[Running] = []
        self.live: list[Running] = []
        self._gate = threading.Lock()  # nothing comes into the inbox once it is closed
        self._closed = threading.Event()
        self._ended_by = ""  # an unforeseen fault of the thread
        self._thread = threading.Thread(target=self._loop, name="agentcache-device", daemon=True)
        try:
            self._thread.start()
        except BaseException:  # no more threads, or an interrupt once it has started: nothing else has the store yet
            self._closed.set()
            self._inbox.put(None)
            store.close()
            raise

    @property
    def counters(self) -> Counters:
        """Counts of requests that ended: loaded at the first use, or once many receipts wait to be counted."""
        with self._gate:
            if self._counters is None:
                from .counters import Counters

                self._counters = Counters(self._receipts)
                self.store.on_deletion(self._counters.forget)
            return self._counters

    def stats(self, namespace: str | None) -> Stats:
        """Counts by family and label; without a namespace also those of the device and the store."""
        stats = self.counters.stats(namespace)
        if namespace is None:
            for work in self.idle:
                stats |= work.counts()
            stats["queue"] = {"waiting": self._inbox.qsize() + len(self._waiting), "running": len(self.live)}
            stats["store"] = dict(self.store.tree.audit())
        return stats

    def check_caller(self) -> None:
        """ConfigError on the device's thread, which a request would hold up, waiting for itself."""
        if (here := threading.current_thread()) is self._thread:
            raise ConfigError(f"on_logits asked its own engine, on {here.name!r}: it would wait for itself; ask where the stream is read")

    def submit(self, request: Running, begin: Callable[[], None] | None = None) -> None:
        """Hand a request to the device thread. begin: called before, counts it, and raises where it may not run."""
        try:
            if begin is not None:
                begin()
            release_team()  # while its caller waits
            with self._gate:
                if self._closed.is_set():
                    raise self._closed_error("the engine is closed: create a new one")
                self._inbox.put(request)
        except BaseException:  # an interrupt: nobody reads the answer
            request.events.cancel()
            raise

    def close(self) -> None:
        """Stop after the running round; requests still there end with EngineClosedError. On the device's thread it only asks."""
        with self._gate:
            self._closed.set()
        self._inbox.put(None)
        if threading.current_thread() is not self._thread:  # the last reference to an engine may go there
            try:
                self._thread.join()
            except BaseException:  # an interrupt: after the round all the same, which needs the model
                self._thread.join()
                raise

    def close_with_store(self) -> None:
        """Close the device thread, then the store."""
        fingerprint = self.runner.model.fingerprint
        try:
            self.close()
        finally:
            self.store.close(fingerprint.last_digest if fingerprint else "", self.ms_per_token)

    # -- the loop --------------------------------------------------------------------------------------------------

    def _loop(self) -> None:
        budget = self.store.budget_bytes
        pool.open(budget)
        try:
            while not self._closed.is_set():
                try:
                    self._round()
                except FAULTS as error:
                    self._outlive(error)
        except BaseException as error:
            self._ended_by = f"{type(error).__name__}: {shown(str(error))}"
            raise
        finally:  # also if an unforeseen fault ends this thread: no caller may wait forever
            with self._gate:
                self._closed.set()
            if spec := self.runner.model.spec:
                prepared.take(spec.shapes, spec.dtype)
            pool.close(budget)
            self._collect(0.0)
            for request in (*self.live, *self._waiting):
                self._fail(request, self._closed_error("the engine was closed while this request ran"))
            if self._log is not None:
                self._log.close()

    def _outlive(self, error: Exception) -> None:
        """End the requests that a fault outside of them hit, and work for idle moments, which may have caused it; raise without either."""
        requests = (*self.live, *self._waiting)
        if not (requests or self.idle or self.read_ahead):
            raise error
        log.exception("a fault outside of requests: those that ran have failed, and idle moments do no more work")
        self.idle, self.hit_audit, self.read_ahead = [], None, None  # an audit that is never stepped would hold its pages
        for request in requests:
            self._fail(request, as_failure(error, len(request.ids)))

    def _closed_error(self, told: str) -> EngineClosedError:
        if self._ended_by:
            told = f"the engine ended by a fault, {self._ended_by}: create a new one"
        return EngineClosedError(told)

    def _round(self) -> None:
        """One round. Its own frame, so that nothing of it lives on while the thread waits for requests."""
        self._collect(self._wait_s())
        self._drop_cancelled()
        self._start_waiting()
        if self.read_ahead is not None:
            self.read_ahead.step(self.ms_per_token)
        self.store.defer_writes(bool(self.live))
        pack = self._compose()
        if pack and not self._closed.is_set():
            self._forward(pack)
        elif not self.live and not self._waiting and not self._closed.is_set():
            for work in self.idle:
                work.step()
            if shape := self._page_to_commit():
                prepared.step(*shape)
        self.store.defer_writes(bool(self.live))  # before this thread waits for requests

    def _page_to_commit(self) -> tuple[Shapes, torch.dtype] | None:
        """Shape and type of the next request's page, as long as its memory is not ready."""
        spec = self.runner.model.spec
        lacks = spec is not None and spec.device.type == "cpu" and prepared.lacks(spec.shapes, spec.dtype)
        return (spec.shapes, spec.dtype) if spec is not None and lacks else None

    def _wait_s(self) -> float | None:
        """Seconds to wait for another request: forever (None) with nothing to do, a moment while pages are on their way."""
        if self.live or (not self._waiting and (any(work.pending for work in self.idle) or self._page_to_commit())):
            return 0.0
        return POLL_S if self._waiting else None

    def _collect(self, wait_s: float | None) -> None:
        if wait_s is None:
            release_team()
        while True:
            try:
                request = self._inbox.get(wait_s != 0.0, wait_s)
            except queue.Empty:
                return
            if request is not None:
                self._waiting.append(request)
            wait_s = 0.0

    def wake(self) -> None:
        """Let the device thread look again, from any thread."""
        self._inbox.put(None)

    def _drop_cancelled(self) -> None:
        for request in [r for r in (*self.live, *self._waiting) if r.events.cancelled]:
            self._fail(request, CancelledError("the stream was closed by its caller"), "cancelled")

    def _start_waiting(self) -> None:
        filling = any(_fills(r) and r.remaining > self.chunk_tokens for r in self.live)
        for request in list(self._waiting):
            try:
                if self._waits(request) or (filling and self._uncached(request) > self.chunk_tokens):
                    continue
                self._waiting.remove(request)
                self.live.append(request)
                self.lifecycle.start(request)
                if self.hit_audit is not None:
                    self.hit_audit.sample(request)
            except FAULTS as error:
                self._fail(request, as_failure(error, len(request.ids)))
                continue
            filling = filling or request.remaining > self.chunk_tokens

    def _waits(self, request: Running) -> bool:
        """Tell whether the request should not start yet: its pages are on their way from disk, or another process computes them."""
        asked, scope = request.asked, self.lifecycle.matching.scope(request)
        if not request.prefetch_asked:
            request.prefetch_asked = True
            spec, disk = self.runner.model.spec, self.store.disk
            if scope is not None and spec is not None and disk is not None and asked.reuse != "off":
                wanted = replace(scope, precision=disk.precision if asked.reuse == "lossy" else "exact")
                query = PageQuery(wanted, request.covered_ids, self.ms_per_token, spec, asked.layout.prefix_tokens)
                request.prefetch = self.store.prefetch(query, self.wake)
        if request.prefetch is not None and request.prefetch.pending():
            return True
        return request.ranges is not None and request.ranges.pending(scope, self.ms_per_token, self.wake)

    def _uncached(self, request: Running) -> int:
        """Count the tokens of a waiting prompt that would be computed if it started now."""
        if request.peeked[0] != self.store.tree.changes:
            scope, tokens = self.lifecycle.matching.scope(request), 0
            if scope and request.asked.reuse != "off":
                ranges = request.ranges
                tokens = ranges.known_tokens(scope) if ranges else self.store.match(scope, request.covered_ids, peek=True).tokens
            request.peeked = (self.store.tree.changes, tokens)
        return len(request.ids) - request.peeked[1]

    def _renew(self, request: Running) -> None:
        """Let a request wait for its turn again, under the weights of now."""
        self._remove(request)
        self._waiting.insert(0, request)
        if (error := self.lifecycle.renew(request)) is not None:
            self._fail(request, error)

    def _fail(self, request: Running, error: AgentCacheError, reason: FinishReason | None = None) -> None:
        self._remove(request)
        self.lifecycle.fail(request, error, reason)

    def _log_receipt(self, request: Running) -> str:
        """Count the receipt of a request that ended, and write it to the log; returns why the log does not have it, empty if it has."""
        receipt, ids, ms = request.receipt, request.ids.array(request.receipt.prompt_tokens), self.ms_per_token
        self._receipts.append((receipt, "filled" if request.asked.fill_only else receipt.finish_reason or "failed"))
        if len(self._receipts) >= UNCOUNTED:
            self.counters.add()
        return self._log.append(receipt, ids, request.provenance.fingerprint, receipt.cached_tokens * ms) if self._log else ""

    def _remove(self, request: Running) -> None:
        for requests in (self.live, self._waiting):
            if request in requests:
                requests.remove(request)

    # -- one round -------------------------------------------------------------------------------------------------

    def _compose(self) -> Pack:
        decoding = [r for r in self.live if not _fills(r)]
        if len(decoding) > MAX_DECODING:
            first = self.rounds * MAX_DECODING % len(decoding)
            decoding = (decoding[first:] + decoding[:first])[:MAX_DECODING]
        spare = (DRAFT_ROWS - len(decoding)) // max(1, len(decoding))
        pack = [(r, r.work(r.remaining, draft(self.runner.model, r, spare))) for r in decoding]
        budget = self.chunk_tokens
        if pack:
            room = (STEP - 1) * self._decode_ms / self.ms_per_token if self.ms_per_token else MIN_FILL
            budget = max(MIN_FILL, min(budget, int(room), self.most_rows - max(len(pack), DRAFT_ROWS)))  # drafts fill up DRAFT_ROWS at most
        for request in sorted((r for r in self.live if _fills(r)), key=_fill_order):
            if budget <= 0:
                request.skipped += 1
                continue
            count = min(budget, request.remaining)
            if isinstance(request.sequence, StockSequence):
                count = request.remaining  # its own cache decides what a chunk may be
            elif request.sequence is not None and (state := request.sequence.state) is not None and state.alignment > 1:
                count = self.most_rows  # its cuts decide: other pieces would give other bits
            pack.append((request, request.work(count)))
            budget -= count
            request.skipped = 0
        return pack

    def _forward(self, pack: Pack) -> None:
        began = time.perf_counter()
        filled = [len(work.ids) for request, work in pack if _fills(request)]
        outcomes = self.runner.run([work for _, work in pack])
        self.rounds += 1
        for (request, _), outcome in zip(pack, outcomes, strict=True):
            self._deliver(request, outcome)
        if not any(isinstance(work.sequence, StockSequence) for _, work in pack):
            self._smooth_costs(sum(filled), len(filled) < len(pack), (time.perf_counter() - began) * 1e3)

    def _deliver(self, request: Running, outcome: Outcome) -> None:
        try:
            stale = outcome.weights_changed and request.asked.reuse != "off"
            ended = None if stale else self.lifecycle.deliver(request, outcome)
            if outcome.weights_changed and request.asked.reuse != "off":  # seen around the forward, or once the prompt is filled
                self._renew(request)
            if isinstance(ended, str):
                self._remove(request)
                self.lifecycle.end(request, ended)
                return
        except FAULTS as error:  # in the sampler, the tokenizer or the store: this request's alone
            ended = as_failure(error, len(request.ids))
        if ended is not None:
            self._fail(request, ended)

    def _smooth_costs(self, filled: int, decodes: bool, took: float) -> None:
        """Smooth the cost of a decoding round and of a prefilled token. filled: tokens of prompts. took: ms of all."""
        if not filled:
            self._decode_ms = took if not self._decode_ms else 0.7 * self._decode_ms + 0.3 * took
        elif filled >= MIN_FILL:
            cost = max(took - (self._decode_ms if decodes else 0.0), 0.1 * took) / filled
            self.ms_per_token = cost if not self.ms_per_token else 0.5 * self.ms_per_token + 0.5 * cost


def _fills(request: Running) -> bool:
    """Tell whether a prompt is computed: more than tokens that run again with the one chosen last."""
    return not request.filled or request.remaining > DRAFT_ROWS


def _fill_order(request: Running) -> tuple[int, int]:
    """Sort key: prompts that others overtook PATIENCE times or more, the most often first; then the shortest."""
    return (-request.skipped if request.skipped >= PATIENCE else 0, request.remaining)
