"""Pages that only the disk has, brought into memory for text that a prompt repeats somewhere. Knows no models.

finding ──> loading ──> done      finding: on a reading thread; signatures propose, ids in the index are compared, what pays is chosen
   └───────────┴──────> done      loading: one PagePrefetch per chain of pages, from its root, because a page hangs under those before it

What came is found by `repeats` like everything else in memory. Whatever fails is a refusal, with its reason.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..errors import FAULTS
from ..kv import PAGE_TOKENS
from ..kv_spec import KVSpec
from ..store.disk.index import Row
from ..store.entry import PageQuery, common
from ..store.keys import Ids, Scope
from ..store.page_prefetch import PagePrefetch
from ..store.policy import slow_load_ms
from ..types import Precision, Reason, Refusal
from .minhash import Proposal, StoredText
from .minhash_index import MinHashIndex
from .ngram_index import GRAM, stored_repeats
from .windows import Window

TRIED = 4  # proposals looked at per window
MOST_BYTES = 1 << 30


@dataclass(frozen=True, slots=True, eq=False)
class StoredRepeat:
    """Prompt tokens [start, stop) that equal stored ones. rows: the pages from the root on; `missing` of them are not in memory."""

    start: int
    stop: int
    rows: tuple[Row, ...]
    ids: Ids  # of all its pages
    missing: int
    text: StoredText

    @property
    def tokens(self) -> int:
        return self.stop - self.start

    @property
    def keys(self) -> frozenset[bytes]:
        """Keys of the pages that must be read."""
        return frozenset(row.page_key for row in self.rows[len(self.rows) - self.missing :])


@dataclass(frozen=True, slots=True, eq=False)
class SegmentQuery:
    """The text of a prompt that may stand at other positions on disk."""

    scope: Scope  # with the precision that its pages must have
    ids: Ids
    windows: Sequence[Window]  # of the prompt
    ms_per_token: float  # cost of computing, 0 if unknown
    spec: KVSpec
    since: int = 0  # windows before this token do not count
    min_tokens: int = 32  # tokens of the shortest repeat that is read
    most_bytes: int = MOST_BYTES  # read at most, within a quarter of the budget of pages in memory


def prefetch(text: MinHashIndex, wanted: SegmentQuery, wake: Callable[[], None]) -> SegmentPrefetch | None:
    """Bring pages into memory that repeat some of a prompt's text; None if there can be none."""
    store = text.store
    with store.deletions.lock:
        if store.disk is None or wanted.scope.precision == "approximate" or not store.budget_bytes or not wanted.windows:
            return None
        return SegmentPrefetch(wanted, wake, text)


class SegmentPrefetch:
    """Ask `pending()` until it is False, on one thread. `close()` ends it.

    tokens: of the prompt, in repeats whose pages were read; bytes, ms: of reading from disk, all of it. refusals: repeats that were not
    read, and why. notes: other faults. wake: called from the reading thread when a step is done.
    """

    def __init__(self, wanted: SegmentQuery, wake: Callable[[], None], texts: MinHashIndex) -> None:
        store, tree, disk = texts.store, texts.store.tree, texts.store.disk
        assert wanted.scope.precision != "approximate" and disk is not None
        self._text_scope = replace(wanted.scope, precision="exact")  # texts are indexed as exact, whatever precision their pages have now
        self._wanted, self._wake, self._texts, self._tree, self._disk = wanted, wake, texts, tree, disk
        self._store = store
        self._scope, self._ids, self._since, self._min_tokens = wanted.scope, wanted.ids, wanted.since, wanted.min_tokens
        self._precision: Precision = wanted.scope.precision
        self._ms_per_token = disk.cost(wanted.scope.fingerprint, wanted.ms_per_token)
        self._most_bytes = min(wanted.most_bytes, store.budget_bytes // 4)
        self._done = False
        self.tokens = self.bytes = 0
        self.ms = 0.0
        self.refusals: list[Refusal] = []
        self.notes: list[str] = []
        self._children: dict[bytes, list[Row]] = {}
        self._pages: dict[bytes, Row | None] = {}
        self._chosen: list[tuple[StoredRepeat, list[StoredRepeat]]] = []  # the repeat whose chain is read, and all repeats within it
        self._chain: PagePrefetch | None = None
        self._stop = threading.Event()
        self._found = threading.Event()  # set once `_chosen` is final
        self._began = time.perf_counter()
        try:
            disk.submit(self._find)
        except RuntimeError as error:  # no thread to read on
            self._end(f"nothing was looked for on disk: {error}")

    def pending(self) -> bool:
        """Tell whether pages are still on their way. Never blocks for longer than a lookup."""
        if not self._done and self._found.is_set():
            try:
                self._load()
            except FAULTS as error:
                self._end(f"nothing more was brought from disk: {type(error).__name__}: {error}")
        return not self._done

    def close(self) -> None:
        """Stop reading: no request waits any more."""
        self._stop.set()
        if self._chain is not None:
            self._chain.close()
        self._end("")

    def _end(self, note: str) -> None:
        if note:
            self.notes.append(note)
        if not self._done:
            self._done = True
            self.ms = (time.perf_counter() - self._began) * 1e3

    # -- finding ---------------------------------------------------------------------------------------------------

    def _find(self) -> None:
        """Find, on a reading thread, text of the prompt that is on disk, and choose the repeats that are worth reading."""
        try:
            self._chosen = self._worth_it(self._repeats())
        except FAULTS as error:  # a damaged index: computed instead, and said
            self.notes.append(f"nothing was found on disk: {type(error).__name__}: {error}")
        finally:
            self._found.set()
            self._wake()

    def _repeats(self) -> list[StoredRepeat]:
        self._texts.refresh(self._text_scope)
        precisions = tuple(dict.fromkeys(("exact", self._precision)))  # each once
        here = stored_repeats(self._store, self._scope, self._ids, self._since, self._min_tokens, precisions)
        covered = [(run.start, run.stop) for run in here]
        found = []
        for window in self._wanted.windows:
            if self._stop.is_set():
                return []
            if window.stop <= self._since or any(start <= window.start and window.stop <= stop for start, stop in covered):
                continue
            for proposal in self._texts.find(self._text_scope, self._ids, window)[:TRIED]:
                repeat = self._aligned(window, proposal)
                if repeat is not None:
                    covered.append((repeat.start, repeat.stop))
                    found.append(repeat)
                    break
        return [repeat for repeat in found if repeat.missing]

    def _aligned(self, window: Window, proposal: Proposal) -> StoredRepeat | None:
        """The proposal as a run of equal ids, grown as far as it goes on disk."""
        text, ids, stop = proposal.text, self._ids, len(self._ids) - 1
        stored = self._under(text.parent, text.page)
        if not stored:
            self._texts.drop_missing(self._text_scope, [text])
        if not (pages := [row for row in stored if row.precision == self._precision]):
            return None
        size = window.stop - window.start
        low, high = max(self._since, window.start - size), min(stop, window.stop + size)
        near = slice(max(0, text.slot - size), max(0, text.slot + text.tokens + size))
        best, page = max(((longest_run(row.ids[near], ids[low:high]), row) for row in pages), key=lambda found: found[0][2])
        rows = self._path(page) if best[2] else None
        if rows is None:
            return None
        at, start = page.place * PAGE_TOKENS + near.start + best[0], low + best[1]
        chain = np.concatenate([row.ids for row in rows])
        start -= common(chain[:at][::-1], ids[self._since : start][::-1])
        end = low + best[1] + common(chain[at:], ids[low + best[1] : stop])
        if at + end - low - best[1] == len(chain) and page.tokens == PAGE_TOKENS:
            on = self._disk.index.longest(
                self._scope, np.concatenate([chain, ids[end:stop]]), len(chain) + stop - end, self._precision,
                start=len(chain), parent=page.page_key,
            )  # fmt: skip
            rows += tuple(row for row, _ in on)
            end += sum(run for _, run in on)
            chain = np.concatenate([row.ids for row in rows])
        if end - start < self._min_tokens:
            return None
        known = self._tree.match(self._scope, _asked(chain), peek=True).tokens
        return StoredRepeat(start, end, rows, chain, 0 if known == len(chain) else len(rows) - known // PAGE_TOKENS, text)

    def _under(self, parent: bytes, place: int) -> list[Row]:
        """The pages on disk that continue a page, in this scope and in any precision."""
        if parent not in self._children:
            rows = self._disk.index.rows(namespace=self._scope.namespace, fingerprint=self._scope.fingerprint, parent=parent, bad=False)
            self._children[parent] = [row for row in rows if row.regime == self._scope.regime]
        return [row for row in self._children[parent] if row.place == place]

    def _path(self, page: Row) -> tuple[Row, ...] | None:
        """The pages from the root to this one; None if they are not all there, or too many to be read."""
        rows = [page]
        while rows[-1].parent != self._scope.root:
            below, parent = rows[-1], rows[-1].parent
            if parent not in self._pages:
                self._pages[parent] = self._disk.index.row(parent, self._scope.fingerprint, self._precision)
            row = self._pages[parent]
            if row is None or row.bad or row.tokens != PAGE_TOKENS or row.place != below.place - 1:
                return None
            if (row.namespace, row.regime) != (self._scope.namespace, self._scope.regime):
                return None
            rows.append(row)
        return tuple(reversed(rows)) if rows[-1].place == 0 else None

    # -- choosing --------------------------------------------------------------------------------------------------

    def _worth_it(self, found: Sequence[StoredRepeat]) -> list[tuple[StoredRepeat, list[StoredRepeat]]]:
        """Longest chains first: one is read if that is faster than computing all that stands in it and in the pages before."""
        left, chosen, planned, spent = sorted(found, key=lambda repeat: -repeat.missing), [], set[bytes](), 0
        while left:
            deepest = left[0]
            served = [repeat for repeat in left if repeat.keys <= deepest.keys | planned]
            need = sum(row.bytes for row in deepest.rows if row.page_key in deepest.keys - planned)
            compute_ms = sum(repeat.tokens for repeat in served) * self._ms_per_token
            if spent + need > self._most_bytes:
                self._refuse(deepest, f"{need} bytes lie before and in it on disk, {self._most_bytes - spent} may be read")
            elif load_ms := slow_load_ms(need, compute_ms, self._disk.read_rate):
                self._refuse(deepest, f"reading {need} bytes takes about {load_ms:.0f} ms, computing {compute_ms:.0f} ms")
            else:
                planned |= deepest.keys
                spent += need
                chosen.append((deepest, served))
                left = [repeat for repeat in left if repeat not in served]
                continue
            left.remove(deepest)
        return chosen

    def _refuse(self, repeat: StoredRepeat, detail: str, reason: Reason = Reason.SLOW_DISK) -> None:
        self.refusals.append(Refusal(reason, repeat.start, repeat.stop, detail))

    # -- loading ---------------------------------------------------------------------------------------------------

    def _load(self) -> None:
        """One chain after the other: shared pages are read once."""
        while self._chosen:
            deepest, served = self._chosen[0]
            if self._chain is None:
                gain_ms = sum(repeat.tokens for repeat in served) * self._ms_per_token  # of the repeated tokens, not of all the pages hold
                wanted = PageQuery(self._scope, _asked(deepest.ids), self._ms_per_token, self._wanted.spec, gain_ms=gain_ms)
                self._chain = PagePrefetch(wanted, self._wake, self._tree, self._disk, self._store.adopt)
            if self._chain.pending():
                return
            self._arrived(self._chain, served)
            self._chain = None
            self._chosen.pop(0)
        self._end("")

    def _arrived(self, chain: PagePrefetch, served: Sequence[StoredRepeat]) -> None:
        self.bytes += chain.bytes
        self.notes += chain.notes
        came = []
        for repeat in served:
            if self._tree.match(self._scope, _asked(repeat.ids), peek=True).tokens == len(repeat.ids):
                self.tokens += repeat.tokens
                came.append(repeat.text)
            elif chain.refusals:
                self._refuse(repeat, chain.refusals[-1].detail, chain.refusals[-1].reason)
            else:
                self._refuse(repeat, "its pages were found on disk and did not stay in memory", Reason.EVICTED)
        self._texts.mark_used(self._text_scope, came)


def _asked(ids: Ids) -> Ids:
    """Append a token, so that all ids before it are matched: the last one never is."""
    return np.append(ids, ids[-1:])


def longest_run(one: Ids, other: Ids) -> tuple[int, int, int]:
    """The longest run of at least GRAM ids that both have: where in each, and its length; (0, 0, 0) if there is none."""
    places: dict[bytes, int] = {}
    for at in range(len(one) - GRAM + 1):
        places.setdefault(one[at : at + GRAM].tobytes(), at)
    best, at = (0, 0, 0), 0
    while at <= len(other) - GRAM:
        first = places.get(other[at : at + GRAM].tobytes())
        if first is None:
            at += 1
            continue
        run = common(one[first:], other[at:])
        best = max(best, (first, at, run), key=lambda found: found[2])
        at += run - GRAM + 1
    return best
