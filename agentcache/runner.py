"""Obey a plan: run tokens of several sequences in one forward, or one sequence through the stock path. Knows no prompts and no storage."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from .errors import OutOfMemoryError
from .kv import Sequence
from .model.attention import Part
from .model.hf import HFModel


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
    """What became of one piece of work: logits [vocab] in fp32 if they were wanted, or the error that hit it alone."""

    logits: torch.Tensor | None = None
    error: OutOfMemoryError | None = None
    retried: bool = field(default=False)


def _no_memory(error: BaseException) -> bool:
    text = str(error).lower()
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "cannot allocate" in text or "not enough memory" in text


class Runner:
    """The only place that calls the model."""

    def __init__(self, model: HFModel) -> None:
        self.model = model

    def run(self, work: list[Work]) -> list[Outcome]:
        """Run all work in one forward and advance its sequences. A pack that does not fit in memory is run member by member."""
        paged = [w for w in work if isinstance(w.sequence, Sequence)]
        outcomes = {id(w): o for w, o in zip(paged, self._pack(paged), strict=True)}
        for w in work:
            if isinstance(w.sequence, StockSequence):
                outcomes[id(w)] = self._alone(w)
        return [outcomes[id(w)] for w in work]

    def _pack(self, work: list[Work]) -> list[Outcome]:
        if not work:
            return []
        try:
            return self._forward(work)
        except (MemoryError, RuntimeError, OSError) as error:
            if not _no_memory(error):
                raise
            if len(work) > 1:
                outcomes = [self._pack([w])[0] for w in work]
                for outcome in outcomes:
                    outcome.retried = True
                return outcomes
            tokens = work[0].sequence.length + len(work[0].ids)
            return [Outcome(error=OutOfMemoryError(f"no memory for {tokens} tokens of KV ({error}): lower memory_bytes or chunk_tokens"))]

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

    def _alone(self, work: Work) -> Outcome:
        sequence = work.sequence
        assert isinstance(sequence, StockSequence)
        try:
            logits, sequence.cache = self.model.stock(torch.tensor(work.ids), sequence.cache)
        except (MemoryError, RuntimeError) as error:
            if not _no_memory(error):
                raise
            return Outcome(error=OutOfMemoryError(f"no memory for {sequence.length + len(work.ids)} tokens ({error})"))
        sequence.length += len(work.ids)
        return Outcome(logits if work.wanted else None)
