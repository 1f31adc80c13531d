"""transformers' own forward for one sequence, token by token from its own cache. Knows no pages."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from transformers import DynamicCache

from .kernels.dispatch import RowPureLinear
from .loading import cache_in, cache_name

if TYPE_CHECKING:
    from .fingerprint import Fingerprint


def run(
    model: Any, config: Any, growing: Sequence[Any], ids: torch.Tensor, state: Any, adapter: Any, start: int, known: Fingerprint | None
) -> tuple[torch.Tensor, Any]:
    """New ids [tokens] after `state` -> last logits [vocab] in fp32, grown state; as of `HFModel.stock`.

    growing: rotary modules whose frequencies grow with the longest call. known: tells the adapter of weights that changed.
    """
    if adapter is None:
        return _forward(model, config, growing, ids, state)
    adapter.refresh(known)
    start += len(state) if isinstance(state, torch.Tensor) else 0
    with RowPureLinear("aten", adapt=partial(adapter.add_from, start)):
        done = _forward(model, config, growing, ids, state)
    adapter.check_applied()
    return done


def _forward(model: Any, config: Any, growing: Sequence[Any], ids: torch.Tensor, state: Any) -> tuple[torch.Tensor, Any]:
    for rotary in growing:  # else the longest call so far, anyone's, decides the frequencies
        rotary.inv_freq, rotary.max_seq_len_cached = rotary.original_inv_freq.clone(), rotary.original_max_seq_len
    if not isinstance(state, torch.Tensor):
        keyword = cache_name(model)
        ours = keyword != "cache_params" and getattr(model, "_supports_default_dynamic_cache", lambda: True)()  # MiniMax makes its own
        held = DynamicCache(config=config) if state is None and ours else state
        given = _taken(model, {"use_cache": True, "logits_to_keep": 1, keyword: held})
        out = model(input_ids=ids[None], **given)
        if keyword in given and (grown := cache_in(out, keyword)) is not None:
            return out.logits[0, -1].float(), grown
    ids = torch.cat([state, ids]) if isinstance(state, torch.Tensor) else ids
    return model(input_ids=ids[None], **_taken(model, {"use_cache": False})).logits[0, -1].float(), ids


def _taken(model: Any, given: dict[str, Any]) -> dict[str, Any]:
    """The keywords that a model's forward takes: code that comes with a checkpoint may lack some."""
    takes = inspect.signature(model.forward).parameters
    return given if any(each.kind is each.VAR_KEYWORD for each in takes.values()) else {name: given[name] for name in takes.keys() & given}
