"""An oracle of prefix reuse: every token sequence seen so far, and what a new one shares with any of them. Knows no engine."""

from __future__ import annotations

import bisect

import numpy as np


class Oracle:
    """Every token sequence seen so far, and the longest common prefix of a new one with any of them. Independent of the store."""

    def __init__(self) -> None:
        self._seen: list[bytes] = []  # sorted: the longest common prefix is with a neighbour

    def known(self, ids: list[int]) -> int:
        """Length of the longest prefix of ids that an earlier sequence began with."""
        key = _key(ids)
        at = bisect.bisect_left(self._seen, key)
        return max((_common(key, other) for other in self._seen[max(0, at - 1) : at + 1]), default=0)

    def add(self, ids: list[int]) -> None:
        """Remember a sequence; one that it only continues is dropped."""
        key = _key(ids)
        at = bisect.bisect_left(self._seen, key)
        if at and key.startswith(self._seen[at - 1]):
            self._seen[at - 1] = key
        elif at == len(self._seen) or not self._seen[at].startswith(key):
            self._seen.insert(at, key)


def _key(ids: list[int]) -> bytes:
    return np.asarray(ids, dtype=">u4").tobytes()  # big endian: bytes sort as the tokens do


def _common(one: bytes, other: bytes) -> int:
    short = min(len(one), len(other)) // 4
    differs = np.flatnonzero(np.frombuffer(one, ">u4", short) != np.frombuffer(other, ">u4", short))
    return int(differs[0]) if len(differs) else short
