"""Replies read by the response template of their tokenizer: as transformers reads them, piece by piece as well, and nothing is lost."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentcache import Engine
from agentcache.answer.parser import AnswerParser
from agentcache.answer.response_template import template_of
from agentcache.types import Message, ToolCall
from tests.answer.deltas import message_of, partial_json, spoken, taken
from tests.answer.response_templates import ANCHOR, CHANNEL, CHANNELS, OBJECT, TAGGED, TAGS, tokenizer

LIST: dict[str, Any] = {
    "start_anchor": ANCHOR,
    "fields": {
        "tool_plan": {"open": "<|START_PLAN|>", "close": "<|END_PLAN|>"},
        "content": {"open": "<|START_RESPONSE|>", "close": "<|END_RESPONSE|>"},
        "tool_calls": {
            "open": "<|START_ACTION|>",
            "close": "<|END_ACTION|>",
            "content": "json",
            "transform_each": True,
            "transform": {"type": "function", "function": {"name": "{tool_name}", "arguments": "{parameters}"}},
        },
    },
}
NUMBERED = {
    "type": "function",
    "function": {
        "name": "tide",
        "parameters": {"type": "object", "properties": {"days": {"type": "integer"}, "harbour": {"type": "string"}}},
    },
}
CALL = '<tool_call>\n{"name": "tide", "arguments": {"harbour": "a </tool \\" b", "days": [1, {"x": "]}"}]}}\n</tool_call>'
LISTED = '<|START_ACTION|>[{"tool_name": "tide", "parameters": {"days": 3}}, {"tool_name": "wind", "parameters": {}}]<|END_ACTION|>'
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "text": (OBJECT, "  The tide turns < at noon. "),
    "nothing": (OBJECT, ""),
    "a call": (OBJECT, CALL),
    "thought, text, calls": (OBJECT, f"<think>\nShould I <tool_call> now?\n</think>\n\nYes.\n{CALL}\n{CALL}"),
    "other order": (OBJECT, '<tool_call>{"arguments": {"harbour": "Averil"}, "name": "tide"}</tool_call>'),
    "a thought that never ends": (OBJECT, "<think>\nnever ends"),
    "tags": (TAGS, f"<think>Hm.</think>\n{TAGGED}\n{TAGGED}"),
    "channels": (CHANNELS, f"<|channel|>analysis<|message|>One.<|end|><|channel|>analysis<|message|>Two.<|end|>{CHANNEL}"),
    "an answer behind channels": (CHANNELS, "<|channel|>analysis<|message|>One.<|end|><|start|>x<|channel|>final<|message|>At noon."),
    "a list": (LIST, LISTED),
}


def stream(template: dict[str, Any], begun: str = "") -> AnswerParser:
    read = template_of(tokenizer(template))
    assert read is not None
    start = read.begun(f"system{ANCHOR}earlier{ANCHOR}{begun}")
    assert start == begun
    return AnswerParser(read, start, tools=[NUMBERED], names=("tide", "wind"))


def theirs(template: dict[str, Any], text: str) -> Message:
    """The message as transformers reads it."""
    tools = None if template is OBJECT else [NUMBERED]
    said = tokenizer(template).parse_response(text, prefix=ANCHOR, tools=tools)
    calls = tuple(ToolCall(each["function"]["name"], each["function"]["arguments"]) for each in said.get("tool_calls", ()))
    return Message("assistant", said.get("content", ""), calls, reasoning=said.get("reasoning_content", said.get("thinking")))


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=25, deadline=None)
@given(cuts=st.lists(st.integers(0, 300), max_size=40))
def test_pieces_and_the_whole_say_what_transformers_reads(name: str, cuts: list[int]) -> None:
    template, text = CASES[name]
    for places in ([], cuts, list(range(len(text)))):
        reader = stream(template)
        deltas = taken(reader, text, places)
        assert reader.message == theirs(template, text)
        assert message_of(deltas) == reader.message


MARKS = {
    "object": (
        OBJECT,
        ("<think>", "</think>", "<tool_call>", "</tool_call>", "<|im_end|>", '{"name": "tide"', CALL),
    ),
    "tags": (
        TAGS,
        ("<think>", "</think>", "<tool_call>", "<function=tide>", "<parameter=days>", "</parameter>", "</tool_call>", TAGGED),
    ),
    "channels": (CHANNELS, ("<|channel|>analysis<|message|>", "<|channel|>final<|message|>", "<|end|>", "<|call|>", CHANNEL)),
    "list": (
        LIST,
        ("<|START_PLAN|>", "<|END_PLAN|>", "<|START_RESPONSE|>", "<|START_ACTION|>", "<|END_ACTION|>", LISTED),
    ),
}


@pytest.mark.parametrize("name", MARKS)
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_any_pieces_of_any_text_say_what_the_whole_says(name: str, data: st.DataObject) -> None:
    template, marks = MARKS[name]
    text = "".join(data.draw(st.lists(st.sampled_from([*marks, "{", "}", "[", "]", '"', " ", "\n", "tide"]), max_size=8)))
    cut, read = data.draw(st.sampled_from(["", "at max_tokens=9: raise it"])), []
    for places in ([], data.draw(st.lists(st.integers(0, 300), max_size=30)), list(range(len(text)))):
        reader = stream(template)
        deltas = taken(reader, text, places, cut=cut)
        read.append((reader.message, reader.invalid_calls))
        if not reader.invalid_calls:
            assert message_of(deltas) == reader.message
    assert read[0] == read[1] == read[2]


def test_untyped_arguments_take_the_types_of_their_schema() -> None:
    reader = stream(TAGS)
    taken(reader, TAGGED)
    assert reader.message.tool_calls == (ToolCall("tide", {"harbour": "7", "days": 3}),)


def test_what_the_prompt_began_is_not_told_again() -> None:
    reader = stream(OBJECT, "<think>\n")
    deltas = taken(reader, "so it is</think>\n\nyes", range(30))
    assert reader.message == message_of(deltas) == Message("assistant", "yes", reasoning="so it is")


def test_arguments_of_one_object_come_while_they_are_written() -> None:
    reader = stream(OBJECT)
    reader.push('<tool_call>\n{"name": "tide", "arguments": {"harbour": "a long')
    assert [(d.kind, d.text) for d in reader.push(" way")] == [("arguments", " way")]


def test_arguments_after_a_naming_mark_come_while_they_are_written() -> None:
    reader = stream(CHANNELS)
    assert [d.text for d in reader.push(CHANNEL[:-3])] == ["tide", '{"harbour": "Averi']
    assert [(d.kind, d.text) for d in reader.push('l"}')] == [("arguments", 'l"}')]


def test_text_waits_no_longer_than_it_must() -> None:
    reader = stream(OBJECT)
    assert [d.text for d in reader.push("Hello <tool")] == ["Hello"]
    assert [d.text for d in reader.push("s> there")] == [" <tools> there"]


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (OBJECT, "Well: <tool_call>\n{broken</tool_call> so."),
        (OBJECT, '<tool_call>{"name": 3, "arguments": {}}</tool_call>'),
        (OBJECT, '<tool_call>{"name": "tide", "arguments": [1]}</tool_call>'),
        (LIST, '<|START_ACTION|>[{"tool_name": "tide"}]<|END_ACTION|>'),
        (LIST, "<|START_ACTION|>[3]<|END_ACTION|>"),
        (CHANNELS, "No channel at all."),
        (TAGS, "Text that this template has no place for."),
    ],
)
def test_malformed_calls_and_text_without_a_place_are_text(template: dict[str, Any], text: str) -> None:
    for places in ((), range(len(text))):
        reader = stream(template)
        deltas = taken(reader, text, places)
        assert reader.message == Message("assistant", text)
        assert "".join(d.text for d in deltas) == text


@pytest.mark.parametrize(("template", "text"), [(OBJECT, CALL), (TAGS, TAGGED), (CHANNELS, CHANNEL)], ids=["object", "tags", "channels"])
def test_half_a_call_is_none(template: dict[str, Any], text: str) -> None:
    for stop in range(1, len(text) - 1, 3):
        reader = stream(template)
        deltas = taken(reader, text[:stop], range(stop), cut="at max_tokens=1")
        said = reader.message
        assert said.tool_calls or said.content == text[:stop].strip(), "nothing is lost"
        if template is TAGS or stop < text.rindex("}"):
            assert not said.tool_calls
        if any(d.kind == "call" for d in deltas) and not said.tool_calls:
            assert partial_json("".join(d.text for d in deltas if d.kind in ("arguments", "cut"))) is None


def test_the_engine_reads_by_the_template_and_names_broken_ones(tiny: Any) -> None:
    answers = {}
    for name, template in {"tags": TAGS, "none": None, "broken": {"fields": {}}}.items():
        with Engine(tiny("qwen3"), tokenizer(template), store=None) as engine:
            asked = engine.stream([{"role": "user", "content": "Tide?"}], [NUMBERED], sampling=spoken(TAGGED, engine.tokenizer))
            deltas = list(asked.deltas())
            answers[name] = asked.completion
            assert message_of(deltas).content == asked.completion.message.content
            assert [d.id for d in deltas if d.kind == "call"] == [call.id for call in asked.completion.message.tool_calls]
    (call,) = answers["tags"].message.tool_calls
    assert (call.name, call.arguments) == ("tide", {"harbour": "7", "days": 3})
    assert answers["tags"].finish_reason == "tool_calls"
    assert answers["none"].message.content == answers["broken"].message.content == TAGGED
    assert any("response template is broken" in note for note in answers["broken"].receipt.notes)


def test_a_prompt_that_begins_no_answer_bypasses_the_template(tiny: Any) -> None:
    with Engine(tiny("qwen3"), tokenizer(TAGS), store=None) as engine:
        said = engine.generate("Once upon a time", sampling=spoken(TAGGED, engine.tokenizer))
    assert said.message.content == TAGGED
