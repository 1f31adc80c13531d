"""Memory of pages: zeroed maps, and maps committed before they are needed. Knows nothing of keys and values.

A system finds and zeroes memory only when it is written, and a branch writes all of a page at once: with a virtual machine's untouched
memory that took longer than the whole forward of a short tail, and a twentieth of a long prefill. So an idle engine keeps the memory of
its next page ready, and the memory of pages that are gone serves the next ones.
"""

from __future__ import annotations

import mmap
import os
import sys
import threading
import weakref
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass
from math import prod

import numpy as np
import torch

Shapes = tuple[tuple[int, ...], ...]
PIECE_BYTES = 1 << 20  # committed in one step, between which requests are looked for
USED_BYTES = 512 << 20  # of pages that are gone, kept at most, and a quarter of what engines may keep in pages


class PagePool:
    """Free maps by their size, for the next pages; kept while an engine is open. From any thread."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Start empty: at first, and in a forked child, where a thread of the parent may hold the lock."""
        self._lock = threading.RLock()  # a map may be given back by the very collection of garbage that an addition here sets off
        self.maps: defaultdict[int, list[mmap.mmap]] = defaultdict(list)
        self._budgets: list[int] = []
        self.bytes = 0

    def open(self, budget_bytes: int) -> None:
        """Count an engine, which may keep so many bytes of pages."""
        with self._lock:
            self._budgets.append(budget_bytes)

    def close(self, budget_bytes: int) -> None:
        """Count an engine no more; with the last one, all maps go back to the system."""
        with self._lock:
            self._budgets.remove(budget_bytes)
            if not self._budgets:
                self.maps.clear()
                self.bytes = 0

    def give(self, memory: mmap.mmap) -> None:
        """Add a free map, unless the pool is full."""
        with self._lock:
            if self.bytes + len(memory) <= min(USED_BYTES, sum(self._budgets) // 4):
                self.maps[len(memory)].append(memory)
                self.bytes += len(memory)

    def take(self, size: int) -> mmap.mmap | None:
        """Take a free map of so many bytes out, with its old contents; None if there is none."""
        with self._lock:
            kept = self.maps[size]
            if not kept:
                return None
            self.bytes -= size
            return kept.pop()


pool = PagePool()


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, whole: bool, again: bool = True) -> torch.Tensor:
    """Zeroed memory that a CPU only commits when it is written (an anonymous map), so that a half empty page costs half.

    whole: all of it will be written: in large pieces, if the system has them, which takes half the time. again: memory of pages that are
    gone will do: it is zeroed at once, in a tenth of the time in which the system would find other.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = prod(shape) * dtype.itemsize
    memory = pool.take(size) if again else None
    tensor = tensor_over(memory or new_map(size, whole), dtype)
    return (tensor.zero_() if memory is not None else tensor).view(shape)


def new_map(size: int, whole: bool) -> mmap.mmap:
    """An anonymous map. whole: all of it will be written."""
    # a copy: Python's default is a shared map, which a forked child would write into, and which has no large pieces
    memory = mmap.mmap(-1, size, access=mmap.ACCESS_DEFAULT if sys.platform == "win32" else mmap.ACCESS_COPY)
    if whole and sys.platform == "linux":
        with suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def tensor_over(memory: mmap.mmap, dtype: torch.dtype) -> torch.Tensor:
    """A tensor over all of a map, which is given back when the last view of it is gone."""
    held = np.frombuffer(memory, np.uint8)
    weakref.finalize(held, pool.give, memory).atexit = False
    return torch.from_numpy(held).view(dtype)


@dataclass(slots=True)
class _Page:
    tensors: tuple[torch.Tensor, ...]
    committed: int = 0  # numbers, of all tensors one after another


def _new(shapes: Shapes, dtype: torch.dtype) -> _Page:
    try:  # a list: Python cannot end a tuple of a generator that a memory profiler holds, and allocating lets other threads run
        return _Page(tuple([zeros(shape, dtype, torch.device("cpu"), True) for shape in shapes]))
    except (OSError, MemoryError):  # it is made in advance: the page that needs it will say so
        return _Page((), sum(prod(shape) for shape in shapes))


class PreparedPages:
    """At most one page's memory for each shape of pages. From any thread."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Start empty, as `PagePool.begin`."""
        self._lock = threading.Lock()
        self._kept: dict[tuple[Shapes, torch.dtype], _Page] = {}

    def step(self, shapes: Shapes, dtype: torch.dtype) -> None:
        """Commit a piece of the next page of this shape, unless all of it is. Without memory for it, that page is not prepared."""
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
        """Tell whether memory of the next page of this shape is not committed yet."""
        with self._lock:
            page = self._kept.get((shapes, dtype))
            return page is None or page.committed < sum(prod(shape) for shape in shapes)

    def take(self, shapes: Shapes, dtype: torch.dtype) -> tuple[torch.Tensor, ...] | None:
        """Return zeroed tensors of this shape, committed or not; None if none are prepared."""
        with self._lock:
            page = self._kept.pop((shapes, dtype), None)
        return page.tensors or None if page is not None else None


prepared = PreparedPages()
if hasattr(os, "register_at_fork"):
    for _part in (pool, prepared):
        os.register_at_fork(after_in_child=_part.begin)
