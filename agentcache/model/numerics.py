"""Which kernels run on this machine, and whether the bits of a row depend on its neighbours. Knows nothing of models or pages.

Row purity: one row of a matrix product must not change when other rows stand beside it. Libraries pick other code for other row counts,
so each product is padded to a safe multiple of rows. What is safe differs by processor, type and threads: `probe` finds out.

    kernel    product of activations x with a weight w [out, in]
    onednn    oneDNN's inner product: chosen wherever PyTorch has it; pure from 2 rows on where it was tried. Few bf16 rows: jit.py, with
              the same bits, on processors that multiply pairs of bf16 numbers, more of them jit_tiles.py
    upcast    the same in fp32, w converted block by block: for 16-bit weights on processors without 16-bit matrix units,
              where it is 2 to 10 times faster than the emulation and rounds once, at the end. Few rows: jit.py, with the same bits
    aten      torch.nn.functional.linear
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from blake3 import blake3
from torch.nn import functional

from ..kv import PAGE_TOKENS
from . import jit, jit_attention, jit_pairs, jit_tiles

Kernel = Literal["onednn", "upcast", "aten"]
Projection = tuple[torch.Tensor, "torch.Tensor | None"]  # weight [out, in] and bias [out]
SINGLE_ROW_OUTS = 16384  # upcast weights with more outputs (a vocabulary) see few rows: each runs alone, in the weight's own type
UPCAST_BLOCK = 1024  # rows of a weight converted at a time: fits the second-level cache, and large enough to amortise a call
_CANDIDATES = (2, 4, 8, 16, 32)  # never 1: a single row takes another code path in every library tried
_ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 14, 16, 18, 24, 32, 40, 72, 128)
_COLUMNS = 256  # of a probed weight: enough to be cut between threads as larger ones are
_CHAIN_ROWS = 6
_BLOCKS = (1 << 20, 512, 1024, 256, 384, 768, 192, 128, 1536, 2048)  # of inputs, the first one is all of them
LEAST_WEIGHT = 2.0**-125  # of a key, beside a largest one of 1: what would be less is 0
MAX_ROWS = 512  # larger products are never made, so purity is never needed beyond


@dataclass(frozen=True, slots=True)
class Numerics:
    """What the probe found. Equal digests on equal weights mean equal bits.

    rows, query_rows: multiples to which rows of linear layers and of attention are padded.
    widen: 16-bit attention is computed in fp32. pairs: attention is compiled (jit_pairs.py). pure: row purity holds with these paddings.
    """

    kernel: Kernel
    widen: bool
    pairs: bool
    rows: int
    query_rows: int
    pure: bool
    digest: str
    threads: int
    probe_ms: float


def has_16bit_units(dtype: torch.dtype) -> bool:
    """Whether this processor multiplies 16-bit numbers of this type."""
    asks = {torch.bfloat16: ("_is_avx512_bf16_supported", "_is_amx_tile_supported"), torch.float16: ("_is_amx_fp16_supported",)}
    return any(getattr(torch.cpu, ask, lambda: False)() for ask in asks.get(dtype, ()))


def choose_kernel(dtype: torch.dtype, device: torch.device) -> Kernel:
    """The kernel for linear layers: a pure function of the machine, so that two processes choose alike."""
    if device.type != "cpu":
        return "aten"
    if dtype in (torch.bfloat16, torch.float16) and not has_16bit_units(dtype):
        return "upcast"
    return "onednn" if _onednn_takes(dtype) else "aten"


@functools.cache
def _onednn_takes(dtype: torch.dtype) -> bool:
    inner = _onednn_linear()
    if inner is None:
        return False
    try:
        inner(torch.ones(2, 32, dtype=dtype), torch.ones(8, 32, dtype=dtype), None, "none", [], "")
    except RuntimeError:  # oneDNN has no code for this type on this processor
        return False
    return True


@functools.cache
def _onednn_linear() -> Any:
    if not torch.backends.mkldnn.is_available():
        return None
    return getattr(torch.ops.mkldnn, "_linear_pointwise", None)


def _product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    inner = _onednn_linear()
    if inner is None:
        return functional.linear(x, weight, bias)
    return inner(x, weight, bias, "none", [], "")  # type: ignore[no-any-return]


_scratch = threading.local()


def scratch(name: str, elements: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A flat buffer of this thread that lives on between calls; grown when too small. Contents are whatever the last user left."""
    held: torch.Tensor | None = getattr(_scratch, name, None)
    if held is None or held.numel() < elements or held.dtype != dtype:
        with torch.inference_mode(False):  # else it could only be used in that mode from now on
            held = torch.empty(elements, dtype=dtype)
        setattr(_scratch, name, held)
    return held[:elements]


def _upcast_linears(x: torch.Tensor, projections: Sequence[Projection]) -> list[torch.Tensor]:
    """Each product by itself has the same bits: only the work on x is shared."""
    (rows, ins), wide_x = x.shape, x.float()
    outs = [weight.shape[0] for weight, _ in projections]
    if all(jit.takes(weight, rows) for weight, _ in projections) and (order := chain_block(ins, torch.get_num_threads())):
        wide = jit.product(wide_x, [weight for weight, _ in projections], order)
        for part, (_, bias) in zip(wide.split(outs, 1), projections):
            if bias is not None:
                part.add_(bias.float())
        return list(wide.to(x.dtype).split(outs, 1))
    return [_upcast_linear(x, wide_x, *projection) for projection in projections]


def _upcast_linear(x: torch.Tensor, wide_x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    outs, ins = weight.shape
    out = torch.empty(x.shape[0], outs, dtype=x.dtype)
    for start in range(0, outs, UPCAST_BLOCK):
        stop = min(outs, start + UPCAST_BLOCK)
        block = scratch("weight", (stop - start) * ins).view(stop - start, ins)
        block.copy_(weight[start:stop])
        wide = _product(wide_x, block, None)
        out[:, start:stop] = wide if bias is None else wide.add_(bias[start:stop].float())
    return out


@functools.cache
def chain_block(ins: int, threads: int) -> int | None:
    """After how many inputs the fp32 product adds up what it has, if it is otherwise a plain chain of fused multiply-adds.

    Found by trying the sizes that such kernels use; None if none gives its bits, and then few rows run as many do.
    """
    x = _pattern(_CHAIN_ROWS, ins, torch.bfloat16, torch.device("cpu"), 3)
    weight = _pattern(_COLUMNS, ins, torch.bfloat16, torch.device("cpu"), 5)
    expected = _product(x.float(), weight.float(), None)
    few = _product(x.float(), weight[:64].float(), None)
    if not torch.equal(few, expected[:, :64]):
        return None
    likely = sorted(_BLOCKS, key=lambda block: abs(block - ins / 2.5))  # both sides of the usual rule: halves, or the cache's share
    return next((block for block in likely if torch.equal(jit.product(x.float(), [weight], block), expected)), None)


def _pairs(weight: torch.Tensor, rows: int) -> int | None:
    """In which blocks the compiled product of so many rows adds up, if it can take the library's place here."""
    if weight.dtype != torch.bfloat16 or not jit.takes(weight, 1) or not jit.multiplies_pairs():
        return None
    block = pair_block(*weight.shape, torch.get_num_threads())
    return block if block and (rows <= jit.PASS or jit_tiles.takes(weight, block)) else None


def _paired(flat: torch.Tensor, projections: Sequence[Projection], block: int) -> list[torch.Tensor]:
    """Compiled products of flat [rows, ins]: few rows for their own sake, more of them by tiles."""
    if len(flat) > jit.PASS:
        return jit_tiles.products(flat, projections, block)
    outs = [weight.shape[0] for weight, _ in projections]
    wide = jit.product(flat, [weight for weight, _ in projections], block)
    parts = wide.split(outs, 1)
    return [(part if bias is None else part.add_(bias)).to(flat.dtype) for part, (_, bias) in zip(parts, projections)]


@functools.cache
def pair_block(outs: int, ins: int, threads: int) -> int | None:
    """`chain_block` of oneDNN's bf16 product, as a chain over pairs of inputs; None if no size gives its bits.

    The second half of the inputs takes away what the first one adds, in another order (halves may be blocks), so that rounding is all that
    is left: no other order has its bits.
    """
    x, weight = (_pattern(rows, ins // 2, torch.bfloat16, torch.device("cpu"), salt) for rows, salt in ((_CHAIN_ROWS, 3), (_COLUMNS, 5)))
    x, weight = torch.cat((x, x.roll(7, 1)), 1), torch.cat((weight, -weight.roll(7, 1)), 1)
    weight = weight.repeat(-(-min(outs, SINGLE_ROW_OUTS) // _COLUMNS), 1)[:outs].contiguous()
    bias = _pattern(1, len(weight), torch.bfloat16, torch.device("cpu"), 7)[0] * 2.0**-20
    expected = _product(x, weight, None), _product(x, weight, bias)

    def agrees(block: int) -> bool:
        wide = jit.product(x, [weight], block)
        return torch.equal(wide.to(x.dtype), expected[0]) and torch.equal(wide.add_(bias).to(x.dtype), expected[1])

    likely = sorted(_BLOCKS, key=lambda block: abs(block - ins / 2.5))
    return next((block for block in likely if agrees(block)), None) if expected[0].any() else None


@functools.cache
def attention_order(dim: int, threads: int) -> tuple[int, int] | None:
    """The same for attention: after how many channels the scores, and after how many keys the mixed values, add up what they have."""
    keys = torch.stack([_pattern(dim, PAGE_TOKENS, torch.bfloat16, torch.device("cpu"), 7 + h) for h in range(2)])
    values = torch.stack([_pattern(PAGE_TOKENS, dim, torch.bfloat16, torch.device("cpu"), 9 + h) for h in range(2)])
    queries = torch.stack([_pattern(_CHAIN_ROWS, dim, torch.bfloat16, torch.device("cpu"), 13 + h) for h in range(2)]).float()
    weights = torch.stack([_pattern(_CHAIN_ROWS, PAGE_TOKENS, torch.float32, torch.device("cpu"), 17 + h) for h in range(4)])
    weights = weights.abs().view(2, 2, _CHAIN_ROWS, PAGE_TOKENS)
    scores, found = torch.bmm(queries, keys.float()), torch.empty(1, 2, _CHAIN_ROWS, PAGE_TOKENS)
    mixed = torch.zeros(2, _CHAIN_ROWS, dim).baddbmm_(weights[0], values.float()).baddbmm_(weights[1], values.float())

    def scored(block: int) -> bool:
        jit_attention.scores(queries[None], [keys], found, block)
        return torch.equal(found[0], scores)

    def mixes(block: int) -> bool:
        return torch.equal(jit_attention.mix(weights, [values, values], 1, block)[0], mixed)

    first = next((block for block in _BLOCKS if scored(block)), None)
    second = next((block for block in (256, *_BLOCKS) if mixes(block)), None)
    return (first, second) if first and second else None


def _vocabulary(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """A product with very many outputs, of which few rows are ever asked: each row by itself."""
    if jit.takes(weight, 1):
        wide = torch.cat([jit.product(rows.float(), [weight], weight.shape[1]) for rows in x.split(jit.MOST_ROWS)])
        return (wide if bias is None else wide.add_(bias.float())).to(x.dtype)
    return torch.cat([functional.linear(row, weight, bias) for row in x.split(1)])


def linear(kernel: Kernel, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [..., in] times weight [out, in] transposed, plus bias [out], with the given kernel."""
    return linears(kernel, x, [(weight, bias)])[0]


def linears(kernel: Kernel, x: torch.Tensor, projections: Sequence[Projection]) -> list[torch.Tensor]:
    """The same for several projections (weight, bias) of one x; they may come back as views of one tensor, side by side."""
    if (
        kernel == "upcast"
        and x.device.type == "cpu"
        and x.dtype in (torch.bfloat16, torch.float16)
        and all(weight.dtype == x.dtype and weight.shape[0] < SINGLE_ROW_OUTS for weight, _ in projections)
    ):
        parts = _upcast_linears(x.reshape(-1, x.shape[-1]), projections)
        return [part.unflatten(0, x.shape[:-1]) if x.ndim != 2 else part for part in parts]
    if kernel == "onednn" and x.device.type == "cpu" and x.dtype == torch.bfloat16:
        flat = x.reshape(-1, x.shape[-1])
        blocks = {_pairs(weight, len(flat)) for weight, _ in projections}
        if len(blocks) == 1 and (block := blocks.pop()):
            return [part.unflatten(0, x.shape[:-1]) if x.ndim != 2 else part for part in _paired(flat, projections, block)]
    return [_linear(kernel, x, weight, bias) for weight, bias in projections]


def by_itself(kernel: Kernel, weight: torch.Tensor, rows: int) -> bool:
    """Whether the product of so many rows with this weight computes each of them by itself: none has to be padded."""
    if kernel == "onednn":
        return _pairs(weight, rows) is not None
    if kernel != "upcast" or weight.shape[0] >= SINGLE_ROW_OUTS:
        return kernel == "upcast"
    return jit.takes(weight, rows) and chain_block(weight.shape[1], torch.get_num_threads()) is not None


def _linear(kernel: Kernel, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    if kernel == "aten" or x.device.type != "cpu" or weight.dtype != x.dtype or not x.is_floating_point():
        return functional.linear(x, weight, bias)
    flat = x.reshape(-1, x.shape[-1])
    if kernel == "upcast" and weight.shape[0] >= SINGLE_ROW_OUTS:
        out = _vocabulary(flat, weight, bias)
    else:
        out = _product(flat.contiguous(), weight, bias)
    return out.view(*x.shape[:-1], weight.shape[0])


class RowPureLinear(torch.overrides.TorchFunctionMode):
    """While active in a thread, `torch.nn.functional.linear` of stock modules runs on the given kernel."""

    def __init__(self, kernel: Kernel) -> None:
        super().__init__()
        self.kernel = kernel

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is functional.linear:
            return linear(self.kernel, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _pattern(rows: int, columns: int, dtype: torch.dtype, device: torch.device, salt: int) -> torch.Tensor:
    """Numbers in [-1, 1] that every machine makes alike, whose products do not add up exactly in any order."""
    grid = torch.arange(rows, dtype=torch.int64)[:, None] * 7919 + torch.arange(columns, dtype=torch.int64)[None] * 104729 + salt
    return ((grid * grid + grid) % 65521).double().div_(32760.5).sub_(1).to(dtype).to(device)


def _impure(run: Any, full: torch.Tensor, tried: tuple[int, ...]) -> set[int]:
    """Row counts at which rows differ from those of the full product. run(start, stop) -> rows [start, stop)."""
    top = full.shape[-2]
    bad = set()
    for rows in tried:
        start = min(37, top - rows)
        if not torch.equal(run(start, start + rows), full[..., start : start + rows, :]):
            bad.add(rows)
    return bad


def _safe_multiple(impure: set[int], tried: tuple[int, ...]) -> int | None:
    for multiple in _CANDIDATES:
        if not any(rows % multiple == 0 for rows in impure) and any(rows % multiple == 0 for rows in tried):
            return multiple
    return None


def _probed_product(kernel: Kernel, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """What decides the bits of this kernel, before a final rounding to 16 bits could hide a difference."""
    return _product(x.float(), weight.float(), None) if kernel == "upcast" else linear(kernel, x, weight)


def _probe_linear(kernel: Kernel, widths: tuple[int, ...], dtype: torch.dtype, device: torch.device, seen: Any) -> set[int]:
    impure: set[int] = set()
    for salt, width in enumerate(widths):
        weight = _pattern(_COLUMNS, width, dtype, device, salt)
        x = _pattern(MAX_ROWS if salt == 0 else _ROWS[-1], width, dtype, device, salt + 1)
        full = _probed_product(kernel, x, weight)
        impure |= _impure(lambda a, b, x=x, w=weight: _probed_product(kernel, x[a:b].contiguous(), w), full, _ROWS)
        seen.update(full[:32].float().cpu().numpy().tobytes())
    return impure


def _probe_attention(heads: int, head_dim: int, dtype: torch.dtype, device: torch.device, seen: Any) -> set[int]:
    block = MAX_ROWS
    keys = torch.stack([_pattern(head_dim, block, dtype, device, 11 + h) for h in range(heads)])
    values = torch.stack([_pattern(block, head_dim, dtype, device, 31 + h) for h in range(heads)])
    queries = torch.stack([_pattern(_ROWS[-1], head_dim, dtype, device, 51 + h) for h in range(heads)])
    weights = torch.stack([_pattern(_ROWS[-1], block, dtype, device, 71 + h) for h in range(heads)]).abs()
    impure: set[int] = set()
    for left, right in ((queries, keys), (weights, values)):
        full = torch.bmm(left, right)
        impure |= _impure(lambda a, b, x=left, y=right: torch.bmm(x[:, a:b].contiguous(), y), full, _ROWS)
        one = torch.cat([torch.bmm(left[h : h + 1].contiguous(), right[h : h + 1]) for h in range(heads)])
        if not torch.equal(one, full):
            impure |= set(_ROWS)  # how many heads run together must not matter either
        seen.update(full[:, :32].float().cpu().numpy().tobytes())
    return impure


def _probe_pairs(heads: int, head_dim: int, seen: Any) -> set[int]:
    keys, values = (torch.stack([_pattern(*shape, torch.bfloat16, torch.device("cpu"), salt + h) for h in range(heads)])
                    for salt, shape in ((11, (head_dim, PAGE_TOKENS)), (31, (PAGE_TOKENS, head_dim))))  # fmt: skip
    queries = torch.stack([_pattern(_ROWS[-1], head_dim, torch.bfloat16, torch.device("cpu"), 51 + h) for h in range(2 * heads)], 1)

    def run(start: int, stop: int) -> torch.Tensor:
        done = jit_pairs.attend(queries[start:stop], [keys], [values], start, head_dim**-0.5, 0, torch.empty)
        return done.transpose(0, 1).float()

    full = run(0, _ROWS[-1])
    seen.update(full.contiguous().numpy().tobytes())
    return _impure(run, full, _ROWS)


@functools.cache
def _probe(dtype: torch.dtype, device: torch.device, widths: tuple[int, ...], heads: int, head_dim: int, threads: int) -> Numerics:
    began = time.perf_counter()
    kernel = choose_kernel(dtype, device)
    widen = kernel == "upcast"
    pairs = not widen and jit_pairs.takes(dtype, device, head_dim)
    seen = blake3(f"{kernel} {widen} {pairs} {UPCAST_BLOCK} {MAX_ROWS} {LEAST_WEIGHT}".encode())
    with torch.inference_mode():
        rows = _safe_multiple(_probe_linear(kernel, widths, dtype, device, seen), _ROWS)
        if pairs:
            query_rows = None if _probe_pairs(min(heads, 4), head_dim, seen) else 1
        else:
            wide = torch.float32 if widen else dtype
            query_rows = _safe_multiple(_probe_attention(min(heads, 4), head_dim, wide, device, seen), _ROWS)
    return Numerics(
        kernel=kernel,
        widen=widen,
        pairs=pairs,
        rows=rows or 8,
        query_rows=query_rows or 8,
        pure=device.type == "cpu" and rows is not None and query_rows is not None,
        digest=seen.hexdigest(16),
        threads=threads,
        probe_ms=(time.perf_counter() - began) * 1e3,
    )


def probe(dtype: torch.dtype, device: torch.device, widths: tuple[int, ...], heads: int, head_dim: int) -> Numerics:
    """Find kernel, safe paddings and digest for linear layers of these input widths and this attention shape.

    Takes up to 200 ms, is remembered for the process per thread count and shape.
    """
    return _probe(dtype, device, tuple(sorted(set(widths))), heads, head_dim, torch.get_num_threads())
