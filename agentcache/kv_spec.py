"""Shape, place and soundness of a model's keys and values. Knows nothing of models."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from .types import PAGE_TOKENS


@dataclass(frozen=True, slots=True)
class KVSpec:
    """Shape and place of a model's KV. Layers are those that keep keys and values of their own, in order.

    widths: heads, width of keys and width of values of each layer, where layers or those widths differ; kv_heads and head_dim are the
    largest then. recurrent: other layers keep a state that does not grow: sequences have checkpoints. boundaries: layers whose inputs,
    hidden states of width `hidden`, are kept with new pages: computing can be resumed there.
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
    def layer_widths(self) -> tuple[tuple[int, int, int], ...]:
        """Heads, width of keys and width of values of each layer."""
        return self.widths or ((self.kv_heads, self.head_dim, self.head_dim),) * self.layers

    @property
    def kind(self) -> tuple[str, tuple[tuple[int, int, int], ...]]:
        """Number type and widths, as a stored page says them."""
        return str(self.dtype).removeprefix("torch."), self.layer_widths

    @property
    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of a page's keys and values: of all layers, or flat where layers differ."""
        if self.widths:
            keys, values = (sum(heads * width[at] for heads, *width in self.widths) for at in (0, 1))
            return (keys * PAGE_TOKENS,), (values * PAGE_TOKENS,)
        return (
            (self.layers, self.kv_heads, self.head_dim, PAGE_TOKENS),
            (self.layers, self.kv_heads, PAGE_TOKENS, self.head_dim),
        )

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values over all layers."""
        return sum(heads * (keys + values) for heads, keys, values in self.layer_widths) * self.dtype.itemsize

    @property
    def page_bytes(self) -> int:
        """Bytes of one page in memory."""
        return PAGE_TOKENS * (self.token_bytes + len(self.boundaries) * self.hidden * self.dtype.itemsize)


def finite(values: torch.Tensor) -> bool:
    """Tell whether values are free of NaN and infinity: lowest and highest show both, in a twentieth of the time of isfinite."""
    if not values.numel():
        return True
    low, high = values.aminmax()
    return bool(low * 0 == high * 0)
