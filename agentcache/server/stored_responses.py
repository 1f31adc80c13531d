"""Responses that later ones go on from, by namespace, in memory. Knows no HTTP but the error of one that is not there."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from ..namespace_lru import NamespaceLRU
from .errors import ServerError

STORED, STORED_CHARS = 4096, 256 << 20  # responses, and the characters of their conversations
Items = list[dict[str, Any]]
REFERENCE = "item_reference"  # the type of an item that stands for a stored one


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response, its own input, and the items of the conversation before it."""

    response: dict[str, Any]
    input: Items
    before: Items
    before_chars: int = 0

    @property
    def chars(self) -> int:
        """Characters that it takes to remember it, alone: the responses before it may be forgotten."""
        return len(json.dumps([self.response, self.input])) + self.before_chars

    @property
    def conversation_chars(self) -> int:
        """Characters of what a later response has before it."""
        return len(json.dumps([self.input, self.response["output"]])) + self.before_chars


class StoredResponses(NamespaceLRU[str, StoredResponse]):
    """The last responses of each namespace, in memory."""

    def __init__(self) -> None:
        super().__init__(STORED, STORED_CHARS, lambda stored: stored.chars, lambda stored: float(stored.response["created_at"]))

    def find(self, namespace: str, identity: str) -> StoredResponse:
        """ServerError 404: there is none of that id."""
        found = self.get(namespace, identity)
        if found is None:
            raise ServerError(404, f"response {identity!r} is not stored here", param="previous_response_id", code="response_not_found")
        return found

    def resolved(self, namespace: str, items: Items) -> Items:
        """The items, with the stored ones that references among them name in their place. ServerError 404: there is none of that id."""
        wanted = {repr(item.get("id")) for item in items if item.get("type") == REFERENCE}
        if not wanted:
            return items
        with self._lock:
            stored = [one for (owner, _), one in self._values.items() if owner == namespace]
        each = (item for one in stored for item in (*one.input, *one.response["output"]))
        known = {name: item for item in each if (name := repr(item["id"])) in wanted}  # that of the last response that has it
        for name in wanted - known.keys():
            raise ServerError(404, f"item {name} is not stored here: give it as a whole", param="input", code="item_not_found")
        return [known[repr(item.get("id"))] if item.get("type") == REFERENCE else item for item in items]

    def drop(self, namespace: str, identity: str) -> None:
        """Forget one. ServerError 404: there is none of that id."""
        self.find(namespace, identity)
        with self._lock:
            self._pop((namespace, identity))
