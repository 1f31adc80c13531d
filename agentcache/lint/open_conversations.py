"""The open conversations of a running engine: the last prompt of each, and what a new prompt misses of it. Knows no receipts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from ..layout.request import Rendered
from ..types import Missed
from .conversations import Conversations
from .diagnose import diagnose
from .templated import Tokens, tokens_of
from .values import Call, Request, Said, Shown


class Pair(NamedTuple):
    """A prompt and the one before it in its conversation, as messages and as tokens."""

    was: Request
    now: Request
    old: Tokens
    new: Tokens

    def missed(self, least: int) -> Missed | None:
        """The first difference and its cause; None if the later goes on from the earlier, or fewer tokens than `least` were lost."""
        if self.new.encoded.ids[: self.old.stable] == self.old.encoded.ids[: self.old.stable]:
            return None
        found = diagnose(*self, "", redact=True).finding
        if found is None or found.cost_tokens < least:
            return None
        return Missed(str(found.cause), found.writer, found.token, found.char, found.cost_tokens, found.fix)


class OpenConversations:
    """The conversations of one namespace: at most so many, and so many characters of their last prompts."""

    def __init__(self, most: int, chars: int) -> None:
        self._prompts: dict[str, Tokens] = {}
        self._conversations = Conversations(most, chars, lambda name: self._prompts.pop(name, None))
        self._number = 0

    def __len__(self) -> int:
        assert len(self._prompts) == len(self._conversations)
        return len(self._prompts)

    @property
    def chars(self) -> int:
        """Number of characters of the last prompts."""
        return sum(len(prompt.encoded.text) for prompt in self._prompts.values())

    def add(self, layout: Rendered) -> Pair | None:
        """Add a prompt to its conversation; None if it begins one."""
        new = tokens_of(layout.encoded, layout.spans)
        self._number += 1
        now = _request(self._number, layout.request)
        track, was = self._conversations.place(now)
        old = self._prompts.get(track.name)
        self._prompts[track.name] = new
        return None if was is None or old is None else Pair(was, now, old, new)


def _request(number: int, rendered: Any) -> Request:
    """A rendered prompt in lint's words: canonical, without text for one prompt only."""
    said = [_said(turn.source, turn.data) for turn in rendered.turns]
    leading = next((at for at, one in enumerate(said) if one.role != "system"), len(said))
    tools = tuple(
        Shown(str(tool.get("function", tool).get("name")), json.dumps(tool, ensure_ascii=False, default=repr))
        for tool in rendered.tools.schemas
    )
    return Request(number, 0, None, tuple(said[:leading]), tools, tuple(said[leading:]))


def _said(source: int, message: Mapping[str, Any]) -> Said:
    calls = tuple(
        Call(call["function"]["name"], json.dumps(call["function"]["arguments"], ensure_ascii=False, default=repr), call.get("id"))
        for call in message.get("tool_calls", ())
    )
    text, thought = (str(message.get(name) or "") for name in ("content", "reasoning_content"))
    return Said(message["role"], text, thought, calls, message.get("tool_call_id"), message.get("name"), source)
