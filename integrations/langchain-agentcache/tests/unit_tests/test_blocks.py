"""Streamed answers under output_version="v1": LangChain's blocks, each with its own content."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import script
from harbour import log, tide
from langchain_agentcache import errors
from langchain_agentcache._messages import converted
from langchain_core.messages import AIMessage, AIMessageChunk, FunctionMessage, HumanMessage

SAID = "<think>\nThe tide.\n</think>\n\nI look now. " + script.call("tide", harbour="Averil") + "\n" + script.call("log", text="{")


def streamed(model: Any) -> AIMessage:
    joined: AIMessageChunk | None = None
    for piece in model.stream("Look!"):
        joined = piece if joined is None else joined + piece
    assert joined is not None
    return joined


async def streamed_async(model: Any) -> AIMessage:
    joined: AIMessageChunk | None = None
    async for piece in model.astream("Look!"):
        joined = piece if joined is None else joined + piece
    assert joined is not None
    return joined


def read(message: AIMessage) -> list[tuple[Any, ...]]:
    """(type, content) of each block."""
    found = {"text": ("text",), "reasoning": ("reasoning",), "tool_call": ("name", "args")}
    return [(block["type"], *(block[name] for name in found.get(block["type"], ()))) for block in message.content]


EXPECTED = [
    ("reasoning", "The tide."),
    ("text", "I look now."),
    ("tool_call", "tide", {"harbour": "Averil"}),
    ("tool_call", "log", {"text": "{"}),
]


@pytest.fixture
def model(chat: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    monkeypatch.setitem(script.LINES, "Look!", SAID)
    return lambda **options: chat(max_tokens=200, output_version="v1", **options).bind_tools([tide, log])


def test_blocks_of_a_stream(model: Callable[..., Any]) -> None:
    message = streamed(model())
    assert read(message) == EXPECTED
    assert [call["name"] for call in message.tool_calls] == ["tide", "log"]


async def test_blocks_of_an_async_stream(model: Callable[..., Any]) -> None:
    assert read(await streamed_async(model())) == EXPECTED


def test_blocks_of_invoke(model: Callable[..., Any]) -> None:
    assert read(model(streaming=True).invoke("Look!")) == EXPECTED
    assert read(model().invoke("Look!")) == EXPECTED


@pytest.mark.parametrize("said", ["I look now. ", "<think>\nSo.\n</think>\n\n", ""])
def test_a_call_is_no_part_of_what_stands_before_it(model: Callable[..., Any], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(script.LINES, "Look!", said + script.call("tide", harbour="Averil"))
    message = streamed(model())
    assert read(message)[-1] == ("tool_call", "tide", {"harbour": "Averil"})
    assert [block["type"] for block in message.content].count("tool_call") == 1


def test_without_blocks_calls_are_numbered_from_nought(chat: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(script.LINES, "Look!", SAID)
    pieces = list(chat(max_tokens=200).bind_tools([tide, log]).stream("Look!"))
    assert {chunk["index"] for piece in pieces for chunk in piece.tool_call_chunks} == {0, 1}


@pytest.mark.parametrize("kind", ["server_tool_result", "web_search_call", "mcp_tool_use", "web_search_tool_result", "redacted_thinking"])
def test_what_another_provider_did_for_its_answer_is_no_error(kind: str) -> None:
    said = AIMessage([{"type": kind, "id": "1"}, {"type": "text", "text": "At 3:12."}, {"type": "refusal", "refusal": " No more."}])
    assert converted([said])[0].content == "At 3:12. No more."


@pytest.mark.parametrize(
    "thought",
    [
        {"type": "thinking", "thinking": "The tide."},
        {"type": "thinking", "thinking": [{"type": "text", "text": "The tide."}]},
        {"type": "reasoning", "reasoning": "The tide."},
        {"type": "reasoning", "id": "1", "summary": [{"type": "summary_text", "text": "The "}, {"type": "summary_text", "text": "tide."}]},
        {"type": "reasoning_content", "reasoning_content": {"text": "The tide.", "signature": "1"}},
    ],
)
def test_a_thought_of_another_provider_is_shown_as_one(thought: dict[str, Any]) -> None:
    (said,) = converted([AIMessage([thought, {"type": "text", "text": "At 3:12."}])])
    assert (said.reasoning, said.content) == ("The tide.", "At 3:12.")
    assert converted([AIMessage([{"type": "reasoning", "summary": []}])])[0].reasoning is None


def test_a_document_in_plain_text_is_text() -> None:
    tides = {"type": "text-plain", "text": "High water at 3:12.", "mime_type": "text/plain"}
    assert converted([HumanMessage([{"type": "text", "text": "Read: "}, tides])])[0].content == "Read: High water at 3:12."
    for other in ({"type": "text-plain", "url": "https://example.com"}, {"type": "image", "url": "https://example.com"}):
        with pytest.raises(errors.ModelInvalidRequestError, match="reads text only"):
            converted([HumanMessage([other])])


def test_what_openais_first_form_says_is_shown(model: Callable[..., Any]) -> None:
    """As another class, such as a fallback's, leaves it in additional_kwargs."""
    called = AIMessage("", additional_kwargs={"function_call": {"name": "tide", "arguments": '{"harbour": "Averil"}'}})
    history = [HumanMessage("Tide?"), called, FunctionMessage("At 3:12.", name="tide"), HumanMessage("Look!")]
    assert model().invoke(history).tool_calls
    (call,) = converted(history)[1].tool_calls
    assert (call.name, call.arguments) == ("tide", {"harbour": "Averil"})
    assert converted([AIMessage("", additional_kwargs={"refusal": "I may not."})])[0].content == "I may not."
