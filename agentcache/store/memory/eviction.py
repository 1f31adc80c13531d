"""Eviction of cached pages: the order of their use, and the byte budgets of device and host. Knows no keys and no prompts.

over the device's budget    the page used longest ago moves to the host, where that is other memory; else such a leaf is dropped
over the host's budget      such a leaf there is dropped

Leaves of turns and prefixes go first, tool groups last, pinned pages never, nor those whose memory another page shares: none is freed.
Eviction writes nothing: the writer was offered each page when it was admitted (Store.admit). The owner's lock guards it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence

import psutil
import torch

from ...page import Page, Tier
from ..entry import Entry
from ..keys import Role


class Eviction:
    """Counts pages with all their bytes, however full. drop: takes a leaf out of the tree, and out of here by `remove`."""

    def __init__(self, budget_bytes: int, host_budget_bytes: int, drop: Callable[[Entry], object]) -> None:
        self.budget_bytes, self.host_budget_bytes = budget_bytes, host_budget_bytes
        self.bytes = self.host_bytes = 0
        self._drop = drop
        self._held: dict[int, tuple[int, Tier, int]] = {}  # by id of a page: how many entries hold it, where it lies, its bytes
        self._order: OrderedDict[int, Entry] = OrderedDict()  # least recently used first; a parent always after its children

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[Entry]:
        """All pages, the least recently used first."""
        return iter(self._order.values())

    def add(self, entry: Entry) -> None:
        """Count a new page as the last one used."""
        self._order[id(entry)] = entry
        self._count(entry, 1)

    def remove(self, entry: Entry) -> None:
        """Count a page no more."""
        self._count(entry, -1)
        del self._order[id(entry)]

    def replace(self, entry: Entry, page: Page) -> None:
        """Give an entry another page, or one that has other checkpoints than when it was counted."""
        self._count(entry, -1)
        entry.page = page
        self._count(entry, 1)

    def touch(self, path: Sequence[Entry]) -> None:
        """Count the pages of a path, root first, and those that it continues, as used now."""
        for entry in reversed(path):  # parents last: the oldest is always a leaf
            self._order.move_to_end(id(entry))
        for above in path[0].lineage if path else ():
            if above.page is not None:  # all but the root
                self._order.move_to_end(id(above))

    def retire(self, path: Sequence[Entry]) -> None:
        """Make pages, root first, the least recently used ones."""
        for entry in path:
            self._order.move_to_end(id(entry), last=False)

    def promote(self, path: Iterable[Entry]) -> None:
        """Move pages that wait on the host to the device."""
        waiting = [entry for entry in path if entry.page is not None and entry.page.tier == "host"]
        for entry in waiting:
            self._move(entry, "device")
        if waiting:
            self.make_room()

    def make_room(self) -> None:
        """Evict until the device's budget holds."""
        while self.bytes > self.budget_bytes and (self._demote() or self.drop_oldest(self)):
            pass

    def drop_oldest(self, among: Iterable[Entry]) -> bool:
        """Drop the least recently used leaf, one of a tool group only if there is no other; False if there is none."""
        group = None
        for entry in among:
            if entry.children or entry.pins or (entry.scope.precision == "exact" and self.shared(entry)):
                continue  # pages over an exact one, and those of other scopes that it is lent to, go before it
            if entry.role < Role.GROUP:
                self._drop(entry)
                return True
            group = group or entry
        if group is not None:
            self._drop(group)
        return group is not None

    def _demote(self) -> bool:
        """Copy the least recently used page that no sequence appends to from the device to the host, if there is room or can be made."""
        if not self.host_budget_bytes:
            return False
        on_device = (entry for entry in self if not entry.pins and entry.page and entry.page.tier == "device")
        found = next((entry for entry in on_device if entry.page and not entry.page.claimed and not self.shared(entry)), None)
        if found is None or found.page is None:
            return False
        need = found.page.copy_bytes
        while self.host_bytes + need > self.host_budget_bytes:
            if not self.drop_oldest([e for e in self if e.page and e.page.tier == "host"]):
                return False
        self._move(found, "host")
        return True

    def _move(self, entry: Entry, tier: Tier) -> None:
        assert entry.page is not None
        self.replace(entry, entry.page.copy(len(entry.ids), tier))

    def _count(self, entry: Entry, sign: int) -> None:
        """Add the bytes of an entry's page as it is now, and of those below it, each once; or take away what was added for it."""
        if sign > 0:
            assert entry.page is not None
            entry.counted = tuple(entry.page.chain)
        for page in entry.counted:
            count, tier, size = self._held.pop(id(page), (0, page.tier, 0))
            self._add(tier, -size)
            if count + sign:
                self._held[id(page)] = count + sign, page.tier, page.bytes
                self._add(page.tier, page.bytes)
        entry.counted = entry.counted if sign > 0 else ()

    def _add(self, tier: Tier, size: int) -> None:
        if tier == "host":
            self.host_bytes += size
        else:
            self.bytes += size

    def holds(self, page: Page) -> bool:
        """Tell whether an entry holds the memory of this page."""
        return id(page) in self._held

    def shared(self, entry: Entry) -> bool:
        """Tell whether another entry holds the memory of its page, too."""
        return self._held[id(entry.page)][0] > 1


def budgets(device: str | None, memory_bytes: int | None) -> tuple[int, int]:
    """Bytes for pages on the device, by default a quarter of free memory, and for those that wait in the computer's memory beside it."""
    free = psutil.virtual_memory().available // 4
    cuda = bool(device) and str(device).startswith("cuda")
    if memory_bytes is not None:
        return memory_bytes, free if cuda and memory_bytes else 0
    if not cuda:
        return free, 0
    return (torch.cuda.mem_get_info()[0] // 4 if torch.cuda.is_available() else free), free
