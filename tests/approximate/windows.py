"""Windows of made-up words, as the index of signatures takes them. Holds no tests."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class WordWindow:
    start: int
    stop: int
    words: tuple[str, ...]
    left: tuple[str, ...] = ()


def words(seed: int, count: int = 60) -> tuple[str, ...]:
    return tuple(f"w{number}" for number in np.random.default_rng(seed).integers(0, 400, count))
