"""The verdict on a loaded model, for `agentcache doctor`: kinds of layers, what is reused of them, bits or tokens, bytes, why not."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from transformers import DynamicCache

from ..checkpoints import CHECKPOINT_TOKENS, SHARE, Checkpoint
from ..kv import Sequence
from . import steps
from .adapters import Adapter
from .attention import Attention, Part
from .hf import HFModel

_PROOFS = {
    "made": "made by this load",
    "found": "made by an earlier load, of the same code, config and kernels",
}


def verdict(model: HFModel) -> dict[str, Any]:
    """The verdict, by label."""
    unproven = "none needed: our own loop computes its layers" if model.support.paged else "none made: an obstacle came before it"
    found: dict[str, Any] = {"reuse": model.support.paged, "proof": _PROOFS.get(model.support.proof) or unproven}
    if getattr(model.model.config, "vision_config", None) is not None:
        found["images"] = "refused: only text is read"
    if model.spec is None:
        kinds = dict(Counter(getattr(model.config, "layer_types", None) or ()))
        whole = {"reused": "nothing: each prompt is computed whole, by transformers", "promise": "the model's own answers"}
        return found | {"why not": model.support.why} | ({"layers": kinds} if kinds else {}) | whole
    if model.weights:
        found["weights"] = f"{model.weights}, a scale for each output: other numbers than the checkpoint's"
    found |= {"layers": _kinds(model), "reused": "prefixes of any length, in memory and on disk"}
    if model.spec.recurrent:
        found["reused"] = "prefixes up to a checkpoint, in memory and on disk"
        found["checkpoints"] = f"at multiples of {model.support.alignment} tokens" if model.support.alignment > 1 else "after any token"
    found["promise"] = "the bits of reuse off" if model.bitwise else f"the greedy tokens of reuse off, no bits: {impurity(model)}"
    found["KV bytes per token"] = model.spec.token_bytes
    if model.spec.recurrent:
        found["bytes per checkpoint"] = _checkpoint(model).bytes
        found["checkpoints of a conversation"] = (
            f"its tool group's, its last one, and others while all take at most {SHARE:.0%} of its bytes"
        )
    return found


def _kinds(model: HFModel) -> dict[str, int]:
    """Number of layers by what they see or keep."""
    ways = [Attention(1.0, steps.window(layer.self_attn)) for layer in model.decoder.layers] if model.stepped else model.attentions()
    kinds = Counter(_sees(attn) for attn in ways)
    states = sum(hasattr(layer, "recurrent_states") for layer in DynamicCache(config=model.config).layers)
    values = [width for _, _, width in model.spec.layer_widths] if model.spec is not None else []
    indexed = values.count(0)
    latent = [module for module in model.decoder.modules() if hasattr(module, "expand_kv")]
    held = "latents" if latent and "expand_kv" in vars(latent[0]) else "keys and values of each head"
    extra = {
        "keep a state that does not grow": states,
        "of these, read what an earlier one keeps": max(0, len(ways) - len(values) + indexed),
        "of these, choose the tokens that they see: pages hold an indexer's keys, too": indexed,
        f"of these, latent: pages hold {held}": len(latent),
    }
    return dict(kinds) | {what: count for what, count in extra.items() if count}


def _sees(attn: Attention) -> str:
    seen = f"the last {attn.window} tokens" if attn.window else f"their chunk of {attn.chunk} tokens" if attn.chunk else "all tokens"
    traits = [name for name, there in (("sinks", attn.sinks is not None), ("soft caps", attn.softcap)) if there]
    return f"attend to {seen}" + (f", with {' and '.join(traits)}" if traits else "")


def impurity(model: HFModel, adapter: Adapter | None = None) -> str:
    """Why bits are not promised, of answers of the base or of an adapter."""
    if model.bitwise and adapter is not None:
        return f"products of adapter {adapter.name!r} choose by the number of rows"
    if model.quantized:
        return "kernels of quantised weights choose by the number of rows"
    if model.fingerprint is not None and model.fingerprint.foreign:
        return f"{model.fingerprint.foreign} is not probed"
    if model.numerics is not None and not model.numerics.pure:
        return "kernels on this device choose by the number of rows"
    return "experts, indexers or kernels of its layers depend on the tokens beside"


@torch.inference_mode()
def _checkpoint(model: HFModel) -> Checkpoint:
    """A checkpoint after the fewest tokens that have one."""
    assert model.spec is not None
    sequence = Sequence(model.spec, state=model.new_state())
    sequence.reserve(CHECKPOINT_TOKENS)
    ids, part = torch.zeros(CHECKPOINT_TOKENS, dtype=torch.long), Part(sequence, 0, CHECKPOINT_TOKENS)
    model.forward(ids, [part], [model.regime(CHECKPOINT_TOKENS) or ""], [])
    assert sequence.state is not None
    return Checkpoint(sequence.state.copy(), (CHECKPOINT_TOKENS,))
