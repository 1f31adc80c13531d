"""Histories that a provider holds: a responses request may name the response it continues, with new items only. Makes it whole again.

That takes the response it names, from the same log. Where that is missing, the request can be compared with nothing, and is marked so.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from .values import Note

HELD = 32 << 20  # characters of the histories held, at most, shared ones counted in each of them


class ServerHistories:
    """The items of a history up to a response, by the response's id."""

    def __init__(self, held: int = HELD) -> None:
        self._held, self.size = held, 0
        self._items: OrderedDict[str, tuple[list[Any], int]] = OrderedDict()  # histories without continuation stay longest
        self._told = False

    def whole(self, body: Mapping[str, Any], outer: Mapping[str, Any], note: Note) -> tuple[Mapping[str, Any], bool]:
        """The body with all of its history that the log has; and whether it goes on from one that the log has not."""
        response = _response(outer)
        before, elsewhere = body.get("previous_response_id"), _is_held(body.get("conversation"))
        output = response.get("output")
        given = body.get("input")
        if "messages" in body or not (before or elsewhere or isinstance(output, list) or body.get("instructions")):
            return body, False
        items = [{"role": "user", "content": given}] if isinstance(given, str) else given
        if not isinstance(items, list):
            return body, False
        known, size = self._items.get(str(before), ([], 0)) if before else ([], 0)
        alone = elsewhere or (bool(before) and not known)
        if alone and not self._told:
            self._told = True
            what = "conversation=%s" if elsewhere else "previous_response_id=%s, which is not in this log"
            rest = "this request, and others like it, are compared with none before them"
            note(f"{what}: the provider holds the history; {rest}", body.get("conversation") if elsewhere else before)
        items = [*known, *items]
        if before and known:
            self._items.move_to_end(str(before), last=False)
        if isinstance(response.get("id"), str) and isinstance(output, list):
            self._keep(response["id"], [*items, *output], size + sum(len(repr(item)) for item in (*items[len(known) :], *output)))
        return {**body, "input": items}, alone

    def _keep(self, name: str, items: list[Any], size: int) -> None:
        self.size += size - self._items.pop(name, ([], 0))[1]
        self._items[name] = items, size
        while self.size > self._held:
            self.size -= self._items.popitem(last=False)[1][1]


def conversation_id(value: Any) -> str | None:
    """The id of a conversation that is given as an object."""
    return value["id"] if isinstance(value, Mapping) and isinstance(value.get("id"), str) else None


def _is_held(conversation: Any) -> bool:
    """True if this names a conversation that the provider holds, and no log's own name."""
    named = conversation if isinstance(conversation, str) else conversation_id(conversation)
    return named is not None and named.startswith("conv_")


def _response(outer: Mapping[str, Any]) -> Mapping[str, Any]:
    """The response that a log has beside its request, or in it."""
    for key in ("response", "completion", "output"):
        found = outer.get(key)
        if isinstance(found, Mapping):
            body = found.get("body")
            return body if isinstance(body, Mapping) else found
    return outer if isinstance(outer.get("output"), list) else {}
