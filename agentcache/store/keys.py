"""Keys of pages: chain hashes over token ids, and the scope within which pages may be shared. Knows nothing of their contents.

page_key = BLAKE3(parent key ‖ ids)          root key = BLAKE3(namespace, regime)
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from blake3 import blake3

from ..types import PAGE_TOKENS, Grade

Ids = np.ndarray  # uint32 [tokens]


def chain(root: bytes, ids: Ids) -> list[bytes]:
    """The keys of all pages of a prompt; the last one may be partly filled."""
    keys = [root]
    for start in range(0, len(ids), PAGE_TOKENS):
        keys.append(page_key(keys[-1], ids[start : start + PAGE_TOKENS]))
    return keys[1:]


class Role(IntEnum):
    """Role of a page. Where room is short, turns are evicted first and tool groups last."""

    TURN = 0
    PREFIX = 1  # stable part of a prompt: system and tools
    GROUP = 2  # named by `warm`


def as_ids(ids: Sequence[int]) -> Ids:
    """Token ids as the array that keys are made of. By way of `array`, which takes a list four times as fast as numpy does."""
    return np.frombuffer(array("I", ids), dtype=np.uint32)


def page_key(parent: bytes, ids: np.ndarray) -> bytes:
    """Chain hash of one page."""
    return blake3(parent + ids.tobytes()).digest()


PinName = tuple["Scope", bytes]  # of a pinned prefix: its scope, and the key of its last page


@dataclass(frozen=True, slots=True)
class Scope:
    """Scope within which pages are shared: one namespace, the same weights and rotary regime, an equally exact source.

    fingerprint: of the weights, and after "+" the digest of the adapter that acts on all tokens.
    """

    namespace: str
    fingerprint: str
    regime: str = ""
    precision: Grade = "exact"

    @property
    def weights(self) -> str:
        """The fingerprint of the base's weights."""
        return self.fingerprint.partition("+")[0]

    @property
    def adapter(self) -> str:
        """The digest of the adapter; "" of the base."""
        return self.fingerprint.partition("+")[2]

    @property
    def root(self) -> bytes:
        """The key above the first page. Without the fingerprint: the same tokens have the same keys under other weights."""
        return blake3(repr((self.namespace, self.regime)).encode("utf-8", "surrogatepass")).digest()

    def pin_name(self, ids: Ids) -> PinName:
        """The name of the pinned prefix that holds these ids."""
        return self, chain(self.root, ids)[-1]
