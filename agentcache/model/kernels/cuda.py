# mypy: disable-error-code="no-untyped-def, no-untyped-call"
"""Kernels of a GPU, by Triton: norms, rotary angles, and attention over page tables, each one launch for a whole pack.

A GPU waits for its next launch longer than it computes a row, and the library's attention wants keys and values gathered, repeated
and masked. These read pages where they lie, from addresses in a table on the device (device_table.py), so that nothing is gathered and
a launch does not depend on the length of a prompt. Formula of attention: see attention.py; where rows are few, several programs share
a prompt's pages, and their sums are joined at the end.
"""

from __future__ import annotations

import functools
import logging
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from ...errors import FAULTS
from ...types import PAGE_TOKENS
from .device_table import FEW_ROWS, DeviceTable, table_of
from .norm_library import plain_heads, plain_norm

log = logging.getLogger("agentcache")

WIDEST = 256  # of a head
_TILE = 64  # rows of a program, times heads that share keys; 16 where each part has one row
_ALIGNED = 16  # bytes of which loads are made: rows of values begin at multiples
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@triton.jit
def _norm(x, weight, out, n, epsilon, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    row = tl.program_id(0).to(tl.int64) * n
    wide = tl.load(x + row + at, mask=at < n, other=0.0).to(tl.float32)
    wide = wide * tl.rsqrt(tl.sum(wide * wide) / n + epsilon)
    gain = tl.load(weight + at, mask=at < n, other=0.0)
    rounded = wide.to(x.dtype.element_ty).to(tl.float32) * gain.to(tl.float32)
    tl.store(out + row + at, rounded.to(out.dtype.element_ty), mask=at < n)


@triton.jit
def _heads(x, weight, cos, sin, out, heads, half, epsilon, NORM: tl.constexpr, BLOCK: tl.constexpr):
    kind = x.dtype.element_ty
    at = tl.arange(0, BLOCK)
    row = tl.program_id(0).to(tl.int64)
    start = (row * heads + tl.program_id(1)) * 2 * half
    low = tl.load(x + start + at, mask=at < half, other=0.0).to(tl.float32)
    high = tl.load(x + start + half + at, mask=at < half, other=0.0).to(tl.float32)
    if NORM:
        scale = tl.rsqrt((tl.sum(low * low) + tl.sum(high * high)) / (2 * half) + epsilon)
        low = (low * scale).to(kind).to(tl.float32) * tl.load(weight + at, mask=at < half, other=0.0).to(tl.float32)
        high = (high * scale).to(kind).to(tl.float32) * tl.load(weight + half + at, mask=at < half, other=0.0).to(tl.float32)
        low, high = low.to(kind).to(tl.float32), high.to(kind).to(tl.float32)
    angle = row * 2 * half + at
    cos_low, cos_high = tl.load(cos + angle, mask=at < half, other=0.0), tl.load(cos + angle + half, mask=at < half, other=0.0)
    sin_low, sin_high = tl.load(sin + angle, mask=at < half, other=0.0), tl.load(sin + angle + half, mask=at < half, other=0.0)
    turned_low = (low * cos_low.to(tl.float32)).to(kind).to(tl.float32) + (-high * sin_low.to(tl.float32)).to(kind).to(tl.float32)
    turned_high = (high * cos_high.to(tl.float32)).to(kind).to(tl.float32) + (low * sin_high.to(tl.float32)).to(kind).to(tl.float32)
    tl.store(out + start + at, turned_low.to(kind), mask=at < half)
    tl.store(out + start + half + at, turned_high.to(kind), mask=at < half)


@triton.jit
def _address(pages, first, page, side, layer, layers, kind: tl.constexpr):
    """Where the keys (side 0) or values (side 1) of a layer lie, of a part's page."""
    found = tl.load(pages + ((first + page) * 2 + side) * layers + layer)
    return tl.multiple_of(found, 16).to(tl.pointer_type(kind))


@triton.jit(do_not_specialize=["layer"])
def _write(
    key,
    value,
    pages,
    rows,
    layer,
    layers,
    heads,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    PAGE: tl.constexpr,
):
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first = tl.load(rows + row * 2)
    if first >= 0:
        position = tl.load(rows + row * 2 + 1)
        page, slot = position // PAGE, position % PAGE
        at = tl.arange(0, BK)
        kind = key.dtype.element_ty
        found = tl.load(key + (row * heads + head) * DK + at, mask=at < DK)
        tl.store(_address(pages, first, page, 0, layer, layers, kind) + (head * DK + at) * PAGE + slot, found, mask=at < DK)
        at = tl.arange(0, BV)
        found = tl.load(value + (row * heads + head) * DV + at, mask=at < DV)
        tl.store(_address(pages, first, page, 1, layer, layers, kind) + (head * PAGE + slot) * DV + at, found, mask=at < DV)


@triton.jit
def _seen(keys, position, window, chunk, WINDOW: tl.constexpr, CHUNK: tl.constexpr):
    """Which keys each row sees, [rows, keys]."""
    seen = keys[None, :] <= position[:, None]
    if WINDOW:
        seen = seen & (keys[None, :] > position[:, None] - window)
    if CHUNK:
        seen = seen & (keys[None, :] >= position[:, None] // chunk * chunk)
    return seen


@triton.jit(do_not_specialize=["layer"])
def _attend(
    query, out, largest, total, pages, blocks, split, sinks, layer, layers, heads, scale, softcap, window, chunk,
    GROUP: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    PAGE: tl.constexpr, SPLITS: tl.constexpr, SINKS: tl.constexpr, CAPPED: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    kind = query.dtype.element_ty
    block, head, part = blocks + tl.program_id(0).to(tl.int64) * 4, tl.program_id(1), tl.program_id(2)
    count = tl.load(block + 2)
    if count > 0:
        first, start = tl.load(block), tl.load(block + 3)
        m, n = tl.arange(0, M), tl.arange(0, N)
        row = m // GROUP
        valid = row < count
        position = start + row
        place = (tl.load(block + 1) + row) * heads + head * GROUP + m % GROUP  # of the row's head
        dk, dv = tl.arange(0, BK), tl.arange(0, BV)
        q = tl.load(query + place[:, None] * DK + dk[None, :], mask=valid[:, None] & (dk[None, :] < DK), other=0.0)
        low, high = start * 0, start + count
        if WINDOW:
            low = tl.maximum(low, start - window + 1)
        if CHUNK:
            low = tl.maximum(low, start // chunk * chunk)
        if SPLITS > 1:
            share = tl.load(split) * PAGE
            low, high = tl.maximum(low, part * share), tl.minimum(high, (part + 1) * share)
        most = tl.full([M], float("-inf"), tl.float32)
        summed = tl.zeros([M], tl.float32)
        mixed = tl.zeros([M, BV], tl.float32)
        for tile in range(low // N, tl.where(high > low, tl.cdiv(high, N), 0)):
            page, at = tile * N // PAGE, tile * N % PAGE + n
            keys = _address(pages, first, page, 0, layer, layers, kind) + head * DK * PAGE
            values = _address(pages, first, page, 1, layer, layers, kind) + head * PAGE * DV
            keys = tl.multiple_of(keys + dk[:, None] * PAGE + at[None, :], [16, 16])
            k = tl.load(keys, mask=dk[:, None] < DK, other=0.0)
            scores = tl.dot(q, k, input_precision="ieee") * scale
            if CAPPED:
                scores = softcap * (2 * tl.sigmoid(2 * scores / softcap) - 1)
            scores = tl.where(_seen(tile * N + n, position, window, chunk, WINDOW, CHUNK), scores, float("-inf"))
            more = tl.maximum(most, tl.max(scores, 1))
            base = tl.where(more == float("-inf"), 0.0, more)
            scores, shrunk = tl.exp(scores - base[:, None]), tl.exp(most - base)
            values = tl.multiple_of(values + at[:, None] * DV + dv[None, :], [16, 16])
            v = tl.load(values, mask=dv[None, :] < DV, other=0.0)
            summed = summed * shrunk + tl.sum(scores, 1)
            mixed = mixed * shrunk[:, None] + tl.dot(scores.to(kind), v, input_precision="ieee")
            most = more
        if SPLITS > 1:
            at = place * SPLITS + part
            tl.store(largest + at, most, mask=valid)
            tl.store(total + at, summed, mask=valid)
            tl.store(out + at[:, None] * DV + dv[None, :], mixed, mask=valid[:, None] & (dv[None, :] < DV))
        else:
            if SINKS:
                sink = tl.load(sinks + head * GROUP + m % GROUP).to(tl.float32)
                more = tl.maximum(most, sink)
                summed, mixed = summed * tl.exp(most - more) + tl.exp(sink - more), mixed * tl.exp(most - more)[:, None]
            mixed = mixed / tl.where(summed == 0.0, 1.0, summed)[:, None]
            tl.store(out + place[:, None] * DV + dv[None, :], mixed.to(kind), mask=valid[:, None] & (dv[None, :] < DV))


@triton.jit
def _join(parts, largest, total, out, rows, sinks, heads, DV: tl.constexpr, BV: tl.constexpr, SPLITS: tl.constexpr, SINKS: tl.constexpr):
    if tl.load(rows + tl.program_id(0) * 2) >= 0:
        head = tl.program_id(1)
        place = tl.program_id(0).to(tl.int64) * heads + head
        at, dv = place * SPLITS + tl.arange(0, SPLITS), tl.arange(0, BV)
        most, summed = tl.load(largest + at), tl.load(total + at)
        base = tl.max(most, 0)
        if SINKS:
            base = tl.maximum(base, tl.load(sinks + head).to(tl.float32))
        weight = tl.exp(most - base)
        mixed = tl.load(parts + at[:, None] * DV + dv[None, :], mask=(weight[:, None] > 0) & (dv[None, :] < DV), other=0.0)
        divisor = tl.sum(summed * weight, 0)
        if SINKS:
            divisor += tl.exp(tl.load(sinks + head).to(tl.float32) - base)
        tl.store(out + place * DV + dv, (tl.sum(mixed * weight[:, None], 0) / divisor).to(out.dtype.element_ty), mask=dv < DV)


def norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """`plain_norm` of x [.., n] in one launch; the mean of squares is added up in another order."""
    x = x.contiguous()
    out = torch.empty_like(x, dtype=torch.promote_types(x.dtype, weight.dtype))
    n = x.shape[-1]
    if x.numel():
        with torch.cuda.device_of(x):  # Triton launches on the current one
            _norm[(x.numel() // n,)](x, weight, out, n, epsilon, BLOCK=triton.next_power_of_2(n), num_warps=4 if n <= 4096 else 8)
    return out


def heads(x: torch.Tensor, weight: torch.Tensor | None, epsilon: float, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """`plain_heads` of x [rows, heads, dim] in one launch; cos and sin [rows, 1, dim]."""
    x = x.contiguous()
    out, half = torch.empty_like(x), x.shape[-1] // 2
    gain, block = x if weight is None else weight, triton.next_power_of_2(half)
    if x.numel():
        with torch.cuda.device_of(x):
            _heads[x.shape[:2]](x, gain, cos, sin, out, x.shape[1], half, epsilon, NORM=weight is not None, BLOCK=block, num_warps=1)
    return out


def takes_norm(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether `norm` computes this."""
    return x.dtype in _DTYPES and weight.dtype == x.dtype and weight.is_contiguous() and norms_agree(x.dtype, x.device)


def takes_heads(x: torch.Tensor, weight: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor) -> bool:
    """Whether `heads` computes this."""
    fit = cos.shape == (len(x), 1, x.shape[-1]) and all(t.dtype == x.dtype and t.is_contiguous() for t in (cos, sin))
    return fit and takes_norm(x, cos if weight is None else weight)


def takes(query: torch.Tensor, dtype: torch.dtype, kv_heads: int, width: int) -> bool:
    """Whether `attend` computes attention of a query [rows, heads, width of keys] over pages of a type with values of a width."""
    if query.dtype != dtype or dtype not in _DTYPES or max(query.shape[2], width) > WIDEST or query.shape[1] > kv_heads * _TILE:
        return False
    if query.shape[2] * dtype.itemsize % _ALIGNED or width * dtype.itemsize % _ALIGNED:
        return False
    return attention_agrees(dtype, query.device, query.shape[2], width)


def _near(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.allclose(found.double(), expected.double(), rtol=0.02, atol=0.02)


def _unusable(error: BaseException) -> bool:
    log.warning("kernels of Triton cannot be used here, and PyTorch's operations take longer: %s: %s", type(error).__name__, error)
    return False


@functools.cache
def norms_agree(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether norms and rotations run here, and are near PyTorch's operations. Compiles them: seconds, once on a machine."""
    like = torch.empty(0, dtype=dtype, device=device)
    random = torch.Generator().manual_seed(1)
    x, cos, sin = (_numbers(like, random, 3, heads, 48) for heads in (2, 1, 1))
    weight = cos[0, 0]
    try:
        near = _near(norm(x, weight, 1e-6), plain_norm(x, weight, 1e-6))
        return near and _near(heads(x, weight, 1e-6, cos, sin), plain_heads(x, weight, 1e-6, cos, sin))
    except FAULTS as error:
        return _unusable(error)


@functools.cache
def attention_agrees(dtype: torch.dtype, device: torch.device, dim: int, width: int) -> bool:
    """The same of attention, of few rows and many, with keys and values of these widths."""
    try:
        return all(_tried(dtype, device, dim, width, *each) for each in ((1, 3), (70, 3), (70, 1)))
    except FAULTS as error:
        return _unusable(error)


def _numbers(like: torch.Tensor, random: torch.Generator, *shape: int) -> torch.Tensor:
    """Random numbers, others each time, without a draw from the caller's generators."""
    return torch.randn(shape, generator=random).to(like)


def _tried(dtype: torch.dtype, device: torch.device, dim: int, width: int, rows: int, count: int) -> bool:
    like, start = torch.empty(0, dtype=dtype, device=device), count * PAGE_TOKENS - rows
    random = torch.Generator().manual_seed(1)
    pages = [(_numbers(like, random, 1, dim, PAGE_TOKENS), _numbers(like, random, 1, PAGE_TOKENS, width)) for _ in range(count)]
    known = [SimpleNamespace(addresses=np.array([[both.data_ptr()] for both in page])) for page in pages]
    table = table_of([SimpleNamespace(sequence=SimpleNamespace(pages=known), start=start, count=rows, offset=0)], rows, device)
    query, key, value = (_numbers(like, random, rows, *shape) for shape in ((2, dim), (1, dim), (1, width)))
    write(table, 0, key, value)
    attn = SimpleNamespace(scale=dim**-0.5, softcap=0.0, window=0, chunk=0, sinks=None)
    found = attend(table, 0, query, 1, width, attn)
    keys, values = torch.cat([k[0] for k, _ in pages], 1).double(), torch.cat([v[0] for _, v in pages]).double()
    scores = query.double() @ keys * attn.scale
    hidden = torch.arange(len(values), device=device) > torch.arange(start, start + rows, device=device)[:, None]
    return _near(found, scores.masked_fill(hidden[:, None], -math.inf).softmax(-1) @ values)


def block_rows(most: int, group: int) -> int:
    """Rows of one program, where no part has more than `most`."""
    return max(1, (_TILE if most > 1 else 16) // group)


def write(table: DeviceTable, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
    """Write new keys and values [rows, kv_heads, width] where the table says."""
    rows, kv_heads, width = key.shape
    widths = {"DK": width, "DV": value.shape[2], "BK": triton.next_power_of_2(width), "BV": triton.next_power_of_2(value.shape[2])}
    new = (key.contiguous(), value.contiguous(), table.pages, table.rows)
    with torch.cuda.device_of(key):
        _write[(rows, kv_heads)](*new, layer, table.layers, kv_heads, **widths, PAGE=PAGE_TOKENS, num_warps=1)


def attend(table: DeviceTable, layer: int, query: torch.Tensor, kv_heads: int, width: int, attn: Any) -> torch.Tensor:
    """Attention of all rows: query [rows, heads, width of keys] -> [rows, heads, width of values]. Few rows, if of no part, are zeros.

    attn: of attention.py, without chosen positions.
    """
    rows, heads, dim = query.shape
    group, splits = heads // kv_heads, table.splits
    each = block_rows(table.most, group)
    blocks = table.cut(each)
    tile = max(16, triton.next_power_of_2(each * group))
    out = (query.new_zeros if rows <= FEW_ROWS else query.new_empty)(rows, heads, width)
    into, sums = out, out
    if splits > 1:
        into = query.new_empty(rows, heads, splits, width, dtype=torch.float32)
        sums = query.new_empty(2, rows, heads, splits, dtype=torch.float32)
    wide = max(dim, width) > 128 or query.dtype == torch.float32
    sinks = out if attn.sinks is None else attn.sinks.contiguous()
    own = {"DV": width, "BV": triton.next_power_of_2(width), "SPLITS": splits, "SINKS": attn.sinks is not None}
    with torch.cuda.device_of(query):
        _attend[(len(blocks), kv_heads, splits)](
            query.contiguous(), into, sums[0], sums[-1], table.pages, blocks, table.split, sinks, layer, table.layers, heads,
            attn.scale, attn.softcap, attn.window, attn.chunk, GROUP=group, DK=dim, BK=max(16, triton.next_power_of_2(dim)), M=tile,
            N=32 if wide else 64, PAGE=PAGE_TOKENS, CAPPED=bool(attn.softcap), WINDOW=bool(attn.window), CHUNK=bool(attn.chunk), **own,
            num_warps=4, num_stages=2,
        )  # fmt: skip
        if splits > 1:
            _join[(rows, heads)](into, sums[0], sums[1], out, table.rows, sinks, heads, **own, num_warps=1)
    return out
