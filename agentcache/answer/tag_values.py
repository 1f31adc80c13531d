"""Arguments that are written as text, each by itself: which of them are a text as they are, and which are JSON. Knows no tokens.

It is read off the schema of the value, by the same rule when a grammar writes it and when the parser reads it.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import unquote

TRIES = 100  # of Python's parser


def shown(value: Any) -> str:
    """A value as the text that spells it."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def choices(schema: Mapping[str, Any]) -> list[Any] | None:
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
        elif isinstance(name := schema.get("$ref"), str) and name.startswith("#"):
            schema = root
            for key in unquote(name).split("/")[1:]:
                schema = schema.get(key.replace("~1", "/").replace("~0", "~")) if isinstance(schema, Mapping) else None
        else:
            break
    return schema if isinstance(schema, Mapping) else {}


def dereferenced(parameters: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema of a tool's arguments with properties of its own, where all of it is a reference."""
    if "properties" in parameters:
        return parameters
    return {**{key: parameters[key] for key in ("$defs", "definitions") if key in parameters}, **_resolved(parameters, parameters)}


def meant(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """The same, and of "a text or null" the text: what is null is left out."""
    found = _resolved(schema, root)
    branches = [_resolved(one, root) for key in ("anyOf", "oneOf") for one in found.get(key) or ()]
    said = [one for one in branches if one.get("type") != "null"]
    return said[0] if len(said) == 1 and (choices(said[0]) is not None or is_text(said[0], root)) else found


def is_text(schema: Mapping[str, Any], root: Mapping[str, Any]) -> bool:
    """Whether a value of this schema stands there as it is: where it may be a string, or may be anything."""
    kinds = schema.get("type")
    if kinds is not None:
        return "string" in ([kinds] if isinstance(kinds, str) else kinds)
    for key in ("anyOf", "oneOf"):
        if isinstance(branches := schema.get(key), list):
            return any(is_text(_resolved(branch, root), root) for branch in branches)
    return not schema.keys() & {"properties", "items", "allOf", "$ref"}


def value_of(text: str, schema: Mapping[str, Any], key: str) -> Any:
    """The value that a parameter's text spells, by the schema of the tool's arguments; what spells none stays text."""
    schema = dereferenced(schema)
    each = meant((schema.get("properties") or {}).get(key, {}), schema)
    for choice in choices(each) or ():
        if text == shown(choice):
            return choice
    if is_text(each, schema):
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return _in_python(text)


def _in_python(text: str) -> Any:
    """The value, if Python writes it so and JSON has it: chat templates show True and {'a': None}, and models copy it."""
    try:
        value = ast.literal_eval(expression(text))
        return value if json.loads(json.dumps(value)) == value else text
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return text


def expression(text: str) -> ast.expr:
    """The tree of an expression; raises as `ast.parse` does.

    Python before 3.11.8 and 3.12.2 loses count, a SystemError, where another thread or garbage that is collected meanwhile parses, too.
    """
    for _ in range(TRIES):
        with suppress(SystemError):
            return ast.parse(text.strip(), mode="eval").body
    raise MemoryError("Python's parser is disturbed")
