"""The open conversations of a running engine: the last prompt of each, and what a new prompt misses of it. Knows no receipts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from ..layout.request import Rendered
from ..types import Missed
from .agents import front_of
from .conversations import Conversations
from .diagnose import diagnose
from .templated import Tokens, tokens_of
from .values import Call, Request, Said, Shown


class Pair(NamedTuple):
    """A prompt and the one before it in its conversation, as messages and as tokens.

    front: of the first prompt of a conversation, beside the last one of the same agent's newest; the tokens that both should share.
    """

    was: Request
    now: Request
    old: Tokens
    new: Tokens
    front: int = 0

    def missed(self, least: int, computed: int) -> Missed | None:
        """The first difference and its cause; None if the later goes on from the earlier, or loses fewer of its `computed` tokens."""
        ids, stable = self.new.encoded.ids, self.front or self.old.stable
        if self.front:
            computed -= len(ids) - self.front
        if computed < least or ids[:stable] == self.old.encoded.ids[:stable]:
            return None
        found = diagnose(*self[:4], "", across=bool(self.front), redact=True).finding
        if found is None or found.cost_tokens < least:
            return None
        return Missed(str(found.cause), found.writer, found.token, found.char, min(found.cost_tokens, computed), found.fix)


class OpenConversations:
    """The conversations of one namespace: at most so many, and so many characters of their last prompts."""

    def __init__(self, most: int, chars: int) -> None:
        self._prompts: dict[str, tuple[Request, Tokens]] = {}  # by conversation, the newest last
        self._conversations = Conversations(most, chars, lambda name: self._prompts.pop(name, None))
        self._number = 0

    def __len__(self) -> int:
        assert len(self._prompts) == len(self._conversations)
        return len(self._prompts)

    @property
    def chars(self) -> int:
        """Number of characters of the last prompts."""
        return sum(len(prompt.encoded.text) for _, prompt in self._prompts.values())

    def add(self, layout: Rendered) -> Pair | None:
        """Add a prompt to its conversation; None if it begins one, unless it should begin as another one of the same agent with tools."""
        self._number += 1
        now, new = _request(self._number, layout.request), tokens_of(layout.encoded, layout.spans)
        track, was = self._conversations.place(now)
        known, pair = self._prompts.pop(track.name, None), None
        if was is not None and known is not None:
            pair = Pair(was, now, known[1], new)
        elif now.tools and layout.prefix_tokens:
            alike = (each for each in reversed(self._prompts.values()) if front_of(each[0]) == track.front)
            if (newest := next(alike, None)) is not None:
                pair = Pair(replace(newest[0], history=()), replace(now, history=()), newest[1], new, layout.prefix_tokens)
        self._prompts[track.name] = now, new
        return pair


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
