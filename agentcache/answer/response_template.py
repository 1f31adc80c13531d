"""A completion taken apart by the response template that its tokenizer brings, with transformers' own parser. Knows nothing of requests.

The template says where thoughts, text and calls lie and how a call is written. What it would drop or fail on is kept as text, a call that
the end of the completion cut short is none, and arguments that are one JSON object with the name are told while they are written.
"""

from __future__ import annotations

import copy
import functools
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..types import Message, ToolCall
from . import tag_calls
from .call_stream import CallStream, Delta, DeltaKind
from .grammar_rules import PROBE_ARGUMENTS, PROBE_TOOL, CallForm
from .tool_calls import CUT, HERMES, HERMES_END, MALFORMED, THINK_END, InvalidCall, Made, broken, read, whole

CALLS, TEXT, THOUGHTS = "tool_calls", "content", frozenset({"reasoning_content", "reasoning", "thinking"})
_OPENED = "agentcache_opened"  # name of the group that takes what opened a call
_WITH_NAME = ("{content}", {"name": "{content.name}", "arguments": "{content.arguments}"})  # transforms of a call that is one JSON object


@dataclass(frozen=True, slots=True, eq=False)
class ResponseTemplate:
    """One tokenizer's response template, compiled twice: `calls` reads one call; `parts` finds the parts, in which nothing can fail.

    streams: a call is one JSON object. exact: half a call does not read as a call. joins: what stands between the parts of one field.
    typed: values of arguments are made here, by the schemas of tools, and not by transformers.
    """

    calls: Any
    parts: Any
    streams: bool
    exact: bool
    joins: Mapping[str, str]
    typed: bool = False

    def begun(self, prompt: str) -> str | None:
        """The end of the prompt from where it begins an answer; None if it begins none that this template knows."""
        starts = [found.start() for found in self.parts.start_anchor_re.finditer(prompt)]
        return prompt[starts[-1] :] if starts else None


def template_of(tokenizer: Any) -> ResponseTemplate | None:
    """The tokenizer's response template; None if it has none or transformers is older than they are. Raises ValueError if it is broken."""
    said = getattr(tokenizer, "response_template", None)
    return _compiled(json.dumps(said)) if isinstance(said, Mapping) else None


def template_for(form: CallForm) -> ResponseTemplate | None:
    """The response template of a form that our own parsers do not read; None for the others, or if transformers is too old for it."""
    return _tags() if form.tags else None


@functools.cache
def _tags() -> ResponseTemplate | None:
    made = _compiled(json.dumps(tag_calls.RESPONSE_TEMPLATE))
    return replace(made, typed=True) if made else None


@functools.lru_cache(maxsize=64)
def reads(template: ResponseTemplate, begun: str, form: CallForm) -> bool:
    """Whether this template reads the calls that a constraint makes a model write in this form, behind a prompt that began so."""
    if form.tags:
        return template.typed
    call = f"{form.before}{PROBE_TOOL}{form.between}{json.dumps(PROBE_ARGUMENTS)}{form.after}"
    more = f"{form.joint}{call}" if form.joint is not None else ""
    reader = ResponseStream(template, begun, [], (PROBE_TOOL,))
    reader.push(f"zthought{THINK_END}\n\n" if reader.thinks else "")
    reader.push(f"{form.trigger}{form.open}{call}{more}{form.close}")
    reader.finish()
    expected = (ToolCall(PROBE_TOOL, PROBE_ARGUMENTS),) * (2 if more else 1)
    return reader.message.tool_calls == expected and not reader.message.content


@functools.lru_cache(maxsize=16)
def _compiled(said: str) -> ResponseTemplate | None:
    try:
        from transformers.utils.chat_parsing.response_templates import load_response_template
    except ImportError:  # older than 5.13
        return None
    whole = json.loads(said)
    load_response_template(whole)
    fields: dict[str, Any] = whole["fields"]
    own = fields.get(CALLS, {})
    parts = {**whole, "defaults": {}, "fields": {name: _part(each, name == CALLS) for name, each in fields.items()}}
    if TEXT not in fields and all("open" in each or "open_pattern" in each for each in fields.values()):
        parts["fields"][TEXT] = {}  # a template that has no place for text would drop it
    one_call = {**whole, "defaults": {}, "fields": {CALLS: own}} if own else None
    function = own.get("transform", {}).get("function") if isinstance(own.get("transform"), Mapping) else None
    exact = own.get("content") == "json"
    return ResponseTemplate(
        calls=load_response_template(one_call) if one_call else None,
        parts=load_response_template(parts),
        streams=exact and not own.get("transform_each") and not own.get("content_args") and function in _WITH_NAME,
        exact=exact,
        joins={name: each["join"] for name, each in fields.items() if each.get("join")},
    )


def _part(field: Mapping[str, Any], is_call: bool) -> dict[str, Any]:
    """A field as raw text; a call's with what opened it."""
    kept = {key: copy.copy(field[key]) for key in ("open", "open_pattern", "close", "close_pattern") if key in field}
    kept |= {"content": "text", "content_args": {"strip": False}, "transform": "{content}", "repeats": True}
    if is_call and ("open" in field or "open_pattern" in field):
        literal = kept.pop("open", ())
        literals = sorted([literal] if isinstance(literal, str) else literal, key=len, reverse=True)
        pattern = kept.get("open_pattern") or "|".join(map(re.escape, literals))
        kept |= {"open_pattern": f"(?P<{_OPENED}>{pattern})", "transform": {"opened": f"{{{_OPENED}}}", "body": "{content}"}}
    return kept


class ResponseStream:
    """Deltas of one completion, and in the end its message: `CallStream` and `parse` in one.

    begun: of ResponseTemplate. tools: as they were rendered; a template whose arguments have no types takes them from there.
    """

    def __init__(self, template: ResponseTemplate, begun: str, tools: Sequence[Any], names: Collection[str]) -> None:
        from transformers.utils.chat_parsing import ResponseParser, parse_response

        self._template, self._tools, self._names = template, list(tools), names
        self._one_call = parse_response
        self._parser = ResponseParser(template.parts, prefix=begun)
        self._fed = ""
        self._field: str | None = None
        self._space: dict[str, str | None] = {"text": None, "reasoning": None}  # held back; None: nothing was told yet
        self._live: CallStream | None = None
        self._told_call = False
        self._out: list[Delta] = []
        self._said: dict[str, list[str]] = {"text": [], "reasoning": []}
        self._made: list[ToolCall | InvalidCall] = []
        for event in self._parser.initial_events:
            self._field = None if event["type"] == "region_close" else event["field"]

    @property
    def thinks(self) -> bool:
        """Whether a thought is open."""
        return self._field in THOUGHTS

    def push(self, text: str) -> list[Delta]:
        """What has become certain with this text."""
        self._fed += text
        return self._take(self._parser.feed(text))

    def finish(self, *, cut: bool = False) -> list[Delta]:
        """The rest, now that nothing follows. cut: the completion was stopped for its length."""
        _, events = self._parser.finalize()
        if not events or events[-1]["field"] != CALLS:
            return self._take(events)
        out = self._take(events[:-1])
        if cut and not self._template.exact:
            self._malformed(events[-1]["value"], ended=True)
        else:
            self._closed(events[-1]["value"], ended=True)
        return out + self._flush()

    @property
    def message(self) -> Message:
        """The message that the completion spells; whole once `finish` was called."""
        return self.read()[0]

    def read(self) -> tuple[Message, Made]:
        """The same, with all calls in order, those included that are none."""
        if not self._made and not any("".join(said).strip() for said in self._said.values()):
            return read(self._fed, self._names)  # nothing was where the template looks for it
        thought, made = "".join(self._said["reasoning"]).strip() or None, tuple(self._made)
        return Message("assistant", "".join(self._said["text"]).strip(), whole(made), reasoning=thought), made

    def _flush(self) -> list[Delta]:
        out, self._out = self._out, []
        return out

    def _take(self, events: Sequence[Mapping[str, Any]]) -> list[Delta]:
        for event in events:
            kind, name = event["type"], event["field"]
            if kind == "region_open":
                self._opened(name)
            elif kind == "region_chunk" and name == CALLS:
                self._live_arguments(event["text"])
            elif kind == "region_chunk":
                self._tell("reasoning" if name in THOUGHTS else "text", event["text"])
            elif name == CALLS:
                self._closed(event["value"])
        return self._flush()

    def _opened(self, name: str) -> None:
        self._field = name
        if name == CALLS and self._template.streams:
            self._live, self._told_call = CallStream(self._names), False
            self._live.push(HERMES)
        elif (join := self._template.joins.get(name)) and name != CALLS:
            kind: DeltaKind = "reasoning" if name in THOUGHTS else "text"
            if self._space[kind] is not None:
                self._tell(kind, join)

    def _tell(self, kind: DeltaKind, text: str) -> None:
        """Text as it is, but for white space around all of its kind."""
        held = self._space[kind]
        text = text.lstrip() if held is None else held + text
        kept = text.rstrip()
        if kept:
            self._out.append(Delta(kind, kept))
            self._said[kind].append(kept)
        self._space[kind] = text[len(kept) :] if kept or held is not None else None

    def _live_arguments(self, text: str) -> None:
        if self._live is not None:
            self._forward(self._live.push(text))

    def _forward(self, pieces: Sequence[Delta]) -> None:
        for piece in pieces:
            if piece.kind in ("call", "arguments", "cut"):
                self._told_call = True
                self._out.append(replace(piece, index=self._told()))

    def _closed(self, value: Any, ended: bool = False) -> None:
        """A call is whole: tell what was not told of it; or it is none, and text. ended: by the end of the completion."""
        calls = self._read(value, ended)
        if calls is None:
            self._malformed(value, ended)
            return
        if self._live is not None and self._told_call:
            self._forward([*self._live.push(HERMES_END), *self._live.finish()])
            self._made += calls
        else:
            for call in calls:
                self._out += [
                    Delta("call", call.name, self._told()),
                    Delta("arguments", json.dumps(call.arguments, ensure_ascii=False), self._told()),
                ]
                self._made.append(call)
        self._live = None

    def _read(self, value: Any, ended: bool) -> list[ToolCall] | None:
        """The calls of one region; None if they are malformed. Half a mark at its end is fine."""
        opened, body = _raw(value)
        close = self._template.parts.fields[CALLS].close_re
        begun = close.search(body, partial=True) if ended and close is not None else None
        body = body[: begun.start()] if begun else body
        plain = self._template.streams or self._template.typed  # what was told as it came is not to be changed behind
        tools = None if plain else self._tools
        try:
            said = self._one_call(opened + body, self._template.calls, prefix="", tools=tools).get(CALLS, [])
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):  # so a template's transforms fail on what a model wrote
            return None
        listed = said if isinstance(said, list) else [said]
        calls = [_call(each) for one in listed for each in (one if isinstance(one, list) else [one])]
        found = [call for call in calls if call is not None]
        if not found or len(found) != len(calls):
            return None
        return [self._with_values(call) for call in found] if self._template.typed else found

    def _with_values(self, call: ToolCall) -> ToolCall:
        known = {each["name"]: each.get("parameters") or {} for tool in self._tools if "name" in (each := tool.get("function", tool))}
        schema = known.get(call.name, {})
        return ToolCall(call.name, {key: tag_calls.value_of(text, schema, key) for key, text in call.arguments.items()})

    def _told(self) -> int:
        """How many calls were told before the one under way."""
        return sum(isinstance(call, ToolCall) or call.id is not None for call in self._made)

    def _malformed(self, value: Any, ended: bool) -> None:
        opened, body = _raw(value)
        raw = opened + body
        behind = self._fed[self._fed.rfind(raw) + len(raw) :]
        close = self._template.parts.fields[CALLS].close_re
        found = close.match(behind) if close is not None else None
        raw += found.group() if found else ""
        if self._told_call and self._live is not None:
            self._forward(self._live.finish())
            self._said["text"].append((self._space["text"] or "") + raw)
            self._space["text"] = ""
        else:
            self._tell("text", raw)
        self._made.append(self._invalid(opened, body, ended))
        self._live = None

    def _invalid(self, opened: str, body: str, ended: bool) -> InvalidCall:
        if self._template.streams:
            return replace(broken(body, cut=ended), id="" if self._told_call else None)
        pattern = self._template.calls.fields[CALLS].open_re
        named = pattern.match(opened) if pattern is not None else None
        return InvalidCall((named.groupdict().get("name") or "") if named else "", body, CUT if ended else MALFORMED)


def _raw(value: Any) -> tuple[str, str]:
    """What opened a call, and what stood in it."""
    return (value["opened"], value["body"]) if isinstance(value, Mapping) else ("", value)


def _call(said: Any) -> ToolCall | None:
    function = said.get("function", said) if isinstance(said, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        return None
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return None
    return ToolCall(function["name"], arguments) if isinstance(arguments, Mapping) else None
