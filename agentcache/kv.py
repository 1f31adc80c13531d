"""Pages: the keys and values of one block of consecutive tokens, all layers; and the page table of a sequence. Knows nothing of models.

A page holds positions [512·i, 512·(i+1)). Inside it, per layer, keys lie transposed (kv_heads, head_dim, 512) and values plain
(kv_heads, 512, head_dim): both attention products then run as plain matrix products without a copy.

    slots of a page     [0, length of a reader)   valid for that reader, never written again
                        [.., filled)              written, valid for longer readers
                        [filled, 512)             zero or stale, always masked

Sharing needs no lock on the data: one writer at a time may append at `filled`; everybody else reads below it or branches.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import prod
from typing import Literal

import torch

from .types import PAGE_TOKENS

Tier = Literal["device", "host"]


@dataclass(frozen=True, slots=True)
class KVSpec:
    """Shape and place of a model's KV. head_dim is equal for keys and values in every layer."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values over all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def page_bytes(self) -> int:
        """Bytes of one page."""
        return PAGE_TOKENS * self.token_bytes


def _zeros(shape: tuple[int, ...], spec: KVSpec, whole: bool) -> torch.Tensor:
    """Zeroed memory that a CPU only commits when it is written (an anonymous map), so that a half empty page costs half.

    whole: all of it will be written: in large pieces, if the system has them, which takes half the time.
    """
    if spec.device.type != "cpu":
        return torch.zeros(shape, dtype=spec.dtype, device=spec.device)
    # private: Python's default is a shared map, which a forked child would write into, and which has no large pieces
    memory = mmap.mmap(-1, prod(shape) * spec.dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if whole and hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=spec.dtype).view(shape)


class Page:
    """KV of up to 512 tokens: keys [layers, kv_heads, head_dim, 512], values [layers, kv_heads, 512, head_dim].

    `filled` counts the slots written so far. A page with filled == 512 is sealed: immutable, shared by reference.
    spec: of the model; a page of tier "host" waits in the computer's own memory. whole: all its slots will be written, and soon.
    layer_keys, layer_values: one view per layer.
    """

    __slots__ = ("__weakref__", "_claim", "_lock", "filled", "keys", "layer_keys", "layer_values", "spec", "tier", "values")

    def __init__(self, spec: KVSpec, tier: Tier = "device", whole: bool = False) -> None:
        self.spec = spec
        self.tier: Tier = tier
        place = spec if tier == "device" else replace(spec, device=torch.device("cpu"))
        self.keys = _zeros((spec.layers, spec.kv_heads, spec.head_dim, PAGE_TOKENS), place, whole)
        self.values = _zeros((spec.layers, spec.kv_heads, PAGE_TOKENS, spec.head_dim), place, whole)
        self._views()
        self.filled = 0
        self._claim: object | None = None
        self._lock = threading.Lock()

    def _views(self) -> None:
        self.layer_keys = self.keys.unbind(0)
        self.layer_values = self.values.unbind(0)

    def lie_in(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Take other memory, which holds a whole page already; each layer of it is contiguous."""
        assert self.filled == 0 and keys.shape == self.keys.shape and values.shape == self.values.shape and keys.dtype == self.spec.dtype
        self.keys, self.values = keys, values
        self._views()

    @property
    def sealed(self) -> bool:
        """Whether every slot is written."""
        return self.filled == PAGE_TOKENS

    def claim(self, slot: int, owner: object) -> bool:
        """Ask for the sole right to append at `slot`; refused if slots from there on are written or promised already."""
        with self._lock:
            if self._claim is not None or self.filled != slot:
                return False
            self._claim = owner
            return True

    def release(self, owner: object) -> None:
        """Give the right to append back; no effect if `owner` does not hold it."""
        with self._lock:
            if self._claim is owner:
                self._claim = None

    @property
    def claimed(self) -> bool:
        """Whether somebody has the right to append."""
        return self._claim is not None

    def copy(self, tokens: int, tier: Tier = "device") -> Page:
        """A copy of the first `tokens` slots in another page."""
        assert 0 < tokens <= self.filled
        page = Page(self.spec, tier)
        page.keys[..., :tokens].copy_(self.keys[..., :tokens])
        page.values[..., :tokens, :].copy_(self.values[..., :tokens, :])
        page.filled = tokens
        return page

    def branch(self, tokens: int, owner: object) -> Page:
        """A private copy of the first `tokens` slots, claimed by `owner`."""
        page = self.copy(tokens)
        page._claim = owner
        return page


@dataclass(slots=True, eq=False)
class Sequence:
    """The page table of one running request: `length` tokens in `pages`, the last page private or claimed.

    exact_until: only tokens before it may be kept as exact or lent to an exact request (here: all of them).
    copied_tokens: slots copied by branching when the sequence was attached.
    """

    spec: KVSpec
    pages: list[Page] = field(default_factory=list)
    length: int = 0
    exact_until: int = 0
    copied_tokens: int = 0

    def attach(self, pages: list[Page], tokens: int) -> None:
        """Start from shared pages that hold positions [0, tokens): sealed ones by reference, the last one claimed or branched."""
        assert not self.pages
        assert tokens <= len(pages) * PAGE_TOKENS
        whole, rest = divmod(tokens, PAGE_TOKENS)
        self.pages.extend(pages[:whole])
        if rest:
            last = pages[whole]
            if not last.claim(rest, self):
                last = last.branch(rest, self)
                self.copied_tokens = rest
            self.pages.append(last)
        self.length = self.exact_until = tokens

    def reserve(self, tokens: int) -> None:
        """Make room for `tokens` more; only then may `slots` of that range be written."""
        while len(self.pages) * PAGE_TOKENS < self.length + tokens:
            page = Page(self.spec)
            page.claim(0, self)
            self.pages.append(page)

    def slots(self, start: int, stop: int) -> Iterator[tuple[Page, int, int, int]]:
        """The pages under positions [start, stop): (page, first slot, count, offset from start)."""
        at = start
        while at < stop:
            slot = at % PAGE_TOKENS
            count = min(PAGE_TOKENS - slot, stop - at)
            yield self.pages[at // PAGE_TOKENS], slot, count, at - start
            at += count

    def write(self, layer: int, start: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store keys and values [tokens, kv_heads, head_dim] of one layer at positions from `start` on."""
        for page, slot, count, offset in self.slots(start, start + keys.shape[0]):
            page.layer_keys[layer][:, :, slot : slot + count] = keys[offset : offset + count].permute(1, 2, 0)
            page.layer_values[layer][:, slot : slot + count] = values[offset : offset + count].transpose(0, 1)

    def advance(self, tokens: int) -> None:
        """Declare the next `tokens` positions written in every layer."""
        for page, slot, count, _ in self.slots(self.length, self.length + tokens):
            assert page.filled == slot
            page.filled = slot + count
        grew_exact = self.exact_until == self.length
        self.length += tokens
        if grew_exact:
            self.exact_until = self.length

    def withdraw(self, tokens: int) -> None:
        """Unwrite everything from position `tokens` on, in pages this sequence may write: zeros, so that masked slots stay finite.

        What a forward that failed may have left behind `length` included.
        """
        for page, slot, count, _ in self.slots(tokens, len(self.pages) * PAGE_TOKENS):
            page.keys[..., slot : slot + count] = 0
            page.values[..., slot : slot + count, :] = 0
            page.filled = slot
        self.length = self.exact_until = tokens

    def close(self) -> None:
        """Give up the right to append. What was written stays valid for whoever shares the pages, which forget this sequence."""
        for page in self.pages:
            page.release(self)

    def read(self, layer: int, start: int = 0, stop: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of positions [start, stop) as [tokens, kv_heads, head_dim] copies: for tests and for devices that gather."""
        keys, values = [], []
        for page, slot, count, _ in self.slots(start, self.length if stop is None else stop):
            keys.append(page.keys[layer, :, :, slot : slot + count].permute(2, 0, 1))
            values.append(page.values[layer, :, slot : slot + count].transpose(0, 1))
        return torch.cat(keys), torch.cat(values)
