"""Two LangChain agents of one process with the same tools, at the same time: the tool group is computed once, their steps run together.

    python examples/langchain_two_agents.py MODEL

MODEL is a Hugging Face id or a folder of a tool-calling chat model.
"""

from __future__ import annotations

import asyncio
import sys

from langchain.agents import create_agent
from langchain_agentcache import AgentCacheMiddleware, ChatAgentCache
from langchain_core.messages import AIMessage
from langchain_core.tools import tool

SYSTEM = "You answer questions about the stock of a bicycle shop. Count before you answer."


@tool
def count(part: str, size: str = "any") -> str:
    """How many of a part are in stock."""
    return f"{len(part) * 3} {part} of size {size}."


@tool
def order(part: str, pieces: int) -> str:
    """Order more of a part."""
    return f"{pieces} {part} ordered."


async def main(model: str) -> None:
    chat = ChatAgentCache(model=model, max_tokens=48)
    tools = [count, order]
    warm = AgentCacheMiddleware(model=chat, system_prompt=SYSTEM, tools=tools)  # computed and pinned before the first step
    agents = [create_agent(chat, tools, system_prompt=SYSTEM, middleware=[warm], name=name) for name in ("workshop", "counter")]
    questions = ["How many tyres are left?", "Are there enough bells?"]
    asked = [agent.ainvoke({"messages": [("user", question)]}) for agent, question in zip(agents, questions)]
    for agent, state in zip(agents, await asyncio.gather(*asked)):
        for message in state["messages"]:
            if isinstance(message, AIMessage) and message.usage_metadata:
                used = message.usage_metadata
                print(f"{agent.name}: {used['input_tokens']} prompt tokens, {used['input_token_details']['cache_read']} cached")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    asyncio.run(main(sys.argv[1]))
