"""PyTorch's OpenMP runtime: who else runs functions on its threads, and whether its teams are whole. Knows nothing of models."""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

_process = os.getpid()  # the first one that may have computed


@functools.cache
def runtime() -> Any | None:
    """The library, if it is GNU's and came with PyTorch; it is loaded already, so these are the same threads."""
    found = sorted(Path(torch.__file__).parent.glob("lib/libgomp*.so*"))
    return ctypes.CDLL(str(found[0])) if found else None


def leave_team() -> None:
    """Let the thread that made this process by a fork compute alone, and all others with as many threads as before.

    Its team stayed in the parent, and its next loop would wait for that team for ever. Other threads start teams of their own.
    """
    if os.getpid() == _process or threading.current_thread() is not threading.main_thread():  # Python calls the forking thread that
        return
    with ThreadPoolExecutor(1) as other:
        threads = other.submit(torch.get_num_threads).result()
        torch.set_num_threads(1)
        other.submit(torch.set_num_threads, threads).result()  # what threads that start later are told


def use_threads(threads: int) -> int:
    """Let this thread compute with so many threads, or with as many as OpenMP will start; returns how many.

    With OMP_THREAD_LIMIT below it, or with OMP_DYNAMIC, a team may be smaller than PyTorch counts on. Parts of its own 16-bit products are
    nobody's then, and stay what memory was before.
    """
    found = runtime()
    if found is not None:
        found.omp_set_dynamic(0)  # for what this thread starts
        threads = min(threads, found.omp_get_thread_limit())
    if threads != torch.get_num_threads():
        torch.set_num_threads(threads)
    return threads
