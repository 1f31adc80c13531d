"""What the adapter and the agent add to the engine's own time, per step and per streamed chunk: shares, since times differ by machine.

A step is a hit: 3k tokens and 50 tools known, a few new tokens. The small model makes the shares larger than any real one would.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_agentcache import AgentCacheMiddleware, ChatAgentCache
from langchain_agentcache._messages import converted
from langchain_agentcache._output import chunk_of
from langchain_agentcache._tools import formatted, own_tools
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_core.tools import StructuredTool

from agentcache import Sampling

REPEATS = 11
SYSTEM = "You keep a lighthouse. "


def _tool(number: int) -> StructuredTool:
    def look(place: str, day: int = 0, unit: str = "C") -> str:
        return ""

    return StructuredTool.from_function(look, name=f"look_{number}", description=f"Looks after matter {number} of the harbour, day by day.")


TOOLS = [_tool(number) for number in range(50)]
MESSAGES = [SystemMessage(SYSTEM), HumanMessage("Begin."), AIMessage("Aye."), HumanMessage("And now?")]


def medians(*ways: Callable[[], Any]) -> list[float]:
    """Median milliseconds of each way, measured in turn, so that what disturbs one disturbs all."""
    for way in ways:
        way()
    took: list[list[float]] = [[] for _ in ways]
    for _ in range(REPEATS):
        for times, way in zip(took, ways, strict=True):
            began = time.perf_counter()
            way()
            times.append((time.perf_counter() - began) * 1e3)
    return [statistics.median(times) for times in took]


@pytest.mark.slow
def test_what_a_step_costs_beside_the_engine(model_folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    chat = ChatAgentCache(model=model_folder, memory_bytes=256 << 20, max_tokens=1)
    engine, said, tools = chat._engine(), converted(MESSAGES), own_tools(formatted(TOOLS))
    agent = create_agent(chat, TOOLS, system_prompt=SYSTEM, middleware=[AgentCacheMiddleware()])
    bare, adapted, through = medians(
        lambda: engine.generate(said, tools, sampling=Sampling(max_tokens=1)),
        lambda: chat.bind_tools(TOOLS).invoke(MESSAGES),
        lambda: agent.invoke({"messages": MESSAGES[1:]}),
    )
    prompt = engine.generate(said, tools, sampling=Sampling(max_tokens=1)).receipt
    figures = {"prompt_tokens": prompt.prompt_tokens, "engine_ms": bare, "adapter_ms": adapted - bare, "agent_ms": through - bare}
    with capsys.disabled():
        print(json.dumps({name: round(value, 2) for name, value in figures.items()}))
    assert prompt.prompt_tokens > 3000
    assert prompt.computed_tokens == 1
    assert adapted < 1.5 * bare
    assert through < 2.5 * bare


@pytest.mark.slow
def test_what_a_chunk_costs_beside_the_engine(model_folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    tokens = 150
    chat = ChatAgentCache(model=model_folder, memory_bytes=256 << 20, max_tokens=tokens)
    engine, said = chat._engine(), converted(MESSAGES[:2])
    pieces = list(engine.stream(said, sampling=Sampling(max_tokens=tokens)).deltas())
    bare, adapted, translating = medians(
        lambda: list(engine.stream(said, sampling=Sampling(max_tokens=tokens)).deltas()),
        lambda: list(chat.stream(MESSAGES[:2])),
        lambda: [chunk_of(piece) for piece in pieces],
    )
    each = {"engine_ms": bare / len(pieces), "stream_adds_ms": (adapted - bare) / len(pieces), "translating_ms": translating / len(pieces)}
    with capsys.disabled():
        print(json.dumps({name: round(value, 4) for name, value in each.items()}))
    assert adapted < 1.5 * bare
    assert translating < 0.2 * bare
