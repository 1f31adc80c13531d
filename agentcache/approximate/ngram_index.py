"""Text that repeats cached prompts: which tokens of a new prompt stand, equal token for token, anywhere in them. Knows no models.

An exact index over runs of GRAM ids: every fourth place of every cached page is in it, chosen by content, so that a repeat of 64 tokens is
missed about once in a million times. Each proposal is aligned and compared token by token before it is returned.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..kv import Page
from ..store.entry import Entry, best_child, common
from ..store.keys import Ids, Scope
from ..store.memory.prefix_tree import PrefixTree
from ..store.store import Store
from ..types import PAGE_TOKENS, Precision

GRAM = 16  # ids that are hashed together: shorter repeats are never worth attaching
SAMPLE = 4  # one place in so many is in the index
PLACES = 4  # places kept per run of ids: the same text may stand after different text
_BASE = 0x9E3779B97F4A7C15  # odd, hence invertible modulo 2**64
_INVERSE = pow(_BASE, -1, 1 << 64)
_MIX = np.uint64(0xFF51AFD7ED558CCD)


@dataclass(frozen=True, slots=True)
class Run:
    """Prompt tokens [start, stop) that equal cached ones."""

    start: int
    stop: int
    entries: tuple[Entry, ...]  # consecutive pages that hold them
    offset: int  # slot of the first token in the first of these
    pages: tuple[Page, ...] = ()  # those of the entries; they stay valid by reference

    @property
    def source(self) -> int:
        """The position at which the first token was computed."""
        return self.entries[0].place * PAGE_TOKENS + self.offset

    @property
    def base(self) -> int:
        """The position of the first slot of its first page."""
        return self.source - self.offset

    @property
    def shift(self) -> int:
        """Positions by which the tokens are moved."""
        return self.start - self.source

    @property
    def numerics(self) -> frozenset[str]:
        """Digests of the kernels that computed it."""
        return frozenset[str]().union(*(entry.numerics for entry in self.entries))

    @property
    def precision(self) -> Precision:
        """Precision of its stored pages."""
        found = self.entries[0].scope.precision
        assert found != "approximate", "the index holds no such pages"
        return found

    def cut(self, start: int, stop: int) -> Run:
        """The part of the run within prompt tokens [start, stop)."""
        start, stop = max(start, self.start), min(stop, self.stop)
        slot = self.offset + start - self.start
        first, last = slot // PAGE_TOKENS, -(-(slot + stop - start) // PAGE_TOKENS)
        return Run(start, stop, self.entries[first:last], slot - first * PAGE_TOKENS, self.pages[first:last])


def merge_runs(better: Sequence[Run], others: Iterable[Run], since: int, stop: int, min_tokens: int) -> list[Run]:
    """The `better` runs, and the parts of `others` between them that have at least `least` tokens; in order, disjoint."""
    edges = [since, *(edge for run in better for edge in (run.start, run.stop)), stop]
    pieces = [
        run.cut(low, high) for run in others for low, high in zip(edges[::2], edges[1::2]) if max(low, run.start) < min(high, run.stop)
    ]
    return sorted([*better, *(run for run in pieces if run.stop - run.start >= min_tokens)], key=lambda run: run.start)


def _powers(base: int, count: int) -> np.ndarray:
    powers = np.full(count, base & 0xFFFFFFFFFFFFFFFF, dtype=np.uint64)
    powers[0] = 1
    return np.multiply.accumulate(powers, dtype=np.uint64)


def grams(ids: Ids) -> tuple[np.ndarray, np.ndarray]:
    """Places and hashes of the sampled runs of GRAM ids: the same run is sampled wherever it stands."""
    count = len(ids) - GRAM + 1
    if count <= 0:
        return np.empty(0, np.int64), np.empty(0, np.uint64)
    mixed = (ids.astype(np.uint64) + np.uint64(1)) * _MIX
    mixed ^= mixed >> np.uint64(29)
    sums = np.zeros(len(ids) + 1, dtype=np.uint64)
    np.add.accumulate(mixed * _powers(_BASE, len(ids)), out=sums[1:], dtype=np.uint64)
    hashes = (sums[GRAM:] - sums[:-GRAM]) * _powers(_INVERSE, count)
    hashes ^= hashes >> np.uint64(31)
    chosen = np.nonzero(hashes % np.uint64(SAMPLE) == 0)[0]
    return chosen, hashes[chosen]


class NgramIndex:
    """The index over the kept pages of all scopes; a scope never sees another one's. Its owner's lock guards it."""

    def __init__(self) -> None:
        self._places: dict[Scope, dict[int, list[tuple[Entry, int]]]] = {}
        self._noted: dict[int, Ids] = {}  # id of an entry -> its ids as they are in the index

    def __len__(self) -> int:
        """Number of runs of ids that can be found."""
        return sum(map(len, self._places.values()))

    def add(self, entry: Entry) -> None:
        """Put the new ids of an entry into the index; pages that follow moved text are left out."""
        if entry.scope.precision == "approximate":
            return
        known = self._noted.get(id(entry), entry.ids[:0])
        if common(known, entry.ids) < len(known):  # it was shortened, and has grown by others since
            self.drop(entry)
            known = entry.ids[:0]
        since = max(0, len(known) - GRAM + 1)
        index = self._places.setdefault(entry.scope, {})
        at, hashes = grams(entry.ids[since:])
        for offset, gram in zip((at + since).tolist(), hashes.tolist(), strict=True):
            places = index.setdefault(gram, [])
            if len(places) < PLACES and (entry, offset) not in places:
                places.append((entry, offset))
        self._noted[id(entry)] = entry.ids

    def drop(self, entry: Entry) -> None:
        """Take an entry out."""
        if (noted := self._noted.pop(id(entry), None)) is None:
            return
        index = self._places.get(entry.scope, {})
        for gram in grams(noted)[1].tolist():
            left = [place for place in index.get(gram, ()) if place[0] is not entry]
            if left:
                index[gram] = left
            else:
                index.pop(gram, None)
        if not index:
            self._places.pop(entry.scope, None)

    def find(self, scope: Scope, ids: Ids, since: int, min_tokens: int) -> list[Run]:
        """Runs of at least `least` tokens of ids[since:-1] that are cached anywhere in this scope; disjoint, as long as possible."""
        index = self._places.get(scope)
        if not index:
            return []
        stop, runs, reached = len(ids) - 1, [], since
        at, hashes = grams(ids[since:stop])
        for place, gram in zip((at + since).tolist(), hashes.tolist(), strict=True):
            if place < reached or gram not in index:
                continue
            found = [run for run in self._aligned(index[gram], ids, place, reached, stop) if run.stop - run.start >= min_tokens]
            if found:
                best = max(found, key=lambda run: run.stop - run.start)
                runs.append(best)
                reached = best.stop
        return runs

    def _aligned(self, places: Iterable[tuple[Entry, int]], ids: Ids, at: int, low: int, high: int) -> Iterator[Run]:
        """Each proposal, grown in both directions as far as the ids are equal, within [low, high) of the prompt."""
        for entry, offset in places:
            if entry.page is None or offset >= len(entry.ids):
                continue
            ahead = common(entry.ids[offset:], ids[at:high])
            if ahead < GRAM:
                continue
            back, first, slot = 0, entry, offset
            entries = [entry]
            while True:
                same = common(first.ids[:slot][::-1], ids[low : at - back][::-1])
                back, slot = back + same, slot - same
                if slot or at - back == low or first.parent is None or first.parent.page is None:
                    break
                if first.parent.ids[-1] != ids[at - back - 1]:
                    break
                first = first.parent
                slot = len(first.ids)
                entries.insert(0, first)
            last = entry
            while offset + ahead == len(last.ids) == PAGE_TOKENS and at + ahead < high:
                child, run = best_child(last, ids[at + ahead : min(at + ahead + PAGE_TOKENS, high)])
                if child is None or not run:
                    break
                entries.append(child)
                ahead, offset, last = ahead + run, -ahead, child
                if run < PAGE_TOKENS:
                    break
            yield Run(at - back, at + ahead, tuple(entries), slot)


def repeats(tree: PrefixTree, scope: Scope, ids: Ids, since: int, min_tokens: int) -> list[Run]:
    """Runs of at least `least` tokens of ids[since:-1] that stand anywhere in this scope's prompts in memory. Counts as used.

    The first call gives the tree its index: an engine whose callers never ask pays nothing for it.
    """
    with tree.lock:
        index = tree.index
        if not isinstance(index, NgramIndex):
            index = NgramIndex()
            tree.attach_index(index)
        return [replace(run, pages=pages) for run in index.find(scope, ids, since, min_tokens) if (pages := tree.use(run.entries))]


def stored_repeats(
    store: Store, scope: Scope, ids: Ids, since: int, min_tokens: int, precisions: Sequence[Precision] = ("exact",)
) -> list[Run]:
    """The same over pages of these precisions, the most exact first, which are preferred. The scope's own plays no part."""
    found: list[Run] = []
    for precision in precisions:
        more = repeats(store.tree, replace(scope, precision=precision), ids, since, min_tokens)
        found = merge_runs(found, more, since, len(ids), min_tokens) if found else more
    return found
