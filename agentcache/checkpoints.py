"""Checkpoints: copies of what recurrent layers keep after some token; and the positions at which a prompt has them. Knows no models.

A prompt is computed in pieces: they end at the multiples of 512, at the end of its stable prefix and at the ends of its messages, the last
two rounded down to a multiple of 64. Bits of a state depend on where pieces ended, so a checkpoint tells, and serves prompts that are cut
at the same positions before it. A text without messages has pieces of 128: nobody knows where the next one will end.

A model may have proven that its states do not depend on pieces: then these end at checkpoints alone, which are rounded to no multiple, and
serve every prompt that begins with the same tokens. Decoded ones are among them: a long answer has a checkpoint at its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from .kv_spec import finite
from .types import PAGE_TOKENS, Layout

CHECKPOINT_TOKENS = 64  # positions of checkpoints are multiples: kernels of recurrent layers work on chunks of so many tokens
TEXT_TOKENS = 128  # pieces of a text without messages
STRIDE_TOKENS = 2048  # between those amid long text
LAST = 3  # of a conversation, stay: after its answer, before that, and where other prompts than the last one would go on
SHARE = 0.15  # of the bytes of a conversation, that others may take, but for its tool group's
_LASTING = ("system", "tools", "turn")  # runs of tokens whose ends later prompts have, too


class File(Protocol):
    """A file whose memory is mapped."""

    def changed(self) -> bool:
        """Tell whether it was written to since it was opened."""


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """Copies of the states of all recurrent layers after one token; a state that a layer does not have is None.

    cuts: positions at which the pieces ended that led to it, its own the last; none where it does not depend on them.
    file: whose mapped memory the states lie in, None if it is their own. decoded: it ends an answer, which prompts may show otherwise.
    """

    states: tuple[torch.Tensor | None, ...]
    cuts: tuple[int, ...]
    file: File | None = None
    decoded: bool = False

    @property
    def bytes(self) -> int:
        """Bytes of all states."""
        return sum(state.numel() * state.itemsize for state in self.states if state is not None)

    @property
    def finite(self) -> bool:
        """Tell whether the states are free of NaN and infinity."""
        return all(finite(state) for state in self.states if state is not None)

    def on(self, device: torch.device) -> Checkpoint:
        """The same on a device."""
        return replace(self, states=tuple(state if state is None else state.to(device) for state in self.states))


class LiveState(Protocol):
    """States of recurrent layers as one sequence runs."""

    length: int
    packs_pieces: bool  # one forward may run several pieces, and rows of several sequences
    alignment: int  # checkpoints stand at its multiples; 1: states do not depend on pieces

    def copy_at(self, stop: int) -> tuple[torch.Tensor | None, ...] | None:
        """Copies of the states after a row of the last forward at which one of its pieces ended; None if there are none."""

    def advance(self, tokens: int) -> None:
        """Declare so many tokens run."""

    def copy(self) -> tuple[torch.Tensor | None, ...]:
        """Copy the states."""

    def save(self) -> None:
        """Copy the states, to go back to them."""

    def go_back(self) -> int:
        """Go on from the states saved last; returns after how many tokens that is."""

    def restore(self, states: tuple[torch.Tensor | None, ...], length: int) -> None:
        """Go on from copied states after `length` tokens."""


def marks_of(layout: Layout, alignment: int, whole: bool = False) -> tuple[int, ...]:
    """Positions of a prompt's checkpoints: after its stable prefix, after its messages, and amid long stretches.

    Where its last run of tokens ends, later prompts go on: no mark, unless the prompt is `whole`, kept for its own sake. alignment: marks
    are its multiples.
    """
    tokens, spans = len(layout.ids), layout.spans
    ends = {layout.prefix_tokens} | {span.stop for span in (spans if whole else spans[:-1]) if span.kind in _LASTING}
    if in_text(layout):
        ends |= {*range(STRIDE_TOKENS, tokens, STRIDE_TOKENS), tokens // TEXT_TOKENS * TEXT_TOKENS}
    found: list[int] = []
    for end in sorted({*ends, tokens}):
        at, last = end // alignment * alignment, found[-1] if found else 0
        found.extend(range(last + STRIDE_TOKENS, at, STRIDE_TOKENS))
        if at > last and end in ends:
            found.append(at)
    return tuple(found)


def in_text(layout: Layout) -> bool:
    """Tell whether a prompt has text in the place of messages."""
    return any(span.kind == "text" for span in layout.spans)


def cuts_of(marks: Sequence[int], tokens: int, alignment: int, text: bool = False, decoded: int = 0) -> tuple[int, ...]:
    """Positions at which the pieces of so many tokens end, and of decoded ones after them, each a piece by itself."""
    if alignment == 1:
        return tuple(marks)
    step = TEXT_TOKENS if text else PAGE_TOKENS
    return tuple(sorted({*marks, *range(step, tokens, step), *range(tokens, tokens + decoded)}))
