"""Obey a plan: run tokens of several sequences in one forward, or one sequence through the stock path. Knows no prompts and no storage."""

from __future__ import annotations

import logging
import threading
import traceback
from dataclasses import dataclass, field
from typing import Any

import torch

from .ahead import Piece
from .errors import FAULTS, AgentCacheError, GenerationError, OutOfMemoryError
from .kv import Sequence
from .model.attention import Part
from .model.hf import HFModel
from .openmp import use_threads

log = logging.getLogger("agentcache")

Drafts = tuple[list[int], torch.Tensor]


@dataclass(slots=True, eq=False)
class StockSequence:
    """State of a request whose layers cannot be paged: transformers' own cache object, private to it."""

    length: int = 0
    exact_until: int = 0
    copied_tokens: int = 0
    cache: Any = None
    ahead_tokens: int = 0  # nothing lies ahead of a state that is no page table
    adapter: Any = None
    acts_from: int = 0
    fingerprint: str = ""  # of the weights that compute it; empty: any may

    def pieces(self, tokens: int) -> list[Piece]:
        """The next `tokens` positions."""
        return [Piece(self.length, tokens)]

    def close(self) -> None:
        """Drop the state."""
        self.cache = None


@dataclass(slots=True)
class Work:
    """Tokens to run next in a sequence. wanted: whether the logits of the last one are needed.

    fingerprint: of the weights that computed the sequence so far; no others run it. Empty: any do. pieces: where in the sequence the
    ids go; by default to its next positions. drafted: how many of the last ids are drafts: the sequence stops before them.
    """

    sequence: Sequence | StockSequence
    ids: list[int]
    regime: str = ""
    wanted: bool = True
    fingerprint: str = ""
    pieces: list[Piece] = field(default_factory=list)
    drafted: int = 0

    def __post_init__(self) -> None:
        self.pieces = self.pieces or self.sequence.pieces(len(self.ids))


@dataclass(slots=True)
class Outcome:
    """Result of one piece of work: logits [vocab] in fp32 if they were wanted, or the error that hit it alone.

    drafts: drafted ids, and the logits [ids, vocab] after each. retried: why it runs alone after its pack had failed; empty if it did not.
    lost: its state changed in part, so nothing ran: the sequence is to be attached anew, and to share no forward.
    weights_changed: they are not those of its fingerprint, or changed while it ran: nothing of it may be kept.
    """

    logits: torch.Tensor | None = None
    drafts: Drafts | None = None
    error: AgentCacheError | None = None
    weights_changed: bool = False
    retried: str = ""
    lost: bool = False


def _no_memory(error: BaseException) -> bool:
    text = str(error).lower()
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "cannot allocate" in text or "not enough memory" in text


def as_failure(error: BaseException, tokens: int) -> AgentCacheError:
    """The typed error for a fault while `tokens` tokens were in KV: one of ours as it is.

    The traceback goes to the log as text: its frames would hold pages.
    """
    if isinstance(error, AgentCacheError):
        _without_tracebacks(error)
        return error
    if _no_memory(error):
        advice = "lower memory_bytes, chunk_tokens or the number of concurrent requests"
        failure: GenerationError = OutOfMemoryError(f"no memory for {tokens} tokens of KV ({type(error).__name__}: {error}): {advice}")
    else:
        log.warning("a forward failed\n%s", "".join(traceback.format_exception(type(error), error, error.__traceback__)))
        failure = GenerationError(f"the model failed after token {tokens}: {type(error).__name__}: {error}")
    failure.__cause__ = _without_tracebacks(error)
    return failure


def _without_tracebacks(error: BaseException) -> BaseException:
    """The same error: it and its causes lose their tracebacks."""
    at: BaseException | None = error
    while at is not None:
        at.__traceback__ = None
        at = at.__cause__ or at.__context__
    return error


def _pack_of(work: Work) -> int:
    """The pack that work runs in: of pages alone, of sequences with states, or its own, also where its own pieces decide its bits."""
    sequence = work.sequence
    if isinstance(sequence, StockSequence) or (state := sequence.state) is None:
        return id(work) if isinstance(sequence, StockSequence) else 0
    return 1 if state.packs_pieces and sequence.adapter is None and (state.alignment == 1 or len(work.ids) == 1) else id(work)


def process_threads() -> int:
    """The number that `torch.set_num_threads` was last given in any thread: only threads started later see it, so one is started."""
    counts: list[int] = []
    thread = threading.Thread(target=lambda: counts.append(torch.get_num_threads()), name="agentcache-threads")
    thread.start()
    thread.join()
    return counts[0]


class Runner:
    """Runs the model. Not thread safe: one thread owns the device."""

    def __init__(self, model: HFModel) -> None:
        self.model = model

    def follow_threads(self) -> None:
        """Make this thread compute with the number of threads the process asks for now; other threads may mean other numerics."""
        use_threads(process_threads())

    def run(self, work: list[Work]) -> list[Outcome]:
        """Run work in packs, one forward each, and advance its sequences. Members of a pack that fails run one by one, with states anew."""
        packs: dict[int, list[Work]] = {}
        for w in work:
            packs.setdefault(_pack_of(w), []).append(w)
        outcomes = {id(w): o for pack in packs.values() for w, o in zip(pack, self._run_checked(pack), strict=True)}
        return [outcomes[id(w)] for w in work]

    def _run_checked(self, work: list[Work]) -> list[Outcome]:
        """Run work of the present weights; its outcomes say if these change meanwhile. Work without a fingerprint runs in any case."""
        fingerprint = self.model.fingerprint
        if fingerprint is None or not any(w.fingerprint or isinstance(w.sequence, Sequence) for w in work):
            return self._pack(work)
        token = fingerprint.token
        here = token is not None and not token.adapters_changed()
        current = [w for w in work if not w.fingerprint or (here and w.fingerprint == fingerprint.last_digest)]
        outcomes = {id(w): o for w, o in zip(current, self._pack(current), strict=True)}
        if not here or fingerprint.changed_since(token):
            if any(w.fingerprint for w in current):
                fingerprint.learn(lambda tokens: self.model.stock(torch.zeros(tokens, dtype=torch.long), None))
            for outcome in outcomes.values():
                outcome.weights_changed = True
        return [outcomes.get(id(w)) or Outcome(weights_changed=True) for w in work]

    def _pack(self, work: list[Work]) -> list[Outcome]:
        if len(work) < 2:
            return [self._run_alone(w) for w in work]
        done = self._try(work)
        if not isinstance(done, BaseException):
            return done
        what = "did not fit in memory" if _no_memory(done) else f"failed: {type(done).__name__}"
        why = f"ran alone after a pack of {len(work)} {what}"
        _without_tracebacks(done)
        if with_states := [w.sequence for w in work if isinstance(w.sequence, Sequence) and w.sequence.state is not None]:
            for sequence in with_states:
                sequence.truncate(sequence.length)
            return [Outcome(lost=True, retried=why) for _ in work]
        outcomes = [self._run_alone(w) for w in work]
        for outcome in outcomes:
            outcome.retried = why
        return outcomes

    def _run_alone(self, work: Work) -> Outcome:
        done = self._try([work])
        if not isinstance(done, BaseException):
            return done[0]
        if isinstance(work.sequence, Sequence):
            work.sequence.truncate(work.sequence.length)
        return Outcome(error=as_failure(done, work.sequence.length + len(work.ids)))

    def _try(self, work: list[Work]) -> list[Outcome] | BaseException:
        try:
            return [self._stock(work[0])] if isinstance(work[0].sequence, StockSequence) else self._forward(work)
        except FAULTS as error:
            return error

    def _forward(self, work: list[Work]) -> list[Outcome]:
        planned: list[tuple[Work, Piece, list[int]]] = []
        for w in work:
            assert isinstance(w.sequence, Sequence)
            at = 0
            for piece in w.pieces:
                planned.append((w, piece, w.ids[at : at + piece.count]))
                at += piece.count
            w.sequence.reserve(planned[-1][1].start + planned[-1][1].count - w.sequence.length)
            if w.drafted and w.sequence.state is not None:
                w.sequence.state.save()
        final = {id(w): piece for w, piece, _ in planned}
        parts, last, at = [], {}, 0
        rows = sorted(planned, key=lambda item: item[1].entry)  # pieces that resume at a higher layer come last
        for w, piece, _ in rows:
            assert isinstance(w.sequence, Sequence)
            parts.append(Part(w.sequence, piece.start, piece.count, at, piece.entry, piece.states))
            at += piece.count
            if piece is final[id(w)]:
                last[id(w)] = at - 1
        ids = torch.tensor([token for _, _, piece_ids in rows for token in piece_ids])
        wanted = [row for w in work if w.wanted for row in range(last[id(w)] - w.drafted, last[id(w)] + 1)]
        logits = self.model.forward(ids, parts, [w.regime for w, _, _ in rows], wanted)
        each = iter(logits.split([1 + w.drafted for w in work if w.wanted]))
        for w, piece, _ in planned:
            assert isinstance(w.sequence, Sequence)
            w.sequence.advance(piece.count - w.drafted * (piece is final[id(w)]))
        return [self._outcome(w, next(each)) if w.wanted else Outcome() for w in work]

    @staticmethod
    def _outcome(work: Work, logits: torch.Tensor) -> Outcome:
        """The outcome of logits [1 + drafted, vocab]."""
        return Outcome(logits[0], (work.ids[-work.drafted :], logits[1:]) if work.drafted else None)

    def _stock(self, work: Work) -> Outcome:
        sequence = work.sequence
        assert isinstance(sequence, StockSequence)
        adapter = sequence.adapter, sequence.acts_from - sequence.length
        logits, sequence.cache = self.model.stock(torch.tensor(work.ids), sequence.cache, *adapter)
        sequence.length += len(work.ids)
        return Outcome(logits if work.wanted else None)
