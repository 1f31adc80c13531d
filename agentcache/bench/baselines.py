"""Baselines that users run today, timed: transformers' generate, its caches, the documented prefix recipe, and a cache kept by hand.

Gets token ids, so tokenising is not in these times (it is in ours). Knows no engine; pages only as a source of keys and values.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache, GenerationConfig, StaticCache
from transformers.cache_utils import DynamicLayer
from transformers.generation.streamers import BaseStreamer

from ..kv import Sequence
from ..model.hf import HFModel
from ..model.int8 import widened
from ..model.kernels.instructions import has_16bit_units
from ..model.loading import cache_in, cache_name

STATIC_STEP = 512  # tokens


@dataclass(frozen=True, slots=True)
class Timed:
    """One timed answer: ms to the first token, ms per further token, ms in all, and the greedy ids."""

    ttft_ms: float
    decode_ms: float
    total_ms: float
    ids: tuple[int, ...]


def timed(began: float, stamps: Seq[float], ids: Seq[int]) -> Timed:
    """The figures of tokens that came at `stamps` (seconds on perf_counter) after a call at `began`."""
    further = len(stamps) - 1
    decode = (stamps[-1] - stamps[0]) / further * 1e3 if further else 0.0
    return Timed((stamps[0] - began) * 1e3, decode, (stamps[-1] - began) * 1e3, tuple(ids))


class _Clock(BaseStreamer):
    """Notes when each token arrives; the first thing that generate puts is the prompt."""

    def __init__(self) -> None:
        self.stamps: list[float] = []
        self._prompt_seen = False

    def put(self, value: Any) -> None:
        if self._prompt_seen:
            self.stamps.append(time.perf_counter())
        self._prompt_seen = True

    def end(self) -> None:
        pass


def generate(model: Any, ids: Seq[int], new: int, cache: Callable[[], Any] = lambda: None) -> Timed:
    """`model.generate`, greedy, exactly `new` tokens. cache: makes one that may hold the first part of ids; by default a DynamicCache."""
    began = time.perf_counter()
    past = cache()
    clock = _Clock()
    given = torch.tensor([list(ids)], device=model.device)
    eager = model.device.type == "cpu" or not isinstance(past, StaticCache)  # on a GPU generate compiles for a static cache
    plain = GenerationConfig(
        max_new_tokens=new, min_new_tokens=new, do_sample=False, repetition_penalty=1.0, pad_token_id=0, disable_compile=eager
    )
    held = {} if past is None else {cache_name(model): past}
    with torch.inference_mode():
        out = model.generate(given, attention_mask=torch.ones_like(given), generation_config=plain, streamer=clock, **held)
    drawn = out[0, len(ids) :].tolist()
    assert len(drawn) == len(clock.stamps) == new, f"generate gave {len(drawn)} tokens in {len(clock.stamps)} puts, {new} were asked for"
    return timed(began, clock.stamps, drawn)


def rival(model: HFModel, dtype: torch.dtype | None = None) -> Any:
    """The model that transformers' ways run: the engine's own, or a copy of its weights in another type.

    dtype: by default float32 where the processor has no units for the model's own type, and stock transformers emulates its products;
    for quantized weights the engine's own.
    """
    if dtype is None:
        emulated = model.device.type == "cpu" and model.dtype != torch.float32 and not has_16bit_units(model.dtype)
        dtype = torch.float32 if emulated and not (model.quantized or model.weights) else model.dtype
    if dtype == model.dtype:
        return model.model
    with model.mixers.given() if model.mixers else nullcontext():
        return widened(model.model, dtype)


def static(model: Any, ids: Seq[int], new: int) -> Timed:
    """generate with a StaticCache just large enough; on a GPU compiled, for lengths in steps: it compiles anew for each, half a minute."""
    room = len(ids) + new
    room += 0 if model.device.type == "cpu" else -room % STATIC_STEP
    return generate(model, ids, new, lambda: StaticCache(config=model.config, max_cache_len=room))


def recipe(model: Any, prefix: Any, ids: Seq[int], new: int) -> Timed:
    """The documented prefix reuse: deep copy of a prefix DynamicCache, then generate with the full ids."""
    return generate(model, ids, new, lambda: copy.deepcopy(prefix))


def kept(model: Any, cache: Any, new_ids: Seq[int]) -> Timed:
    """One step of a loop that carries one DynamicCache: forward of the new ids only, one greedy token. The cache is as before after it."""
    crops = all(type(layer) is DynamicLayer for layer in cache.layers)
    cache = cache if crops else copy.deepcopy(cache)  # before the clock runs: a loop would not copy it
    began = time.perf_counter()
    with torch.inference_mode():
        given = torch.tensor([list(new_ids)], device=model.device)
        token = int(model(input_ids=given, use_cache=True, logits_to_keep=1, **{cache_name(model): cache}).logits[0, -1].argmax())
    stamp = time.perf_counter()
    if crops:
        cache.crop(-len(new_ids))
    return timed(began, [stamp], [token])


def cache_of(model: Any, sequence: Sequence, ids: Seq[int]) -> Any:
    """A DynamicCache of these first tokens of a sequence: the baselines start from our pages instead of another minute of prefill, where
    transformers would keep the same."""
    tokens = len(ids)
    if sequence.state is not None or sequence.spec.widths:
        with torch.inference_mode():
            given, name = torch.tensor([list(ids)], device=model.device), cache_name(model)
            out = model(input_ids=given, use_cache=True, logits_to_keep=1, **{name: DynamicCache(config=model.config)})
            return cache_in(out, name)
    cache = DynamicCache(config=model.config)
    for layer in range(sequence.spec.layers):
        keys, values = (t.transpose(0, 1)[None].to(model.dtype).contiguous() for t in sequence.read(layer, 0, tokens))
        cache.update(keys, values, layer)
    return cache
