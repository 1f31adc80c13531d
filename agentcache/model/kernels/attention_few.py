"""Attention products of few query rows over pages of 16-bit keys and values, compiled at run time. Knows nothing of models.

As linear_few.py for weights: keys and values are read once, in the type they are stored in, instead of being converted to fp32 page by
page, and accumulated in the order of the fp32 batched product that more rows take, which accumulation.py finds out.

    scores[s, p, h, r, j] = chain over d of q[s, h, r, d] · K_sp[h, d, j]              sequences s, pages p, heads h, rows r, slots j
    out[s, h, r, c]       = 0 + chain + chain ...      each over a block of j of scores[s, p, h, r, j] · V_sp[h, j, c], pages in order

Sequences of one call have equally many pages.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from ...kv import PAGE_TOKENS
from . import jit
from .ir import Code, Value, Values
from .linear_few import MOST_ROWS, PASS, ROWS

WIDE = 16  # vectors accumulated at once
AHEAD = 16  # stored rows between the one that is used and the one that is asked for


def product_code(code: Code, rows: int, wide: int, mixes: bool) -> None:
    """One task is some slots of one head of one page; where it mixes: some channels of one head, over all pages of a sequence.

    Fields: page addresses, preceded by how many a sequence has, x, out, heads, all rows, channels, block, tasks, passes.
    """
    pages, x, out = code.pointers(3)
    heads, all_rows, channels, block, tasks, passes = code.fields(6)
    count = pages.load("i64", 8)
    # columns: of a stored row, and of an output row; depth: stored rows, which the chain runs over
    columns, depth = (channels, PAGE_TOKENS) if mixes else (PAGE_TOKENS, channels)
    span = code.lanes * wide
    tiles = columns // span
    zeros = [code.constant(code.floats, 0.0)] * (rows * wide)

    @code.shared(tasks)
    def _(task: Value) -> None:
        at, rest = task // (tiles * heads), task % (tiles * heads)
        head, first = rest // tiles, rest % tiles * span

        @code.loop(passes)
        def _(turn: Value) -> None:
            done = turn * rows

            def line(outer: Value) -> Value:
                """The first of these rows, of this head, of a sequence or page."""
                return (outer * heads + head) * all_rows + done

            def page(number: Value, totals: Values) -> Values:
                position = at * count + number if mixes else at
                stored = pages.at("i64", position + 1).load("i64", 8).to("ptr", "inttoptr")
                stored = stored.at("i16", head * (columns * depth) + first)
                inputs = x.at("float", line(position if mixes else position // count) * depth)

                def chain(begin: Value, totals: Values) -> Values:
                    def step(within: Value, sums: Values) -> Values:
                        k = begin + within
                        numbers = [inputs.at("float", k + depth * m) for m in range(rows)]
                        return _added(code, stored.at("i16", k * columns), columns, numbers, sums)

                    sums = code.fold(code.smaller(begin + block, depth) - begin, 1, zeros, step)
                    return [total + sum_ for total, sum_ in zip(totals, sums)]

                return code.fold(depth, block, totals, chain)

            # a sum begins with zero, a product alone with what leaves its sign as it is
            starts = [code.constant(code.floats, 0.0 if mixes else -0.0)] * (rows * wide)
            totals = code.fold(count if mixes else 1, 1, starts, page)
            target = out.at("float", line(at) * columns + first)
            for cell, total in enumerate(totals):
                target.at("float", columns * (cell // wide) + cell % wide * code.lanes).store(total)


def _added(code: Code, stored: Value, columns: Value | int, numbers: Sequence[Value], sums: Values) -> Values:
    """Sums [rows, wide] plus the products of a stored row with the number of each row at its address."""
    wide = len(sums) // len(numbers)
    ahead = stored.at("i16", columns * AHEAD)
    for line in range(max(1, code.lanes * wide * 2 // 64)):
        code.prefetch(ahead.at("i8", 64 * line), 3)
    vectors = [code.load_numbers(stored.at("i16", u * code.lanes)) for u in range(wide)]
    ours = [number.load("float").everywhere(code.lanes) for number in numbers]
    return [code.fma(ours[cell // wide], vectors[cell % wide], total) for cell, total in enumerate(sums)]


def takes(rows: int, stored: torch.Tensor) -> bool:
    """True if products with keys or values [kv_heads, .., ..] of this type can run here."""
    found = jit.compiler() if rows <= MOST_ROWS and stored.dtype in jit.ELEMENTS else None
    return found is not None and stored.device.type == "cpu" and stored.shape[-1] % found.lanes == 0 and stored.shape[-2] % found.lanes == 0


def _run(mixes: bool, stored: list[torch.Tensor], sequences: int, x: torch.Tensor, out: torch.Tensor, block: int) -> None:
    """x and out [.., rows, ..]: passes of 8 rows, then of what is left, whose first row is addressed and whose other rows follow."""
    found = jit.compiler()
    assert found is not None
    (heads, depth, columns), rows = stored[0].shape, x.shape[-2]
    channels = columns if mixes else depth
    pages = jit.block(len(stored) // sequences, *map(jit.address, stored))
    threads = jit.threads_for(len(stored) * heads * rows * channels * PAGE_TOKENS, heads * columns)
    at = 0
    while at < rows:
        count = max(n for n in ROWS if n <= rows - at)
        passes = (rows - at) // count if count == PASS else 1
        wide = max(u for u in (1, 2, 4, 8) if u * count <= WIDE and columns % (u * found.lanes) == 0)
        tasks = heads * (columns // (wide * found.lanes)) * (sequences if mixes else len(stored))
        lines = x.data_ptr() + x.shape[-1] * at * 4, out.data_ptr() + out.shape[-1] * at * 4
        sizes = heads, rows, channels, block, tasks, passes
        jit.run(product_code, jit.ELEMENTS[stored[0].dtype], (count, wide, mixes), threads, ctypes.addressof(pages), *lines, *sizes)
        at += passes * count


def scores(q: torch.Tensor, keys: list[torch.Tensor], out: torch.Tensor, block: int) -> None:
    """q [sequences, heads, rows, head_dim] fp32 times the keys [heads, head_dim, 512] of each page of its sequence, sequence after
    sequence, into out [sequences · pages, heads, rows, 512] fp32.
    """
    _run(False, keys, q.shape[0], q.contiguous(), out, block)


def mix(weights: torch.Tensor, values: list[torch.Tensor], sequences: int, block: int) -> torch.Tensor:
    """weights [sequences · pages, heads, rows, 512] fp32 times each page's values [heads, 512, head_dim], summed over the pages of a
    sequence -> [sequences, heads, rows, head_dim] fp32.
    """
    heads, rows, dim = weights.shape[1], weights.shape[2], values[0].shape[-1]
    out = torch.empty(sequences, heads, rows, dim)
    _run(True, values, sequences, weights, out, block)
    return out
