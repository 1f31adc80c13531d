"""Percentiles, and the peak memory of this process. Knows no engine."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import psutil


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` (0 to 1) of the values lie, by the nearest rank."""
    ranked = sorted(values)
    return ranked[min(len(ranked) - 1, max(0, -(-int(share * 1000) * len(ranked) // 1000) - 1))]


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
