"""Looking up and copying, in random tokens: what everything else is made of, learnt first and fast. Knows no words and no tools.

    k k : v v v , k : v , k k k : v v ...   then each key again, shuffled, and what stood behind it

Keys share tokens, so that all of a key has to be compared. Short sequences and targets everywhere make attention find this in some
hundred steps; in catalogs, where few tokens are copied from far away, it takes many times as long.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from agentcache.bench.quality_world.world import World

from .packing import Completion, Ints, Pack

MARKS = ('": "', '", "', "\n", ": ", ", ", " ", ".", "<|im_end|>")


class Drills:
    """Draws packs. tokenizer: whose ids the drills are made of."""

    def __init__(self, tokenizer: Any) -> None:
        backend = tokenizer.backend_tokenizer
        self._marks = [ids[0] for text in MARKS if len(ids := backend.encode(text, add_special_tokens=False).ids) == 1]
        self._first, self._last = 300, len(tokenizer) - 1  # behind special tokens and single bytes

    def pack(self, world: World, size: int) -> Pack:
        """About `size` tokens of sequences that see the first token and themselves."""
        ids: list[int] = [1]
        positions, parents = [0], [-1]
        branches: list[tuple[int, int, Ints]] = []
        completions: list[Completion] = []
        while len(ids) < size:
            one, targets = self._sequence(world)
            start = len(ids)
            ids += one
            positions += range(1, len(one) + 1)
            parents += [0, *range(start, start + len(one) - 1)]
            branches.append((start, len(ids), np.zeros(1, np.int64)))
            completions.append(Completion(start + np.asarray(targets, np.int64), 0, "drill", len(completions)))
        arrays = [np.asarray(part, np.int64) for part in (ids, positions, parents)]
        return Pack(arrays[0], arrays[1], arrays[2], 1, tuple(branches), tuple(completions))

    def _sequence(self, world: World) -> tuple[list[int], list[int]]:
        """Ids, and which of them are to be predicted."""
        between, behind = world.sample(self._marks, 2)
        few = [world.number(self._first, self._last) for _ in range(6)]
        pairs: dict[tuple[int, ...], list[int]] = {}
        for _ in range(world.pick((1, 2, 2, 3, 4, 6, 9))):  # few others to tell it from: that is how it is found at all
            key = tuple(world.pick(few) if world.chance(0.5) else self._token(world) for _ in range(world.pick((1, 1, 2, 2, 3))))
            pairs[key] = [self._token(world) for _ in range(world.pick((1, 2, 2, 3, 4, 6)))]
        ids: list[int] = []
        targets: list[int] = []
        for again in (False, True):
            for key in world.shuffled(list(pairs)):
                ids += [*key, between]
                if again:
                    targets += range(len(ids), len(ids) + len(pairs[key]) + 1)
                ids += [*pairs[key], behind]
        return ids, targets

    def _token(self, world: World) -> int:
        return world.number(self._first, self._last)
