"""Ranges that a request attaches after its exact prefix, by consent: the calls that the core makes. Computes nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from .plan import Attach
from .store.entry import Match
from .store.keys import Scope
from .types import Refusal


class AttachedRanges(Protocol):
    """Repeated text that one request takes from other positions. On the device's thread.

    scope: of the pages after the first attached range, None while the sequence is exact. admitted_tokens: how many
    tokens the store has under it. admissible: whether the store may have more.
    """

    scope: Scope | None
    admitted_tokens: int

    @property
    def admissible(self) -> bool: ...

    @property
    def numerics(self) -> frozenset[str]:
        """Digests of the kernels that computed the attached ranges."""

    def pending(self, scope: Scope | None, ms_per_token: float, wake: Callable[[], None]) -> bool:
        """Tell whether pages that the prompt repeats are on their way from disk."""

    def known_tokens(self, scope: Scope) -> int:
        """Count the tokens of a waiting prompt that are in memory, exact or as near as the request accepts."""

    def match(self, scope: Scope, tokens: int) -> Match | None:
        """Find a prefix longer than `tokens` among pages that follow attached ranges; the request goes on from it."""

    def propose(self, prefix_tokens: int, below: Match | None) -> Sequence[Attach]:
        """Ranges to attach after the exact prefix: disjoint, in order; none if they spare no more than `below` does, which is exact."""

    def attach(self) -> None:
        """Put the planned ranges into the request's pages."""

    def advance(self) -> None:
        """Look at the range that was reached by a forward, and go on: with it, with less of it, or without."""

    def refusal(self) -> Refusal:
        """Say since when the sequence is not exact, while ranges are attached to it."""

    def doubt(self, logits: torch.Tensor) -> str:
        """Say why the next choice is too close to be made after attached ranges; empty if it is not."""

    def detach(self, for_good: bool = False) -> None:
        """Forget the attached ranges: the sequence begins anew. for_good: the request is computed from now on."""

    def answered(self) -> None:
        """The request is answered; its sequence is still there."""

    def close(self) -> None:
        """Pages that are on their way from disk are not needed any more."""
