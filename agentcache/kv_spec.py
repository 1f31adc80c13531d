"""Shape and place of a model's keys and values. Knows nothing of models."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from .types import PAGE_TOKENS


@dataclass(frozen=True, slots=True)
class KVSpec:
    """Shape and place of a model's KV. Layers are those that attend, in order; all of a page have room for kv_heads heads of head_dim.

    widths: heads, width of keys and width of values of each layer, where layers do not fill that room alike. recurrent: other layers keep
    a state that does not grow: sequences have checkpoints. boundaries: layers whose inputs, hidden states of width `hidden`, are kept with
    new pages: computing can be resumed there.
    """

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    boundaries: tuple[int, ...] = ()
    hidden: int = 0
    widths: tuple[tuple[int, int, int], ...] = ()
    recurrent: bool = False

    @property
    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of a page's keys and values."""
        return (
            (self.layers, self.kv_heads, self.head_dim, PAGE_TOKENS),
            (self.layers, self.kv_heads, PAGE_TOKENS, self.head_dim),
        )

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values over all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def boundary_bytes(self) -> int:
        """Bytes of one token's boundaries."""
        return len(self.boundaries) * self.hidden * self.dtype.itemsize

    @property
    def page_bytes(self) -> int:
        """Bytes of one page in memory."""
        return PAGE_TOKENS * (self.token_bytes + self.boundary_bytes)
