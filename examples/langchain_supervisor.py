"""A supervisor that hands work over: other agents are its tools, all on one local model, each with a prefix of its own that stays warm.

    python examples/langchain_supervisor.py MODEL "Is it safe to sail from Port Averil?"

MODEL is a Hugging Face id or a folder of a tool-calling chat model.
"""

from __future__ import annotations

import sys

from langchain.agents import create_agent
from langchain_agentcache import AgentCacheMiddleware, ChatAgentCache
from langchain_core.callbacks import UsageMetadataCallbackHandler
from langchain_core.tools import tool


@tool
def wind(harbour: str) -> str:
    """The wind in a harbour now."""
    return f"South-west, force 4 in {harbour}."


@tool
def notices(harbour: str) -> str:
    """What seafarers must know about a harbour."""
    return f"A buoy is adrift before {harbour}."


def main(model: str, question: str = "Is it safe to sail from Port Averil?") -> None:
    chat = ChatAgentCache(model=model, max_tokens=64)

    def specialist(system: str, *tools: object) -> object:
        return create_agent(chat, list(tools), system_prompt=system, middleware=[AgentCacheMiddleware()])

    weather = specialist("You report the weather. Use the tool.", wind)
    safety = specialist("You report dangers. Use the tool.", notices)

    @tool
    def ask_weather(task: str) -> str:
        """Hand a question about the weather over to who knows it."""
        return str(weather.invoke({"messages": [("user", task)]})["messages"][-1].text)

    @tool
    def ask_safety(task: str) -> str:
        """Hand a question about dangers over to who knows them."""
        return str(safety.invoke({"messages": [("user", task)]})["messages"][-1].text)

    supervisor = specialist("You are the harbour master. Ask the others, then decide.", ask_weather, ask_safety)
    counted = UsageMetadataCallbackHandler()
    state = supervisor.invoke({"messages": [("user", question)]}, {"callbacks": [counted]})
    for message in state["messages"]:
        print(f"{message.type}: {message.text or [call['name'] for call in message.tool_calls]}")
    for used in counted.usage_metadata.values():
        print(f"all agents: {used['input_tokens']} prompt tokens, {used['input_token_details']['cache_read']} cached")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main(*sys.argv[1:3])
