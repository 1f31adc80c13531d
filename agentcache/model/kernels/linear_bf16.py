"""Products of more than a few rows with bf16 weights, on processors that multiply pairs of them. Knows nothing of models.

The chains of linear_few.py's pairs, for as many rows as a prefill has: so the bits are oneDNN's here, too. A tile is 64 outputs. A block
of its weights is woven into pairs once, in memory that stays in the second-level cache, and read from there for six rows at a time, 24
chains in registers; meanwhile the lines of the next block are asked for. The library reads, weaves and multiplies one after the other.

    woven    [pairs of a block, 64]    words of two bf16 numbers, w[n, k] and w[n, k + 1]
    sums     [passes, 6, 64]           fp32: what the blocks so far add up to. The last pass may compute rows again that others did
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from .ir import TEAM, Code, Names, every, transposed
from .linear_few import ALONE, kernels, multiplies_pairs

ROWS = 6  # of a pass
TILE = 64  # outputs
_FIELDS = 11
_WIDE = TILE // 16
_W = "<16 x i32>"
_BOTH = "@llvm.x86.avx512bf16.dpbf16ps.512"
_DECLARATIONS = f"""
declare <16 x float> {_BOTH}(<16 x float>, {_W}, {_W})
declare void @llvm.prefetch.p0(ptr, i32, i32, i32)
{TEAM}"""


def takes(weight: torch.Tensor, block: int) -> bool:
    """Whether products with this weight, added up in such blocks of inputs, can run here."""
    outs, ins = weight.shape
    fits = outs % TILE == 0 and ins % 32 == 0 and block % 32 == 0
    return fits and weight.dtype == torch.bfloat16 and weight.device.type == "cpu" and weight.is_contiguous() and multiplies_pairs()


def products(x: torch.Tensor, projections: Sequence[tuple[torch.Tensor, torch.Tensor | None]], block: int) -> list[torch.Tensor]:
    """x [rows, ins] bf16 times each weight [outs, ins] transposed, plus its bias -> [rows, outs] bf16 each.

    Accumulated in blocks of `block` inputs. Only weights that `takes` accepts.
    """
    found = kernels()
    assert found is not None
    x = x.contiguous()
    rows, ins = x.shape
    passes, block = -(-rows // ROWS), min(block, ins)
    out = []
    for weight, bias in projections:
        outs, bias = weight.shape[0], None if bias is None else bias.contiguous()
        share = found.compiled(f"tiles {block} {bias is not None}", _Product(block, bias is not None).text)
        threads = min(torch.get_num_threads(), outs // TILE) if rows * outs * ins > ALONE else 1
        own = 2 * TILE * block + 4 * TILE * ROWS * passes
        scratch = torch.empty(threads * own, dtype=torch.uint8)
        out.append(torch.empty(rows, outs, dtype=x.dtype))
        where = (weight.data_ptr(), x.data_ptr(), out[-1].data_ptr(), 0 if bias is None else bias.data_ptr())
        args = (ctypes.c_int64 * _FIELDS)(*where, outs, ins, outs // TILE, scratch.data_ptr(), own, passes, rows - 1)
        found.team(share, args, threads)
    return out


class _Product:
    """Writes the function for blocks of so many inputs. Its fields stand in the order of `_FIELDS`; own: bytes of a thread's scratch."""

    def __init__(self, block: int, biased: bool) -> None:
        self.block, self.biased = block, biased
        self.code = code = Code(16, "bfloat")
        self.weight, self.x, self.out, self.bias = (code.pointer(number) for number in range(4))
        self.outs, self.ins, self.tiles, self.scratch, self.own, self.passes, self.end = (
            code.field(number) for number in range(4, _FIELDS)
        )

    def text(self) -> str:
        """The module: `share` does the tiles of one thread."""
        code = self.code
        me, start, count = code.mine(self.tiles)
        self.woven = code.do(f"inttoptr i64 {code.plus(self.scratch, code.do(f'mul i64 {me}, {self.own}'))} to ptr")
        self.sums = code.at(self.woven, "i16", str(TILE * self.block))
        code.loop(count, 1, [], lambda i, _: self._tile(code.plus(start, i)))
        return code.module(_DECLARATIONS)

    def _tile(self, tile: str) -> Names:
        code = self.code
        self.first = code.times(tile, TILE)
        self.rows = code.at(self.weight, "i16", code.do(f"mul i64 {self.first}, {self.ins}"))
        numbers = code.times(self.passes, ROWS * TILE)

        def none(at: str, _: Names) -> Names:
            code.say(f"store {code.floats} {every(16, -0.0)}, ptr {code.at(self.sums, 'float', at)}, align 4")
            return []

        code.loop(numbers, 16, [], none)
        code.loop(self.ins, self.block, [], self._block)
        code.loop(self.passes, 1, [], self._store)
        return []

    def _block(self, k: str, _: Names) -> Names:
        code = self.code
        left = code.do(f"sub i64 {self.ins}, {k}")
        more = code.do(f"icmp ugt i64 {left}, {self.block}")
        self.span = code.do(f"select i1 {more}, i64 {self.block}, i64 {left}")
        self.k = k
        beside = code.do(f"select i1 {more}, i64 {code.plus(k, self.block)}, i64 {code.times(self.ins, TILE)}")
        self.following = code.at(self.rows, "i16", beside)
        code.loop(_WIDE, 1, [], self._weave)
        code.loop(self.passes, 1, [], self._pass)
        return []

    def _weave(self, group: str, _: Names) -> Names:
        """The block's weights of 16 outputs, as pairs."""
        code = self.code
        first = code.times(group, 16)
        source = code.at(self.rows, "i16", code.plus(code.do(f"mul i64 {first}, {self.ins}"), self.k))
        target = code.at(self.woven, "i32", first)

        def some(k: str, _: Names) -> Names:
            at = code.at(source, "i16", k)
            lines = []
            for _row in range(16):
                lines.append(code.do(f"load {_W}, ptr {at}, align 2"))
                at = code.at(at, "i16", self.ins)
            for j, words in enumerate(transposed(code.do, lines)):
                code.say(f"store {_W} {words}, ptr {code.at(target, 'i32', code.plus(code.times(k, TILE // 2), j * TILE))}, align 4")
            return []

        return code.loop(self.span, 32, [], some)

    def _row(self, number: str, m: int) -> str:
        """Row m of a pass; the last one again where there is none."""
        code = self.code
        row = code.plus(code.times(number, ROWS), m)
        return code.do(f"select i1 {code.do(f'icmp slt i64 {row}, {self.end}')}, i64 {row}, i64 {self.end}")

    def _cells(self, number: str) -> Names:
        """The addresses of a pass's sums, row by row."""
        code = self.code
        base = code.at(self.sums, "float", code.times(number, ROWS * TILE))
        return [code.at(base, "float", str(16 * n)) for n in range(ROWS * _WIDE)]

    def _pass(self, number: str, _: Names) -> Names:
        code = self.code
        starts = [code.plus(code.do(f"mul i64 {self._row(number, m)}, {self.ins}"), self.k) for m in range(ROWS)]
        rows = [code.at(self.x, "i16", start) for start in starts]
        asked = code.times(number, self.block // 2)

        def pair(k: str, chains: Names) -> Names:
            self._fetch(code.plus(asked, code.do(f"lshr i64 {k}, 1")))
            at = code.at(self.woven, "i32", code.times(k, TILE // 2))
            pieces = [code.do(f"load {_W}, ptr {code.at(at, 'i32', str(16 * u))}, align 4") for u in range(_WIDE)]
            return code.chains(_BOTH, pieces, [code.at(row, "i16", k) for row in rows], chains)

        chains = code.loop(self.span, 4, [(code.floats, "zeroinitializer")] * (ROWS * _WIDE), code.twice(pair))
        for cell, chain in zip(self._cells(number), chains):
            code.say(f"store {code.floats} {code.both('fadd', code.load(cell), chain)}, ptr {cell}, align 4")
        return []

    def _fetch(self, line: str) -> None:
        """Asks for one line of the next block; the passes go over them again and again."""
        code = self.code
        each = 1 << (self.block // 32 - 1).bit_length()  # lines of an output, or some more
        row = code.do(f"and i64 {code.do(f'lshr i64 {line}, {each.bit_length() - 1}')}, {TILE - 1}")
        number = code.plus(code.do(f"mul i64 {row}, {self.ins}"), code.times(code.do(f"and i64 {line}, {each - 1}"), 32))
        code.say(f"call void @llvm.prefetch.p0(ptr {code.at(self.following, 'i16', number)}, i32 0, i32 2, i32 1)")

    def _store(self, number: str, _: Names) -> Names:
        code = self.code
        biases = [code.load_half(code.at(self.bias, "i16", code.plus(self.first, 16 * u))) for u in range(_WIDE)] if self.biased else []
        cells = self._cells(number)
        for m in range(ROWS):
            target = code.at(self.out, "i16", code.plus(code.do(f"mul i64 {self._row(number, m)}, {self.outs}"), self.first))
            for u in range(_WIDE):
                value = code.load(cells[m * _WIDE + u])
                value = code.both("fadd", value, biases[u]) if self.biased else value
                half = code.do(f"fptrunc {code.floats} {value} to <16 x bfloat>")
                code.say(f"store <16 x bfloat> {half}, ptr {code.at(target, 'i16', str(16 * u))}, align 2")
        return []
