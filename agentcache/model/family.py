"""What the layers of a model keep, found out from one forward that is watched; which families our own loop steps. Lists no families else.

Whether pages of such layers can be reused is not decided here: the model proves it (proof.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from ..errors import ModelError
from .attention import Attention

STEPPED = frozenset({"llama", "mistral", "qwen2", "qwen3"})  # whose layers steps.py runs
# what a module may hand to its attention beside tensors: other things that are not empty decide scores in a way of their own
_KNOWN = frozenset(
    "scaling sliding_window softcap s_aux dropout is_causal attention_mask position_ids indices batch use_cache output_attentions "
    "output_hidden_states cache_position output_router_logits return_dict layer_idx logits_to_keep".split()
)
_STRANGE = {"position_bias": "a bias by position is added to its scores"}


@dataclass(frozen=True, slots=True)
class Support:
    """What can be done with one loaded model. name: its model type. why: the first obstacle, where its state cannot be paged.

    row_pure: in the proof a token's bits did not depend on the tokens beside it. packs_pieces: nor, with recurrent layers, on which pieces
    of the sequence, or next tokens of others, ran in one forward. alignment: checkpoints stand at its multiples; 1: nor did they depend on
    where pieces ended. proof: this load made it, or found an earlier one's; "" where there was none: own loop, or an obstacle before it.
    """

    name: str
    paged: bool
    why: str = ""
    row_pure: bool = False
    packs_pieces: bool = False
    alignment: int = 0
    proof: Literal["", "made", "found"] = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class Layer:
    """One call of attention as a forward made it, and how it attends.

    key, value: the very tensors of the call, [1, heads, tokens, width]; an indexer's values have width 0. page_keys: a copy of the keys as
    a page holds them. why: it cannot be paged.
    """

    attention: Attention
    key: torch.Tensor
    value: torch.Tensor
    page_keys: torch.Tensor
    why: str = ""


def watch(config: Any, module: Any, key: torch.Tensor, value: torch.Tensor, given: dict[str, Any]) -> Layer:
    """Describe one call of attention: key and value [1, heads, tokens, width], `given` its keywords."""
    strange = sorted(name for name, what in given.items() if name not in _KNOWN and what is not None and what is not False)
    named = ", ".join(repr(name) + (f" ({_STRANGE[name]})" if name in _STRANGE else "") for name in strange)
    why = f"attention of {type(module).__name__!r} depends on {named}" if strange else ""
    attn = attention_of(config, int(getattr(module, "layer_idx", -1)), key.shape[-1], given)
    return Layer(attn, key, value, key[0].transpose(1, 2).clone(), why)


def has_experts(module: Any) -> bool:
    """Tell whether a module is experts that transformers calls by its interface."""
    return hasattr(module, "is_transposed") and hasattr(module, "down_proj")


def first_use(stock: Callable[[torch.Tensor, Any], Any], name: str) -> None:
    """Run one token through quantised weights: bitsandbytes repacks them at their first use. ModelError if they do not run."""
    try:
        stock(torch.zeros(1, dtype=torch.long), None)
    except (RuntimeError, TypeError, ValueError, AttributeError, AssertionError) as error:
        why = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise ModelError(
            f"model type {name!r} does not run with its quantised weights ({why}): load it with other bits, or without"
        ) from error


def slots_of(layers: Sequence[Layer]) -> tuple[int, ...]:
    """The slot of a page that each call of attention reads: its own, or that of the earlier call whose keys and values it was given."""
    slots: list[int] = []
    for at, layer in enumerate(layers):
        same = (slots[n] for n in range(at) if layers[n].key is layer.key and layers[n].value is layer.value)
        slots.append(next(same, max(slots, default=-1) + 1))
    return tuple(slots)


def widths_of(owners: Sequence[Layer]) -> tuple[tuple[int, int, int], ...]:
    """Heads, width of keys and of values of each slot. Where no layer attends, a page still counts its tokens: two zeros for each."""
    return tuple((layer.key.shape[1], layer.key.shape[-1], layer.value.shape[-1]) for layer in owners) or ((1, 1, 1),)


def attention_of(config: Any, layer: int, width: int, given: dict[str, Any]) -> Attention:
    """How a layer attends, by the keywords of its call and its type in the config."""
    types = getattr(config, "layer_types", None) or ()
    kind = types[layer] if layer < len(types) else ""
    window = given.get("sliding_window") or (getattr(config, "sliding_window", 0) if kind == "sliding_attention" else 0)
    chunk = getattr(config, "attention_chunk_size", 0) if kind == "chunked_attention" else 0
    scale = given.get("scaling")
    return Attention(
        width**-0.5 if scale is None else float(scale),
        window or 0,
        chunk or 0,
        given.get("softcap") or 0.0,
        given.get("s_aux"),
        None if (chosen := given.get("indices")) is None else chosen[0],
    )


def obstacle(layers: Sequence[Layer], dtype: torch.dtype, recurrent: bool) -> str:
    """Why the state of layers that were watched cannot be paged with weights of this type; "" if it can, as far as can be seen.

    recurrent: layers keep states that do not grow; the proof tells whether there is nothing else.
    """
    for layer in layers:
        if layer.why:
            return layer.why
    if not layers:
        return "" if recurrent else "no layer calls attention by transformers' interface: its state is not keys and values per token"
    types = {layer.key.dtype for layer in layers if layer.value.shape[-1]}  # keys of an indexer lie in the type of the others
    if len(types) > 1:
        return f"layers mix number types {sorted(map(str, types))}"
    return f"keys are {types.pop()}, weights {dtype}" if types != {dtype} else ""


def examine(model: Any, decoder: Any) -> str:
    """Why the modules of a family that our own loop knows cannot be stepped after all; "" if they can."""
    layers = getattr(decoder, "layers", None)
    if layers is None or not hasattr(decoder, "rotary_emb") or any(not hasattr(layer, "self_attn") for layer in layers):
        return f"{type(decoder).__name__!r} is not built as transformers builds this family"
    if len(layers) != decoder.config.num_hidden_layers:
        return f"it has {len(layers)} layers, its config says {decoder.config.num_hidden_layers}"
    for module in (model, decoder, layers[0], layers[0].self_attn, decoder.rotary_emb):
        forward = type(module).forward
        if not forward.__module__.startswith("transformers.models.") or "forward" in vars(module) and not hasattr(module, "_hf_hook"):
            return f"{type(module).__name__!r} does not run transformers' own code but {forward.__module__!r}"
    shapes = {_shape(layer.self_attn) for layer in layers}
    if len(shapes) > 1:
        return f"shapes of keys and values differ between layers: {sorted(map(str, shapes))}"
    types = {p.dtype for n, p in layers.named_parameters() if p.is_floating_point() and "lora_" not in n}
    if len(types) > 1:
        return f"layers mix number types {sorted(map(str, types))}"
    return ""


def _shape(block: Any) -> tuple[tuple[str, int], ...]:
    """Output widths of the projections that make keys and values, and the head width."""
    names = ("k_proj", "v_proj", "qkv_proj")
    widths = [(name, int(getattr(block, name).out_features)) for name in names if hasattr(block, name)]
    return (*widths, ("head_dim", int(block.head_dim)))
