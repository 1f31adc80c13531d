"""Two LlamaIndex agents that share one tool group: a handoff costs its own text, not a new prompt.

    python examples/llamaindex_workflow.py MODEL

MODEL is a Hugging Face id or a folder of a tool-calling chat model. Needs `pip install llama-index-llms-agentcache`.
"""

from __future__ import annotations

import asyncio
import sys

from llama_index.core.agent.workflow import AgentOutput, FunctionAgent
from llama_index.llms.agentcache import AgentCacheLLM, AppendOnlyMemory, SharedAgentWorkflow


def find_berth(length_m: int) -> str:
    """A free berth for a ship of this length."""
    return "north quay 3" if length_m <= 40 else "none"


def fee(berth: str, nights: int) -> str:
    """What a berth costs."""
    return f"{berth}: {nights * 18} crowns"


async def main(llm: AgentCacheLLM) -> None:
    harbour = FunctionAgent(
        name="harbour", description="Finds berths.", tools=[find_berth], llm=llm, system_prompt="Find a berth, then hand off to the office."
    )
    office = FunctionAgent(name="office", description="Knows fees.", tools=[fee], llm=llm, system_prompt="Tell ships what they owe.")
    workflow = SharedAgentWorkflow([harbour, office], root_agent="harbour", system_prompt="You serve a small harbour. Be brief.")
    handler = workflow.run("A berth for 32 metres and two nights, please, and what does it cost?", memory=AppendOnlyMemory())
    async for event in handler.stream_events():
        if isinstance(event, AgentOutput) and event.raw and "usage" in event.raw:
            usage = event.raw["usage"]
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            print(f"{event.current_agent_name}: {usage['prompt_tokens']} prompt tokens, {cached} of them cached")
    print(await handler)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    with AgentCacheLLM(model=sys.argv[1]) as model:
        asyncio.run(main(model))
