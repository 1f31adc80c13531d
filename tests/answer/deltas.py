"""Answers read whole and in pieces, and their deltas put together again. Holds no tests."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from agentcache import Sampling
from agentcache.answer.call_forms import CallForm
from agentcache.answer.parser import AnswerParser, Delta
from agentcache.answer.response_template import template_for
from agentcache.types import Message, ToolCall


def taken(reader: AnswerParser, text: str, cuts: Sequence[int] = (), **options: Any) -> list[Delta]:
    """The deltas of a text that comes in pieces, cut at these places."""
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    return [d for a, b in zip(places, places[1:]) for d in reader.push(text[a:b])] + reader.finish(**options)


def parsed(form: CallForm | None, text: str, cut: str = "", **options: Any) -> AnswerParser:
    """A parser that has read this text, whole, by the template of a form."""
    parser = AnswerParser(template_for(form), **options)
    taken(parser, text, cut=cut)
    return parser


def spoken(text: str, tokenizer: Any) -> Sampling:
    """What makes an engine say exactly this."""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return Sampling(forced=(*ids, tokenizer.eos_token_id), max_tokens=len(ids) + 1)


def message_of(deltas: list[Delta]) -> Message:
    """The message that deltas add up to."""
    text = {kind: "".join(d.text for d in deltas if d.kind == kind) for kind in ("text", "reasoning")}
    calls = []
    for begun in (d for d in deltas if d.kind == "call"):
        arguments = "".join(d.text for d in deltas if d.kind == "arguments" and d.index == begun.index)
        calls.append(ToolCall(begun.text, json.loads(arguments)))
    return Message("assistant", text["text"], tuple(calls), reasoning=text["reasoning"] or None)


def partial_json(text: str) -> Any:
    """JSON as frameworks read it while it comes: open strings and brackets closed, ends dropped; None where one does not fit."""
    stack: list[str] = []
    quoted = escaped = False
    for char in text:
        if quoted:
            quoted = escaped or char != '"'
            escaped = char == "\\" and not escaped
        elif char == '"':
            quoted = True
        elif char in "{[":
            stack.append("}" if char == "{" else "]")
        elif char in "}]" and (not stack or stack.pop() != char):
            return None
    return text
