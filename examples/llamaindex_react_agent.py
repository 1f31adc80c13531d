"""A LlamaIndex ReActAgent, in text, whose prompt only grows at its end: from step to step and from question to question.

    python examples/llamaindex_react_agent.py MODEL

MODEL is any chat model; it needs no tool calling of its own. Needs `pip install llama-index-llms-agentcache`.
"""

from __future__ import annotations

import asyncio
import sys

from llama_index.core.agent.workflow import AgentOutput
from llama_index.llms.agentcache import AgentCacheLLM, AppendOnlyMemory, StableReActAgent


def lamp(name: str) -> str:
    """How a lighthouse shows its light."""
    return {"Averil Head": "one white flash every 10 seconds", "Sorrel Mole": "fixed red"}.get(name, "no such light")


async def main(llm: AgentCacheLLM) -> None:
    agent = StableReActAgent(tools=[lamp], llm=llm, system_prompt="You know the lights of a coast.")
    memory = AppendOnlyMemory.from_defaults(llm=llm)
    for question in ("How does Averil Head show?", "And Sorrel Mole?"):
        handler = agent.run(question, memory=memory)
        async for event in handler.stream_events():
            if isinstance(event, AgentOutput) and event.raw:
                print(f"step: {event.response.content!r}\n      {event.raw['usage']['prompt_tokens_details']}")
        print(f"{question} {await handler}")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    with AgentCacheLLM(model=sys.argv[1]) as model:
        asyncio.run(main(model))
