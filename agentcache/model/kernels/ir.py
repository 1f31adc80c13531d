"""Writes functions in LLVM IR: values, loops, vectors of 16-bit numbers computed in fp32. Knows nothing of what they compute."""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Callable, Sequence

Names = list[str]
LEAST = -110.0  # its exponential is 0
_LOG2E = 1.4426950408889634
_TAYLOR = tuple(math.log(2) ** n / math.factorial(n) for n in range(7))  # of 2^f for |f| <= 0.5, lowest first


def splat(lanes: int, value: str) -> str:
    """A constant vector, typed value by typed value."""
    return "<" + ", ".join([value] * lanes) + ">"


def transposed(do: Callable[[str], str], rows: Sequence[str]) -> list[str]:
    """As many vectors of 32-bit words, transposed by exchanging halves, quarters, ... between pairs of them. do: names a value."""
    names, lanes = list(rows), len(rows)
    kind = f"<{lanes} x i32>"
    step = 1
    while step < lanes:
        low = [lane if not lane & step else lane - step + lanes for lane in range(lanes)]
        high = [lane + step if not lane & step else lane + lanes for lane in range(lanes)]
        after = list(names)
        for i in range(lanes):
            if not i & step:
                for mask, at in ((low, i), (high, i + step)):
                    order = ", ".join(f"i32 {m}" for m in mask)
                    after[at] = do(f"shufflevector {kind} {names[i]}, {kind} {names[i + step]}, <{lanes} x i32> <{order}>")
        names = after
        step *= 2
    return names


def _single(value: float) -> float:
    """The nearest fp32 number."""
    return float(struct.unpack("f", struct.pack("f", value))[0])


def every(lanes: int, value: float) -> str:
    """A constant fp32 vector."""
    return splat(lanes, f"float {_constant(_single(value))}")


TEAM = """declare i32 @omp_get_thread_num()
declare i32 @omp_get_num_threads()
"""


class Code:
    """The body of one function, block by block. Values are names of SSA registers, or constants."""

    def __init__(self, lanes: int, element: str) -> None:
        self.lanes, self.element = lanes, element
        self.floats, self.halves, self.words = f"<{lanes} x float>", f"<{lanes} x i16>", f"<{lanes} x i32>"
        self.lines: list[str] = []
        self._blocks = ["entry"]  # the last one is being written
        self._numbers = itertools.count(1)

    def of(self, lanes: int) -> Code:
        """The same function, whose next vectors have so many lanes."""
        other = Code(lanes, self.element)
        other.lines, other._blocks, other._numbers = self.lines, self._blocks, self._numbers
        return other

    def _fresh(self) -> int:
        return next(self._numbers)

    def say(self, line: str) -> None:
        self.lines.append(line)

    def do(self, operation: str) -> str:
        name = f"%v{self._fresh()}"
        self.say(f"{name} = {operation}")
        return name

    def field(self, number: int) -> str:
        """A 64-bit field of the argument block."""
        at = self.do(f"getelementptr i64, ptr %args, i64 {number}")
        return self.do(f"load i64, ptr {at}, align 8")

    def pointer(self, number: int) -> str:
        return self.do(f"inttoptr i64 {self.field(number)} to ptr")

    def at(self, base: str, kind: str, index: str) -> str:
        return self.do(f"getelementptr {kind}, ptr {base}, i64 {index}")

    def times(self, one: str, other: int) -> str:
        return self.do(f"mul i64 {one}, {other}")

    def plus(self, one: str, other: str | int) -> str:
        return self.do(f"add i64 {one}, {other}")

    def loop(self, count: int | str, step: int, starts: Sequence[tuple[str, str]], body: Callable[[str, Names], Names]) -> Names:
        """For i = 0, step, .. below count, carrying values (type, first value); returns them as they are behind the loop."""
        number = self._fresh()
        head, inside, out = (f"{part}{number}" for part in ("head", "inside", "out"))
        before = self._blocks[-1]
        self.say(f"br label %{head}")
        self.say(f"{head}:")
        index, carried = f"%i{number}", [f"%c{number}_{n}" for n in range(len(starts))]
        place = len(self.lines)
        self.say("")  # the phis, once the end of the body is known
        self.say(f"%more{number} = icmp ult i64 {index}, {count}")
        self.say(f"br i1 %more{number}, label %{inside}, label %{out}")
        self.say(f"{inside}:")
        self._blocks.append(inside)
        after = body(index, carried)
        following = self.plus(index, step)
        self.say(f"br label %{head}")
        phis = [f"{index} = phi i64 [ 0, %{before} ], [ {following}, %{self._blocks[-1]} ]"]
        for name, (kind, first), last in zip(carried, starts, after):
            phis.append(f"{name} = phi {kind} [ {first}, %{before} ], [ {last}, %{self._blocks[-1]} ]")
        self.lines[place] = "\n".join(phis)
        self.say(f"{out}:")
        self._blocks.append(out)
        return carried

    def mine(self, tasks: str) -> tuple[str, str, str]:
        """This thread of a team: its number, its first task, and how many it has. A team may be smaller than it was asked to be."""
        me, team = (self.do(f"sext i32 {self.do(f'call i32 @omp_get_{what}()')} to i64") for what in ("thread_num", "num_threads"))
        start, stop = (self.do(f"udiv i64 {self.do(f'mul i64 {one}, {tasks}')}, {team}") for one in (me, self.plus(me, 1)))
        return me, start, self.do(f"sub i64 {stop}, {start}")

    def twice(self, pair: Callable[[str, Names], Names]) -> Callable[[str, Names], Names]:
        """The body of a loop over pairs of numbers that takes two pairs at a time: with one, the compiler keeps moving chains about."""
        return lambda index, carried: pair(self.plus(index, 2), pair(index, carried))

    def either(self, condition: str, one: str, other: str) -> None:
        """One of two statements."""
        number = self._fresh()
        self.say(f"br i1 {condition}, label %yes{number}, label %no{number}")
        for label, statement in ((f"yes{number}", one), (f"no{number}", other)):
            self.lines += [f"{label}:", statement, f"br label %joined{number}"]
        self.say(f"joined{number}:")
        self._blocks.append(f"joined{number}")

    # vectors

    def load(self, address: str) -> str:
        return self.do(f"load {self.floats}, ptr {address}, align 4")

    def load_half(self, address: str) -> str:
        """A vector of 16-bit numbers, as fp32."""
        return self.up(self.do(f"load {self.halves}, ptr {address}, align 2"))

    def store_half(self, value: str, address: str) -> None:
        """Rounds fp32 to 16 bits and stores that."""
        self.say(f"store {self.halves} {self.down(value)}, ptr {address}, align 2")

    def up(self, value: str) -> str:
        if self.element == "half":
            half = self.do(f"bitcast {self.halves} {value} to <{self.lanes} x half>")
            return self.do(f"fpext <{self.lanes} x half> {half} to {self.floats}")
        wide = self.do(f"zext {self.halves} {value} to {self.words}")
        shifted = self.do(f"shl {self.words} {wide}, {splat(self.lanes, 'i32 16')}")
        return self.do(f"bitcast {self.words} {shifted} to {self.floats}")

    def down(self, value: str) -> str:
        """To the nearest 16-bit number, ties to even."""
        if self.element == "half":
            half = self.do(f"fptrunc {self.floats} {value} to <{self.lanes} x half>")
            return self.do(f"bitcast <{self.lanes} x half> {half} to {self.halves}")
        bits = self.do(f"bitcast {self.floats} {value} to {self.words}")
        sixteen = splat(self.lanes, "i32 16")
        last = self.do(f"lshr {self.words} {bits}, {sixteen}")
        odd = self.do(f"and {self.words} {last}, {splat(self.lanes, 'i32 1')}")
        bias = self.do(f"add {self.words} {odd}, {splat(self.lanes, 'i32 32767')}")
        moved = self.do(f"add {self.words} {bits}, {bias}")
        shifted = self.do(f"lshr {self.words} {moved}, {sixteen}")
        lost = self.do(f"fcmp uno {self.floats} {value}, {value}")
        kept = self.do(f"select <{self.lanes} x i1> {lost}, {self.words} {splat(self.lanes, 'i32 32704')}, {self.words} {shifted}")
        return self.do(f"trunc {self.words} {kept} to {self.halves}")

    def rounded(self, value: str) -> str:
        """fp32 that is a 16-bit number."""
        return self.up(self.down(value))

    def both(self, operation: str, one: str, other: str) -> str:
        """operation: fadd | fsub | fmul | fdiv."""
        return self.do(f"{operation} {self.floats} {one}, {other}")

    def part(self, value: str, lanes: int, first: int) -> str:
        """`lanes` lanes of this vector, from `first` on."""
        chosen = ", ".join(f"i32 {first + lane}" for lane in range(lanes))
        return self.do(f"shufflevector {self.floats} {value}, {self.floats} poison, <{lanes} x i32> <{chosen}>")

    def chains(self, both: str, pieces: Sequence[str], words: Sequence[str], sums: Names) -> Names:
        """One more pair in chains over bf16 pairs: its vectors `pieces` times the word at each address, added to sums [words, pieces].

        both: the function that multiplies and adds pairs.
        """
        out = []
        for m, address in enumerate(words):
            word = self.do(f"load i32, ptr {address}, align 2")
            one = self.do(f"insertelement {self.words} poison, i32 {word}, i32 0")
            x = self.do(f"shufflevector {self.words} {one}, {self.words} poison, {self.words} zeroinitializer")
            for u, piece in enumerate(pieces):
                given = f"{self.floats} {sums[m * len(pieces) + u]}, {self.words} {x}, {self.words} {piece}"
                out.append(self.do(f"call {self.floats} {both}({given})"))
        return out

    def all_lanes(self, value: str) -> str:
        first = self.do(f"insertelement {self.floats} poison, float {value}, i32 0")
        return self.do(f"shufflevector {self.floats} {first}, {self.floats} poison, {self.words} zeroinitializer")

    def exponential(self, x: str) -> str:
        """exp(x) for x <= 0 in 16 lanes; exactly 0 where fp32 has nothing smaller, or x is -inf. Not a number stays that. Needs AVX-512."""

        def fma(a: str, b: str, c: str) -> str:
            return self.do(f"call {self.floats} @llvm.fma.v{self.lanes}f32({self.floats} {a}, {self.floats} {b}, {self.floats} {c})")

        small = self.do(f"fcmp olt {self.floats} {x}, {every(self.lanes, LEAST)}")
        x = self.do(f"select <{self.lanes} x i1> {small}, {self.floats} {every(self.lanes, LEAST)}, {self.floats} {x}")
        whole = self.do(f"call {self.floats} @llvm.rint.v{self.lanes}f32({self.floats} {self.both('fmul', x, every(self.lanes, _LOG2E))})")
        rest = fma(x, every(self.lanes, _LOG2E), self.do(f"fneg {self.floats} {whole}"))
        rest = fma(x, every(self.lanes, _LOG2E - _single(_LOG2E)), rest)
        value = every(self.lanes, _TAYLOR[-1])
        for factor in reversed(_TAYLOR[:-1]):
            value = fma(value, rest, every(self.lanes, factor))
        given = f"{self.floats} {value}, {self.floats} {whole}, {self.floats} zeroinitializer, i16 -1, i32 4"
        return self.do(f"call {self.floats} @llvm.x86.avx512.mask.scalef.ps.512({given})")

    def with_bias(self, value: str, bias: str, index: str) -> str:
        """Plus a 16-bit bias, which is added in fp32; bias: a pointer, "" for none."""
        return self.both("fadd", value, self.load_half(self.at(bias, "i16", index))) if bias else value

    def scatter(self, value: str, out: str, index: str, row: str, rows: int) -> None:
        """Stores a vector of row `row` at out[index.., row]."""
        if rows == 1:
            self.say(f"store {self.floats} {value}, ptr {self.at(out, 'float', index)}, align 4")
            return
        first = self.at(out, "float", self.plus(self.times(index, rows), row))
        for lane in range(self.lanes):
            one = self.do(f"extractelement {self.floats} {value}, i32 {lane}")
            self.say(f"store float {one}, ptr {self.at(first, 'float', str(lane * rows))}, align 4")

    def scale(self, total: str, n: int, epsilon: str) -> str:
        """1 / sqrt(total / n + epsilon), one number. total: fp32 vector, added up lane after lane."""
        sum_ = self.do(f"extractelement {self.floats} {total}, i32 0")
        for lane in range(1, self.lanes):
            one = self.do(f"extractelement {self.floats} {total}, i32 {lane}")
            sum_ = self.do(f"fadd float {sum_}, {one}")
        mean = self.do(f"fdiv float {sum_}, {_constant(float(n))}")
        moved = self.do(f"fadd float {mean}, {epsilon}")
        root = self.do(f"call float @llvm.sqrt.f32(float {moved})")
        return self.do(f"fdiv float {_constant(1.0)}, {root}")

    def module(self, declarations: str = "") -> str:
        """The whole module with this function, named `share` as those of linear_few.py."""
        body = "\n  ".join(self.lines)
        return f"declare float @llvm.sqrt.f32(float)\n{declarations}\ndefine void @share(ptr %args) {{\nentry:\n  {body}\n  ret void\n}}\n"


def _constant(value: float) -> str:
    return f"0x{struct.unpack('<Q', struct.pack('<d', value))[0]:016X}"
