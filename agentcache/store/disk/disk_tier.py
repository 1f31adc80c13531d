"""The tier on disk as one process uses it: found pages, pages written after the answers, room made for them. Knows no requests.

index first, blob second when reading; blob first, index last when writing. Whatever fails here is a page that is computed again.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from itertools import takewhile

from ...errors import BlobError, StoreError, StoreFullError
from ...kv import PAGE_TOKENS, Page
from ...kv_spec import KVSpec
from ...openmp import use_one_thread
from ...types import Grade, Precision, Reason, StoreOptions
from ..deletion_log import DeletionLog
from ..entry import Entry, Match
from ..keys import Ids, Role, Scope
from ..policy import Rate, WriteBudget
from . import blob_files, blob_io, process_identity, session_rows
from .blob_format import plan
from .folder import Folder
from .index import Index, Row
from .leases import Leases
from .writer import PendingWrite, Writer

ROOM = 16  # pages' worth of room that is made at once, so that a full store does not look for victims at every write
READERS = 2  # requests whose pages are read at the same time
TRIES = 8  # to make room, where other processes fill it meanwhile
SWEEP_S = 60.0  # how often files that no row names are looked for, while pages are written


@dataclass(frozen=True, slots=True)
class DiskMatch:
    """Pages on disk that continue what memory holds: `rows` from page `place` on, up to token `tokens` of the prompt."""

    rows: tuple[Row, ...]
    place: int
    tokens: int

    @property
    def bytes(self) -> int:
        return sum(row.bytes for row in self.rows)

    @property
    def counts(self) -> tuple[int, ...]:
        """Tokens of each row that continue the prompt: all, but for the last row, which may end in another prompt's."""
        return tuple(min(PAGE_TOKENS, self.tokens - at * PAGE_TOKENS) for at, _ in enumerate(self.rows, self.place))


class DiskTier:
    """One process's hold on a store's folder. Thread safe. A folder that cannot be written is read.

    deletions: those that this process has applied. seen_generation: the folder's `generation_stat` then. instead: of a folder that this
    process used before, and that was deleted: the numbers of deletions go on from there.
    """

    def __init__(self, options: StoreOptions, deletions: DeletionLog | None = None, *, instead: bool = False) -> None:
        self.options, self.written = options, options.precision
        self.precision: Precision = options.turns if self.written == "exact" else self.written  # the fewest bits that lossy requests get
        self.folder = Folder.open(options.folder, key=options.encryption_key, overwrite=options.overwrite)
        self.seen_generation = self.folder.generation_stat
        try:
            self.index = Index(self.folder)
        except StoreFullError:  # may be full of what killed writers left
            blob_files.sweep(self.folder, set)  # parts: without the index every finished file counts as named
            self.index = Index(self.folder)
        self.deletions = deletions or DeletionLog()
        self.index.generation_offset = self.deletions.generation + 1 if instead else 0
        self.process = process_identity.token()
        try:
            self.read_rate = Rate.unpacked(self.index.get_meta("read_rate") or "")
            self.deletions.generation = self.index.generation()
            self._known_rate = replace(self.read_rate)  # as the next process knows it
            self.leases = Leases(self.index, self.process, lambda job: self.writer.run_until_done(job))
            made = WriteBudget(options.write_bytes_per_hour), self.index.touch, self.leases.awaited, self.deletions
            self.writer = Writer(self._save, *made)
        except BaseException:  # no more threads, perhaps
            self.index.close()
            raise
        self._readers = ThreadPoolExecutor(READERS, "agentcache-reader", use_one_thread)
        self._compute: dict[str, float] = {}
        self._bad: set[int] = set()  # rows found bad, where the index may not be told
        self._pinned: dict[Hashable, list[list[int]]] = {}
        self._swept, self._unnamed_bytes = time.monotonic(), 0
        if self.folder.writable:
            self.writer.after(self._sweep)

    # -- reading ---------------------------------------------------------------------------------------------------

    def find(self, scope: Scope, ids: Ids, known: Match, spec: KVSpec, precision: Precision = "exact") -> DiskMatch | None:
        """Find the pages that the disk adds to the longest prefix in memory of ids[:-1]; None if it adds none."""
        whole = known.tokens // PAGE_TOKENS
        parent = known.entries[whole - 1].key if whole else scope.root
        hits = self.index.longest(scope, ids, len(ids) - 1, precision, start=whole * PAGE_TOKENS, parent=parent)
        # the fingerprint says that another kind cannot be: a forged row
        good = list(takewhile(lambda hit: hit[0].kind == spec.kind and hit[0].id not in self._bad, hits))
        tokens = whole * PAGE_TOKENS + sum(run for _, run in good)
        return DiskMatch(tuple(row for row, _ in good), whole, tokens) if tokens > known.tokens else None

    def submit(self, job: Callable[[], None]) -> None:
        """Run `job` on a reading thread. RuntimeError: there is none."""
        self._readers.submit(job)

    def read(
        self, found: DiskMatch, pages: Sequence[Page], stop: threading.Event, progress: Callable[[int], None]
    ) -> tuple[Reason, str] | None:
        """Fill pages, every byte verified, and return the first thing that went wrong. Bad blobs are quarantined."""
        rows = found.rows
        jobs = list(zip(rows, pages, found.counts, strict=True))
        errors = blob_io.read_many(self.folder, jobs, stop=stop, progress=progress)
        if stop.is_set():
            return None
        first = None
        for row, error in zip(rows, errors, strict=True):
            gone = self._why_gone(row) if isinstance(error, BlobError) else None
            if isinstance(error, BlobError) and gone is None:
                self._bad.add(row.id)
                if not self.index.quarantine(row.id, str(error)) and (gone := self._why_gone(row)):  # a deletion whose blobs go first
                    self._bad.discard(row.id)
            if error is not None:
                first = first or (gone or Reason.BAD_BLOB, str(error))
        return first

    def _why_gone(self, row: Row) -> Reason | None:
        """Reason for which others have removed a row since it was found, or its blob; None if they have not."""
        if self.index.present([row.id]) and self.index.has_blobs([row.blob]):
            return None
        deleted, scope = self.index.deletions(self.deletions.generation), Scope(row.namespace, row.fingerprint)
        gone = any(one.covers(row.namespace, row.created) or one.covers_adapter(scope) or row.page_key in one.keys for one in deleted)
        return Reason.DELETED if gone else Reason.EVICTED

    def quarantine(self, keys: Sequence[bytes], weights: str, why: str) -> None:
        """Never serve these pages again, nor pages that continue them, of any adapter over these weights."""
        found, seen = (row for key in keys for row in self.index.rows(key=key)), set[int]()
        left = [row for row in found if Scope(row.namespace, row.fingerprint).weights == weights]
        while left:
            row = left.pop()
            if row.id not in seen:
                seen.add(row.id)
                self._bad.add(row.id)
                self.index.quarantine(row.id, why)
                left.extend(self.index.rows(parent=row.page_key, fingerprint=row.fingerprint))

    # -- what computing costs here ---------------------------------------------------------------------------------

    def compute_ms(self, fingerprint: str) -> float:
        """Milliseconds to compute a token, as remembered from another process on this machine; 0 if unknown."""
        if fingerprint not in self._compute:
            self._compute[fingerprint] = 0.0
            with suppress(StoreError):  # as good as unknown
                self._compute[fingerprint] = float(self.index.get_meta(f"compute/{process_identity.machine()}/{fingerprint}") or 0.0)
        return self._compute[fingerprint]

    def cost(self, fingerprint: str, measured_ms: float) -> float:
        """Milliseconds to compute a token, by which reading is judged; 0 if unknown, or if slow disks are not refused.

        measured_ms: by this process, 0 if it has not. The first measurement of any process is written down at once.
        """
        if measured_ms:
            if not self.compute_ms(fingerprint):
                self.writer.after(lambda: self.remember_rates(fingerprint, measured_ms))
            self._compute[fingerprint] = measured_ms
        return self.compute_ms(fingerprint) if self.options.refuse_slow else 0.0

    def remember_rates(self, fingerprint: str, ms_per_token: float) -> None:
        """Write the measured rates into the index, for the next process."""
        if ms_per_token:
            self.index.set_meta(f"compute/{process_identity.machine()}/{fingerprint}", repr(ms_per_token))
        if self.read_rate != self._known_rate:
            self._known_rate = replace(self.read_rate)
            self.index.set_meta("read_rate", self.read_rate.packed())

    # -- writing ---------------------------------------------------------------------------------------------------

    def offer(self, path: list[Entry]) -> None:
        """Write the pages of a path that are not on disk, and count the others as used: of exact scopes, and of `options.turns`."""
        if path and path[-1].scope.precision in ("exact", self.options.turns):
            self.writer.offer(path)

    def _save(self, pending: PendingWrite) -> tuple[int, str]:
        """Write a page, blob first, row last. Returns the row's id, 0 if there is none, and the outcome in a word."""
        entry, page, parent = pending.entry, pending.page, pending.entry.parent
        assert parent is not None
        if not self.folder.writable or page.changed:
            return 0, "changed" if page.changed else "read-only"
        fingerprint, row = entry.scope.fingerprint, self._row(pending)
        known = self.index.row(pending.key, fingerprint, row.precision)
        if known is not None and not known.bad:
            if known.numerics == pending.numerics and (pending.rewritten or pending.checkpoint_bytes > known.checkpoint_bytes):
                self._rewrite(known, pending, parent)
            blob_files.remove(self.folder, self.index.promote([known.id], pending.role))
            return known.id, "known"
        need = plan(row, self.folder.encrypted).bytes
        if not self.writer.budget.take(need):
            return 0, "over budget"
        if not self._make_room(need, parent):
            return 0, "no room"
        if parent.parent is not None and not any(self.index.row(parent.key, fingerprint, kind) for kind in {row.precision, self.written}):
            parent.row = 0  # another process made room: it is offered again with the next request
            return 0, "parent missing"
        if known is not None:  # quarantined: it may go, now that there is a better one
            blob_files.remove(self.folder, self.index.remove([known.id], force=True))
        if not self._insert(blob_io.write(self.folder, row, page, pending.checkpoints), pending):
            return 0, "deleted"
        found = self.index.row(pending.key, fingerprint, row.precision)
        return (found.id, "written") if found else (0, "evicted")  # at once, by another process that needed room

    def _rewrite(self, known: Row, pending: PendingWrite, parent: Entry) -> None:
        """Write a page once more, with other checkpoints than on disk; its row names the new blob."""
        more = pending.checkpoint_bytes - known.checkpoint_bytes
        if not self._make_room(max(0, more), parent) or not self.writer.budget.take(known.bytes + more):
            return
        spare = written = blob_io.write(self.folder, known, pending.page, pending.checkpoints)
        try:
            spare = self.index.exchange(known, written)
        finally:
            blob_files.remove(self.folder, [spare])

    def _row(self, pending: PendingWrite) -> Row:
        entry, scope = pending.entry, pending.entry.scope
        assert entry.parent is not None
        dtype, widths = pending.page.spec.kind
        return Row(
            id=0,
            page_key=pending.key,
            parent=entry.parent.key,
            namespace=scope.namespace,
            fingerprint=scope.fingerprint,
            regime=scope.regime,
            place=entry.place,
            tokens=len(pending.ids),
            ids=pending.ids,
            numerics=pending.numerics,
            precision=self.written if scope.precision == "exact" else self.precision,
            role=int(pending.role),
            dtype=dtype,
            widths=widths,
            checkpoint_bytes=pending.checkpoint_bytes,
            created=entry.made,
        )

    def _insert(self, written: Row, pending: PendingWrite) -> bool:
        """Add the row, unless the page was deleted on purpose since it was offered; returns whether it was wanted still."""
        wanted = True

        def asked(connection: sqlite3.Connection) -> bool:
            nonlocal wanted
            wanted = not any(done.covers_lineage(pending.entry) for done in self.index.deletions_in(connection, pending.generation))
            return wanted

        try:
            spare = self.index.add([written], asked)
        except StoreError:  # a disk that is full has no room for a blob without a row
            blob_files.remove(self.folder, [written])
            raise
        blob_files.remove(self.folder, spare)
        return wanted

    def _make_room(self, need: int, parent: Entry) -> bool:
        """Evict until `need` bytes fit, but nothing on the way to `parent`; False if they do not."""
        if time.monotonic() - self._swept > SWEEP_S:
            self._sweep()
        budget, full = self.options.disk_bytes - self._unnamed_bytes, f"disk_bytes={self.options.disk_bytes!r}"
        used = self.index.total()[1]
        if used + need <= budget:
            return True
        if need > budget:
            left = f", files that no row of the index names take {self._unnamed_bytes}" if self._unnamed_bytes else ""
            self.writer.failure = f"{full}: one page takes {need} bytes{left}; raise it"
            return False
        session_rows.end_leases(self.index)
        self.writer.tell_uses()  # else pages used a moment ago may look old
        above = {entry.row for entry in parent.lineage}
        room = max(need, min(ROOM * need, budget // 8))
        for _ in range(TRIES):
            blob_files.remove(self.folder, self.index.remove([row.id for row in self.index.victims(used + room - budget, above)]))
            used = self.index.total()[1]
            if used + need <= budget:
                return True
        self.writer.failure = f"{full}: what is stored is pinned by processes or precedes this page, and {need} bytes more do not fit"
        return False

    def forget(self, keys: Sequence[bytes], fingerprint: str, grade: Grade = "exact") -> None:
        """Remove pages that should never have been admitted: in every precision, or in that of a lossy `grade` alone."""
        found = (row for key in keys for row in self.index.rows(key=key, fingerprint=fingerprint))
        wrong = [row.id for row in found if grade == "exact" or row.precision == grade]
        blob_files.remove(self.folder, self.index.remove(wrong, force=True))

    def retract(self, keys: Sequence[bytes], scope: Scope) -> None:
        """The same, with pages on their way to disk; tried again later where it fails: the caller has to zero its pages in any case."""
        self.writer.discard(frozenset(keys))
        try:
            self.forget(keys, scope.fingerprint, scope.precision)
        except StoreError:
            self.writer.run_until_done(lambda: self.forget(keys, scope.fingerprint, scope.precision))

    def pin(self, name: Hashable, path: Sequence[Entry], again: bool = False) -> None:
        """Pin the pages of a path until `release_pin(name)` or the end of this process; those evicted meanwhile are written once more.

        again: in place of a pin of that name. On the writing thread.
        """
        pins = self._pinned.setdefault(name, [])
        if again and pins:
            self.index.release_pins(pins[0], self.process)
            pins.pop(0)
        pins.append(held := [])  # at once: what is pinned until the disk is full is released, too
        for _ in range(TRIES):
            held += self.index.pin([entry.row for entry in path if entry.row and entry.row not in held], self.process)
            missing = [entry for entry in path if entry.row not in held]
            for entry in missing:
                entry.row = 0
            if not missing or not self.writer.write(missing):
                break
        blob_files.remove(self.folder, self.index.promote(held, Role.GROUP))

    def holds(self, name: Hashable) -> set[int]:
        """The rows that are pinned under a name."""
        return {row for held in self._pinned.get(name, ()) for row in held}

    def release_pin(self, name: Hashable) -> None:
        """Take back the first pin of that name; no effect if there is none."""
        if held := self._pinned.get(name):
            self.index.release_pins(held[0], self.process)
            held.pop(0)

    def audit(self) -> dict[str, int]:
        """Counts of the pages on disk and of what hangs on them, of all processes; refused_pages and waiting_pages of this one."""
        found = self.index.stats()
        counts = {f"disk_{name}": int(str(found[name])) for name in ("bytes", "pins")}
        counts |= {name: int(str(found[name])) for name in ("quarantined", "groups", "segments", "splices", "leases")}
        return {"disk_pages": int(str(found["rows"])), **counts, "refused_pages": len(self._bad), "waiting_pages": len(self.writer)}

    def close(self, fingerprint: str = "", ms_per_token: float = 0.0) -> None:
        """Write pending pages, leave the measurements to the next process, release the pins and leases of this one."""
        try:
            with closing(self.writer):
                self._readers.shutdown(cancel_futures=True)
        finally:  # pins and leases die with this process anyway, rates are measured again
            with suppress(StoreError):
                if self.folder.writable:
                    self.remember_rates(fingerprint, ms_per_token)
                    for name in [name for name, pins in self._pinned.items() for _ in pins]:
                        self.release_pin(name)
                    self.leases.close()
            self.index.close()

    def _sweep(self) -> None:
        """Delete files of killed writers; files that others may still be writing count as used room."""
        self._swept = time.monotonic()
        self._unnamed_bytes = blob_files.sweep(self.folder, self.index.has_blobs)[1]
        self.index.drop_dead_pins()
        self.index.recount()


def cpu_page(spec: KVSpec, tokens: int) -> Page:
    """An empty page in the computer's own memory, where a blob of so many tokens is read to."""
    return Page(spec, "device" if spec.device.type == "cpu" else "host", whole=tokens == PAGE_TOKENS)
