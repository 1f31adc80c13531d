"""Tool calls and reasoning out of a completion's text, for the families whose forms are known. Knows nothing of templates or ids.

Hermes, Qwen     <tool_call>{"name": ..., "arguments": {...}}</tool_call>
Llama 3          {"name": ..., "parameters": {...}} as the whole text
Mistral          [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from ..types import Message, ToolCall

_HERMES = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
_THINK = re.compile(r"^\s*<think>\n?(.*?)\n?</think>\s*", re.DOTALL)
_MISTRAL = "[TOOL_CALLS]"


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
    except ValueError:
        return None


def _calls(values: list[Any]) -> tuple[ToolCall, ...] | None:
    calls = [_call(value) for value in values]
    return None if not calls or None in calls else tuple(c for c in calls if c is not None)


def parse(text: str) -> Message:
    """The assistant message that a completion's text spells. Text that is not a well-formed call stays content, so nothing is lost."""
    reasoning = None
    if found := _THINK.match(text):
        reasoning, text = found.group(1), text[found.end() :]
    calls: tuple[ToolCall, ...] | None = None
    content = text
    if blocks := _HERMES.findall(text):
        calls, content = _calls([_load(block) for block in blocks]), _HERMES.sub("", text)
    elif text.lstrip().startswith(_MISTRAL):
        listed = _load(text.lstrip().removeprefix(_MISTRAL))
        calls, content = _calls(listed if isinstance(listed, list) else []), ""
    elif text.strip().startswith('{"name"'):
        calls, content = _calls([_load(text.strip())]), ""
    if calls is None:
        return Message("assistant", text.strip(), reasoning=reasoning)
    return Message("assistant", content.strip(), tuple(calls), reasoning=reasoning)
