"""Deltas of an answer put together again. Holds no tests."""

from __future__ import annotations

import json
from typing import Any

from agentcache.answer.parser import Delta
from agentcache.types import Message, ToolCall


def message_of(deltas: list[Delta]) -> Message:
    """The message that deltas add up to."""
    text = {kind: "".join(d.text for d in deltas if d.kind == kind) for kind in ("text", "reasoning")}
    calls = []
    for begun in (d for d in deltas if d.kind == "call"):
        arguments = "".join(d.text for d in deltas if d.kind == "arguments" and d.index == begun.index)
        calls.append(ToolCall(begun.text, json.loads(arguments)))
    return Message("assistant", text["text"], tuple(calls), reasoning=text["reasoning"] or None)


def partial_json(text: str) -> Any:
    """JSON as frameworks read it while it comes: open strings and brackets closed, ends dropped; None where one does not fit."""
    stack: list[str] = []
    quoted = escaped = False
    for char in text:
        if quoted:
            quoted = escaped or char != '"'
            escaped = char == "\\" and not escaped
        elif char == '"':
            quoted = True
        elif char in "{[":
            stack.append("}" if char == "{" else "]")
        elif char in "}]" and (not stack or stack.pop() != char):
            return None
    return text
