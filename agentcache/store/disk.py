"""The tier on disk as one process uses it: found pages, pages written behind the answers, room made for them. Knows no requests.

index first, blob second when reading; blob first, index last when writing. Whatever fails here is a page that is computed again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..errors import BlobError, StoreError, StoreFullError
from ..kv import PAGE_TOKENS, KVSpec, Page
from ..types import Precision, StoreOptions
from . import blob, process
from .entry import Match
from .folder import Folder
from .groups import Group
from .index import Index, Row
from .keys import Ids, Scope, as_ids
from .policy import Rate, WriteBudget
from .writer import Pending, Writer

ROOM = 16  # pages' worth of room that is made at once, so that a full store does not look for victims at every write


@dataclass(frozen=True, slots=True)
class Found:
    """Pages on disk that continue what memory holds: `rows` from page `place` on, up to token `tokens` of the prompt."""

    rows: tuple[Row, ...]
    place: int
    tokens: int

    @property
    def bytes(self) -> int:
        return sum(row.bytes for row in self.rows)


class Disk:
    """One process's hold on a store's folder. Thread safe. A folder that cannot be written is read."""

    def __init__(self, options: StoreOptions) -> None:
        self.options = options
        self.precision: Precision = options.precision
        self.folder = Folder.open(options.folder, key=options.encryption_key)
        self.index = Index(self.folder)
        self.process = process.token()
        self.read_rate = Rate(float(self.index.get_meta("read_rate") or 0.0))
        self.writer = Writer(self._save, WriteBudget(options.write_bytes_per_hour), self._touch)
        self._lock = threading.Lock()
        self._compute: dict[str, float] = {}
        self._audit = 0

    # -- reading ---------------------------------------------------------------------------------------------------

    def find(self, scope: Scope, ids: Ids, known: Match, spec: KVSpec, precision: Precision = "exact") -> Found | None:
        """What the disk adds to the longest prefix in memory of ids[:-1]; None if nothing."""
        whole = known.tokens // PAGE_TOKENS
        parent = known.entries[whole - 1].key if whole else scope.root
        hits = self.index.longest(scope, ids, len(ids) - 1, precision, start=whole * PAGE_TOKENS, parent=parent)
        rows: list[Row] = []
        tokens = whole * PAGE_TOKENS
        for row, run in hits:
            if (row.dtype, row.layers, row.kv_heads, row.head_dim) != _shape(spec):
                break  # the fingerprint says this cannot be: a row that somebody made up
            rows.append(row)
            tokens += run
        return Found(tuple(rows), whole, tokens) if tokens > known.tokens else None

    def read(self, rows: Sequence[Row], pages: Sequence[Page], stop: threading.Event, progress: Callable[[int], None]) -> StoreError | None:
        """Fill pages, every byte verified, and return the first thing that went wrong. Bad blobs are quarantined."""
        jobs = [(row, page, row.tokens) for row, page in zip(rows, pages, strict=True)]
        errors = blob.read_many(self.folder, jobs, stop=stop, progress=progress)
        if stop.is_set():
            return None
        for row, error in zip(rows, errors, strict=True):
            if isinstance(error, BlobError):
                self.index.quarantine(row.id, str(error))
        return next((error for error in errors if error is not None), None)

    def quarantine(self, keys: Sequence[bytes], fingerprint: str, why: str) -> None:
        """Never serve these pages again; `agentcache verify` shows them."""
        for key in keys:
            if (row := self.index.row(key, fingerprint, self.precision)) is not None:
                self.index.quarantine(row.id, why)

    def due_for_check(self) -> bool:
        """Whether this hit is the one in N that is recomputed."""
        every = self.options.check_one_in
        with self._lock:
            self._audit += 1
            return bool(every) and self._audit % every == 0

    # -- what computing costs here ---------------------------------------------------------------------------------

    def compute_ms(self, fingerprint: str) -> float:
        """Milliseconds to compute a token, as remembered from another process on this machine; 0 if unknown."""
        if fingerprint not in self._compute:
            self._compute[fingerprint] = float(self.index.get_meta(f"compute/{process.machine()}/{fingerprint}") or 0.0)
        return self._compute[fingerprint]

    def remember_rates(self, fingerprint: str, ms_per_token: float) -> None:
        """Leave what was measured to the next process."""
        if ms_per_token:
            self.index.set_meta(f"compute/{process.machine()}/{fingerprint}", repr(ms_per_token))
        if self.read_rate.value:
            self.index.set_meta("read_rate", repr(self.read_rate.value))

    # -- writing ---------------------------------------------------------------------------------------------------

    def _save(self, pending: Pending) -> int:
        """Blob first, row last. Returns the row's id; 0 if it was not written."""
        entry, page = pending.entry, pending.page
        parent = entry.parent
        assert parent is not None
        if not self.folder.writable:
            return 0
        scope = entry.scope
        if (known := self.index.row(pending.key, scope.fingerprint, self.precision)) is not None:
            if not known.bad:
                return known.id
            self._unlink(self.index.remove([known.id], force=True))
        if parent.parent is not None and self.index.row(parent.key, scope.fingerprint, self.precision) is None:
            parent.row = 0  # somebody made room: it is offered again with the next request
            return 0
        spec = page.spec
        dtype, layers, heads, dim = _shape(spec)
        row = Row(
            id=0,
            page_key=pending.key,
            parent=parent.key,
            namespace=scope.namespace,
            fingerprint=scope.fingerprint,
            regime=scope.regime,
            place=entry.place,
            tokens=len(pending.ids),
            ids=pending.ids,
            numerics=entry.numerics,
            precision=self.precision,
            role=int(pending.role),
            dtype=dtype,
            layers=layers,
            kv_heads=heads,
            head_dim=dim,
            created=time.time(),
        )
        self._make_room(spec.page_bytes)
        if page.spec.device.type != "cpu" and page.tier == "device":
            page = page.copy(len(pending.ids), "host")
        written = blob.write(self.folder, row, page)
        refused = self.index.add([written])
        self._unlink(refused)
        found = self.index.row(pending.key, scope.fingerprint, self.precision)
        return found.id if found else 0

    def _make_room(self, need: int) -> None:
        budget = self.options.disk_bytes
        used = self.index.total()[1]
        if used + need <= budget:
            return
        self._unlink(self.index.remove([row.id for row in self.index.victims(min(budget, used + ROOM * need) - budget + need)]))
        if self.index.total()[1] + need > budget:
            raise StoreFullError(f"disk_bytes={budget!r}: what is stored is pinned by running processes, and {need} bytes more do not fit")

    def _unlink(self, rows: Sequence[Row]) -> None:
        for row in rows:
            blob.remove(self.folder, row)

    def _touch(self, ids: list[int]) -> None:
        self.index.touch(ids)

    def forget(self, keys: Sequence[bytes], fingerprint: str) -> None:
        """Remove pages that should never have been kept."""
        rows = [row for key in keys if (row := self.index.row(key, fingerprint, self.precision)) is not None]
        self._unlink(self.index.remove([row.id for row in rows], force=True))

    def pin(self, rows: Sequence[int], count: int) -> None:
        """Pin (1) or unpin (-1) rows for as long as this process lives: nobody makes room with them."""
        if count > 0:
            self.index.pin(rows, self.process)
        else:
            self.index.unpin(rows, self.process)

    def record(self, group: Group) -> None:
        """Keep a manifest, in place of an older one of that name."""
        self.index.put_group(group)

    def group(self, namespace: str, name: str, fingerprint: str) -> Group | None:
        """The manifest of that name."""
        return self.index.group(namespace, name, fingerprint)

    def count(self, counts: Mapping[str, int]) -> None:
        """Add to the store's counters, behind the answers."""
        self.writer.after(lambda: self.index.add_counters(counts))

    def clear(self, namespace: str | None = None) -> int:
        """Delete all pages, groups and splices of a namespace (None: of all); returns how many pages."""
        gone = self.index.delete_namespace(namespace)
        self._unlink(gone)
        return len(gone)

    # -- the model's own ids ---------------------------------------------------------------------------------------

    def learn(self, namespace: str, key: bytes, ids: Sequence[int]) -> None:
        """Keep the ids as which the model wrote the message that ends the history `key`."""
        packed = as_ids(ids).tobytes()
        self.writer.after(lambda: self.index.put_splices([(namespace, key, packed)]))

    def generated(self, namespace: str, key: bytes) -> tuple[int, ...]:
        """Those ids; empty if none are kept."""
        try:
            packed = self.index.splice(namespace, key)
        except StoreError:  # the message is rendered anew
            return ()
        return tuple(np.frombuffer(packed, dtype=np.uint32).tolist()) if packed and len(packed) % 4 == 0 else ()

    def close(self, fingerprint: str = "", ms_per_token: float = 0.0) -> None:
        """Write what waits, leave what was measured to the next process, drop this process's pins and leases."""
        self.writer.close()
        try:
            if self.folder.writable:
                self.remember_rates(fingerprint, ms_per_token)
                self.index.release_process(self.process)
        except StoreError:  # pins and leases die with this process anyway, rates are measured again
            pass
        self.index.close()


def _shape(spec: KVSpec) -> tuple[str, int, int, int]:
    return str(spec.dtype).removeprefix("torch."), spec.layers, spec.kv_heads, spec.head_dim


def cpu_page(spec: KVSpec) -> Page:
    """An empty page in the computer's own memory, where blobs are read to."""
    return Page(spec, "device" if spec.device.type == "cpu" else "host")
