"""Messages and tools: what is refused, with which index, and what one canonical form means."""

from __future__ import annotations

from enum import Enum
from typing import Any

import pytest

from agentcache.errors import MessageError, ToolSchemaError
from agentcache.layout.canonical import Canon
from agentcache.layout.memory import chain
from agentcache.layout.plain import plain_messages
from agentcache.layout.schemas import canonical_tools, order_tools, plain_tools, tool_name
from agentcache.types import Message, Tool, ToolCall
from tests.chat_templates import call, tool

USER = {"role": "user", "content": "hi"}
CALLS = {"role": "assistant", "content": None, "tool_calls": [call("f", "{}", "one"), call("g", '{"x": 1}', "two")]}
ONE = {"role": "tool", "tool_call_id": "one", "content": "1"}
TWO = {"role": "tool", "tool_call_id": "two", "content": "2"}


class Colour(str, Enum):
    RED = "red"


class Size(int, Enum):
    ONE = 1


def broken(text: str) -> str:
    return text.replace("<X>", "<-X>")


def canonical(messages: list[Any]) -> tuple[list[dict[str, Any]], list[str], bool]:
    turns, notes, renamed = Canon(broken, broken).messages(messages, "default")
    return [turn.data for turn in turns], notes, renamed


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "empty"),
        ({"role": "user"}, "must be a list"),
        ([USER, 7], r"messages\[1\]=7"),
        ([{"role": "bot", "content": "x"}], r"messages\[0\]: role='bot'"),
        ([{"content": "x"}], "role=None"),
        ([{"role": "developer", "content": "x"}], "use 'system'"),
        ([USER, {"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}], r"messages\[1\]: content part .*image_url"),
        ([{"role": "user", "content": 3}], "content=3 is not text"),
        ([ONE], r"messages\[0\]: tool result .*'one' answers no open call"),
        ([USER, CALLS, {**ONE, "tool_call_id": "three"}], r"messages\[2\].*'three'.*\['one', 'two'\]"),
        ([USER, CALLS, ONE, ONE], r"messages\[3\].*'one'"),
        ([{"role": "user", "content": "x", "tool_calls": [call("f", {})]}], "only an assistant"),
        ([{"role": "assistant", "tool_calls": [call("f", "[1]")]}], r"tool_calls\[0\] 'f': arguments=\[1\] is not a JSON object"),
        ([{"role": "assistant", "tool_calls": [call("f", "{oops")]}], "is not JSON"),
        ([{"role": "assistant", "tool_calls": [call("f", 5)]}], "arguments=5"),
        ([{"role": "assistant", "tool_calls": [{"id": "x"}]}], "needs 'function'"),
        ([{"role": "assistant", "tool_calls": [call("", {})]}], "not a function name"),
        ([{"role": "assistant", "tool_calls": "f()"}], "not a list of calls"),
    ],
)
def test_refused_messages(messages: Any, words: str) -> None:
    for refuse in (plain_messages, canonical):
        with pytest.raises(MessageError, match=words):
            refuse(messages)


def test_messages_and_dicts_mean_the_same() -> None:
    dicts = [
        USER,
        {"role": "assistant", "content": "", "reasoning": "hm", "tool_calls": [call("f", '{"a": [1]}', "k")]},
        {**ONE, "tool_call_id": "k"},
    ]
    typed = [
        Message("user", "hi"),
        Message("assistant", "", (ToolCall("f", {"a": [1]}, "k"),), reasoning="hm"),
        Message("tool", "1", tool_call_id="k"),
    ]
    assert canonical(dicts)[0] == canonical(typed)[0]
    assert canonical(dicts)[0][1] == {
        "role": "assistant",
        "content": "",
        "reasoning_content": "hm",
        "tool_calls": [{"id": "call00001", "type": "function", "function": {"name": "f", "arguments": {"a": [1]}}}],
    }


def test_text_parts_are_joined() -> None:
    data, notes, _ = canonical([{"role": "user", "content": [{"type": "text", "text": "a"}, "b"]}])
    assert data == [{"role": "user", "content": "ab"}]
    assert notes == ["message 0: content parts joined into one text"]


def test_calls_in_another_form_are_noted() -> None:
    called = {"id": "one", "type": "function", "function": {"arguments": "{}", "name": "f"}}  # as openai-node and others write it
    data, notes, _ = canonical([USER, {"role": "assistant", "content": "", "tool_calls": [called]}])
    assert list(data[1]["tool_calls"][0]["function"]) == ["name", "arguments"]
    assert notes == ["tool calls rewritten as function{name, arguments}"]


def test_leading_system_messages_become_one() -> None:
    data, notes, _ = canonical([Message("system", "a"), Message("system", "b"), Message("user", "c"), Message("system", "d")])
    assert [(m["role"], m["content"]) for m in data] == [("system", "a\n\nb"), ("user", "c"), ("system", "d")]
    assert notes == ["2 leading system messages merged into one"]


def test_results_follow_their_calls() -> None:
    data, notes, renamed = canonical([USER, CALLS, TWO, ONE])
    assert [(m["tool_call_id"], m["content"]) for m in data[2:]] == [("call00001", "1"), ("call00002", "2")]
    assert "messages 2 to 3: tool results put in the order of their calls" in notes
    assert renamed
    assert canonical([USER, CALLS, ONE, TWO])[0] == data


def test_results_without_ids_are_paired_by_order() -> None:
    calls = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"function": {"name": "f", "arguments": {}}}, {"function": {"name": "g", "arguments": ""}}],
    }
    data, _, _ = canonical([USER, calls, {"role": "tool", "content": "1"}, {"role": "tool", "content": "2"}])
    assert [m["tool_call_id"] for m in data[2:]] == ["call00001", "call00002"]


def test_results_with_ids_that_are_numbers_follow_their_calls() -> None:
    calls = {**CALLS, "tool_calls": [call("f", "{}", 7), call("g", "{}", 8)]}
    data, _, _ = canonical([USER, calls, {**TWO, "tool_call_id": 8}, {**ONE, "tool_call_id": 7}])
    assert [(m["tool_call_id"], m["content"]) for m in data[2:]] == [("call00001", "1"), ("call00002", "2")]


def test_members_of_an_enum_are_their_values() -> None:
    calls = {"role": "assistant", "content": Colour.RED, "tool_calls": [call(Colour.RED, {Colour.RED: [Colour.RED, Size.ONE]}, "one")]}
    data, _, _ = canonical([USER, calls, {**ONE, "name": Colour.RED}])
    tools, _ = canonical_tools(plain_tools([tool("f", Colour.RED)]), str)
    shown = repr([data, tools])
    assert "<" not in shown
    assert "Colour" not in shown
    assert data[1]["tool_calls"][0]["function"] == {"name": "red", "arguments": {"red": ["red", 1]}}


def test_call_ids_count_through_the_conversation() -> None:
    data, _, _ = canonical([USER, CALLS, ONE, TWO, CALLS, TWO])
    assert [c["id"] for c in data[4]["tool_calls"]] == ["call00003", "call00004"]
    assert data[5]["tool_call_id"] == "call00004"
    assert all(len(c["id"]) == 9 and c["id"].isalnum() for c in data[4]["tool_calls"])


def test_every_text_is_neutralised() -> None:
    messages = [
        {"role": "system", "content": "s<X>"},
        {"role": "user", "content": "u<X>"},
        {"role": "assistant", "content": "a<X>", "reasoning_content": "r<X>", "tool_calls": [call("f", {"k<X>": ["v<X>"]}, "one")]},
        {"role": "tool", "tool_call_id": "one", "name": "n<X>", "content": "t<X>"},
    ]
    data, notes, _ = canonical(messages)
    assert "<X>" not in repr(data)
    assert repr(data).count("<-X>") == 8
    assert notes == [f"message {n}: text that spells a special token was neutralised" for n in range(4)]


def test_a_changed_message_is_worked_out_again() -> None:
    canon = Canon(str, str)
    message = {"role": "assistant", "content": "", "tool_calls": [call("f", {"a": 1})]}
    first = canon.messages([USER, message], "default")[0]
    message["tool_calls"][0]["function"]["arguments"]["a"] = 2
    second = canon.messages([USER, message], "default")[0]
    assert first[1].data["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    assert second[1].data["tool_calls"][0]["function"]["arguments"] == {"a": 2}


def test_keys_tell_histories_apart() -> None:
    canon = Canon(str, str)

    def keys(*messages: Any, root: bytes = b"") -> bytes:
        return chain(root, canon.messages(list(messages), "default")[0])[-1]

    answer = {"role": "assistant", "content": "a", "tool_calls": [call("f", '{"a": 1, "b": 2}', "x")]}
    same = Message("assistant", "a", (ToolCall("f", {"b": 2, "a": 1}, "other id"),))
    assert keys(USER, answer) == keys(USER, same)
    others = [
        keys(answer),
        keys(USER),
        keys(USER, answer, root=b"n"),
        keys(USER, {**answer, "content": "b"}),
        keys(USER, {**answer, "tool_calls": [call("f", '{"a": 1, "b": 3}')]}),
        keys(USER, {**answer, "tool_calls": [call("g", '{"a": 1, "b": 2}')]}),
        keys(USER, {**answer, "reasoning": "r"}),
        keys({"role": "system", "content": "hi"}, answer),
    ]
    assert len({*others, keys(USER, answer)}) == len(others) + 1


@pytest.mark.parametrize(
    ("tools", "words"),
    [
        ("f", "must be a list"),
        ([tool("f"), 3], r"tools\[1\]=3"),
        ([{"type": "function"}], r"tools\[0\].*'name'"),
        ([{"name": ""}], "'name'"),
        ([{"name": "f", "description": 3}], "description=3"),
        ([{"name": "f", "parameters": []}], r"parameters=\[\]"),
        ([{"name": "f", "parameters": {"type": "string"}}], "type object"),
        ([tool("f"), tool("g"), tool("f")], r"tools\[2\]: name='f' is already used by tools\[0\]"),
    ],
)
def test_refused_tools(tools: Any, words: str) -> None:
    with pytest.raises(ToolSchemaError, match=words):
        plain_tools(tools)


def test_tools_are_canonical_by_schema() -> None:
    given = {"function": {"parameters": {"z": 1, "type": "object", "a": 2}, "strict": True, "name": "f"}, "type": "function"}
    out, notes = canonical_tools(plain_tools([given, {"name": "g"}]), str)
    assert list(out[0]["function"]) == ["name", "description", "parameters"]
    assert list(out[0]["function"]["parameters"]) == ["z", "type", "a"], "not alphabetical"
    assert out[1] == canonical_tools(plain_tools([Tool("g")]), str)[0][0]
    assert notes == ["tools rewritten as {type, function{name, description, parameters}}"]
    assert canonical_tools(plain_tools([tool("f")]), str) == ([tool("f")], [])


@pytest.mark.parametrize(
    ("order", "expected"),
    [("given", "cabd"), ("sorted", "abcd"), ("sticky", "bcad")],
)
def test_tool_order(order: Any, expected: str) -> None:
    tools = plain_tools([tool(name) for name in "cabd"])
    assert "".join(map(tool_name, order_tools(tools, order, ["b", "gone", "c"]))) == expected
