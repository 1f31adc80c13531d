"""Which models can be paged, which are stepped layer by layer, and why not otherwise. Decides from configs and module types; runs nothing.

To add a family: read its attention and rotary code, add a row, add it to tests/models.py, run the tests (CONTRIBUTING.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .rope import BY_LENGTH, FIXED


@dataclass(frozen=True, slots=True)
class Family:
    """stepped: layers run by our own loop (else by transformers' modules). batch_free: rows do not depend on the pack (no experts)."""

    name: str
    stepped: bool = False
    batch_free: bool = True


FAMILIES = {
    family.name: family
    for family in (
        Family("llama", stepped=True),
        Family("mistral", stepped=True),
        Family("qwen2", stepped=True),
        Family("qwen3", stepped=True),
        Family("smollm3"),
        Family("granite"),
        Family("olmo2"),
        Family("phi3"),
        Family("qwen3_moe", batch_free=False),
        Family("mixtral", batch_free=False),
    )
}

_KEYS_AND_VALUES = frozenset({"full_attention", "sliding_attention"})
# a setting of the config that is not empty -> why its layers cannot be paged (yet)
_OBSTACLES = {
    "kv_lora_rank": "latent attention (MLA) keeps a compressed state, not keys and values per head",
    "attn_logit_softcapping": "attention scores are soft-capped",
    "attn_sinks": "attention sinks take part in the softmax",
    "ssm_cfg": "state space layers keep a state that is not keys and values per token",
    "state_size": "state space layers keep a state that is not keys and values per token",
    "mamba_d_state": "state space layers keep a state that is not keys and values per token",
    "block_types": "recurrent layers keep a state that is not keys and values per token",
    "num_kv_shared_layers": "layers share their keys and values",
}
_KINDS = {"gpt_oss": "attention sinks take part in the softmax", "lfm2": "convolution layers keep a state of their own"}


@dataclass(frozen=True, slots=True)
class Support:
    """What can be done with one loaded model. `why` names the first obstacle when it cannot be paged."""

    family: Family
    paged: bool
    why: str = ""


_STOCK = Family("stock", batch_free=False)


def support(config: Any) -> Support:
    """Decide from the (text) config alone whether the KV of every layer can be paged."""
    kind = getattr(config, "model_type", "") or type(config).__name__
    family = FAMILIES.get(kind, _STOCK)
    why = _obstacle(config)
    if not why and family is _STOCK:
        why = f"model type {kind!r} has not been verified for paging" + (f": {_KINDS[kind]}" if kind in _KINDS else "")
    return Support(family, not why, why)


def _obstacle(config: Any) -> str:
    foreign = sorted(set(getattr(config, "layer_types", None) or ()) - _KEYS_AND_VALUES)
    if foreign:
        return f"layers of type {', '.join(map(repr, foreign))} keep a state that is not keys and values per token"
    for setting, why in _OBSTACLES.items():
        if getattr(config, setting, None):
            return f"{why} ({setting}={getattr(config, setting)!r})"
    rope = getattr(config, "rope_parameters", None) or {}
    if any(isinstance(value, dict) for value in rope.values()):
        return "rotary frequencies differ by layer type"
    if rope.get("rope_type", "default") not in FIXED | BY_LENGTH:
        return f"rotary type {rope['rope_type']!r} is not known"
    for setting in ("num_attention_heads", "num_key_value_heads", "head_dim"):
        if not isinstance(getattr(config, setting, None), (int, type(None))):
            return f"{setting} differs between layers"
    return ""


def examine(model: Any, decoder: Any) -> str:
    """Why the loaded modules of a supported family cannot be paged after all; "" if they can."""
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
