"""Layers that keep a state, token after token: short convolution, gated delta rule, selective scan. Knows no models.

A token's numbers depend on the state before it, by the same operations in every call: where a prompt is cut changes no bit. PyTorch's
references compute chunks of 64 or more tokens, a dozen passes over each, and pad what is shorter.

    convolution   y[t] = silu(bias + Σ w[n] · x[t - taps + 1 + n]), channel by channel
    delta rule    S = a[t] · S;  S = S + k[t] · (b[t] · (v[t] - Sᵀ k[t]));  y[t] = Sᵀ q[t]     (arXiv 2412.06464; a per channel: 2510.26692)
    scan          S = a[t] · S + dt[t] · x[t] · B[t];  y[t] = S · C[t] + D · x[t]              (arXiv 2405.21060; selective: 2312.00752)
"""

from __future__ import annotations

from typing import Any

import torch

from . import jit
from .ir import Code, Value, Values
from .paged_attention import exponential
from .scratch import scratch

LINE = 64  # bytes: of each row a task of a convolution reads a whole line
SPAN = 16  # tokens whose keys and queries are made ready at once
UNROLLED = 4  # channels of keys in one turn of a loop, each with sums of its own: one addition need not wait for the last
EPSILON = 1e-6  # of the norms of queries and keys
_VECTORS = 8  # of a state, at most, that a scan holds in registers


def _tree(code: Code, vector: Value) -> Value:
    """The sum of a vector's lanes, by halves."""
    lanes = code.lanes
    while lanes > 1:
        lanes //= 2
        vector = vector.part(lanes, 0) + vector.part(lanes, lanes)
    return vector.lane(0)


def _silu(code: Code, x: Value) -> Value:
    """x / (1 + exp(-x))."""
    small = exponential(code, code.select(x < 0, x, -x))
    return x * code.select(x < 0, small, 1.0) / (small + 1.0)


def _taps(code: Code, base: Value, channel: Value, taps: int) -> Values:
    """The factors of a vector of channels [channels, taps], tap by tap."""
    whole = code.load_numbers(base.at(code.stored, channel * taps), code.lanes * taps)
    return [whole.shuffled(whole, range(tap, code.lanes * taps, taps)) for tap in range(taps)]


def _convolved(code: Code, seen: Values, factors: Values, bias: Value | None, silu: bool) -> Value:
    """One vector of channels of one token."""
    total = code.constant(code.floats, 0.0) if bias is None else bias
    for one, factor in zip(seen, factors, strict=True):
        total = code.fma(one, factor, total)
    total = code.rounded(total)
    return _silu(code, total) if silu else total


def convolution_code(code: Code, taps: int, silu: bool, biased: bool, lines: int) -> None:
    """Nothing stands before the first token. Fields: x [rows, channels] with `stride` numbers from row to row, weight [channels, taps],
    bias [channels], out [rows, channels], rows, channels, stride. lines: vectors in a line of memory.
    """
    (x, weight, bias, out), (rows, channels, stride) = code.pointers(4), code.fields(3)

    @code.shared(channels // (lines * code.lanes))
    def _(task: Value) -> None:
        places = [task * (lines * code.lanes) + line * code.lanes for line in range(lines)]
        factors = [_taps(code, weight, place, taps) for place in places]
        biases = [code.load_numbers(bias.at(code.stored, place)) if biased else None for place in places]

        def row(at: Value, before: Values) -> Values:
            after: Values = []
            for line, place in enumerate(places):
                new = code.load_numbers(x.at(code.stored, at * stride + place))
                seen = [*before[line * (taps - 1) : (line + 1) * (taps - 1)], new]
                done = _convolved(code, seen, factors[line], biases[line], silu)
                code.store_numbers(done, out.at(code.stored, at * channels + place))
                after += seen[1:]
            return after

        code.fold(rows, 1, [code.constant(code.floats, 0.0)] * (lines * (taps - 1)), row)


def convolution_step_code(code: Code, taps: int, silu: bool, biased: bool) -> None:
    """One token; its numbers go into the state. Fields: x [channels], weight [channels, taps], bias [channels], out [channels],
    state [channels, taps], channels.
    """
    (x, weight, bias, out, state), (channels,) = code.pointers(5), code.fields(1)
    lanes = code.lanes

    @code.loop(channels, lanes)
    def _(at: Value) -> None:
        place, kind = state.at(code.stored, at * taps), f"<{lanes * taps} x {code.stored}>"
        held, new = place.load(kind, 2), x.at(code.stored, at).load(f"<{lanes} x {code.stored}>", 2)
        wide = new.shuffled(new, [lane % lanes for lane in range(lanes * taps)])
        moved = held.shuffled(wide, [n + 1 if (n + 1) % taps else lanes * taps + n // taps for n in range(lanes * taps)])
        place.store(moved, 2)
        seen = [code.up(moved.shuffled(moved, range(tap, lanes * taps, taps))) for tap in range(taps)]
        start = code.load_numbers(bias.at(code.stored, at)) if biased else None
        done = _convolved(code, seen, _taps(code, weight, at, taps), start, silu)
        code.store_numbers(done, out.at(code.stored, at))


def delta_code(code: Code, key_heads: int, heads: int, dim: int, width: int, normed: bool, by_channel: bool) -> None:
    """Fields: q and k [rows, key_heads, dim], v [rows, heads, width], a fp32 [rows, heads] or, by channel, [rows, heads, dim],
    b fp32 [rows, heads], state fp32 [heads, dim, width], out [rows, heads, width], room of each thread, rows, numbers from row to row of
    q, k and v.
    """
    _Delta(code, key_heads, heads, dim, width, normed, by_channel).write()


class _Delta:
    """Writes the function. A task is a head; some columns of its state stay in the first-level cache for `SPAN` tokens."""

    def __init__(self, code: Code, key_heads: int, heads: int, dim: int, width: int, normed: bool, by_channel: bool) -> None:
        self.code, self.heads, self.dim, self.width, self.normed, self.by_channel = code, heads, dim, width, normed, by_channel
        self.shared_by = heads // key_heads
        (self.q, self.k, self.v, self.a, self.b, self.state, self.out, room), (self.rows, *self.strides) = code.pointers(8), code.fields(4)
        mine = room.at("float", code.team()[0] * (4 * SPAN * dim))
        self.queries, self.keys, self.seen, self.decays = (mine.at("float", n * SPAN * dim) for n in range(4))
        self.wide = 2 if width % (2 * code.lanes) == 0 else 1  # vectors of columns at once

    def write(self) -> None:
        self.code.shared(self.code.constant("i64", self.heads))(self._head)

    def _head(self, head: Value) -> None:
        code = self.code

        @code.loop(self.rows, SPAN)
        def _(first: Value) -> None:
            count = code.smaller(self.rows - first, SPAN)
            code.loop(count)(lambda at: self._ready(head, at, first + at))

            @code.loop(self.width, self.wide * code.lanes)
            def _(column: Value) -> None:
                code.loop(count)(lambda at: self._step(head, at, first + at, column))

    def _ready(self, head: Value, at: Value, token: Value) -> None:
        """Writes a token's query, its key, its decays, and the key times these, as fp32."""
        code, along = self.code, range(0, self.dim, self.code.lanes)
        place = head // self.shared_by * self.dim
        sources = (self.q, self.strides[0], self.queries, self.dim**-0.5), (self.k, self.strides[1], self.keys, 1.0)
        for base, stride, target, factor in sources:
            source = base.at(code.stored, token * stride + place)
            vectors, scale = [code.load_numbers(source.at(code.stored, i)) for i in along], code.constant("float", 1.0)
            if self.normed:
                squares = vectors[0] * vectors[0]
                for vector in vectors[1:]:
                    squares = code.fma(vector, vector, squares)
                scale = scale / code.call("float", "llvm.sqrt.f32", _tree(code, squares) + EPSILON)
            scale = (scale * factor).everywhere(code.lanes)
            for i, vector in zip(along, vectors):
                target.at("float", at * self.dim + i).store(vector * scale)
        one = self.a.at("float", (token * self.heads + head) * (self.dim if self.by_channel else 1))
        for i in along:
            decay = one.at("float", i).load(code.floats) if self.by_channel else one.load("float").everywhere(code.lanes)
            self.decays.at("float", at * self.dim + i).store(decay)
            self.seen.at("float", at * self.dim + i).store(self.keys.at("float", at * self.dim + i).load(code.floats) * decay)

    def _step(self, head: Value, at: Value, token: Value, column: Value) -> None:
        """Takes a token into some columns of the state, and looks at them."""
        code, lanes, wide = self.code, self.code.lanes, self.wide
        held = self.state.at("float", head * (self.dim * self.width) + column)
        zeros = [code.constant(code.floats, 0.0)] * (wide * UNROLLED)

        def spread(base: Value, i: Value) -> Value:
            return base.at("float", at * self.dim + i).load("float").everywhere(lanes)

        def known(i: Value, carried: Values) -> Values:
            sums = list(carried)
            for n in range(UNROLLED):
                factor = spread(self.seen, i + n)
                for u in range(wide):
                    cell = held.at("float", (i + n) * self.width + u * lanes).load(code.floats)
                    sums[n * wide + u] = code.fma(cell, factor, sums[n * wide + u])
            return sums

        found = self._totals(code.fold(self.dim, UNROLLED, zeros, known))
        place = token * self.heads + head
        rate = self.b.at("float", place).load("float").everywhere(lanes)
        values = self.v.at(code.stored, token * self.strides[2] + head * self.width + column)
        news = [(code.load_numbers(values.at(code.stored, u * lanes)) - found[u]) * rate for u in range(wide)]

        def taken(i: Value, carried: Values) -> Values:
            sums = list(carried)
            for n in range(UNROLLED):
                key, query, decay = (spread(base, i + n) for base in (self.keys, self.queries, self.decays))
                for u in range(wide):
                    cell = held.at("float", (i + n) * self.width + u * lanes)
                    now = code.fma(key, news[u], cell.load(code.floats) * decay)
                    cell.store(now)
                    sums[n * wide + u] = code.fma(now, query, sums[n * wide + u])
            return sums

        for u, total in enumerate(self._totals(code.fold(self.dim, UNROLLED, zeros, taken))):
            code.store_numbers(total, self.out.at(code.stored, place * self.width + column + u * lanes))

    def _totals(self, sums: Values) -> Values:
        """Of each vector of columns."""
        totals = sums[: self.wide]
        for n in range(self.wide, len(sums)):
            totals[n % self.wide] = totals[n % self.wide] + sums[n]
        return totals


def scan_code(code: Code, groups: int, heads: int, dim: int, size: int, skips: bool, selective: bool) -> None:
    """Fields: x [rows, heads, dim] with `stride` numbers from row to row, dt fp32 [rows, heads], a fp32 [rows, heads] or, if selective,
    rates [heads, size], B and C fp32 [rows, groups, size], D fp32 [heads], state fp32 [heads, dim, size], out fp32 [rows, heads, dim],
    rows, stride.
    """
    (x, dt, a, b, c, d, state, out), (rows, stride) = code.pointers(8), code.fields(2)
    lanes = code.lanes
    vectors = next(n for n in range(min(_VECTORS, size // lanes), 0, -1) if size // lanes % n == 0)
    along = [n * lanes for n in range(vectors)]

    @code.shared(code.constant("i64", heads * dim))
    def _(task: Value) -> None:
        head = task // dim
        group = head // (heads // groups)
        skip = d.at("float", head).load("float") if skips else None

        @code.loop(size, vectors * lanes)
        def _(first: Value) -> None:
            cells = [state.at("float", task * size + first + n) for n in along]
            rates = [a.at("float", head * size + first + n).load(code.floats) for n in along] if selective else []

            def token(row: Value, held: Values) -> Values:
                place, line = row * heads + head, (row * groups + group) * size + first
                given = code.up(x.at(code.stored, row * stride + task).load(code.stored, 2))
                step = dt.at("float", place).load("float")
                added, wide = (step * given).everywhere(lanes), step.everywhere(lanes)
                decays = [exponential(code, rate * wide) for rate in rates]
                decays = decays or [a.at("float", place).load("float").everywhere(lanes)] * vectors
                total, after = code.constant(code.floats, 0.0), []
                for n, cell, decay in zip(along, held, decays):
                    after.append(code.fma(added, b.at("float", line + n).load(code.floats), cell * decay))
                    total = code.fma(after[-1], c.at("float", line + n).load(code.floats), total)
                target = out.at("float", row * (heads * dim) + task)
                sum_ = _tree(code, total)
                before = code.constant("float", 0.0) if skip is None else given * skip
                before = code.select(first.equals(0), before, target.load("float"))
                target.store(before + sum_)
                return after

            for cell, value in zip(cells, code.fold(rows, 1, [cell.load(code.floats) for cell in cells], token)):
                cell.store(value)


def _fits(channels: int, itemsize: int) -> bool:
    found = jit.compiler()
    return found is not None and channels % max(LINE // itemsize, found.lanes) == 0


def _rows_of(x: torch.Tensor) -> torch.Tensor:
    """x [rows, ...] with one row's numbers side by side: itself, if they are, whatever stands between its rows."""
    return x if x[0].is_contiguous() else x.contiguous()


def takes_convolution(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """True if rows x [rows, channels] can be convolved here with a weight [channels, taps] and a bias [channels]."""
    known = x.device.type == "cpu" and x.dtype in jit.NUMBERS and len(x) > 0
    alike = all(one.dtype == x.dtype and one.is_contiguous() for one in (weight, bias) if one is not None)
    return known and alike and 1 < weight.shape[1] <= 8 and _fits(x.shape[1], x.itemsize)


def convolution(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, silu: bool) -> torch.Tensor:
    """Convolve x [rows, channels] with weight [channels, taps], plus bias [channels], after zeros -> [rows, channels]."""
    x, found = _rows_of(x), jit.compiler()
    assert found is not None
    (rows, channels), out, lines = x.shape, torch.empty(x.shape, dtype=x.dtype), max(1, LINE // x.itemsize // found.lanes)
    fields = (*map(jit.address, (x, weight, bias, out)), rows, channels, x.stride(0))
    threads = jit.threads_for(rows * channels * weight.shape[1], channels // (lines * found.lanes))
    jit.run(convolution_code, jit.NUMBERS[x.dtype], (weight.shape[1], silu, bias is not None, lines), threads, *fields)
    return out


def convolution_step(x: torch.Tensor, state: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, silu: bool) -> torch.Tensor:
    """The same of one token x [channels], after those of state [channels, taps], into which it goes -> [channels]."""
    x, out = x.contiguous(), torch.empty(x.shape, dtype=x.dtype)
    fields = (*map(jit.address, (x, weight, bias, out, state)), len(x))
    jit.run(convolution_step_code, jit.NUMBERS[x.dtype], (weight.shape[1], silu, bias is not None), 1, *fields)
    return out


def takes_delta(q: torch.Tensor, v: torch.Tensor) -> bool:
    """True if the delta rule can run here for q [rows, key heads, dim] and v [rows, heads, width]."""
    found = jit.compiler()
    if found is None or q.device.type != "cpu" or q.dtype not in jit.NUMBERS or v.dtype != q.dtype or not len(q):
        return False
    return q.shape[2] % max(found.lanes, UNROLLED) == 0 and v.shape[2] % found.lanes == 0 and v.shape[1] % q.shape[1] == 0


def delta(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, a: torch.Tensor, b: torch.Tensor, state: torch.Tensor, normed: bool
) -> torch.Tensor:
    """Run rows of q and k [rows, key heads, dim] and v [rows, heads, width] through a state fp32 [heads, dim, width], which is changed
    in place -> [rows, heads, width]. a: decays fp32 [rows, heads], or [rows, heads, dim]; b: rates fp32 [rows, heads].
    normed: q and k are normalised first.
    """
    q, k, v, a, b = _rows_of(q), _rows_of(k), _rows_of(v), a.contiguous(), b.contiguous()
    (rows, key_heads, dim), (_, heads, width) = q.shape, v.shape
    out = torch.empty(v.shape, dtype=v.dtype)
    room = scratch("delta", torch.get_num_threads() * 4 * SPAN * dim)
    fields = (*map(jit.address, (q, k, v, a, b, state, out, room)), rows, q.stride(0), k.stride(0), v.stride(0))
    threads = jit.threads_for(4 * rows * heads * dim * width, heads)
    jit.run(delta_code, jit.NUMBERS[q.dtype], (key_heads, heads, dim, width, normed, a.ndim == 3), threads, *fields)
    return out


def takes_scan(x: torch.Tensor, size: int) -> bool:
    """True if a scan can run here for x [rows, heads, dim] and states of so many numbers."""
    found = jit.compiler()
    return found is not None and x.device.type == "cpu" and x.dtype in jit.NUMBERS and len(x) > 0 and size % found.lanes == 0


def scan(
    x: torch.Tensor, dt: torch.Tensor, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, d: torch.Tensor | None, state: torch.Tensor
) -> torch.Tensor:
    """Run rows of x [rows, heads, dim] through a state fp32 [heads, dim, size], which is changed in place -> fp32 [rows, heads, dim].

    dt, a: fp32 [rows, heads]; b, c: [rows, groups, size]; d: [heads].
    """
    return _scanned(x, dt, a, b, c, d, state, False)


def selective_scan(
    x: torch.Tensor, dt: torch.Tensor, rates: torch.Tensor, b: torch.Tensor, c: torch.Tensor, d: torch.Tensor | None, state: torch.Tensor
) -> torch.Tensor:
    """The same of x [rows, channels] and a state [channels, size], decays a = exp(dt · rates) -> fp32 [rows, channels].

    dt: fp32 [rows, channels], at least 0; rates: fp32 [channels, size], at most 0; b, c: [rows, size]; d: [channels].
    """
    return _scanned(x[..., None], dt, rates, b[:, None], c[:, None], d, state[:, None], True)[..., 0]


def _scanned(
    x: torch.Tensor, dt: torch.Tensor, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, d: Any, state: torch.Tensor, selective: bool
) -> torch.Tensor:
    x, dt, a, b, c = _rows_of(x), dt.contiguous(), a.contiguous(), b.float().contiguous(), c.float().contiguous()
    (rows, heads, dim), (_, groups, size), d = x.shape, b.shape, None if d is None else d.float().contiguous()
    out = torch.empty(x.shape, dtype=torch.float32)
    fields = (*map(jit.address, (x, dt, a, b, c, d, state, out)), rows, x.stride(0))
    threads = jit.threads_for((16 if selective else 3) * rows * heads * dim * size, heads * dim)
    jit.run(scan_code, jit.NUMBERS[x.dtype], (groups, heads, dim, size, d is not None, selective), threads, *fields)
    return out
