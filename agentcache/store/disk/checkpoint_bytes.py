"""Checkpoints of a page as bytes: what the last layers of its blob hold. The blob authenticates them.

length (8) | [[slots, [cut, ...], [[dtype, shape] | null, ...]], ...] as JSON, with spaces up to a multiple of 64 | the states in order
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator

import torch

from ...checkpoints import Checkpoint, File
from ...errors import BlobError
from .blob import view

ALIGN = 64  # bytes: where states begin, which lie in the memory that was read
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
    text = json.dumps(told, separators=(",", ":")).encode("ascii")
    return text.ljust(len(text) + -(8 + len(text)) % ALIGN)


def unpack(stored: bytes | memoryview, tokens: int, file: File | None = None) -> Known:
    """The checkpoints within the first `tokens` slots, over that memory, of a mapped `file`, unless it is read-only. BlobError: `pack` did
    not write it."""
    memory = memoryview(stored)
    try:
        return _within(dict(_read(memoryview(bytearray(memory)) if memory.readonly else memory, file)), tokens)
    except (ValueError, TypeError, LookupError, RuntimeError) as error:
        raise BlobError(f"its checkpoints cannot be read: {type(error).__name__}: {error}") from None


def _read(stored: memoryview, file: File | None) -> Iterator[tuple[int, Checkpoint]]:
    at = 8 + int.from_bytes(stored[:8], "little")
    for slots, cuts, kinds in json.loads(bytes(stored[8:at])):
        states: list[torch.Tensor | None] = []
        for kind in kinds:
            if kind is None:
                states.append(None)
                continue
            dtype, shape = _DTYPES[kind[0]], [int(length) for length in kind[1]]
            end = at + math.prod(shape) * dtype.itemsize
            state = torch.frombuffer(stored[at:end], dtype=torch.uint8)
            states.append((state.clone() if state.data_ptr() % dtype.itemsize else state).view(dtype).view(shape))
            at = end
        yield int(slots), Checkpoint(tuple(states), tuple(map(int, cuts)), file)
