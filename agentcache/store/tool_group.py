"""A tool group: a named prefix over a chain of pages, with what finds it again; a session is recorded as one. Knows no pages' contents."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field, replace
from typing import Any

from ..errors import StoreCorruptError
from .keys import Scope

SESSION = "session:"  # begins the names under which sessions are recorded


@dataclass(frozen=True, slots=True)
class ToolGroup:
    """A named, pinned prefix, as `warm` and `pin` return it and as its manifest records it for later processes."""

    name: str
    namespace: str
    fingerprint: str
    regime: str
    prefix_tokens: int
    page_keys: tuple[str, ...] = field(repr=False)  # hexadecimal, in order; the last page may be partly filled
    tools: tuple[str, ...]  # names, in the order in which they are shown
    model: str  # the name it was loaded by
    # cumulative fingerprint of each layer, so that other upper layers find shared lower ones
    layers: tuple[str, ...] = field(default=(), repr=False)
    created: float = 0.0
    # of learnt documents: the caller's name, digest and tokens of each text
    sources: tuple[tuple[str, str, int], ...] = field(default=(), repr=False)
    # of a session: the end of its lease by time.time(), the key of its last prompt, pages of branches that it left (docs/sessions.md)
    lease_end: float = 0.0
    prompt_key: str = field(default="", repr=False)
    superseded: tuple[str, ...] = field(default=(), repr=False)
    # of a session: system and tools, which no turn is; names of the answers' own ids
    stable_tokens: int = 0
    splices: tuple[str, ...] = field(default=(), repr=False)
    # of the call that made it, with its checkpoints; 0 in a manifest that was read
    kv_bytes: int = field(default=0, compare=False)
    checkpoint_bytes: int = field(default=0, compare=False)  # as kv_bytes
    computed_tokens: int = field(default=0, compare=False)  # as kv_bytes
    warm_ms: float = field(default=0.0, compare=False)  # as kv_bytes

    @property
    def pages(self) -> int:
        """Number of pages that hold it."""
        return len(self.page_keys)

    @property
    def tip(self) -> bytes:
        """The key of its last page."""
        return bytes.fromhex(self.page_keys[-1])

    @property
    def adapter(self) -> str:
        """The digest of the adapter that computed it; "" if the base did."""
        return self.scope.adapter

    @property
    def documents(self) -> str:
        """The name of the documents that it is a pack of, empty if it is none."""
        return self.name.rpartition("/")[0] if self.sources else ""

    @property
    def recorded(self) -> float:
        """`created`, but 0 where the clock was set back since: all that is recorded now is later."""
        return self.created if self.created <= time.time() else 0.0

    @property
    def over(self) -> bool:
        """Tell whether it is a session's whose lease is over, or lies ahead by more than that lasts: the clock was set back."""
        return bool(self.lease_end) and abs(time.time() - self.created) > self.lease_end - self.created

    def spares(self, other: ToolGroup) -> bool:
        """Tell whether pages that another one names stay when this is deleted: not those of sessions that continue a tool group."""
        return bool(self.lease_end) or not other.lease_end

    def merge(self, known: ToolGroup | None) -> ToolGroup:
        """The later of the two, whoever recorded it first; of two answers of a session with the other's pages as superseded."""
        if known is None:
            return self
        before, last = sorted((known, self), key=lambda one: one.recorded)
        if not self.lease_end:
            return last
        left = before.superseded if before is self else ()  # else the later one has them
        left = tuple(dict.fromkeys(key for key in (*left, *before.page_keys, *last.superseded) if key not in last.page_keys))
        return replace(last, superseded=left, splices=tuple(dict.fromkeys((*before.splices, *last.splices))))

    @property
    def scope(self) -> Scope:
        """Scope of its pages."""
        return Scope(self.namespace, self.fingerprint, self.regime)

    def to_json(self) -> str:
        """Its manifest."""
        recorded = {recorded: getattr(self, name) for name, recorded in MANIFEST.items()}
        return json.dumps(recorded | {name: getattr(self, name) for name in _OPTIONAL if getattr(self, name)}, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> ToolGroup:
        """Checked for shape: a manifest may come from another store."""
        try:
            plain: dict[str, Any] = json.loads(text)
            sources = tuple((str(source), str(digest), int(tokens)) for source, digest, tokens in plain.pop("sources", ()))
            known = {recorded: name for name, recorded in MANIFEST.items()} | {name: name for name in _OPTIONAL}
            values: dict[str, Any] = {known[key]: tuple(value) if isinstance(value, list) else value for key, value in plain.items()}
            group = cls(**values, sources=sources)
            named = (group.name, group.namespace, group.fingerprint, group.regime, group.model, group.prompt_key)
            valid = (
                all(isinstance(text, str) for text in (*named, *group.tools, *group.layers))
                and isinstance(group.prefix_tokens, int)
                and isinstance(group.stable_tokens, int)
                and isinstance(group.lease_end, (int, float))
                and group.prefix_tokens > 0
                and bool(group.page_keys)
                and all(len(bytes.fromhex(key)) == 32 for key in (*group.page_keys, *group.superseded))
                and all(bytes.fromhex(name) for name in group.splices)
            )
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            raise StoreCorruptError(f"the manifest {text[:80]!r} is not one of a tool group: {error}") from error
        if not valid:
            raise StoreCorruptError(f"the manifest {text[:80]!r} is not one of a tool group")
        return group


_RECORDED = ("name", "namespace", "fingerprint", "regime", "prefix_tokens", "tools", "model", "layers", "created")
MANIFEST = {**{name: name for name in _RECORDED}, "page_keys": "pages"}  # fields of a tool group, and their names in its manifest
# those that most have not: left out where they are empty
_OPTIONAL = ("sources", "lease_end", "prompt_key", "superseded", "stable_tokens", "splices")
