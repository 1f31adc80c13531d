"""Norms and rotary angles of rows, compiled: all of PyTorch's operations in one pass. Knows nothing of layers.

PyTorch reads and writes all rows once for each of the ten or so operations that these are. A compiled function rounds once for each of
them, and adds up a sum of squares as `Tensor.mean` does: four accumulators of whole vectors, sixteen steps at a time, then lane by lane.
So the bits are the same. Each is held against PyTorch's operations before its first use, the sums by themselves, and not used if one
bit differs. Sizes are constants of the code.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from . import jit
from .ir import Code, Value, Values
from .norm_library import plain_heads, plain_norm

SUM_LANES = 8  # of PyTorch's reductions on x86, also where it has longer vectors
_LONG = 64 * SUM_LANES  # numbers that are added up before their sum joins that of all before them
MOST_LINES = 1024  # vectors of a row that is normalised: longer ones are added up in more levels than `_squares` has
_ALONE = 1 << 18  # numbers: less is done by one thread before two have met


def _squares(code: Code, vector: Callable[[Value | int], Value], n: int) -> Value:
    """The sum of squares of n numbers, lane by lane, in the order of PyTorch's reductions. vector(i): `SUM_LANES` numbers from i on."""
    steps, left = divmod(n // SUM_LANES, 4)
    chunks, rest = divmod(steps, 16)
    zeros = [code.constant(f"<{SUM_LANES} x float>", 0.0)] * 4

    def square(at: Value | int) -> Value:
        value = vector(at)
        return value * value

    def add(sums: Values, base: Value | int, count: int) -> Values:
        for number in range(count):
            sums = [total + square(base + (4 * number + k) * SUM_LANES) for k, total in enumerate(sums)]
        return sums

    def chunk(index: Value, carried: Values) -> Values:
        return [before + new for before, new in zip(carried, add(zeros, index, 16))]

    above = code.fold(chunks * _LONG, _LONG, zeros, chunk) if chunks else []
    sums = add(zeros, chunks * _LONG, rest)
    if above:
        sums = [one + other for one, other in zip(sums, above)]
    for number in range(left):
        sums[0] = sums[0] + square((4 * steps + number) * SUM_LANES)
    return sums[0] + sums[1] + sums[2] + sums[3]


def _scale(code: Code, vector: Callable[[Value | int], Value], n: int, epsilon: Value) -> Value:
    """The factor that normalises n numbers: 1 / sqrt(mean of their squares + epsilon)."""
    total = _squares(code, vector, n)
    sum_ = total.lane(0)
    for lane in range(1, SUM_LANES):
        sum_ = sum_ + total.lane(lane)
    return code.constant("float", 1.0) / code.call("float", "llvm.sqrt.f32", sum_ / n + epsilon)


def _scale_of_row(code: Code, row: Value, n: int, epsilon: Value) -> Value:
    """The same for the n numbers at an address."""
    return _scale(code, lambda at: code.load_numbers(row.at(code.stored, at), SUM_LANES), n, epsilon)


def scales_code(code: Code, n: int) -> None:
    """The factor of each row. Fields: x [rows, n], out fp32 [rows], rows, epsilon."""
    (x, out), (rows,), epsilon = code.pointers(2), code.fields(1), code.number()

    @code.shared(rows)
    def _(row: Value) -> None:
        out.at("float", row).store(_scale_of_row(code, x.at(code.stored, row * n), n, epsilon))


def norm_code(code: Code, n: int) -> None:
    """Fields: x [rows, n], weight [n], out [rows, n], rows, epsilon."""
    (x, weight, out), (rows,), epsilon = code.pointers(3), code.fields(1), code.number()

    @code.shared(rows)
    def _(row: Value) -> None:
        mine, target = (base.at(code.stored, row * n) for base in (x, out))
        scale = _scale_of_row(code, mine, n, epsilon).everywhere(code.lanes)

        @code.loop(n, code.lanes)
        def _(at: Value) -> None:
            value = code.rounded(code.load_numbers(mine.at(code.stored, at)) * scale)
            code.store_numbers(code.load_numbers(weight.at(code.stored, at)) * value, target.at(code.stored, at))


def heads_code(code: Code, count: int, dim: int, normed: bool) -> None:
    """Fields: x [rows, count, dim], norm's weight [dim], cos and sin [rows, dim], out [rows, count, dim], maybe x itself, rows, epsilon."""
    (x, weight, cos, sin, out), (rows,), epsilon = code.pointers(5), code.fields(1), code.number()

    @code.shared(rows)
    def _(row: Value) -> None:
        angles, base = row * dim, row * (count * dim)

        @code.loop(count * dim, dim)
        def _(first: Value) -> None:
            at = base + first
            values = [code.load_numbers(x.at(code.stored, at + part)) for part in range(0, dim, code.lanes)]
            if normed:
                values = _normed(code, values, weight, epsilon)
            for number, value in enumerate(_turned(code, values, cos.at(code.stored, angles), sin.at(code.stored, angles))):
                code.store_numbers(value, out.at(code.stored, at + number * code.lanes))


def _normed(code: Code, values: Values, weight: Value, epsilon: Value) -> Values:
    """One head's vectors, normalised."""
    pieces = [value.part(SUM_LANES, first) for value in values for first in range(0, code.lanes, SUM_LANES)]

    def piece(at: Value | int) -> Value:
        assert isinstance(at, int)  # a head is shorter than _LONG
        return pieces[at // SUM_LANES]

    scale = _scale(code, piece, len(values) * code.lanes, epsilon).everywhere(code.lanes)
    factors = [code.load_numbers(weight.at(code.stored, number * code.lanes)) for number in range(len(values))]
    return [code.rounded(factor * code.rounded(value * scale)) for factor, value in zip(factors, values)]


def _turned(code: Code, values: Values, cos: Value, sin: Value) -> Values:
    """One head's vectors, its halves rotated by the cosines and sines at these addresses: fp32 that is not rounded yet."""
    half = len(values) // 2
    turned = []
    for number, (value, other) in enumerate(zip(values, [*[-value for value in values[half:]], *values[:half]])):
        one, two = (code.load_numbers(angles.at(code.stored, number * code.lanes)) for angles in (cos, sin))
        turned.append(code.rounded(value * one) + code.rounded(other * two))
    return turned


def norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """`plain_norm` of x [rows, n] in one pass."""
    (rows, n), out = x.shape, torch.empty_like(x)
    fields = (x.data_ptr(), weight.data_ptr(), out.data_ptr(), rows, jit.bits_of(epsilon))
    jit.run(norm_code, jit.NUMBERS[x.dtype], (n,), jit.threads_for(x.numel(), rows, _ALONE), *fields)
    return out


def heads(x: torch.Tensor, weight: torch.Tensor | None, epsilon: float, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """`plain_heads` in one pass."""
    (rows, count, dim), out = x.shape, torch.empty_like(x)
    fields = (*map(jit.address, (x, weight, cos, sin, out)), rows, jit.bits_of(epsilon))
    sizes = (count, dim, weight is not None)
    jit.run(heads_code, jit.NUMBERS[x.dtype], sizes, jit.threads_for(x.numel(), rows, _ALONE), *fields)
    return out


def _numbers(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Random numbers of many sizes."""
    random = torch.Generator().manual_seed(shape[-1])
    return (torch.randn(shape, generator=random) * torch.randn(shape, generator=random).exp()).to(dtype)


@functools.cache
def _sums_agree(dtype: torch.dtype, n: int, rows: int = 64) -> bool:
    """True if a row's sum of squares is added up as PyTorch adds it. One order of additions differs from another in the last bit of fp32:
    rounded to 16 bits that would hardly ever be seen, but it would be there.
    """
    found = jit.compiler()
    if found is None or dtype not in jit.NUMBERS or n % (2 * found.lanes) or n >= MOST_LINES * SUM_LANES:
        return False
    x, out = _numbers(dtype, rows, n), torch.zeros(rows)
    jit.run(scales_code, jit.NUMBERS[dtype], (n,), 1, x.data_ptr(), out.data_ptr(), rows, jit.bits_of(1e-6))
    return torch.equal(out, x.float().pow(2).mean(-1).add_(1e-6).rsqrt_())


@functools.cache
def norms_agree(dtype: torch.dtype, n: int) -> bool:
    """True if a compiled norm of n numbers has the bits of PyTorch's operations."""
    x, weight = _numbers(dtype, 64, n), _numbers(dtype, n)
    return _sums_agree(dtype, n) and torch.equal(norm(x, weight, 1e-6), plain_norm(x, weight, 1e-6))


@functools.cache
def heads_agree(dtype: torch.dtype, dim: int, normed: bool) -> bool:
    """The same of the norm, if there is one, and the rotation of heads with so many channels."""
    if dim >= _LONG or not _sums_agree(dtype, dim):
        return False
    x, cos, sin = _numbers(dtype, 32, 2, dim), _numbers(dtype, 32, 1, dim), _numbers(dtype, 32, 1, dim)
    given = (x, _numbers(dtype, dim) if normed else None, 1e-6, cos, sin)
    return torch.equal(heads(*given), plain_heads(*given))


def _fit(*tensors: torch.Tensor) -> bool:
    first = tensors[0]
    return all(t.dtype == first.dtype and t.device.type == "cpu" and t.is_contiguous() for t in tensors)


def takes_norm(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """True if this norm is compiled, with PyTorch's bits."""
    return x.dim() == 2 and _fit(x, weight) and norms_agree(x.dtype, x.shape[1])


def takes_heads(x: torch.Tensor, weight: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor) -> bool:
    """The same of heads."""
    given = (x, cos, sin) if weight is None else (x, cos, sin, weight)
    return len(cos) == len(x) and _fit(*given) and heads_agree(x.dtype, x.shape[2], weight is not None)
