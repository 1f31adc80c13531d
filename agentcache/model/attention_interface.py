"""Our attention as transformers' modules call it: registered beside theirs, which goes on serving every call that is not a packed forward.

`running` tells, in the thread of a forward, what that forward is: a packed one, one that is watched, or one that is shadowed.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask, sdpa_mask

from ..kv import Sequence
from . import steps
from .attention import Batch, Part
from .family import attention_of, watch

ATTENTION = "agentcache"
# of the forward in this thread: its batch, config, rotary tables, slots, products, and how many layers attended
running = threading.local()


def _stock_attention(eager: bool, module: Any) -> Callable[..., Any]:
    """What the owner's own calls ran before: torch's sdpa, or the eager function beside the module's forward, which may be inherited."""
    return inspect.unwrap(type(module).forward).__globals__["eager_attention_forward"] if eager else sdpa_attention_forward


def _register(before: str) -> None:
    """Register our attention for models that ran `before`, which goes on serving every call that is not a packed forward."""
    eager, stock_mask = before == "eager", {"eager": eager_mask, "sdpa": sdpa_mask}[before]

    def attention(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any = None, **kw: Any) -> Any:
        batch: Batch | None = getattr(running, "batch", None)
        if batch is None:
            if (watched := getattr(running, "watched", None)) is not None:
                latent, running.latent = running.latent, None
                own_key, own_value = (key, value) if latent is None else latent.pair
                watched.append(watch(running.config, module, own_key, own_value, kw))
            if (chosen := kw.get("indices")) is not None:
                attention_mask = _narrowed(attention_mask, chosen)
            out = _stock_attention(eager, module)(module, query, key, value, attention_mask, **kw)
            if (shadow := getattr(running, "shadow", None)) is not None:
                own = _paged(shadow[0], module, query, key, value, kw)
                shadow.append(float((own - out[0]).abs().max() / out[0].abs().max()))
            return out
        if batch.token is not None:
            batch.token.glance_layer(module.layer_idx)
        return _paged(batch, module, query, key, value, kw), None

    def mask(*args: Any, **kw: Any) -> Any:
        if getattr(running, "batch", None) is None:
            return stock_mask(*args, **kw)
        if kw.get("allow_is_causal_skip", True):
            return None
        return torch.ones(1, 1, 1, 1, dtype=torch.bool, device=kw.get("device"))  # modules with an indexer slice theirs

    AttentionInterface.register(f"{ATTENTION}_{before}", attention)
    AttentionMaskInterface.register(f"{ATTENTION}_{before}", mask)


def _narrowed(mask: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """A mask [sequences, 1, rows, keys] that hides all but chosen positions [sequences, rows, tokens], too."""
    seen = torch.zeros(mask.shape, dtype=torch.bool, device=mask.device).scatter_(-1, chosen[:, None].long(), True)
    return mask & seen if mask.dtype == torch.bool else mask.masked_fill(~seen, torch.finfo(mask.dtype).min)


def _paged(batch: Batch, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, given: dict[str, Any]) -> torch.Tensor:
    """Attention over pages, of tensors as transformers' modules give them. The call of a layer that shares another's writes nothing."""
    call, running.layers = running.layers, running.layers + 1
    slot = running.slots[call]
    attn = attention_of(running.config, module.layer_idx, query.shape[-1], given)
    latent, running.latent = running.latent, None  # of this layer (latents.py)
    if latent is not None:
        query, (key, value) = latent.query(query, batch), latent.pair
    with torch._C.DisableTorchFunction():  # of RowPureLinear, which looks at each use of a tensor
        q = query[0].transpose(0, 1).contiguous()
        if slot in running.slots[:call]:
            return steps.attended(batch, slot, q, value.shape[-1], attn)[None]
        k, v = (t[0].transpose(0, 1).contiguous() for t in (key, value))
        out = steps.mix(batch, slot, q, k, v, attn)[None]
    return (out if latent is None else latent.out(out, batch)).contiguous()  # as modules expect it


@torch.inference_mode()
def shadow(model: Any, ids: torch.Tensor, places: list[int]) -> tuple[torch.Tensor, list[float]]:
    """Run transformers' own forward over ids [tokens] without a cache: logits [places, vocab] in fp32, and how far attention over pages
    is off in each layer, of the same numbers: relative to the largest number of the layer's output.
    """
    sequence = Sequence(model.spec)
    sequence.reserve(len(ids))
    running.shadow, running.config = [Batch([Part(sequence, 0, len(ids))], len(ids), model.numerics)], model.config
    running.slots, running.layers, running.latent = model._slots, 0, None
    try:
        kept = torch.tensor(places, device=model.device)
        logits = model.model(input_ids=ids[None].to(model.device), use_cache=False, logits_to_keep=kept).logits[0]
        return (logits if len(logits) == len(places) else logits[kept]).float(), running.shadow[1:]
    finally:
        running.shadow = None


for _before in ("sdpa", "eager"):
    _register(_before)


def rotary_hook(module: Any, args: Any, output: Any) -> Any:
    """Give the rotary tables of a packed forward in the place of those that its module made."""
    tables = getattr(running, "tables", None)
    return output if tables is None else tuple(t[None] for t in tables)
