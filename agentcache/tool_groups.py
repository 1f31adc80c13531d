"""The tool groups that this engine holds: pinned, named, recorded for later processes. Knows neither messages nor how to compute.

Timed pins end by themselves: each lease that asks for one says how long it wants it.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakValueDictionary

from .errors import AgentCacheError, ConfigError, GenerationError, StoreFullError
from .events import Done
from .kv import PAGE_TOKENS
from .matching import fingerprint_of
from .model.adapters import Adapter
from .model.fingerprint import Fingerprint
from .private import locked
from .request import Running
from .shared_engines import EngineLease
from .store.deletion import Deletion
from .store.forgetting import delete
from .store.keys import Scope, as_ids, chain
from .store.tool_group import SESSION, ToolGroup
from .types import Forgotten, Layout, check_name

if TYPE_CHECKING:
    from .scheduler import Scheduler
    from .sessions import Sessions

Key = tuple[str, str]  # namespace and name


class ToolGroups:
    """By namespace and name; safe to use from many threads."""

    def __init__(self, scheduler: Scheduler, name: str, fingerprint: Fingerprint | None) -> None:
        self._store, self._model, self._name, self._fingerprint = scheduler.store, scheduler.runner.model, name, fingerprint
        self._scheduler = scheduler
        self._held: dict[tuple[str, str], ToolGroup] = {}
        self._lock = threading.Lock()
        self._renewing = threading.Lock()
        self.timed = TimedPins(self)
        self._sessions: Sessions | None = None
        self._store.on_renewal(self._record)
        self._store.on_deletion(self.drop_deleted)

    def _record(self) -> None:
        for group in self.all:
            self._store.record(group)

    @property
    def sessions(self) -> Sessions:
        """The sessions of the engine: loaded for the first caller who names one."""
        from .sessions import Sessions

        with self._lock:
            if self._sessions is None:
                self._sessions = Sessions(self._scheduler, self._name, self._fingerprint)
            return self._sessions

    def lapse(self, to_pin: int = 0) -> None:
        """End timed pins and sessions whose time is over. to_pin: tokens of a tool group, which unpins sessions that leave it no room."""
        self.timed.lapse()
        if self._sessions is not None:
            self._sessions.lapse(to_pin)

    def forget(self, namespace: str | None, group: str | None, session: str | None, older_than: float | None) -> Forgotten:
        """Delete what is named: see `Engine.forget`."""
        if session is not None:
            check_name("session", session)
            if group is not None:
                raise ConfigError(f"session={session!r}, group={group!r}: give one of them")
            group = SESSION + session
        held = (*self.all, *(self._sessions.all if self._sessions else ()))
        return delete(self._store, namespace, group, older_than, held)

    def tools(self, namespace: str, name: str, adapter: Adapter | None = None) -> tuple[str, ...]:
        """The recorded tool order of a group, of this or an earlier process."""
        check_name("namespace", namespace)
        check_name("group", name)
        if (held := self._held.get((namespace, name))) is not None:  # at once: another thread may release it
            return held.tools
        whole = self._fingerprint.whole if self._fingerprint else ""
        kept = self._store.recorded(namespace, name, fingerprint_of(whole, adapter)) if whole else None
        if kept is None:
            raise ConfigError(f"group={name!r} is not warm in namespace {namespace!r}: call warm(name={name!r}) first")
        return kept.tools

    @staticmethod
    def check(name: str | None) -> None:
        """Refuse what no tool group can be called: ConfigError."""
        if name is not None:
            check_name("name", name)
            if name.startswith(SESSION):
                raise ConfigError(f"name={name!r}: names that begin with {SESSION!r} are those of sessions")

    def hold(
        self, request: Running, layout: Layout, name: str | None, tools: tuple[str, ...], called: float,
        sources: tuple[tuple[str, str, int], ...] = (), admit: Callable[[ToolGroup, tuple[ToolGroup, ...]], None] | None = None,
    ) -> ToolGroup:  # fmt: skip
        """Name and record a prefix that was computed and pinned; the pins of an earlier group of that name go.

        sources: the texts that it holds. admit: raises where it may not be pinned beside those that are held; then it is not recorded.
        """
        scope, ids, spec = request.scope, tuple(layout.ids), self._model.spec
        if scope is None:
            refused = request.receipt.refusals[0]
            raise ConfigError(f"this model's state cannot be kept ({refused.detail or refused.reason}): nothing to warm")
        self._check_kept(request, scope, layout, name)
        if not request.pinned_pages:
            page_bytes, budget = spec.page_bytes if spec else 0, self._store.budget_bytes
            need, pinned = -(-len(ids) // PAGE_TOKENS) * page_bytes, self._store.tree.audit()["pinned_pages"] * page_bytes
            beside = f", and others have pinned {pinned} bytes: release one of them, or allow more" if need <= budget and pinned else ""
            raise ConfigError(f"memory_bytes={budget!r} cannot hold this tool group: it needs {need} bytes{beside}")
        keys = tuple(key.hex() for key in chain(scope.root, as_ids(ids)))
        name = name or keys[-1][:12]
        layers = self._fingerprint.layers if self._fingerprint else ()
        states = sum(known.bytes for known in self._store.tree.checkpoints(scope, as_ids(ids)).values())
        group = ToolGroup(
            name=name,
            namespace=request.asked.namespace,
            fingerprint=scope.fingerprint,
            regime=scope.regime,
            prefix_tokens=len(ids),
            page_keys=keys,
            tools=tools,
            model=self._name,
            layers=layers if layers and layers[-1] == scope.fingerprint else (),  # else weights have changed since
            created=time.time(),
            kv_bytes=states + (len(ids) * spec.token_bytes if spec else 0),
            checkpoint_bytes=states,
            computed_tokens=request.receipt.computed_tokens,
            warm_ms=(time.perf_counter() - called) * 1e3,
            sources=sources,
        )
        if admit is not None:
            admit(group, self.all)
        assert scope == group.scope and request.pinned_pages == group.pages
        with self._store.deletions.lock:
            self._check_kept(request, scope, layout, name)
            self._store.record(group)
            with self._lock:
                before = self._held.get((group.namespace, name))
                self._held[group.namespace, name], request.pinned_pages = group, 0  # its pins are the group's from now on
        self._unpin(before)
        return group

    def leave_to_disk(self, group: ToolGroup) -> None:
        """Write a group, then unpin it in memory, where it is evicted first; on disk it stays pinned.

        So a corpus larger than memory takes no page of the agents beside it, but for those of the few packs that are not written yet.
        StoreFullError: it is released, unwritten.
        """
        disk, about = self._store.disk, (group.namespace, group.name)
        if disk is None or about not in self._held:  # forgotten since it was computed
            return
        if not self._store.flush() and not disk.index.has_pages(group.page_keys, group.fingerprint):
            self._store.apply_deletions()
            if not self.release(*about):  # another process has deleted it
                return
            disk.index.drop_group(*about, group.fingerprint)
            why = disk.writer.failure or "the disk does not take it"
            raise StoreFullError(f"{group.name!r} was not written: {why}; release others, or allow more: StoreOptions(disk_bytes=...)")
        self._store.tree.release_pin((group.scope, group.tip), first=True)

    @contextmanager
    def renewing(self) -> Iterator[None]:
        """A lock among threads and processes, from reading `packs` until `renew`."""
        disk = self._store.disk
        if disk is not None:
            disk.folder.check_same()
        with self._renewing, locked(disk.folder.blobs) if disk is not None else nullcontext():  # deletions lock the store's own folder
            yield

    def renew(self, group: ToolGroup) -> None:
        """Record a group whose manifest names other texts now, unless it was forgotten meanwhile."""
        disk, about = self._store.disk, (group.namespace, group.name)
        with self._store.deletions.lock:
            if held := about in self._held:
                with self._lock:
                    self._held[about] = group
            if disk is not None and disk.index.group(*about, group.fingerprint) is not None:
                disk.index.put_group(group, self._store.deletions.generation)  # now: the next who releases a text of it reads it there
            elif held:
                self._store.record(group)

    def packs(self) -> list[ToolGroup]:
        """The tool groups that hold documents, of this and other processes, with all their pages."""
        disk, found = self._store.disk, {(one.namespace, one.name): one for one in self.all if one.sources}
        if disk is None:
            return list(found.values())
        whole = self._fingerprint.whole if self._fingerprint else ""
        for one in disk.index.groups():
            if one.sources and one.scope.weights == whole:  # another process may have released texts of one that is held here
                found[one.namespace, one.name] = replace(found.get((one.namespace, one.name), one), sources=one.sources)
        return [one for one in found.values() if disk.index.has_pages(one.page_keys, one.fingerprint)]

    def abandon(self, request: Running, layout: Layout) -> None:
        """Cancel a request whose callback or forward failed, and unpin its pages."""
        request.events.cancel()
        while request.sequence is not None and not isinstance(request.events.get(), (Done, AgentCacheError)):
            pass
        if request.pinned_pages and request.scope:
            self._store.release_pin(request.scope.pin_name(as_ids(layout.ids)))

    def _check_kept(self, request: Running, scope: Scope, layout: Layout, name: str | None) -> None:
        store, ids, received = self._store, request.ids.array(), request.received
        with store.deletions.lock:
            gone = [one for one in store.deletions.since(received.generation) if one.covers_sequence(scope, ids, received.made)]
            if not gone:
                return
            if request.pinned_pages and all(one.group is not None for one in gone):  # other deletions take pinned pages, too
                keys = [entry.key for entry in store.tree.path(scope, ids) if any(one.covers_lineage(entry) for one in gone)]
                store.release_pin(scope.pin_name(as_ids(layout.ids)))
                for one in gone:
                    store.tree.remove(one)
                if disk := store.disk:  # pinning has written them anew
                    disk.writer.run_until_done(lambda: disk.forget(keys, scope.fingerprint))
            request.pinned_pages = 0
        raise GenerationError(f"tool group {name!r} was forgotten while it was computed: warm it again")

    def drop_deleted(self, deletion: Deletion) -> None:
        """Unpin the tool groups that a deletion covers."""
        by_age = dict(self._store.tree.pinned()) if deletion.before is not None else {}
        with self._lock:
            for name, held in list(self._held.items()):
                older = any(map(deletion.covers_page, by_age.get((held.scope, held.tip), ())))  # pages may be older than their group
                if deletion.forced and (older or deletion.covers_group(held)):
                    self._unpin(self._held.pop(name))

    def release(self, namespace: str, name: str) -> bool:
        """Unpin a group; False if there is none of that name."""
        with self._lock:
            held = self._held.pop((namespace, name), None)
        self._unpin(held)
        return held is not None

    def _unpin(self, group: ToolGroup | None) -> None:
        if group is not None:
            self._store.release_pin((group.scope, group.tip))

    @property
    def all(self) -> tuple[ToolGroup, ...]:
        """Those held now, of all namespaces."""
        return tuple(self._held.values())


@dataclass(slots=True, eq=False)
class _TimedPin:
    """One group, and until when each lease wants it, on the monotonic clock."""

    group: ToolGroup
    ends: WeakKeyDictionary[EngineLease, float]


class TimedPins:
    """The timed pins of one engine. Their time is looked at with each request. Safe to use from many threads."""

    def __init__(self, groups: ToolGroups) -> None:
        self._groups = groups
        self._held: dict[Key, _TimedPin] = {}
        self._lock = threading.RLock()
        self._turns: WeakValueDictionary[Key, threading.Lock] = WeakValueDictionary()
        self._anyone = EngineLease()  # of those who ask without a lease
        self._process = os.getpid()

    def pin(
        self, pin: Callable[..., ToolGroup], key: Key, ttl_s: float, lease: EngineLease | None, asked: Mapping[str, Any], weights: str
    ) -> ToolGroup:
        """The group that `pin(**asked)` makes, named `key` and a digest of `asked`; one that is pinned only lasts longer.

        weights: the fingerprint under which a group is looked up.
        """
        if not isinstance(ttl_s, (int, float)) or isinstance(ttl_s, bool) or not ttl_s > 0:
            raise ConfigError(f"ttl_s={ttl_s!r}: must be a positive number of seconds; math.inf to pin until `release`")
        namespace, label = key
        key = namespace, f"{label}-{_digest((namespace, weights, sorted(asked.items())))}"
        with self._lock:
            turn = self._turns.setdefault(key, threading.Lock())
        with turn:  # the second of two that ask at once waits for the first
            if (known := self._claim(key, lease, ttl_s)) is not None:
                return known
            made = pin(**asked, name=key[1], namespace=namespace)
            self._claim(key, lease, ttl_s, made)
            return made

    def _claim(self, key: Key, lease: EngineLease | None, ttl_s: float, made: ToolGroup | None = None) -> ToolGroup | None:
        """Extend a lease's pin of a group that is pinned, or was just `made`; returns the group, None if it is not pinned."""
        with self._lock:
            held = self._held.get(key)
            if made is not None:
                held = self._held[key] = _TimedPin(made, held.ends if held else WeakKeyDictionary())
            elif held is None or held.group not in self._groups.all:
                return None
            user = lease or self._anyone
            held.ends[user] = max(held.ends.get(user, 0.0), time.monotonic() + ttl_s)
            if lease is not None:
                lease.add_pins(self.drop)
            return held.group

    def lapse(self) -> None:
        """Unpin tool groups that no lease wants any more, or whose time is over."""
        if not self._held or self._process != os.getpid():  # in a forked child pins, and locks, are the parent's
            return
        now = time.monotonic()
        with self._lock:
            for key, held in list(self._held.items()):
                for lease in [lease for lease, end in held.ends.items() if end < now]:
                    del held.ends[lease]
                if not held.ends:
                    del self._held[key]
                    if held.group in self._groups.all:  # else another is made under its name
                        self._groups.release(*key)

    def drop(self, lease: EngineLease) -> None:
        """Unpin tool groups that only this lease wants pinned."""
        if self._process != os.getpid():
            return
        with self._lock:
            for held in self._held.values():
                held.ends.pop(lease, None)
        self.lapse()


def _digest(asked: tuple[Any, ...]) -> str:
    try:
        said = repr(asked)
    except RecursionError:  # refused where it is rendered
        said = ""
    return hashlib.blake2b(said.encode("utf-8", "surrogatepass"), digest_size=6).hexdigest()
