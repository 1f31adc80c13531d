"""PyTorch's OpenMP runtime, on whose threads compiled functions run as well. Knows nothing of models.

Each thread that computes has a team. Once teams have more threads than cores, GNU's runtime lets them sleep between products, and a short
prompt takes up to twice its time. So threads that only copy have no team, and those that wait for the device release theirs.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
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

    With OMP_THREAD_LIMIT or OMP_DYNAMIC a team may be smaller than PyTorch counts on: parts of its 16-bit products are then not computed.
    """
    if (found := runtime()) is not None:
        found.omp_set_dynamic(0)  # for what this thread starts
        threads = min(threads, found.omp_get_thread_limit())
    if threads != torch.get_num_threads():
        torch.set_num_threads(threads)
    return threads


def use_one_thread() -> None:
    """Let this thread, and no other, compute alone."""
    torch.get_num_threads()  # PyTorch sets the number at its first use in a thread
    if (found := runtime()) is not None:
        found.omp_set_num_threads(1)


def release_team() -> None:
    """End the team of this thread, if it has one; its next product starts another. A thread that forked has left its team behind."""
    pause = getattr(runtime(), "omp_pause_resource_all", None)  # of OpenMP 5.0
    if pause is not None and not (threading.current_thread() is threading.main_thread() and _forked(os.getpid())):
        pause(1)  # omp_pause_soft


@functools.cache
def _forked(process: int) -> bool:
    """Tell whether this process was forked and runs no program of its own: PF_FORKNOEXEC among the flags of proc(5)."""
    stat = Path("/proc/self/stat")
    return not stat.exists() or bool(int(stat.read_text().rpartition(")")[2].split()[6]) & 0x40)
