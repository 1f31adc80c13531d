"""Pages cached in memory: the keys and values of prompts, and the longest exact prefix of a new one. Knows neither models nor disks.

Pages hang in a tree: a child continues its parent's tokens. Keys are chain hashes over token ids, and the ids are compared on a hit.

    one tree per scope (keys.py)          tiers: DEVICE, and HOST where that is other memory
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import TYPE_CHECKING

from ...kv import PAGE_TOKENS, Page
from ...types import Grade, Reason
from ..entry import Entry, EntryIndex, Match, best_child
from ..keys import Ids, PinName, Role, Scope, page_key
from .eviction import Eviction
from .eviction_log import EvictionLog
from .pins import Pins

if TYPE_CHECKING:
    from ...checkpoints import Checkpoint
    from ..deletion import Deletion

CHILDREN = 256  # continuations of one page; the oldest unpinned leaf goes first
LONGER = "new after all that is cached"  # the cached prompt ended
OTHER = "cached prompts go on differently from here"
PIECES = "pieces"  # among digests of kernels: keys and checkpoints of a page come from pieces that ended elsewhere, and have other bits
Key = bytes  # inside the class that name is a property


class PrefixTree:
    """Cached pages in memory under a byte budget: least recently used leaves go first, tool groups last, pinned ones never. Thread safe.

    A page counts with all its bytes, however full. changes: counts admissions and removals: a match may have become longer. host_bytes:
    bytes of pages of another device that may wait in the computer's own memory. lock: guards all of it. index: also finds pages.
    """

    def __init__(self, budget_bytes: int, host_bytes: int = 0) -> None:
        self.eviction = Eviction(budget_bytes, host_bytes, lambda entry: self._drop_tree(entry, Reason.EVICTED))
        self.changes = 0
        self.lock = threading.RLock()
        self._roots: dict[Scope, Entry] = {}
        self.pins = Pins()
        self.log = EvictionLog()
        self.index: EntryIndex | None = None

    def __len__(self) -> int:
        return len(self.eviction)

    @property
    def bytes(self) -> int:
        """Bytes of pages on the device."""
        return self.eviction.bytes

    # -- looking up ------------------------------------------------------------------------------------------------

    def match(self, scope: Scope, ids: Ids, *, peek: bool = False) -> Match:
        """The longest cached prefix of ids[:-1] (the last token is always computed). Pages stay valid by reference.

        What is found counts as used, unless it is only peeked at.
        """
        with self.lock:
            if not peek:
                self.drop_changed(scope, ids)
            path, at = self._walk(scope, ids, len(ids) - 1)
            if not peek:
                self.eviction.touch(path)
                self.eviction.promote(path)
            reason, detail = self._why(scope, path, ids, at)
            if not peek:
                path, at = self._ready(path, at)
            numerics = frozenset().union(*(entry.numerics for entry in path))
            return Match(at, tuple(e.page for e in path if e.page is not None), reason, numerics, detail, tuple(path))

    def use(self, entries: Seq[Entry]) -> tuple[Page, ...]:
        """Count pages as used, and bring them to the device; returns them, none where one is gone or its file was written to."""
        with self.lock:
            if any(entry.page is None or entry.page.changed for entry in entries):
                return ()
            self.eviction.touch(list(entries))
            self.eviction.promote(list(entries))
            pages = tuple(entry.page for entry in entries if entry.page is not None)
            return pages if len(pages) == len(entries) else ()

    def attach_index(self, index: EntryIndex) -> None:
        """Tell an index of every page, of those that are there first."""
        with self.lock:
            self.index = index
            for entry in self.eviction:
                index.add(entry)

    def _index(self, entry: Entry) -> None:
        if self.index is not None:
            self.index.add(entry)

    def _ready(self, path: list[Entry], at: int) -> tuple[list[Entry], int]:
        """The part of a path that lies on the device, and its tokens: all of it, unless it is longer than the device's budget."""
        count = next((i for i, e in enumerate(path) if e.page is None or e.page.tier != "device"), len(path))
        return path[:count], min(at, count * PAGE_TOKENS)

    def entries(self, namespace: str | None = None) -> list[Entry]:
        """The cached pages of a namespace (None: of all), the least recently used first."""
        with self.lock:
            return [entry for entry in self.eviction if namespace in (None, entry.scope.namespace)]

    def drop_changed(self, scope: Scope, ids: Ids) -> None:
        """Drop pages of this prompt whose files were written to, and what continues them: they have to be verified again."""
        with self.lock:
            for entry in self._walk(scope, ids, len(ids))[0]:
                if entry.page is not None and entry.page.changed:
                    self._drop_tree(entry, Reason.BAD_BLOB)
                    return

    def path(self, scope: Scope, ids: Ids) -> list[Entry]:
        """The entries that hold the longest cached prefix of all these ids."""
        with self.lock:
            return self._walk(scope, ids, len(ids))[0]

    def continuations(self, scope: Scope, before: Ids, first: Ids) -> dict[Key, Ids]:
        """The ids of each page after the whole pages of `before` that begins with `first`, by key."""
        with self.lock:
            path, at = self._walk(scope, before, len(before))
            above = path[-1] if path else self._roots.get(scope)
            if above is None or at < len(before):
                return {}
            wanted, size = first.tobytes(), len(first)
            return {key: child.ids for key, child in above.children.items() if child.ids[:size].tobytes() == wanted}

    def checkpoints(self, scope: Scope, ids: Ids) -> dict[int, Checkpoint]:
        """The checkpoints of a cached prompt, by position."""
        with self.lock:
            path = [(entry, entry.page) for entry in self._walk(scope, ids, len(ids))[0] if entry.page]
            known = {entry.first + slots: one for entry, page in path for slots, one in page.checkpoints.items()}
            return {at: one for at, one in known.items() if at <= len(ids)}

    def _walk(self, scope: Scope, ids: Ids, limit: int) -> tuple[list[Entry], int]:
        """The entries that hold the longest cached prefix of ids[:limit], and its length."""
        entry, at, path = self._roots.get(scope), 0, []
        while entry is not None and at < limit:
            best, run = best_child(entry, ids[at : min(at + PAGE_TOKENS, limit)])
            if best is None:
                break
            path.append(best)
            at += run
            entry = best if run == PAGE_TOKENS else None
        return path, at

    def _why(self, scope: Scope, path: list[Entry], ids: Ids, at: int) -> tuple[Reason, str]:
        if at >= len(ids) - 1:
            return Reason.LAST_TOKEN, ""
        inside = at % PAGE_TOKENS
        parent = scope.root if at < PAGE_TOKENS else path[at // PAGE_TOKENS - 1].key
        gone = self.log.why(parent, ids[at - inside : at - inside + PAGE_TOKENS], inside, scope.fingerprint)
        if gone not in (None, Reason.FINGERPRINT):
            return gone, ""
        for other in self._roots:
            same = (other.namespace, other.regime, other.precision) == (scope.namespace, scope.regime, scope.precision)
            if same and other != scope and self._walk(other, ids, len(ids) - 1)[1] > at:
                gone = Reason.ADAPTER if other.weights == scope.weights else Reason.FINGERPRINT
        if gone is not None:
            return gone, "cached under another adapter" if gone is Reason.ADAPTER else "cached under other weights, config or versions"
        if not at:
            return Reason.COLD, ""
        ended = len(path[-1].ids) == (inside or PAGE_TOKENS) and not path[-1].children
        return Reason.DIVERGED, LONGER if ended else OTHER

    def audit(self) -> dict[str, int]:
        """Counts of what memory holds; pins count every pin of a prefix, pinned_pages every page once."""
        with self.lock:
            return {
                "pages": len(self.eviction),
                "bytes": self.bytes,
                "host_bytes": self.eviction.host_bytes,
                "scopes": len(self._roots),
                "pins": len(self.pins),
                "pinned_pages": sum(entry.pins > 0 for entry in self.eviction),
                "indexed": 0 if self.index is None else len(self.index),
                "evictions": len(self.log),
            }

    # -- keeping ---------------------------------------------------------------------------------------------------

    def admit(
        self, scope: Scope, ids: Ids, pages: Seq[Page], numerics: frozenset[str] | str, prefix_tokens: int = 0, evict: bool = True
    ) -> list[Entry]:
        """Keep `pages`, which hold `ids` from the start, and return their entries. Known pages are not kept twice.

        The last page may be partly filled; a longer one replaces a shorter. numerics: digests of all kernels that computed them.
        prefix_tokens: length of the stable part of the prompt.
        """
        if self.eviction.budget_bytes == 0 or not len(ids):
            return []
        assert len(pages) == -(-len(ids) // PAGE_TOKENS), f"{len(pages)} pages for {len(ids)} tokens"
        numerics = frozenset([numerics]) if isinstance(numerics, str) else numerics
        with self.lock:
            entry = self._roots.get(scope) or self._roots.setdefault(scope, Entry(scope.root, scope, ids[:0], None, None))
            path = []
            for page, start in zip(pages, range(0, len(ids), PAGE_TOKENS), strict=True):
                entry = self._keep(entry, ids[start : start + PAGE_TOKENS], page, numerics)
                path.append(entry)
                if start < prefix_tokens:
                    entry.role = max(entry.role, Role.PREFIX)
            self.eviction.touch(path)
            if evict:
                self.eviction.make_room()
            return path

    def _keep(self, parent: Entry, ids: Ids, page: Page, numerics: frozenset[str]) -> Entry:
        child, run = best_child(parent, ids)
        if child is not None and run == len(ids):
            self._take_checkpoints(child, page, run, numerics)
            return child  # known already, perhaps longer
        if child is not None and run == len(child.ids):
            assert child.page is not None
            lent = {slots: known for slots, known in child.page.checkpoints.items() if slots <= run and slots not in page.checkpoints}
            if parent.scope.precision != "exact" and self.eviction.holds(page):
                lent = {}  # it is lent to this scope: exact requests start from the checkpoints of this very page
            numerics |= _mixed(child.first, page.checkpoints, lent)
            page.checkpoints = lent | page.checkpoints
            if lent or page is child.page:  # one that has grown may have taken checkpoints meanwhile
                numerics |= child.numerics
            self._rename(child, ids.copy())  # a longer page takes its place, its pins and its children (it has none: it was not full)
            self.eviction.replace(child, page)
            child.numerics, child.role = numerics, min(child.role, Role.PREFIX)
            self._index(child)
            return child
        child = Entry(page_key(parent.key, ids), parent.scope, ids.copy(), page, parent, numerics)
        parent.children[child.key] = child
        self.eviction.add(child)
        self._index(child)
        self.changes += 1
        self.log.discard(child.key)
        if len(parent.children) > CHILDREN:
            self.eviction.drop_oldest([c for c in self.eviction if c.parent is parent and c is not child])
        return child

    def _take_checkpoints(self, entry: Entry, page: Page, tokens: int, numerics: frozenset[str]) -> None:
        """Add checkpoints of another page with the same first tokens: a branched sequence made them, in pieces of its own."""
        assert entry.page is not None
        if entry.scope.precision != "exact" and self.eviction.shared(entry):
            return  # it is lent, as in _keep
        held = entry.page.checkpoints
        new = {slots: known for slots, known in page.checkpoints.items() if slots <= tokens}
        if new := {slots: known for slots, known in new.items() if slots not in held or held[slots].cuts != known.cuts}:
            entry.page.checkpoints, entry.passing = held | new, entry.passing | new.keys()  # the disk has none of these yet
            entry.numerics |= numerics | _mixed(entry.first, held, new)
            self.eviction.replace(entry, entry.page)

    def _rename(self, entry: Entry, ids: Ids) -> None:
        """Give an entry without children more or fewer tokens."""
        assert entry.parent is not None and not entry.children
        del entry.parent.children[entry.key]
        entry.key, entry.ids, entry.row = page_key(entry.parent.key, ids), ids, 0
        entry.parent.children[entry.key] = entry
        self.log.discard(entry.key)
        self.changes += 1

    def retract(self, scope: Scope, ids: Ids, since: int, pages: Seq[Page]) -> list[Key]:
        """Take back what a failed request admitted: tokens of `ids` after the first `since`, where they lie in its own `pages`.

        Returns the keys of the dropped pages.
        """
        own = {id(page) for page in pages}
        with self.lock:
            path, _ = self._walk(scope, ids, len(ids))
            for entry, start in zip(path, range(0, len(ids), PAGE_TOKENS), strict=False):
                if id(entry.page) in own and start + len(entry.ids) > since:
                    return self._shorten(entry, max(0, since - start), Reason.NON_FINITE)
        return []

    def adapter_scopes(self, scope: Scope) -> list[Scope]:
        """The scopes of all adapters over the same weights, and this one."""
        with self.lock:
            base = replace(scope, fingerprint=scope.weights)
            return [scope, *(other for other in self._roots if other != scope and replace(other, fingerprint=other.weights) == base)]

    def drop(self, scope: Scope, ids: Ids, reason: Reason) -> list[Key]:
        """Drop the page in which `ids` end and those that continue it, pinned or not; returns their keys."""
        with self.lock:
            path, at = self._walk(scope, ids, len(ids))
            return self._drop_tree(path[-1], reason) if path and at == len(ids) else []

    def clear(self, namespace: str | None = None, grade: Grade | None = None) -> None:
        """Drop everything, or everything of one namespace or grade, pinned or not."""
        with self.lock:
            for scope in [s for s in self._roots if namespace in (None, s.namespace) and grade in (None, s.precision)]:
                for child in list(self._roots[scope].children.values()):
                    self._drop_tree(child, Reason.EVICTED)
            self.pins.release_evicted()

    def remove(self, deletion: Deletion) -> tuple[int, int]:
        """Drop the pages that a deletion covers, and those that continue them; returns (pages, bytes).

        Of one tool group: tokens that others have pinned stay.
        """
        with self.lock:
            pages, size = len(self), self.bytes + self.eviction.host_bytes
            for entry in [entry for entry in self.eviction if deletion.covers_page(entry)]:
                kept = self.pins.tokens(entry) if deletion.group is not None else 0
                if entry.page is not None and kept < len(entry.ids):
                    self._shorten(entry, kept, Reason.DELETED)
            self.pins.release_evicted()
            return pages - len(self), size - self.bytes - self.eviction.host_bytes

    def pinned(self) -> list[tuple[PinName, list[Entry]]]:
        """The pages of each pinned prefix, under its name."""
        with self.lock:
            return self.pins.paths

    def _shorten(self, entry: Entry, kept: int, reason: Reason) -> list[Key]:
        """Keep the first `kept` tokens of a page, and no page that continues it; returns the keys of dropped pages."""
        if not kept:
            return self._drop_tree(entry, reason)
        gone = [key for child in list(entry.children.values()) for key in self._drop_tree(child, reason)]
        assert entry.parent is not None
        ids = entry.ids[:kept]
        if page_key(entry.parent.key, ids) in entry.parent.children:
            return gone + self._drop_tree(entry, reason)  # another page keeps just these
        gone.append(entry.key)
        self._rename(entry, ids)
        return gone

    # -- pins and the budget ---------------------------------------------------------------------------------------

    def pin(self, scope: Scope, ids: Ids, role: Role = Role.GROUP) -> int:
        """Pin the pages that hold all of `ids`; returns how many. Pinned pages are never evicted. 0: some of `ids` are not cached."""
        with self.lock:
            path, at = self._walk(scope, ids, len(ids))
            if at < len(ids):
                return 0
            self.eviction.touch(path)
            self.pins.add(scope.pin_name(ids), path, len(ids), role)
            self.eviction.make_room()
            return len(path)

    def release_pin(self, name: PinName, role: Role = Role.GROUP, first: bool = False) -> bool:
        """Release one pin of that name and role; False if there is none. first: pages that only it pinned are evicted before all others."""
        with self.lock:
            released, idle = self.pins.release(name, role), list[Entry]()
            for entry in reversed(released) if first else ():
                if entry.pins or len(entry.children) > bool(idle):
                    break
                idle.insert(0, entry)
            self.eviction.retire(idle)
            self.eviction.make_room()
            return bool(released)

    def _drop_tree(self, entry: Entry, reason: Reason) -> list[Key]:
        """Drop a page and all its descendants, the deepest first; returns their keys."""
        below = [entry]
        for known in below:
            below.extend(known.children.values())
        for gone in reversed(below):
            assert gone.page is not None and gone.parent is not None
            gone.page.wrong |= reason is Reason.BAD_BLOB  # requests that run on it may admit it again
            if self.index is not None:
                self.index.drop(gone)
            self.log.add(gone.parent.key, gone.key, gone.ids, gone.scope.fingerprint, reason)
            self.eviction.remove(gone)
            self.changes += 1
            del gone.parent.children[gone.key]
            gone.page = None
            if gone.parent.parent is None and not gone.parent.children:
                del self._roots[gone.scope]
        return [gone.key for gone in below]


def _mixed(first: int, held: dict[int, Checkpoint], new: dict[int, Checkpoint]) -> frozenset[str]:
    """PIECES if new checkpoints of a page, which begins at token `first`, come from other pieces than what it holds."""

    def ends(known: Iterable[Checkpoint], slots: int) -> set[int]:
        return {cut for one in known for cut in one.cuts if 0 < cut - first <= min(slots, PAGE_TOKENS - 1)}

    return frozenset([PIECES] if any(ends([one], slots) != ends(held.values(), slots) for slots, one in new.items()) else [])
