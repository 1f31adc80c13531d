"""Products by oneDNN, of weights as they are or converted to fp32 block by block; by PyTorch where there is no oneDNN. Compiles nothing."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional

from .scratch import scratch

Projection = tuple[torch.Tensor, "torch.Tensor | None"]  # weight [out, in] and bias [out]
UPCAST_BLOCK = 1024  # rows of a weight converted at a time: fits the second-level cache, and large enough to amortise a call


@functools.cache
def onednn_takes(dtype: torch.dtype) -> bool:
    """True if oneDNN's inner product has code for this type on this processor."""
    inner = _onednn_linear()
    if inner is None:
        return False
    try:
        inner(torch.ones(2, 32, dtype=dtype), torch.ones(8, 32, dtype=dtype), None, "none", [], "")
    except RuntimeError:  # oneDNN has no code for this type on this processor
        return False
    return True


@functools.cache
def _onednn_linear() -> Any:
    if not torch.backends.mkldnn.is_available():
        return None
    return getattr(torch.ops.mkldnn, "_linear_pointwise", None)


def product_of_library(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x [rows, ins] times weight [outs, ins] transposed, plus bias, by oneDNN; by PyTorch's own where that is not there."""
    inner = _onednn_linear()
    if inner is None:
        return functional.linear(x, weight, bias)
    return inner(x, weight, bias, "none", [], "")  # type: ignore[no-any-return]


def upcast(x: torch.Tensor, projections: Sequence[Projection]) -> list[torch.Tensor]:
    """x [rows, ins] of 16-bit numbers times each weight [outs, ins] transposed, plus its bias, in fp32 -> [rows, outs] as x each.

    Each product by itself has the same bits: only the work on x is shared.
    """
    wide_x, out = x.float(), []
    for weight, bias in projections:
        outs, ins = weight.shape
        out.append(torch.empty(x.shape[0], outs, dtype=x.dtype))
        for start in range(0, outs, UPCAST_BLOCK):
            stop = min(outs, start + UPCAST_BLOCK)
            converted = scratch("weight", (stop - start) * ins).view(stop - start, ins)
            converted.copy_(weight[start:stop])
            wide = product_of_library(wide_x, converted, None)
            out[-1][:, start:stop] = wide if bias is None else wide.add_(bias[start:stop].float())
    return out
