"""Checkpoints of a page as bytes: what the last layers of its blob hold. The blob authenticates them.

length (8) | [[slots, [cut, ...], [[dtype, shape] | null, ...]], ...] as JSON | the states one after another
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator

import torch

from ...checkpoints import Checkpoint
from ...errors import BlobError
from .blob import view

_DTYPES = {str(dtype): dtype for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32)}
Known = dict[int, Checkpoint]  # by the number of slots before each


def size(checkpoints: Known, tokens: int) -> int:
    """Number of bytes that `pack` gives."""
    within = _within(checkpoints, tokens)
    return 8 + len(_head(within)) + sum(known.bytes for known in within.values()) if within else 0


def pack(checkpoints: Known, tokens: int) -> bytes:
    """The checkpoints within the first `tokens` slots; empty if there is none."""
    within = _within(checkpoints, tokens)
    if not within:
        return b""
    head = _head(within)
    states = (state.cpu().contiguous() for known in within.values() for state in known.states if state is not None)
    return b"".join((len(head).to_bytes(8, "little"), head, *(view(state) for state in states)))


def _within(checkpoints: Known, tokens: int) -> Known:
    return {slots: known for slots, known in sorted(checkpoints.items()) if slots <= tokens}


def _head(within: Known) -> bytes:
    told = [
        [slots, known.cuts, [state if state is None else [str(state.dtype), list(state.shape)] for state in known.states]]
        for slots, known in within.items()
    ]
    return json.dumps(told, separators=(",", ":")).encode("ascii")


def unpack(stored: bytes, tokens: int) -> Known:
    """The checkpoints within the first `tokens` slots. BlobError: `pack` did not write these bytes."""
    try:
        return _within(dict(_read(stored)), tokens)
    except (ValueError, TypeError, LookupError, RuntimeError) as error:
        raise BlobError(f"its checkpoints cannot be read: {type(error).__name__}: {error}") from None


def _read(stored: bytes) -> Iterator[tuple[int, Checkpoint]]:
    at = 8 + int.from_bytes(stored[:8], "little")
    for slots, cuts, kinds in json.loads(stored[8:at]):
        states: list[torch.Tensor | None] = []
        for kind in kinds:
            if kind is None:
                states.append(None)
                continue
            dtype, shape = _DTYPES[kind[0]], [int(length) for length in kind[1]]
            end = at + math.prod(shape) * dtype.itemsize
            states.append(torch.frombuffer(bytearray(stored[at:end]), dtype=dtype).view(shape))
            at = end
        yield int(slots), Checkpoint(tuple(states), tuple(map(int, cuts)))
