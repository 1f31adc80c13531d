"""Sparse attention (DSA): an indexer, with keys of its own in slots of their own, chooses the tokens that each row sees.

The module's own code chooses (DeepSeek-V3.2, arXiv 2512.02556, section 2.1): it runs for each part of a packed forward, over the keys in
that part's pages. Products of its rows are computed for all parts at once.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.functional import pad

from .attention import Attention, Batch, Part, write
from .attention_interface import running
from .family import watch
from .loading import cache_name

NARROW = 32  # tokens that a row sees in a proof: fewer than there are


class Indexers:
    """Those of a decoder, if it has some."""

    def __init__(self, decoder: nn.Module) -> None:
        self._modules: list[Any] = [module for module in decoder.modules() if _fits(module)]
        self._ours = [_Hooks(module) for module in self._modules if not _hooked(module)]

    def __bool__(self) -> bool:
        return bool(self._modules)

    @contextmanager
    def narrowed(self) -> Iterator[None]:
        """Let rows of this thread's forwards see few tokens for a while: the best of those that were chosen."""
        running.narrow = NARROW
        try:
            yield
        finally:
            running.narrow = None

    def remove(self) -> None:
        """Leave the modules to their owner."""
        for hooks in self._ours:
            hooks.leave()


class _Hooks:
    """Lets an indexer choose part by part in a packed forward."""

    def __init__(self, module: Any) -> None:
        self._signature, self._cache = inspect.signature(module.forward), cache_name(module)
        self._handles = [module.register_forward_pre_hook(self, with_kwargs=True), module.register_forward_hook(self._join)]

    def leave(self) -> None:
        for handle in self._handles:
            handle.remove()

    def __call__(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[()], dict[str, Any]] | None:
        """Choose for all parts but the last, whose rows the module is given."""
        batch: Batch | None = getattr(running, "batch", None)
        given = self._signature.bind(*args, **kwargs).arguments
        if batch is None and getattr(running, "watched", None) is not None:
            return (), {**given, self._cache: _Watched(module)}
        if batch is None and getattr(running, "shadow", None) is None:
            return None
        slot, running.layers = running.slots[running.layers], running.layers + 1
        if batch is None:
            return None
        calls = [{**_call(batch, part, given), self._cache: _Pages(part, slot)} for part in batch.parts]
        running.chosen = [module.forward(**call) for call in calls[:-1]]
        return (), calls[-1]

    def _join(self, module: Any, args: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor | None:
        """The positions [1, rows, tokens] that each row sees; those of a row that sees fewer are repeated."""
        batch: Batch | None = getattr(running, "batch", None)
        most: int | None = getattr(running, "narrow", None)
        if batch is None:
            return output[..., :most] if most else None
        running.products.forget()
        found, running.chosen = [one[..., :most] for one in (*running.chosen, output)], []
        width = max(one.shape[-1] for one in found)
        packed = torch.cat([torch.cat([one, one[..., :1].expand(-1, -1, width - one.shape[-1])], -1) for one in found], 1)
        return pad(packed, (0, 0, 0, batch.rows - packed.shape[1]))


class _Watched:
    """A cache that keeps nothing: the indexer's keys [1, tokens, width] are one more call among those that are watched."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def update_indexer(self, keys: torch.Tensor, layer: int) -> torch.Tensor:
        running.watched.append(watch(running.config, self._module, keys[:, None], keys[:, None, :, :0], {}))
        return keys


class _Pages:
    """A cache of one part: new keys are written to its pages, and all up to there returned."""

    def __init__(self, part: Part, slot: int) -> None:
        self._part, self._slot = part, slot

    def update_indexer(self, keys: torch.Tensor, layer: int) -> torch.Tensor:
        part = self._part
        new = keys[0, :, None]
        write(part, self._slot, new, new[..., :0])
        return part.sequence.read(self._slot, 0, part.start + part.count)[0].transpose(0, 1).to(keys.dtype)


def _fits(module: Any) -> bool:
    """Tell whether a module chooses tokens by keys of a cache; others choose blocks of what they have compressed themselves."""
    given = {"hidden_states", "attention_mask"}
    return hasattr(module, "index_topk") and inspect.signature(module.forward).parameters.keys() >= {*given, cache_name(module)}


def _hooked(module: nn.Module) -> bool:
    """Tell whether another engine's model got there first."""
    return any(isinstance(hook, _Hooks) for hook in module._forward_pre_hooks.values())


def _call(batch: Batch, part: Part, given: dict[str, Any]) -> dict[str, Any]:
    """The module's arguments for the rows of one part, without its cache."""
    own, stop = {name: _rows(value, part, batch.rows) for name, value in given.items()}, part.start + part.count
    at = torch.arange(stop, device=given["hidden_states"].device)
    visible = ~Attention(1.0).hidden(at[part.start :, None], at[None])[None]
    return {**own, "attention_mask": visible}


def _rows(value: Any, part: Part, rows: int) -> Any:
    """The rows of one part, of an argument that has `rows` rows; their products are computed for all parts at once."""
    if isinstance(value, tuple):
        return tuple(_rows(one, part, rows) for one in value)
    if isinstance(value, torch.Tensor) and value.ndim > 1 and value.shape[1] == rows:
        return running.products.share(value, part.offset, part.offset + part.count)
    return value
