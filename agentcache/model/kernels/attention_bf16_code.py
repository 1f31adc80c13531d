"""Writes attention over pages in pairs of bf16 numbers, as LLVM IR: what attention_bf16.py defines and runs. Knows nothing of tensors."""

from __future__ import annotations

import math
from collections.abc import Callable

from ...kv import PAGE_TOKENS
from .ir import TEAM, Code, Names, every

ROWS = (1, 2, 4, 6)  # accumulated at once: what registers hold beside the loaded keys
WIDE = {1: 8, 2: 8, 4: 4, 6: 4}  # by rows: vectors of 16 slots or channels
SPAN = 128  # slots: what is looked at begins and ends at a multiple of it
FIELDS = 18
_W = "<16 x i32>"
_BOTH = "@llvm.x86.avx512bf16.dpbf16ps.512"
_DECLARATIONS = f"""
declare <16 x float> {_BOTH}(<16 x float>, {_W}, {_W})
declare <16 x float> @llvm.rint.v16f32(<16 x float>)
declare <16 x float> @llvm.fma.v16f32(<16 x float>, <16 x float>, <16 x float>)
declare <16 x float> @llvm.x86.avx512.mask.scalef.ps.512(<16 x float>, <16 x float>, <16 x float>, i16, i32)
declare float @llvm.vector.reduce.fmax.v16f32(<16 x float>)
declare void @llvm.prefetch.p0(ptr, i32, i32, i32)
{TEAM}"""


def tile_bytes(dim: int) -> int:
    """Of woven keys (all channels) or values (a span of slots)."""
    return 2 * 16 * WIDE[ROWS[-1]] * max(dim, SPAN)


class Task:
    """Writes the function for so many rows at once and a head dimension. Its fields stand in the order of `FIELDS`.

    keys, values: lists of addresses. row0: the first row; passes: times `rows` of them, `per` of which are a task, `chunks` tasks a head;
    end: the last row, which the last pass computes again where it has fewer of its own.
    own: bytes of a thread's scratch: first a woven tile, then the rows; line: bytes of a row. scale: the bits of an fp32 number.
    """

    def __init__(self, rows: int, dim: int) -> None:
        self.rows, self.dim = rows, dim
        self.code = code = Code(16, "bfloat")
        self.wide = WIDE[rows]
        self.mixed = next(u for u in (8, 4, 2, 1) if u <= self.wide and dim % (16 * u) == 0)
        self.weaves = rows == ROWS[-1]  # others are the few rows behind the last whole pass
        self.tile = tile_bytes(dim)
        self.keys, self.values, self.q, self.out = (code.pointer(number) for number in range(4))
        fields = [code.field(number) for number in range(4, FIELDS)]
        self.heads, self.row0, self.passes, self.per, self.first, self.group, self.window = fields[:7]
        self.scale, self.tasks, self.scratch, self.own, self.line, self.chunks, self.end = fields[7:]

    def text(self) -> str:
        """The module: `share` does the tasks of one thread."""
        code = self.code
        bits = code.do(f"trunc i64 {self.scale} to i32")
        self.factor = code.all_lanes(code.do(f"bitcast i32 {bits} to float"))
        me, start, count = code.mine(self.tasks)
        self.buffer = code.do(f"inttoptr i64 {code.plus(self.scratch, code.do(f'mul i64 {me}, {self.own}'))} to ptr")
        code.loop(count, 1, [], lambda i, _: self._task(code.plus(start, i)))
        return code.module(_DECLARATIONS)

    def _less(self, one: str, other: str) -> str:
        code = self.code
        return code.do(f"select i1 {code.do(f'icmp slt i64 {one}, {other}')}, i64 {one}, i64 {other}")

    def _task(self, task: str) -> Names:
        code = self.code
        self.head = code.do(f"udiv i64 {task}, {self.chunks}")
        begin = code.do(f"mul i64 {code.do(f'urem i64 {task}, {self.chunks}')}, {self.per}")
        self.count = self._less(code.do(f"sub i64 {self.passes}, {begin}"), self.per)
        self.row = code.plus(code.times(begin, self.rows), self.row0)  # the first one of the task
        last = self._at(code.plus(code.times(self.count, self.rows), -1))
        from_ = self._seen_from(self._position(self.row))
        self.low = code.do(f"and i64 {from_}, {-SPAN}")
        high = code.do(f"and i64 {code.plus(self._position(last), SPAN)}, {-SPAN}")
        self.slots = code.do(f"sub i64 {high}, {self.low}")
        self.high = high
        code.loop(self.slots, 16 * self.wide, [], self._score)
        code.loop(code.times(self.count, self.rows), 1, [], self._weigh)
        first = code.do(f"lshr i64 {self.low}, 9")
        pages = code.plus(code.do(f"sub i64 {code.do(f'lshr i64 {code.plus(high, -1)}, 9')}, {first}"), 1)
        code.loop(pages, 1, [], lambda i, _: self._mix(code.plus(first, i)))
        code.loop(code.times(self.count, self.rows), 1, [], self._divide)
        return []

    def _at(self, index: str) -> str:
        """Row `index` of the task."""
        return self._less(self.code.plus(self.row, index), self.end)

    def _position(self, row: str) -> str:
        return self.code.plus(self.first, self.code.do(f"udiv i64 {row}, {self.group}"))

    def _seen_from(self, position: str) -> str:
        """The first position that one at `position` sees."""
        code = self.code
        start = code.plus(code.do(f"sub i64 {position}, {self.window}"), 1)
        none = code.do(f"icmp eq i64 {self.window}, 0")
        before = code.do(f"icmp slt i64 {start}, 0")
        return code.do(f"select i1 {code.do(f'or i1 {none}, {before}')}, i64 0, i64 {start}")

    def _stored(self, pages: str, page: str, index: str) -> str:
        """The address of a 16-bit number of this head in a page."""
        code = self.code
        address = code.at(pages, "i64", page)
        base = code.do(f"inttoptr i64 {code.do(f'load i64, ptr {address}, align 8')} to ptr")
        return code.at(base, "i16", code.plus(code.times(self.head, self.dim * PAGE_TOKENS), index))

    def _woven(self, source: str, columns: int, wide: int) -> Names:
        """Two stored rows, `columns` apart, as vectors of pairs."""
        code, unit = self.code, 16 if wide == 1 else 32
        kind, pieces = f"<{unit} x i16>", []
        for u in range(0, 16 * wide, unit):
            pair = [code.do(f"load {kind}, ptr {code.at(source, 'i16', str(u + half * columns))}, align 2") for half in (0, 1)]
            for part in range(0, unit, 16):
                order = ", ".join(f"i32 {part + i}, i32 {unit + part + i}" for i in range(16))
                woven = code.do(f"shufflevector {kind} {pair[0]}, {kind} {pair[1]}, <32 x i32> <{order}>")
                pieces.append(code.do(f"bitcast <32 x i16> {woven} to {_W}"))
        return pieces

    def _weave(self, rows: int, source: str, columns: int, wide: int) -> Callable[[str], Names]:
        """Weaves `rows` stored rows into the thread's memory; returns what reads a pair of them. For few rows that reads what is stored."""
        code = self.code

        def stored(k: str) -> Names:
            return self._woven(code.at(source, "i16", code.times(k, columns)), columns, wide)

        def place(k: str, u: int) -> str:
            return code.at(code.at(self.buffer, "i32", code.times(k, 8 * wide)), "i32", str(16 * u))

        def one(k: str, _: Names) -> Names:
            for u, piece in enumerate(stored(k)):
                code.say(f"store {_W} {piece}, ptr {place(k, u)}, align 4")
            return []

        if not self.weaves:
            return stored
        code.loop(rows, 2, [], one)
        return lambda k: [code.do(f"load {_W}, ptr {place(k, u)}, align 4") for u in range(wide)]

    def _fetch(self, tile: str, columns: int, turn: str, k: str) -> None:
        """Asks for a line of this tile, another one for each pair in each of the first turns: memory is waited for while it is computed."""
        if not self.weaves:
            return
        code = self.code
        number = code.plus(code.times(turn, SPAN // 2), code.do(f"lshr i64 {k}, 1"))
        row = code.times(code.do(f"and i64 {code.do(f'lshr i64 {number}, 1')}, {SPAN - 1}"), columns)
        line = code.plus(row, code.times(code.do(f"and i64 {number}, 1"), 32))
        code.say(f"call void @llvm.prefetch.p0(ptr {code.at(tile, 'i16', line)}, i32 0, i32 2, i32 1)")

    def _line(self, index: str) -> str:
        """The address of a row's scores, in the thread's own memory."""
        return self.code.at(self._sums(index), "float", str(self.dim))

    def _row(self, base: str, index: str) -> str:
        """The address of row `index` of the task in q or out [tokens, query heads, dim] of 16-bit numbers."""
        code = self.code
        row = self._at(index)
        token, member = code.do(f"udiv i64 {row}, {self.group}"), code.do(f"urem i64 {row}, {self.group}")
        head = code.plus(code.do(f"mul i64 {code.plus(code.do(f'mul i64 {token}, {self.heads}'), self.head)}, {self.group}"), member)
        return code.at(base, "i16", code.times(head, self.dim))

    def _sums(self, index: str) -> str:
        """The address of what a row mixes, in the thread's own memory: fp32, before its scores."""
        return self.code.at(self.buffer, "i8", self.code.plus(self.code.do(f"mul i64 {index}, {self.line}"), self.tile))

    def _score(self, slot: str, _: Names) -> Names:
        code = self.code
        position = code.plus(self.low, slot)
        page, within = code.do(f"lshr i64 {position}, 9"), code.do(f"and i64 {position}, {PAGE_TOKENS - 1}")
        source = self._stored(self.keys, page, within)
        read = self._weave(self.dim, source, PAGE_TOKENS, self.wide)
        following = code.at(source, "i16", str(16 * self.wide))

        def some(turn: str, _: Names) -> Names:
            first = code.times(turn, self.rows)
            queries = [self._row(self.q, code.plus(first, m)) for m in range(self.rows)]

            def pair(k: str, sums: Names) -> Names:
                self._fetch(following, PAGE_TOKENS, turn, k)
                return code.chains(_BOTH, read(k), [code.at(query, "i16", k) for query in queries], sums)

            sums = code.loop(self.dim, 2, [(code.floats, "zeroinitializer")] * (self.rows * self.wide), pair)
            for m in range(self.rows):
                line = code.at(self._line(code.plus(first, m)), "float", slot)
                for u in range(self.wide):
                    scaled = code.both("fmul", sums[m * self.wide + u], self.factor)
                    code.say(f"store {code.floats} {scaled}, ptr {code.at(line, 'float', str(16 * u))}, align 4")
            return []

        code.loop(self.count, 1, [], some)
        return []

    def _weigh(self, index: str, _: Names) -> Names:
        """Scores become weights: bf16 at the beginning of the row's line, their sum behind its scores."""
        code = self.code
        line, sums = self._line(index), self._sums(index)
        for channel in range(0, self.dim, 16):
            code.say(f"store {code.floats} zeroinitializer, ptr {code.at(sums, 'float', str(channel))}, align 4")
        position = self._position(self._at(index))
        since = self._seen_from(position)
        whole = code.do(f"and i64 {code.do(f'sub i64 {code.plus(position, 1)}, {self.low}')}, {-16}")  # slots that are all seen
        whole = code.do(f"select i1 {code.do(f'icmp sgt i64 {since}, {self.low}')}, i64 0, i64 {whole}")
        seen = self._masked(line, whole, position, since)
        top = code.all_lanes(code.do(f"call float @llvm.vector.reduce.fmax.v16f32({code.floats} {self._most(line, whole, seen)})"))

        def weight(slot: str, score: str, total: str) -> str:
            value = code.exponential(code.both("fsub", score, top))
            half = code.do(f"fptrunc {code.floats} {value} to <16 x bfloat>")
            code.say(f"store <16 x bfloat> {half}, ptr {code.at(line, 'i16', slot)}, align 2")
            return code.both("fadd", total, value)

        def plainly(slot: str, carried: Names) -> Names:
            return [weight(slot, code.load(code.at(line, "float", slot)), carried[0])]

        total = code.loop(whole, 16, [(code.floats, "zeroinitializer")], plainly)[0]
        rest = code.do(f"sub i64 {self.slots}, {whole}")
        total = code.loop(rest, 16, [(code.floats, total)], lambda slot, carried: [weight(*seen(slot), carried[0])])[0]
        sum_ = code.do(f"extractelement {code.floats} {total}, i32 0")
        for lane in range(1, 16):
            sum_ = code.do(f"fadd float {sum_}, {code.do(f'extractelement {code.floats} {total}, i32 {lane}')}")
        code.say(f"store float {sum_}, ptr {code.at(line, 'float', self.slots)}, align 4")
        return []

    def _masked(self, line: str, whole: str, position: str, since: str) -> Callable[[str], tuple[str, str]]:
        """What reads the scores of 16 slots behind the `whole` first ones: the slot, and -inf for what is not seen."""
        code = self.code

        def ints(value: str) -> str:
            narrow = code.do(f"trunc i64 {value} to i32")
            one = code.do(f"insertelement {_W} poison, i32 {narrow}, i32 0")
            return code.do(f"shufflevector {_W} {one}, {_W} poison, {_W} zeroinitializer")

        upper, lower = ints(position), ints(since)
        lanes = "<" + ", ".join(f"i32 {lane}" for lane in range(16)) + ">"

        def seen(slot: str) -> tuple[str, str]:
            slot = code.plus(whole, slot)
            at = code.do(f"add {_W} {ints(code.plus(self.low, slot))}, {lanes}")
            below, above = code.do(f"icmp sle {_W} {at}, {upper}"), code.do(f"icmp sge {_W} {at}, {lower}")
            both = code.do(f"and <16 x i1> {below}, {above}")
            score = code.load(code.at(line, "float", slot))
            return slot, code.do(f"select <16 x i1> {both}, {code.floats} {score}, {code.floats} {every(16, -math.inf)}")

        return seen

    def _most(self, line: str, whole: str, seen: Callable[[str], tuple[str, str]]) -> str:
        """The largest scores, in 16 lanes."""
        code = self.code

        def larger(value: str, most: str) -> str:
            more = code.do(f"fcmp ogt {code.floats} {value}, {most}")
            return code.do(f"select <16 x i1> {more}, {code.floats} {value}, {code.floats} {most}")

        def plainly(slot: str, carried: Names) -> Names:
            return [larger(code.load(code.at(line, "float", slot)), carried[0])]

        most = code.loop(whole, 16, [(code.floats, every(16, -math.inf))], plainly)[0]
        rest = code.do(f"sub i64 {self.slots}, {whole}")
        return code.loop(rest, 16, [(code.floats, most)], lambda slot, carried: [larger(seen(slot)[1], carried[0])])[0]

    def _mix(self, page: str) -> Names:
        code = self.code
        base = code.times(page, PAGE_TOKENS)
        over = code.do(f"icmp ugt i64 {self.low}, {base}")
        start = code.do(f"select i1 {over}, i64 {self.low}, i64 {base}")
        count = code.do(f"sub i64 {self._less(self.high, code.plus(base, PAGE_TOKENS))}, {start}")
        source = self._stored(self.values, page, code.times(code.do(f"and i64 {start}, {PAGE_TOKENS - 1}"), self.dim))
        weights = code.do(f"sub i64 {start}, {self.low}")
        span: str | int = SPAN if self.weaves else count  # of slots that are woven at once

        def block(channel: str, offset: str) -> None:
            at = code.at(source, "i16", code.plus(code.times(offset, self.dim), channel))
            read = self._weave(SPAN, at, self.dim, self.mixed)
            following = code.at(at, "i16", str(SPAN * self.dim))

            def turn(number: str, _: Names) -> Names:
                first = code.times(number, self.rows)
                lines = [code.at(self._line(code.plus(first, m)), "i16", code.plus(weights, offset)) for m in range(self.rows)]
                targets = [code.at(self._sums(code.plus(first, m)), "float", channel) for m in range(self.rows)]
                cells = [code.at(target, "float", str(16 * u)) for target in targets for u in range(self.mixed)]

                def pair(slot: str, sums: Names) -> Names:
                    self._fetch(following, self.dim, number, slot)
                    return code.chains(_BOTH, read(slot), [code.at(line, "i16", slot) for line in lines], sums)

                sums = code.loop(span, 2, [(code.floats, code.load(cell)) for cell in cells], pair)
                for cell, value in zip(cells, sums):
                    code.say(f"store {code.floats} {value}, ptr {cell}, align 4")
                return []

            code.loop(self.count, 1, [], turn)

        def channels(offset: str, _: Names) -> Names:
            def some(channel: str, _: Names) -> Names:
                block(channel, offset)
                return []

            return code.loop(self.dim, 16 * self.mixed, [], some)

        if self.weaves:
            code.loop(count, SPAN, [], channels)
        else:
            channels("0", [])
        return []

    def _divide(self, index: str, _: Names) -> Names:
        code = self.code
        behind = code.at(self._line(index), "float", self.slots)
        total = code.all_lanes(code.do(f"load float, ptr {behind}, align 4"))
        sums, target = self._sums(index), self._row(self.out, index)
        for channel in range(0, self.dim, 16):
            mean = code.both("fdiv", code.load(code.at(sums, "float", str(channel))), total)
            half = code.do(f"fptrunc {code.floats} {mean} to <16 x bfloat>")
            code.say(f"store <16 x bfloat> {half}, ptr {code.at(target, 'i16', str(channel))}, align 2")
        return []
