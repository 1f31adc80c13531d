"""Tokens ahead of a sequence's length, and the pieces left to compute around them. Knows nothing of pages.

Their KV was taken from another place, in all layers or below one of them.

    [0 .... length)[ hole )[ ahead, whole )[ hole )[ ahead, from layer 4 )[ ahead, whole ) ...
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Ahead:
    """Tokens [start, stop) whose KV lies in a sequence's pages below layer `entry`; None: in all layers.

    states: hidden states [tokens, hidden] with which computing resumes at that layer. run: which one it belongs to. held: the sequence
    stops here until `resolve`. exact: computing them would give the same bits.
    """

    start: int
    stop: int
    entry: int | None = None
    states: torch.Tensor | None = None
    run: int = 0
    held: bool = False
    exact: bool = False


@dataclass(frozen=True, slots=True)
class Piece:
    """Positions [start, start + count) to compute from layer `entry` on, where `states` come in."""

    start: int
    count: int
    entry: int = 0
    states: torch.Tensor | None = None


def pieces(ahead: Sequence[Ahead], length: int, tokens: int) -> list[Piece]:
    """Return the next `tokens` positions to compute from `length` on: holes, and ranges that resume at a layer. A held range ends them."""
    found: list[Piece] = []
    at = length
    for span in ahead:
        if count := min(span.start - at, tokens):
            found.append(Piece(at, count))
            tokens -= count
        if not tokens or span.held:
            return found
        if span.entry is not None:
            count = min(span.stop - span.start, tokens)
            assert span.states is not None
            found.append(Piece(span.start, count, span.entry, span.states[:count]))
            tokens -= count
            if count < span.stop - span.start:
                return found
        at = span.stop
    return [*found, Piece(at, tokens)] if tokens else found
