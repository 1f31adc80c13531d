"""The peak memory of this process, and what another one holds. Knows no engine."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import psutil


def held(pid: int) -> dict[str, int]:
    """Resident bytes and open file descriptors of a process."""
    process = psutil.Process(pid)
    return {"rss_bytes": process.memory_info().rss, "descriptors": process.num_fds()}


def peak_bytes(run: Callable[[], Any], every_s: float = 0.01) -> tuple[int, int]:
    """(resident bytes before, the most while `run` ran), sampled by a thread."""
    process, over = psutil.Process(), threading.Event()
    before = process.memory_info().rss
    seen = [before]

    def sample() -> None:
        while not over.wait(every_s):
            seen.append(process.memory_info().rss)

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        run()
    finally:
        seen.append(process.memory_info().rss)
        over.set()
        thread.join()
    return before, max(seen)
