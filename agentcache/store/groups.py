"""A tool group as it is recorded: a name over a chain of pages, with what finds it again. Knows no pages' contents."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from ..errors import StoreCorruptError


@dataclass(frozen=True, slots=True)
class Group:
    """The manifest of a tool group. Content-addressed: equal prefixes under equal weights have equal page keys.

    pages: keys of its pages, hexadecimal, in order; the last one may be partly filled. tools: names in the order in which they are shown.
    layers: cumulative fingerprint of each layer, so that a model with other upper layers can still find what it shares.
    """

    name: str
    namespace: str
    fingerprint: str
    regime: str
    prefix_tokens: int
    pages: tuple[str, ...]
    tools: tuple[str, ...]
    model: str
    layers: tuple[str, ...] = ()
    created: float = 0.0

    @property
    def tip(self) -> bytes:
        """The key of its last page."""
        return bytes.fromhex(self.pages[-1])

    def to_json(self) -> str:
        """As it is stored."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Group:
        """Checked for shape: a manifest may come from another store."""
        try:
            plain: dict[str, Any] = json.loads(text)
            values: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in plain.items()}
            group = cls(**values)
            valid = (
                all(isinstance(text, str) for text in (group.name, group.namespace, group.fingerprint, group.regime, group.model))
                and all(isinstance(text, str) for text in (*group.tools, *group.layers))
                and isinstance(group.prefix_tokens, int)
                and group.prefix_tokens > 0
                and bool(group.pages)
                and all(len(bytes.fromhex(key)) == 32 for key in group.pages)
            )
        except (ValueError, TypeError, AttributeError) as error:
            raise StoreCorruptError(f"the manifest {text[:80]!r} is not one of a tool group: {error}") from error
        if not valid:
            raise StoreCorruptError(f"the manifest {text[:80]!r} is not one of a tool group")
        return group
