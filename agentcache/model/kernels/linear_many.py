"""Products of more than a few rows, compiled at run time, in the order of linear_few.py, or of linear_transposed.py for a transposed
weight. Knows nothing of models.

A tile is 32 outputs or 64. A block of its weights is woven into a panel once, as words in the order of chains, in memory that stays in the
second-level cache, and read from there for six rows at a time, whose chains are in registers; meanwhile the next block is asked for.

    x        [chains, passes, steps, 6]             packed: words, block by block
    panel    [groups, chains, steps, outputs]       of a block; a group is as many outputs as are accumulated at once
    sums     [groups, passes, 6, outputs]           fp32: of all chains so far. The last pass may compute rows again
"""

from __future__ import annotations

import itertools

from .ir import Code, Value, Values, transposed
from .linear_few import BYTES, CHAIN
from .linear_transposed import AHEAD, Words

ROWS = 6  # of a pass
TILES = {4: 32, 8: 32, 16: 64}  # by lanes: outputs
ALONE = 1 << 16  # numbers: less is packed by one thread before two have met
_VECTORS = {4: 4, 8: 2, 16: 4}  # by lanes: of outputs accumulated at once; 6 times as many chains are in registers


def scratch_bytes(lanes: int, passes: int) -> int:
    """Bytes of one thread's panel and sums."""
    return 4 * TILES[lanes] * (lanes * (CHAIN + 1) + ROWS * passes)


def pack_code(code: Code, pairs: bool, parts: bool) -> None:
    """Fields: x [rows, words], out, words, passes, the last row. parts: chains are parts of a block, as of transposed weights."""
    x, out = code.pointers(2)
    words, passes, end = code.fields(3)
    word = "i32" if pairs else code.stored

    @code.shared(passes)
    def _(number: Value) -> None:
        lines = [x.at(word, code.smaller(number * ROWS + m, end) * words) for m in range(ROWS)]

        @code.loop(words, code.lanes * CHAIN)
        def _(begin: Value) -> None:
            span = code.smaller(words - begin, code.lanes * CHAIN)
            steps = span // code.lanes
            target, pitch = out.at("i32", (begin * passes + number * steps) * ROWS), steps * passes

            def one(lane: Value, step: Value) -> None:
                for m, line in enumerate(lines):
                    at = line.at(word, begin + lane * steps + step)
                    value = at.load("i32", 2) if pairs else code.up(at.load(code.stored, 2))
                    target.at("i32", (pitch * lane + step) * ROWS + m).store(value)

            if parts:
                code.loop(code.lanes)(lambda lane: code.loop(steps)(lambda step: one(lane, step)))
                return

            @code.loop(span, code.lanes)
            def _(k: Value) -> None:
                for m, line in enumerate(lines):
                    at = line.at(word, begin + k)
                    value = at.load(code.words, 2) if pairs else code.load_numbers(at)
                    for lane in range(code.lanes):
                        target.at("i32", (pitch * lane + k // code.lanes) * ROWS + m).store(value.lane(lane))


def product_code(code: Code, pairs: bool, int8: bool, biased: bool, parts: bool) -> None:
    """Fields: weight, x, out [rows, outs], bias, scratch, scale fp32 [outs] of an int8 weight, outs, words, tiles, bytes of a thread's
    scratch, passes, the last row, numbers between a transposed weight's rows. parts: it is transposed."""
    (_Transposed if parts else _Product)(code, pairs, int8, biased).write()


class _Product:
    """Writes the function."""

    def __init__(self, code: Code, pairs: bool, int8: bool, biased: bool) -> None:
        self.code, self.pairs, self.int8, self.biased = code, pairs, int8, biased
        self.word = ("i16" if pairs else "i8") if int8 else "i32" if pairs else code.stored
        self.numbers = 4 // BYTES[self.word]  # of weights in 32 bits
        self.tile = TILES[code.lanes]
        self.vectors = _VECTORS[code.lanes]
        self.group = self.vectors * code.lanes
        self.weight, self.x, self.out, self.bias, scratch, self.scale = code.pointers(6)
        self.outs, self.words, self.tiles, own, self.passes, self.end, self.apart = code.fields(7)
        self.panel = scratch.at("i8", code.team()[0] * own)
        self.sums = self.panel.at("i32", self.tile * code.lanes * (CHAIN + 1))

    def write(self) -> None:
        self.code.shared(self.tiles)(self._tile)

    def _tile(self, tile: Value) -> None:
        code = self.code
        self.first = tile * self.tile
        self.rows = self.weight.at(self.word, self.first * self.words)

        @code.loop(self.passes * (ROWS * self.tile), code.lanes)
        def _(at: Value) -> None:
            self.sums.at("float", at).store(code.constant(code.floats, -0.0))

        code.loop(self.words, code.lanes * CHAIN)(self._block)
        code.loop(self.passes)(self._store)

    def _block(self, begin: Value) -> None:
        code = self.code
        block, left = code.lanes * CHAIN, self.words - begin
        self.begin, self.span = begin, code.smaller(left, block)
        self.steps = self.span // code.lanes
        self.pitch = self.steps + 1  # so that chains do not lie on each other in the cache
        self.following = self._following(begin + block, left > block)
        code.loop(self.tile, self.group)(self._weave)

        @code.loop(code.lanes)
        def _(lane: Value) -> None:
            done = lane * self.steps

            @code.loop(self.tile // self.group)  # inside: each reads the same rows of x, which stay in the second-level cache
            def _(group: Value) -> None:
                panel = self.panel.at("i32", (group * code.lanes + lane) * self.pitch * self.group)

                @code.loop(self.passes)
                def _(number: Value) -> None:
                    self._pass(number, group, done, panel, self._coming(lane, group, number))

    def _following(self, begin: Value, more: Value) -> Value:
        """The address of the next block, which begins there, or is another tile's."""
        return self.rows.at(self.word, self.code.select(more, begin, self.words * self.tile))

    def _coming(self, lane: Value, group: Value, number: Value) -> Value:
        """What a pass asks for of it: passes ask for its rows, one after the other, again and again."""
        rows = self.group // self.code.lanes
        row = (lane * (self.tile // self.group) + group) * rows + number % rows
        return self.following.at(self.word, row * self.words)

    def _ask(self, coming: Value, k: Value) -> None:
        """Asks for what two steps of a pass ask for."""
        for line in range(0, 2 * self.code.lanes, 64 // BYTES[self.word]):
            self.code.prefetch(coming.at(self.word, k * self.code.lanes + line), 2)

    def _weave(self, first: Value) -> None:
        """Words of the block, of a group of outputs."""
        code = self.code
        source = self.rows.at(self.word, first * self.words + self.begin)
        target = self.panel.at("i32", first * (self.pitch * code.lanes))
        numbers = self.numbers

        @code.loop(self.span, 64 // BYTES[self.word])  # a line of memory, read whole: rows may lie on each other in the cache
        def _(k: Value) -> None:
            for vector, part in itertools.product(range(self.vectors), range(0, 64 // BYTES[self.word], numbers * code.lanes)):
                outs = range(vector * code.lanes, (vector + 1) * code.lanes)
                lines = [source.at(self.word, k + part + self.words * n).load(code.words, 2) for n in outs]
                for j, loaded in enumerate(transposed(lines)):
                    for n, word in enumerate(self._parts(loaded)):
                        step, lane = divmod(part + j * numbers + n, code.lanes)
                        at = (self.pitch * lane + k // code.lanes + step) * self.group + vector * code.lanes
                        target.at("i32", at).store(word)

    def _parts(self, word: Value) -> Values:
        """Splits 32 bits of each output's weights into words, the lowest first."""
        code = self.code
        if self.int8:
            return [code.byte_pairs(word, 2 * n) if self.pairs else code.bytes_of(word, n) for n in range(self.numbers)]
        if self.numbers == 1:
            return [word]
        if code.element == "bfloat":
            return [(word << 16).to(code.floats), (word & -65536).to(code.floats)]
        return [code.up(part.to(f"<{code.lanes} x i16>", "trunc")) for part in (word, word >> 16)]

    def _pass(self, number: Value, group: Value, done: Value, panel: Value, coming: Value) -> None:
        code = self.code
        x = self.x.at("i32", ((self.begin + done) * self.passes + number * self.steps) * ROWS)

        def one(k: Value, chains: Values) -> Values:
            at, words = panel.at("float", k * self.group), x.at("float", k * ROWS)
            pieces = [at.at("float", code.lanes * u).load(code.floats) for u in range(self.vectors)]
            after = []
            for m in range(ROWS):
                word = words.at("float", m).load("float").everywhere(code.lanes)
                add = code.pair if self.pairs else code.fma
                after += [add(word, piece, chain) for piece, chain in zip(pieces, chains[m * self.vectors :])]
            return after

        def two(k: Value, chains: Values) -> Values:
            self._ask(coming, k)
            return one(k + 1, one(k, chains))

        chains = code.fold(self.steps, 2, [code.constant(code.floats, 0.0)] * (ROWS * self.vectors), two)
        sums = self.sums.at("float", (group * self.passes + number) * (ROWS * self.group))
        for cell, chain in enumerate(chains):
            at = sums.at("float", cell * code.lanes)
            at.store(at.load(code.floats) + chain)

    def _store(self, number: Value) -> None:
        code = self.code

        @code.loop(self.tile // self.group)
        def _(group: Value) -> None:
            sums = self.sums.at("float", (group * self.passes + number) * (ROWS * self.group))
            first = self.first + group * self.group
            for u in range(self.vectors):
                at = first + u * code.lanes
                bias = code.load_numbers(self.bias.at(code.stored, at)) if self.biased else None
                scale = self.scale.at("float", at).load(code.floats) if self.int8 else None
                for m in range(ROWS):
                    value = sums.at("float", (m * self.vectors + u) * code.lanes).load(code.floats)
                    value = value if scale is None else value * scale
                    place = self.out.at(code.stored, code.smaller(number * ROWS + m, self.end) * self.outs + at)
                    code.store_numbers(value if bias is None else value + bias, place)


class _Transposed(_Product):
    """The same of a weight [ins, outs]: its words come as a panel has them."""

    def __init__(self, code: Code, pairs: bool, int8: bool, biased: bool) -> None:
        super().__init__(code, pairs, int8, biased)
        self.deep = self.apart * (1 + pairs)  # numbers from a word to the next
        self.line = 64 // BYTES[code.stored]

    def _following(self, begin: Value, more: Value) -> Value:
        return self.weight.at(self.code.stored, self.code.select(more, begin * self.deep + self.first, self.first + self.tile))

    def _coming(self, lane: Value, group: Value, number: Value) -> Value:
        lines = self.tile // self.line
        slot = (number * (self.tile // self.group) + group) % (lines * (1 + self.pairs))
        at = lane * self.steps * self.deep + slot // lines * self.apart + slot % lines * self.line
        return self.following.at(self.code.stored, at)

    def _ask(self, coming: Value, k: Value) -> None:
        for step in (k, k + 1):
            self.code.prefetch(coming.at(self.code.stored, step * self.deep), 2)

    def _weave(self, first: Value) -> None:
        code, start = self.code, self.first + first
        theirs = Words(code, self.weight, self.apart, self.pairs)
        target = self.panel.at("i32", first * (self.pitch * code.lanes))

        @code.loop(code.lanes)
        def _(lane: Value) -> None:
            @code.loop(self.steps)
            def _(step: Value) -> None:
                k, at = self.begin + lane * self.steps + step, (self.pitch * lane + step) * self.group
                for vector in range(0, self.group, code.lanes):
                    theirs.ask(k + AHEAD, start + vector)
                    target.at("i32", at + vector).store(theirs.load(k, start + vector))
