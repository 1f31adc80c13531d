"""Checkpoints of a page as bytes: what the last layers of its blob hold. The blob authenticates them.

length (8) | [[slots, [[dtype, shape] | null, ...]], ...] as JSON | the states one after another
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator

import torch

from ...checkpoints import Checkpoint
from ...kv import Page
from .blob import view

_DTYPES = {str(dtype): dtype for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32)}


def pack(page: Page, tokens: int) -> bytes:
    """The first and the last checkpoint within the first `tokens` slots; empty if there is none."""
    within = sorted(slots for slots in page.checkpoints if slots <= tokens)
    if not within:
        return b""
    kept = [(slots, page.checkpoints[slots].states) for slots in sorted({within[0], within[-1]})]
    kinds = [[slots, [state if state is None else [str(state.dtype), list(state.shape)] for state in states]] for slots, states in kept]
    head = json.dumps(kinds, separators=(",", ":")).encode("ascii")
    states = (state.cpu().contiguous() for _, states in kept for state in states if state is not None)
    return b"".join((len(head).to_bytes(8, "little"), head, *(view(state) for state in states)))


def unpack(stored: bytes, tokens: int) -> dict[int, Checkpoint]:
    """The checkpoints within the first `tokens` slots, by the number of slots before each."""
    size = 8 + int.from_bytes(stored[:8], "little")
    at = size

    def states(kinds: list[list[object] | None]) -> Iterator[torch.Tensor | None]:
        nonlocal at
        for kind in kinds:
            if kind is None:
                yield None
                continue
            dtype, shape = _DTYPES[str(kind[0])], kind[1]
            assert isinstance(shape, list)
            count = math.prod(shape)
            yield torch.frombuffer(bytearray(stored[at : at + count * dtype.itemsize]), dtype=dtype).view(shape)
            at += count * dtype.itemsize

    found = {slots: Checkpoint(tuple(states(kinds))) for slots, kinds in json.loads(stored[8:size])}
    return {slots: known for slots, known in found.items() if slots <= tokens}
