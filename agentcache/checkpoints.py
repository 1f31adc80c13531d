"""Checkpoints: copies of what recurrent layers keep after some token; and the positions at which a prompt has them. Knows no models.

A prompt is computed in pieces that end at the multiples of 512, at the end of its stable prefix and at the ends of its turns, the last two
rounded down to a multiple of 64. Pieces depend on the tokens before them alone, so a hit and a miss run the same ones, with the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from .types import PAGE_TOKENS, Layout

CHECKPOINT_TOKENS = 64  # positions of checkpoints are multiples: kernels of recurrent layers work on chunks of so many tokens
STRIDE_TOKENS = 2048  # between those amid long text


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """Copies of the states of all recurrent layers after one token; a state that a layer does not have is None."""

    states: tuple[torch.Tensor | None, ...]

    @property
    def bytes(self) -> int:
        """Bytes of all states."""
        return sum(state.numel() * state.itemsize for state in self.states if state is not None)


class LiveState(Protocol):
    """States of recurrent layers as one sequence runs."""

    length: int

    def advance(self, tokens: int) -> None:
        """Declare so many tokens run."""
        ...

    def copy(self) -> tuple[torch.Tensor | None, ...]:
        """Copy the states."""
        ...

    def restore(self, states: tuple[torch.Tensor | None, ...], length: int) -> None:
        """Go on from copied states after `length` tokens."""
        ...


def marks_of(layout: Layout) -> tuple[int, ...]:
    """Positions of a prompt's checkpoints: after its stable prefix, after its turns, and amid long stretches."""
    ends = sorted({layout.prefix_tokens, *(span.stop for span in layout.spans)})
    found: list[int] = []
    for end in ends:
        at = min(end, len(layout.ids)) // CHECKPOINT_TOKENS * CHECKPOINT_TOKENS
        last = found[-1] if found else 0
        found.extend(range(last + STRIDE_TOKENS, at, STRIDE_TOKENS))
        if at > last:
            found.append(at)
    return tuple(found)


def cuts_of(marks: Sequence[int], tokens: int) -> tuple[int, ...]:
    """Positions at which the pieces of a prompt end."""
    return tuple(sorted({*marks, *range(PAGE_TOKENS, tokens, PAGE_TOKENS)}))
