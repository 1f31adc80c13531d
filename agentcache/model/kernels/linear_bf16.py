"""Products of more than a few rows with bf16 weights, on processors that multiply pairs of them. Knows nothing of models.

The chains of linear_few.py's pairs, for as many rows as a prefill has: so the bits are oneDNN's here, too. A tile is 64 outputs. A block
of its weights is woven into pairs once, in memory that stays in the second-level cache, and read from there for six rows at a time, 24
chains in registers; meanwhile the lines of the next block are asked for. The library reads, weaves and multiplies one after the other.

    woven    [pairs of a block, 64]    words of two bf16 numbers, w[n, k] and w[n, k + 1]
    sums     [passes, 6, 64]           fp32: what the blocks so far add up to. The last pass may compute rows again that others did
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from . import jit
from .ir import Code, Value, Values, transposed
from .linear_library import Projection

ROWS = 6  # of a pass
TILE = 64  # outputs
_WIDE = TILE // 16


def takes(weight: torch.Tensor, block: int) -> bool:
    """True if products with this weight, added up in such blocks of inputs, can run here."""
    outs, ins = weight.shape
    fits = outs % TILE == 0 and ins % 32 == 0 and block % 32 == 0
    return fits and weight.dtype == torch.bfloat16 and weight.device.type == "cpu" and weight.is_contiguous() and jit.multiplies_pairs()


def products(x: torch.Tensor, projections: Sequence[Projection], block: int) -> list[torch.Tensor]:
    """x [rows, ins] bf16 times each weight [outs, ins] transposed, plus its bias -> [rows, outs] bf16 each.

    Accumulated in blocks of `block` inputs. Only weights that `takes` accepts.
    """
    x = x.contiguous()
    rows, ins = x.shape
    passes, block = -(-rows // ROWS), min(block, ins)
    out = []
    for weight, bias in projections:
        outs, bias = weight.shape[0], None if bias is None else bias.contiguous()
        threads = jit.threads_for(rows * outs * ins, outs // TILE)
        own = 2 * TILE * block + 4 * TILE * ROWS * passes
        scratch = torch.empty(threads * own, dtype=torch.uint8)
        out.append(torch.empty(rows, outs, dtype=x.dtype))
        where = map(jit.address, (weight, x, out[-1], bias, scratch))
        jit.run(product_code, "bfloat", (block, bias is not None), threads, *where, outs, ins, outs // TILE, own, passes, rows - 1)
    return out


def product_code(code: Code, block: int, biased: bool) -> None:
    """Fields: weight, x, out, bias, scratch of all threads, outs, ins, tiles, bytes of a thread's scratch, passes, the last row."""
    _Product(code, block, biased).write()


class _Product:
    """Writes the function for blocks of so many inputs."""

    def __init__(self, code: Code, block: int, biased: bool) -> None:
        self.code, self.block, self.biased = code, block, biased
        self.weight, self.x, self.out, self.bias, scratch = code.pointers(5)
        self.outs, self.ins, self.tiles, own, self.passes, self.end = code.fields(6)
        self.woven = scratch.at("i8", code.team()[0] * own)
        self.sums = self.woven.at("i16", TILE * block)

    def write(self) -> None:
        self.code.shared(self.tiles)(self._tile)

    def _tile(self, tile: Value) -> None:
        code = self.code
        self.first = tile * TILE
        self.rows = self.weight.at("i16", self.first * self.ins)

        @code.loop(self.passes * (ROWS * TILE), 16)
        def _(at: Value) -> None:
            self.sums.at("float", at).store(code.constant(code.floats, -0.0))

        code.loop(self.ins, self.block)(self._block)
        code.loop(self.passes)(self._store)

    def _block(self, k: Value) -> None:
        code = self.code
        left = self.ins - k
        more = left > self.block
        self.k, self.span = k, code.smaller(left, self.block)
        self.following = self.rows.at("i16", code.select(more, k + self.block, self.ins * TILE))
        code.loop(_WIDE)(self._weave)
        code.loop(self.passes)(self._pass)

    def _weave(self, group: Value) -> None:
        """The block's weights of 16 outputs, as pairs."""
        first = group * 16
        source, target = self.rows.at("i16", first * self.ins + self.k), self.woven.at("i32", first)

        @self.code.loop(self.span, 32)
        def _(k: Value) -> None:
            at = source.at("i16", k)
            lines = []
            for _row in range(16):
                lines.append(at.load(self.code.words, 2))
                at = at.at("i16", self.ins)
            for j, words in enumerate(transposed(lines)):
                target.at("i32", k * (TILE // 2) + j * TILE).store(words)

    def _row(self, number: Value, m: int) -> Value:
        """Row m of a pass; the last one again where there is none."""
        return self.code.smaller(number * ROWS + m, self.end)

    def _cells(self, number: Value) -> Values:
        """The addresses of a pass's sums, row by row."""
        base = self.sums.at("float", number * (ROWS * TILE))
        return [base.at("float", 16 * n) for n in range(ROWS * _WIDE)]

    def _pass(self, number: Value) -> None:
        code = self.code
        rows = [self.x.at("i16", self._row(number, m) * self.ins + self.k) for m in range(ROWS)]
        asked = number * (self.block // 2)

        def pair(k: Value, chains: Values) -> Values:
            self._fetch(asked + (k >> 1))
            at = self.woven.at("i32", k * (TILE // 2))
            pieces = [at.at("i32", 16 * u).load(code.words) for u in range(_WIDE)]
            return code.pairs(pieces, [row.at("i16", k) for row in rows], chains)

        def two(k: Value, chains: Values) -> Values:  # with one, the compiler keeps moving chains about
            return pair(k + 2, pair(k, chains))

        chains = code.fold(self.span, 4, [code.constant(code.floats, 0.0)] * (ROWS * _WIDE), two)
        for cell, chain in zip(self._cells(number), chains):
            cell.store(cell.load(code.floats) + chain)

    def _fetch(self, line: Value) -> None:
        """Asks for one line of the next block; the passes go over them again and again."""
        each = 1 << (self.block // 32 - 1).bit_length()  # lines of an output, or some more
        row = (line >> (each.bit_length() - 1)) & (TILE - 1)
        self.code.prefetch(self.following.at("i16", row * self.ins + (line & (each - 1)) * 32), 2)

    def _store(self, number: Value) -> None:
        code = self.code
        biases = [code.load_numbers(self.bias.at("i16", self.first + 16 * u)) for u in range(_WIDE)] if self.biased else []
        cells = self._cells(number)
        for m in range(ROWS):
            target = self.out.at("i16", self._row(number, m) * self.outs + self.first)
            for u in range(_WIDE):
                value = cells[m * _WIDE + u].load(code.floats)
                value = value + biases[u] if self.biased else value
                target.at("i16", 16 * u).store(value.to("<16 x bfloat>", "fptrunc"), 2)
