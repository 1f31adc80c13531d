"""Latent attention (MLA): pages hold each token's latent and rotated key, which all heads share; queries are taken to where they lie.

Head h has rows K_h (keys) and V_h (values) of `kv_b_proj`. With a latent c and a rotated key r of each token, and weights w of the scores,

    q · [K_h c, r] = [K_hᵀ q_nope, q_rot] · [c, r]        Σ w V_h c = V_h Σ w c

(DeepSeek-V2, arXiv 2405.04434, section 2.1), so keys and values of the heads are never made. In a page r stands before c: that is where
every rotary key has its angles.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from .adapters import products
from .attention import Batch
from .attention_interface import running
from .numerics import MAX_ROWS, choose_kernel, pattern, safe_multiple
from .wrapped_weights import is_wrapper


class Latents:
    """Layers of a decoder with latent attention, if it has some: their `expand_kv` leaves latents to packed forwards."""

    def __init__(self, decoder: nn.Module) -> None:
        found: list[Any] = [module for module in decoder.modules() if hasattr(module, "expand_kv")]
        self._modules = found if all(map(_fits, found)) else []
        self._ours = [module for module in self._modules if "expand_kv" not in vars(module)]  # no other engine's
        for module in self._ours:
            module.expand_kv = _Expand(module)

    @property
    def pure(self) -> bool:
        """Whether rows of their products are independent of each other, for the threads of the calling thread."""
        types = [_wide(module.kv_a_layernorm.weight.dtype) for module in self._modules]
        return all(_multiple(_shape(module), side, dtype) for module, dtype in zip(self._modules, types) for side in (0, 1))

    def remove(self) -> None:
        """Give the modules their own method back."""
        for module in self._ours:
            del module.expand_kv


class _Expand:
    """Stands in for a layer's `expand_kv`: a packed forward takes latents as they are, one that is watched or shadowed takes both."""

    def __init__(self, module: Any) -> None:
        self._module, self._stock = module, module.expand_kv

    def __call__(self, latent: torch.Tensor, rotated: torch.Tensor) -> Any:
        packed = getattr(running, "batch", None) is not None
        if packed or getattr(running, "watched", None) is not None or getattr(running, "shadow", None) is not None:
            running.latent = Latent(self._module, latent, rotated)
        return running.latent.pair if packed else self._stock(latent, rotated)


class Latent:
    """Latents [1, 1, tokens, rank] and rotated keys [1, 1, tokens, rotated] of one call of attention. pair: (keys, values) over them."""

    def __init__(self, module: Any, latent: torch.Tensor, rotated: torch.Tensor) -> None:
        self._module, self.pair = module, (torch.cat([rotated, latent], -1), latent)
        self._weight: torch.Tensor | None = None  # read once: it may have to be dequantised

    def query(self, query: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Queries [1, heads, tokens, nope + rotated] for these keys: [1, heads, tokens, rotated + rank]."""
        nope = self._module.qk_nope_head_dim
        return torch.cat([query[..., nope:], self._product(query[0, ..., :nope], 0, batch)[None]], -1)

    def out(self, mixed: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Outputs [1, tokens, heads, width of values] of mixed latents [1, tokens, heads, rank]."""
        return self._product(mixed[0].transpose(0, 1), 1, batch).transpose(0, 1)[None].contiguous()

    def _product(self, x: torch.Tensor, side: int, batch: Batch) -> torch.Tensor:
        """x [heads, tokens, ins] times each head's part of keys (side 0) or of values (1), as adapters change it."""
        shape = _shape(self._module)
        self._weight = _weight(self._module) if self._weight is None else self._weight
        y = _multiply(x, self._weight, shape, side)
        for adapter, rows in batch.acting:
            if (low := adapter.low_rank(self._module.kv_b_proj.weight)) is not None:
                down, up, gain = low
                some, own = x[:, rows].float(), y[:, rows].float()
                if gain is not None:  # of each row of the weight: of what keys are multiplied by, and of values
                    part = gain.view(shape[0], 1, -1).split(shape[1:3], -1)[side]
                    own = own * part if side else _multiply((some * part).to(x.dtype), self._weight, shape, 0).float()
                y[:, rows] = (own + _low_product(some, down, up, shape, side)).to(y.dtype)
        return y


def _fits(module: Any) -> bool:
    """Tell whether keys and values of heads are a product of the latent, by a weight that can be read."""
    layer: Any = getattr(module, "kv_b_proj", None)
    dims = ("num_heads", "qk_nope_head_dim", "v_head_dim", "kv_lora_rank")
    return (_plain(layer) or type(layer).__name__ == "Linear4bit") and layer.bias is None and all(hasattr(module, name) for name in dims)


def _plain(layer: Any) -> bool:
    hooked = type(layer) is nn.Linear and (layer._forward_hooks or layer._forward_pre_hooks or "forward" in vars(layer))
    return type(layer) is nn.Linear and not is_wrapper(layer.weight) and (not hooked or hasattr(layer, "_hf_hook"))


def _shape(module: Any) -> tuple[int, int, int, int]:
    return module.num_heads, module.qk_nope_head_dim, module.v_head_dim, module.kv_lora_rank


def _weight(module: Any) -> torch.Tensor:
    """The weight of `kv_b_proj` as numbers [heads · (nope + width of values), rank]."""
    layer = module.kv_b_proj
    if (state := getattr(layer.weight, "quant_state", None)) is not None:
        from bitsandbytes.functional import dequantize_4bit

        return dequantize_4bit(layer.weight.data, state)
    if _plain(layer):
        return layer.weight  # type: ignore[no-any-return]
    norm = module.kv_a_layernorm.weight  # its owner has changed the layer since: what it makes of each number of a latent
    return layer(torch.eye(module.kv_lora_rank, dtype=norm.dtype, device=norm.device)[None])[0].t().contiguous()  # type: ignore[no-any-return]


def _part(weight: torch.Tensor, shape: tuple[int, int, int, int], side: int) -> torch.Tensor:
    """The part of keys [heads, nope, rank] or of values [heads, rank, width of values]."""
    heads, nope, width, rank = shape
    keys, values = weight.view(heads, nope + width, rank).split([nope, width], 1)
    return values.transpose(1, 2) if side else keys


def _multiply(x: torch.Tensor, weight: torch.Tensor, shape: tuple[int, int, int, int], side: int) -> torch.Tensor:
    rows, dtype = x.shape[1], x.dtype
    if x.device.type == "cpu":
        x = x.to(_wide(dtype))
        x = nn.functional.pad(x, (0, 0, 0, -rows % (_multiple(shape, side, x.dtype) or 8)))
    return torch.bmm(x, _part(weight, shape, side).to(x.dtype))[:, :rows].to(dtype)


def _low_product(x: torch.Tensor, down: torch.Tensor, up: torch.Tensor, shape: tuple[int, int, int, int], side: int) -> torch.Tensor:
    """x [heads, tokens, ins] times each head's part of U D, for D [low rank, rank] and U [heads · (nope + width of values), low rank]."""
    narrow = (*shape[:3], len(down))
    if side:
        return _multiply(products(x.flatten(0, 1), [down])[0].unflatten(0, x.shape[:2]), up, narrow, 1)
    inner = _multiply(x, up, narrow, 0)
    return products(inner.flatten(0, 1), [down.t().contiguous()])[0].unflatten(0, inner.shape[:2])


@functools.cache
def _wide(dtype: torch.dtype) -> torch.dtype:
    """The type of products: fp32 where this processor has no units for 16 bits."""
    return torch.float32 if choose_kernel(dtype, torch.device("cpu")) == "upcast" else dtype


def _multiple(shape: tuple[int, int, int, int], side: int, dtype: torch.dtype) -> int:
    """The multiple to which rows are padded; 0 if no padding makes them independent of each other."""
    return _probed(shape, side, dtype, torch.get_num_threads())


@functools.cache
def _probed(shape: tuple[int, int, int, int], side: int, dtype: torch.dtype, threads: int) -> int:
    heads, nope, width, rank = shape
    weight, ins = pattern(heads * (nope + width), rank, dtype, torch.device("cpu"), 3), rank if side else nope
    part, x = _part(weight, shape, side), pattern(heads * MAX_ROWS, ins, dtype, torch.device("cpu"), 5)
    return safe_multiple(lambda x: torch.bmm(x, part), x.view(heads, MAX_ROWS, ins))
