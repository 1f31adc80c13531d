"""Which models can be paged, which are stepped layer by layer, and why not otherwise. Knows nothing of weights.

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
    family = FAMILIES.get(kind)
    if family is None:
        return Support(_STOCK, False, f"model type {kind!r} has not been verified for paging")
    layers = set(getattr(config, "layer_types", None) or ())
    if foreign := layers - {"full_attention", "sliding_attention"}:
        return Support(family, False, f"layers of type {sorted(foreign)} keep a state that is not keys and values per token")
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope not in FIXED | BY_LENGTH:
        return Support(family, False, f"rotary type {rope!r} is not known")
    for setting in ("attn_logit_softcapping", "attn_sinks"):
        if getattr(config, setting, None):
            return Support(family, False, f"{setting} is set")
    return Support(family, True)
