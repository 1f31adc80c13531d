"""Orders in which the libraries' products add up, found by trying: compiled products in the same order have the same bits.

None where no order has the library's bits: then the library computes. Knows nothing of models.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

import torch

from . import linear_few
from .linear_library import product_of_library

COLUMNS = 256  # of a probed weight: enough to be cut between threads as larger ones are
CHAIN_ROWS = 6
_PRIME = 65521  # below 2^16
_BLOCKS = (1 << 20, 512, 1024, 256, 384, 768, 192, 128, 1536, 2048)  # of inputs, the first one is all of them
_CPU = torch.device("cpu")


def pattern(rows: int, columns: int, dtype: torch.dtype, device: torch.device, salt: int) -> torch.Tensor:
    """Numbers in [-1, 1] that every machine makes alike, whose products do not add up exactly in any order."""
    down, along = (torch.arange(rows) * 7919 + salt) % _PRIME, torch.arange(columns) * 104729 % _PRIME
    return _numbers(dtype)[down[:, None] + along].to(device)


@functools.cache
def _numbers(dtype: torch.dtype) -> torch.Tensor:
    """The numbers that `pattern` draws from: of g in [0, 2 · prime), ((g² + g) mod prime) · 2 / prime - 1."""
    at = torch.arange(2 * _PRIME)
    return ((at * at + at) % _PRIME).double().div_(_PRIME / 2).sub_(1).to(dtype)


def _first(blocks: Iterable[int], agrees: Callable[[int], bool]) -> int | None:
    return next((block for block in blocks if agrees(block)), None)


def _likely(ins: int) -> list[int]:
    return sorted(_BLOCKS, key=lambda block: abs(block - ins / 2.5))  # both sides of the usual rule: halves, or the cache's share


@functools.cache
def chain_block(ins: int, threads: int) -> int | None:
    """The number of inputs after which the fp32 product adds up its chain, if that is a plain chain of fused multiply-adds."""
    x, weight = pattern(CHAIN_ROWS, ins, torch.bfloat16, _CPU, 3), pattern(COLUMNS, ins, torch.bfloat16, _CPU, 5)
    expected = product_of_library(x.float(), weight.float(), None)
    few = product_of_library(x.float(), weight[:64].float(), None)
    if not torch.equal(few, expected[:, :64]):
        return None
    return _first(_likely(ins), lambda block: torch.equal(linear_few.product(x.float(), [weight], block), expected))


@functools.cache
def pair_block(outs: int, ins: int, threads: int) -> int | None:
    """`chain_block` of oneDNN's bf16 product, as a chain over pairs of inputs.

    The second half of the inputs takes away what the first one adds, in another order (halves may be blocks), so that rounding is all that
    is left: no other order has its bits.
    """
    x, weight = (pattern(rows, ins // 2, torch.bfloat16, _CPU, salt) for rows, salt in ((CHAIN_ROWS, 3), (COLUMNS, 5)))
    x, weight = torch.cat((x, x.roll(7, 1)), 1), torch.cat((weight, -weight.roll(7, 1)), 1)
    weight = weight.repeat(-(-outs // COLUMNS), 1)[:outs].contiguous()
    bias = pattern(1, outs, torch.bfloat16, _CPU, 7)[0] * 2.0**-20
    expected = product_of_library(x, weight, None), product_of_library(x, weight, bias)

    def agrees(block: int) -> bool:
        wide = linear_few.product(x, [weight], block)
        return torch.equal(wide.to(x.dtype), expected[0]) and torch.equal(wide.add_(bias).to(x.dtype), expected[1])

    return _first(_likely(ins), agrees) if expected[0].any() else None
