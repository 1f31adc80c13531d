"""Prompts cached in all tiers: pages in memory, and pages on disk. Knows neither models nor requests.

match    memory only, at once                             prefetch    disk (or another process) into memory, in the background
admit    memory at once, disk after the answer
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from ..errors import AgentCacheError, ConfigError, StoreCorruptError, StoreError, StoreFullError, StoreLostError, StoreWarning
from ..kv import Page
from ..types import Grade, Reason, StoreOptions
from .deletion_log import DeletionLog, Moment
from .entry import Entry, Match, PageQuery
from .keys import Ids, PinName, Role, Scope, as_ids, chain
from .memory.prefix_tree import PrefixTree

if TYPE_CHECKING:  # a store in memory only loads nothing of the disk
    from .deletion import Deletion
    from .disk.disk_tier import DiskTier
    from .disk.index import Row
    from .page_prefetch import PagePrefetch
    from .tool_group import ToolGroup

DEFAULT = StoreOptions()
RENEW_S = 30.0  # how often a folder is opened in the place of a lost one, where that has failed
Key = bytes  # inside the class that name is a property


class Store:
    """All cached pages. options: where and how on disk, None for memory only. Thread safe.

    budget_bytes, host_bytes: of pages on the device, and of those that wait in the computer's memory where that is another one.
    """

    def __init__(self, budget_bytes: int, host_bytes: int = 0, options: StoreOptions | None = None) -> None:
        self.tree = PrefixTree(budget_bytes, host_bytes)
        self.deletions = DeletionLog()
        self.disk = self._disk_tier(options) if options is not None else None
        self._listeners: list[Callable[[Deletion], None]] = []
        self._renewals: list[Callable[[], None]] = []
        self._lost: list[DiskTier] = []  # whose folder was deleted while it was used
        self._renew_at = 0.0  # by time.monotonic()
        self._warned = False  # that pages are not written

    @staticmethod
    def checked(store: StoreOptions | str | os.PathLike[str] | None, memory_bytes: int | None) -> StoreOptions | None:
        """Options of the part on disk. ConfigError: there is no such part, or no such budget of memory."""
        if memory_bytes is not None and (type(memory_bytes) is not int or memory_bytes < 0):
            raise ConfigError(f"memory_bytes={memory_bytes!r}: must be 0 (keep nothing) or a larger whole number of bytes")
        return store if isinstance(store, StoreOptions) or store is None else StoreOptions(store)

    @classmethod
    def open(cls, budget_bytes: int, host_bytes: int, options: StoreOptions | None) -> Store:
        """A store with its part on disk; in memory only for None, a damaged index, a full disk, or a default folder that fails."""
        if options is not None and options.folder is None and not os.environ.get("AGENTCACHE_DIR", "unset"):
            options = None
        try:
            return cls(budget_bytes, host_bytes, options)
        except StoreError as error:
            if options is not DEFAULT and not isinstance(error, (StoreCorruptError, StoreFullError)):
                raise
            _warn(f"nothing is kept on disk: {error}")
            return cls(budget_bytes, host_bytes)

    def _disk_tier(self, options: StoreOptions, instead: bool = False) -> DiskTier:
        """The tier, opened as `DiskTier` is made; what killed processes were deleting is deleted first."""
        from .disk.disk_tier import DiskTier

        tier = DiskTier(options, self.deletions, instead=instead)
        try:
            if tier.folder.writable and tier.index.unfinished():
                from .admin.prune import finish_deletions

                finish_deletions(tier.folder, tier.index)
        except BaseException:
            tier.close()
            raise
        return tier

    def __len__(self) -> int:
        return len(self.tree)

    @property
    def budget_bytes(self) -> int:
        return self.tree.eviction.budget_bytes

    @property
    def bytes(self) -> int:
        return self.tree.bytes

    def audit(self) -> dict[str, int]:
        """Counts of pages in memory, and on disk where there is one, and of what is held for them. StoreError: the disk cannot say."""
        return self.tree.audit() | (self.disk.audit() if self.disk else {})

    # -- looking up ------------------------------------------------------------------------------------------------

    def match(self, scope: Scope, ids: Ids, *, peek: bool = False) -> Match:
        """The longest cached prefix of ids[:-1] in memory."""
        with self.deletions.lock:
            found = self.tree.match(scope, ids, peek=peek)
            if self.disk and not peek:
                self.disk.offer(list(found.entries))  # uses are told to the index; what is not on disk yet may go there
            return found

    def probe(self, wanted: PageQuery) -> tuple[Match, int]:
        """The longest cached prefix in memory, and its tokens with those that the disk adds. Nothing counts as used."""
        with self.deletions.lock:
            known = self.tree.match(wanted.scope, wanted.ids, peek=True)
            try:
                found = self.disk.find(wanted.scope, wanted.ids, known, wanted.spec) if self.disk else None
            except StoreError:  # as good as not there: a request says what is wrong
                found = None
            return known, known.tokens if found is None else min(found.tokens, len(wanted.ids) - 1)

    def continuations(self, scope: Scope, before: Ids, first: Ids) -> list[Ids]:
        """The ids of each cached page, in memory or on disk, that continues the whole pages of `before` and begins with `first`."""
        found = self.tree.continuations(scope, before, first)
        with suppress(StoreError):  # as good as not there
            above = chain(scope.root, before)[-1] if len(before) else scope.root
            found |= self.disk.index.continuations(scope, above, first, found.keys()) if self.disk else {}
        return list(found.values())

    def prefetch(self, wanted: PageQuery, wake: Callable[[], None]) -> PagePrefetch | None:
        """Begin to read a prompt's pages into memory; None without a disk or a memory budget. wake: see PagePrefetch."""
        with self.deletions.lock:
            if self.disk is None or not self.budget_bytes:
                return None
            from .page_prefetch import PagePrefetch, lend

            lend(self.tree, wanted.scope, wanted.ids)
            return PagePrefetch(wanted, wake, self.tree, self.disk, self.adopt)

    # -- keeping ---------------------------------------------------------------------------------------------------

    def admit(
        self, scope: Scope, ids: Ids, pages: Seq[Page], numerics: frozenset[str] | str, prefix_tokens: int = 0,
        received: Moment | None = None,
    ) -> None:  # fmt: skip
        """Keep `pages`, which hold `ids` from the start: in memory now, on disk later.

        received: when the ids were, or the oldest of the pages was made; what was deleted since is not kept.
        """
        with self.deletions.lock:
            if received is not None and self.deletions.deleted(scope, ids, received):
                return
            path = self.tree.admit(scope, ids, pages, numerics, prefix_tokens)
            if any(entry.page and entry.page.checkpoints for entry in path):
                from .memory.checkpoint_room import thin

                thin(self.tree, path, prefix_tokens)
            if self.disk:
                self.disk.offer(path)

    def adopt(self, scope: Scope, ids: Ids, pages: Seq[Page], rows: Seq[Row], generation: int) -> list[Entry]:
        """Keep pages that were read from disk as the last of a path; returns what holds them.

        generation: when their rows were found; nothing is admitted if one was deleted since.
        """
        with self.deletions.lock:
            if self.deletions.deleted(scope, ids, Moment(generation, min(row.created for row in rows))):
                return []
            read = [frozenset(page.checkpoints) for page in pages[-len(rows) :]]
            path = self.tree.admit(scope, ids, pages, rows[-1].numerics)[-len(rows) :]
            for entry, row, page, own in zip(path, rows, pages[-len(rows) :], read, strict=False):
                if entry.page is page and entry.parent is not None:
                    lent = entry.numerics if page.checkpoints.keys() > own else frozenset[str]()  # with checkpoints that memory had
                    entry.numerics = row.numerics | entry.parent.numerics | lent  # later pages may have come from other kernels
                    entry.made = row.created
                if entry.key == row.page_key:
                    entry.row, entry.role = row.id, max(entry.role, Role(row.role))
                    entry.passing = frozenset(entry.page.checkpoints if entry.page else ()) - own
        return path

    def retract(self, scope: Scope, ids: Ids, since: int, pages: Seq[Page]) -> None:
        """Take back what a failed request admitted: tokens of `ids` after the first `since`, in its own `pages`; on disk too."""
        with self.deletions.lock:
            gone = self.tree.retract(scope, ids, since, pages)
        if self.disk and gone:
            self.disk.retract(gone, scope)

    def quarantine(self, scope: Scope, ids: Ids, key: Key, why: str) -> None:
        """The page `key`, in which `ids` end, is wrong: no adapter is served it again, nor what continues it. It may have left memory."""
        gone = [key, *(key for other in self.tree.adapter_scopes(scope) for key in self.tree.drop(other, ids, Reason.BAD_BLOB))]
        if disk := self.disk:
            disk.writer.discard(frozenset(gone))
            disk.quarantine(gone, scope.weights, why)

    # -- deleting on purpose ---------------------------------------------------------------------------------------

    def on_deletion(self, *listeners: Callable[[Deletion], None]) -> None:
        """Call `listeners` with each deletion of any process, before this one drops its pages."""
        self._listeners += listeners

    def on_renewal(self, listener: Callable[[], None]) -> None:
        """Call `listener` when a new folder has taken the place of a deleted one: it holds no recorded tool group or session."""
        self._renewals.append(listener)

    def unless_deleted(self, namespace: str, received: Moment, keep: Callable[[], Key]) -> Key:
        """Call `keep` and return its key, unless everything that this namespace sent at that moment was deleted since; then b""."""
        with self.deletions.lock:
            return b"" if self.deletions.everything_deleted(namespace, received) else keep()

    def forget_late(self, namespace: str, received: Moment, forget: Callable[[Deletion], None]) -> None:
        """Call `forget` with deletions of this namespace since that moment: a request that ran meanwhile has remembered its text again."""
        with self.deletions.lock:
            for deletion in self.deletions.since(received.generation):
                if deletion.covers(namespace, received.made):
                    forget(deletion)

    def apply_deletions(self) -> Moment:
        """Drop what any process has deleted since the last call; returns the present moment. Mostly one stat of one file."""
        disk = self.disk
        if disk is None and self._lost and time.monotonic() >= self._renew_at:
            with self.deletions.lock:
                if self.disk is None:  # else another thread has renewed it
                    self._renew()
        elif disk is not None and disk.folder.generation_stat != disk.seen_generation:
            with self.deletions.lock:
                if disk is self.disk:  # else another thread has noticed, too
                    self._apply_deletions(disk)
        elif disk is not None and disk.writer.failure:
            self._warn_unwritten(disk)
        return Moment(self.deletions.generation, time.time())

    def _apply_deletions(self, disk: DiskTier) -> None:
        generation = disk.folder.generation_stat
        try:
            for deletion in disk.index.deletions(self.deletions.generation):
                self.drop_deleted(deletion)
                self.deletions.add(deletion)
        except StoreLostError:
            self._lose(disk)
            return
        except StoreError:  # the next request looks again
            return
        if generation:  # else the folder may be on its way out: the next request looks again
            disk.seen_generation = generation

    def _lose(self, disk: DiskTier) -> None:
        """The folder was deleted: go on with the one that is there now, made anew if none is, or else in memory. Under the lock."""
        self.disk = None
        self._lost.append(disk)
        disk.writer.abandon()
        for entry in self.tree.entries():
            entry.row = 0  # is written again once it is used, or flushed while it is pinned
        outcome = self._renew()
        with suppress(StoreWarning):  # an error where warnings are errors: the request is right all the same
            _warn(f"the store {str(disk.folder.path)!r} was deleted, or made anew, while it was in use: {outcome}")

    def _renew(self) -> str:
        """Open the folder in the place of the one that was lost; says what becomes of pages from now on."""
        lost, self._renew_at = self._lost[-1], time.monotonic() + RENEW_S
        try:
            self.disk = self._disk_tier(replace(lost.options, folder=lost.folder.path), instead=True)
        except (AgentCacheError, RuntimeError) as error:  # another key by now, no thread to write on: the request is answered all the same
            return f"nothing is read from disk nor written to it for now: {error}"
        for renewed in self._renewals:
            renewed()
        return "what is used from now on is written to a new one"

    def _warn_unwritten(self, disk: DiskTier) -> None:
        """Say once that pages are not written, and why: requests go on without."""
        if not self._warned:
            self._warned = True
            with suppress(StoreWarning):  # an error where warnings are errors: the request is right all the same
                _warn(f"pages are not written to {str(disk.folder.path)!r}, later processes compute them again: {disk.writer.failure}")

    def drop_deleted(self, deletion: Deletion) -> tuple[int, int]:
        """Drop deleted pages in memory and on their way to disk; returns how many were in memory, and their bytes. Under the lock."""
        for listener in self._listeners:
            listener(deletion)
        if self.disk is not None:
            self.disk.writer.drop(deletion)
        return self.tree.remove(deletion)

    def clear(self, namespace: str | None = None, grade: Grade | None = None) -> None:
        """Free all pages in memory, or those of one namespace or grade; what is on disk stays."""
        self.tree.clear(namespace, grade)

    # -- tool groups -----------------------------------------------------------------------------------------------

    def pin(self, scope: Scope, ids: Ids) -> int:
        """Pin the pages that hold all of `ids`; returns how many. Pinned pages are never evicted, on disk neither."""
        pages, name = self.tree.pin(scope, ids), scope.pin_name(ids)
        if pages and (disk := self.disk):
            with self.deletions.lock:  # else the writing thread may end between two of these lines
                path = self.tree.path(scope, ids)
                if path and (slots := len(ids) - path[-1].first) in path[-1].passing:  # its checkpoint is to be on disk now
                    path[-1].passing, path[-1].rewritten = path[-1].passing - {slots}, True
                disk.writer.offer(path, settled=True)
            disk.writer.after(lambda: disk.pin(name, path))
        return pages

    def release_pin(self, name: PinName) -> None:
        """Take back one pin of that name, in each tier that has one: memory lets go of learnt documents before."""
        self.tree.release_pin(name)
        if disk := self.disk:
            disk.writer.run_until_done(lambda: disk.release_pin(name))

    def record(self, group: ToolGroup) -> None:
        """Remember a tool group by name, once its pages are written."""
        if disk := self.disk:
            since = self.deletions.generation
            disk.writer.run_until_done(lambda: disk.index.put_group(group, since))

    def recorded(self, namespace: str, name: str, fingerprint: str) -> ToolGroup | None:
        """The tool group of that name, of this or an earlier process; None if there is none on disk."""
        try:
            return disk.index.group(namespace, name, fingerprint) if (disk := self.disk) else None
        except StoreError:  # as good as not recorded
            return None

    def defer_writes(self, busy: bool) -> None:
        """Let writing give way while requests are computed."""
        if disk := self.disk:
            quiet = disk.writer.quiet
            if busy == quiet.is_set():
                quiet.clear() if busy else quiet.set()

    # -- the model's own ids ---------------------------------------------------------------------------------------

    def learn(self, namespace: str, key: Key, ids: Seq[int]) -> None:
        """Write down the ids that the model generated for the message that ends the history `key`."""
        if disk := self.disk:
            packed, since, made = as_ids(ids).tobytes(), self.deletions.generation, time.time()
            disk.writer.after(lambda: disk.index.put_splices([(namespace, key, packed)], since, made), vital=False)

    def generated(self, namespace: str, key: Key) -> tuple[int, ...]:
        """The ids that `learn` wrote down; empty if none are there."""
        packed = None
        with suppress(StoreError):  # the message is rendered anew
            packed = disk.index.splice(namespace, key) if (disk := self.disk) else None
        return tuple(np.frombuffer(packed, dtype=np.uint32).tolist()) if packed and len(packed) % 4 == 0 else ()

    def flush(self, timeout_s: float | None = None) -> bool:
        """Write all waiting pages, and pinned ones that were pruned meanwhile once more. False: it took too long, a pinned or waiting page
        is not on disk, or the folder is gone.
        """
        if (disk := self.disk) is None:
            return not self._lost
        until = None if timeout_s is None else time.monotonic() + timeout_s
        if not disk.writer.flush(timeout_s):
            return False
        lost = self._unwritten(disk)
        for name, path in lost:
            disk.writer.after(lambda name=name, path=path: self._pin_again(disk, name, path))  # type: ignore[misc]
        left = None if until is None else until - time.monotonic()
        return not lost or (disk.writer.flush(left) and not self._unwritten(disk))

    def _pin_again(self, disk: DiskTier, name: PinName, path: list[Entry]) -> None:
        """Pin a prefix that is pinned still; what releases it later comes after this on the writing thread."""
        if any(name == other for other, _ in self.tree.pinned()):
            disk.pin(name, path, again=True)

    def _unwritten(self, disk: DiskTier) -> list[tuple[PinName, list[Entry]]]:
        """Pinned prefixes that are not whole on disk, and pinned there."""
        pinned = self.tree.pinned()
        here = disk.index.present({entry.row for _, path in pinned for entry in path})
        return [(name, path) for name, path in pinned if not {entry.row for entry in path} <= here & disk.holds(name)]

    def close(self, fingerprint: str = "", ms_per_token: float = 0.0) -> None:
        """Write what waits, leave the measured cost of a token to the next process, free all pages."""
        try:
            for disk in filter(None, (self.disk, *self._lost)):
                disk.close(fingerprint, ms_per_token)
                if disk is self.disk and disk.writer.failure:
                    self._warn_unwritten(disk)
        finally:
            self.tree.clear()


def _warn(text: str) -> None:
    """Warn at the line of the caller's program."""
    from ..caller_warnings import CallerWarnings

    CallerWarnings((), StoreWarning).warn(text)
