"""Caches of transformers that are filled with random keys and values, and a bare loop of forwards behind them. Knows no engine."""

from __future__ import annotations

import time
from typing import Any

import torch
from transformers import DynamicCache, StaticCache

from agentcache.bench.shapes import fill
from agentcache.kv_spec import KVSpec
from agentcache.model.loading import cache_name


def random_kv(spec: KVSpec, tokens: int, layer: int) -> tuple[Any, Any]:
    """Random keys and values [1, kv_heads, tokens, head_dim] of one layer."""
    keys, values = (torch.empty(1, spec.kv_heads, tokens, spec.head_dim, dtype=spec.dtype, device=spec.device) for _ in range(2))
    block = noise(spec)
    fill(keys, block, start=layer * 7919)
    fill(values, block, start=layer * 7919 + 31)
    return keys, values


def noise(spec: KVSpec) -> Any:
    """A block of normal numbers of the model's type."""
    return torch.randn(1_048_583, generator=torch.Generator().manual_seed(1)).to(device=spec.device, dtype=spec.dtype)


def random_cache(model: Any, spec: KVSpec, tokens: int, room: int, *, static: bool) -> Any:
    """A DynamicCache, or a StaticCache with `room` further slots, that holds `tokens` random tokens."""
    cache = StaticCache(config=model.config, max_cache_len=tokens + room) if static else DynamicCache(config=model.config)
    for layer in range(spec.layers):
        cache.update(*random_kv(spec, tokens, layer), layer)
    return cache


def decode(model: Any, cache: Any, tokens: int, first: int = 0) -> list[float]:
    """ms of each of `tokens` single-token forwards behind a cache, greedy: a bare loop, without generate's own cost per token."""
    took, token = [], first
    with torch.inference_mode():
        for _ in range(tokens):
            began = time.perf_counter()
            given = torch.tensor([[token]], device=model.device)
            token = int(model(input_ids=given, use_cache=True, logits_to_keep=1, **{cache_name(model): cache}).logits[0, -1].argmax())
            took.append((time.perf_counter() - began) * 1e3)
    return took
