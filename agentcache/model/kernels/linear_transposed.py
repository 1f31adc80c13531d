"""Products of few rows with weights that lie transposed, as [ins, outs], compiled at run time. Knows nothing of models.

    out[m, n] = Σ over blocks b, and parts p of each, in order, of chain(b, p)
    chain(b, p) = fma(x[m, k], w[k, n], ...) for k of the p-th of `lanes` equal parts of the block, ascending, from 0

Words and blocks are those of linear_few.py. Lanes of a vector are outputs. A thread adds up a strip of them, whose chains and totals stay
in the first-level cache while rows of the weight come by. linear_many.py adds up in the same order.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from . import jit
from .ir import Code, Value, Values
from .linear_few import CHAIN
from .scratch import scratch

STRIP = 1024  # outputs at most
TOGETHER = 4  # words between two looks at a chain
AHEAD = 16  # words whose weights are asked for


def scratch_numbers(rows: int) -> int:
    """Numbers of one thread's chains and totals."""
    return 2 * rows * STRIP


def run(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, rows: int, pairs: bool, dtype: torch.dtype) -> None:
    """x [passes * rows, words] of rows of this type, times weight [outs, ins] -> out fp32."""
    (count, outs), found = out.shape, jit.compiler()
    assert found is not None
    threads = jit.threads_for(count * weight.numel(), outs)
    strip = min(STRIP, -(-outs // (threads * found.lanes)) * found.lanes)  # wide ones read memory faster, and each thread gets some
    where = map(jit.address, (weight, x, out, scratch("strips", threads * scratch_numbers(rows))))
    sizes = weight.stride(1), outs, weight.shape[1] >> int(pairs), count // rows, -(-outs // strip), strip
    jit.run(product_code, jit.NUMBERS[dtype], (rows, pairs), threads, *where, *sizes)


class Words:
    """Words of a weight [ins, outs] whose rows lie `pitch` numbers apart."""

    def __init__(self, code: Code, weight: Value, pitch: Value, pairs: bool) -> None:
        self.code, self.weight, self.pitch, self.pairs = code, weight, pitch, pairs

    def _row(self, k: Value | int, n: Value | int) -> Value:
        return self.weight.at(self.code.stored, self.pitch * k).at(self.code.stored, n)

    def load(self, k: Value, n: Value | int) -> Value:
        """The k-th word of outputs from n on."""
        code = self.code
        if not self.pairs:
            return code.load_numbers(self._row(k, n))
        low, high = (self._row(k * 2 + which, n).load(f"<{code.lanes} x i16>", 2).to(code.words, "zext") for which in (0, 1))
        return (low | high << 16).to(code.floats)

    def ask(self, k: Value, n: Value | int) -> None:
        """Prefetches it."""
        for which in range(1 + self.pairs):
            self.code.prefetch(self._row(k * (1 + self.pairs) + which, n), 3)


def product_code(code: Code, rows: int, pairs: bool) -> None:
    """Fields: weight, x [passes, rows, words], out fp32, scratch of all threads [2, rows, outputs], pitch, outs, words, passes, strips, and
    outputs of one."""
    _Product(code, rows, pairs).write()


class _Product:
    """Writes the function."""

    def __init__(self, code: Code, rows: int, pairs: bool) -> None:
        self.code, self.rows = code, rows
        weight, self.x, self.out, scratch = code.pointers(4)
        pitch, self.outs, self.words, self.passes, self.strips, self.width = code.fields(6)
        self.weights = Words(code, weight, pitch, pairs)
        self.chains = scratch.at("float", code.team()[0] * scratch_numbers(rows))
        self.totals = self.chains.at("float", rows * STRIP)
        self.add = code.pair if pairs else code.fma

    def write(self) -> None:
        self.code.shared(self.strips)(self._strip)

    def _each(self, body: Callable[[Value, int, Value], None]) -> None:
        """A loop over a strip: body(its output, row, cell of chains and totals)."""

        @self.code.loop(self.span, self.code.lanes)
        def _(n: Value) -> None:
            for m in range(self.rows):
                body(n, m, n + m * STRIP)

    def _fill(self, cells: Value, number: float) -> None:
        self._each(lambda n, m, cell: cells.at("float", cell).store(self.code.constant(self.code.floats, number)))

    def _strip(self, strip: Value) -> None:
        code = self.code
        self.first = strip * self.width
        self.span = code.smaller(self.outs - self.first, self.width)

        @code.loop(self.passes)
        def _(number: Value) -> None:
            x, out = (of.at("i32", number * self.rows * row) for of, row in ((self.x, self.words), (self.out, self.outs)))
            self._fill(self.totals, -0.0)

            @code.loop(self.words, code.lanes * CHAIN)
            def _(begin: Value) -> None:
                steps = code.smaller(self.words - begin, code.lanes * CHAIN) // code.lanes
                code.loop(code.lanes)(lambda part: self._part(x, begin + part * steps, steps))

            def give(n: Value, m: int, cell: Value) -> None:
                out.at("float", self.outs * m + self.first + n).store(self.totals.at("float", cell).load(code.floats))

            self._each(give)

    def _part(self, x: Value, begin: Value, steps: Value) -> None:
        """Adds a chain of so many words to the totals of a strip."""
        code, whole = self.code, steps // TOGETHER * TOGETHER
        self._fill(self.chains, 0.0)
        code.loop(whole, TOGETHER)(lambda step: self._some(x, [begin + step + k for k in range(TOGETHER)]))
        code.loop(steps - whole, 2)(lambda step: self._some(x, [begin + whole + step + k for k in range(2)]))

        def add(n: Value, m: int, cell: Value) -> None:
            total = self.totals.at("float", cell)
            total.store(total.load(code.floats) + self.chains.at("float", cell).load(code.floats))

        self._each(add)

    def _some(self, x: Value, words: Values) -> None:
        """Adds some words to the chains of a strip."""
        code = self.code
        rows = [x.at("i32", self.words * m) for m in range(self.rows)]
        ours = [[row.at("i32", k).load("float").everywhere(code.lanes) for k in words] for row in rows]

        @code.loop(self.span, code.lanes)
        def _(n: Value) -> None:
            for k in words:
                self.weights.ask(k + AHEAD, self.first + n)
            theirs = [self.weights.load(k, self.first + n) for k in words]
            for m, mine in enumerate(ours):
                place = self.chains.at("float", n + m * STRIP)
                chain = place.load(code.floats)
                for word, weights in zip(mine, theirs, strict=True):
                    chain = self.add(word, weights, chain)
                place.store(chain)
