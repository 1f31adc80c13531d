"""Sessions of an engine: names of conversations, each over the page chain of its last answer. Knows neither messages nor how to compute.

exact      the prompt of the last turn once more         memory    pinned while used, within SHARE of the budget, for IDLE_S
extend     it goes on from the last answer               disk      as a prefix is, until the lease ends; branches that were left go first
diverge    it leaves the chain before its end                      turns in fewer bits after IDLE_S, where StoreOptions.turns says so
"""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, TypeVar

from .errors import ConfigError, StoreError
from .kv import PAGE_TOKENS
from .matching import fingerprint_of
from .model.fingerprint import Fingerprint
from .read_ahead import Chain, Key, ReadAhead
from .request import Running
from .store.deletion import Deletion
from .store.disk import session_rows
from .store.entry import Entry
from .store.keys import Ids, Role, Scope, chain
from .store.tool_group import SESSION, ToolGroup
from .types import check_name

if TYPE_CHECKING:
    from .scheduler import Scheduler
    from .store.disk.disk_tier import DiskTier

LEASE_S = 86_400.0  # after the last answer
IDLE_S = 600.0  # pages of a session that was not asked for so long are evictable
LOOK_S = 60.0  # between two looks for sessions that have become idle
SHARE = 2  # one part in so many of the memory's budget is pinned at most
HELD = 1024  # sessions that one engine remembers; others are on disk
SUPERSEDED = 512  # pages of branches that a session remembers; the oldest are deleted

T = TypeVar("T")
_recorded = attrgetter("recorded")


@dataclass(slots=True)
class _Held:
    """A session that this engine has answered."""

    group: ToolGroup
    used: float  # by time.monotonic()
    pinned: Scope | None = None  # of its pages in memory, where they are pinned
    ids: Ids | None = None  # its tokens, where this engine has answered it


@dataclass(slots=True, eq=False)
class SessionName:
    """A session as a request asks for it."""

    name: str
    namespace: str
    # seconds for which it is kept after each answer
    lease_s: float = LEASE_S


class Sessions:
    """Those of one engine. Safe to use from many threads."""

    def __init__(self, scheduler: Scheduler, name: str, fingerprint: Fingerprint | None) -> None:
        self._store, self._model, self._name, self._fingerprint = scheduler.store, scheduler.runner.model, name, fingerprint
        self._process = os.getpid()
        self._held: OrderedDict[Key, _Held] = OrderedDict()  # the longest unused first
        self._lock = threading.RLock()
        self._look_at = 0.0  # for turns to be stored in fewer bits, by time.monotonic()
        self._store.on_renewal(self._record)
        self._store.on_deletion(self.drop_deleted)
        if self._store.disk and self._model.spec:
            scheduler.read_ahead = ReadAhead(self._store, self._model.spec, self._chain)
        self._read_ahead = scheduler.read_ahead
        self._end_leases()
        self._thin_turns()

    # -- asking ----------------------------------------------------------------------------------------------------

    def follow(self, running: Running, session: SessionName | str, finish: Callable[[Running], T]) -> Callable[[Running], T]:
        """Record how the prompt continues its session. Returns `finish` extended: it moves the session to the answer, too."""
        asked = running.asked
        named = session if isinstance(session, SessionName) else SessionName(session, asked.namespace)
        name = named.name
        check_name("session", name)
        if named.namespace != asked.namespace:
            raise ConfigError(f"session {name!r} is of namespace {named.namespace!r}, the request of {asked.namespace!r}")
        regime, weights = self._model.regime(len(running.ids)), running.provenance.fingerprint
        if asked.reuse == "off" or regime is None or not weights:
            return finish
        scope, ids = Scope(asked.namespace, fingerprint_of(weights, asked.adapter), regime), running.ids.array()
        prompt_key = chain(scope.root, ids)[-1].hex()
        records, tip = self._records(asked.namespace, name), b""
        if (known := records.get(scope.fingerprint)) is not None:
            word = "exact" if known.prompt_key == prompt_key else "extend" if _begins(scope, ids, known) else "diverge"
            running.account.record_resumed(word)
            tip = known.tip if word != "diverge" else b""
        elif records:
            running.account.record_note(f"session {name!r} was recorded under other weights or another adapter: it begins anew")
        if self._read_ahead is not None:
            self._read_ahead.asked(running, (asked.namespace, name, scope.fingerprint), tip)
        return partial(self._answered, name, named.lease_s, prompt_key, finish)

    def _answered(self, name: str, lease_s: float, prompt_key: str, finish: Callable[[Running], T], running: Running) -> T:
        completion, scope, count, disk = finish(running), running.scope, running.admitted_tokens, self._store.disk
        if scope is None or not count or scope.precision not in ("exact", disk.options.turns if disk else "exact"):
            running.account.record_note(f"session {name!r} stays where it was: nothing of this answer is kept that may be stored")
            return completion
        ids = running.ids.array(count)
        group = ToolGroup(
            name=SESSION + name,
            namespace=scope.namespace,
            fingerprint=scope.fingerprint,
            regime=scope.regime,
            prefix_tokens=count,
            page_keys=tuple(key.hex() for key in chain(scope.root, ids)),
            tools=(),
            model=self._name,
            created=time.time(),
            lease_end=time.time() + lease_s,
            prompt_key=prompt_key,
            splices=(running.decoding.splice_key.hex(),) if running.decoding.splice_key else (),
            stable_tokens=min(count, running.asked.layout.prefix_tokens),
        )
        recorded = self._records(group.namespace, name).get(group.fingerprint)
        with suppress(StoreError), self._store.deletions.lock:  # the answer is right all the same
            if not self._store.deletions.deleted(scope, ids, running.received):
                self._move(group, scope, ids, recorded)
        return completion

    def _move(self, group: ToolGroup, scope: Scope, ids: Ids, recorded: ToolGroup | None) -> None:
        """Move a session to a new answer: pages of its last chain alone are superseded. recorded: its last answer, as the disk has it."""
        key = _key(group)
        with self._lock:
            held = self._held.get(key)
            answers = [one for one in (recorded, held.group if held else None) if one is not None]
            before = max(answers, key=_recorded, default=None)
            pinned, path = self._keep(group, scope, ids, frozenset(before.page_keys) if before else frozenset())
            moved = self._held[key] = _Held(group, time.monotonic(), pinned, ids)  # at once: an interrupt leaves no pin without its session
            if held is not None:
                self._unpin(held)
            own, left = {*group.page_keys, *(entry.key.hex() for entry in path)}, tuple[str, ...]()
            if before is not None:
                left = tuple(one for one in before.page_keys if one not in own)
                superseded = (*(key for key in before.superseded if key not in own), *left)
                splices = (*(name for name in before.splices if name not in group.splices), *group.splices)
                moved.group = group = replace(group, superseded=superseded[-SUPERSEDED:], splices=splices[-SUPERSEDED:])
                self._delete(superseded[:-SUPERSEDED], group)
                self._drop_splices(group.namespace, splices[:-SUPERSEDED])
            self._held.move_to_end(key)
            self._store.record(group)
            self._retire(group, left)
            self._bound()

    # -- pages -----------------------------------------------------------------------------------------------------

    def _keep(self, group: ToolGroup, scope: Scope, ids: Ids, known: frozenset[str]) -> tuple[Scope | None, list[Entry]]:
        """Pin a chain in memory, and keep its new pages on disk as a prefix's. Returns its scope if memory has all of it (else None), and
        the entries that memory has."""
        tree = self._store.tree
        with tree.lock:
            path = tree.path(scope, ids)
            pinned = scope if tree.pin(scope, ids, Role.PREFIX) else None
        if disk := self._store.disk:
            new = [key for key in group.page_keys if key not in known]
            disk.offer(path)
            disk.writer.after(lambda: session_rows.keep(disk.index, new, group.fingerprint))
        return pinned, path

    def _retire(self, group: ToolGroup, keys: Iterable[str]) -> None:
        """Make pages of a chain that a session left the first to be evicted, except those that other sessions name."""
        gone = frozenset(map(bytes.fromhex, keys))
        if not gone:
            return
        with self._lock:
            named = {bytes.fromhex(key) for one in self._held.values() if one.group.scope == group.scope for key in one.group.page_keys}
        tree, first = self._store.tree, dict[int, Entry]()
        with tree.lock:
            for entry in tree.eviction:  # children before their parents
                goes = (
                    replace(entry.scope, precision="exact") == group.scope
                    and entry.key in gone
                    and entry.key not in named
                    and not entry.pins
                )
                if goes and all(id(child) in first for child in entry.children.values()):
                    entry.role, first[id(entry)] = Role.TURN, entry
            tree.eviction.retire(list(first.values())[::-1])
        if disk := self._store.disk:

            def retire() -> None:
                disk.writer.tell_uses()  # else they look as if they were used since
                disk.writer.discard(session_rows.retire(disk.index, [key.hex() for key in gone], group.fingerprint))

            disk.writer.after(retire)

    def _delete(self, keys: tuple[str, ...], group: ToolGroup) -> None:
        """Delete pages of branches too old to be remembered: forgetting the session could not find them."""
        if keys and (disk := self._store.disk):

            def delete() -> None:
                gone = session_rows.retire(disk.index, keys, group.fingerprint)
                with self._store.deletions.lock:
                    self._store.tree.remove(Deletion(group.namespace, group="", fingerprint=group.fingerprint, keys=tuple(gone)))
                disk.forget(list(gone), group.fingerprint)

            disk.writer.after(delete)

    def _chain(self, key: Key) -> Chain | None:
        held = self._held.get(key)
        return None if held is None or held.ids is None else (held.group.scope, held.ids, held.group.tip)

    def _drop_splices(self, namespace: str, names: Iterable[str]) -> None:
        """Forget the ids of answers on disk, written or not, except those that other sessions name."""
        if disk := self._store.disk:

            def drop() -> None:
                others = {name for group in disk.index.groups(namespace) for name in group.splices}
                disk.index.drop_named_splices(namespace, [name for name in names if name not in others])

            disk.writer.after(drop)

    def _unpin(self, held: _Held) -> None:
        if held.pinned:
            self._store.tree.release_pin((held.pinned, held.group.tip), Role.PREFIX)
            held.pinned = None

    def _bound(self, to_pin: int = 0) -> None:
        """Unpin sessions that were not used for long, or do not fit beside those used since, and tool groups with `to_pin` more tokens."""
        page_bytes = self._model.spec.page_bytes if self._model.spec else 0
        groups = {(one.scope.fingerprint, one.key.hex()) for _, path in self._store.tree.pinned() for one in path} if to_pin else set()
        with self._lock:
            while len(self._held) > HELD:
                self._unpin(self._held.popitem(last=False)[1])
            pages, now = set[tuple[str, str]](), time.monotonic()
            for held in [one for one in reversed(self._held.values()) if one.pinned]:
                pages |= {(held.group.fingerprint, key) for key in held.group.page_keys}
                most = max(len(pages) * SHARE, len(pages | groups) - -to_pin // PAGE_TOKENS)
                if most * page_bytes > self._store.budget_bytes or now - held.used > IDLE_S:
                    self._unpin(held)

    # -- names -----------------------------------------------------------------------------------------------------

    def last(self, namespace: str, name: str) -> ToolGroup | None:
        """The record of a session's last answer under the present weights, of any adapter; None if there is none."""
        self._store.apply_deletions()
        weights = self._fingerprint.whole if self._fingerprint else ""
        known = [one for one in self._records(namespace, name).values() if one.scope.weights == weights]
        return max(known, key=_recorded, default=None)

    def _records(self, namespace: str, name: str) -> dict[str, ToolGroup]:
        """The last answers of a session by fingerprint, as this engine and the disk know them, unless its lease is over."""
        found = [held.group for key, held in list(self._held.items()) if key[:2] == (namespace, name)]
        if disk := self._store.disk:
            with suppress(StoreError):  # as good as not recorded
                found += disk.index.groups(namespace, SESSION + name)
        found.sort(key=_recorded)
        return {one.fingerprint: one for one in found if not one.over}

    def copy(self, groups: Iterable[ToolGroup], name: str, lease_s: float) -> None:
        """Record a session's last answers under another name. ConfigError: that has one of its own."""
        check_name("name", name)
        now, listed = time.time(), list(groups)
        with self._lock:
            for group in listed:  # before any is copied
                if group.fingerprint in self._records(group.namespace, name):
                    said = f"name={name!r}: a session of that name is in namespace {group.namespace!r}"
                    raise ConfigError(f"{said}; close it, or take another name")
            for copied in (replace(group, name=SESSION + name, created=now, lease_end=now + lease_s) for group in listed):
                if (over := self._held.get(_key(copied))) is not None:  # its lease is
                    self._unpin(over)
                self._held[_key(copied)] = _Held(copied, time.monotonic())
                self._store.record(copied)

    def rename(self, namespace: str, name: str, new: str, lease_s: float) -> None:
        """Record a session under another name only."""
        self.copy(self._records(namespace, name).values(), new, lease_s)
        self.close(namespace, name)

    def flushed(self) -> DiskTier | None:
        """Write everything that waits; returns the disk, None if there is none."""
        self._store.flush()
        return self._store.disk

    def close(self, namespace: str, name: str) -> None:
        """End a session: it is unpinned and forgotten, and pages that only it named are evicted first."""
        gone = self._records(namespace, name)
        with self._lock:
            for key in [key for key in self._held if key[:2] == (namespace, name)]:
                self._unpin(self._held.pop(key))
        if disk := self._store.disk:
            now = time.time()
            disk.writer.run_until_done(lambda: disk.index.drop_group(namespace, SESSION + name, until=now))
        for one in gone.values():
            self._retire(one, (*one.page_keys, *one.superseded))

    def lapse(self, to_pin: int = 0) -> None:
        """End sessions whose lease is over, and unpin those that were not used for long, or leave no room for `to_pin` tokens."""
        if self._process != os.getpid():  # in a forked child pins, and locks, are the parent's
            return
        with self._lock:
            over = [self._held.pop(key) for key, held in list(self._held.items()) if held.group.over]
        for held in over:
            self._unpin(held)
            self._retire(held.group, (*held.group.page_keys, *held.group.superseded))
        if over:
            self._end_leases()
        self._bound(to_pin)
        self._thin_turns()

    def _thin_turns(self) -> None:
        """Store turns of idle sessions in fewer bits, where StoreOptions.turns asks for it."""
        disk, now = self._store.disk, time.monotonic()
        if disk is None or disk.options.turns == "exact" or disk.written != "exact" or not disk.folder.writable or now < self._look_at:
            return
        self._look_at = now + LOOK_S
        if disk.options.turns == "int4":
            from .turn_precision import check

            check("int4", disk.folder.path, self._fingerprint.whole if self._fingerprint else "", self._name)
        from .store.disk import idle_turns

        disk.writer.after(lambda: idle_turns.rewrite_all(disk, IDLE_S, self._written_again))

    def _written_again(self, row: int) -> None:
        """Have a page in memory written once more at its next use: its row now has fewer bits."""
        tree = self._store.tree
        with tree.lock:
            for entry in tree.eviction:
                if entry.row == row and entry.scope.precision == "exact":
                    entry.row = 0

    def _end_leases(self) -> None:
        if disk := self._store.disk:
            disk.writer.after(lambda: session_rows.end_leases(disk.index))

    def _record(self) -> None:
        for held in list(self._held.values()):
            self._store.record(held.group)

    def drop_deleted(self, deletion: Deletion) -> None:
        """Unpin and forget the sessions that a deletion covers."""
        by_age = deletion.forced and deletion.before is not None  # pages may be older than their session
        with self._lock:
            for key, held in list(self._held.items()):
                group = held.group
                if deletion.forced and deletion.covers_group(group):
                    self._unpin(self._held.pop(key))
                    self._drop_splices(key[0], group.splices)
                    if deletion.group is not None:
                        self._forget_own(group)
                elif by_age or (deletion.group is not None and not deletion.group.startswith(SESSION)):
                    self._unpin(held)  # a tool group goes with what continues it

    def _forget_own(self, group: ToolGroup) -> None:
        """Delete a forgotten session's pages that only this process knows of: its answer here, if it is not the last one."""
        disk = self._store.disk
        with suppress(StoreError):
            others = [one for one in (*(disk.index.groups(group.namespace) if disk else ()), *self.all) if one.name != group.name]
            own = Deletion.of_group(group, others, forced=False)
            self._store.tree.remove(own)
            if disk:
                disk.writer.drop(own)  # and what it wrote before; not what a later request computes anew
                keys = [key.hex() for key in own.keys]

                def forget() -> None:
                    disk.forget(list(session_rows.retire(disk.index, keys, group.fingerprint)), group.fingerprint)
                    disk.index.database.empty_log()

                disk.writer.run_until_done(forget)

    @property
    def all(self) -> tuple[ToolGroup, ...]:
        """The last answers that this engine holds, as they are recorded."""
        return tuple(held.group for held in list(self._held.values()))  # other threads answer meanwhile


def _key(group: ToolGroup) -> Key:
    return group.namespace, group.name.removeprefix(SESSION), group.fingerprint


def _begins(scope: Scope, ids: Ids, group: ToolGroup) -> bool:
    """Tell whether these ids begin with a session's chain."""
    return len(ids) >= group.prefix_tokens and chain(scope.root, ids[: group.prefix_tokens])[-1] == group.tip
