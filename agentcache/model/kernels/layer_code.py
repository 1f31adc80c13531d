"""What stands between the products of a decoder layer, as LLVM IR: norms, rotary angles, residuals, gates. Knows nothing of models.

Every function does what PyTorch's operations do, one rounding for each of theirs, in their order: a sum of squares is added up as
`Tensor.mean` adds it (four accumulators of whole vectors, sixteen steps at a time, then lane by lane). `layer.py` compares the
results with PyTorch's before it relies on them. Sizes are constants of the code: there is a function for each size of a model.

Rows of activations are 16-bit numbers [rows, n]. What a product reads is fp32 [n, rows], as linear_few.py wants it.
"""

from __future__ import annotations

from collections.abc import Callable

from .ir import TEAM, Code, Names, splat

SUM_LANES = 8  # of PyTorch's reductions on x86, also where it has longer vectors


def _squares(code: Code, vector: Callable[[str | int], str], n: int) -> str:
    """The sum of squares of n numbers, lane by lane, in the order of PyTorch's reductions. vector(i): that of numbers i, i + 1, ..

    code: of `SUM_LANES` lanes.
    """
    lanes, count = code.lanes, n // code.lanes
    steps, left = divmod(count, 4)
    chunks, rest = divmod(steps, 16)
    zero = splat(lanes, "float 0.0")

    def add(sums: Names, base: str | int, number: int) -> Names:
        out = []
        for k, total in enumerate(sums):
            offset = (4 * number + k) * lanes
            value = vector(base + offset if isinstance(base, int) else code.plus(base, offset))
            out.append(code.both("fadd", total, code.both("fmul", value, value)))
        return out

    def chunk(index: str, carried: Names) -> Names:
        sums = [zero] * 4
        for number in range(16):
            sums = add(sums, index, number)
        return [code.both("fadd", before, new) for before, new in zip(carried, sums)]

    above = code.loop(chunks * 64 * lanes, 64 * lanes, [(code.floats, zero)] * 4, chunk) if chunks else []
    sums = [zero] * 4
    for number in range(rest):
        sums = add(sums, chunks * 64 * lanes, number)
    if above:
        sums = [code.both("fadd", one, other) for one, other in zip(sums, above)]
    for number in range(left):
        value = vector((4 * steps + number) * lanes)
        sums[0] = code.both("fadd", sums[0], code.both("fmul", value, value))
    for other in sums[1:]:
        sums[0] = code.both("fadd", sums[0], other)
    return sums[0]


def _scale(code: Code, row: str, n: int, epsilon: str) -> str:
    """What a norm multiplies the n 16-bit numbers at `row` with."""
    eight = code.of(SUM_LANES)
    return eight.scale(_squares(eight, lambda at: eight.load_half(eight.at(row, "i16", str(at))), n), n, epsilon)


def _epsilon(code: Code, number: int) -> str:
    return code.do(f"bitcast i32 {code.do(f'trunc i64 {code.field(number)} to i32')} to float")


def norm(lanes: int, element: str, rows: int, n: int) -> str:
    """Fields: x [rows, n], weight [n], epsilon (the bits of a float), out fp32 [n, rows]."""
    code = Code(lanes, element)
    x, weight, epsilon, out = code.pointer(0), code.pointer(1), _epsilon(code, 2), code.pointer(3)

    def row(number: str, _: Names) -> Names:
        mine = code.at(x, "i16", code.times(number, n))
        scale = code.all_lanes(_scale(code, mine, n, epsilon))

        def part(index: str, _: Names) -> Names:
            value = code.rounded(code.both("fmul", code.load_half(code.at(mine, "i16", index)), scale))
            value = code.rounded(code.both("fmul", code.load_half(code.at(weight, "i16", index)), value))
            code.scatter(value, out, index, number, rows)
            return []

        return code.loop(n, lanes, [], part)

    code.loop(rows, 1, [], row)
    return code.module()


def scales(lanes: int, element: str, rows: int, n: int) -> str:
    """What a norm multiplies each row with. Fields: x [rows, n], epsilon, out fp32 [rows]."""
    code = Code(lanes, element)
    x, epsilon, out = code.pointer(0), _epsilon(code, 1), code.pointer(2)

    def row(number: str, _: Names) -> Names:
        mine = code.at(x, "i16", code.times(number, n))
        code.say(f"store float {_scale(code, mine, n, epsilon)}, ptr {code.at(out, 'float', number)}, align 4")
        return []

    code.loop(rows, 1, [], row)
    return code.module()


def _normed(code: Code, values: Names, weight: str, epsilon: str) -> Names:
    """One head's vectors, normalised."""
    pieces = [code.part(value, SUM_LANES, first) for value in values for first in range(0, code.lanes, SUM_LANES)]
    eight, dim = code.of(SUM_LANES), len(values) * code.lanes
    scale = code.all_lanes(eight.scale(_squares(eight, lambda at: pieces[int(at) // SUM_LANES], dim), dim, epsilon))
    out = []
    for number, value in enumerate(values):
        value = code.rounded(code.both("fmul", value, scale))
        factor = code.load_half(code.at(weight, "i16", str(number * code.lanes)))
        out.append(code.rounded(code.both("fmul", factor, value)))
    return out


def _turned(code: Code, values: Names, cos: str, sin: str, angles: str) -> Names:
    """One head's vectors, its halves rotated by the cosines and sines from `angles` on: fp32 that is not rounded yet."""
    half = len(values) // 2
    minus = [code.do(f"fneg {code.floats} {value}") for value in values[half:]]
    turned = []
    for number, (value, other) in enumerate(zip(values, [*minus, *values[:half]])):
        place = code.plus(angles, number * code.lanes)
        one = code.rounded(code.both("fmul", value, code.load_half(code.at(cos, "i16", place))))
        two = code.rounded(code.both("fmul", other, code.load_half(code.at(sin, "i16", place))))
        turned.append(code.both("fadd", one, two))
    return turned


def heads(lanes: int, element: str, rows: int, total: int, count: int, dim: int, bias: bool, normed: bool, rotated: bool) -> str:
    """Products become heads. Fields: wide fp32 [rows, total] from the first of these heads on, bias [count · dim], norm's weight [dim],
    epsilon, cos and sin [rows, dim], out [rows, count, dim].
    """
    code = Code(lanes, element)
    wide, biases, weight, epsilon = code.pointer(0), code.pointer(1) if bias else "", code.pointer(2), _epsilon(code, 3)
    cos, sin, out = code.pointer(4), code.pointer(5), code.pointer(6)
    parts = range(0, dim, lanes)

    def head(row: str, first: str) -> None:
        mine = code.at(wide, "float", code.plus(code.times(row, total), first))
        values = []
        for at in parts:
            value = code.load(code.at(mine, "float", str(at)))
            values.append(code.rounded(code.with_bias(value, biases, code.plus(first, at) if bias else "")))
        if normed:
            values = _normed(code, values, weight, epsilon)
        turned = _turned(code, values, cos, sin, code.times(row, dim)) if rotated else values
        target = code.at(out, "i16", code.plus(code.times(row, count * dim), first))
        for value, at in zip(turned, parts):
            code.store_half(value, code.at(target, "i16", str(at)))

    def row(number: str, _: Names) -> Names:
        def each(first: str, _: Names) -> Names:
            head(number, first)
            return []

        return code.loop(count * dim, dim, [], each)

    code.loop(rows, 1, [], row)
    return code.module()


def shared(code: Code, count: str, body: Callable[[str], None], declarations: str = "") -> str:
    """A function whose threads do their part of `count` things each."""
    _, start, own = code.mine(count)

    def one(index: str, _: Names) -> Names:
        body(code.plus(start, index))
        return []

    code.loop(own, 1, [], one)
    return code.module(f"{TEAM}{declarations}")


def norm_rows(lanes: int, element: str, n: int) -> str:
    """Fields: x [rows, n], weight [n], epsilon, out [rows, n], rows."""
    code = Code(lanes, element)
    x, weight, epsilon, out = code.pointer(0), code.pointer(1), _epsilon(code, 2), code.pointer(3)

    def row(number: str) -> None:
        mine, target = (code.at(base, "i16", code.times(number, n)) for base in (x, out))
        scale = code.all_lanes(_scale(code, mine, n, epsilon))

        def part(index: str, _: Names) -> Names:
            value = code.rounded(code.both("fmul", code.load_half(code.at(mine, "i16", index)), scale))
            factor = code.load_half(code.at(weight, "i16", index))
            code.store_half(code.both("fmul", factor, value), code.at(target, "i16", index))
            return []

        code.loop(n, lanes, [], part)

    return shared(code, code.field(4), row)


def head_rows(lanes: int, element: str, count: int, dim: int, normed: bool) -> str:
    """Fields: x [rows, count, dim], norm's weight [dim], epsilon, cos and sin [rows, dim], out [rows, count, dim], rows."""
    code = Code(lanes, element)
    x, weight, epsilon = code.pointer(0), code.pointer(1), _epsilon(code, 2)
    cos, sin, out = code.pointer(3), code.pointer(4), code.pointer(5)

    def row(number: str) -> None:
        angles, base = code.times(number, dim), code.times(number, count * dim)

        def head(first: str, _: Names) -> Names:
            at = code.plus(base, first)
            values = [code.load_half(code.at(x, "i16", code.plus(at, part))) for part in range(0, dim, lanes)]
            if normed:
                values = _normed(code, values, weight, epsilon)
            for number, value in enumerate(_turned(code, values, cos, sin, angles)):
                code.store_half(value, code.at(out, "i16", code.plus(at, number * lanes)))
            return []

        code.loop(count * dim, dim, [], head)

    return shared(code, code.field(6), row)


def _each(code: Code, rows: int, n: int, body: Callable[[str, str, str], None]) -> str:
    """A function of one loop over rows and vectors: body(row, index in the row, row · n + index)."""

    def row(number: str, _: Names) -> Names:
        first = code.times(number, n)

        def part(index: str, _: Names) -> Names:
            body(number, index, code.plus(first, index))
            return []

        return code.loop(n, code.lanes, [], part)

    code.loop(rows, 1, [], row)
    return code.module()


def spread(lanes: int, element: str, rows: int, n: int) -> str:
    """Fields: x [rows, n], out fp32 [n, rows]."""
    code = Code(lanes, element)
    x, out = code.pointer(0), code.pointer(1)
    return _each(code, rows, n, lambda row, index, at: code.scatter(code.load_half(code.at(x, "i16", at)), out, index, row, rows))


def residual(lanes: int, element: str, rows: int, n: int, bias: bool) -> str:
    """x += a product. Fields: x [rows, n], wide fp32 [rows, n], bias [n]."""
    code = Code(lanes, element)
    x, wide, biases = code.pointer(0), code.pointer(1), code.pointer(2) if bias else ""

    def part(_: str, index: str, at: str) -> None:
        added = code.rounded(code.with_bias(code.load(code.at(wide, "float", at)), biases, index))
        place = code.at(x, "i16", at)
        code.store_half(code.both("fadd", code.load_half(place), added), place)

    return _each(code, rows, n, part)


def narrow(lanes: int, element: str, rows: int, n: int, total: int, bias: bool) -> str:
    """The first n of a product. Fields: wide fp32 [rows, total], bias [n], out [rows, n]."""
    code = Code(lanes, element)
    wide, biases, out = code.pointer(0), code.pointer(1) if bias else "", code.pointer(2)

    def part(row: str, index: str, at: str) -> None:
        value = code.load(code.at(wide, "float", code.plus(code.times(row, total), index)))
        code.store_half(code.with_bias(value, biases, index), code.at(out, "i16", at))

    return _each(code, rows, n, part)


def gated(lanes: int, element: str, rows: int, n: int, total: int, bias: bool) -> str:
    """What goes down. Fields: activated gate [rows, n], wide fp32 [rows, total] from `up` on, its bias [n], out fp32 [n, rows]."""
    code = Code(lanes, element)
    gate, wide, biases, out = code.pointer(0), code.pointer(1), code.pointer(2) if bias else "", code.pointer(3)

    def part(row: str, index: str, at: str) -> None:
        value = code.load(code.at(wide, "float", code.plus(code.times(row, total), index)))
        value = code.rounded(code.with_bias(value, biases, index))
        code.scatter(code.rounded(code.both("fmul", code.load_half(code.at(gate, "i16", at)), value)), out, index, row, rows)

    return _each(code, rows, n, part)


def program() -> str:
    """Runs functions one after another. Fields: how many, then for each its address, its argument block, and on how many threads."""
    code = Code(8, "bfloat")

    def step(index: str, _: Names) -> Names:
        first = code.plus(index, 1)
        fields = []
        for number in range(3):
            at = code.at("%args", "i64", code.plus(first, number))
            fields.append(code.do(f"load i64, ptr {at}, align 8"))
        function, block = (code.do(f"inttoptr i64 {field} to ptr") for field in fields[:2])
        threads = code.do(f"trunc i64 {fields[2]} to i32")
        code.either(
            code.do(f"icmp eq i32 {threads}, 1"),
            f"call void {function}(ptr {block})",
            f"call void @GOMP_parallel(ptr {function}, ptr {block}, i32 {threads}, i32 0)",
        )
        return []

    code.loop(code.times(code.field(0), 3), 3, [], step)
    return code.module("declare void @GOMP_parallel(ptr, ptr, i32, i32)")
