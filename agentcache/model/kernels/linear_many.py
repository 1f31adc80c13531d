"""Products of more than a few rows, compiled at run time, in the order of linear_few.py. Knows nothing of models.

A tile is 32 outputs or 64. A block of its weights is woven into a panel once, as words in the order of chains, in memory that stays in the
second-level cache, and read from there for six rows at a time, whose chains are in registers; meanwhile the next block is asked for.

    x        [chains, passes, steps, 6]             packed: words, block by block
    panel    [groups, chains, steps, outputs]       of a block; a group is as many outputs as are accumulated at once
    sums     [groups, passes, 6, outputs]           fp32: of all chains so far. The last pass may compute rows again
"""

from __future__ import annotations

from .ir import Code, Value, Values, transposed
from .linear_few import BYTES, CHAIN

ROWS = 6  # of a pass
TILES = {4: 32, 8: 32, 16: 64}  # by lanes: outputs
ALONE = 1 << 16  # numbers: less is packed by one thread before two have met
_VECTORS = {4: 4, 8: 2, 16: 4}  # by lanes: of outputs accumulated at once; 6 times as many chains are in registers


def scratch_bytes(lanes: int, passes: int) -> int:
    """Bytes of one thread's panel and sums."""
    return 4 * TILES[lanes] * (lanes * (CHAIN + 1) + ROWS * passes)


def pack_code(code: Code, pairs: bool) -> None:
    """Fields: x [rows, words], out, words, passes, the last row."""
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

            @code.loop(span, code.lanes)
            def _(k: Value) -> None:
                for m, line in enumerate(lines):
                    at = line.at(word, begin + k)
                    value = at.load(code.words, 2) if pairs else code.load_numbers(at)
                    for lane in range(code.lanes):
                        target.at("i32", (pitch * lane + k // code.lanes) * ROWS + m).store(value.lane(lane))


def product_code(code: Code, pairs: bool, int8: bool, biased: bool) -> None:
    """Fields: weight, x, out [rows, outs], bias, scratch, scale fp32 [outs] of an int8 weight, outs, words, tiles, bytes of a thread's
    scratch, passes, the last row."""
    _Product(code, pairs, int8, biased).write()


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
        self.outs, self.words, self.tiles, own, self.passes, self.end = code.fields(6)
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
        self.following = self.rows.at(self.word, code.select(left > block, begin + block, self.words * self.tile))
        code.loop(self.tile, self.group)(self._weave)

        @code.loop(code.lanes)
        def _(lane: Value) -> None:
            done = lane * self.steps

            @code.loop(self.tile // self.group)  # inside: each reads the same rows of x, which stay in the second-level cache
            def _(group: Value) -> None:
                panel = self.panel.at("i32", (group * code.lanes + lane) * self.pitch * self.group)
                rows = self.group // code.lanes  # of the next block, which the passes ask for, one after the other, again and again

                @code.loop(self.passes)
                def _(number: Value) -> None:
                    row = (lane * (self.tile // self.group) + group) * rows + number % rows
                    self._pass(number, group, done, panel, self.following.at(self.word, row * self.words))

    def _weave(self, first: Value) -> None:
        """Words of the block, of a group of outputs."""
        code = self.code
        source = self.rows.at(self.word, first * self.words + self.begin)
        target = self.panel.at("i32", first * (self.pitch * code.lanes))
        numbers = self.numbers

        @code.loop(self.span, numbers * code.lanes)
        def _(k: Value) -> None:
            for vector in range(self.vectors):
                lines = []
                for n in range(vector * code.lanes, (vector + 1) * code.lanes):
                    at = k + self.words * n
                    lines.append(source.at(self.word, at).load(code.words, 2))
                for j, loaded in enumerate(transposed(lines)):
                    for part, word in enumerate(self._parts(loaded)):
                        step, lane = divmod(j * numbers + part, code.lanes)
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

        lines = range(0, 2 * code.lanes, 64 // BYTES[self.word])

        def two(k: Value, chains: Values) -> Values:
            for line in lines:
                code.prefetch(coming.at(self.word, k * code.lanes + line), 2)
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
