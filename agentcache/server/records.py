"""The last requests and their receipts, by id, and what listens to them. Holds no text of prompts or answers."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from ..receipt import Receipt

RECORDS = 1024


@dataclass(eq=False)
class Record:
    """One request: its id, and its receipt once it has ended."""

    id: str
    namespace: str
    model: str
    path: str
    # name of the registered tool group that the prompt begins with
    group: str | None
    changed: Callable[[], None]
    state: Literal["running", "done", "failed", "cancelled"] = "running"
    error: str = ""
    began: float = field(default_factory=time.time)
    receipt: Receipt | None = None

    def end(self, receipt: Receipt) -> None:
        """The answer is whole."""
        self._settle("done", receipt=receipt)

    def fail(self, error: str) -> None:
        """The answer will not be whole."""
        self._settle("failed", error=error)

    def leave(self) -> None:
        """The client left, if nothing else ended it."""
        self._settle("cancelled")

    def _settle(self, state: Literal["done", "failed", "cancelled"], *, error: str = "", receipt: Receipt | None = None) -> None:
        if self.state == "running":
            self.state, self.error, self.receipt = state, error, receipt
            self.changed()

    def as_dict(self) -> dict[str, Any]:
        """JSON values: without names of other tenants' things, and without content."""
        told = {"id": self.id, "model": self.model, "path": self.path, "group": self.group, "state": self.state, "began": self.began}
        return {**told, "error": self.error or None, "receipt": self.receipt.as_dict() if self.receipt else None}


class Records:
    """The last RECORDS requests. Used on the loop's thread only."""

    def __init__(self) -> None:
        self._by_id: OrderedDict[str, Record] = OrderedDict()
        self._changed = asyncio.Event()  # of the next change
        self.changes = 0

    def open(self, identity: str, namespace: str, model: str, path: str, group: str | None = None) -> Record:
        """A record of a request that begins."""
        record = self._by_id[identity] = Record(identity, namespace, model, path, group, self.wake)
        while len(self._by_id) > RECORDS:
            self._by_id.popitem(last=False)
        self.wake()
        return record

    def find(self, identity: str, namespace: str | None) -> Record | None:
        """The record of that id, if it is of this namespace; None: of any."""
        found = self._by_id.get(identity)
        return found if found is not None and namespace in (None, found.namespace) else None

    def last(self, namespace: str | None, count: int) -> list[Record]:
        """The last records of a namespace, newest first; None: of all."""
        found = [record for record in reversed(self._by_id.values()) if namespace in (None, record.namespace)]
        return found[:count]

    async def wait(self, seconds: float) -> None:
        """Return at the next change, at the latest after so many seconds."""
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._changed.wait(), seconds)

    def wake(self) -> None:
        """Something changed that the status shows: a request begins or ends, or what there is besides."""
        self.changes += 1
        self._changed.set()
        self._changed = asyncio.Event()
