"""Tool calls and reasoning out of a completion's text, for the families whose forms are known. Knows nothing of templates or ids.

Hermes, Qwen     <tool_call>{"name": ..., "arguments": {...}}</tool_call>
Llama 3          {"name": ..., "parameters": {...}} as the whole text
Mistral          [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from typing import Any

from ..types import Message, ToolCall

HERMES, HERMES_END, MISTRAL = "<tool_call>", "</tool_call>", "[TOOL_CALLS]"
THINK, THINK_END = "<think>", "</think>"
LLAMA = '{"name"'
_SPACE = re.compile(r"\s*")
_JSON = json.JSONDecoder()


def _call(value: Any) -> ToolCall | None:
    if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = _load(arguments)
    return ToolCall(value["name"], arguments) if isinstance(arguments, Mapping) else None


def _load(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _value(text: str, at: int) -> tuple[Any, int]:
    """The JSON value that starts at `at`, and where it ends; (None, at) if there is none."""
    at = _skip(text, at)
    try:
        return _JSON.raw_decode(text, at)
    except (ValueError, RecursionError):
        return None, at


def _skip(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return found.end() if found else at


def call_of(text: str) -> ToolCall | None:
    """The call that a JSON object spells."""
    return _call(_load(text))


def parse(text: str, tools: Collection[str] | None = None, *, opened: bool = False) -> Message:
    """The assistant message that a completion's text spells. Text that is not a well-formed call stays content, so nothing is lost.

    tools: names of those that were offered, None if not known; JSON of Llama's form is a call only if it names one of them. opened: the
    prompt ended in the beginning of a thought.
    """
    reasoning, text = split_thought(text, opened)
    found = _tagged(text) or _listed(text) or _bare(text, tools)
    content, calls = found or (text, ())
    return Message("assistant", content.strip(), calls, reasoning=reasoning)


def split_thought(text: str, opened: bool) -> tuple[str | None, str]:
    """(reasoning, what follows it); a thought that never ends is all there is."""
    if not opened:
        bare = text.lstrip()
        if not bare.startswith(THINK):
            return None, text
        text = bare[len(THINK) :]
    thought, _, rest = text.partition(THINK_END)
    return thought.strip("\n"), rest.lstrip()


def _tagged(text: str) -> tuple[str, tuple[ToolCall, ...]] | None:
    """Content and calls of Hermes' form; None if there are none, or one is malformed. Half an object stays content, half a tag is fine."""
    content, calls, at = "", list[ToolCall](), 0
    while (start := text.find(HERMES, at)) >= 0:
        content += text[at:start]
        value, at = _value(text, start + len(HERMES))
        end = _skip(text, at)
        if value is None and text.find(HERMES_END, at) < 0:
            content, at = content + text[start:], len(text)
            break
        call = _call(value)
        closing = text[end : end + len(HERMES_END)]
        if call is None or not HERMES_END.startswith(closing) or (closing != HERMES_END and end + len(closing) != len(text)):
            return None
        calls.append(call)
        at = end + len(closing)
    return (content + text[at:], tuple(calls)) if calls else None


def _listed(text: str) -> tuple[str, tuple[ToolCall, ...]] | None:
    """Content and calls of Mistral's form; None if there are none, or one is malformed. A list that was cut short keeps its whole calls."""
    content, marker, rest = text.partition(MISTRAL)
    at = _skip(rest, 0)
    if not marker or not rest.startswith("[", at):
        return None
    calls, at = list[ToolCall](), at + 1
    while (value := _value(rest, at))[0] is not None:
        call, at = _call(value[0]), _skip(rest, value[1])
        if call is None:
            return None
        calls.append(call)
        if not rest.startswith(",", at):
            break
        at += 1
    left = rest[at + rest.startswith("]", at) :]
    return (content + left, tuple(calls)) if calls else None


def _bare(text: str, tools: Collection[str] | None) -> tuple[str, tuple[ToolCall, ...]] | None:
    """The one call of Llama's form."""
    bare = text.strip()
    call = _call(_load(bare)) if bare.startswith(LLAMA) else None
    if call is None or (tools is not None and call.name not in tools):
        return None
    return "", (call,)
