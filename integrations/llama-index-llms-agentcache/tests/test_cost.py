"""What the translation itself costs, apart from the engine: milliseconds per step, fractions of one per piece."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import pytest
from cases import call, system
from llama_index.core.base.llms.types import ChatMessage, ToolCallBlock
from llama_index.core.tools import FunctionTool
from llama_index.llms.agentcache.answer import Answer

pytestmark = pytest.mark.slow
Make = Callable[..., Any]


def _milliseconds(what: Callable[[], Any], times: int = 9) -> float:
    took = []
    for _ in range(times):
        start = time.perf_counter()
        what()
        took.append((time.perf_counter() - start) * 1e3)
    return statistics.median(took)


def _long() -> list[ChatMessage]:
    """A conversation of about 3,000 tokens: forty calls and their results."""
    turns = [system("You keep the light. " * 40), ChatMessage(role="user", content="Watch the tide. " * 20)]
    for number in range(40):
        asked = ToolCallBlock(tool_call_id=f"c{number}", tool_name="tool_1", tool_kwargs={"harbour": f"Port {number}"})
        turns.append(ChatMessage(role="assistant", blocks=[asked]))
        turns.append(ChatMessage(role="tool", content=f"high water {number} " * 15, additional_kwargs={"tool_call_id": f"c{number}"}))
    return turns


def _tool(number: int) -> FunctionTool:
    def run(harbour: str, days: int = 1) -> str:
        return harbour

    return FunctionTool.from_defaults(run, name=f"tool_{number}", description=f"Tool number {number}. " * 10)


def test_a_step_with_fifty_tools(llm: Make) -> None:
    model, tools, turns = llm(*["x"] * 20), [_tool(number) for number in range(50)], _long()

    def translate() -> Any:
        given = model._prepare_chat_with_tools(tools, chat_history=turns)
        return model._ask(given.pop("messages"), given)

    translate()
    assert _milliseconds(translate) < 5.0


def test_a_piece_of_a_stream() -> None:
    pieces = ["word "] * 1000

    def stream() -> None:
        answer = Answer()
        for piece in pieces:
            answer.feed("text", piece)

    assert _milliseconds(stream, 3) / len(pieces) < 0.3


def test_first_token_of_a_step_is_the_engines_own(llm: Make) -> None:
    """Through chat_with_tools against the engine asked directly, in turns: a longer prefix and a new tail each time."""
    tools, turns = [_tool(number) for number in range(20)], _long()[:22]
    model = llm(*[call("tool_1", harbour="A")] * 40)
    ours, engines = [], []
    for number in range(12):
        asked = [*turns, ChatMessage(role="user", content=f"And now, number {number}? " * 10)]
        start = time.perf_counter()
        model.chat_with_tools(tools, chat_history=asked)
        ours.append((time.perf_counter() - start) * 1e3)
        receipt = model.receipts[-1]
        engines.append(receipt.ttft_ms + receipt.decode_ms)
    assert statistics.median(ours) < 1.05 * statistics.median(engines) + 5.0
