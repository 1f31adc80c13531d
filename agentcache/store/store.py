"""Remembering pages: which prompts' keys and values are kept, and the longest exact prefix of a new one. Knows nothing of models.

Pages hang in a tree: a child continues its parent's tokens. Keys are chain hashes over token ids, and the ids are compared on a hit.

    page_key = BLAKE3(parent key ‖ ids)          root key = BLAKE3(namespace)          one tree per (namespace, fingerprint, regime)
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np
from blake3 import blake3

from ..errors import ConfigError
from ..kv import PAGE_TOKENS, Page
from ..types import Reason

Ids = np.ndarray  # uint32 [tokens]
CHILDREN = 256  # continuations kept under one page; the oldest unpinned leaf goes first
REMEMBERED = 65536  # keys of dropped pages, so that a miss can say why


def as_ids(ids: Seq[int]) -> Ids:
    """Token ids as the array that keys are made of."""
    return np.asarray(ids, dtype=np.uint32)


@dataclass(frozen=True, slots=True)
class Scope:
    """What must be equal for pages to be shared: who asks, under which weights, with which rotary regime."""

    namespace: str
    fingerprint: str
    regime: str = ""

    @property
    def root(self) -> bytes:
        """The key above the first page. Without the fingerprint: the same tokens have the same keys under other weights."""
        return blake3(repr((self.namespace, self.regime)).encode()).digest()


@dataclass(slots=True, eq=False)
class Entry:
    """One kept page: `ids` are its valid tokens, `numerics` the digest of the kernels that computed it."""

    key: bytes
    ids: Ids
    page: Page | None
    parent: Entry | None
    numerics: str = ""
    children: list[Entry] = field(default_factory=list)
    pins: int = 0
    used: int = 0


@dataclass(frozen=True, slots=True)
class Match:
    """The longest exact prefix: `pages` hold tokens [0, tokens). `missed` says why it ends there.

    numerics: digests of the kernels that computed the pages.
    """

    tokens: int
    pages: tuple[Page, ...]
    missed: Reason
    numerics: frozenset[str] = frozenset()


def _common(a: Ids, b: Ids) -> int:
    short = min(len(a), len(b))
    differs = np.flatnonzero(a[:short] != b[:short])
    return int(differs[0]) if len(differs) else short


class Store:
    """Kept pages in memory under a byte budget: least recently used leaves go first, pinned ones never. Thread safe.

    changes: counts admissions and removals, so that a caller can tell whether a match may have become longer.
    """

    def __init__(self, budget_bytes: int) -> None:
        if budget_bytes < 0:
            raise ConfigError(f"memory_bytes={budget_bytes!r}: must be 0 (keep nothing) or more")
        self.budget_bytes = budget_bytes
        self.bytes = 0
        self.changes = 0
        self._tick = 0
        self._lock = threading.RLock()
        self._roots: dict[Scope, Entry] = {}
        self._entries: dict[int, Entry] = {}
        self._gone: OrderedDict[bytes, Reason] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    # -- looking up ------------------------------------------------------------------------------------------------

    def match(self, scope: Scope, ids: Ids) -> Match:
        """The longest kept prefix of ids[:-1] (the last token is always computed). Touches what it finds; pages stay valid by reference."""
        with self._lock:
            entry, at, pages, path = self._walk(scope, ids, len(ids) - 1)
            return Match(at, tuple(pages), self._why(scope, entry, ids, at), frozenset(e.numerics for e in path))

    def _walk(self, scope: Scope, ids: Ids, limit: int) -> tuple[Entry | None, int, list[Page], list[Entry]]:
        entry, at, pages, path = self._roots.get(scope), 0, [], []
        while entry is not None and at < limit:
            best, run = self._best_child(entry, ids[at : min(at + PAGE_TOKENS, limit)])
            if best is None or best.page is None:
                break
            pages.append(best.page)
            path.append(best)
            at += run
            self._touch(best)
            if run < PAGE_TOKENS:
                break
            entry = best
        return entry, at, pages, path

    def _best_child(self, parent: Entry, ids: Ids) -> tuple[Entry | None, int]:
        best, longest = None, 0
        for child in parent.children:
            if child.ids[0] == ids[0] and (run := _common(child.ids, ids)) > longest:
                best, longest = child, run
                if run == len(ids):
                    break
        return best, longest

    def _why(self, scope: Scope, entry: Entry | None, ids: Ids, at: int) -> Reason:
        if at >= len(ids) - 1:
            return Reason.LAST_TOKEN
        parent = scope.root if entry is None else entry.key
        whole = ids[at - at % PAGE_TOKENS :][:PAGE_TOKENS]
        if (gone := self._gone.get(self.key(parent, whole))) is not None:
            return gone
        return Reason.DIVERGED if at else Reason.COLD

    def _touch(self, entry: Entry) -> None:
        self._tick += 1
        entry.used = self._tick

    @staticmethod
    def key(parent: bytes, ids: Ids) -> bytes:
        """Chain hash of one page."""
        return blake3(parent + ids.tobytes()).digest()

    # -- keeping ---------------------------------------------------------------------------------------------------

    def admit(self, scope: Scope, ids: Ids, pages: Seq[Page], numerics: str) -> None:
        """Keep `pages`, which hold `ids` from the start. Known pages are not kept twice.

        The last page may be partly filled; a longer one replaces a shorter.
        """
        if self.budget_bytes == 0:
            return
        with self._lock:
            entry = self._roots.setdefault(scope, Entry(scope.root, ids[:0], None, None))
            for page, start in zip(pages, range(0, len(ids), PAGE_TOKENS), strict=True):
                part = ids[start : start + PAGE_TOKENS].copy()
                child = self._keep(entry, part, page, numerics)
                if len(part) == PAGE_TOKENS:
                    entry = child
            self.changes += 1
            self._evict()

    def _keep(self, parent: Entry, ids: Ids, page: Page, numerics: str) -> Entry:
        for child in parent.children:
            run = _common(child.ids, ids)
            if run == len(ids) and (run == len(child.ids) or run < PAGE_TOKENS):
                self._touch(child)
                return child  # known already, perhaps longer
            if run == len(child.ids) and not child.children:
                self._replace(child, self.key(parent.key, ids), ids, page, numerics)
                return child
        child = Entry(self.key(parent.key, ids), ids, page, parent, numerics)
        parent.children.append(child)
        self._entries[id(child)] = child
        self.bytes += page.spec.page_bytes
        self._gone.pop(child.key, None)
        self._touch(child)
        if len(parent.children) > CHILDREN:
            self._drop_oldest([c for c in parent.children if c is not child])
        return child

    def _replace(self, entry: Entry, key: bytes, ids: Ids, page: Page, numerics: str) -> None:
        entry.key, entry.ids, entry.page, entry.numerics = key, ids, page, numerics
        self._gone.pop(key, None)
        self._touch(entry)

    def forget(self, scope: Scope, ids: Ids, since: int) -> None:
        """Drop what is kept of this prompt behind its first `since` tokens: a request that failed withdraws its own pages."""
        with self._lock:
            entry, at = self._roots.get(scope), 0
            while entry is not None and at < len(ids):
                child, run = self._best_child(entry, ids[at : at + PAGE_TOKENS])
                if child is None:
                    return
                if at + run > since:
                    self._drop_tree(child, Reason.NON_FINITE)
                    return
                entry, at = child, at + run

    def clear(self, namespace: str | None = None, reason: Reason = Reason.EVICTED) -> None:
        """Drop everything, or everything of one namespace, pinned or not."""
        with self._lock:
            for scope in [s for s in self._roots if namespace in (None, s.namespace)]:
                for child in list(self._roots.pop(scope).children):
                    self._drop_tree(child, reason)

    # -- pins and the budget ---------------------------------------------------------------------------------------

    def pin(self, scope: Scope, ids: Ids, count: int = 1) -> int:
        """Pin (count=1) or unpin (count=-1) the pages that hold `ids`; returns how many. Pinned pages are never evicted."""
        with self._lock:
            _, at, _, path = self._walk(scope, ids, len(ids))
            for entry in path:
                entry.pins = max(0, entry.pins + count)
            if count < 0:
                self._evict()
            return len(path) if at == len(ids) else 0

    def _evict(self) -> None:
        while self.bytes > self.budget_bytes:
            if not self._drop_oldest(list(self._entries.values())):
                return

    def _drop_oldest(self, among: list[Entry]) -> bool:
        leaves = [e for e in among if not e.children and not e.pins]
        if not leaves:
            return False
        self._drop_tree(min(leaves, key=lambda e: e.used), Reason.EVICTED)
        return True

    def _drop_tree(self, entry: Entry, reason: Reason) -> None:
        for child in list(entry.children):
            self._drop_tree(child, reason)
        assert entry.page is not None and entry.parent is not None
        entry.parent.children.remove(entry)
        self.bytes -= entry.page.spec.page_bytes
        del self._entries[id(entry)]
        entry.page = None
        self.changes += 1
        self._gone[entry.key] = reason
        while len(self._gone) > REMEMBERED:
            self._gone.popitem(last=False)
