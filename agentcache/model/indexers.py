"""Sparse attention (DSA): an indexer, with keys of its own in slots of their own, chooses the tokens that each row sees.

The module's own code chooses (DeepSeek-V3.2, arXiv 2512.02556, section 2.1): it runs for each part of a packed forward, over the keys in
that part's pages.
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

_GIVEN = {"hidden_states", "attention_mask", "past_key_values"}
NARROW = 32  # tokens that a row sees in a proof: fewer than there are


class Indexers:
    """Those of a decoder, if it has some."""

    def __init__(self, decoder: nn.Module) -> None:
        self._owners: list[Any] = [one for one in decoder.modules() if _fits(one._modules.get("indexer"))]
        for owner in self._owners:
            if "indexer" not in vars(owner):
                vars(owner)["indexer"] = _Indexer(owner.indexer)  # found before the submodule of that name, which stays as it is
            owner.indexer.engines += 1

    def __bool__(self) -> bool:
        return bool(self._owners)

    @contextmanager
    def narrowed(self) -> Iterator[None]:
        """Let rows see few tokens for a while."""
        modules = [owner.indexer.module for owner in self._owners]
        before = [module.index_topk for module in modules]
        for module in modules:
            module.index_topk = min(module.index_topk, NARROW)
        try:
            yield
        finally:
            for module, topk in zip(modules, before, strict=True):
                module.index_topk = topk

    def remove(self) -> None:
        """Give the modules their own indexer back."""
        for owner in self._owners:
            owner.indexer.engines -= 1
            if not owner.indexer.engines:
                del vars(owner)["indexer"]


class _Indexer:
    """Stands in for a layer's indexer: a packed forward chooses over pages. engines: the number of those that need it."""

    def __init__(self, module: Any) -> None:
        self.module, self.engines, self._signature = module, 0, inspect.signature(module.forward)

    def __call__(self, *args: Any, **kw: Any) -> Any:
        batch: Batch | None = getattr(running, "batch", None)
        given = self._signature.bind(*args, **kw).arguments
        if batch is None and getattr(running, "watched", None) is not None:
            return self.module(**{**given, "past_key_values": _Watched(self.module)})
        if batch is None and getattr(running, "shadow", None) is None:
            return self.module(*args, **kw)
        slot, running.layers = running.slots[running.layers], running.layers + 1
        return self.module(*args, **kw) if batch is None else self._chosen(batch, slot, given)

    def _chosen(self, batch: Batch, slot: int, given: dict[str, Any]) -> torch.Tensor:
        """Positions [1, rows, tokens] that each row sees; those of a row that sees fewer are repeated."""
        found = []
        for part in batch.parts:
            rows, stop = slice(part.offset, part.offset + part.count), part.start + part.count
            at = torch.arange(stop, device=given["hidden_states"].device)
            own = {name: _rows(value, rows, batch.rows) for name, value in given.items()}
            own["attention_mask"] = ~Attention(1.0).hidden(at[part.start :, None], at[None])[None]
            found.append(self.module(**{**own, "past_key_values": _Pages(part, slot)}))
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
        return part.sequence.read(self._slot, 0, part.start + part.count)[0].transpose(0, 1)


def _fits(module: Any) -> bool:
    """Tell whether a module chooses tokens by keys of a cache; others choose blocks of what they have compressed themselves."""
    return hasattr(module, "index_topk") and inspect.signature(module.forward).parameters.keys() >= _GIVEN


def _rows(value: Any, rows: slice, of: int) -> Any:
    """The rows of one part, of whatever has rows: tensors [1, of, ...], or tuples of them."""
    if isinstance(value, tuple):
        return tuple(_rows(one, rows, of) for one in value)
    return value[:, rows] if isinstance(value, torch.Tensor) and value.ndim > 1 and value.shape[1] == of else value
