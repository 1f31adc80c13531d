"""The choice of a kernel: by product, rows and number type. Knows nothing of models.

Row purity: one row of a matrix product must not change when other rows stand beside it. Libraries pick other code for other row counts,
so each product is padded to a safe multiple of rows, which numerics.py finds out; compiled ones compute each row by itself.
A compiled kernel has the bits of what more rows take, or of PyTorch's operations, and is tried on this machine before it is used.

    kernel    of linear layers, chosen once for a machine and type
    onednn    oneDNN's inner product: chosen wherever PyTorch has it; pure from 2 rows on where it was tried
    upcast    the same in fp32, w converted block by block: for 16-bit weights on processors without 16-bit matrix units,
              where it is 2 to 10 times faster than the emulation and rounds once, at the end
    aten      torch.nn.functional.linear

    operation                     numbers                             rows      file              tried by
    products of linear layers     see LINEARS
    norms, rotary angles          16-bit                              any       norm_rope.py      norms_agree, heads_agree
    attention                     bf16, multiplied in pairs           any       attention_bf16.py numerics.py: only row purity
    attention's products          16-bit, computed in fp32            1 - 32    attention_few.py  attention_order
    layers of a decoding step     16-bit, upcast                      1 - 8     layer.py          steps.py
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch.nn import functional

from . import attention_few, jit, linear_bf16, linear_few, linear_library, norm_rope
from .accumulation import attention_order, chain_block, pair_block
from .linear_library import Projection

Kernel = Literal["onednn", "upcast", "aten"]
SINGLE_ROW_OUTS = 16384  # an upcast head with more outputs sees few rows: each runs alone
ANY = 1 << 62
VECTORS = 64  # numbers that PyTorch's elementwise functions take at a time; by other code, of other bits, they take fewer at the end
_ELEMENTWISE = frozenset((torch.sigmoid, torch.Tensor.sigmoid, functional.sigmoid, functional.silu, functional.gelu, functional.softplus))


def _pairs(weight: torch.Tensor) -> int | None:
    """The block of inputs in which oneDNN's bf16 product adds up."""
    if weight.dtype != torch.bfloat16 or not linear_few.takes(weight) or not jit.multiplies_pairs():
        return None
    outs, ins = weight.shape
    block = pair_block(min(outs, SINGLE_ROW_OUTS), ins, torch.get_num_threads())
    return block if block and linear_bf16.takes(weight, block) else None


def _chain(weight: torch.Tensor) -> int | None:
    """The block of inputs in which the fp32 product adds up."""
    return chain_block(weight.shape[1], torch.get_num_threads()) if linear_few.takes(weight) else None


def _head(weight: torch.Tensor) -> int | None:
    """All inputs at once: a large head sees few rows, so there are no bits of a larger product to match."""
    return weight.shape[1] if weight.shape[0] >= SINGLE_ROW_OUTS else None


def _row_by_row(x: torch.Tensor, projections: Sequence[Projection], _block: int) -> list[torch.Tensor]:
    return [torch.cat([functional.linear(row, weight, bias) for row in x.split(1)]) for weight, bias in projections]


@dataclass(frozen=True, slots=True)
class Linear:
    """One way to compute products of a linear layer on a CPU: for a kernel, types and at most so many rows."""

    kernel: Kernel
    types: tuple[torch.dtype, ...]
    rows: int
    block: Callable[[torch.Tensor], int | None]  # in which it computes products with a weight, None if it cannot take it
    run: Callable[[torch.Tensor, Sequence[Projection], int], list[torch.Tensor]]
    head: bool = False  # for a model's head only
    alone: bool = True  # each row by itself: none has to be padded


_BF16, _HALVES, _FLOATS = (torch.bfloat16,), (torch.bfloat16, torch.float16), (torch.bfloat16, torch.float16, torch.float32)
LINEARS = (  # the first one that takes a product computes it; else the library
    Linear("upcast", _HALVES, ANY, lambda w: _head(w) if linear_few.takes(w) else None, linear_few.chains, head=True),
    Linear("upcast", _FLOATS, ANY, _head, _row_by_row, head=True),
    Linear("upcast", _HALVES, linear_few.MOST_ROWS, _chain, linear_few.chains),
    Linear("upcast", _HALVES, ANY, lambda _: linear_library.UPCAST_BLOCK, linear_library.upcast, alone=False),
    Linear("onednn", _BF16, linear_few.PASS, _pairs, linear_few.pairs),
    Linear("onednn", _BF16, ANY, _pairs, linear_bf16.products),
)


_WAYS = {
    (kernel, dtype): [w for w in LINEARS if w.kernel == kernel and dtype in w.types] for kernel in get_args(Kernel) for dtype in _FLOATS
}


def _chosen(kernel: Kernel, weights: Sequence[torch.Tensor], rows: int, head: bool) -> tuple[Linear, int] | None:
    """The way to multiply so many rows with these weights, all of one type, and its block; None: by the library."""
    for way in _WAYS.get((kernel, weights[0].dtype), ()):
        if rows <= way.rows and (head or not way.head):
            blocks = {way.block(weight) for weight in weights}
            if len(blocks) == 1 and (block := blocks.pop()):
                return way, block
    return None


def by_itself(kernel: Kernel, weight: torch.Tensor, rows: int) -> bool:
    """True if the product of so many rows with a model's head computes each row by itself: none has to be padded."""
    chosen = _chosen(kernel, [weight], rows, True)
    return chosen is not None and chosen[0].alone


def linear(kernel: Kernel, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, head: bool = False) -> torch.Tensor:
    """x [..., in] times weight [out, in] transposed, plus bias [out], with the given kernel. head: of the model, which few rows see."""
    return linears(kernel, x, [(weight, bias)], head)[0]


def linears(kernel: Kernel, x: torch.Tensor, projections: Sequence[Projection], head: bool = False) -> list[torch.Tensor]:
    """The same for several projections (weight, bias) of one x."""
    alike = x.device.type == "cpu" and x.numel() > 0 and all(weight.dtype == x.dtype for weight, _ in projections)
    if alike and kernel == "onednn":
        alike = all(bias is None or bias.dtype == x.dtype for _, bias in projections)
    flat = x if x.ndim == 2 else x.reshape(-1, x.shape[-1])
    chosen = _chosen(kernel, [weight for weight, _ in projections], len(flat), head) if alike else None
    if chosen is None:
        return [_by_library(kernel, x, weight, bias) for weight, bias in projections]
    parts = chosen[0].run(flat, projections, chosen[1])
    return parts if x.ndim == 2 else [part.unflatten(0, x.shape[:-1]) for part in parts]


def _by_library(kernel: Kernel, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    if kernel == "aten" or not x.numel() or x.device.type != "cpu" or weight.dtype != x.dtype or not x.is_floating_point():
        return functional.linear(x, weight, bias)
    flat = x.reshape(-1, x.shape[-1])
    return linear_library.product_of_library(flat.contiguous(), weight, bias).view(*x.shape[:-1], weight.shape[0])


def norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Root mean square norm of x [rows, n] times weight [n], as Llama's and Qwen's modules compute it."""
    return (norm_rope.norm if norm_rope.takes_norm(x, weight) else norm_rope.plain_norm)(x, weight, epsilon)


def heads(x: torch.Tensor, weight: torch.Tensor | None, epsilon: float, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [rows, heads, dim], each head normalised if there is a weight [dim], and its halves rotated by cos and sin [rows, 1, dim]."""
    run = norm_rope.heads if norm_rope.takes_heads(x, weight, cos, sin) else norm_rope.plain_heads
    return run(x, weight, epsilon, cos, sin)


def attention_blocks(rows: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[int, int] | None:
    """The blocks in which attention_few.py multiplies so few rows with a page's keys and with its values, if it can take them."""
    if not (attention_few.takes(rows, keys) and attention_few.takes(rows, values)):
        return None
    return attention_order(values.shape[-1], torch.get_num_threads())


def compile_products() -> None:
    """Have the products of few rows with bf16 weights ready: they depend on the processor alone, so weights may load meanwhile."""
    if (found := jit.compiler()) is not None:
        for rows in linear_few.ROWS:
            found.function(linear_few.product_code, "bfloat", rows, jit.multiplies_pairs())


class RowPureLinear(torch.overrides.TorchFunctionMode):
    """While active in a thread, `torch.nn.functional.linear` of stock modules runs on the given kernel, and functions of each number,
    such as a sigmoid, on whole vectors. head: the weight of the model's. glance: called with the weight of each product.
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
        if func in _ELEMENTWISE and args and args[0].numel() % VECTORS and args[0].device.type == "cpu":
            x, *others = args
            whole = functional.pad(x.reshape(-1), (0, -x.numel() % VECTORS))
            return func(whole, *others, **(kwargs or {}))[: x.numel()].view(x.shape)
        return func(*args, **(kwargs or {}))
