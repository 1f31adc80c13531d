"""Tool calls and reasoning out of a completion's text, for the families whose forms are known. Knows nothing of templates or ids.

Hermes, Qwen     <tool_call>{"name": ..., "arguments": {...}}</tool_call>
Llama 3          {"name": ..., "parameters": {...}} as the whole text
Mistral          [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from ..types import Message, ToolCall

HERMES, HERMES_END, MISTRAL = "<tool_call>", "</tool_call>", "[TOOL_CALLS]"
THINK, THINK_END = "<think>", "</think>"
LLAMA = '{"name"'
_SPACE = re.compile(r"\s*")
_JSON = json.JSONDecoder()
_BEGUN = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")(?:\s*,\s*"(?:arguments|parameters)"\s*:\s*(.*))?', re.DOTALL)


@dataclass(frozen=True, slots=True)
class InvalidCall:
    """A call that a completion began and that is none: cut short, or malformed. Never one to run; its text stays in the message's content.

    name: empty if it was not written whole. arguments: their text, as far as it came. error: why, in words. id: the id under which deltas
    told of it, None if they told of none.
    """

    name: str
    arguments: str
    error: str
    id: str | None = None


CUT, MALFORMED = "cut short: the completion ends inside it", "malformed: not an object with a name and arguments"
Made = tuple[ToolCall | InvalidCall, ...]  # calls in the order in which they were begun


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
    return read(text, tools, opened=opened)[0]


def read(text: str, tools: Collection[str] | None = None, *, opened: bool = False) -> tuple[Message, Made]:
    """The same, with all calls in order, those included that are none."""
    reasoning, text = split_thought(text, opened)
    content, made = _tagged(text) or _listed(text) or _bare(text, tools) or (text, ())
    return Message("assistant", content.strip(), whole(made), reasoning=reasoning), made


def whole(made: Made) -> tuple[ToolCall, ...]:
    """The calls among those that were begun."""
    return tuple(call for call in made if isinstance(call, ToolCall))


def broken(body: str, *, cut: bool) -> InvalidCall:
    """The call that a text begins and is none. cut: the completion ended in it. `id` is not None if deltas told of it, still empty then."""
    found = _BEGUN.match(body)
    name, arguments = (str(_load(found.group(1)) or ""), found.group(2) or "") if found else ("", "")
    return InvalidCall(name, arguments, CUT if cut else MALFORMED, "" if arguments.startswith("{") else None)


def split_thought(text: str, opened: bool) -> tuple[str | None, str]:
    """(reasoning, what follows it); a thought that never ends is all there is."""
    if not opened:
        bare = text.lstrip()
        if not bare.startswith(THINK):
            return None, text
        text = bare[len(THINK) :]
    thought, _, rest = text.partition(THINK_END)
    return thought.strip("\n"), rest.lstrip()


def _tagged(text: str) -> tuple[str, Made] | None:
    """Content and calls of Hermes' form; None if there are none. Half an object stays content, half a tag is fine."""
    content, made, at = "", list[ToolCall | InvalidCall](), 0
    while (start := text.find(HERMES, at)) >= 0:
        content += text[at:start]
        value, at = _value(text, start + len(HERMES))
        end = _skip(text, at)
        call, closing = _call(value), text[end : end + len(HERMES_END)]
        if call is not None and (closing == HERMES_END or (HERMES_END.startswith(closing) and end + len(closing) == len(text))):
            made.append(call)
            at = end + len(closing)
            continue
        body, mark, rest = text[start + len(HERMES) :].partition(HERMES_END)
        if body.lstrip().startswith("{") or not body.strip():  # else the tag is only spoken of
            made.append(broken(body, cut=not mark))
        at = len(text) - len(rest)
        content += text[start:at]
    return (content + text[at:], tuple(made)) if made else None


def _listed(text: str) -> tuple[str, Made] | None:
    """Content and calls of Mistral's form; None if there are none. A list that was cut short keeps its whole calls."""
    content, marker, rest = text.partition(MISTRAL)
    at = _skip(rest, 0)
    if not marker or not rest.startswith("[", at):
        return (text, (broken("", cut=True),)) if marker and at == len(rest) else None
    made, at = list[ToolCall | InvalidCall](), at + 1
    while True:
        value, end = _value(rest, at)
        call = _call(value)
        if call is None:
            left = rest[at:].lstrip()
            made += [broken(left, cut=value is None)] if left.startswith("{") or not left else []
            break
        made.append(call)
        at = _skip(rest, end)
        if not rest.startswith(",", at):
            break
        at += 1
    if not whole(tuple(made)):
        return (text, tuple(made)) if made else None
    return content + rest[at + rest.startswith("]", at) :], tuple(made)


def _bare(text: str, tools: Collection[str] | None) -> tuple[str, Made] | None:
    """The one call of Llama's form."""
    bare = text.strip()
    value = _load(bare) if bare.startswith(LLAMA) else None
    call = _call(value)
    if call is not None:
        return ("", (call,)) if tools is None or call.name in tools else None
    begun = broken(bare, cut=True) if bare.startswith(LLAMA) and value is None else None
    return (text, (begun,)) if begun and begun.arguments and begun.name in (tools or ()) else None
