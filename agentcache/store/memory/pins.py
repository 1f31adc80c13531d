"""Pinned prefixes: the cached pages that hold each of them, which are never evicted. Knows no budgets. Its owner's lock guards it."""

from __future__ import annotations

from ..entry import Entry
from ..keys import PinName, Role

Pin = tuple[list[Entry], int, Role]  # the pages, how many tokens of them, and their role while they are pinned


class Pins:
    """By name; the same prefix may be pinned several times, and is released as often."""

    def __init__(self) -> None:
        self._pins: dict[PinName, list[Pin]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._pins.values()))

    @property
    def paths(self) -> list[tuple[PinName, list[Entry]]]:
        """The pages of each pin that holds on disk, too."""
        return [(name, list(path)) for name, pins in self._pins.items() for path, _, role in pins if role is Role.GROUP]

    def add(self, name: PinName, path: list[Entry], tokens: int, role: Role) -> None:
        """Pin the first `tokens` tokens that these pages hold."""
        self._pins.setdefault(name, []).append((path, tokens, role))
        for entry in path:
            entry.pins += 1
            entry.role = max(entry.role, role)

    def release(self, name: PinName, role: Role) -> list[Entry]:
        """Take back the first pin of that name and role, whose pages may be gone; returns them, none if there is no such pin."""
        if (pin := next((pin for pin in self._pins.get(name, ()) if pin[2] is role), None)) is None:
            return []
        self._drop(name, pin)
        return pin[0]

    def release_evicted(self) -> None:
        """Take back pins whose last page is gone."""
        for name, pins in list(self._pins.items()):
            for pin in [pin for pin in pins if pin[0][-1].page is None]:
                self._drop(name, pin)

    def _drop(self, name: PinName, pin: Pin) -> None:
        self._pins[name].remove(pin)
        if not self._pins[name]:
            del self._pins[name]
        for entry in pin[0]:
            entry.pins -= 1
            if not entry.pins:
                entry.role = min(entry.role, Role.PREFIX)

    def ends(self, entry: Entry) -> set[int]:
        """After how many tokens of a page pinned prefixes end."""
        return {tokens - entry.first for pins in self._pins.values() for path, tokens, _ in pins if path[-1] is entry}

    def tokens(self, entry: Entry) -> int:
        """Number of tokens of a page that are pinned."""
        lengths = (tokens for pins in self._pins.values() for path, tokens, _ in pins if entry in path)
        return max(0, max(lengths, default=0) - entry.first)
