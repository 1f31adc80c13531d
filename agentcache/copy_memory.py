"""Memory for copies of recurrent states: committed while the device is idle, as much as the last requests' copies took.

A copy into memory that a virtual machine has not touched takes five times as long as one into memory that it has.
"""

from __future__ import annotations

import os
import threading
from collections import Counter

import numpy as np
import torch

from . import page_memory

READY_BYTES = 128 << 20  # committed in advance at most
SMALL_BYTES = 256 << 10  # below it, the allocator's own memory serves


class CopyMemory:
    """Counts copies, and commits as many maps for the pool in idle moments of engines. From any thread."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Start empty: at first, and in a forked child, where a thread of the parent may hold the lock."""
        self._lock = threading.Lock()
        self._made: Counter[int] = Counter()  # copies since the device was last idle, by their bytes
        self._ready = False

    def copied(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a tensor; on a CPU into memory that is committed already, where there is some."""
        size = tensor.numel() * tensor.itemsize
        if tensor.device.type != "cpu" or size < SMALL_BYTES or not tensor.is_contiguous():
            return tensor.clone()
        self._count(size)
        memory = page_memory.pool.take(size) or page_memory.new_map(size, True)
        return page_memory.tensor_over(memory, tensor.dtype).view(tensor.shape).copy_(tensor)

    def _count(self, size: int) -> None:
        with self._lock:
            if self._ready:
                self._made.clear()
            self._ready = False
            if sum(size * count for size, count in self._made.items()) + size <= READY_BYTES:
                self._made[size] += 1

    def _lacking(self) -> int:
        """Bytes of one more map; 0 if there are enough."""
        with self._lock:
            lacking = next((size for size, count in self._made.items() if len(page_memory.pool.maps[size]) < count), 0)
            self._ready = not lacking
            return lacking

    @property
    def pending(self) -> bool:
        """Tell whether there is a map to commit."""
        return self._lacking() > 0

    def step(self) -> None:
        """Commit one map. Without memory or room for it, no more are committed for these copies."""
        if not (size := self._lacking()):
            return
        try:
            memory = page_memory.new_map(size, True)
            np.frombuffer(memory, np.uint8)[:] = 0
            before = len(page_memory.pool.maps[size])
            page_memory.pool.give(memory)
            kept = len(page_memory.pool.maps[size]) > before
        except (OSError, MemoryError):
            kept = False
        if not kept:
            with self._lock:
                self._made.clear()

    def counts(self) -> dict[str, dict[str, float]]:
        """Nothing: it looks for nothing."""
        return {}


copies = CopyMemory()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=copies.begin)
