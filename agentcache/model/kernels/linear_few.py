"""Products of few rows with 16-bit weights, compiled at run time. Knows nothing of models.

A decoding step multiplies one row per request with every weight, and waits for memory: each weight is read once here. On processors without
16-bit matrix units larger products convert the weights to fp32 first, which reads and writes three times their bytes; on those that
multiply pairs of bf16 numbers the library reads weights at half of what memory gives. Accumulated in the very order of oneDNN's
product, which accumulation.py finds out: so the bits are those of the large products, and rows never depend on each other.

    out[m, n] = Σ over blocks b, in order, of chain(b)        chain(b) = fma(x[m, k], w[n, k], ...) for k of the block, ascending, from 0;
                                                              pairs: the same of x[m, k] w[n, k] + x[m, k + 1] w[n, k + 1], k even

A tile is `lanes` outputs: per step one 64 byte line of each of their weight rows is loaded, the lines are transposed in registers,
and each lane then runs its own chain. More rows than registers hold are further passes over the tile, which lies in the cache by then.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from . import jit
from .ir import Code, Value, Values, transposed
from .linear_library import Projection

ROWS = (1, 2, 4, 8)  # rows of one pass over a tile's weights: more need more registers than there are
PASS = ROWS[-1]
MOST_ROWS = 32  # above it, converting the weights first is as fast


def product_code(code: Code, rows: int, pairs: bool) -> None:
    """Fields: weight, x [passes, ins, rows] (pairs: of words), where outputs go, outputs of a row, ins, block, tiles, passes."""
    weight, x, out = code.pointers(3)
    outs, ins, block, tiles, passes = code.fields(5)

    @code.shared(tiles)
    def _(tile: Value) -> None:
        first = tile * code.lanes
        lines = [weight.at("i16", (first + i) * ins) for i in range(code.lanes)]

        @code.loop(passes)
        def _(number: Value) -> None:
            start = number * rows
            inputs = x.at("i32", start * ins >> int(pairs))

            def chain(begin: Value, totals: Values) -> Values:
                def step(within: Value, sums: Values) -> Values:
                    k = begin + within
                    words = _words(code, lines, k, ins, pairs)
                    return _added(code, words, inputs.at("i32", (k >> int(pairs)) * rows), sums, pairs)

                zeros = [code.constant(code.floats, 0.0)] * rows
                sums = code.fold(code.smaller(block, ins - begin), 2 * code.lanes, zeros, step)
                return [total + sum_ for total, sum_ in zip(totals, sums)]

            totals = code.fold(ins, block, [code.constant(code.floats, -0.0)] * rows, chain)
            for m, total in enumerate(totals):
                out.at("float", (start + m) * outs + first).store(total)


def _words(code: Code, lines: Sequence[Value], k: Value, ins: Value, pairs: bool) -> Values:
    """Number k and its following ones of each output's weights, as vectors [word of the line] over outputs."""
    words = []
    beyond = lines[0].at("i16", (ins + k) * code.lanes) if pairs else None
    for i, line in enumerate(lines):
        at = line.at("i16", k)
        words.append(at.load(code.words, 2))
        if beyond is not None:  # the next tile, line after line: sixteen rows at once wait longer for memory
            code.prefetch(beyond.at("i8", 64 * i), 2)
        else:
            code.prefetch(at.at("i8", 512), 3)
    return transposed(words)


def _added(code: Code, words: Sequence[Value], x: Value, sums: Values, pairs: bool) -> Values:
    """The chains after the products of these words with the numbers of x, which stand [number, row]."""
    rows = len(sums)
    for j, word in enumerate(words):
        if pairs:
            sums = [pair for m in range(rows) for pair in code.pairs([word], [x.at("i32", j * rows + m)], [sums[m]])]
            continue
        for half, numbers in enumerate(_both(code, word)):
            ours = [x.at("float", (2 * j + half) * rows + m).load("float").everywhere(code.lanes) for m in range(rows)]
            sums = [code.fma(number, numbers, total) for number, total in zip(ours, sums)]
    return sums


def _both(code: Code, word: Value) -> Values:
    """The low and the high 16-bit numbers of words, as fp32."""
    if code.element == "bfloat":
        return [(word << 16).to(code.floats), (word & -65536).to(code.floats)]
    return [code.up(part.to(f"<{code.lanes} x i16>", "trunc")) for part in (word, word >> 16)]


def takes(weight: torch.Tensor) -> bool:
    """True if products with this weight can run here."""
    found = jit.compiler() if weight.dtype in jit.ELEMENTS else None
    return (
        found is not None
        and weight.device.type == "cpu"
        and weight.is_contiguous()
        and weight.shape[0] % found.lanes == 0
        and weight.shape[1] % (2 * found.lanes) == 0
    )


def chains(x: torch.Tensor, projections: Sequence[Projection], block: int) -> list[torch.Tensor]:
    """x [rows, ins] times each weight [outs, ins] transposed, plus its bias, computed in fp32 -> [rows, outs] as x each."""
    return _rounded(product(x.float(), [weight for weight, _ in projections], block), x.dtype, projections)


def pairs(x: torch.Tensor, projections: Sequence[Projection], block: int) -> list[torch.Tensor]:
    """The same of bf16 numbers multiplied in pairs."""
    return _rounded(product(x, [weight for weight, _ in projections], block), x.dtype, projections)


def _rounded(wide: torch.Tensor, dtype: torch.dtype, projections: Sequence[Projection]) -> list[torch.Tensor]:
    parts = wide.split([weight.shape[0] for weight, _ in projections], 1)
    return [(part if bias is None else part.add_(bias)).to(dtype) for part, (_, bias) in zip(parts, projections)]


def product(x: torch.Tensor, weights: Sequence[torch.Tensor], block: int) -> torch.Tensor:
    """x [rows, ins] times each weight [outs, ins] transposed, side by side -> [rows, all outs] fp32.

    x: fp32, or bf16 to be multiplied in pairs where the processor does. Accumulated in blocks of `block` inputs. Only weights that `takes`
    accepts; block is a multiple of 32.
    """
    found = jit.compiler()
    assert found is not None and block % (2 * found.lanes) == 0
    (rows, ins), pairs = x.shape, x.dtype == torch.bfloat16
    if pairs:
        x = x.contiguous().view(torch.int32)
    count = next(n for n in ROWS if n >= min(rows, PASS))
    passes = -(-rows // count)
    if short := passes * count - rows:
        x = torch.cat((x, x.new_zeros(short, x.shape[1])))
    x = x.view(passes, count, -1).transpose(1, 2).contiguous()  # as it is read: whole rows would lie on each other in the cache
    outs = [weight.shape[0] for weight in weights]
    total = sum(outs)
    out = torch.empty(passes * count, total)
    function = found.function(product_code, jit.ELEMENTS[weights[0].dtype], count, pairs)
    at = out.data_ptr()
    for weight, some in zip(weights, outs):
        threads = jit.threads_for(passes * count * some * ins, some)
        found.run(function, threads, weight.data_ptr(), x.data_ptr(), at, total, ins, block, some // found.lanes, passes)
        at += 4 * some
    return out[:rows]
