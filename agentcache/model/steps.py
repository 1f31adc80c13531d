"""Llama-like layers stepped by our own loop: the same operations in the same order as transformers' modules, without their overhead.

Covers pre-norm decoders with separate q, k, v, optional q/k norms per head, rotate-half rotary over the whole head and a gated MLP:
Llama, Mistral, Qwen2, Qwen3. Tested bit-equal to the generic path. Knows nothing of requests or stores.
"""

from __future__ import annotations

from typing import Any

import torch

from .attention import Batch, attend
from .numerics import linear


def rms_norm(module: Any, x: torch.Tensor) -> torch.Tensor:
    """Root mean square norm as Llama's and Qwen's modules compute it."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + module.variance_epsilon)
    return module.weight * wide.to(x.dtype)  # type: ignore[no-any-return]


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate halves of x [tokens, heads, head_dim] by cos and sin [tokens, 1, head_dim]."""
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return (x * cos) + (turned * sin)


def _attention(block: Any, layer: int, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, batch: Batch) -> torch.Tensor:
    kernel, dim = batch.numerics.kernel, block.head_dim
    query, key, value = (
        linear(kernel, x, p.weight, p.bias).view(x.shape[0], -1, dim) for p in (block.q_proj, block.k_proj, block.v_proj)
    )
    if hasattr(block, "q_norm"):
        query, key = rms_norm(block.q_norm, query), rms_norm(block.k_norm, key)
    query, key = rotate(query, cos, sin), rotate(key, cos, sin)
    out = mix(batch, layer, query, key, value, block.scaling, getattr(block, "sliding_window", None) or 0)
    return linear(kernel, out.view(x.shape[0], -1), block.o_proj.weight, block.o_proj.bias)


def mix(
    batch: Batch, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, window: int
) -> torch.Tensor:
    """Write the new keys and values of every part, then attend. All tensors [rows, heads, head_dim]; padding rows give zeros."""
    outs = []
    for part in batch.parts:
        rows = slice(part.offset, part.offset + part.count)
        part.sequence.write(layer, part.start, key[rows], value[rows])
        outs.append(attend(batch, part, layer, query[rows], scale, window))
    if short := query.shape[0] - sum(part.count for part in batch.parts):
        outs.append(query.new_zeros(short, *query.shape[1:]))
    return torch.cat(outs) if len(outs) > 1 else outs[0]


def hidden_states(model: Any, ids: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Run all layers over packed ids [rows] -> normalised hidden states [rows, hidden]; cos, sin [rows, head_dim]."""
    decoder, kernel = model.model, batch.numerics.kernel
    x = decoder.embed_tokens(ids)
    cos, sin = cos[:, None], sin[:, None]
    for index, layer in enumerate(decoder.layers):
        x = x + _attention(layer.self_attn, index, rms_norm(layer.input_layernorm, x), cos, sin, batch)
        mlp, h = layer.mlp, rms_norm(layer.post_attention_layernorm, x)
        gate = mlp.act_fn(linear(kernel, h, mlp.gate_proj.weight, mlp.gate_proj.bias))
        gate = gate * linear(kernel, h, mlp.up_proj.weight, mlp.up_proj.bias)
        x = x + linear(kernel, gate, mlp.down_proj.weight, mlp.down_proj.bias)
    return rms_norm(decoder.norm, x)
