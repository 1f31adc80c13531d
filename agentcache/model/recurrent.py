"""State of layers that does not grow with the tokens (recurrent, convolution): held by transformers' own cache layers, copied, put back.

Keys and values of the same model lie in pages: its attention layers find nothing in this cache but the length of the sequence.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import Cache, DynamicCache
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicIndexedLayer,
    DynamicLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from ..checkpoints import CHECKPOINT_TOKENS


class _Paged(CacheLayerMixin):
    """An attention layer whose keys and values lie in pages: passes new ones on."""

    is_sliding = False
    is_initialized = True

    def __init__(self) -> None:
        super().__init__()
        self.length = 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Hold nothing."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kw: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the new keys and values alone."""
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Number of keys, and of the first one."""
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        """Number of tokens before this forward."""
        return self.length

    def get_max_length(self) -> int:
        """No longest length."""
        return -1


class _Hybrid(LinearAttentionLayer, _Paged):
    """A layer that attends and has a state, too."""

    is_compileable = False

    def __init__(self, number_of_states: int = 1, **kw: Any) -> None:
        _Paged.__init__(self)
        LinearAttentionLayer.__init__(self, number_of_states=number_of_states)

    def lazy_initialization(self, *args: Any, **kw: Any) -> None:
        """Make room for a state."""
        if kw:
            LinearAttentionLayer.lazy_initialization(self, **kw)


def layers_with_state(config: Any) -> list[str]:
    """The kinds of layers of a model that keep a state which does not grow."""
    return sorted({type(layer).__name__ for layer in DynamicCache(config=config).layers if hasattr(layer, "recurrent_states")})


class RecurrentState(Cache):
    """The states of one sequence after `length` tokens; a forward changes them in place."""

    def __init__(self, config: Any) -> None:
        super().__init__(layers=[_of(layer) for layer in DynamicCache(config=config).layers])
        self.length = 0

    def advance(self, tokens: int) -> None:
        """Declare so many tokens run."""
        self.length += tokens
        for layer in self.layers:
            if isinstance(layer, _Paged):
                layer.length = self.length

    @property
    def _recurrent(self) -> list[Any]:
        return [layer for layer in self.layers if isinstance(layer, LinearAttentionCacheLayerMixin)]

    def copy(self) -> tuple[torch.Tensor | None, ...]:
        """All states as copies, layer by layer: of convolutions, then recurrent ones."""
        found = [state for layer in self._recurrent for state in (*layer.conv_states.values(), *layer.recurrent_states.values())]
        return tuple(state if state is None else state.clone() for state in found)

    def restore(self, states: tuple[torch.Tensor | None, ...], length: int) -> None:
        """Go on after `length` tokens, from copies of what `copy` returned then."""
        given = iter(states)
        for layer in self._recurrent:
            for held, known in (
                (layer.conv_states, layer.is_conv_states_initialized),
                (layer.recurrent_states, layer.is_recurrent_states_initialized),
            ):
                for at in held:
                    state = next(given)
                    held[at] = None if state is None else state.clone()
                    known[at] = state is not None
                    layer.has_previous_state[at] |= state is not None
            for at, state in layer.conv_states.items():
                layer.conv_kernel_size[at] = None if state is None else state.shape[-1]
            for state in (*layer.conv_states.values(), *layer.recurrent_states.values()):
                if state is not None:
                    layer.dtype, layer.device = state.dtype, state.device
        self.advance(length - self.length)


def _of(layer: Any) -> Any:
    if isinstance(layer, DynamicIndexedLayer):
        raise TypeError(f"layers of kind {type(layer).__name__!r} keep keys of an index beside their own")
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        return _Hybrid(layer.number_of_states) if isinstance(layer, DynamicLayer) else layer
    return _Paged() if isinstance(layer, DynamicLayer) else layer


class ShortChunks:
    """Makes layers that compute in larger chunks work on `CHECKPOINT_TOKENS`: a call of few tokens computes a whole chunk, whose work grows
    with its square."""

    def __init__(self, decoder: Any) -> None:
        self._given = [(m, m.chunk_size) for m in decoder.modules() if getattr(m, "chunk_size", 0) > CHECKPOINT_TOKENS]
        self._shorten()

    def _shorten(self) -> None:
        for module, _ in self._given:
            module.chunk_size = CHECKPOINT_TOKENS

    def restore(self) -> None:
        """Give the owner's sizes back."""
        for module, size in self._given:
            module.chunk_size = size

    @contextmanager
    def given(self) -> Iterator[None]:
        """Let the owner's sizes hold for a while, in which nothing is asked of this model."""
        self.restore()
        try:
            yield
        finally:
            self._shorten()
