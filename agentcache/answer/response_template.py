"""Response templates, compiled: where in a completion thoughts, text and calls lie, and how a call is written. Knows no tokens.

Tokenizers bring them, in transformers' format; families whose tokenizers bring none have a row in call_forms.py.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from ..types import ToolCall
from .call_forms import MARKS, PYTHON_CALLS, CallForm, CallKeys, load

CALLS, TEXT, THOUGHTS = "tool_calls", "content", frozenset({"reasoning_content", "reasoning", "thinking"})
Kind = Literal["text", "reasoning", "call", "mark"]


@dataclass(frozen=True, slots=True, eq=False)
class Mark:
    """What opens or closes a region. grows: more text may make it longer."""

    pattern: Any
    grows: bool

    def open_ended(self, found: Any, text: str) -> bool:
        """Whether a match in this text may be another one once more text is there."""
        return bool(found.partial or (found.end() == len(text) and (self.grows or found.start() == found.end())))


@dataclass(frozen=True, slots=True, eq=False)
class Region:
    """A part of a completion."""

    kind: Kind
    open: Mark | None  # None: wherever no other region is
    close: Mark | None  # None: where the completion ends, or the JSON of a call
    join: str = ""  # what stands between two regions of this kind
    keys: CallKeys | None = None  # of calls in JSON
    # transformers' template of this region alone, of calls that are written otherwise; None: as a list in Python
    alone: Any = None
    # in such a region, texts or bare keys; None: it has none
    bare: Any = None

    def calls(self, text: str, body: str, tools: Sequence[Any] | None) -> list[ToolCall]:
        """The calls in the text of such a region, all of it and what its marks enclose; none if they are malformed.

        tools: as they were rendered; by their schemas transformers gives values types. None: all values stay text.
        """
        if self.alone is None:
            said = load(body)
            if said is None:
                from .call_python import python_calls

                return python_calls(body)
        else:
            said = self._parsed(text, tools)
        listed = said if isinstance(said, list) else [said]
        calls = [_call(each) for one in listed for each in (one if isinstance(one, list) else [one])]
        found = [call for call in calls if call is not None]
        return found if len(found) == len(calls) else []

    def _parsed(self, text: str, tools: Sequence[Any] | None) -> Any:
        from transformers.utils.chat_parsing import parse_response

        if self.bare is not None:  # transformers quotes those alone that are words
            text = self.bare.sub(lambda found: found[0] if found[2] is None else f"{found[1]}{json.dumps(found[2])}", text)
        try:
            return parse_response(text, self.alone, prefix="", tools=tools).get(CALLS, [])
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):  # so a template's transforms fail on what a model wrote
            return []


@dataclass(frozen=True, slots=True, eq=False)
class ResponseTemplate:
    """The regions of completions of one model. sink: the region of text that is in no other; None: such text belongs to no message."""

    regions: tuple[Region, ...]
    sink: Region | None
    anchor: Any  # where in a prompt an answer begins
    # whether arguments that are no JSON take the types of their schemas by our rules, by which the grammar wrote them
    typed: bool = False

    def begun(self, prompt: str) -> str | None:
        """The end of the prompt that belongs to the answer; None if the prompt begins none."""
        ends = [found.end() for found in self.anchor.finditer(prompt)]
        return prompt[ends[-1] :] if ends else None

    def without_calls(self) -> ResponseTemplate:
        """The same where no text is a call."""
        return replace(self, regions=tuple(region for region in self.regions if region.kind != "call"))


def template_of(tokenizer: Any) -> ResponseTemplate | None:
    """The tokenizer's response template; None if it has none. Raises ValueError if it is broken."""
    said = getattr(tokenizer, "response_template", None)
    return _compiled(json.dumps(said)) if isinstance(said, Mapping) else None


def template_for(form: CallForm | None = None) -> ResponseTemplate:
    """The response template of a family's form; by default of those whose marks need no family."""
    return replace(_compiled(json.dumps((form or CallForm()).template)), typed=True)


@functools.lru_cache(maxsize=32)
def _compiled(said: str) -> ResponseTemplate:
    from transformers.utils.chat_parsing.response_templates import load_response_template

    whole = json.loads(said)
    loaded = load_response_template(whole)
    made = {name: _region(name, each, whole["fields"][name]) for name, each in loaded.fields.items()}
    for name, region in made.items():
        if region.kind == "call" and region.keys is None and name != PYTHON_CALLS:
            alone = {**whole, "defaults": {}, "fields": {CALLS: whole["fields"][name]}}
            made[name] = replace(region, alone=load_response_template(alone), bare=_bare(whole["fields"][name].get("content_args") or {}))
    sink = made.get(loaded.implicit)
    if sink is None and TEXT not in made:  # a template that has no place for text would drop it
        sink = Region("text", None, None)
    return ResponseTemplate(tuple(region for region in made.values() if region.open), sink, loaded.start_anchor_re)


def _bare(arguments: Mapping[str, Any]) -> Any:
    """A pattern of texts, between their marks or quotes, and of keys that have none, after the mark before them."""
    if not arguments.get("unquoted_keys"):
        return None
    texts = [f"{re.escape(start)}.*?{re.escape(stop)}" for start, stop in arguments.get("string_delims") or ()]
    return re.compile(
        "|".join([*texts, r'"(?:\\.|[^"\\])*"', r"""([{,]\s*)([^\s"'<>:,={}()\[\]][^"'<>:,={}()\[\]]*?)(?=\s*:)"""]), re.DOTALL
    )


def _region(name: str, field: Any, said: Mapping[str, Any]) -> Region:
    calls = name.startswith(CALLS) and field.open_re is not None
    kind: Kind = "call" if calls else "reasoning" if name in THOUGHTS else "mark" if name == MARKS else "text"
    opened, close = _mark(field.open_re, said.get("open")), _mark(field.close_re, said.get("close"))
    return Region(kind, opened, close, field.join or "", _keys(said) if calls else None)


def _call(said: Any) -> ToolCall | None:
    function = said.get("function", said) if isinstance(said, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        return None
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        arguments = load(arguments)
    return ToolCall(function["name"], arguments) if isinstance(arguments, dict) else None


def _mark(pattern: Any, literal: Any) -> Mark | None:
    """literal: what the pattern was made of, one text or several; None if it is a regex."""
    several = isinstance(literal, list) and any(one != other and one.startswith(other) for one in literal for other in literal)
    return None if pattern is None else Mark(pattern, literal is None or several)


def _keys(field: Mapping[str, Any]) -> CallKeys | None:
    """Where in the JSON of a call its name and arguments are; None if calls are not plain JSON."""
    function = field.get("transform", {}).get("function") if isinstance(field.get("transform"), Mapping) else None
    if field.get("content") != "json" or field.get("content_args"):
        return None
    if function == "{content}":
        return CallKeys()
    if not isinstance(function, Mapping) or not all(isinstance(function.get(key), str) for key in ("name", "arguments")):
        return None
    name, arguments = (function[key].strip("{}") for key in ("name", "arguments"))
    if arguments == "content":
        return CallKeys(name="", arguments=()) if name == "name" else None
    inside = "" if field.get("transform_each") else "content."
    if not (name.startswith(inside) and arguments.startswith(inside)):
        return None
    return CallKeys(name.removeprefix(inside), (arguments.removeprefix(inside),), optional=False)
