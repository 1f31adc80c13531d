"""Obey a plan: run tokens of several sequences in one forward, or one sequence through the stock path. Knows no prompts and no storage."""

from __future__ import annotations

import logging
import threading
import traceback
from dataclasses import dataclass, field
from typing import Any

import torch

from .errors import GenerationError, OutOfMemoryError
from .kv import Sequence
from .model.attention import Part
from .model.hf import HFModel

log = logging.getLogger("agentcache")

# What code of models and tokenizers may raise. A fault must reach its own request, not the thread that serves the others.
FAULTS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    BufferError,
    ImportError,
    LookupError,
    MemoryError,
    NameError,
    OSError,
    ReferenceError,
    RuntimeError,
    TypeError,
    ValueError,
)


@dataclass(slots=True, eq=False)
class StockSequence:
    """State of a request whose layers cannot be paged: transformers' own cache object, private to it."""

    length: int = 0
    exact_until: int = 0
    copied_tokens: int = 0
    cache: Any = None

    def close(self) -> None:
        """Drop the state."""
        self.cache = None


@dataclass(slots=True)
class Work:
    """Tokens to run next behind a sequence; `wanted`: whether the logits of the last one are needed."""

    sequence: Sequence | StockSequence
    ids: list[int]
    regime: str = ""
    wanted: bool = True


@dataclass(slots=True)
class Outcome:
    """What became of one piece of work: logits [vocab] in fp32 if they were wanted, or the error that hit it alone.

    retried: why it ran alone after its pack had failed; empty if it did not.
    """

    logits: torch.Tensor | None = None
    error: GenerationError | None = None
    retried: str = field(default="")


def _no_memory(error: BaseException) -> bool:
    text = str(error).lower()
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "cannot allocate" in text or "not enough memory" in text


def as_failure(error: BaseException, tokens: int) -> GenerationError:
    """The typed error for a fault while `tokens` tokens were in KV. The traceback goes to the log as text: its frames would hold pages."""
    if _no_memory(error):
        advice = "lower memory_bytes, chunk_tokens or the number of concurrent requests"
        failure: GenerationError = OutOfMemoryError(f"no memory for {tokens} tokens of KV ({type(error).__name__}: {error}): {advice}")
    else:
        log.warning("a forward failed\n%s", "".join(traceback.format_exception(type(error), error, error.__traceback__)))
        failure = GenerationError(f"the model failed behind token {tokens}: {type(error).__name__}: {error}")
    failure.__cause__ = _bare(error)
    return failure


def _bare(error: BaseException) -> BaseException:
    """The error and what it came from, without tracebacks."""
    at: BaseException | None = error
    while at is not None:
        at.__traceback__ = None
        at = at.__cause__ or at.__context__
    return error


def process_threads() -> int:
    """What `torch.set_num_threads` was last given anywhere: OpenMP tells only threads that start afterwards, so one is asked."""
    told: list[int] = []
    asked = threading.Thread(target=lambda: told.append(torch.get_num_threads()), name="agentcache-threads")
    asked.start()
    asked.join()
    return told[0]


class Runner:
    """The only place that calls the model. Not thread safe: one thread owns the device."""

    def __init__(self, model: HFModel) -> None:
        self.model = model

    def follow_threads(self) -> None:
        """Make this thread compute with the number of threads the process asks for now; other threads may mean other numerics."""
        wanted = process_threads()
        if wanted != torch.get_num_threads():
            torch.set_num_threads(wanted)

    def run(self, work: list[Work]) -> list[Outcome]:
        """Run all work in one forward and advance its sequences. Members of a pack that fails are run one by one."""
        paged = [w for w in work if isinstance(w.sequence, Sequence)]
        outcomes = {id(w): o for w, o in zip(paged, self._pack(paged), strict=True)}
        for w in work:
            if isinstance(w.sequence, StockSequence):
                outcomes[id(w)] = self._single(w)
        return [outcomes[id(w)] for w in work]

    def _pack(self, work: list[Work]) -> list[Outcome]:
        if len(work) < 2:
            return [self._single(w) for w in work]
        done = self._try(work)
        if not isinstance(done, BaseException):
            return done
        what = "did not fit in memory" if _no_memory(done) else f"failed: {type(done).__name__}"
        why = f"ran alone after a pack of {len(work)} {what}"
        _bare(done)
        outcomes = [self._single(w) for w in work]
        for outcome in outcomes:
            outcome.retried = why
        return outcomes

    def _single(self, work: Work) -> Outcome:
        done = self._try([work])
        if not isinstance(done, BaseException):
            return done[0]
        tokens = work.sequence.length + len(work.ids)
        if isinstance(work.sequence, Sequence):
            work.sequence.withdraw(work.sequence.length)
        return Outcome(error=as_failure(done, tokens))

    def _try(self, work: list[Work]) -> list[Outcome] | BaseException:
        try:
            return [self._stock(work[0])] if isinstance(work[0].sequence, StockSequence) else self._forward(work)
        except FAULTS as error:
            return error

    def _forward(self, work: list[Work]) -> list[Outcome]:
        parts, wanted, at = [], [], 0
        for w in work:
            assert isinstance(w.sequence, Sequence)
            w.sequence.reserve(len(w.ids))
            parts.append(Part(w.sequence, w.sequence.length, len(w.ids), at))
            at += len(w.ids)
            if w.wanted:
                wanted.append(at - 1)
        ids = torch.tensor([token for w in work for token in w.ids])
        logits = iter(self.model.forward(ids, parts, [w.regime for w in work], wanted))
        for part in parts:
            part.sequence.advance(part.count)
        return [Outcome(next(logits) if w.wanted else None) for w in work]

    def _stock(self, work: Work) -> Outcome:
        sequence = work.sequence
        assert isinstance(sequence, StockSequence)
        logits, sequence.cache = self.model.stock(torch.tensor(work.ids), sequence.cache)
        sequence.length += len(work.ids)
        return Outcome(logits if work.wanted else None)
