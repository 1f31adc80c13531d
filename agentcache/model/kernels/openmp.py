"""PyTorch's OpenMP runtime, on whose threads compiled functions run as well. Knows nothing of models."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

import torch


@functools.cache
def runtime() -> Any | None:
    """The library, if it is GNU's and came with PyTorch; it is loaded already, so these are the same threads."""
    found = sorted(Path(torch.__file__).parent.glob("lib/libgomp*.so*"))
    return ctypes.CDLL(str(found[0])) if found else None


def use_threads(threads: int) -> int:
    """Let this thread compute with so many threads, or with as many as OpenMP will start; returns how many.

    With OMP_THREAD_LIMIT below it, or with OMP_DYNAMIC, a team may be smaller than PyTorch counts on. Parts of its own 16-bit products are
    then computed by no thread, and stay as memory was before.
    """
    found = runtime()
    if found is not None:
        found.omp_set_dynamic(0)  # for what this thread starts
        threads = min(threads, found.omp_get_thread_limit())
    if threads != torch.get_num_threads():
        torch.set_num_threads(threads)
    return threads
