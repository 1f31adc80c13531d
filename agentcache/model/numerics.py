"""Which kernels run on this machine, and whether the bits of a row depend on its neighbours. Knows nothing of models or pages.

`probe` finds out to which multiples rows of dispatch.py and of attention must be padded, so that equal rows get equal bits: what is safe
differs by processor, type and threads.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from blake3 import blake3

from ..kv import PAGE_TOKENS
from .kernels import choice, dispatch, jit
from .kernels.dispatch import Kernel, linear
from .kernels.linear_library import UPCAST_BLOCK, product_of_library

_CANDIDATES = (2, 4, 8, 16, 32)  # never 1: a single row takes another code path in every library tried
_ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 14, 16, 18, 24, 32, 40, 72, 128)
_EVEN = tuple(rows for rows in _ROWS if rows % _CANDIDATES[0] == 0)  # others are padded whatever is found
LEAST_WEIGHT = 2.0**-125  # of a key in attention: what would be less is 0
TILE = 128  # positions that attention of the library's products computes at a time, and to a multiple of which it takes keys
COLUMNS = 1024  # of a probed weight: enough to be cut between threads and into blocks as larger ones are
UNSAFE = torch.__version__ < "2.12"  # oneDNN cuts sums there by shapes and numbers of rows that no probe finds: nothing makes them safe
_PRIME = 65521  # below 2^16
MAX_ROWS = 512  # larger products are never made, so purity is never needed beyond


@dataclass(frozen=True, slots=True)
class Numerics:
    """Kernels and paddings of this machine, as the probe found them. Equal digests on equal weights mean equal bits.

    rows, query_rows: multiples to which rows of forwards and of attention are padded. even: the same of the library's products; 0: it takes
    each row by itself, as its bits depend on others, and most products are compiled. widen: whether 16-bit attention is computed in fp32.
    compiled: whether attention is compiled (paged_attention.py). pure: whether row purity holds with these paddings.
    """

    kernel: Kernel
    widen: bool
    compiled: bool
    rows: int
    even: int
    query_rows: int
    pure: bool
    digest: str
    threads: int
    probe_ms: float


def pattern(rows: int, columns: int, dtype: torch.dtype, device: torch.device, salt: int) -> torch.Tensor:
    """Numbers in [-1, 1] that every machine makes alike, whose products do not add up exactly in any order."""
    down, along = (torch.arange(rows) * 7919 + salt) % _PRIME, torch.arange(columns) * 104729 % _PRIME
    return _numbers(dtype)[down[:, None] + along].to(device)


@functools.cache
def _numbers(dtype: torch.dtype) -> torch.Tensor:
    """The numbers that `pattern` draws from: of g in [0, 2 · prime), ((g² + g) mod prime) · 2 / prime - 1."""
    at = torch.arange(2 * _PRIME)
    return ((at * at + at) % _PRIME).double().div_(_PRIME / 2).sub_(1).to(dtype)


def choose_kernel(dtype: torch.dtype, device: torch.device) -> Kernel:
    """The kernel for linear layers: what this machine was found to run fastest, so that two processes choose alike."""
    return choice.choose(dtype) if device.type == "cpu" else "aten"


def _impure(run: Any, full: torch.Tensor, tried: tuple[int, ...]) -> set[int]:
    """Row counts at which rows differ from those of the full product. run(start, stop) -> rows [start, stop)."""
    top = full.shape[-2]
    return {rows for rows in tried if not torch.equal(run(at := min(37, top - rows), at + rows), full[..., at : at + rows, :])}


def _safe_multiple(impure: set[int]) -> int | None:
    """The least multiple to which rows can be padded; _EVEN has row counts for each."""
    return None if UNSAFE else next((multiple for multiple in _CANDIDATES if all(rows % multiple for rows in impure)), None)


def safe_multiple(run: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> int:
    """To which multiple rows of x [..., rows, ins] are padded for `run`; 0 if no padding makes them independent."""
    return _safe_multiple(_impure(lambda start, stop: run(x[..., start:stop, :].contiguous()), run(x), _EVEN)) or 0


@functools.cache
def safe_rows(outs: int, ins: int, threads: int) -> int:
    """The same for the library's fp32 products with weights [outs, ins]."""
    weight, x = (pattern(rows, ins, torch.float32, torch.device("cpu"), salt) for salt, rows in enumerate((outs, MAX_ROWS)))
    return safe_multiple(lambda x: product_of_library(x, weight, None), x)


def _probed_product(kernel: Kernel, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """What decides the bits of this kernel, before a final rounding to 16 bits could hide a difference."""
    if kernel == "upcast":
        return product_of_library(x.float(), weight.float(), None)
    if kernel in ("onednn", "library"):  # compiled ones are pure by themselves
        return product_of_library(x, weight, None)
    return linear(kernel, x, weight)


def _probe_linear(kernel: Kernel, widths: tuple[int, ...], dtype: torch.dtype, device: torch.device, seen: Any) -> set[int]:
    impure: set[int] = set()
    for salt, width in enumerate(widths):
        weight = pattern(COLUMNS, width, dtype, device, salt)
        x = pattern(MAX_ROWS if salt == 0 else _ROWS[-1], width, dtype, device, salt + 1)
        full = _probed_product(kernel, x, weight)
        impure |= _impure(lambda a, b, x=x, w=weight: _probed_product(kernel, x[a:b].contiguous(), w), full, _EVEN)
        for found in (full, linear(kernel, x, weight)):
            seen.update(found[:32].float().cpu().numpy().tobytes())
    return impure


def _probe_attention(heads: int, head_dim: int, dtype: torch.dtype, device: torch.device, seen: Any) -> set[int]:
    block = PAGE_TOKENS
    keys = torch.stack([pattern(head_dim, block, dtype, device, 11 + h) for h in range(heads)])
    values = torch.stack([pattern(block, head_dim, dtype, device, 31 + h) for h in range(heads)])
    queries = torch.stack([pattern(_ROWS[-1], head_dim, dtype, device, 51 + h) for h in range(heads)])
    weights = torch.stack([pattern(_ROWS[-1], block, dtype, device, 71 + h) for h in range(heads)]).abs()
    impure: set[int] = set()
    cuts = range(TILE, block + 1, TILE)
    for left, right in (*((queries, keys[:, :, :at]) for at in cuts), *((weights[:, :, :at], values[:, :at]) for at in cuts)):
        full = torch.bmm(left, right)
        impure |= _impure(lambda a, b, x=left, y=right: torch.bmm(x[:, a:b].contiguous(), y), full, _EVEN)
        one = torch.cat([torch.bmm(left[h : h + 1].contiguous(), right[h : h + 1]) for h in range(heads)])
        if not torch.equal(one, full):
            impure |= set(_EVEN)  # how many heads run together must not matter either
        seen.update(full[:, :32].float().cpu().numpy().tobytes())
    return impure


def _probe_functions(dtype: torch.dtype, device: torch.device, seen: Any) -> None:
    """What stands between the products, by PyTorch's own kernels: which of them run is decided by ATEN_CPU_CAPABILITY, too."""
    x = pattern(16, 1024, dtype, device, 91) * 4
    wide = x.float()
    for found in (
        torch.nn.functional.silu(x), torch.nn.functional.gelu(x), torch.nn.functional.gelu(x, approximate="tanh"),
        torch.softmax(wide, -1), wide.exp(), wide.pow(2).mean(-1), torch.rsqrt(wide.abs() + 1e-6), wide.cos(), wide.sin(),
    ):  # fmt: skip
        seen.update(found.float().cpu().numpy().tobytes())


def _probe_compiled(heads: int, head_dims: tuple[int, ...], dtype: torch.dtype, seen: Any) -> set[int]:
    from .kernels import paged_attention

    cpu, (dim, width) = torch.device("cpu"), (head_dims[0], head_dims[-1])
    keys, values = (torch.stack([pattern(*shape, dtype, cpu, salt + h) for h in range(heads)])
                    for salt, shape in ((11, (dim, PAGE_TOKENS)), (31, (PAGE_TOKENS, width))))  # fmt: skip
    queries = torch.stack([pattern(_ROWS[-1], dim, dtype, cpu, 51 + h) for h in range(2 * heads)], 1)

    def run(start: int, stop: int) -> torch.Tensor:
        bounds = (dim**-0.5, 0, 0, 30.0, pattern(1, 2 * heads, torch.float32, cpu, 91)[0])
        done = paged_attention.attend(queries[start:stop], [keys], [values], start, *bounds, torch.empty)
        return done.transpose(0, 1).float()

    full = run(0, _ROWS[-1])
    seen.update(full.contiguous().numpy().tobytes())
    return _impure(run, full, _ROWS)


@functools.cache
def _probe(
    dtype: torch.dtype, device: torch.device, widths: tuple[int, ...], heads: int, head_dims: tuple[int, ...], plain: bool, threads: int
) -> Numerics:
    began = time.perf_counter()
    kernel = choose_kernel(dtype, device)
    widen = kernel == "upcast" or (not plain and dtype != torch.float32)
    if compiled := jit.compiler() is not None:
        from .kernels import paged_attention

        compiled = paged_attention.takes(dtype, device, head_dims)
    seen = blake3(f"{kernel} {widen} {compiled} {UPCAST_BLOCK} {MAX_ROWS} {LEAST_WEIGHT} {TILE} transposed".encode())
    with torch.inference_mode():
        _probe_functions(dtype, device, seen)
        even = _safe_multiple(_probe_linear(kernel, widths, dtype, device, seen))
        alone = even != _CANDIDATES[0] and dispatch.compiled(kernel, torch.empty(COLUMNS, COLUMNS, dtype=dtype), dtype) is not None
        seen.update(b"alone" if alone else b"")
        if compiled:
            query_rows = None if _probe_compiled(min(heads, 4), head_dims, dtype, seen) else 1
        else:
            wide = torch.float32 if widen else dtype
            query_rows = _safe_multiple(_probe_attention(min(heads, 4), max(head_dims), wide, device, seen))
    rows = (_CANDIDATES[0] if alone else even or 8) if device.type == "cpu" else 1  # one row takes kernels made for one
    return Numerics(
        kernel=kernel,
        widen=widen,
        compiled=compiled,
        rows=rows,
        even=0 if alone else rows,
        query_rows=query_rows or 8,
        pure=device.type == "cpu" and (alone or even is not None) and query_rows is not None,
        digest=seen.hexdigest(16),
        threads=threads,
        probe_ms=(time.perf_counter() - began) * 1e3,
    )


def probe(
    dtype: torch.dtype, device: torch.device, widths: tuple[int, ...], heads: int, head_dims: Iterable[int], plain: bool = True
) -> Numerics:
    """Find kernel, safe paddings and digest for linear layers of these input widths and heads with keys and values of these widths.

    plain: `Attention.plain` of all layers; others are computed in fp32 by the library. Takes up to 400 ms, once per threads and shapes.
    """
    return _probe(dtype, device, tuple(sorted(set(widths))), heads, tuple(sorted(set(head_dims))), plain, torch.get_num_threads())
