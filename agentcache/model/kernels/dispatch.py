"""The choice of a kernel: by product, rows and number type. Knows nothing of models.

Row purity: one row of a matrix product must not change when other rows stand beside it. Libraries pick other code for other row counts,
so each product is padded to a safe multiple of rows, which numerics.py finds out; compiled ones compute each row by itself.
Compiled products add up in an order of their own, alike for few rows and many. Other compiled kernels have the bits of PyTorch's
operations, and are tried on this machine before they are used.

    kernel    of linear layers, chosen once for a machine, type and threads (choice.py)
    onednn    in the type of the numbers; what is not compiled by oneDNN's inner product, pure from 2 rows on where it was tried
    library   the same, and nothing is compiled
    upcast    in fp32, rounded once, at the end: for 16-bit weights on processors without 16-bit matrix units; what is not compiled
              by oneDNN, w converted block by block, which is 2 to 10 times faster than its emulation
    aten      torch.nn.functional.linear

    operation                     numbers                             rows      file              tried by
    products of linear layers     see LINEARS
    of packed weights, by oneDNN  fp32                                2 - 16    linear_library.py packing_agrees
    norms, rotary angles          16-bit, fp32                        any       norm_rope.py      norms_agree, heads_agree
    attention                     16-bit, fp32                        any       paged_attention.py  numerics.py: only row purity
    layers but attention          of compiled products                1 - 252   layer.py          steps.py
    layers with a state           16-bit, fp32                        any       recurrence.py     proof.py: against transformers' own
    norms, angles, attention      on a GPU                            any       cuda.py           itself
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch.nn import functional

from . import jit, linear_compiled, linear_library
from .linear_library import Projection
from .norm_library import plain_heads, plain_norm

Kernel = Literal["onednn", "library", "upcast", "aten"]
PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))  # classes of weights whose memory holds their numbers; others multiply themselves
SINGLE_ROW_OUTS = 16384  # an upcast head with more outputs sees few rows: each runs alone
VECTORS = 64  # numbers that PyTorch's elementwise functions take at a time; by other code, of other bits, they take fewer at the end
GRAIN = 32768  # numbers of which PyTorch makes a part for a thread, at least
GELU_GRAIN = 16384  # beyond so many, gelu makes a part for every thread
_PRODUCTS = frozenset((torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__))
_ELEMENTWISE = frozenset((torch.sigmoid, torch.Tensor.sigmoid, functional.sigmoid, functional.silu, functional.gelu, functional.softplus))


def _row_by_row(x: torch.Tensor, projections: Sequence[Projection]) -> list[torch.Tensor]:
    return [torch.cat([functional.linear(row, weight, bias) for row in x.split(1)]) for weight, bias in projections]


@dataclass(frozen=True, slots=True)
class Linear:
    """One way to compute products of a linear layer on a CPU, for a kernel and types."""

    kernel: Kernel | None  # None: whatever it is
    types: tuple[torch.dtype, ...]  # of weights
    takes: Callable[[torch.Tensor], bool]  # weights that it can multiply with
    run: Callable[[torch.Tensor, Sequence[Projection]], list[torch.Tensor]]
    head: bool = False  # for a model's head only
    alone: bool = True  # each row by itself: none has to be padded


_BF16, _FP32, _HALVES = (torch.bfloat16,), (torch.float32,), (torch.bfloat16, torch.float16)
LINEARS = (  # the first one that takes a product computes it; else the library
    Linear(None, (torch.int8,), linear_compiled.takes, linear_compiled.quantized),
    Linear("upcast", _HALVES, linear_compiled.takes, linear_compiled.chains),
    Linear("upcast", (*_HALVES, *_FP32), lambda weight: weight.shape[0] >= SINGLE_ROW_OUTS, _row_by_row, head=True),
    Linear("upcast", _HALVES, lambda _: True, linear_library.upcast, alone=False),
    Linear("onednn", _FP32, linear_compiled.takes, linear_compiled.chains),
    Linear("onednn", _BF16, lambda weight: jit.multiplies_pairs() and linear_compiled.takes(weight), linear_compiled.pairs),
)
_WAYS = {
    (kernel, dtype): [way for way in LINEARS if way.kernel in (None, kernel) and dtype in way.types]
    for kernel in get_args(Kernel)
    for dtype in (*_HALVES, *_FP32, torch.int8)
}


def _chosen(kernel: Kernel, weight: torch.Tensor, head: bool) -> Linear | None:
    """The way to multiply with this weight; None: by the library."""
    ways = _WAYS.get((kernel, weight.dtype), ()) if type(weight) in PLAIN else ()
    return next((way for way in ways if (head or not way.head) and way.takes(weight)), None)


def compiled(kernel: Kernel, weight: torch.Tensor, dtype: torch.dtype) -> bool | None:
    """True if compiled products multiply rows of this type with this weight in pairs, False if not; None if they do not take it."""
    way = _chosen(kernel, weight, False)
    if way is not None and way.run is linear_compiled.quantized:
        return linear_compiled.in_pairs(dtype)
    return way.run is linear_compiled.pairs if way is not None and way.run in (linear_compiled.chains, linear_compiled.pairs) else None


def linear(
    kernel: Kernel, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, head: bool = False, even: int = 1
) -> torch.Tensor:
    """x [..., in] times weight [out, in] transposed, plus bias [out], with the given kernel. head: of the model, which few rows see.
    even: to a multiple of which rows are padded, unless each is computed by itself; 0: so it is by the library, too.
    """
    return linears(kernel, x, [(weight, bias)], head, even)[0]


def linears(kernel: Kernel, x: torch.Tensor, projections: Sequence[Projection], head: bool = False, even: int = 1) -> list[torch.Tensor]:
    """The same for several projections (weight, bias) of one x."""
    alike = x.device.type == "cpu" and x.numel() > 0 and all(weight.dtype in (x.dtype, torch.int8) for weight, _ in projections)
    alike = alike and all(bias is None or bias.dtype == x.dtype for _, bias in projections)
    ways = [_chosen(kernel, weight, head) for weight, _ in projections] if alike else [None]
    if len(set(ways)) > 1:  # what a weight is multiplied by does not depend on those beside it
        return [part for projection in projections for part in linears(kernel, x, [projection], head, even)]
    chosen, rows = ways[0], x.shape[-2] if x.ndim > 1 else 0
    if (chosen is None or not chosen.alone) and rows and (not even or rows % even) and type(projections[0][0]) in PLAIN:
        if not even:  # a copy of a row: where it lies may decide its bits
            one = [linears(kernel, row.clone(), projections, head) for row in x.reshape(-1, x.shape[-1]).split(1)]
            return [torch.cat(parts).view(*x.shape[:-1], -1) for parts in zip(*one, strict=True)]
        padded = functional.pad(x, (0, 0, 0, -rows % even))
        return [part[..., :rows, :] for part in linears(kernel, padded, projections, head)]
    if chosen is None:
        return [_by_library(kernel, x, weight, bias) for weight, bias in projections]
    parts = chosen.run(x if x.ndim == 2 else x.reshape(-1, x.shape[-1]), projections)
    return parts if x.ndim == 2 else [part.view(*x.shape[:-1], -1) for part in parts]


def _by_library(kernel: Kernel, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    if weight.dtype == torch.int8 and not x.numel():
        return x.new_empty(*x.shape[:-1], len(weight))
    library = type(weight) not in PLAIN or kernel == "aten" or x.device.type != "cpu"
    if library or not x.numel() or weight.dtype != x.dtype or not x.is_floating_point():
        return functional.linear(x, weight, bias)
    flat, outs = x.reshape(-1, x.shape[-1]), weight.shape[0]
    if len(flat) in linear_library.FEW_ROWS and x.dtype == torch.float32 and isinstance(weight, torch.nn.Parameter):  # no cut of one
        weight = linear_library.packed(weight) if linear_library.packing_agrees(torch.get_num_threads()) else weight
    return linear_library.product_of_library(flat.contiguous(), weight, bias).view(*x.shape[:-1], outs)


class Int8Linear(torch.nn.Linear):
    """A linear layer whose weight is int8, with its scales as `weight.scale`. Made of an nn.Linear in its place, by `int8.quantize`."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Multiply input [..., in] by the weight, plus the bias."""
        return linear("upcast", input, self.weight, self.bias)


@functools.cache
def of_gpu() -> Any:
    """The kernels of a GPU; None where Triton is not installed."""
    try:
        from . import cuda
    except ImportError:
        return None
    return cuda


def norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Root mean square norm of x [rows, n] times weight [n], as Llama's and Qwen's modules compute it."""
    if x.is_cuda:
        return (gpu.norm if (gpu := of_gpu()) and gpu.takes_norm(x, weight) else plain_norm)(x, weight, epsilon)
    if jit.compiler() is None:
        return plain_norm(x, weight, epsilon)
    from . import norm_rope

    return (norm_rope.norm if norm_rope.takes_norm(x, weight) else plain_norm)(x, weight, epsilon)


def heads(x: torch.Tensor, weight: torch.Tensor | None, epsilon: float, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [rows, heads, dim], each head normalised if there is a weight [dim], and its halves rotated by cos and sin [rows, 1, dim]."""
    if x.is_cuda:
        return (gpu.heads if (gpu := of_gpu()) and gpu.takes_heads(x, weight, cos, sin) else plain_heads)(x, weight, epsilon, cos, sin)
    if jit.compiler() is None:
        return plain_heads(x, weight, epsilon, cos, sin)
    from . import norm_rope

    return (norm_rope.heads if norm_rope.takes_heads(x, weight, cos, sin) else plain_heads)(x, weight, epsilon, cos, sin)


def elementwise(function: Callable[..., torch.Tensor], x: torch.Tensor, *others: Any, **options: Any) -> torch.Tensor:
    """A function of each number of x, such as a sigmoid, by whole vectors in each thread's part: a row does not see those beside it."""
    whole = _whole_vectors(x.numel(), torch.get_num_threads())
    if x.device.type != "cpu" or (whole == x.numel() and x.is_contiguous()):  # gelu has other code, of other bits, for cuts
        return function(x, *others, **options)
    padded = functional.pad(x.reshape(-1), (0, whole - x.numel()))
    return function(padded, *others, **options)[: x.numel()].view(x.shape)


def _whole_vectors(count: int, threads: int) -> int:
    """The next count of numbers whose part for each thread is of whole vectors: some functions make fewer parts of few numbers."""
    while count % (unit := VECTORS * math.lcm(min(threads, -(-count // GRAIN)) or 1, threads if count > GELU_GRAIN else 1)):
        count += -count % unit
    return count


class RowPureLinear(torch.overrides.TorchFunctionMode):
    """While active in a thread, `torch.nn.functional.linear` of stock modules runs on the given kernel, and functions of each number,
    such as a sigmoid, on whole vectors.

    even: to a multiple of which products are padded that need it. head: the weight of the model's. glance: called with the weight of each
    product. adapt: called with weight, rows and product of each, which it may change in place.
    """

    def __init__(
        self,
        kernel: Kernel,
        even: int = 1,
        head: torch.Tensor | None = None,
        glance: Callable[[torch.Tensor], None] | None = None,
        adapt: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None] | None = None,
    ) -> None:
        super().__init__()
        self.kernel, self.even, self.head, self.glance, self.adapt = kernel, even, head, glance, adapt
        self._cuts: dict[int, tuple[torch.Tensor, torch.Tensor, int]] = {}  # by the id of a cut: it, the whole, where it starts
        self._products: dict[tuple[int, int], torch.Tensor] = {}  # of wholes, by the ids of one and a weight

    def share(self, whole: torch.Tensor, start: int, stop: int | None) -> torch.Tensor:
        """Rows [start, stop) of x [1, rows, in], whose products are computed for all rows at once, by the first cut that asks."""
        cut = whole[:, start:stop]
        self._cuts[id(cut)] = (cut, whole, start)
        return cut

    def forget(self) -> None:
        """Drop what cuts share."""
        self._cuts.clear()
        self._products.clear()

    def _linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if (shared := self._cuts.get(id(x))) is not None:
            _, whole, start = shared
            key = (id(whole), id(weight))
            if key not in self._products:
                self._products[key] = self._padded(whole, weight, bias)
            return self._products[key][:, start : start + x.shape[1]]
        return self._padded(x, weight, bias)

    def _padded(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        done = self._product(x, weight, bias)
        if self.adapt is not None:
            self.adapt(weight, x, done)
        return done

    def _product(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return linear(self.kernel, x, weight, bias, weight is self.head, self.even)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is functional.linear:
            given = dict(zip(("x", "weight", "bias"), args)) | {"x" if name == "input" else name: v for name, v in (kwargs or {}).items()}
            if self.glance is not None:
                self.glance(given["weight"])
            return self._linear(**given)
        if func is torch.addmm and not kwargs:  # of GPT-2's Conv1D, a linear layer whose weight lies the other way
            bias, x, weight = args
            if self.glance is not None:
                self.glance(weight)
            return self._product(x, weight.t(), bias)
        if func in _PRODUCTS and isinstance(weight := args[0], torch.nn.Parameter) and weight.ndim == 2 and args[1].ndim == 3:
            if self.glance is not None:
                self.glance(weight)
            return self._product(args[1].mT, weight, None).mT  # of Mamba, whose columns are tokens
        if func in _ELEMENTWISE and args:
            return elementwise(func, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))
