"""Norms and rotary angles of many rows: PyTorch's operations, or all of them in one compiled pass. Knows nothing of layers.

PyTorch reads and writes all rows once for each of the ten or so operations that these are. The compiled functions are those of
layer_code.py: one rounding for each of PyTorch's, sums in its order, so the bits are the same. Each is held against PyTorch's operations
before its first use, the sums by themselves, and not used if one bit differs, or where the numbers are not of 16 bits.
"""

from __future__ import annotations

import ctypes
import functools
import struct

import torch

from . import layer_code
from .linear_few import BINARY, kernels

MOST_LINES = 1024  # vectors of a row that is normalised: longer ones are added up in more levels than layer_code.py has
_ALONE = 1 << 18  # numbers: less is done by one thread before two have met


def bits_of(epsilon: float) -> int:
    """An fp32 number as a field of an argument block."""
    return int(struct.unpack("<I", struct.pack("<f", epsilon))[0])


@functools.cache
def sums_agree(dtype: torch.dtype, n: int, rows: int = 64) -> bool:
    """Whether a row's sum of squares is added up as PyTorch adds it. One order of additions differs from another in the last bit of fp32:
    rounded to 16 bits that would hardly ever be seen, but it would be there.
    """
    found = kernels()
    if found is None or dtype not in BINARY or n % (2 * found.lanes) or n >= MOST_LINES * layer_code.SUM_LANES:
        return False
    x, out = _numbers(dtype, rows, n), torch.zeros(rows)
    source = functools.partial(layer_code.scales, found.lanes, BINARY[dtype], rows, n)
    block = (ctypes.c_int64 * 3)(x.data_ptr(), bits_of(1e-6), out.data_ptr())
    found.team(found.compiled(f"scales {dtype} {rows} {n}", source), block, 1)
    return torch.equal(out, x.float().pow(2).mean(-1).add_(1e-6).rsqrt_())


def _fit(*tensors: torch.Tensor) -> bool:
    first = tensors[0]
    return all(t.dtype == first.dtype and t.device.type == "cpu" and t.is_contiguous() for t in tensors)


def _run(name: str, source: functools.partial[str], rows: int, numbers: int, *fields: int) -> None:
    found = kernels()
    assert found is not None
    threads = min(rows, torch.get_num_threads()) if numbers > _ALONE else 1
    found.team(found.compiled(name, source), (ctypes.c_int64 * (len(fields) + 1))(*fields, rows), threads)


def _plain_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    wide = x.float()
    wide = wide * wide.pow(2).mean(-1, keepdim=True).add_(epsilon).rsqrt_()
    return weight * wide.to(x.dtype)


def _plain_heads(x: torch.Tensor, weight: torch.Tensor | None, epsilon: float, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    x = x if weight is None else _plain_norm(x, weight, epsilon)
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return (x * cos) + (turned * sin)


def _compiled_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    found, element, out = kernels(), BINARY[x.dtype], torch.empty_like(x)
    assert found is not None
    source = functools.partial(layer_code.norm_rows, found.lanes, element, x.shape[1])
    fields = (x.data_ptr(), weight.data_ptr(), bits_of(epsilon), out.data_ptr())
    _run(f"norm rows {element} {x.shape[1]}", source, len(x), x.numel(), *fields)
    return out


def _compiled_heads(x: torch.Tensor, weight: torch.Tensor | None, epsilon: float, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    found, element, out = kernels(), BINARY[x.dtype], torch.empty_like(x)
    assert found is not None
    rows, count, dim = x.shape
    source = functools.partial(layer_code.head_rows, found.lanes, element, count, dim, weight is not None)
    scaled = (0, 0) if weight is None else (weight.data_ptr(), bits_of(epsilon))
    name = f"head rows {element} {count} {dim} {weight is not None}"
    _run(name, source, rows, x.numel(), x.data_ptr(), *scaled, cos.data_ptr(), sin.data_ptr(), out.data_ptr())
    return out


def _numbers(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Of many sizes."""
    random = torch.Generator().manual_seed(shape[-1])
    return (torch.randn(shape, generator=random) * torch.randn(shape, generator=random).exp()).to(dtype)


@functools.cache
def _norms_agree(dtype: torch.dtype, n: int) -> bool:
    x, weight = _numbers(dtype, 64, n), _numbers(dtype, n)
    return sums_agree(dtype, n) and torch.equal(_compiled_norm(x, weight, 1e-6), _plain_norm(x, weight, 1e-6))


@functools.cache
def _heads_agree(dtype: torch.dtype, dim: int, normed: bool) -> bool:
    if not sums_agree(dtype, dim):
        return False
    x, cos, sin = _numbers(dtype, 32, 2, dim), _numbers(dtype, 32, 1, dim), _numbers(dtype, 32, 1, dim)
    given = (x, _numbers(dtype, dim) if normed else None, 1e-6, cos, sin)
    return torch.equal(_compiled_heads(*given), _plain_heads(*given))


def norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Root mean square norm of x [rows, n] times weight [n], as Llama's and Qwen's modules compute it."""
    if x.dim() == 2 and _fit(x, weight) and _norms_agree(x.dtype, x.shape[1]):
        return _compiled_norm(x, weight, epsilon)
    return _plain_norm(x, weight, epsilon)


def heads(x: torch.Tensor, weight: torch.Tensor | None, epsilon: float, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [rows, heads, dim], each head normalised if there is a weight [dim], and its halves rotated by cos and sin [rows, 1, dim]."""
    given = (x, cos, sin) if weight is None else (x, cos, sin, weight)
    if len(cos) == len(x) and _fit(*given) and _heads_agree(x.dtype, x.shape[2], weight is not None):
        return _compiled_heads(x, weight, epsilon, cos, sin)
    return _plain_heads(x, weight, epsilon, cos, sin)
