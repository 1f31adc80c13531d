"""Products by oneDNN, of weights as they are or converted to fp32 block by block; by PyTorch where there is no oneDNN. Compiles nothing.

oneDNN multiplies few rows with fp32 weights in its own blocks twice as fast as with rows of weights, which it rearranges in each call.
`packed` holds such a copy beside a weight while memory is plenty: it has the bits of the weight itself, which `packing_agrees` tries.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import psutil
import torch
from torch.nn import functional
from torch.utils.weak import WeakIdKeyDictionary

from .scratch import scratch

Projection = tuple[torch.Tensor, "torch.Tensor | None"]  # weight [out, in] and bias [out]
FEW_ROWS = range(2, 17)  # above, rearranging a weight takes less time than the product; a single row takes another code path
SPARE = 4  # times a weight's bytes: memory that must be free for a packed copy
UPCAST_BLOCK = 1024  # rows of a weight converted at a time: fits the second-level cache, and large enough to amortise a call


@functools.cache
def onednn_takes(dtype: torch.dtype) -> bool:
    """True if oneDNN's inner product has code for this type on this processor."""
    if (inner := _onednn_linear()) is None:
        return False
    try:
        inner(torch.ones(2, 32, dtype=dtype), torch.ones(8, 32, dtype=dtype), None, "none", [], "")
    except RuntimeError:  # oneDNN has no code for this type on this processor
        return False
    return True


@functools.cache
def _onednn_linear() -> Any:
    return getattr(torch.ops.mkldnn, "_linear_pointwise", None) if torch.backends.mkldnn.is_available() else None


def product_of_library(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x [rows, ins] times weight [outs, ins] transposed, plus bias, by oneDNN; by PyTorch's own where that is not there."""
    inner = _onednn_linear()
    if inner is None:
        return functional.linear(x, weight, bias)
    return inner(x, weight, bias, "none", [], "")  # type: ignore[no-any-return]


_packed: WeakIdKeyDictionary = WeakIdKeyDictionary()  # of each weight: its version and address then, and the packed copy


def packed(weight: torch.Tensor) -> torch.Tensor:
    """The weight in oneDNN's blocks, packed once; the weight itself where memory is short. Edits that torch does not count: `forget`."""
    state = (0 if weight.is_inference() else weight._version, weight.data_ptr())
    known = _packed.get(weight)
    if known is None or known[0] != state:
        _packed.pop(weight, None)  # before another one is made
        try:
            spare = psutil.virtual_memory().available > max(SPARE * weight.nbytes, psutil.virtual_memory().total // SPARE)
        except OSError:  # this process has all files open that it may: the system cannot be asked
            spare = False
        known = _packed[weight] = (state, _reordered(weight) if spare else weight.detach())
    return known[1]  # type: ignore[no-any-return]


def _reordered(weight: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode(False), torch.no_grad():
        return torch.ops.mkldnn._reorder_linear_weight(weight.detach(), FEW_ROWS[-1])  # type: ignore[no-any-return]


def forget() -> None:
    """Pack all weights anew at their next use."""
    _packed.clear()


@functools.cache
def packing_agrees(threads: int) -> bool:
    """True if few rows times a packed fp32 weight have the bits of many rows times the weight itself, on this machine and threads."""
    if not onednn_takes(torch.float32) or not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return False
    random = torch.Generator().manual_seed(1)
    for outs, ins in ((96, 4224), (2048, 1024), (256, 320)):
        weight, x = (torch.randn(rows, ins, generator=random, dtype=torch.float32) for rows in (outs, 128))
        full, blocks = product_of_library(x, weight, None), _reordered(weight)
        if not all(torch.equal(product_of_library(x[:rows], blocks, None), full[:rows]) for rows in FEW_ROWS):
            return False
    return True


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
