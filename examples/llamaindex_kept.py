"""What LlamaIndex's agents keep of their prompts from request to request, as they are and with this package's parts. Needs no model.

    python examples/llamaindex_kept.py

Each line replays the same recorded answers through the same engine, a small random model, and counts: *kept* is the share of a request's
prompt that is still the start of the next one (mean, and the lowest), *computed* the tokens that had to be run through the model.
Needs `pip install llama-index-llms-agentcache`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

from llama_index.core.agent.workflow import AgentWorkflow, FunctionAgent, ReActAgent
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.core.tools import FunctionTool
from llama_index.llms.agentcache import AppendOnlyMemory, ReplayLLM, SharedAgentWorkflow, StableReActAgent, answer_at_tail
from llama_index.llms.agentcache.replay import kept
from pydantic import BaseModel

from agentcache import Engine, toy

SYSTEM = "You keep the tide tables of a small coast and answer what ships ask. Use the tools and never guess a time. " * 3
VOCAB = 1024


class Answer(BaseModel):
    """High water."""

    harbour: str
    time: str


def tide(harbour: str) -> str:
    """When is high water in a harbour?"""
    return f"high water in {harbour} at 14:05"


def wind(harbour: str, hour: int) -> str:
    """The wind in a harbour at an hour of today."""
    return f"wind in {harbour} at {hour}: north, 4"


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def step(name: str, arguments: str) -> str:
    return f"Thought: I need a tool.\nAction: {name}\nAction Input: {arguments}\nObservation: it will say"


REACT = (
    step("tide", '{"harbour":"Averil"}'),
    step("wind", '{"harbour":"Averil","hour":3}'),
    "Thought: I can answer.\nAnswer: At 14:05, wind north.",
    step("tide", '{"harbour":"Sorrel"}'),
    "Thought: I can answer.\nAnswer: At 14:05 as well.",
)
HANDOFFS = (
    call("tide", harbour="Averil"),
    call("handoff", to_agent="pilot", reason="The wind is asked for."),
    call("wind", harbour="Averil", hour=3),
    call("handoff", to_agent="keeper", reason="The next tide is asked for."),
    call("tide", harbour="Sorrel"),
    "All is said.",
)


async def react(llm: ReplayLLM, ours: bool) -> None:
    llm.expect(*REACT)
    agent: Any = (StableReActAgent if ours else ReActAgent)(tools=[tide, wind], llm=llm, system_prompt=SYSTEM)
    memory = AppendOnlyMemory() if ours else ChatMemoryBuffer.from_defaults(token_limit=8000)
    for question in ("Tide and wind in Averil?", "And the tide in Sorrel?"):
        await agent.run(question, memory=memory)


async def handoffs(llm: ReplayLLM, ours: bool) -> None:
    llm.expect(*HANDOFFS)
    keeper = FunctionAgent(name="keeper", description="Knows tides.", tools=[tide], llm=llm, system_prompt=f"You are the keeper. {SYSTEM}")
    pilot = FunctionAgent(name="pilot", description="Knows winds.", tools=[wind], llm=llm, system_prompt=f"You are the pilot. {SYSTEM}")
    workflow = (SharedAgentWorkflow if ours else AgentWorkflow)([keeper, pilot], root_agent="keeper")
    await workflow.run("Tide, wind, and the next tide?", memory=AppendOnlyMemory())


async def output(llm: ReplayLLM, ours: bool) -> None:
    llm.expect(call("tide", harbour="Averil"), "At 14:05.", json.dumps({"harbour": "Averil", "time": "14:05"}))
    agent = FunctionAgent(tools=[tide, wind], llm=llm, system_prompt=SYSTEM)
    if ours:
        answer_at_tail(agent, Answer)
    else:
        agent.output_cls = Answer
    await agent.run("Tide?", memory=AppendOnlyMemory())


async def full_memory(llm: ReplayLLM, ours: bool) -> None:
    limit: dict[str, Any] = {"token_limit": 600, "tokenizer_fn": llm.count}
    memory: Any = AppendOnlyMemory.from_defaults(**limit) if ours else ChatMemoryBuffer.from_defaults(**limit)
    for turn in range(24):
        llm.expect("At 14:05.")
        memory.put(ChatMessage(role="user", content=f"Question {turn}: when is high water in harbour {turn}, and what of the wind there?"))
        memory.put((await llm.achat([ChatMessage(role="system", content=SYSTEM), *memory.get()])).message)


async def last_step(llm: ReplayLLM, ours: bool) -> None:
    llm.expect(call("tide", harbour="Averil"), call("tide", harbour="Sorrel"), "I could not say.")
    model = llm.with_superset([FunctionTool.from_defaults(one) for one in (tide, wind)]) if ours else llm
    agent = FunctionAgent(tools=[tide, wind], llm=model, system_prompt=SYSTEM, early_stopping_method="generate")
    await agent.run("Tide?", max_iterations=2)


CASES: dict[str, tuple[str, str, Callable[[ReplayLLM, bool], Awaitable[None]]]] = {
    "ReAct, two questions": ("ReActAgent", "StableReActAgent", react),
    "two handoffs": ("AgentWorkflow", "SharedAgentWorkflow", handoffs),
    "an object at the end": ("output_cls", "answer_at_tail", output),
    "a full memory, 24 turns": ("ChatMemoryBuffer", "AppendOnlyMemory", full_memory),
    "stopped early": ("without", "with_superset", last_step),
}


def main() -> dict[str, Any]:
    """Print the table and one JSON line; returns the figures."""
    figures: dict[str, Any] = {}
    with Engine(toy.model(VOCAB, layers=2, hidden=128), toy.tokenizer([SYSTEM, *REACT, *HANDOFFS], VOCAB), store=None) as engine:
        for case, (theirs, ours, run) in CASES.items():
            for name in (theirs, ours):
                llm = ReplayLLM(engine=engine, namespace=f"{case}: {name}")
                asyncio.run(_run(run, llm, name == ours))
                shares, computed = kept(llm.receipts), sum(one.computed_tokens for one in llm.receipts)
                figures[name] = {"mean": sum(shares) / len(shares), "lowest": min(shares), "computed": computed}
                print(f"{case:<24} {name:<20} kept {figures[name]['mean']:4.0%}, lowest {min(shares):4.0%}, computed {computed:>6,} tokens")
                llm.close()
    print(json.dumps(figures))
    return figures


async def _run(case: Callable[[ReplayLLM, bool], Awaitable[None]], llm: ReplayLLM, ours: bool) -> None:
    await case(llm, ours)


if __name__ == "__main__":
    main()
