"""Pages that were dropped from memory, and the reason, for the report of a miss. Knows digests and lengths only."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from ...types import Reason
from ..keys import page_key

REMEMBERED = 65536  # dropped pages, about 300 bytes each
HEAD = 16  # ids by which a dropped page is known to a prompt that ends inside it


class EvictionLog:
    """Digests of dropped pages under their parents; the oldest are forgotten. Not thread safe: its owner locks."""

    def __init__(self) -> None:
        self._pages: OrderedDict[bytes, tuple[bytes, int, str, Reason]] = OrderedDict()
        self._under: dict[bytes, set[bytes]] = {}
        self._heads: OrderedDict[bytes, tuple[str, Reason]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._pages)

    def add(self, parent: bytes, key: bytes, ids: np.ndarray, fingerprint: str, reason: Reason) -> None:
        self.discard(key)
        self._pages[key] = (parent, len(ids), fingerprint, reason)
        self.add_head(parent, ids, fingerprint, reason)
        self._under.setdefault(parent, set()).add(key)
        if len(self._pages) > REMEMBERED:
            self.discard(next(iter(self._pages)))

    def add_head(self, parent: bytes, ids: np.ndarray, fingerprint: str, reason: Reason) -> None:
        """Remember how a page began that this process dropped, or never had."""
        self._heads[page_key(parent, ids[:HEAD])] = (fingerprint, reason)
        if len(self._heads) > REMEMBERED:
            self._heads.popitem(last=False)

    def discard(self, key: bytes) -> None:
        """Forget a page that is cached again."""
        if (record := self._pages.pop(key, None)) is not None:
            self._under[record[0]].discard(key)
            if not self._under[record[0]]:
                del self._under[record[0]]

    def why(self, parent: bytes, ids: np.ndarray, known: int, fingerprint: str) -> Reason | None:
        """Reason for which a page that starts `ids`, longer than `known` tokens, was dropped; None if none is remembered."""
        lengths = {self._pages[key][1] for key in self._under.get(parent, ())}
        for length in sorted((n for n in lengths if known < n <= len(ids)), reverse=True):
            if (record := self._pages.get(page_key(parent, ids[:length]))) is not None:
                return record[3] if record[2] == fingerprint else Reason.FINGERPRINT
        head = self._heads.get(page_key(parent, ids[:HEAD])) if known < HEAD <= len(ids) else None
        return None if head is None else head[1] if head[0] == fingerprint else Reason.FINGERPRINT
