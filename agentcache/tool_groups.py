"""The tool groups that this engine holds: pinned, named, recorded for later processes. Knows neither messages nor how to compute."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from .errors import ConfigError, GenerationError
from .kv import PAGE_TOKENS
from .model.fingerprint import Fingerprint
from .model.hf import HFModel
from .request import Running
from .store.deletion import Deletion
from .store.keys import Scope, as_ids, chain
from .store.store import Store
from .store.tool_group import ToolGroup
from .types import Layout, check_name

if TYPE_CHECKING:
    from .timed_pins import TimedPins


class ToolGroups:
    """By namespace and name; safe to use from many threads."""

    def __init__(self, store: Store, model: HFModel, name: str, fingerprint: Fingerprint | None) -> None:
        self._store, self._model, self._name, self._fingerprint = store, model, name, fingerprint
        self._held: dict[tuple[str, str], ToolGroup] = {}
        self._lock = threading.Lock()
        self._timed: TimedPins | None = None
        store.on_renewal(self._record)

    def _record(self) -> None:
        for group in self.all:
            self._store.record(group)

    def tools(self, namespace: str, name: str) -> tuple[str, ...]:
        """The recorded tool order of a group, of this or an earlier process."""
        check_name("namespace", namespace)
        check_name("group", name)
        if (namespace, name) in self._held:
            return self._held[namespace, name].tools
        kept = self._store.recorded(namespace, name, self._fingerprint.whole) if self._fingerprint else None
        if kept is None:
            raise ConfigError(f"group={name!r} is not warm in namespace {namespace!r}: call warm(name={name!r}) first")
        return kept.tools

    def hold(self, request: Running, layout: Layout, name: str | None, tools: tuple[str, ...], called: float) -> ToolGroup:
        """Name and record a prefix that was computed and pinned; the pins of an earlier group of that name go."""
        scope, ids, spec = request.scope, tuple(layout.ids), self._model.spec
        if scope is None:
            refused = request.receipt.refusals[0]
            raise ConfigError(f"this model's state cannot be kept ({refused.detail or refused.reason}): nothing to warm")
        self._check_kept(request, scope, name)
        if not request.pinned_pages:
            need = -(-len(ids) // PAGE_TOKENS) * (spec.page_bytes if spec else 0)
            raise ConfigError(f"memory_bytes={self._store.budget_bytes!r} cannot hold this tool group: it needs {need} bytes")
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
        )
        assert scope == group.scope and request.pinned_pages == group.pages
        with self._store.deletions.lock:
            self._check_kept(request, scope, name)
            self._store.record(group)
            with self._lock:
                before = self._held.get((group.namespace, name))
                self._held[group.namespace, name] = group
        self._unpin(before)
        return group

    def _check_kept(self, request: Running, scope: Scope, name: str | None) -> None:
        if self._store.deletions.meet(scope, request.ids.array(), request.received):
            raise GenerationError(f"tool group {name!r} was forgotten while it was computed: warm it again")

    def let_go(self, deletion: Deletion) -> None:
        """Unpin tool groups that were deleted on purpose."""
        with self._lock:
            for name, held in list(self._held.items()):
                if deletion.forced and (deletion.names(*name) or deletion.covers(name[0], held.created)):
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
    def timed(self) -> TimedPins:
        """Tool groups that end by themselves: loaded for the first caller who pins one."""
        with self._lock:
            if self._timed is None:
                from .timed_pins import TimedPins

                self._timed = TimedPins(self)
            return self._timed

    def lapse(self) -> None:
        """Unpin the timed ones whose time is over."""
        if self._timed is not None:
            self._timed.lapse()

    @property
    def all(self) -> tuple[ToolGroup, ...]:
        """Those held now, of all namespaces."""
        return tuple(self._held.values())
