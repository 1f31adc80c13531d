"""What is worth writing, reading and keeping: measured rates and budgets, as values without side effects. Knows no files.

Loading beats computing while bytes / read rate < tokens · ms per token. Both rates are measured where the store is used and remembered in
it, so that the first request of a process already decides with numbers.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import psutil

SMOOTHING = 0.5  # weight of the newest measurement
RETRY_S = 300.0  # a rate that forbids loading is measured again after so long: disks recover
SLACK = 0.005  # share of the computing time that may go into finding out that a disk is slow
LEAST_WAIT_MS = 10.0
FIRST_BYTES = 2 << 20  # what is read before the first progress is heard of
HUNG_MS = 5000.0  # nothing read at all for so long, where nobody knows what computing costs
NOISE = 1.25  # by how much computing the same may take longer another time: what was given up shall not look worth it then
SMALL_BYTES = 1 << 20  # a smaller load tells of latencies and not of a rate


@dataclass(slots=True)
class Rate:
    """Bytes per millisecond of verified reading, smoothed. 0: not measured yet."""

    value: float = 0.0
    at: float = field(default_factory=time.monotonic)

    def learn(self, amount: float, ms: float, load_bytes: float | None = None) -> None:
        """Take in one measurement; load_bytes: of what load `amount` was read. A small load never makes the rate look lower."""
        if amount > 0 and ms > 0:
            new = amount / ms
            if (amount if load_bytes is None else load_bytes) < SMALL_BYTES and new <= (self.value or new):
                return
            self.value = new if not self.value else (1 - SMOOTHING) * self.value + SMOOTHING * new
            self.at = time.monotonic()

    def forbid(self, load_bytes: int, compute_ms: float) -> None:
        """A load was given up: at most so fast that it is not worth trying again at once."""
        if load_bytes >= SMALL_BYTES:
            most = load_bytes / (NOISE * compute_ms)
            self.value, self.at = min(self.value or most, most), time.monotonic()

    @property
    def stale(self) -> bool:
        """Whether it is so old that what it forbids deserves another try."""
        return time.monotonic() - self.at > RETRY_S


def too_slow(load_bytes: int, compute_ms: float, rate: Rate) -> bool:
    """Whether loading would take longer than computing, as far as is known before it begins."""
    return bool(compute_ms and rate.value) and not rate.stale and load_bytes / rate.value > compute_ms


def give_up(elapsed_ms: float, read_bytes: int, load_bytes: int, compute_ms: float, rate: Rate) -> bool:
    """Whether a running load should be left for computing: what is left of it takes longer than computing everything.

    Decided after half a hundredth of the computing time at the earliest; a disk that has shown nothing by twice that, or by twice the
    time its rate lets expect, is slow.
    """
    if not compute_ms:
        return not read_bytes and elapsed_ms > HUNG_MS
    patience = max(LEAST_WAIT_MS, SLACK * compute_ms)
    if elapsed_ms < patience:
        return False
    if read_bytes:
        left_ms = (load_bytes - read_bytes) * elapsed_ms / read_bytes
        return left_ms > compute_ms or elapsed_ms > compute_ms
    expected = min(load_bytes, FIRST_BYTES) / rate.value if rate.value and not rate.stale else 0.0
    return elapsed_ms > 2 * max(patience, expected)


class WriteBudget:
    """A token bucket of bytes: full at the start, refilled over an hour. Not thread safe: its writer owns it."""

    def __init__(self, bytes_per_hour: int) -> None:
        self.bytes_per_hour = bytes_per_hour
        self._left = float(bytes_per_hour)
        self._at = time.monotonic()

    def take(self, count: int) -> bool:
        """Take `count` bytes out if they are there."""
        now = time.monotonic()
        self._left = min(self.bytes_per_hour, self._left + (now - self._at) * self.bytes_per_hour / 3600)
        self._at = now
        if count > self._left:
            return False
        self._left -= count
        return True


def budgets(device: str | None, memory_bytes: int | None) -> tuple[int, int]:
    """Bytes for pages on the device, by default a quarter of what is free, and for those that wait in the computer's memory beside it."""
    free = psutil.virtual_memory().available // 4
    cuda = bool(device) and str(device).startswith("cuda")
    if memory_bytes is not None:
        return memory_bytes, free if cuda and memory_bytes else 0
    if not cuda:
        return free, 0
    import torch  # who only looks into the index needs none

    return (torch.cuda.mem_get_info()[0] // 4 if torch.cuda.is_available() else free), free
