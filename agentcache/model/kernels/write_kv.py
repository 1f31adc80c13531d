"""New keys and values go into a page, compiled at run time. Knows nothing of sequences.

Keys lie transposed in a page: PyTorch's copy there writes one number at a time. Here 16 tokens and 16 channels are turned in registers.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence

import torch

from ...kv import PAGE_TOKENS
from .ir import Code, Names
from .layer_code import shared
from .linear_few import kernels

_SIDE = 16  # of a square that is turned
_LINE = 2 * _SIDE  # channels that share a line of the cache
_ALONE = 1 << 14  # numbers: less is done by one thread before two have met
_HALVES = f"<{_SIDE} x i16>"


def _zipped(code: Code, rows: Sequence[str]) -> Names:
    """The rows of a square of 16-bit numbers as its columns: four perfect shuffles."""
    now = list(rows)
    halves = [[i for pair in range(first, first + 8) for i in (pair, _SIDE + pair)] for first in (0, 8)]
    orders = [", ".join(f"i32 {i}" for i in half) for half in halves]
    for _ in range(4):
        pairs = [(now[i], now[i + 8]) for i in range(8)]
        now = [
            code.do(f"shufflevector {_HALVES} {one}, {_HALVES} {other}, <{_SIDE} x i32> <{order}>")
            for one, other in pairs
            for order in orders
        ]
    return now


def _store(lanes: int, heads: int, dim: int) -> str:
    """Fields: keys and values [tokens, heads, dim], where they go [heads, dim, 512] and [heads, 512, dim], first slot, tokens, heads."""
    code = Code(lanes, "bfloat")
    keys, values, key_page, value_page = (code.pointer(number) for number in range(4))
    slot, tokens = code.field(4), code.field(5)
    last = code.plus(tokens, -1)
    steps = f"<{_SIDE} x i64> <{', '.join(f'i64 {i}' for i in range(_SIDE))}>"

    def square(head: str, channel: str, first: str) -> None:
        left = code.do(f"insertelement <{_SIDE} x i64> poison, i64 {code.do(f'sub i64 {tokens}, {first}')}, i32 0")
        left = code.do(f"shufflevector <{_SIDE} x i64> {left}, <{_SIDE} x i64> poison, <{_SIDE} x i32> zeroinitializer")
        mask = code.do(f"icmp slt {steps}, {left}")
        rows = []
        for i in range(_SIDE):
            token = code.plus(first, i)
            token = code.do(f"select i1 {code.do(f'icmp slt i64 {token}, {last}')}, i64 {token}, i64 {last}")
            at = code.plus(code.times(code.plus(code.times(token, heads), head), dim), channel)
            rows.append(code.do(f"load {_HALVES}, ptr {code.at(keys, 'i16', at)}, align 2"))
        base = code.plus(code.times(code.plus(code.times(head, dim), channel), PAGE_TOKENS), code.plus(slot, first))
        for i, column in enumerate(_zipped(code, rows)):
            target = code.at(key_page, "i16", code.plus(base, i * PAGE_TOKENS))
            code.say(f"call void @llvm.masked.store.v16i16.p0({_HALVES} {column}, ptr {target}, i32 2, <{_SIDE} x i1> {mask})")

    def head(number: str) -> None:
        def channels(channel: str, _: Names) -> Names:
            def squares(first: str, _: Names) -> Names:
                for part in range(0, _LINE, _SIDE):
                    square(number, code.plus(channel, part), first)
                return []

            return code.loop(tokens, _SIDE, [], squares)

        def row(token: str, _: Names) -> Names:
            source = code.at(values, "i16", code.times(code.plus(code.times(token, heads), number), dim))
            place = code.plus(code.times(number, PAGE_TOKENS), code.plus(slot, token))
            target = code.at(value_page, "i16", code.times(place, dim))
            for at in range(0, dim, _SIDE):
                some = code.do(f"load {_HALVES}, ptr {code.at(source, 'i16', str(at))}, align 2")
                code.say(f"store {_HALVES} {some}, ptr {code.at(target, 'i16', str(at))}, align 2")
            return []

        code.loop(dim, _LINE, [], channels)
        code.loop(tokens, 1, [], row)

    return shared(code, code.field(6), head, f"declare void @llvm.masked.store.v16i16.p0({_HALVES}, ptr, i32, <16 x i1>)")


def takes(keys: torch.Tensor) -> bool:
    """Whether keys [tokens, heads, dim] can be stored here."""
    fit = keys.device.type == "cpu" and keys.dtype.itemsize == 2 and keys.shape[2] % _LINE == 0
    return fit and kernels() is not None


def store(keys: torch.Tensor, values: torch.Tensor, key_page: torch.Tensor, value_page: torch.Tensor, slot: int) -> None:
    """keys, values [tokens, heads, dim] into slots from `slot` on of one layer's pages [heads, dim, 512] and [heads, 512, dim]."""
    found = kernels()
    assert found is not None
    tokens, heads, dim = keys.shape
    keys, values = keys.contiguous(), values.contiguous()
    threads = min(heads, torch.get_num_threads()) if keys.numel() > _ALONE else 1
    share = found.compiled(f"store {heads} {dim}", functools.partial(_store, found.lanes, heads, dim))
    where = (keys.data_ptr(), values.data_ptr(), key_page.data_ptr(), value_page.data_ptr())
    found.team(share, (ctypes.c_int64 * 7)(*where, slot, tokens, heads), threads)
