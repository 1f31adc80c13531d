"""State of layers that does not grow with the tokens (recurrent, convolution): held by transformers' own cache layers, copied, put back.

Keys and values of the same model lie in pages: its attention layers find nothing in this cache but the length of the sequence.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch.nn import functional
from transformers import Cache, DynamicCache
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicIndexedLayer,
    DynamicLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from ..checkpoints import CHECKPOINT_TOKENS, LiveState
from ..copy_memory import copies
from . import mixer_kernels
from .attention import Part
from .kernels.dispatch import RowPureLinear

States = tuple[torch.Tensor | None, ...]
_UPDATES = {"update_conv_state", "update_recurrent_state"}  # of transformers' caches: modules that call them keep a state


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
    """The states of one sequence after `length` tokens; a forward changes them in place.

    packs_pieces: one forward may run several pieces, and rows of several sequences. alignment: checkpoints stand at its multiples.
    Of the forward that runs: its products, its rows of this sequence, and where pieces of these end but for the last one. A layer's states
    after some rows are noted: between pieces, or by compiled kernels amid all rows. beside: of other sequences, whose rows follow.
    """

    def __init__(self, config: Any, packs_pieces: bool = False, alignment: int = CHECKPOINT_TOKENS) -> None:
        super().__init__(layers=[_of(layer) for layer in DynamicCache(config=config).layers])
        self.length = 0
        self.packs_pieces, self.alignment = packs_pieces, alignment
        self.products: RowPureLinear | None = None
        self.rows = self.all_rows = 0
        self.stops: tuple[int, ...] = ()
        self.beside: tuple[Any, ...] = ()
        self._noted: dict[int, dict[tuple[int, str, int], torch.Tensor]] = {}  # by the row; the layer, the kind of state and its number
        self._saved: tuple[int, list[torch.Tensor | None]] = (0, [])
        self.done: list[Any] = []  # outputs of the layer that runs: of earlier pieces, and of other sequences
        self.earlier = 0  # of them, which come before the one that its module computes

    def advance(self, tokens: int) -> None:
        """Declare so many tokens run."""
        self.length += tokens
        for layer in self.layers:
            if isinstance(layer, _Paged):
                layer.length = self.length

    def recurrent_state(self, layer: int) -> torch.Tensor | None:
        """The recurrent state of a layer that has one at most; None before its first tokens."""
        return self.layers[layer].recurrent_states.get(0)  # type: ignore[no-any-return]

    def update_recurrent_state(self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kw: Any) -> torch.Tensor:
        """Take the new state of a layer -> it. One that a kernel changed in place is there already."""
        held: torch.Tensor | None = self.layers[layer_idx].recurrent_states.get(state_idx)
        if held is not None and held.data_ptr() == recurrent_states.data_ptr():
            return held
        return super().update_recurrent_state(recurrent_states, layer_idx, state_idx, **kw)

    def update_conv_state(self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kw: Any) -> torch.Tensor:
        """Take new inputs of a convolution [1, channels, tokens] -> the last ones and them. Copies them token by token, as they lie."""
        layer, rows = self.layers[layer_idx], conv_states.shape[-1]
        if not layer.has_previous_state[state_idx] or conv_states.stride(1) != 1:
            joined = super().update_conv_state(conv_states, layer_idx, state_idx, **kw)
        else:
            held = layer.conv_states[state_idx]
            joined = torch.cat([held.mT, conv_states.mT], 1).mT
            held.copy_(joined[..., -held.shape[-1] :])
        for stop in self._stops_amid(rows):
            taps = layer.conv_states[state_idx].shape[-1]
            last = joined[..., : joined.shape[-1] - rows + stop][..., -taps:]
            self._noted[stop][layer_idx, "conv_states", state_idx] = _copied(functional.pad(last, (taps - last.shape[-1], 0)))
        return joined

    def through(self, layer: int, state: torch.Tensor, rows: int) -> Iterator[slice]:
        """Yield the rows for which a kernel changes a recurrent state in place, and note the state after some of them."""
        stops = self._stops_amid(rows)
        for start, stop in pairwise((0, *stops, rows)):
            yield slice(start, stop)
            if stop in stops:
                self._noted[stop][layer, "recurrent_states", 0] = _copied(state)

    def _stops_amid(self, rows: int) -> tuple[int, ...]:
        """The rows after which states are noted, if these are all rows of the sequence, and no piece of them."""
        return tuple(self._noted) if rows == self.rows else ()

    @property
    def recurrent(self) -> dict[int, Any]:
        """The layers that keep a state, by their number."""
        return {at: layer for at, layer in enumerate(self.layers) if isinstance(layer, LinearAttentionCacheLayerMixin)}

    def begin(self, products: RowPureLinear, parts: list[Part]) -> None:
        """Begin a forward of one part, or of parts of several sequences, of which this one is the first."""
        self.products, self.done, self.beside = products, [], tuple(part.sequence.state for part in parts[1:])
        self.rows, self.stops, kept = parts[0].cuts
        self.all_rows = sum(part.count for part in parts)
        self._noted = {stop: {} for stop in kept}
        for state, part in zip(self.beside, parts[1:], strict=True):
            state.begin(products, [part])

    def note(self, layer: int, stop: int) -> None:
        """Copy the states of a layer after a row, if they are kept."""
        if stop in self._noted:
            states = ((name, state) for name, state in self._all() if name[0] == layer and state is not None)
            self._noted[stop].update((name, _copied(state)) for name, state in states)

    def copy_at(self, stop: int) -> States | None:
        """The states of all layers after this row of the last forward, as `copy` returns them; None if one was not noted."""
        noted, own = self._noted[stop], self._all()
        lost = any(state is not None and name not in noted for name, state in own)
        return None if lost else tuple(noted.get(name) for name, _ in own)

    def copy(self) -> States:
        """All states as copies, layer by layer: of convolutions, then recurrent ones."""
        return tuple(state if state is None else _copied(state) for _, state in self._all())

    def _all(self) -> list[tuple[tuple[int, str, int], torch.Tensor | None]]:
        """All states, by their layers, kinds and numbers."""
        kinds = ("conv_states", "recurrent_states")
        layers = self.recurrent.items()
        return [((at, kind, n), state) for at, layer in layers for kind in kinds for n, state in getattr(layer, kind).items()]

    @torch.inference_mode()
    def save(self) -> None:
        """Copy the states, to go back to them; into the memory of those saved before."""
        states, known = self._all(), self._saved[1]
        if not known:
            known = [None if state is None else _copied(state) for _, state in states]
        else:
            for held, (_, state) in zip(known, states, strict=True):
                if held is not None and state is not None:
                    held.copy_(state)
        self._saved = (self.length, known)

    def go_back(self) -> int:
        """Go on from the states saved last, which can be done once; returns after how many tokens that is."""
        length, known = self._saved
        for n, ((layer, kind, at), state) in enumerate(self._all()):
            known[n], getattr(self.layers[layer], kind)[at] = state, known[n]
        self.advance(length - self.length)
        return length

    def restore(self, states: States, length: int) -> None:
        """Go on after `length` tokens, from copies of what `copy` returned then."""
        given = iter(states)
        for layer in self.recurrent.values():
            for held, known in (
                (layer.conv_states, layer.is_conv_states_initialized),
                (layer.recurrent_states, layer.is_recurrent_states_initialized),
            ):
                for at in held:
                    state = next(given)
                    held[at] = None if state is None else copies.copied(state)
                    known[at] = state is not None
                    layer.has_previous_state[at] |= state is not None
            for at, state in layer.conv_states.items():
                layer.conv_kernel_size[at] = None if state is None else state.shape[-1]
            for state in (*layer.conv_states.values(), *layer.recurrent_states.values()):
                if state is not None:
                    layer.dtype, layer.device = state.dtype, state.device
        self.advance(length - self.length)


@torch.inference_mode(False)  # a copy outlives the forward
def _copied(state: torch.Tensor) -> torch.Tensor:
    return copies.copied(state.contiguous())


def _of(layer: Any) -> Any:
    if isinstance(layer, DynamicIndexedLayer):
        raise TypeError(f"layers of kind {type(layer).__name__!r} keep keys of an index beside their own")
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        return _Hybrid(layer.number_of_states) if isinstance(layer, DynamicLayer) else layer
    return _Paged() if isinstance(layer, DynamicLayer) else layer


class Mixers:
    """The modules of a decoder that keep states: made to work on `CHECKPOINT_TOKENS` where they compute in larger chunks, since a call of
    few tokens computes a whole chunk, whose work grows with its square.

    They run sequence by sequence; and piece by piece for several pieces, unless their kernels are compiled and states do not depend on
    pieces. Everything else, and products of the rows that they are given, are computed for all rows at once.
    compiles: with compiled kernels, where they can.
    """

    def __init__(self, decoder: Any, compiles: bool = False) -> None:
        self._given = [(m, m.chunk_size) for m in decoder.modules() if getattr(m, "chunk_size", 0) > CHECKPOINT_TOKENS]
        self._found = [module for module in decoder.modules() if hasattr(module, "layer_idx") and _keeps_state(module)]
        self._compiled = [module for module in self._found if compiles and mixer_kernels.install(module)]
        self._hooks = [module.register_forward_pre_hook(self._before, with_kwargs=True) for module in self._found]
        self._hooks += [module.register_forward_hook(self._after_forward, with_kwargs=True) for module in self._found]
        self._shorten()

    def _shorten(self) -> None:
        for module, _ in self._given:
            module.chunk_size = CHECKPOINT_TOKENS

    def _restore(self) -> None:
        for module, size in self._given:
            module.chunk_size = size

    def remove(self) -> None:
        """Give the owner's modules back as they were."""
        self._restore()
        for hook in self._hooks:
            hook.remove()
        for module in self._compiled:
            mixer_kernels.remove(module)
        self._compiled = []

    @contextmanager
    def given(self) -> Iterator[None]:
        """Restore the owner's chunk sizes within the block, in which no request runs."""
        self._restore()
        try:
            yield
        finally:
            self._shorten()

    @property
    def compiled(self) -> int:
        """The number of modules that compiled kernels work for."""
        return len(self._compiled)

    def complete(self, config: Any) -> bool:
        """Tell whether every layer with a state runs in pieces."""
        return sorted(module.layer_idx for module in self._found) == sorted(RecurrentState(config).recurrent)

    def _before(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        state = _state_of(args, kwargs)
        if state is None or not (state.stops or state.beside) or state.done:  # another engine's hook of this module came first
            return None
        first, own = 0, (0, 0)
        for each in (state, *state.beside):
            whole = each.alignment == 1 and module in self._compiled  # states do not depend on pieces, and its kernels note them
            for start, stop in pairwise((0, *(() if whole else each.stops), each.rows)):
                if each is state and stop == each.rows:  # the module itself computes these
                    state.earlier, own = len(state.done), (start, stop)
                    continue
                some, named = _rows(state, (args, kwargs), first + start, first + stop, each)
                state.done.append(module.forward(*some, **named))
                each.note(module.layer_idx, stop)
            first += each.rows
        return _rows(state, (args, kwargs), *own, state) if state.done else None

    def _after_forward(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        state = _state_of(args, kwargs)
        if state is None or not state.done:
            return None
        assert state.products is not None
        state.products.forget()
        done, state.done = [*state.done[: state.earlier], output, *state.done[state.earlier :]], []
        if isinstance(output, torch.Tensor):
            return torch.cat(done, 1)
        return tuple(torch.cat(some, 1) if isinstance(some[0], torch.Tensor) else some[-1] for some in zip(*done, strict=True))


def _keeps_state(module: Any) -> bool:
    return not _UPDATES.isdisjoint(inspect.unwrap(type(module).forward).__code__.co_names)


def _state_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> RecurrentState | None:
    return next((value for value in (*args, *kwargs.values()) if isinstance(value, RecurrentState)), None)


def _rows(state: RecurrentState, given: Any, start: int, stop: int, own: LiveState) -> Any:
    """A module's arguments, each cut to rows [start, stop), with the state of their sequence."""
    if given is state:
        return own
    if isinstance(given, torch.Tensor):
        assert state.products is not None
        return state.products.share(given, start, stop) if given.ndim > 1 and given.shape[1] == state.all_rows else given
    if isinstance(given, (tuple, list)):
        return tuple(_rows(state, each, start, stop, own) for each in given)
    return {name: _rows(state, each, start, stop, own) for name, each in given.items()} if isinstance(given, dict) else given
