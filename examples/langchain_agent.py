"""A LangChain agent on a local model, streamed: text and tool calls as they are written, and what each step paid.

    python examples/langchain_agent.py MODEL "When is high water in Port Averil tomorrow?"

MODEL is a Hugging Face id or a folder of a tool-calling chat model.
"""

from __future__ import annotations

import sys
import time

from langchain.agents import create_agent
from langchain_agentcache import AgentCacheMiddleware, ChatAgentCache
from langchain_core.messages import AIMessageChunk
from langchain_core.tools import tool

SYSTEM = "You are the harbour master's assistant. Use the tools; never guess a time."


@tool
def tide(harbour: str, day: int = 0) -> str:
    """High water in a harbour, `day` days from today."""
    return f"High water in {harbour} at {(3 + day) % 24}:12 and {(15 + day) % 24}:40."


@tool
def wind(harbour: str) -> str:
    """The wind in a harbour now."""
    return f"South-west, force 4 in {harbour}."


def main(model: str, question: str = "When is high water in Port Averil tomorrow?") -> None:
    chat = ChatAgentCache(model=model, max_tokens=128)
    clock = AgentCacheMiddleware(volatile=lambda state: time.strftime("It is %H:%M."))  # at the end: nothing is computed again for it
    agent = create_agent(chat, [tide, wind], system_prompt=SYSTEM, middleware=[clock])
    steps = 0
    for mode, part in agent.stream({"messages": [("user", question)]}, stream_mode=["messages", "custom"]):
        if mode == "custom":
            steps += 1
            receipt = part["agentcache.receipt"]
            print(f"\nstep {steps}: {receipt['prompt_tokens']} prompt tokens, {receipt['cached_tokens']} cached")
        elif isinstance(part[0], AIMessageChunk):
            calls = "".join(f"{call['name'] or ''}{call['args'] or ''}" for call in part[0].tool_call_chunks)
            print(part[0].text + calls, end="", flush=True)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main(*sys.argv[1:3])
