"""Writes functions in LLVM IR: values with operators, loops, vectors of stored numbers computed in fp32. Knows no kernels."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass


def _instruction(word: str, of_floats: str = "") -> Callable[[Value, Value | float], Value]:
    """An operator: LLVM's word for it, and the one for fp32 numbers where that is another."""

    def write(self: Value, other: Value | float) -> Value:
        chosen = of_floats if of_floats and "float" in self.kind else word
        return self.code.do(self.kind, f"{chosen} {self.kind} {self.name}, {self.written(other)}")

    return write


def _comparison(word: str) -> Callable[[Value, Value | float], Value]:
    """An operator that compares signed integers, or fp32 numbers."""

    def write(self: Value, other: Value | float) -> Value:
        compared = f"fcmp o{word}" if "float" in self.kind else f"icmp s{word}"
        return self.code.do(of_kind("i1", self.kind), f"{compared} {self.kind} {self.name}, {self.written(other)}")

    return write


@dataclass(frozen=True, slots=True, eq=False)
class Value:
    """A register of the function that is being written, or a constant. An operator writes an instruction; `//`, `%`, `>>`: unsigned."""

    code: Code
    kind: str  # its LLVM type
    name: str

    __add__ = __radd__ = _instruction("add", "fadd")
    __sub__ = _instruction("sub", "fsub")
    __mul__ = __rmul__ = _instruction("mul", "fmul")
    __truediv__ = _instruction("fdiv")
    __floordiv__ = _instruction("udiv")
    __mod__ = _instruction("urem")
    __and__ = _instruction("and")
    __or__ = _instruction("or")
    __rshift__ = _instruction("lshr")
    __lshift__ = _instruction("shl")
    __lt__, __le__, __gt__, __ge__ = _comparison("lt"), _comparison("le"), _comparison("gt"), _comparison("ge")

    def __neg__(self) -> Value:
        return self.code.do(self.kind, f"fneg {self.kind} {self.name}")

    def written(self, other: Value | float) -> str:
        """Another value, or a number, as an operand beside this value."""
        return other.name if isinstance(other, Value) else constant(self.kind, other)

    def equals(self, number: int) -> Value:
        """True if an integer is this number."""
        return self.code.do("i1", f"icmp eq {self.kind} {self.name}, {number}")

    def to(self, kind: str, conversion: str = "bitcast") -> Value:
        """Converts to another type."""
        return self.code.do(kind, f"{conversion} {self.kind} {self.name} to {kind}")

    def at(self, kind: str, index: Value | int) -> Value:
        """The address of the index-th number of this type from this address on."""
        place = index.name if isinstance(index, Value) else str(index)
        return self.code.do("ptr", f"getelementptr {kind}, ptr {self.name}, i64 {place}")

    def load(self, kind: str, align: int = 4) -> Value:
        """The content of this address. align: in bytes."""
        return self.code.do(kind, f"load {kind}, ptr {self.name}, align {align}")

    def store(self, value: Value, align: int = 4) -> None:
        """Writes a value to this address."""
        self.code.say(f"store {value.kind} {value.name}, ptr {self.name}, align {align}")

    def lane(self, number: int) -> Value:
        """One number of a vector."""
        return self.code.do(self.kind[1:-1].split(" x ")[1], f"extractelement {self.kind} {self.name}, i32 {number}")

    def shuffled(self, other: Value, order: Sequence[int]) -> Value:
        """Lanes chosen from this vector and the other one, by number."""
        lanes, element = len(order), self.kind[1:-1].split(" x ")[1]
        chosen = ", ".join(f"i32 {lane}" for lane in order)
        given = f"{self.kind} {self.name}, {other.kind} {other.name}, <{lanes} x i32> <{chosen}>"
        return self.code.do(f"<{lanes} x {element}>", f"shufflevector {given}")

    def part(self, lanes: int, first: int) -> Value:
        """`lanes` lanes of a vector, from `first` on."""
        return self.shuffled(Value(self.code, self.kind, "poison"), range(first, first + lanes))

    def everywhere(self, lanes: int) -> Value:
        """A vector with this number in every lane."""
        kind = f"<{lanes} x {self.kind}>"
        first = self.code.do(kind, f"insertelement {kind} poison, {self.kind} {self.name}, i32 0")
        return self.code.do(kind, f"shufflevector {kind} {first.name}, {kind} poison, <{lanes} x i32> zeroinitializer")


Values = list[Value]


def of_kind(element: str, like: str) -> str:
    """The type with these elements and as many lanes as another one."""
    return f"<{like[1:-1].split(' x ')[0]} x {element}>" if like[0] == "<" else element


def single(value: float) -> float:
    """The nearest fp32 number."""
    return float(struct.unpack("f", struct.pack("f", value))[0])


def constant(kind: str, value: float) -> str:
    """A number, in every lane of a vector, as LLVM writes it."""
    if kind[0] == "<":
        lanes, element = kind[1:-1].split(" x ")
        return f"<{', '.join([f'{element} {constant(element, value)}'] * int(lanes))}>"
    return f"0x{struct.unpack('<Q', struct.pack('<d', single(value)))[0]:016X}" if kind == "float" else str(value)


def transposed(rows: Sequence[Value]) -> Values:
    """Transposes vectors of 32-bit words, as many as they have lanes, by exchanging halves, quarters, ... between pairs of them."""
    now, lanes = list(rows), len(rows)
    step = 1
    while step < lanes:
        low = [lane if not lane & step else lane - step + lanes for lane in range(lanes)]
        high = [lane + step if not lane & step else lane + lanes for lane in range(lanes)]
        after = list(now)
        for i in range(lanes):
            if not i & step:
                after[i], after[i + step] = now[i].shuffled(now[i + step], low), now[i].shuffled(now[i + step], high)
        now, step = after, 2 * step
    return now


class Code:
    """The body of one function, block by block. lanes: of its vectors; element: of its stored numbers, bfloat, half or float.

    Its only argument is the address of 64-bit fields, which are taken one after the other by `pointers`, `fields` and `number`.
    """

    def __init__(self, lanes: int, element: str) -> None:
        self.lanes, self.element = lanes, element
        self.floats, self.words = f"<{lanes} x float>", f"<{lanes} x i32>"
        self.stored = "float" if element == "float" else "i16"
        self.args = Value(self, "ptr", "%args")
        self._lines: list[str] = []
        self._blocks = ["entry"]  # the last one is being written
        self._numbers = itertools.count(1)
        self._fields = itertools.count()
        self._declared: dict[str, None] = {}
        self._team: tuple[Value, Value] | None = None

    def say(self, line: str) -> None:
        """One line as it is."""
        self._lines.append(line)

    def do(self, kind: str, operation: str) -> Value:
        """An instruction that gives a value of this type."""
        name = f"%v{next(self._numbers)}"
        self.say(f"{name} = {operation}")
        return Value(self, kind, name)

    def call(self, kind: str, function: str, *given: Value) -> Value:
        """A function's value; its declaration is written as well."""
        self._declared[f"declare {kind} @{function}({', '.join(value.kind for value in given)})"] = None
        called = f"call {kind} @{function}({', '.join(f'{value.kind} {value.name}' for value in given)})"
        if kind != "void":
            return self.do(kind, called)
        self.say(called)
        return Value(self, kind, "")

    def constant(self, kind: str, value: float) -> Value:
        """A number, in every lane of a vector."""
        return Value(self, kind, constant(kind, value))

    def fields(self, count: int) -> Values:
        """The next fields of the argument block."""
        return [self.args.at("i64", next(self._fields)).load("i64", 8) for _ in range(count)]

    def pointers(self, count: int) -> Values:
        """The next fields as addresses."""
        return [field.to("ptr", "inttoptr") for field in self.fields(count)]

    def number(self) -> Value:
        """The next field as an fp32 number, whose bits it holds."""
        return self.fields(1)[0].to("i32", "trunc").to("float")

    def fold(
        self, count: Value | int, step: Value | int, starts: Sequence[Value], body: Callable[[Value, Values], Sequence[Value]]
    ) -> Values:
        """For i = 0, step, .. below count, carrying values from `starts` on; returns them as they are after the loop."""
        number = next(self._numbers)
        head, inside, out = (f"{part}{number}" for part in ("head", "inside", "out"))
        before = self._blocks[-1]
        self.say(f"br label %{head}")
        self.say(f"{head}:")
        index = Value(self, "i64", f"%i{number}")
        carried = [Value(self, start.kind, f"%c{number}_{n}") for n, start in enumerate(starts)]
        place = len(self._lines)
        self.say("")  # the phis, once the end of the body is known
        self.say(f"%more{number} = icmp ult i64 {index.name}, {count.name if isinstance(count, Value) else count}")
        self.say(f"br i1 %more{number}, label %{inside}, label %{out}")
        self.say(f"{inside}:")
        self._blocks.append(inside)
        after = body(index, carried)
        following = index + step
        self.say(f"br label %{head}")
        phis = [f"{index.name} = phi i64 [ 0, %{before} ], [ {following.name}, %{self._blocks[-1]} ]"]
        for value, start, last in zip(carried, starts, after, strict=True):
            phis.append(f"{value.name} = phi {value.kind} [ {start.name}, %{before} ], [ {last.name}, %{self._blocks[-1]} ]")
        self._lines[place] = "\n".join(phis)
        self.say(f"{out}:")
        self._blocks.append(out)
        return carried

    def loop(self, count: Value | int, step: int = 1) -> Callable[[Callable[[Value], None]], None]:
        """Decorates the body of a loop over 0, step, .. below count, which is written at once."""

        def write(body: Callable[[Value], None]) -> None:
            def one(index: Value, _: Values) -> Values:
                body(index)
                return []

            self.fold(count, step, [], one)

        return write

    def team(self) -> tuple[Value, Value]:
        """This thread's number, and how many there are: maybe fewer than were asked for. To be asked for first outside of loops."""
        if self._team is None:
            me, count = (self.call("i32", f"omp_get_{what}").to("i64", "sext") for what in ("thread_num", "num_threads"))
            self._team = me, count
        return self._team

    def shared(self, tasks: Value) -> Callable[[Callable[[Value], None]], None]:
        """Decorates what is done with each of this thread's tasks."""
        me, team = self.team()
        start, stop = ((one * tasks) // team for one in (me, me + 1))

        def write(body: Callable[[Value], None]) -> None:
            self.loop(stop - start)(lambda index: body(start + index))

        return write

    def either(self, condition: Value, one: Callable[[], object], other: Callable[[], object]) -> None:
        """Writes two branches; none of their values is seen outside."""
        number = next(self._numbers)
        self.say(f"br i1 {condition.name}, label %yes{number}, label %no{number}")
        for label, branch in ((f"yes{number}", one), (f"no{number}", other)):
            self.say(f"{label}:")
            branch()
            self.say(f"br label %joined{number}")
        self.say(f"joined{number}:")
        self._blocks.append(f"joined{number}")

    def select(self, condition: Value, one: Value, other: Value | float) -> Value:
        """One of two values, lane by lane if they are vectors."""
        return self.do(one.kind, f"select {condition.kind} {condition.name}, {one.kind} {one.name}, {one.kind} {one.written(other)}")

    def smaller(self, one: Value, other: Value | int) -> Value:
        """The smaller of two integers."""
        return self.select(one < other, one, other)

    def prefetch(self, address: Value, locality: int) -> None:
        """Asks for a line of memory, to be read."""
        flags = [Value(self, "i32", str(flag)) for flag in (0, locality, 1)]
        self.call("void", "llvm.prefetch.p0", address, *flags)

    # vectors

    def fma(self, one: Value, other: Value, added: Value) -> Value:
        """one · other + added, rounded once."""
        return self.call(one.kind, f"llvm.fma.v{self.lanes}f32", one, other, added)

    def load_numbers(self, address: Value, lanes: int = 0) -> Value:
        """A vector of stored numbers, as fp32."""
        return self.up(address.load(f"<{lanes or self.lanes} x {self.stored}>", 2))

    def bytes_of(self, words: Value, number: int) -> Value:
        """The int8 numbers that stand so many bytes from the lowest in each word, as fp32."""
        kind = f"<{self.lanes} x i8>"
        return (words >> 8 * number).to(kind, "trunc").to(self.words, "sext").to(self.floats, "sitofp")

    def load_bytes(self, address: Value) -> Value:
        """A vector of int8 numbers, as fp32."""
        return address.load(f"<{self.lanes} x i8>", 1).to(self.words, "sext").to(self.floats, "sitofp")

    def byte_pairs(self, words: Value, number: int = 0) -> Value:
        """The same, and the next in each word, as pairs of bf16, which has all of them."""
        low, high = (self.bytes_of(words, number + which).to(self.words) for which in (0, 1))
        return ((low >> 16) | high).to(self.floats)

    def store_numbers(self, value: Value, address: Value) -> None:
        """Rounds fp32 to stored numbers and stores them."""
        address.store(self.down(value), 2)

    def up(self, value: Value) -> Value:
        """Stored numbers as fp32."""
        if self.element == "float":
            return value
        floats = of_kind("float", value.kind)
        if self.element == "half":
            return value.to(of_kind("half", value.kind)).to(floats, "fpext")
        return (value.to(of_kind("i32", value.kind), "zext") << 16).to(floats)

    def down(self, value: Value) -> Value:
        """fp32 as the nearest stored number, ties to even."""
        if self.element == "float":
            return value
        halves, words = of_kind("i16", value.kind), of_kind("i32", value.kind)
        if self.element == "half":
            return value.to(of_kind("half", value.kind), "fptrunc").to(halves)
        bits = value.to(words)
        odd = (bits >> 16) & 1
        moved = (bits + (odd + 32767)) >> 16
        lost = self.do(of_kind("i1", value.kind), f"fcmp uno {value.kind} {value.name}, {value.name}")
        return self.select(lost, self.constant(words, 32704), moved).to(halves, "trunc")

    def rounded(self, value: Value) -> Value:
        """fp32 that is a stored number."""
        return self.up(self.down(value))

    def pair(self, one: Value, other: Value, added: Value) -> Value:
        """The same of vectors of bf16 pairs: both products of each."""
        return self.call(one.kind, "llvm.x86.avx512bf16.dpbf16ps.512", added, one.to(self.words), other.to(self.words))

    def pairs(self, pieces: Sequence[Value], words: Sequence[Value], sums: Sequence[Value]) -> Values:
        """One more pair in chains over bf16 pairs: its vectors `pieces` times the word at each address, added to sums [words, pieces]."""
        out = []
        for m, address in enumerate(words):
            x = address.load("i32", 2).everywhere(self.lanes)
            for u, piece in enumerate(pieces):
                out.append(self.call(self.floats, "llvm.x86.avx512bf16.dpbf16ps.512", sums[m * len(pieces) + u], x, piece))
        return out

    def module(self) -> str:
        """The whole module with this function, named `share`."""
        declared, body = "\n".join(self._declared), "\n  ".join(self._lines)
        return f"{declared}\n\ndefine void @share(ptr %args) {{\nentry:\n  {body}\n  ret void\n}}\n"
