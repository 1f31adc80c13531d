"""Policies of writing and reading: measured rates and budgets, as values without side effects. Knows no files.

Loading beats computing while bytes / read rate < tokens · ms per token. Both rates are measured where the store is used and remembered in
it, so that the first request of a process already decides with numbers.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

SMOOTHING = 0.5  # weight of the newest measurement
RETRY_S = 300.0  # a rate that forbids loading is measured again after so long: disks recover
LOOK_S = 1.0  # a load that was given up is tried again after so long, given up again after four times as long, up to RETRY_S
TRUST = 0.1  # share of the computing time that may go into finding out that a disk is slow: readers wait for busy processors, too
LEAST_TRUST_MS = 20.0
FIRST_BYTES = 2 << 20  # read before the first progress is reported
HUNG_MS = 5000.0  # nothing read at all for so long, where the cost of computing is unknown
NOISE = 1.25  # computing the same may take so many times longer later: an abandoned load shall not look worth it then
SMALL_BYTES = 1 << 20  # a smaller load tells of latencies and not of a rate


@dataclass(slots=True)
class Rate:
    """Bytes per millisecond of verified reading. Times are those of time.monotonic()."""

    value: float = 0.0  # of finished loads, smoothed; 0: there was none
    at: float = field(default_factory=time.monotonic)  # the last finished load
    most: float = 0.0  # after abandoned loads it is at most this
    given_up: int = 0  # abandoned loads in a row
    given_up_at: float = 0.0  # the last of them

    def learn(self, amount: float, ms: float) -> None:
        """Take in a load that was finished. A small one never makes the rate look lower."""
        if amount > 0 and ms > 0:
            new = amount / ms
            if amount < SMALL_BYTES and new <= (self.value or new):
                return
            self.value = new if not self.value else (1 - SMOOTHING) * self.value + SMOOTHING * new
            self.at = time.monotonic()
            self.most, self.given_up = 0.0, 0

    def forbid(self, load_bytes: int, compute_ms: float) -> None:
        """A load was given up: for a while it is not worth trying again, for longer each time."""
        if load_bytes >= SMALL_BYTES:
            most = load_bytes / (NOISE * compute_ms)
            self.most = min(self.most or most, most)
            self.given_up, self.given_up_at = self.given_up + 1, time.monotonic()

    @property
    def believed(self) -> float:
        """The rate by which loads are chosen; 0 where it is unknown, or so old that the loads it forbids deserve another try."""
        now = time.monotonic()
        value = 0.0 if now - self.at > RETRY_S else self.value
        if self.given_up and now - self.given_up_at < min(RETRY_S, LOOK_S * 4 ** min(self.given_up - 1, 8)):
            return min(value or self.most, self.most)
        return value

    def packed(self) -> str:
        """Text for the next process, with times that mean something there."""
        ahead = time.time() - time.monotonic()
        return f"{self.value!r} {self.at + ahead!r} {self.most!r} {self.given_up} {self.given_up_at + ahead!r}"

    @classmethod
    def unpacked(cls, text: str) -> Rate:
        """Rate of a text that `packed` wrote; times that are not past are long ago. An unknown rate for any other text."""
        try:
            value, at, most, given_up, given_up_at = map(float, text.split())
        except ValueError:
            return cls()
        now, wall = time.monotonic(), time.time()
        past = [now - (wall - when if when <= wall else RETRY_S + 1) for when in (at, given_up_at)]
        return cls(value, past[0], most, int(given_up), past[1])


def slow_load_ms(load_bytes: int, compute_ms: float, rate: Rate) -> float:
    """Milliseconds that loading is expected to take, where computing is faster; 0 where loading is worth it or unknown."""
    believed = rate.believed
    load_ms = load_bytes / believed if compute_ms and believed else 0.0
    return load_ms if load_ms > compute_ms else 0.0


def give_up(elapsed_ms: float, read_bytes: int, load_bytes: int, compute_ms: float, rate: Rate) -> bool:
    """Tell whether a running load should be left for computing: its rest takes longer than computing everything.

    Its rate is weighed against the disk's believed rate, as if that had been measured for a tenth of the computing time; a disk of
    which nothing is known is watched for as long, and one that shows nothing may take so long, or twice what its rate lets expect.
    """
    if not compute_ms:
        return not read_bytes and elapsed_ms > HUNG_MS
    if elapsed_ms > compute_ms:
        return True
    trust_ms, believed = max(LEAST_TRUST_MS, TRUST * compute_ms), rate.believed
    if not read_bytes:
        expected_ms = min(load_bytes, FIRST_BYTES) / believed if believed else 0.0
        return elapsed_ms > max(trust_ms, 2 * expected_ms)
    if not believed:
        return elapsed_ms > trust_ms and (load_bytes - read_bytes) * elapsed_ms / read_bytes > compute_ms
    seen = (read_bytes + believed * trust_ms) / (elapsed_ms + trust_ms)
    return (load_bytes - read_bytes) / seen > compute_ms


class WriteBudget:
    """A token bucket of bytes: full at the start, refilled over an hour. left_bytes: when it was last taken from. Not thread safe."""

    def __init__(self, bytes_per_hour: int) -> None:
        self.bytes_per_hour = bytes_per_hour
        self.left_bytes = float(bytes_per_hour)
        self._at = time.monotonic()

    def take(self, count: int) -> bool:
        """Take `count` bytes out if they are there."""
        now = time.monotonic()
        self.left_bytes = min(self.bytes_per_hour, self.left_bytes + (now - self._at) * self.bytes_per_hour / 3600)
        self._at = now
        if count > self.left_bytes:
            return False
        self.left_bytes -= count
        return True
