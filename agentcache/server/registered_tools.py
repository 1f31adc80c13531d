"""Tool groups that were registered by name: their system prompts and tools, by namespace, on disk across restarts. Computes nothing."""

from __future__ import annotations

import json
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..errors import StoreError
from ..private import locked, put
from .errors import ServerError

FILE = "registered-tools.json"
MOST = 1000  # of one namespace


@dataclass(frozen=True, slots=True)
class Registered:
    """One tool group as it was registered."""

    name: str
    namespace: str
    model: str
    system: str
    tools: list[dict[str, Any]] = field(default_factory=list)
    # seconds that it stays pinned after its last use; None: until it is deleted
    ttl_s: float | None = None
    pinned: bool = True
    # False for one that a client only pinned: it is listed, and not remembered
    registered: bool = True


class RegisteredTools:
    """All of them. folder: where they are written down, None for nowhere. A damaged file is as good as none: groups register again."""

    def __init__(self, folder: Path | None) -> None:
        self._file = None if folder is None else folder / FILE
        self._used: dict[tuple[str, str], float] = {}  # by time.monotonic()
        self._known = self._read()

    def check_room(self, group: Registered) -> None:
        """ServerError 429: there are too many for one more. Asked before it is computed and pinned."""
        if (group.namespace, group.name) not in self._known and len(self.of(group.namespace)) >= MOST:
            raise ServerError(429, f"namespace {group.namespace!r} has {MOST} tool groups: delete one", code="too_many_groups")

    def add(self, group: Registered) -> None:
        """Remember a group, in the place of one of its name. StoreError: it cannot be written."""
        self._write((group.namespace, group.name), group)

    def of(self, namespace: str | None) -> list[Registered]:
        """Those of a namespace, None for all."""
        return [group for group in self._known.values() if namespace in (None, group.namespace)]

    def shown(self, namespace: str, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> str | None:
        """Name of the group with these tools, and the system prompt that these messages begin with."""
        first = messages[0] if messages else {}
        system = first.get("content") or "" if first.get("role") in ("system", "developer") else ""
        known = (group for group in self.of(namespace) if group.system == system and _schemas(group.tools) == _schemas(tools))
        return next((group.name for group in known), None)

    def find(self, namespace: str, name: str) -> Registered:
        """ServerError 404: this namespace has none of that name, whatever others have."""
        found = self._known.get((namespace, name))
        if found is None:
            raise ServerError(404, f"there is no tool group {name!r}: register it with POST /tools", param="name", code="group_not_found")
        return found

    def use(self, namespace: str, name: str) -> None:
        """Begin the time of the group of that name anew."""
        self._used[namespace, name] = time.monotonic()

    def lapsed(self) -> list[Registered]:
        """Those whose time is over: they stay registered, and their pins end. Each is told once."""
        now = time.monotonic()
        timed = [group for group in self._known.values() if group.ttl_s is not None and (group.namespace, group.name) in self._used]
        over = [group for group in timed if now - self._used[group.namespace, group.name] >= (group.ttl_s or 0.0)]
        for group in over:
            del self._used[group.namespace, group.name]
        return over

    def drop(self, group: Registered) -> None:
        self._write((group.namespace, group.name), None)
        self._used.pop((group.namespace, group.name), None)

    def _read(self) -> dict[tuple[str, str], Registered]:
        try:
            plain = json.loads(self._file.read_text(encoding="utf-8")) if self._file else []
            return {(said["namespace"], said["name"]): Registered(**said) for said in plain}
        except (OSError, ValueError, TypeError, KeyError):
            return {}

    def _write(self, key: tuple[str, str], group: Registered | None) -> None:
        """Put a group in the place of that name, or none, beside those that other servers on this store have written meanwhile."""
        try:
            with locked(self._file.parent) if self._file else nullcontext():
                known = self._read() if self._file else dict(self._known)
                known.pop(key, None)
                if group is not None:
                    known[key] = group
                if self._file:
                    put(self._file, json.dumps([asdict(one) for one in known.values()]).encode(), durable=False)
        except OSError as error:
            raise StoreError(f"{str(self._file)!r} cannot be written: {error}") from error
        self._known = known


def _schemas(tools: list[dict[str, Any]]) -> list[Any]:
    """Tools as a prompt shows them, whichever API they came by."""
    said = [tool.get("function", tool) for tool in tools]
    return [[one.get(key) for key in ("name", "description", "parameters")] if isinstance(one, dict) else one for one in said]
