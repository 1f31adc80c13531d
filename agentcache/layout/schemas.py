"""Tool schemas in one canonical form and order. Knows nothing of templates or tokens."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..errors import ToolSchemaError, shown
from ..types import Tool, ToolOrder
from .canonical import mapped
from .json_values import fault
from .plain import Plain


def plain_tools(tools: Sequence[Tool | Mapping[str, Any]]) -> list[Plain]:
    """Plain dicts as given; raises ToolSchemaError with the index of the first that is not a function schema."""
    if isinstance(tools, (str, Mapping)) or not isinstance(tools, Sequence):
        raise ToolSchemaError(f"tools={shown(tools)}: must be a list of function schemas")
    plain = [_plain_tool(index, tool) for index, tool in enumerate(tools)]
    first: dict[str, int] = {}
    for index, tool in enumerate(plain):
        name = tool_name(tool)
        if first.setdefault(name, index) != index:
            raise ToolSchemaError(f"tools[{index}]: name={name!r} is already used by tools[{first[name]}]; names must differ")
    return plain


def _plain_tool(index: int, tool: Tool | Mapping[str, Any]) -> Plain:
    if isinstance(tool, Tool):
        tool = {"type": "function", "function": {"name": tool.name, "description": tool.description, "parameters": tool.parameters}}
    if not isinstance(tool, Mapping):
        raise ToolSchemaError(f"tools[{index}]={shown(tool)}: give a Tool or {{'type': 'function', 'function': {{...}}}}")
    function = tool.get("function", tool)
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
        raise ToolSchemaError(f"tools[{index}]={shown(tool)}: a function schema needs a 'name' that is a string")
    if not isinstance(function.get("description", ""), (str, type(None))):
        raise ToolSchemaError(f"tools[{index}] {function['name']!r}: description={shown(function['description'])} is not a string")
    parameters = function.get("parameters")
    if parameters is not None and (not isinstance(parameters, Mapping) or parameters.get("type", "object") != "object"):
        raise ToolSchemaError(
            f"tools[{index}] {function['name']!r}: parameters={shown(parameters)} is not a JSON schema of type object; "
            "use {'type': 'object', 'properties': {...}}"
        )
    return dict(tool)


def said(plain: Sequence[Plain]) -> str:
    """These tools as JSON, each value checked where that fails; ToolSchemaError names the tool and the place."""
    try:
        return json.dumps(plain, ensure_ascii=False, default=_as_object)
    except (TypeError, ValueError, RecursionError) as error:
        check_values(plain)
        raise ToolSchemaError(f"tools={shown(plain)}: cannot be written as JSON: {error}") from error


def check_values(plain: Sequence[Plain]) -> None:
    """ToolSchemaError for the first value that is no JSON, or nested too deeply."""
    for index, tool in enumerate(plain):
        if wrong := fault(tool, "tool"):
            raise ToolSchemaError(f"tools[{index}] {tool_name(tool)[:60]!r}: {wrong}")


def _as_object(value: Any) -> Plain:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(type(value).__name__)


def tool_name(tool: Plain) -> str:
    """The function's name, from either shape of a tool."""
    return str(tool.get("function", tool)["name"])


def canonical_tools(plain: Sequence[Plain], clean: Callable[[str], str]) -> tuple[list[Plain], list[str]]:
    """Tools canonical by schema (not alphabetical: parameters keep their own key order), and what changed in words."""
    out = [mapped(_canonical_tool(tool), str) for tool in plain]
    safe = [mapped(tool, clean) for tool in out]
    notes = []
    if json.dumps(out) != json.dumps(list(plain), default=_as_object):
        notes.append("tools rewritten as {type, function{name, description, parameters}}")
    if safe != out:
        notes.append("tools: text that spells a special token was neutralised")
    return safe, notes


def _canonical_tool(tool: Plain) -> Plain:
    function = tool.get("function", tool)
    parameters = function.get("parameters")
    parameters = {"type": "object", "properties": {}} if parameters is None else parameters
    body = {"name": function["name"], "description": function.get("description") or "", "parameters": parameters}
    return {"type": "function", "function": body}


def order_tools(tools: list[Plain], order: ToolOrder, sticky: Sequence[str]) -> list[Plain]:
    """given | sorted by name | sticky: recorded names keep their recorded order, new ones follow in given order."""
    if order == "given":
        return tools
    if order == "sorted":
        return sorted(tools, key=tool_name)
    rank = {name: position for position, name in enumerate(sticky)}
    return sorted(tools, key=lambda tool: rank.get(tool_name(tool), len(rank)))
