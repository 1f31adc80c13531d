"""Products of activations with weights, by the kernel that was chosen for this machine. Knows nothing of models or pages.

Row purity: one row of a matrix product must not change when other rows stand beside it. Libraries pick other code for other row counts,
so each product is padded to a safe multiple of rows, which numerics.py finds out; compiled ones compute each row by itself.

    kernel    product of activations x with a weight w [out, in]
    onednn    oneDNN's inner product: chosen wherever PyTorch has it; pure from 2 rows on where it was tried. On processors that multiply
              pairs of bf16 numbers: linear_few.py for few rows of such, linear_bf16.py for more, with the same bits
    upcast    the same in fp32, w converted block by block: for 16-bit weights on processors without 16-bit matrix units,
              where it is 2 to 10 times faster than the emulation and rounds once, at the end. Few rows: linear_few.py, with the same bits
    aten      torch.nn.functional.linear
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch.nn import functional

from . import linear_bf16, linear_few

Kernel = Literal["onednn", "upcast", "aten"]
Projection = tuple[torch.Tensor, "torch.Tensor | None"]  # weight [out, in] and bias [out]
SINGLE_ROW_OUTS = 16384  # an upcast head with more outputs sees few rows: each runs alone, in the weight's own type
UPCAST_BLOCK = 1024  # rows of a weight converted at a time: fits the second-level cache, and large enough to amortise a call
COLUMNS = 256  # of a probed weight: enough to be cut between threads as larger ones are
CHAIN_ROWS = 6
_PRIME = 65521  # below 2^16
BLOCKS = (1 << 20, 512, 1024, 256, 384, 768, 192, 128, 1536, 2048)  # of inputs, the first one is all of them


@functools.cache
def onednn_takes(dtype: torch.dtype) -> bool:
    """Whether oneDNN's inner product has code for this type on this processor."""
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


_scratch = threading.local()


def scratch(name: str, elements: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A flat buffer of this thread that lives on between calls; grown when too small. Contents are whatever the last user left."""
    held: torch.Tensor | None = getattr(_scratch, name, None)
    if held is None or held.numel() < elements or held.dtype != dtype:
        with torch.inference_mode(False):  # else it could only be used in that mode from now on
            held = torch.empty(elements, dtype=dtype)
        setattr(_scratch, name, held)
    return held[:elements]


def pattern(rows: int, columns: int, dtype: torch.dtype, device: torch.device, salt: int) -> torch.Tensor:
    """Numbers in [-1, 1] that every machine makes alike, whose products do not add up exactly in any order."""
    down, along = (torch.arange(rows) * 7919 + salt) % _PRIME, torch.arange(columns) * 104729 % _PRIME
    return _numbers(dtype)[down[:, None] + along].to(device)


@functools.cache
def _numbers(dtype: torch.dtype) -> torch.Tensor:
    """What `pattern` draws from: of g in [0, 2 · prime), ((g² + g) mod prime) · 2 / prime - 1."""
    at = torch.arange(2 * _PRIME)
    return ((at * at + at) % _PRIME).double().div_(_PRIME / 2).sub_(1).to(dtype)


def linear(kernel: Kernel, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, head: bool = False) -> torch.Tensor:
    """x [..., in] times weight [out, in] transposed, plus bias [out], with the given kernel. head: of the model, which few rows see."""
    if head and kernel == "upcast" and x.device.type == "cpu" and weight.dtype == x.dtype and weight.shape[0] >= SINGLE_ROW_OUTS:
        return _vocabulary(x.reshape(-1, x.shape[-1]), weight, bias).view(*x.shape[:-1], weight.shape[0])
    return linears(kernel, x, [(weight, bias)])[0]


def linears(kernel: Kernel, x: torch.Tensor, projections: Sequence[Projection]) -> list[torch.Tensor]:
    """The same for several projections (weight, bias) of one x; they may come back as views of one tensor, side by side."""
    if (
        kernel == "upcast"
        and x.device.type == "cpu"
        and x.dtype in (torch.bfloat16, torch.float16)
        and all(weight.dtype == x.dtype for weight, _ in projections)
    ):
        parts = _upcast_linears(x.reshape(-1, x.shape[-1]), projections)
        return [part.unflatten(0, x.shape[:-1]) if x.ndim != 2 else part for part in parts]
    if kernel == "onednn" and x.device.type == "cpu" and x.dtype == torch.bfloat16:
        flat = x.reshape(-1, x.shape[-1])
        blocks = {_pairs(weight) if bias is None or bias.dtype == x.dtype else None for weight, bias in projections}
        if len(blocks) == 1 and (block := blocks.pop()):
            return [part.unflatten(0, x.shape[:-1]) if x.ndim != 2 else part for part in _paired(flat, projections, block)]
    return [_linear(kernel, x, weight, bias) for weight, bias in projections]


def _linear(kernel: Kernel, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    if kernel == "aten" or x.device.type != "cpu" or weight.dtype != x.dtype or not x.is_floating_point():
        return functional.linear(x, weight, bias)
    flat = x.reshape(-1, x.shape[-1])
    return product_of_library(flat.contiguous(), weight, bias).view(*x.shape[:-1], weight.shape[0])


def by_itself(kernel: Kernel, weight: torch.Tensor, rows: int) -> bool:
    """Whether the product of so many rows with a model's head computes each of them by itself: none has to be padded."""
    if kernel == "onednn":
        return _pairs(weight) is not None
    if kernel != "upcast" or weight.shape[0] >= SINGLE_ROW_OUTS:
        return kernel == "upcast"
    return linear_few.takes(weight, rows) and chain_block(weight.shape[1], torch.get_num_threads()) is not None


class RowPureLinear(torch.overrides.TorchFunctionMode):
    """While active in a thread, `torch.nn.functional.linear` of stock modules runs on the given kernel. head: the weight of the model's.

    glance: called with the weight of each product.
    """

    def __init__(self, kernel: Kernel, head: torch.Tensor | None = None, glance: Callable[[torch.Tensor], None] | None = None) -> None:
        super().__init__()
        self.kernel, self.head, self.glance = kernel, head, glance

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is functional.linear:
            given = dict(zip(("x", "weight", "bias"), args)) | {"x" if name == "input" else name: v for name, v in (kwargs or {}).items()}
            if self.glance is not None:
                self.glance(given["weight"])
            return linear(self.kernel, **given, head=given["weight"] is self.head)
        return func(*args, **(kwargs or {}))


def _upcast_linears(x: torch.Tensor, projections: Sequence[Projection]) -> list[torch.Tensor]:
    """Each product by itself has the same bits: only the work on x is shared."""
    (rows, ins), wide_x = x.shape, x.float()
    outs = [weight.shape[0] for weight, _ in projections]
    if all(linear_few.takes(weight, rows) for weight, _ in projections) and (order := chain_block(ins, torch.get_num_threads())):
        wide = linear_few.product(wide_x, [weight for weight, _ in projections], order)
        for part, (_, bias) in zip(wide.split(outs, 1), projections):
            if bias is not None:
                part.add_(bias.float())
        return list(wide.to(x.dtype).split(outs, 1))
    return [_upcast_linear(x, wide_x, *projection) for projection in projections]


def _upcast_linear(x: torch.Tensor, wide_x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    outs, ins = weight.shape
    out = torch.empty(x.shape[0], outs, dtype=x.dtype)
    for start in range(0, outs, UPCAST_BLOCK):
        stop = min(outs, start + UPCAST_BLOCK)
        block = scratch("weight", (stop - start) * ins).view(stop - start, ins)
        block.copy_(weight[start:stop])
        wide = product_of_library(wide_x, block, None)
        out[:, start:stop] = wide if bias is None else wide.add_(bias[start:stop].float())
    return out


@functools.cache
def chain_block(ins: int, threads: int) -> int | None:
    """After how many inputs the fp32 product adds up what it has, if it is otherwise a plain chain of fused multiply-adds.

    Found by trying the sizes that such kernels use; None if none gives its bits, and then few rows run as many do.
    """
    x = pattern(CHAIN_ROWS, ins, torch.bfloat16, torch.device("cpu"), 3)
    weight = pattern(COLUMNS, ins, torch.bfloat16, torch.device("cpu"), 5)
    expected = product_of_library(x.float(), weight.float(), None)
    few = product_of_library(x.float(), weight[:64].float(), None)
    if not torch.equal(few, expected[:, :64]):
        return None
    likely = sorted(BLOCKS, key=lambda block: abs(block - ins / 2.5))  # both sides of the usual rule: halves, or the cache's share
    return next((block for block in likely if torch.equal(linear_few.product(x.float(), [weight], block), expected)), None)


def _vocabulary(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """A product with very many outputs, of which few rows are ever asked: each row by itself."""
    if linear_few.takes(weight, 1):
        wide = torch.cat([linear_few.product(rows.float(), [weight], weight.shape[1]) for rows in x.split(linear_few.MOST_ROWS)])
        return (wide if bias is None else wide.add_(bias.float())).to(x.dtype)
    return torch.cat([functional.linear(row, weight, bias) for row in x.split(1)])


def _pairs(weight: torch.Tensor) -> int | None:
    """In which blocks the compiled product adds up, if it can take the library's place here."""
    if weight.dtype != torch.bfloat16 or not linear_few.takes(weight, 1) or not linear_few.multiplies_pairs():
        return None
    block = pair_block(*weight.shape, torch.get_num_threads())
    return block if block and linear_bf16.takes(weight, block) else None


def _paired(flat: torch.Tensor, projections: Sequence[Projection], block: int) -> list[torch.Tensor]:
    """Compiled products of flat [rows, ins]: few rows for their own sake, more of them by tiles."""
    if len(flat) > linear_few.PASS:
        return linear_bf16.products(flat, projections, block)
    outs = [weight.shape[0] for weight, _ in projections]
    wide = linear_few.product(flat, [weight for weight, _ in projections], block)
    parts = wide.split(outs, 1)
    return [(part if bias is None else part.add_(bias)).to(flat.dtype) for part, (_, bias) in zip(parts, projections)]


@functools.cache
def pair_block(outs: int, ins: int, threads: int) -> int | None:
    """`chain_block` of oneDNN's bf16 product, as a chain over pairs of inputs; None if no size gives its bits.

    The second half of the inputs takes away what the first one adds, in another order (halves may be blocks), so that rounding is all that
    is left: no other order has its bits.
    """
    x, weight = (pattern(rows, ins // 2, torch.bfloat16, torch.device("cpu"), salt) for rows, salt in ((CHAIN_ROWS, 3), (COLUMNS, 5)))
    x, weight = torch.cat((x, x.roll(7, 1)), 1), torch.cat((weight, -weight.roll(7, 1)), 1)
    weight = weight.repeat(-(-min(outs, SINGLE_ROW_OUTS) // COLUMNS), 1)[:outs].contiguous()
    bias = pattern(1, len(weight), torch.bfloat16, torch.device("cpu"), 7)[0] * 2.0**-20
    expected = product_of_library(x, weight, None), product_of_library(x, weight, bias)

    def agrees(block: int) -> bool:
        wide = linear_few.product(x, [weight], block)
        return torch.equal(wide.to(x.dtype), expected[0]) and torch.equal(wide.add_(bias).to(x.dtype), expected[1])

    likely = sorted(BLOCKS, key=lambda block: abs(block - ins / 2.5))
    return next((block for block in likely if agrees(block)), None) if expected[0].any() else None
