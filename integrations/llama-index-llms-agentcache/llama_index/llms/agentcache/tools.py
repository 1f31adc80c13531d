"""Which tools stand in the prompt and which of them may be called. Knows nothing of messages or of decoding.

    the tools of a call      in the prompt                  may be called
    without a superset       those tools, in their order    those tools
    with a superset          the superset, then the rest    those tools; none where the call has none

A tools block that never changes is computed once; what changes from step to step is a mask over the grammar, which costs nothing.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llama_index.core.tools import BaseTool, ToolMetadata
from pydantic.errors import PydanticUserError

from agentcache.errors import ConfigError, ToolSchemaError

from .canonical import canonical_description, canonical_parameters

logger = logging.getLogger(__name__)

Schema = dict[str, Any]
Shape = tuple[str | None, str, Any]


@dataclass(frozen=True, slots=True)
class Offer:
    """Tools in the prompt, and the names of those that may be called; allowed None: all of them."""

    shown: tuple[Schema, ...]
    allowed: tuple[str, ...] | None = None

    @property
    def callable_names(self) -> tuple[str, ...]:
        """The names that a call may use."""
        return tuple(map(name_of, self.shown)) if self.allowed is None else self.allowed


class Translator:
    """Tools as JSON schemas of OpenAI's shape, each worked out once: agents bring the same tools to every step."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[ToolMetadata], Shape, Schema]] = {}

    def schemas(self, tools: Sequence[Any]) -> tuple[Schema, ...]:
        """One schema per tool; a mapping is taken as the schema it is."""
        if isinstance(tools, (str, Mapping)) or not isinstance(tools, Sequence):
            raise ToolSchemaError(f"tools={tools!r:.200}: give a list of llama_index tools or of function schemas")
        return tuple(dict(tool) if isinstance(tool, Mapping) else self.schema(tool) for tool in tools)

    def schema(self, tool: BaseTool) -> Schema:
        """One tool's schema. Its description and defaults are written alike in every process."""
        if not isinstance(tool, BaseTool):
            raise ToolSchemaError(
                f"tool {tool!r:.200} is neither a llama_index tool nor a function schema: wrap it in FunctionTool.from_defaults"
            )
        metadata = tool.metadata
        shape: Shape = (metadata.name, metadata.description, metadata.fn_schema)
        known = self._known.get(id(metadata))  # without a lock: each access is one step
        if known is not None and known[0]() is metadata and known[1] == shape:
            return known[2]
        made = self._made(tool, metadata)
        key = id(metadata)
        gone = weakref.ref(metadata, lambda _: self._known.pop(key, None))
        self._known[key] = (gone, shape, made)
        return made

    def _made(self, tool: BaseTool, metadata: ToolMetadata) -> Schema:
        if not metadata.name:
            raise ToolSchemaError(f"tool {tool!r:.200} has no name: give it one in its metadata")
        description, changed = canonical_description(tool)
        if changed:
            logger.info("tool %r is written alike in every process: %s", metadata.name, "; ".join(changed))
        try:
            schema = metadata.to_openai_tool(skip_length_check=True)
        except PydanticUserError as error:  # annotations that cannot be resolved, types that have no schema
            raise ToolSchemaError(f"tool {metadata.name!r}: its arguments have no JSON schema ({error}); give it a fn_schema") from error
        function = {**schema["function"], "description": description}
        function["parameters"] = canonical_parameters(tool, function["parameters"])
        return {**schema, "function": function}


def name_of(schema: Mapping[str, Any]) -> str:
    """The name of the function that a schema describes."""
    function = schema.get("function", schema)
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not name:
        raise ToolSchemaError(f"tool schema {dict(schema)!r:.200} has no function name")
    return name


def offer(given: Sequence[Schema], superset: Sequence[Schema]) -> Offer:
    """What to show and what to allow when a call brings the tools `given`."""
    if not superset:
        return Offer(tuple(given))
    shown = {name_of(schema): schema for schema in superset}
    for schema in given:
        name = name_of(schema)
        if name in shown and shown[name] != schema:
            raise ConfigError(
                f"tool {name!r} differs from the tool of that name in the superset: give both the same description and arguments"
            )
        shown.setdefault(name, schema)
    allowed = tuple(dict.fromkeys(name_of(schema) for schema in given))  # a tool given twice is one
    return Offer(tuple(shown.values()), None if len(allowed) == len(shown) else allowed)


def tool_choice(wanted: Any, required: bool, offered: Offer) -> str:
    """ "auto", "none", "any" or the name of a tool, from what LlamaIndex users write: OpenAI's words, a name, or OpenAI's object."""
    names = offered.callable_names
    if isinstance(wanted, Mapping):
        function = wanted.get("function", wanted)
        name = function.get("name") if isinstance(function, Mapping) else None
        wanted = name or (wanted["type"] if wanted.get("type") in ("auto", "none", "any", "required") else wanted)
    if wanted is None:
        wanted = "any" if required else "auto"
    if wanted is True or wanted in ("any", "required"):
        wanted = "any"
    if wanted == "none" or (wanted == "auto" and not names):
        return "none"
    if wanted == "any" and not names:
        raise ConfigError(f"a tool call is demanded (tool_choice={wanted!r}, tool_required={required!r}), but no tools are given")
    if wanted in ("auto", "any") or wanted in names:
        return str(wanted)
    raise ConfigError(f"tool_choice={wanted!r}: must be 'auto', 'none', 'any' ('required') or the name of a tool; the tools are {names!r}")
