"""A LlamaIndex Context that is saved and goes on elsewhere: its conversation is a session of the engine, found again as warm as it was.

    python examples/llamaindex_sessions.py MODEL

MODEL is a Hugging Face id or a folder of a tool-calling chat model. Needs `pip install llama-index-llms-agentcache`.
"""

from __future__ import annotations

import asyncio
import json
import sys

from llama_index.core.agent.workflow import AgentOutput, FunctionAgent
from llama_index.core.workflow import Context, JsonSerializer
from llama_index.llms.agentcache import AgentCacheLLM, AppendOnlyMemory

SYSTEM = "You keep the log of a lighthouse. Use the tools; never invent a ship."


def last_ship() -> str:
    """The ship that passed last."""
    return "Aurora, with salt, at 12:40"


def keeper(llm: AgentCacheLLM) -> FunctionAgent:
    return FunctionAgent(name="keeper", tools=[last_ship], llm=llm, system_prompt=SYSTEM)


async def ask(agent: FunctionAgent, ctx: Context, question: str, memory: AppendOnlyMemory | None = None) -> None:
    """One run of the agent, and what each prompt was to the session of its Context."""
    handler = agent.run(question, ctx=ctx, memory=memory)
    async for event in handler.stream_events():
        if isinstance(event, AgentOutput) and event.raw:
            receipt = event.raw["receipt"]
            print(f"  {receipt.get('resumed', 'new')}: {receipt['cached_tokens']} tokens cached")
    print(f"{question} {await handler}")


async def main(llm: AgentCacheLLM) -> None:
    agent = keeper(llm)
    ctx = Context(agent)
    await ask(agent, ctx, "Which ship passed last?", AppendOnlyMemory.from_defaults(llm=llm))
    saved = json.dumps(ctx.to_dict(serializer=JsonSerializer()))  # a file, a database: it has the session's name

    agent = keeper(llm)  # in another process, or after a reboot
    await ask(agent, Context.from_dict(agent, json.loads(saved), serializer=JsonSerializer()), "When was that?")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    with AgentCacheLLM(model=sys.argv[1]) as model:
        asyncio.run(main(model))
