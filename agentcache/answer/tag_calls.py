"""Calls as tags in tags, the form of Qwen3-Coder and of Qwen3.5 and later: its grammar, its response template, its values. Knows no tokens.

    <tool_call>
    <function=NAME>
    <parameter=KEY>
    a text as it is, anything else as JSON
    </parameter>
    </function>
    </tool_call>

Whether a value is a text is read off its schema, by the same rule when it is written and when it is read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

OPEN, PARAMETER_END, END = "\n<function=", "\n</parameter>\n", "</function>\n</tool_call>"
_SHOWN = re.compile(r"<tool_call>\s*<function=zprobe_fn>\s*<parameter=zarg>\s*zval\s*</parameter>\s*</function>\s*</tool_call>")
_ANY = r"(.|\n)"
_NEVER = rf"{_ANY}*<\/(parameter|function|tool_call)>{_ANY}*"  # in a text: a reader would take it for the end
_PYTHON = {"True": True, "False": False, "None": None}  # as chat templates show them, and models copy it

# As tokenizers of these families bring it, where they bring one.
RESPONSE_TEMPLATE: dict[str, Any] = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>", "content": "text"},
        "tool_calls": {
            "open_pattern": r"<tool_call>\s*<function=(?P<name>[^>\n]+)>",
            "close_pattern": r"</function>\s*</tool_call>",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {"tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>"},
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
    },
}


def shown_in(text: str) -> bool:
    """Whether a chat template that rendered this shows calls so."""
    return _SHOWN.search(text) is not None


def rules(number: int, schema: Mapping[str, Any], spaced: Callable[[Mapping[str, Any]], str]) -> list[str]:
    """Grammar rules of call number `number`'s parameters; the first one, `args_N`, is all of them. Optional ones may be left out."""
    properties, required = schema.get("properties") or {}, set(schema.get("required") or ())
    parts, lines = [], []
    for place, (key, each) in enumerate(properties.items()):
        rule = f"value_{number}_{place}"
        opened = json.dumps(f"<parameter={key}>\n", ensure_ascii=False)
        parts.append(f"({opened} {rule}){'' if key in required else '?'}")
        lines += _value(rule, _meant(each, schema), schema, spaced)
    return [" ".join((f"args_{number}:", *(parts or ['""']))), *lines]


def _value(rule: str, schema: Mapping[str, Any], root: Mapping[str, Any], spaced: Callable[[Mapping[str, Any]], str]) -> list[str]:
    end = json.dumps(PARAMETER_END)
    if (choices := _choices(schema)) is not None:
        literals = (json.dumps(_shown(choice) + PARAMETER_END, ensure_ascii=False) for choice in choices)
        return [f"{rule}: {' | '.join(literals)}"]
    if not is_text(schema, root):
        shared = {key: root[key] for key in ("$defs", "definitions") if key in root}
        return [f"{rule}: %json {spaced({**schema, **shared})} {end}"]
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    text = rf"{_ANY}{{{least},{most}}}" if least or most != "" else f"{_ANY}*"
    if isinstance(pattern := schema.get("pattern"), str):
        text = _whole(pattern)
    return [f"{rule}[lazy]: {rule.upper()} {end}", f"{rule.upper()}: /{text}/ & ~/{_NEVER}/"]


def _whole(pattern: str) -> str:
    """A JSON schema's pattern, which may be found anywhere, as a regex of the whole text."""
    head = "" if pattern.startswith("^") else f"{_ANY}*"
    tail = "" if pattern.endswith("$") and not pattern.endswith(r"\$") else f"{_ANY}*"
    inner = pattern.removeprefix("^")
    inner = inner if tail else inner[:-1]
    return f"{head}({inner}){tail}".replace("/", r"\/")


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _choices(schema: Mapping[str, Any]) -> list[Any] | None:
    """The values that there are, if they are listed."""
    if "const" in schema:
        return [schema["const"]]
    found = schema.get("enum")
    return list(found) if isinstance(found, list) and found else None


def _resolved(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a reference within the tool's schema stands for."""
    for _ in range(8):  # references to references
        if not isinstance(schema, Mapping):
            return {}
        if isinstance(many := schema.get("allOf"), list) and len(many) == 1:
            schema = many[0]
        elif isinstance(name := schema.get("$ref"), str) and name.startswith(("#/$defs/", "#/definitions/")):
            _, kind, key = name.split("/", 2)
            schema = (root.get(kind) or {}).get(key)
        else:
            break
    return schema if isinstance(schema, Mapping) else {}


def _meant(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """The same, and of "a text or null" the text: what is null is left out."""
    found = _resolved(schema, root)
    branches = [_resolved(one, root) for key in ("anyOf", "oneOf") for one in found.get(key) or ()]
    said = [one for one in branches if one.get("type") != "null"]
    return said[0] if len(said) == 1 and (_choices(said[0]) is not None or is_text(said[0], root)) else found


def is_text(schema: Mapping[str, Any], root: Mapping[str, Any]) -> bool:
    """Whether a value of this schema stands there as it is: where it may be a string, or may be anything."""
    kinds = schema.get("type")
    if kinds is not None:
        return "string" in ([kinds] if isinstance(kinds, str) else kinds)
    for key in ("anyOf", "oneOf"):
        if isinstance(branches := schema.get(key), list):
            return any(is_text(_resolved(branch, root), root) for branch in branches)
    return not schema.keys() & {"properties", "items"}


def value_of(text: str, schema: Mapping[str, Any], key: str) -> Any:
    """The value that a parameter's text spells, by the schema of the tool's arguments; what spells none stays text."""
    each = _meant((schema.get("properties") or {}).get(key, {}), schema)
    for choice in _choices(each) or ():
        if text == _shown(choice):
            return choice
    if is_text(each, schema):
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return _PYTHON.get(text.strip(), text)
