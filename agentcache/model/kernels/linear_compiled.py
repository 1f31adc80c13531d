"""Products with weights, compiled at run time: of any number of rows, each by itself. Knows nothing of models.

A product adds up in the same order whether linear_few.py or linear_many.py computes it: only time decides between them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from . import jit
from .linear_library import Projection
from .scratch import scratch

FEW_ROWS = 16  # above it, weaving the weights first is faster
LINE = 64  # bytes: of each row a kernel reads whole lines


def takes(weight: torch.Tensor) -> bool:
    """True if products with this weight [outs, ins] can run here. It may lie transposed, as [ins, outs], unless it is int8."""
    found = jit.compiler() if weight.dtype in jit.NUMBERS or scale_of(weight) is not None else None
    if found is None or weight.device.type != "cpu" or not (weight.is_contiguous() or _transposed(weight)):
        return False
    return fits(weight, found.lanes, weight.itemsize)


def fits(weight: torch.Tensor, lanes: int, itemsize: int) -> bool:
    """True if kernels of so many lanes take the shape [outs, ins] of this weight, with numbers of so many bytes."""
    from .linear_many import TILES

    outs, ins = weight.shape
    return outs % (TILES[lanes] if itemsize == 1 else lanes) == 0 and ins % max(4 * lanes, LINE // itemsize) == 0


def scale_of(weight: torch.Tensor) -> torch.Tensor | None:
    """The scales fp32 [outs] of an int8 weight, which its parameter holds; None of others."""
    return getattr(weight, "scale", None) if weight.dtype == torch.int8 else None


def _transposed(weight: torch.Tensor) -> bool:
    return weight.stride(0) == 1 and weight.dtype != torch.int8


def chains(x: torch.Tensor, projections: Sequence[Projection]) -> list[torch.Tensor]:
    """x [rows, ins] times each weight [outs, ins] transposed, plus its bias [outs], computed in fp32 -> [rows, outs] each.

    All of x's type, or int8. Only weights that `takes` accepts.
    """
    return (_few if len(x) <= FEW_ROWS else _many)(x.contiguous(), projections, False)


def pairs(x: torch.Tensor, projections: Sequence[Projection]) -> list[torch.Tensor]:
    """The same of bf16 numbers, multiplied in pairs where the processor does that."""
    return (_few if len(x) <= FEW_ROWS else _many)(x.contiguous(), projections, True)


def quantized(x: torch.Tensor, projections: Sequence[Projection]) -> list[torch.Tensor]:
    """The same of int8 weights, in pairs where x is bf16 and the processor multiplies those."""
    return (pairs if in_pairs(x.dtype) else chains)(x, projections)


def in_pairs(dtype: torch.dtype) -> bool:
    """True if rows of this type times int8 weights are multiplied in pairs."""
    return dtype == torch.bfloat16 and jit.multiplies_pairs()


def _few(x: torch.Tensor, projections: Sequence[Projection], pairs: bool) -> list[torch.Tensor]:
    from . import linear_few

    rows, done = len(x), []
    count = next((n for n in linear_few.ROWS if n >= rows), linear_few.ROWS[-1])
    if short := -rows % count:
        x = torch.cat((x, x.new_zeros(short, x.shape[1])))
    wide = x if pairs else x.float()
    for weight, bias in projections:
        if _transposed(weight):
            from . import linear_transposed

            out = torch.empty(len(x), len(weight), dtype=torch.float32)
            linear_transposed.run(wide, weight, out, count, pairs, x.dtype)
            out = (out if bias is None else out.add_(bias)).to(x.dtype)
        else:
            out = x.new_empty(len(x), len(weight))
            linear_few.run(wide, weight, None if bias is None else bias.contiguous(), out, count, pairs, scale_of(weight))
        done.append(out[:rows])
    return done


def _many(x: torch.Tensor, projections: Sequence[Projection], pairs: bool) -> list[torch.Tensor]:
    from . import linear_many

    (rows, ins), found, element = x.shape, jit.compiler(), jit.NUMBERS[x.dtype]
    assert found is not None
    passes, words = -(-rows // linear_many.ROWS), ins >> int(pairs)
    packed, parts = scratch("rows", passes * words * linear_many.ROWS), None  # parts: the order in which x is packed; None: not yet
    where, packing = (x.data_ptr(), packed.data_ptr()), jit.threads_for(rows * ins, passes, linear_many.ALONE)
    own = linear_many.scratch_bytes(found.lanes, passes)
    room = scratch("panels", torch.get_num_threads() * own // 4)
    done = []
    for weight, bias in projections:
        if (lying := _transposed(weight)) is not parts:
            jit.run(linear_many.pack_code, element, (pairs, lying), packing, *where, words, passes, rows - 1)
            parts = lying
        outs = weight.shape[0]
        tiles, rest = divmod(outs, linear_many.TILES[found.lanes])
        out, bias = x.new_empty(rows, outs), None if bias is None else bias.contiguous()
        scale = scale_of(weight)
        addresses = map(jit.address, (weight, packed, out, bias, room, scale))
        sizes = outs, words, tiles, own, passes, rows - 1, weight.stride(1)
        if tiles:
            threads = jit.threads_for(rows * outs * ins, tiles)
            jit.run(linear_many.product_code, element, (pairs, scale is not None, bias is not None, lying), threads, *addresses, *sizes)
        if rest:  # outputs of no whole tile
            out[:, -rest:] = _few(x, [(weight[-rest:], None if bias is None else bias[-rest:])], pairs)[0]
        done.append(out)
    return done


def compile_products(int8: bool = False) -> None:
    """Have the products of rows in bf16 ready: they depend on the processor alone, so weights may load meanwhile."""
    if (found := jit.compiler()) is not None:
        from . import linear_few, linear_many

        pairs = jit.multiplies_pairs()
        for rows in linear_few.ROWS:
            found.function(linear_few.product_code, "bfloat", rows, pairs, int8, False)
        found.function(linear_many.pack_code, "bfloat", pairs, False)
        found.function(linear_many.product_code, "bfloat", pairs, int8, False, False)
