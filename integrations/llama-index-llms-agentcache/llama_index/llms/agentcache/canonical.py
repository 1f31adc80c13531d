"""Tool descriptions that are the same in every process. Knows nothing of prompts or models.

`FunctionTool.from_defaults` writes a function's signature into its description, defaults included. An object without a repr of its own
shows its address there, and a set its hash order: both differ from process to process, and a tools block that differs in one character
is computed again by every process. Here addresses are cut out and sets are written in sorted order.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import re
from collections.abc import Mapping
from typing import Any

from llama_index.core.tools import BaseTool, FunctionTool

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+(?=>)")  # as reprs write it: a description may speak of an address in words


def canonical_description(tool: BaseTool) -> tuple[str, tuple[str, ...]]:
    """(the tool's description, the same in every process; what was changed, in words)."""
    text = tool.metadata.description or ""
    changed = []
    for name, default in _defaults(tool):
        shown, stable = repr(default), canonical_repr(default)
        if shown != stable and shown in text:
            text = text.replace(shown, stable)
            changed.append(f"default of {name!r} written as {stable}")
    stable = _ADDRESS.sub("", text)
    if stable != text:
        changed.append("addresses of objects cut out")
    return stable, tuple(changed)


def canonical_schema(schema: Any) -> Any:
    """A JSON schema whose set-like defaults stand in sorted order: pydantic writes a set in hash order."""
    if isinstance(schema, list):
        return [canonical_schema(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    out = {key: canonical_schema(value) for key, value in schema.items()}
    if out.get("uniqueItems") is True and isinstance(out.get("default"), list):
        out["default"] = sorted(out["default"], key=repr)
    return out


def canonical_parameters(tool: BaseTool, schema: dict[str, Any]) -> dict[str, Any]:
    """The schema of a tool's arguments, with defaults that the function holds as sets, at whatever depth, in sorted order."""
    made = canonical_schema(schema)
    for name, default in _defaults(tool):
        shown = schema.get("properties", {}).get(name)
        if isinstance(shown, dict) and "default" in shown and _has_set(default):
            made["properties"][name]["default"] = _sorted_sets(shown["default"], default)
    return made  # type: ignore[no-any-return]


def _has_set(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_has_set, value.values()))
    return isinstance(value, (set, frozenset)) or (isinstance(value, (list, tuple)) and any(map(_has_set, value)))


def _sorted_sets(shown: Any, value: Any) -> Any:
    """`shown`, the JSON that pydantic made of `value`, with sorted lists where that has sets. One process walks both in the same order."""
    if isinstance(shown, dict) and isinstance(value, Mapping) and len(shown) == len(value):
        return {key: _sorted_sets(item, value[own]) for (key, item), own in zip(shown.items(), value)}
    if isinstance(shown, list) and isinstance(value, (set, frozenset, list, tuple)) and len(shown) == len(value):
        items = [_sorted_sets(item, own) for item, own in zip(shown, value)]
        return items if isinstance(value, (list, tuple)) else sorted(items, key=repr)
    return shown  # not made of `value`: the tool has a schema of its own


def canonical_repr(value: Any) -> str:
    """`repr`, with sets in sorted order at every depth and without addresses."""
    if type(value) in (set, frozenset) and value:
        inner = "{" + ", ".join(sorted(map(canonical_repr, value))) + "}"
        return inner if type(value) is set else f"frozenset({inner})"
    if type(value) is dict:
        return "{" + ", ".join(f"{canonical_repr(key)}: {canonical_repr(item)}" for key, item in value.items()) + "}"
    if type(value) is list:
        return "[" + ", ".join(map(canonical_repr, value)) + "]"
    if type(value) is tuple:
        return "(" + ", ".join(map(canonical_repr, value)) + ("," if len(value) == 1 else "") + ")"
    return _ADDRESS.sub("", repr(value))


def _defaults(tool: BaseTool) -> list[tuple[str, Any]]:
    """Parameters with defaults of the tool's function."""
    function = getattr(tool, "real_fn", None) if isinstance(tool, FunctionTool) else None
    if function is None:
        return []
    parameters = inspect.signature(function).parameters.values()
    return [(one.name, one.default) for one in parameters if one.default is not inspect.Parameter.empty]


def canonical_tool(tool: BaseTool) -> BaseTool:
    """The same tool with a description that every process writes alike. Tools that are stable already come back as they are.

    AgentCacheLLM does this by itself; it is for those who show tools to a model in another way.
    """
    description, changed = canonical_description(tool)
    if not changed or not isinstance(tool, FunctionTool):
        return tool
    made = copy.copy(tool)
    made._metadata = dataclasses.replace(tool.metadata, description=description)
    return made
