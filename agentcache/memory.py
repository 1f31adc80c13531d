"""Memory of pages: zeroed maps, and one page's worth that is committed while nobody waits. Knows nothing of what lies in it.

A system finds and zeroes memory only when it is written, and a branch writes all of a page at once: with a virtual machine's untouched
memory that took longer than the whole forward of a short tail. So an idle engine keeps the memory of its next page ready.
"""

from __future__ import annotations

import mmap
import threading
from contextlib import suppress
from dataclasses import dataclass
from math import prod

import torch

Shapes = tuple[tuple[int, ...], ...]
PIECE_BYTES = 4 << 20  # committed in one step, between which requests are looked for


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, whole: bool) -> torch.Tensor:
    """Zeroed memory that a CPU only commits when it is written (an anonymous map), so that a half empty page costs half.

    whole: all of it will be written: in large pieces, if the system has them, which takes half the time.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # private: Python's default is a shared map, which a forked child would write into, and which has no large pieces
    memory = mmap.mmap(-1, prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if whole and hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


@dataclass(slots=True)
class _Page:
    tensors: tuple[torch.Tensor, ...]
    committed: int = 0  # numbers, of all tensors one after another


def _new(shapes: Shapes, dtype: torch.dtype) -> _Page:
    try:
        return _Page(tuple(zeros(shape, dtype, torch.device("cpu"), True) for shape in shapes))
    except (OSError, MemoryError):  # nobody has asked for it: whoever needs it is told
        return _Page((), sum(prod(shape) for shape in shapes))


class Ready:
    """At most one page's memory for each shape of pages. From any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: dict[tuple[Shapes, torch.dtype], _Page] = {}

    def step(self, shapes: Shapes, dtype: torch.dtype) -> None:
        """Commit a piece of the next page of this shape, unless all of it is. Without memory for it, that page is not made ready."""
        with self._lock:
            page = self._kept.get((shapes, dtype))
            if page is None:
                page = self._kept[shapes, dtype] = _new(shapes, dtype)
            at, count = page.committed, PIECE_BYTES // dtype.itemsize
            for tensor in page.tensors:
                if 0 <= at < tensor.numel():
                    tensor.flatten()[at : at + count].zero_()
                    page.committed += min(count, tensor.numel() - at)
                    return
                at -= tensor.numel()

    def lacks(self, shapes: Shapes, dtype: torch.dtype) -> bool:
        """Whether there is something to commit."""
        with self._lock:
            page = self._kept.get((shapes, dtype))
            return page is None or page.committed < sum(prod(shape) for shape in shapes)

    def take(self, shapes: Shapes, dtype: torch.dtype) -> tuple[torch.Tensor, ...] | None:
        """What there is for this shape, however much of it is committed: all of it is zero. None: nothing was begun."""
        with self._lock:
            page = self._kept.pop((shapes, dtype), None)
        return page.tensors or None if page is not None else None


ready = Ready()
