"""Attention on processors that multiply pairs of bf16 numbers, compiled at run time. Knows nothing of models.

What `attention.py` defines, for any number of rows, over keys and values as they are stored in pages:

    s[r, j] = scale · (chain over pairs of channels of q[r] · K[:, j])          e[r, j] = exp(s[r, j] - max of s[r] over what r sees)
    out[r]  = (chain over pairs of slots of bf16(e[r, j]) · V[j]) / Σ e[r, j]   the sum in 16 lanes, slots ascending, then lane by lane

A chain is fp32 and adds one pair of products after the other, so a row's bits depend neither on the rows beside it nor on how many slots
are looked at that it does not see: those add exact zeros. A task is one head and some rows, whose scores stay in the second-level cache.
Where it has many rows, a tile of keys or values is woven into pairs once and read from the first-level cache for all of them.
Needs AVX-512 with bf16; processors with matrix units (AMX) are faster by their library.
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
WIDE = {1: 8, 2: 8, 4: 4, 6: 4}  # by rows: vectors of 16 slots or channels
SPAN = 128  # slots: what is looked at begins and ends at a multiple of it
TASK_BYTES = 1 << 20  # of a task's scores
LEAST_PASSES, MOST_PASSES = 2, 16  # of a task: keys and values are read once for all of them
LEAST = -110.0  # its exponential is 0
_LOG2E = 1.4426950408889634
_TAYLOR = tuple(math.log(2) ** n / math.factorial(n) for n in range(7))  # of 2^f for |f| <= 0.5, lowest first
_WORDS = "<16 x i32>"


def takes(dtype: torch.dtype, device: torch.device, dim: int) -> bool:
    """True if attention over pages of this type can run here; dim: channels of a head."""
    return dtype == torch.bfloat16 and device.type == "cpu" and dim % 16 == 0 and jit.multiplies_pairs()


def attend(
    q: torch.Tensor,
    keys: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
    first: int,
    scale: float,
    window: int,
    room: Callable[[int], torch.Tensor],
) -> torch.Tensor:
    """q [tokens, query heads, dim] bf16 at positions from `first` on; keys [kv heads, dim, 512] and values [kv heads, 512, dim] of all
    pages up to the last one -> as q.

    window: how many positions a token sees, 0 for all before it. room(n): n fp32 numbers to work in.
    """
    q = q.contiguous()
    (tokens, _, dim), heads = q.shape, keys[0].shape[0]
    group = q.shape[1] // heads
    rows = tokens * group  # of one kv head
    out = torch.empty_like(q)
    pages = [jit.block(*(page.data_ptr() for page in of_kind)) for of_kind in (keys, values)]
    where = (*map(ctypes.addressof, pages), q.data_ptr(), out.data_ptr())
    slots = min(len(keys) * PAGE_TOKENS, window + tokens + 2 * SPAN if window else len(keys) * PAGE_TOKENS)
    line = 4 * (slots + dim) + 128  # what is mixed, the sum, and so that lines do not lie on each other in the cache
    at = 0
    while at < rows:
        count = max(n for n in ROWS if n <= rows - at)
        passes = -(-(rows - at) // count) if count == ROWS[-1] else 1
        per = max(LEAST_PASSES, min(MOST_PASSES, TASK_BYTES // (count * line)))
        chunks = -(-passes // per)
        tasks = heads * chunks
        threads = jit.threads_for(heads * rows * slots * dim, tasks)
        own = _tile_bytes(dim) + per * count * line
        scratch = room(threads * own // 4)
        what = (jit.bits_of(scale), heads, at, passes, per, first, group, window, tasks, own, line, chunks, rows - 1)
        jit.run(attention_code, "bfloat", (count, dim), threads, *where, scratch.data_ptr(), *what)
        at += passes * count
    return out


def _tile_bytes(dim: int) -> int:
    """The size of woven keys (all channels) or values (a span of slots)."""
    return 2 * 16 * WIDE[ROWS[-1]] * max(dim, SPAN)


def attention_code(code: Code, rows: int, dim: int) -> None:
    """Fields: see `_Task`."""
    _Task(code, rows, dim).write()


class _Task:
    """Writes the function for so many rows at once and a head dimension.

    keys, values: lists of addresses. row0: the first row; passes: times `rows` of them, `per` of which are a task, `chunks` tasks a head;
    end: the last row, which the last pass computes again where it has fewer of its own.
    own: bytes of a thread's scratch: first a woven tile, then the rows; line: bytes of a row.
    """

    def __init__(self, code: Code, rows: int, dim: int) -> None:
        self.code, self.rows, self.dim = code, rows, dim
        self.wide = WIDE[rows]
        self.mixed = next(u for u in (8, 4, 2, 1) if u <= self.wide and dim % (16 * u) == 0)
        self.weaves = rows == ROWS[-1]  # others are the few rows after the last whole pass
        self.keys, self.values, self.q, self.out, scratch = code.pointers(5)
        self.factor = code.number().everywhere(16)
        self.heads, self.row0, self.passes, self.per, self.first, self.group, self.window = code.fields(7)
        self.tasks, own, self.line, self.chunks, self.end = code.fields(5)
        self.buffer = scratch.at("i8", code.team()[0] * own)

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
        code.loop(self.slots, 16 * self.wide)(self._score)
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
        start = position - self.window + 1
        return self.code.select(self.window.equals(0) | (start < 0), self.code.constant("i64", 0), start)

    def _stored(self, pages: Value, page: Value, index: Value) -> Value:
        """The address of a 16-bit number of this head in a page."""
        base = pages.at("i64", page).load("i64", 8).to("ptr", "inttoptr")
        return base.at("i16", self.head * (self.dim * PAGE_TOKENS) + index)

    def _woven(self, source: Value, columns: int, wide: int) -> Values:
        """Two stored rows, `columns` apart, as vectors of pairs."""
        unit = 16 if wide == 1 else 32
        pieces = []
        for u in range(0, 16 * wide, unit):
            one, other = (source.at("i16", u + half * columns).load(f"<{unit} x i16>", 2) for half in (0, 1))
            for part in range(0, unit, 16):
                order = [lane for i in range(part, part + 16) for lane in (i, unit + i)]
                pieces.append(one.shuffled(other, order).to(_WORDS))
        return pieces

    def _weave(self, rows: int, source: Value, columns: int, wide: int) -> Callable[[Value], Values]:
        """Weaves `rows` stored rows into the thread's memory; returns a reader of a pair of them; for few rows, of the stored ones."""

        def stored(k: Value) -> Values:
            return self._woven(source.at("i16", k * columns), columns, wide)

        def places(k: Value) -> Values:
            first = self.buffer.at("i32", k * (8 * wide))
            return [first.at("i32", 16 * u) for u in range(wide)]

        if not self.weaves:
            return stored

        @self.code.loop(rows, 2)
        def _(k: Value) -> None:
            for place, piece in zip(places(k), stored(k)):
                place.store(piece)

        return lambda k: [place.load(_WORDS) for place in places(k)]

    def _fetch(self, tile: Value, columns: int, turn: Value, k: Value) -> None:
        """Asks for a line of this tile, another one for each pair in each of the first turns: products hide the wait for memory."""
        if self.weaves:
            number = turn * (SPAN // 2) + (k >> 1)
            row = ((number >> 1) & (SPAN - 1)) * columns
            self.code.prefetch(tile.at("i16", row + (number & 1) * 32), 2)

    def _sums(self, index: Value) -> Value:
        """The address of what a row mixes, in the thread's own memory: fp32, before its scores."""
        return self.buffer.at("i8", index * self.line + _tile_bytes(self.dim))

    def _line(self, index: Value) -> Value:
        """The address of a row's scores, in the thread's own memory."""
        return self._sums(index).at("float", self.dim)

    def _row(self, base: Value, index: Value) -> Value:
        """The address of row `index` of the task in q or out [tokens, query heads, dim] of 16-bit numbers."""
        row = self._at(index)
        head = (row // self.group * self.heads + self.head) * self.group + row % self.group
        return base.at("i16", head * self.dim)

    def _score(self, slot: Value) -> None:
        code = self.code
        position = self.low + slot
        source = self._stored(self.keys, position >> 9, position & (PAGE_TOKENS - 1))
        read = self._weave(self.dim, source, PAGE_TOKENS, self.wide)
        following = source.at("i16", 16 * self.wide)

        @code.loop(self.count)
        def _(turn: Value) -> None:
            first = turn * self.rows
            queries = [self._row(self.q, first + m) for m in range(self.rows)]

            def pair(k: Value, sums: Values) -> Values:
                self._fetch(following, PAGE_TOKENS, turn, k)
                return code.pairs(read(k), [query.at("i16", k) for query in queries], sums)

            sums = code.fold(self.dim, 2, [code.constant(code.floats, 0.0)] * (self.rows * self.wide), pair)
            for m in range(self.rows):
                line = self._line(first + m).at("float", slot)
                for u in range(self.wide):
                    line.at("float", 16 * u).store(sums[m * self.wide + u] * self.factor)

    def _weigh(self, index: Value) -> None:
        """Scores become weights: bf16 at the beginning of the row's line, their sum after its scores."""
        code = self.code
        line, sums = self._line(index), self._sums(index)
        zero = code.constant(code.floats, 0.0)
        for channel in range(0, self.dim, 16):
            sums.at("float", channel).store(zero)
        position = self._position(self._at(index))
        since = self._seen_from(position)
        whole = (position + 1 - self.low) & -16  # slots that are all seen
        whole = code.select(since > self.low, code.constant("i64", 0), whole)
        rest = self.slots - whole
        seen = self._masked(line, whole, position, since)

        def plain(slot: Value) -> tuple[Value, Value]:
            return slot, line.at("float", slot).load(code.floats)

        def larger(one: tuple[Value, Value], most: Value) -> Value:
            return code.select(one[1] > most, one[1], most)

        def weight(one: tuple[Value, Value], total: Value) -> Value:
            slot, score = one
            value = _exponential(code, score - top)
            line.at("i16", slot).store(value.to("<16 x bfloat>", "fptrunc"), 2)
            return total + value

        def over_all(step: Callable[[tuple[Value, Value], Value], Value], start: Value) -> Value:
            found = code.fold(whole, 16, [start], lambda slot, carried: [step(plain(slot), carried[0])])
            return code.fold(rest, 16, found, lambda slot, carried: [step(seen(slot), carried[0])])[0]

        most = over_all(larger, code.constant(code.floats, -math.inf))
        top = code.call("float", "llvm.vector.reduce.fmax.v16f32", most).everywhere(16)
        total = over_all(weight, zero)
        sum_ = total.lane(0)
        for lane in range(1, 16):
            sum_ = sum_ + total.lane(lane)
        line.at("float", self.slots).store(sum_)

    def _masked(self, line: Value, whole: Value, position: Value, since: Value) -> Callable[[Value], tuple[Value, Value]]:
        """Returns a reader of the scores of 16 slots after the `whole` first ones: the slot, and -inf where a slot is not seen."""
        code = self.code

        def words(value: Value) -> Value:
            return value.to("i32", "trunc").everywhere(16)

        upper, lower = words(position), words(since)
        lanes = Value(code, _WORDS, f"<{', '.join(f'i32 {lane}' for lane in range(16))}>")

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
        source = self._stored(self.values, page, (start & (PAGE_TOKENS - 1)) * self.dim)
        weights = start - self.low

        def block(channel: Value, offset: Value, span: Value | int) -> None:
            """The span of slots that are woven at once, and the channels that are mixed at once."""
            at = source.at("i16", offset * self.dim + channel)
            read = self._weave(SPAN, at, self.dim, self.mixed)
            following = at.at("i16", SPAN * self.dim)

            @code.loop(self.count)
            def _(turn: Value) -> None:
                first = turn * self.rows
                lines = [self._line(first + m).at("i16", weights + offset) for m in range(self.rows)]
                targets = [self._sums(first + m).at("float", channel) for m in range(self.rows)]
                cells = [target.at("float", 16 * u) for target in targets for u in range(self.mixed)]

                def pair(slot: Value, sums: Values) -> Values:
                    self._fetch(following, self.dim, turn, slot)
                    return code.pairs(read(slot), [line.at("i16", slot) for line in lines], sums)

                for cell, value in zip(cells, code.fold(span, 2, [cell.load(code.floats) for cell in cells], pair)):
                    cell.store(value)

        def channels(offset: Value, span: Value | int) -> None:
            code.loop(self.dim, 16 * self.mixed)(lambda channel: block(channel, offset, span))

        if self.weaves:
            code.loop(count, SPAN)(lambda offset: channels(offset, SPAN))
        else:
            channels(code.constant("i64", 0), count)

    def _divide(self, index: Value) -> None:
        code = self.code
        total = self._line(index).at("float", self.slots).load("float").everywhere(16)
        sums, target = self._sums(index), self._row(self.out, index)
        for channel in range(0, self.dim, 16):
            mean = sums.at("float", channel).load(code.floats) / total
            target.at("i16", channel).store(mean.to("<16 x bfloat>", "fptrunc"), 2)


def _exponential(code: Code, x: Value) -> Value:
    """exp(x) for x <= 0 in 16 lanes; exactly 0 where fp32 has nothing smaller, or x is -inf. Not a number stays that."""
    x = code.select(x < LEAST, code.constant(x.kind, LEAST), x)
    log2e = code.constant(x.kind, _LOG2E)
    whole = code.call(x.kind, "llvm.rint.v16f32", x * log2e)
    rest = code.fma(x, log2e, -whole)
    rest = code.fma(x, code.constant(x.kind, _LOG2E - single(_LOG2E)), rest)
    value = code.constant(x.kind, _TAYLOR[-1])
    for factor in reversed(_TAYLOR[:-1]):
        value = code.fma(value, rest, code.constant(x.kind, factor))
    flags = [code.constant("i16", -1), code.constant("i32", 4)]  # all lanes; rounded as the processor rounds
    return code.call(x.kind, "llvm.x86.avx512.mask.scalef.ps.512", value, whole, code.constant(x.kind, 0.0), *flags)
