"""Attention over pages, compiled at run time. Knows nothing of models.

What `attention.py` defines, for any number of rows, over keys and values as they are stored in pages:

    s[r, j] = scale · (chain over channels of q[r] · K[:, j]), soft-capped          e[r, j] = exp(s[r, j] - max of s[r] over what r sees)
    out[r]  = (chain over slots of e[r, j] · V[j]) / (exp(sink - max) + Σ e[r, j])   the sum lane by lane, slots ascending, then over lanes

A chain is fp32 and adds one product after the other, so a row's bits depend neither on the rows beside it nor on how many slots
are looked at that it does not see: those add exact zeros. A task is one head and some rows, whose scores stay in the second-level cache.
Where it has many rows, a tile of keys or values is widened to fp32 once and read from the first-level cache for all of them.

`pairs`: where AVX-512 multiplies pairs of bf16 numbers, a chain adds a pair of products at a time, and tiles are woven into pairs; weights
e are bf16. Processors with matrix units (AMX) are faster by their library.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence

import torch

from ...kv import PAGE_TOKENS
from . import jit
from .ir import Code, Value, Values, single

ROWS = (1, 2, 4, 6)  # accumulated at once: what registers hold beside the loaded keys
WIDE = {8: {1: 8, 2: 4, 4: 2, 6: 2}, 16: {1: 8, 2: 8, 4: 4, 6: 4}}  # by lanes and rows: vectors of slots or channels
SPAN = 128  # slots: what is looked at begins and ends at a multiple of it
TASK_BYTES = 1 << 20  # of a task's scores
WIDENED = 4  # passes from which on a tile is widened: fewer read it as it is stored
LEAST_PASSES, MOST_PASSES = 2, 16  # of a task: keys and values are read once for all of them
ALL = 1 << 40  # positions: of a window or chunk that bounds nothing
_LEAST = -125 * math.log(2)  # what would weigh less is 0
_LOG2E = 1.4426950408889634
_ROUND = 1.5 * 2.0**23  # added to a small fp32 number, its last bits are that number's nearest integer
_TAYLOR = tuple(math.log(2) ** n / math.factorial(n) for n in range(7))  # of 2^f for |f| <= 0.5, lowest first


def takes(dtype: torch.dtype, device: torch.device, widths: Sequence[int]) -> bool:
    """True if attention over pages of this type can run here; widths: of keys and values of a head."""
    found = jit.compiler() if device.type == "cpu" and dtype in jit.NUMBERS else None
    if found is None or (dtype == torch.bfloat16 and found.has("amx-bf16")):
        return False
    return all(width % found.lanes == 0 for width in widths)


def attend(
    q: torch.Tensor,
    keys: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
    first: int,
    scale: float,
    window: int,
    chunk: int,
    softcap: float,
    sinks: torch.Tensor | None,
    room: Callable[[int], torch.Tensor],
) -> torch.Tensor:
    """q [tokens, query heads, width of keys] at positions from `first` on; keys [kv heads, width, 512] and values [kv heads, 512, width]
    of all pages up to the last one -> [tokens, query heads, width of values].

    window, chunk, softcap, sinks: as of `Attention`. room(n): n fp32 numbers to work in.
    """
    found = jit.compiler()
    assert found is not None
    pairs = q.dtype == torch.bfloat16 and jit.multiplies_pairs()
    heads, dim, _ = keys[0].shape
    (tokens, query_heads, _), width = q.shape, values[0].shape[-1]
    rows, group = tokens * query_heads // heads, query_heads // heads  # rows of one kv head
    out = q.new_empty(tokens, query_heads, width)
    x = (q if pairs else q.float()).contiguous()
    sinks = None if sinks is None else sinks.detach().float().contiguous()
    pages = [jit.block(*(page.data_ptr() for page in of_kind)) for of_kind in (keys, values)]
    where = (*map(ctypes.addressof, pages), *map(jit.address, (x, out, sinks)))
    window, chunk = window or ALL, chunk or ALL
    slots = min(len(keys) * PAGE_TOKENS, min(window, chunk) + tokens + 2 * SPAN)
    line = 4 * (slots + width) + 128  # what is mixed, the sum, and so that lines do not lie on each other in the cache
    sizes = (dim, width, pairs, bool(softcap), sinks is not None)
    at = 0
    while at < rows:
        count = max(n for n in ROWS if n <= rows - at)
        passes = -(-(rows - at) // count) if count == ROWS[-1] else 1
        per = max(LEAST_PASSES, min(MOST_PASSES, TASK_BYTES // (count * line)))
        chunks = -(-passes // per)
        threads = jit.threads_for(heads * rows * slots * dim, heads * chunks)
        own = _tile_bytes(found.lanes, max(dim, SPAN)) + per * count * line
        scratch = room(threads * own // 4)
        factors = jit.bits_of(scale), jit.bits_of(softcap)
        what = (heads, at, passes, per, first, group, window, chunk, heads * chunks, own, line, chunks, rows - 1)
        jit.run(
            attention_code, jit.NUMBERS[q.dtype], (count, *sizes, passes >= WIDENED), threads, *where, scratch.data_ptr(), *factors, *what
        )
        at += passes * count
    return out


def _tile_bytes(lanes: int, rows: int) -> int:
    """The size of a widened tile: keys of all channels, or values of a span of slots."""
    return 4 * lanes * WIDE[lanes][ROWS[-1]] * rows


def attention_code(code: Code, rows: int, dim: int, width: int, pairs: bool, capped: bool, sunk: bool, widens: bool) -> None:
    """Fields: see `_Task`."""
    _Task(code, rows, dim, width, pairs, capped, sunk, widens).write()


class _Task:
    """Writes the function for so many rows at once, and widths of a head's keys and values.

    keys, values: lists of addresses. row0: the first row; passes: times `rows` of them, `per` of which are a task, `chunks` tasks a head;
    end: the last row, which the last pass computes again where it has fewer of its own.
    own: bytes of a thread's scratch: first a tile, then the rows; line: bytes of a row.
    """

    def __init__(self, code: Code, rows: int, dim: int, width: int, pairs: bool, capped: bool, sunk: bool, widens: bool) -> None:
        self.code, self.rows, self.dim, self.width, self.pairs = code, rows, dim, width, pairs
        self.capped, self.sunk, self.lanes = capped, sunk, code.lanes
        self.wide = WIDE[code.lanes][rows]
        self.mixed = next(u for u in (8, 4, 2, 1) if u <= self.wide and width % (self.lanes * u) == 0)
        self.widens = widens  # keys and values to fp32 once for all passes
        self.input = "i16" if pairs else "float"
        self.keys, self.values, self.q, self.out, self.sinks, scratch = code.pointers(6)
        self.factor, self.cap = (code.number().everywhere(self.lanes) for _ in range(2))
        self.heads, self.row0, self.passes, self.per, self.first, self.group, self.window, self.chunk = code.fields(8)
        self.tasks, own, self.line, self.chunks, self.end = code.fields(5)
        self.buffer = scratch.at("i8", code.team()[0] * own)
        self.tile_bytes = _tile_bytes(self.lanes, max(dim, SPAN))

    def write(self) -> None:
        self.code.shared(self.tasks)(self._task)

    def _task(self, task: Value) -> None:
        code = self.code
        self.head, begin = task // self.chunks, task % self.chunks * self.per
        self.count = code.smaller(self.passes - begin, self.per)
        self.row = begin * self.rows + self.row0  # the first one of the task
        last = self._at(self.count * self.rows + -1)
        self.low = self._seen_from(self._position(self.row)) & -SPAN
        self.high = (self._position(last) + SPAN) & -SPAN
        self.slots = self.high - self.low
        code.loop(self.slots, self.lanes * self.wide)(self._score)
        code.loop(self.count * self.rows)(self._weigh)
        first = self.low >> 9
        pages = ((self.high + -1) >> 9) - first + 1
        code.loop(pages)(lambda page: self._mix(first + page))
        code.loop(self.count * self.rows)(self._divide)

    def _at(self, index: Value) -> Value:
        """Row `index` of the task."""
        return self.code.smaller(self.row + index, self.end)

    def _position(self, row: Value) -> Value:
        return self.first + row // self.group

    def _seen_from(self, position: Value) -> Value:
        """The first position that one at `position` sees."""
        start, chunk = position - self.window + 1, position // self.chunk * self.chunk
        return self.code.select(start < chunk, chunk, start)

    def _stored(self, pages: Value, page: Value, width: int, index: Value) -> Value:
        """The address of a number of this head in a page."""
        base = pages.at("i64", page).load("i64", 8).to("ptr", "inttoptr")
        return base.at(self.code.stored, self.head * (width * PAGE_TOKENS) + index)

    def _woven(self, source: Value, columns: int, wide: int) -> Values:
        """Two stored rows, `columns` apart, as vectors of pairs."""
        unit = 16 if wide == 1 else 32
        pieces = []
        for u in range(0, 16 * wide, unit):
            one, other = (source.at("i16", u + half * columns).load(f"<{unit} x i16>", 2) for half in (0, 1))
            for part in range(0, unit, 16):
                order = [lane for i in range(part, part + 16) for lane in (i, unit + i)]
                pieces.append(one.shuffled(other, order).to(self.code.words))
        return pieces

    def _tile(self, rows: int, source: Value, columns: int, wide: int) -> Callable[[Value], Values]:
        """Widens `rows` stored rows into the thread's memory; returns a reader of one, or a pair; for few passes, of stored ones."""
        code, step = self.code, 1 + self.pairs

        def stored(k: Value) -> Values:
            row = source.at(code.stored, k * columns)
            if self.pairs:
                return self._woven(row, columns, wide)
            return [code.load_numbers(row.at(code.stored, u * self.lanes)) for u in range(wide)]

        def places(k: Value) -> Values:
            first = self.buffer.at("i32", k * (self.lanes * wide // step))
            return [first.at("i32", u * self.lanes) for u in range(wide)]

        if not self.widens:
            return stored

        @code.loop(rows, step)
        def _(k: Value) -> None:
            for place, piece in zip(places(k), stored(k)):
                place.store(piece)

        return lambda k: [place.load(code.words if self.pairs else code.floats) for place in places(k)]

    def _fetch(self, tile: Value, columns: int, wide: int, turn: Value, k: Value) -> None:
        """Asks for lines of this tile: those of two rows at a time; in a large task one of them, another one in each of the first turns."""
        lines = max(1, self.lanes * wide * (4 if self.code.stored == "float" else 2) // 64)
        if self.widens:
            number = turn * (SPAN // 2) + (k >> 1)
            row = ((number // lines) & (SPAN - 1)) * columns
            self.code.prefetch(tile.at(self.code.stored, row).at("i8", (number & (lines - 1)) * 64), 2)
            return
        for row in (k, k + 1):
            for line in range(lines):
                self.code.prefetch(tile.at(self.code.stored, row * columns).at("i8", line * 64), 2)

    def _added(self, k: Value, read: Callable[[Value], Values], inputs: Values, sums: Values) -> Values:
        """Sums [rows, vectors] after rows k and k + 1 of a tile, times the numbers k and k + 1 of each input."""
        if self.pairs:
            return self.code.pairs(read(k), [line.at("i16", k) for line in inputs], sums)
        for at in (k, k + 1):
            vectors, after = read(at), []
            for m, line in enumerate(inputs):
                x = line.at("float", at).load("float").everywhere(self.lanes)
                after += [self.code.fma(x, one, sums[m * len(vectors) + u]) for u, one in enumerate(vectors)]
            sums = after
        return sums

    def _sums(self, index: Value) -> Value:
        """The address of what a row mixes, in the thread's own memory: fp32, before its scores."""
        return self.buffer.at("i8", index * self.line + self.tile_bytes)

    def _line(self, index: Value) -> Value:
        """The address of a row's scores, in the thread's own memory."""
        return self._sums(index).at("float", self.width)

    def _query(self, index: Value) -> Value:
        """The number of row `index` of the task in q and out [tokens, query heads, ..]."""
        row = self._at(index)
        return (row // self.group * self.heads + self.head) * self.group + row % self.group

    def _score(self, slot: Value) -> None:
        code = self.code
        position = self.low + slot
        source = self._stored(self.keys, position >> 9, self.dim, position & (PAGE_TOKENS - 1))
        read = self._tile(self.dim, source, PAGE_TOKENS, self.wide)
        following = source.at(code.stored, self.lanes * self.wide)

        @code.loop(self.count)
        def _(turn: Value) -> None:
            first = turn * self.rows
            queries = [self.q.at(self.input, self._query(first + m) * self.dim) for m in range(self.rows)]

            def two(k: Value, sums: Values) -> Values:
                self._fetch(following, PAGE_TOKENS, self.wide, turn, k)
                return self._added(k, read, queries, sums)

            sums = code.fold(self.dim, 2, [code.constant(code.floats, 0.0)] * (self.rows * self.wide), two)
            for m in range(self.rows):
                line = self._line(first + m).at("float", slot)
                for u in range(self.wide):
                    line.at("float", self.lanes * u).store(self._capped(sums[m * self.wide + u] * self.factor))

    def _capped(self, score: Value) -> Value:
        """cap · tanh(score / cap), if the layer bounds scores."""
        if not self.capped:
            return score
        code, share = self.code, score / self.cap
        size = code.select(share < 0, -share, share)
        power = exponential(code, size * -2.0)
        bound = (code.constant(code.floats, 1.0) - power) / (power + 1.0)
        return code.select(share < 0, -bound, bound) * self.cap

    def _weigh(self, index: Value) -> None:
        """Scores become weights, their sum stands after them; bf16 at the beginning of the row's line where pairs are multiplied."""
        code, lanes = self.code, self.lanes
        line, sums = self._line(index), self._sums(index)
        zero = code.constant(code.floats, 0.0)
        for channel in range(0, self.width, lanes):
            sums.at("float", channel).store(zero)
        position = self._position(self._at(index))
        since = self._seen_from(position)
        whole = (position + 1 - self.low) & -lanes  # slots that are all seen
        whole = code.select(since > self.low, code.constant("i64", 0), whole)
        rest = self.slots - whole
        seen = self._masked(line, whole, position, since)

        def plain(slot: Value) -> tuple[Value, Value]:
            return slot, line.at("float", slot).load(code.floats)

        def larger(one: tuple[Value, Value], most: Value) -> Value:
            return code.select(one[1] > most, one[1], most)

        def weight(one: tuple[Value, Value], total: Value) -> Value:
            slot, score = one
            value = exponential(code, score - top)
            if self.pairs:
                line.at("i16", slot).store(value.to("<16 x bfloat>", "fptrunc"), 2)
            else:
                line.at("float", slot).store(value)
            return total + value

        def over_all(step: Callable[[tuple[Value, Value], Value], Value], start: Value) -> Value:
            found = code.fold(whole, lanes, [start], lambda slot, carried: [step(plain(slot), carried[0])])
            return code.fold(rest, lanes, found, lambda slot, carried: [step(seen(slot), carried[0])])[0]

        most = over_all(larger, code.constant(code.floats, -math.inf))
        top = code.call("float", f"llvm.vector.reduce.fmax.v{lanes}f32", most).everywhere(lanes)
        if self.sunk:
            sink = self.sinks.at("float", self._query(index) % (self.heads * self.group)).load("float").everywhere(lanes)
            top = code.select(sink > top, sink, top)
        total = over_all(weight, zero)
        sum_ = total.lane(0)
        for lane in range(1, lanes):
            sum_ = sum_ + total.lane(lane)
        if self.sunk:
            sum_ = sum_ + exponential(code, sink - top).lane(0)
        line.at("float", self.slots).store(sum_)

    def _masked(self, line: Value, whole: Value, position: Value, since: Value) -> Callable[[Value], tuple[Value, Value]]:
        """Returns a reader of a vector of slots after the `whole` first ones: the slot, and scores, -inf where a slot is not seen."""
        code = self.code

        def words(value: Value) -> Value:
            return value.to("i32", "trunc").everywhere(self.lanes)

        upper, lower = words(position), words(since)
        lanes = Value(code, code.words, f"<{', '.join(f'i32 {lane}' for lane in range(self.lanes))}>")

        def seen(slot: Value) -> tuple[Value, Value]:
            slot = whole + slot
            at = words(self.low + slot) + lanes
            score = line.at("float", slot).load(code.floats)
            return slot, code.select((at <= upper) & (at >= lower), score, -math.inf)

        return seen

    def _mix(self, page: Value) -> None:
        code = self.code
        base = page * PAGE_TOKENS
        start = code.select(self.low > base, self.low, base)
        count = code.smaller(self.high, base + PAGE_TOKENS) - start
        source = self._stored(self.values, page, self.width, (start & (PAGE_TOKENS - 1)) * self.width)
        weights = start - self.low

        def block(offset: Value, channel: Value) -> None:
            at = source.at(code.stored, offset * self.width + channel)
            read = self._tile(SPAN, at, self.width, self.mixed)
            along = self.lanes * self.mixed
            beyond = code.select(channel + along < self.width, code.constant("i64", along), SPAN * self.width - self.width + along)
            following = at.at(code.stored, beyond)

            @code.loop(self.count)
            def _(turn: Value) -> None:
                first = turn * self.rows
                lines = [self._line(first + m).at(self.input, weights + offset) for m in range(self.rows)]
                targets = [self._sums(first + m).at("float", channel) for m in range(self.rows)]
                cells = [target.at("float", self.lanes * u) for target in targets for u in range(self.mixed)]

                def two(slot: Value, sums: Values) -> Values:
                    self._fetch(following, self.width, self.mixed, turn, slot)
                    return self._added(slot, read, lines, sums)

                for cell, value in zip(cells, code.fold(SPAN, 2, [cell.load(code.floats) for cell in cells], two)):
                    cell.store(value)

        code.loop(count, SPAN)(lambda offset: code.loop(self.width, self.lanes * self.mixed)(lambda channel: block(offset, channel)))

    def _divide(self, index: Value) -> None:
        code = self.code
        total = self._line(index).at("float", self.slots).load("float").everywhere(self.lanes)
        sums, target = self._sums(index), self.out.at(code.stored, self._query(index) * self.width)
        for channel in range(0, self.width, self.lanes):
            mean = sums.at("float", channel).load(code.floats) / total
            code.store_numbers(mean, target.at(code.stored, channel))


def exponential(code: Code, x: Value) -> Value:
    """exp(x) for x <= 0; exactly 0 below 2^-125. Not a number stays that."""
    log2e = code.constant(x.kind, _LOG2E)
    rounded = code.fma(x, log2e, code.constant(x.kind, _ROUND))
    whole = rounded - _ROUND
    rest = code.fma(x, log2e, -whole)
    rest = code.fma(x, code.constant(x.kind, _LOG2E - single(_LOG2E)), rest)
    value = code.constant(x.kind, _TAYLOR[-1])
    for factor in reversed(_TAYLOR[:-1]):
        value = code.fma(value, rest, code.constant(x.kind, factor))
    power = ((rounded.to(code.words) << 23) + (127 << 23)).to(x.kind)  # 2^whole
    return code.select(x < _LEAST, code.constant(x.kind, 0.0), value * power)
