"""Calls taken out of text, at once and piece by piece: both say the same, whatever the pieces."""

from __future__ import annotations

import ast
import gc
import weakref
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentcache.answer.call_forms import HERMES as HERMES_FORM
from agentcache.answer.parser import AnswerParser, Delta
from agentcache.answer.response_template import template_for
from agentcache.answer.tag_forms import TAGS
from agentcache.answer.tag_values import value_of
from agentcache.types import Message, ToolCall
from benchmarks.answers import parse
from tests.answer.deltas import message_of, parsed, partial_json, taken

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


def taken_apart(text: str, cuts: list[int]) -> list[Delta]:
    return taken(AnswerParser(template_for(), names=TOOLS), text, cuts)


@pytest.mark.parametrize("name", sorted(TEXTS))
@settings(max_examples=40, deadline=None)
@given(cuts=st.lists(st.integers(0, 250), max_size=60))
def test_pieces_say_what_the_whole_says(name: str, cuts: list[int]) -> None:
    text = TEXTS[name]
    whole = parse(text, TOOLS)
    assert message_of(taken_apart(text, cuts)) == whole
    assert message_of(taken_apart(text, list(range(len(text))))) == whole, "character by character"


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
    reader = AnswerParser(template_for(), names=TOOLS)
    reader.push('<tool_call>\n{"name": "search", "arguments": {"query": "a long')
    assert [d.text for d in reader.push(" way to")] == [" way to"]
    assert [d.text for d in reader.push(" go\\")] == [" go"], "half an escape waits"
    assert [d.text for d in reader.push('" on')] == ['\\" on']


def test_text_waits_no_longer_than_it_must() -> None:
    reader = AnswerParser(template_for(), names=TOOLS)
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
            assert partial_json(arguments) is None, arguments


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
    reader = AnswerParser(template_for().without_calls())
    told = taken(reader, f"<think>x</think>{HERMES}")
    assert [d.kind for d in told] == ["reasoning", "text"]
    assert told[1].text == HERMES


PIECES = [
    "<think>", "</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "{", "}", "[", "]", ",", ":", '"', "\\", " ", "\n", "tide", "7",
    "<function=search>", "</function>", "<parameter=query>", "</parameter>", HERMES, MISTRAL, LLAMA, '{"name": "search"', '"arguments"',
    '{"name": "search", "arguments": {"query": "a }</tool_call>"}}', '{"name": "nobody", "parameters": {}}', OTHER_ORDER,
]  # fmt: skip


@pytest.mark.parametrize("form", [HERMES_FORM, TAGS], ids=["plain", "tags"])
@settings(max_examples=300, deadline=None)
@given(pieces=st.lists(st.sampled_from(PIECES), max_size=10), cuts=st.lists(st.integers(0, 400), max_size=40), opened=st.booleans())
def test_any_pieces_of_any_text_say_what_the_whole_says(form: Any, pieces: list[str], cuts: list[int], opened: bool) -> None:
    text, read = "".join(pieces), []
    for places in ([], cuts, list(range(len(text)))):
        parser = AnswerParser(template_for(form), "<think>" if opened else "", names=TOOLS)
        deltas = taken(parser, text, places)
        read.append((parser.message, parser.invalid_calls))
        told = [d for d in deltas if d.kind == "call"]
        assert len(told) == len(parser.message.tool_calls) + sum(d.kind == "cut" for d in deltas)
        if not parser.invalid_calls:
            assert message_of(deltas) == parser.message
    assert read[0] == read[1] == read[2]


def test_a_call_with_more_than_its_json_is_none() -> None:
    for text in (HERMES.replace("\n</tool_call>", " or so</tool_call>"), f"{LLAMA} or so"):
        parser = parsed(None, text, names=TOOLS)
        assert parser.message == Message("assistant", text)
        assert [call.name for call in parser.invalid_calls] == ["search"]


def test_text_after_a_malformed_call_is_read_on() -> None:
    broken = '<tool_call>{"name": "search", "arguments": {"query": tide}}</tool_call>'
    deltas = taken_apart(f"{broken} Again: {OTHER_ORDER}", list(range(200)))
    assert [(d.kind, d.index) for d in deltas if d.kind in ("call", "cut")] == [("call", 0), ("cut", 0), ("call", 1)]
    parser = parsed(None, f"{broken} Again: {OTHER_ORDER}", names=TOOLS)
    assert parser.message == Message("assistant", f"{broken} Again:", (ToolCall("get_weather", {"city": "Averil"}),))


def test_a_mark_that_is_spoken_of_holds_nothing_back() -> None:
    parser = AnswerParser(template_for(), names=TOOLS)
    assert "".join(d.text for d in parser.push("A <tool_call> tag begins ")) == "A <tool_call> tag begins"
    assert [d.text for d in parser.push('{"name": "x"} calls')] == [' {"name": "x"} calls']


def test_objects_and_lists_after_either_mark() -> None:
    one, calls = '{"name": "search", "arguments": {}}', (ToolCall("search", {}),)
    assert parse(f"[TOOL_CALLS]{one}").tool_calls == parse(f"<tool_call>[{one}]</tool_call>").tool_calls == calls
    assert parse(f"<tool_call>[{one}, {one}]</tool_call>").tool_calls == calls * 2


def test_a_list_that_was_cut_keeps_its_whole_calls() -> None:
    parser = parsed(None, '[TOOL_CALLS][{"name": "search", "arguments": {}}, {"name": "get_wea', names=TOOLS)
    assert parser.message == Message("assistant", '{"name": "get_wea', (ToolCall("search", {}),))
    assert len(parser.invalid_calls) == 1


PYTHON = "<|tool_call_start|>[search(query='a }]\"', n=[1, {'x': true}]), get_weather(city=None)]<|tool_call_end|>"


def test_garbage_that_parses_disturbs_no_call() -> None:
    class Garbage:
        def __init__(self) -> None:
            self.me = self  # only a collection ends it
            weakref.finalize(self, ast.parse, "1 + (2, 3)[0]")

    calls = parse(PYTHON, TOOLS).tool_calls
    before = gc.get_threshold()
    try:
        for allocations in range(1, 200):
            gc.set_threshold(allocations)
            Garbage()
            assert parse(PYTHON, TOOLS).tool_calls == calls
            Garbage()
            assert value_of("{'a': [1, None]}", {"properties": {"x": {"type": "object"}}}, "x") == {"a": [1, None]}
    finally:
        gc.set_threshold(*before)


def test_calls_in_python_are_read_and_never_run() -> None:
    calls = (ToolCall("search", {"query": 'a }]"', "n": [1, {"x": True}]}), ToolCall("get_weather", {"city": None}))
    assert parse(f"I look.{PYTHON}", TOOLS) == Message("assistant", "I look.", calls)
    assert message_of(taken_apart(PYTHON, list(range(len(PYTHON))))).tool_calls == calls
    for odd in ("search(1)", "search(**x)", "search(query=open('x'))", "search(query={1})", "search(query=1j)", "search(", "1", "[" * 999):
        text = f"<|tool_call_start|>{odd}<|tool_call_end|>"
        parser = parsed(None, text, names=TOOLS)
        assert parser.message == Message("assistant", text), odd
        assert len(parser.invalid_calls) == 1
