"""LangChain's tools and tool choices as agentcache's. Converting is remembered: agents bind the same tools again at every step."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, get_origin

from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_openai_tool
from pydantic.errors import PydanticUserError

from agentcache import Constraint, Tool

from .errors import ModelInvalidRequestError

ToolLike: TypeAlias = Mapping[str, Any] | type | Callable[..., Any] | BaseTool
Formatted = dict[str, Any]

# What LangChain and pydantic raise about types that no schema can show, such as functions, plain classes, and forms that hold themselves.
UNDESCRIBABLE = (ValueError, TypeError, KeyError, AttributeError, PydanticUserError, RecursionError)
REMEMBERED = 512  # tools


@dataclass(frozen=True, slots=True)
class _Tool:
    """A tool by what tells it apart. Keeps the object alive, so that its id cannot be another's."""

    identity: Any
    tool: Any = field(compare=False)


def _identity(tool: Any) -> Any:
    if isinstance(tool, Mapping):
        return json.dumps(tool, sort_keys=False, default=repr)
    if isinstance(tool, BaseTool):
        return id(tool), tool.name, tool.description, id(tool.args_schema)
    return id(tool), getattr(tool, "__doc__", None)


def reason(error: BaseException) -> str:
    """Its words, in one line."""
    return f"{' '.join(str(error).split()):.300}"


def _formatted(tool: Any) -> Formatted:
    try:
        if get_origin(tool) is not None:  # which Python 3.14 describes as the function that makes one
            raise TypeError("a type with parameters")
        made = convert_to_openai_tool(tool)
    except UNDESCRIBABLE as error:
        raise ModelInvalidRequestError(f"tool {tool!r:.200}: cannot be described to a model ({reason(error)})") from error
    function = made.get("function")
    if not isinstance(function, Mapping) or not function.get("name"):
        raise ModelInvalidRequestError(
            f"tool {tool!r:.200}: is no function with a name; a local model has no built-in tools, pass a function, a BaseTool or a schema"
        )
    return made


@functools.lru_cache(REMEMBERED)
def _remembered(one: _Tool) -> Formatted:
    return _formatted(one.tool)


def _convert(tool: Any) -> Formatted:
    """A tool in OpenAI's form, remembered by the object that it is."""
    return _remembered(_Tool(_identity(tool), tool))


def formatted(tools: Sequence[ToolLike]) -> list[Formatted]:
    """Tools of any form that LangChain takes, in OpenAI's."""
    if isinstance(tools, (str, Mapping, BaseTool)) or not isinstance(tools, Sequence):
        raise ModelInvalidRequestError(f"tools={tools!r:.200}: must be a list of tools; for none, pass []")
    return [_convert(tool) for tool in tools]


def _is_formatted(tool: Any) -> bool:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    return isinstance(function, Mapping) and bool(function.get("name"))


def own_tools(tools: Sequence[Any]) -> list[Tool]:
    """The same in agentcache's form."""
    made = []
    for tool in tools:
        function = (tool if _is_formatted(tool) else _convert(tool))["function"]
        parameters = function.get("parameters") or {"type": "object", "properties": {}}
        made.append(Tool(str(function["name"]), str(function.get("description") or ""), parameters))
    return made


def constraint(
    tools: Sequence[Tool],
    *,
    tool_choice: Any = None,
    strict: bool | None = None,
    parallel_tool_calls: bool | None = None,
    response_format: Any = None,
    forbidden: Sequence[str] = (),
) -> Constraint | None:
    """What the completion is held to, None if it is free. forbidden: tools that are shown, and may not be called."""
    choice, allowed = _choice(tool_choice)
    if isinstance(forbidden, str):
        raise ModelInvalidRequestError(f"forbidden_tools={forbidden!r:.200}: must be a list of names")
    if forbidden:
        allowed = tuple(tool.name for tool in tools if tool.name not in forbidden and (allowed is None or tool.name in allowed))
    schema = _schema(response_format)
    if not tools and choice in ("auto", "none") and schema is None:
        return None
    if schema is not None and choice not in ("auto", "none"):
        schema = None  # it must call now; the form is for the answer that comes later
    if choice == "auto" and allowed is None and schema is None and not strict and parallel_tool_calls is not False:
        return None
    return Constraint(choice, allowed, parallel_tool_calls is not False, schema)


def form_of(response_format: Any, tools: Sequence[Tool]) -> Tool | None:
    """The tool that shows an OpenAI response_format's schema to the model; None for another kind of form, or one that is no object."""
    if not isinstance(response_format, Mapping) or response_format.get("type") != "json_schema":
        return None
    schema = _schema(response_format)
    if not isinstance(schema, Mapping) or not schema.get("properties"):
        return None
    said = response_format.get("json_schema", response_format)
    name = re.sub(r"\W", "_", str(said.get("name") or schema.get("title") or "answer"))[:48]
    while name in {tool.name for tool in tools}:
        name += "_answer"
    return Tool(name, str(schema.get("description") or "The form of the answer."), schema)


def may_call(tools: Sequence[Tool], tool_choice: Any, forbidden: Sequence[str] = ()) -> tuple[bool, bool]:
    """(whether a tool can be called, whether one must be)"""
    choice, allowed = _choice(tool_choice)
    names = [tool.name for tool in tools if tool.name not in forbidden and (allowed is None or tool.name in allowed)]
    return choice != "none" and bool(names), choice not in ("auto", "none")


def _choice(value: Any) -> tuple[str, tuple[str, ...] | None]:
    """(tool_choice, allowed) in agentcache's words."""
    if value is None or value is False:
        return "auto", None
    if value is True:
        return "any", None
    if isinstance(value, str):
        return {"required": "any"}.get(value, value), None
    if isinstance(value, Mapping):
        kind = value.get("type")
        if kind in ("auto", "none", "any", "required"):
            return _choice(str(kind))
        if kind == "allowed_tools":
            inner = value.get("allowed_tools", value)
            tools, mode = (inner.get("tools", ()), inner.get("mode") or "auto") if isinstance(inner, Mapping) else (None, None)
            names = tuple(map(_name, tools)) if isinstance(tools, (list, tuple)) else ("",)
            if all(names) and mode in ("auto", "none", "any", "required"):
                return _choice(mode)[0], names
        elif name := _name(value):
            return name, None
    raise ModelInvalidRequestError(
        f"tool_choice={value!r:.200}: must be 'auto', 'none', 'any', 'required', True, the name of a tool, "
        "{'type': 'function', 'function': {'name': ...}} or {'type': 'allowed_tools', 'mode': 'auto' or 'required', 'tools': [...]}"
    )


def _name(value: Any) -> str:
    if not isinstance(value, Mapping):
        return value if isinstance(value, str) else ""
    function = value.get("function", value)
    return str(function.get("name") or "") if isinstance(function, Mapping) else ""


def _schema(value: Any) -> Mapping[str, Any] | bool | None:
    """The JSON schema that a response format asks for; True for any object, None for text."""
    if value is None or value == "text":
        return None
    if value in ("json", "json_object"):
        return True
    if isinstance(value, Mapping):
        kind = value.get("type")
        if kind == "text":
            return None
        if kind == "json_object":
            return True
        if kind == "json_schema":
            inner = value.get("json_schema", value)
            schema = inner.get("schema") if isinstance(inner, Mapping) else None
            if isinstance(schema, Mapping):
                return schema
        elif "properties" in value or kind in ("object", "array", "string", "number", "integer", "boolean"):
            return value
    raise ModelInvalidRequestError(
        f"response_format={value!r:.200}: must be {{'type': 'json_schema', 'json_schema': {{'schema': ...}}}}, {{'type': 'json_object'}}, "
        "or a JSON schema"
    )
