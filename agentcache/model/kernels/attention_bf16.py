"""Attention on processors that multiply pairs of bf16 numbers, compiled at run time. Knows nothing of models.

What `attention.py` defines, for any number of rows, over keys and values as they are stored in pages:

    s[r, j] = scale · (chain over pairs of channels of q[r] · K[:, j])          e[r, j] = exp(s[r, j] - max of s[r] over what r sees)
    out[r]  = (chain over pairs of slots of bf16(e[r, j]) · V[j]) / Σ e[r, j]   the sum in 16 lanes, slots ascending, then lane by lane

A chain is fp32 and adds one pair of products after the other, so a row's bits depend neither on the rows beside it nor on how many slots
are looked at that it does not see: those add exact zeros. A task is one head and some rows, whose scores stay in the second-level cache.
Where it has many rows, a tile of keys or values is woven into pairs once and read from the first-level cache for all of them.
Needs llvmlite (the extra `cpu`) and AVX-512 with bf16; processors with matrix units (AMX) are faster by their library.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence

import torch

from ...kv import PAGE_TOKENS
from .attention_bf16_code import FIELDS, ROWS, SPAN, Task, tile_bytes
from .linear_few import ALONE, kernels, multiplies_pairs

TASK_BYTES = 1 << 20  # of a task's scores
LEAST_PASSES, MOST_PASSES = 2, 16  # of a task: keys and values are read once for all of them


def takes(dtype: torch.dtype, device: torch.device, dim: int) -> bool:
    """Whether attention over pages of this type can run here; dim: channels of a head."""
    return dtype == torch.bfloat16 and device.type == "cpu" and dim % 16 == 0 and multiplies_pairs()


def attend(
    q: torch.Tensor,
    keys: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
    first: int,
    scale: float,
    window: int,
    room: Callable[[int], torch.Tensor],
) -> torch.Tensor:
    """q [tokens, query heads, dim] bf16 at positions from `first` on; keys [kv heads, dim, 512] and values [kv heads, 512, dim] of all
    pages up to the last one -> as q.

    window: how many positions a token sees, 0 for all before it. room(n): n fp32 numbers to work in.
    """
    found = kernels()
    assert found is not None
    q = q.contiguous()
    tokens, dim = q.shape[0], q.shape[2]
    heads = keys[0].shape[0]
    group = q.shape[1] // heads
    rows = tokens * group  # of one kv head
    out = torch.empty_like(q)
    addresses = [(ctypes.c_int64 * len(pages))(*(page.data_ptr() for page in pages)) for pages in (keys, values)]
    slots = min(len(keys) * PAGE_TOKENS, window + tokens + 2 * SPAN if window else len(keys) * PAGE_TOKENS)
    line = 4 * (slots + dim) + 128  # what is mixed, the sum, and so that lines do not lie on each other in the cache
    bits = struct.unpack("I", struct.pack("f", scale))[0]
    at = 0
    while at < rows:
        count = max(n for n in ROWS if n <= rows - at)
        passes = -(-(rows - at) // count) if count == ROWS[-1] else 1
        per = max(LEAST_PASSES, min(MOST_PASSES, TASK_BYTES // (count * line)))
        chunks = -(-passes // per)
        tasks = heads * chunks
        threads = min(torch.get_num_threads(), tasks) if heads * rows * slots * dim > ALONE else 1
        own = tile_bytes(dim) + per * count * line
        scratch = room(threads * own // 4)
        share = found.compiled(f"pairs {count} {dim}", Task(count, dim).text)
        where = (*(ctypes.addressof(each) for each in addresses), q.data_ptr(), out.data_ptr())
        what = (heads, at, passes, per, first, group, window, bits)
        # fields of the function, see Task
        args = (ctypes.c_int64 * FIELDS)(*where, *what, tasks, scratch.data_ptr(), own, line, chunks, rows - 1)
        found.team(share, args, threads)
        at += passes * count
    return out
