"""Products of few rows, compiled at run time: each weight is read once, in the type it is stored in. Knows nothing of models.

    out[m, n] = Σ over blocks b, and lanes l in each, in order, of chain(b, l)          int8: times scale[n]
    chain(b, l) = fma(x[m, k], w[n, k], ...) for k of the block with k % lanes = l, ascending, from 0

A word is what one step of a chain multiplies: an fp32 number, a 16-bit or int8 one as fp32, or a pair of bf16 numbers. A chain has up to
`CHAIN` steps, so a block has `lanes` times as many words. Lanes of a vector are words of one output: nothing is rearranged, and a decoding
step takes as long as memory needs to give the weights. linear_many.py adds up in the same order.
"""

from __future__ import annotations

import torch

from . import jit
from .ir import Code, Value, Values, transposed
from .scratch import scratch

CHAIN = 128  # steps
BYTES = {"i8": 1, "i16": 2, "i32": 4, "float": 4}  # by word of a weight
ROWS = (1, 2, 4)  # of a pass over a tile's weights
TOGETHER = {1: 8, 2: 4, 4: 2}  # by rows: outputs accumulated at once, as registers allow


def scratch_numbers(lanes: int, rows: int) -> int:
    """Numbers of one thread's chains of a tile."""
    return lanes * rows * lanes


def run(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    rows: int,
    pairs: bool,
    scale: torch.Tensor | None,
) -> None:
    """x [passes * rows, words] times weight [outs, ins], times scale [outs] of an int8 one, plus bias -> out [passes * rows, outs]."""
    (count, outs), found = out.shape, jit.compiler()
    assert found is not None
    room = scratch("chains", torch.get_num_threads() * scratch_numbers(found.lanes, rows))
    where, threads = map(jit.address, (weight, x, out, bias, room, scale)), jit.threads_for(count * weight.numel(), outs)
    sizes = outs, weight.shape[1] >> int(pairs), outs // found.lanes, count // rows
    jit.run(product_code, jit.NUMBERS[out.dtype], (rows, pairs, scale is not None, bias is not None), threads, *where, *sizes)


def product_code(code: Code, rows: int, pairs: bool, int8: bool, biased: bool) -> None:
    """A tile is `lanes` outputs.

    Fields: weight, x [passes, rows, words], out [passes, rows, outputs], bias [outputs], scratch of all threads [outputs, rows, lanes],
    scale fp32 [outputs] of an int8 weight, outputs, words, tiles, passes.
    """
    _Product(code, rows, pairs, int8, biased).write()


class _Product:
    """Writes the function."""

    def __init__(self, code: Code, rows: int, pairs: bool, int8: bool, biased: bool) -> None:
        self.code, self.rows, self.pairs, self.int8, self.biased = code, rows, pairs, int8, biased
        self.word = ("i16" if pairs else "i8") if int8 else "i32" if pairs else code.stored
        self.together = TOGETHER[rows]
        self.weight, self.x, self.out, self.bias, scratch, self.scale = code.pointers(6)
        self.outs, self.words, self.tiles, self.passes = code.fields(4)
        self.scratch = scratch.at("float", code.team()[0] * scratch_numbers(code.lanes, rows))

    def write(self) -> None:
        self.code.shared(self.tiles)(self._tile)

    def _tile(self, tile: Value) -> None:
        code = self.code
        first = tile * code.lanes
        weights = self.weight.at(self.word, first * self.words)

        @code.loop(self.passes)
        def _(number: Value) -> None:
            start = number * self.rows
            x = self.x.at("i32", start * self.words)
            zeros = [code.constant(code.floats, -0.0)] * self.rows
            block = code.lanes * CHAIN
            totals = code.fold(self.words, block, zeros, lambda begin, totals: self._block(weights, x, begin, totals))
            if self.int8:
                scale = self.scale.at("float", first).load(code.floats)
                totals = [total * scale for total in totals]
            bias = [code.load_numbers(self.bias.at(code.stored, first))] if self.biased else []
            for m, total in enumerate(totals):
                code.store_numbers(sum(bias, total), self.out.at(code.stored, (start + m) * self.outs + first))

    def _block(self, weights: Value, x: Value, begin: Value, totals: Values) -> Values:
        """Totals of each row plus the chains of a block."""
        code = self.code
        span = code.smaller(self.words - begin, code.lanes * CHAIN)

        @code.loop(code.lanes, self.together)
        def _(first: Value) -> None:
            lines = [weights.at(self.word, (first + n) * self.words + begin) for n in range(self.together)]
            zeros = [code.constant(code.floats, 0.0)] * (self.together * self.rows)
            steps = 64 // (code.lanes * BYTES[self.word])  # a line of memory at a time

            def line(k: Value, chains: Values) -> Values:
                for at in lines:
                    code.prefetch(at.at(self.word, k + self.words * code.lanes), 2)  # the next tile's
                for step in range(steps):
                    words = k + step * code.lanes
                    chains = self._added([at.at(self.word, words) for at in lines], x.at("i32", begin + words), chains)
                return chains

            place = self.scratch.at("float", first * (self.rows * code.lanes))
            for cell, chain in enumerate(code.fold(span, steps * code.lanes, zeros, line)):
                place.at("float", cell * code.lanes).store(chain)

        return [self._reduced(m, total) for m, total in enumerate(totals)]

    def _added(self, weights: Values, x: Value, chains: Values) -> Values:
        """Chains [outputs, rows] after one vector of words of each output and row."""
        code, out = self.code, []
        ours = [x.at("i32", self.words * m).load(code.floats) for m in range(self.rows)]
        for n, at in enumerate(weights):
            theirs = self._loaded(at)
            for mine, chain in zip(ours, chains[n * self.rows :]):
                out.append(code.pair(mine, theirs, chain) if self.pairs else code.fma(mine, theirs, chain))
        return out

    def _loaded(self, at: Value) -> Value:
        """A vector of words of a weight."""
        code = self.code
        if self.pairs:
            return code.byte_pairs(at.load(f"<{code.lanes} x i16>", 2).to(code.words, "zext")) if self.int8 else at.load(code.floats)
        return code.load_bytes(at) if self.int8 else code.load_numbers(at)

    def _reduced(self, m: int, total: Value) -> Value:
        """A row's outputs plus the lanes of their chains, one after the other."""
        code = self.code
        places = [self.scratch.at("float", (n * self.rows + m) * code.lanes) for n in range(code.lanes)]
        for lane in transposed([place.load(code.floats) for place in places]):
            total = total + lane
        return total
