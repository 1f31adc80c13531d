"""Pages of the session that is asked next, read from disk while another one decodes. Learns the order of sessions; knows no prompts.

Agents that take turns come in an order that repeats: a workflow's, a graph's, a round's. What followed a session last time is expected to
follow it again. Where that was wrong more often than right of late, nothing is read.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from .kv_spec import KVSpec
from .request import Running
from .store.entry import PageQuery
from .store.keys import Ids, Scope
from .store.store import Store

if TYPE_CHECKING:
    from .store.page_prefetch import PagePrefetch

KNOWN = 1024  # sessions and namespaces that are remembered
TRUST = 3  # times in a row to be wrong until nothing is read

Key = tuple[str, str, str]  # namespace, name and fingerprint of a session
Chain = tuple[Scope, Ids, bytes]


class ReadAhead:
    """Reads for one engine: `asked` from any thread, `step` on the device's. chain: scope, ids and last page key of a session;
    None: not known here.
    """

    def __init__(self, store: Store, spec: KVSpec, chain: Callable[[Key], Chain | None]) -> None:
        self._store, self._spec, self._chain = store, spec, chain
        self._lock = threading.Lock()
        self._next: OrderedDict[Key, Key] = OrderedDict()  # after a session; after (namespace, "", ""), the last one
        self._trust = 1
        self._due: tuple[Running, Key] | None = None  # once that is filled, the session's pages are read
        self._reading: tuple[PagePrefetch, Key, bytes] | None = None

    def asked(self, running: Running, key: Key, tip: bytes) -> None:
        """Learn that a session is asked; the request goes on with what is being read for it.

        tip: key of the page that ends the session's last answer, whoever gave it; empty if the prompt does not go on from there.
        """
        with self._lock:
            before = self._next.pop(last := (key[0], "", ""), key)
            self._next[last] = key
            if before != key:
                if (expected := self._next.pop(before, None)) is not None:
                    self._trust = min(self._trust + 1, TRUST) if expected == key else max(self._trust - 1, -TRUST)
                self._next[before] = key
            while len(self._next) > KNOWN:
                self._next.popitem(last=False)
            if self._reading is not None and self._reading[1:] == (key, tip) and not self._fewer(running):
                running.prefetch, running.prefetch_asked = self._reading[0], True
                running.prefetch.restart_clock()
                self._reading = None
            coming = self._next.get(key)
            self._due = (running, coming) if coming is not None and self._trust > 0 else None

    def _fewer(self, running: Running) -> bool:
        """Tell whether a request takes pages of fewer bits, too, which it looks for itself."""
        return running.asked.reuse == "lossy" and (disk := self._store.disk) is not None and disk.precision != "exact"

    def step(self, ms_per_token: float) -> None:
        """Begin to read, or take in what was read."""
        with self._lock:
            if self._reading is not None:
                if not self._reading[0].pending():
                    self._reading[0].close()
                    self._reading = None
            elif self._due is not None and self._due[0].filled:
                key, self._due = self._due[1], None
                if (known := self._chain(key)) is not None and 2 * len(known[1]) * self._spec.token_bytes <= self._store.budget_bytes:
                    scope, ids, tip = known
                    query = PageQuery(scope, np.append(ids, ids[-1:]), ms_per_token, self._spec)  # a lookup leaves out the last
                    reading = self._store.prefetch(query, lambda: None)
                    self._reading = (reading, key, tip) if reading is not None else None
