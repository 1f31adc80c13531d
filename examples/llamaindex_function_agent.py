"""A LlamaIndex FunctionAgent on a local model: two questions in one conversation, and what each step of it had to compute.

    python examples/llamaindex_function_agent.py MODEL

MODEL is a Hugging Face id or a folder of a tool-calling chat model. Not `embedded`: it was taught other wordings, and repeats
itself within a call of this conversation up to `max_tokens`, which ends in NoToolCallError. llamaindex_react_agent.py suits it.
Needs `pip install llama-index-llms-agentcache`.
"""

from __future__ import annotations

import asyncio
import sys

from llama_index.core.agent.workflow import AgentOutput, AgentStream, FunctionAgent, ToolCallResult
from llama_index.llms.agentcache import AgentCacheLLM, AppendOnlyMemory

SYSTEM = "You keep the tide tables of a small coast. Use the tools; never guess a time."
HIGH_WATER = {"Port Averil": "14:05", "Sorrel Bay": "15:40"}


def high_water(harbour: str) -> str:
    """When is high water in a harbour today?"""
    return HIGH_WATER.get(harbour, f"there is no harbour {harbour!r}; there are {sorted(HIGH_WATER)}")


def minutes_between(first: str, second: str) -> int:
    """Minutes from one time of day (HH:MM) to another."""
    (h1, m1), (h2, m2) = (map(int, time.split(":")) for time in (first, second))
    return (h2 - h1) * 60 + m2 - m1


async def ask(agent: FunctionAgent, memory: AppendOnlyMemory, question: str) -> None:
    """One run of the agent: its words as they come, its calls, and a line for each step's account."""
    print(f"\n> {question}")
    handler = agent.run(question, memory=memory)
    async for event in handler.stream_events():
        if isinstance(event, AgentStream):
            print(event.delta, end="", flush=True)
        elif isinstance(event, ToolCallResult):
            print(f"{event.tool_name}({event.tool_kwargs}) = {event.tool_output}")
        elif isinstance(event, AgentOutput) and event.raw:
            usage = event.raw["usage"]
            print(f"\n[{usage['prompt_tokens']} prompt tokens, {usage['prompt_tokens_details']['cached_tokens']} of them cached]")
    await handler


async def main(llm: AgentCacheLLM) -> None:
    agent = FunctionAgent(tools=[high_water, minutes_between], llm=llm, system_prompt=SYSTEM)
    memory = AppendOnlyMemory.from_defaults(llm=llm)
    await ask(agent, memory, "When is high water in Port Averil and in Sorrel Bay?")
    await ask(agent, memory, "How many minutes lie between them?")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    with AgentCacheLLM(model=sys.argv[1]) as model:
        asyncio.run(main(model))
