"""Calls taken out of text, at once and piece by piece: both say the same, whatever the pieces."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentcache.answer.call_stream import CallStream, Delta
from agentcache.answer.tool_calls import parse
from agentcache.types import Message, ToolCall

TOOLS = ("search", "get_weather")
HERMES = '<tool_call>\n{"name": "search", "arguments": {"query": "a </tool_call> \\" b", "n": [1, {"x": "]}"}]}}\n</tool_call>'
OTHER_ORDER = '<tool_call>{"arguments": {"city": "Averil"}, "name": "get_weather"}</tool_call>'
MISTRAL = '[TOOL_CALLS][{"name": "search", "arguments": {"query": "x"}, "id": "123456789"}, {"name": "get_weather", "arguments": {}}]'
LLAMA = '{"name": "search", "parameters": {"query": "tide"}}'
TEXTS = {
    "plain": "  The tide turns at noon. ",
    "empty": "",
    "comparison": "if a < b and <tool_bar> [TOOL_CALLS or {no} json",
    "hermes": HERMES,
    "two": f"{HERMES}\n{OTHER_ORDER}",
    "text first": f"I will look. \n\n{HERMES}\n",
    "text between": f"One {HERMES} two {OTHER_ORDER} three",
    "thought": f"<think>\nShould I <tool_call> now?\n</think>\n\nYes. {HERMES}",
    "thought only": "<think>\nnever ends",
    "thought of llama": f"<think>a</think>\n{LLAMA}",
    "mistral": MISTRAL,
    "mistral after text": f"Well: {MISTRAL}",
    "llama": LLAMA,
    "llama, white space": f"\n  {LLAMA} ",
    "llama, no such tool": '{"name": "Ada", "parameters": {"born": 1815}}',
    "json": '{"name": "Ada", "born": 1815}',
    "arguments as text": '<tool_call>{"name": "search", "arguments": "{\\"query\\": \\"x\\"}"}</tool_call>',
}


def gathered(deltas: list[Delta]) -> Message:
    """The message that deltas add up to."""
    text = {kind: "".join(d.text for d in deltas if d.kind == kind) for kind in ("text", "reasoning")}
    calls = []
    for begun in (d for d in deltas if d.kind == "call"):
        arguments = "".join(d.text for d in deltas if d.kind == "arguments" and d.index == begun.index)
        calls.append(ToolCall(begun.text, json.loads(arguments)))
    return Message("assistant", text["text"], tuple(calls), reasoning=text["reasoning"] or None)


def kindly(text: str) -> Any:
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


def taken_apart(text: str, cuts: list[int], **options: Any) -> list[Delta]:
    reader = CallStream(TOOLS, **options)
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    return [d for a, b in zip(places, places[1:]) for d in reader.push(text[a:b])] + reader.finish()


@pytest.mark.parametrize("name", sorted(TEXTS))
@settings(max_examples=40, deadline=None)
@given(cuts=st.lists(st.integers(0, 250), max_size=60))
def test_pieces_say_what_the_whole_says(name: str, cuts: list[int]) -> None:
    text = TEXTS[name]
    whole = parse(text, TOOLS)
    assert gathered(taken_apart(text, cuts)) == whole
    assert gathered(taken_apart(text, list(range(len(text))))) == whole, "character by character"


def test_what_the_whole_says() -> None:
    search = ToolCall("search", {"query": 'a </tool_call> " b', "n": [1, {"x": "]}"}]})
    weather = ToolCall("get_weather", {"city": "Averil"})
    assert parse(TEXTS["two"], TOOLS) == Message("assistant", "", (search, weather))
    assert parse(TEXTS["text first"], TOOLS) == Message("assistant", "I will look.", (search,))
    assert parse(TEXTS["thought"], TOOLS) == Message("assistant", "Yes.", (search,), reasoning="Should I <tool_call> now?")
    assert parse(TEXTS["thought only"], TOOLS) == Message("assistant", "", reasoning="never ends")
    assert parse(MISTRAL) == Message("assistant", "", (ToolCall("search", {"query": "x"}), ToolCall("get_weather", {})))
    assert parse(LLAMA, TOOLS) == parse(LLAMA) == Message("assistant", "", (ToolCall("search", {"query": "tide"}),))
    assert parse(TEXTS["llama, no such tool"], TOOLS).content == TEXTS["llama, no such tool"]
    assert parse("so it is</think>\n\nyes", TOOLS, opened=True) == Message("assistant", "yes", reasoning="so it is")


def test_arguments_come_while_they_are_written() -> None:
    reader = CallStream(TOOLS)
    reader.push('<tool_call>\n{"name": "search", "arguments": {"query": "a long')
    assert [d.text for d in reader.push(" way to")] == [" way to"]
    assert [d.text for d in reader.push(" go\\")] == [" go"], "half an escape waits"
    assert [d.text for d in reader.push('" on')] == ['\\" on']


def test_text_waits_no_longer_than_it_must() -> None:
    reader = CallStream(TOOLS)
    assert [d.text for d in reader.push("Hello <tool")] == ["Hello"]
    assert [d.text for d in reader.push("s> there")] == [" <tools> there"]


@pytest.mark.parametrize("text", [HERMES, LLAMA, MISTRAL[:79] + "]"], ids=["hermes", "llama", "mistral"])
def test_half_a_call_is_none(text: str) -> None:
    whole = parse(text, TOOLS).tool_calls
    for stop in range(len(text)):
        cut = text[:stop]
        said = parse(cut, TOOLS)
        assert said.tool_calls in ((), whole), cut
        assert said.tool_calls or said.content == cut.strip(), "nothing is lost"
        deltas = taken_apart(cut, list(range(stop)))
        arguments = "".join(d.text for d in deltas if d.kind in ("arguments", "cut"))
        if any(d.kind == "call" for d in deltas) and not said.tool_calls:
            assert deltas[-1].kind == "cut", cut
            assert kindly(arguments) is None, arguments


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>\n{broken</tool_call>",
        '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "search", "arguments": [1]}</tool_call>',
        "[TOOL_CALLS][3]",
        "[TOOL_CALLS] nothing",
        "<tool_call>" + "[" * 100_000,
    ],
)
def test_malformed_calls_are_text(text: str) -> None:
    assert parse(text, TOOLS) == Message("assistant", text)
    assert not parse(text, None).tool_calls
    told = taken_apart(text, [])
    assert not [d for d in told if d.kind == "call"]
    assert "".join(d.text for d in told) == text


def test_without_calls_everything_is_text() -> None:
    reader = CallStream(None)
    told = [*reader.push(f"<think>x</think>{HERMES}"), *reader.finish()]
    assert [d.kind for d in told] == ["reasoning", "text"]
    assert told[1].text == HERMES
