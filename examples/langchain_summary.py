"""A long conversation that is summarised on the way: the system prompt and the tools stay warm, and only the summary's step pays.

    python examples/langchain_summary.py MODEL

MODEL is a Hugging Face id or a folder of a chat model.
"""

from __future__ import annotations

import sys

from langchain.agents import create_agent
from langchain.agents.middleware import SummarizationMiddleware
from langchain_agentcache import AgentCacheMiddleware, ChatAgentCache
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver

SYSTEM = "You are the keeper of a lighthouse. Write down wind, tide and every ship that passes, and answer in one sentence. " * 3
QUESTIONS = ["Which ships passed?", "Did any turn back?", "How was the wind?", "And the tide?", "What will you write into the log?"]


@tool
def log(text: str) -> str:
    """Write a text into the log."""
    return "written"


def main(model: str) -> None:
    chat = ChatAgentCache(model=model, max_tokens=32)
    # few and large summaries: each one moves everything behind the tools. AgentCacheMiddleware comes last.
    shorten = SummarizationMiddleware(chat, trigger=("messages", 6), keep=("messages", 2))
    agent = create_agent(
        chat,
        [log],
        system_prompt=SYSTEM,
        middleware=[shorten, AgentCacheMiddleware(on_change="ignore")],
        checkpointer=InMemorySaver(),
    )
    for question in QUESTIONS:
        state = agent.invoke({"messages": [("user", question)]}, {"configurable": {"thread_id": "1"}})
        used = state["messages"][-1].usage_metadata
        size, read = used["input_tokens"], used["input_token_details"]["cache_read"]
        print(f"{len(state['messages'])} messages, {size} prompt tokens, {read} cached: {question}")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main(sys.argv[1])
