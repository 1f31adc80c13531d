"""Responses that later ones go on from, by namespace, in memory. Knows no HTTP but the error of one that is not there."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from ..namespace_lru import NamespaceLRU
from .errors import ServerError

STORED, STORED_CHARS = 4096, 256 << 20  # responses, and the characters of their items
Items = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response, its own input, and the items of the conversation before it."""

    response: dict[str, Any]
    input: Items
    before: Items

    @property
    def chars(self) -> int:
        """Characters that it takes to remember it."""
        return len(json.dumps([self.response["output"], self.input])) + 64


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

    def drop(self, namespace: str, identity: str) -> None:
        """Forget one. ServerError 404: there is none of that id."""
        self.find(namespace, identity)
        with self._lock:
            self._pop((namespace, identity))
