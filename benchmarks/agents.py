"""Agents on the embedded model, run after run: does each of them end, and in what?

    python -m benchmarks.agents --runs 300

Each kind is an agent that once went round, or ended without its tool. A run is one question with values of its own; it ends in an answer of
the kind's form, in a typed error, or in a loop: more steps than LIMIT, where two would do. Ends with one JSON line, and 1 if one looped.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware, LLMToolSelectorMiddleware
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.errors import GraphRecursionError
from pydantic import BaseModel, Field

from agentcache.errors import AgentCacheError

from .integrations import integration

OURS = integration("langchain")
ChatAgentCache, AgentCacheMiddleware = OURS.ChatAgentCache, OURS.AgentCacheMiddleware

LIMIT = 24  # steps of a graph: ten calls and more
SYSTEM = "You are a helpful assistant."


class Invoice(BaseModel):
    """An invoice."""

    status: str = Field(max_length=20)
    amount: int = Field(ge=0, le=99999)


class Report(BaseModel):
    """A report, with no bound to its text."""

    answer: str
    done: bool


@tool
def get_invoice(invoice_id: str) -> dict[str, Any]:
    """Get an invoice."""
    return {"status": "open", "amount": 240}


@tool
def cancel_order(order_id: str) -> dict[str, Any]:
    """Cancel an order."""
    return {"status": "accepted"}


@tool
def get_badge(badge_id: str) -> dict[str, Any]:
    """Get a badge."""
    return {"owner": "Ada Blikun", "floor": 3}


TOOLS = [get_invoice, cancel_order, get_badge]


class LastTurn(AgentMiddleware[Any, Any, Any]):
    """Shows the model the newest turn only."""

    def wrap_model_call(self, request: Any, handler: Any) -> Any:
        first = max(at for at, message in enumerate(request.messages) if isinstance(message, HumanMessage))
        return handler(request.override(messages=request.messages[first:]))


Run = Callable[[random.Random], str]


def question(rng: random.Random) -> str:
    number = rng.randrange(100, 99999)
    return rng.choice((f"Get the invoice A-{number}.", f"Cancel the order {number}.", f"Get the badge K-{number % 1000}."))


def asked(text: str) -> Any:
    return {"messages": [HumanMessage(text)]}


def config(thread: str = "") -> Any:
    return {"recursion_limit": LIMIT, "configurable": {"thread_id": thread}}


def formed(model: Any, form: type[BaseModel], tools: list[Any], awaited: bool = False, **options: Any) -> Run:
    """An agent whose answer has a form."""
    agent = create_agent(model, tools, system_prompt=SYSTEM, response_format=form, **options)

    def run(rng: random.Random) -> str:
        text = question(rng)
        state = asyncio.run(agent.ainvoke(asked(text), config())) if awaited else agent.invoke(asked(text), config())
        if not isinstance(state.get("structured_response"), form):
            return "no object"
        return "solved" if not tools or any(isinstance(message, ToolMessage) for message in state["messages"]) else "no tool"

    return run


def worded(model: Any, *middleware: Any) -> Run:
    """An agent that answers in words."""
    agent = create_agent(model, TOOLS, system_prompt=SYSTEM, middleware=middleware)

    def run(rng: random.Random) -> str:
        said = agent.invoke(asked(question(rng)), config())["messages"]
        if not any(isinstance(message, ToolMessage) for message in said):
            return "no tool"
        return "solved" if said[-1].text.strip() else "no answer"

    return run


def returning(model: Any) -> Run:
    """One conversation in which a question returns, of which the model sees the newest turn only."""
    agent = create_agent(model, TOOLS, system_prompt=SYSTEM, middleware=[LastTurn()], checkpointer=InMemorySaver())

    def run(rng: random.Random) -> str:
        text, thread = question(rng), str(rng.random())
        for _ in range(2):
            said = agent.invoke(asked(text), config(thread))["messages"]
        calls = [call["id"] for message in said if isinstance(message, AIMessage) for call in message.tool_calls]
        results = [message.tool_call_id for message in said if isinstance(message, ToolMessage)]
        return "solved" if calls and calls == results and len(set(calls)) == len(calls) else "no tool"

    return run


def kinds(model: Any) -> dict[str, Run]:
    def clock(state: Any) -> str:
        return time.strftime("It is %H:%M:%S.")

    selected = [LLMToolSelectorMiddleware(max_tools=2), AgentCacheMiddleware(on_change="ignore")]
    return {
        "form, tools": formed(model, Invoice, TOOLS),
        "form, tools, awaited": formed(model, Invoice, TOOLS, awaited=True),
        "form, tools, middleware": formed(model, Invoice, TOOLS, middleware=[AgentCacheMiddleware()]),
        "form, no tools": formed(model, Invoice, []),
        "form without bounds": formed(model, Report, TOOLS),
        "returning question": returning(model),
        "tool selector": worded(model, *selected),
        "clock at the tail": worded(model, AgentCacheMiddleware(volatile=clock)),
    }


def outcome(run: Run, rng: random.Random) -> str:
    try:
        return run(rng)
    except GraphRecursionError:
        return "loop"
    except (AgentCacheError, ValueError) as error:  # ours, and those of LangChain's strategies
        return type(error).__name__


def main() -> int:
    given = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    given.add_argument("--runs", type=int, default=300, help="of each kind")
    given.add_argument("--kinds", default="", help="some of them, with semicolons")
    given.add_argument("--max-tokens", type=int, default=256)
    said = given.parse_args()
    found: dict[str, dict[str, int]] = {}
    known = kinds(ChatAgentCache(model="embedded", max_tokens=said.max_tokens, cache_dir=""))
    wanted = [name.strip() for name in said.kinds.split(";") if name.strip()] or list(known)
    if unknown := [name for name in wanted if name not in known]:
        given.error(f"--kinds: {unknown[0]!r} is none of {sorted(known)!r}")
    for name in wanted:
        began = time.perf_counter()
        found[name] = dict(Counter(outcome(known[name], random.Random(f"{name} {number}")) for number in range(said.runs)))
        print(f"{name:26} {found[name]}  {time.perf_counter() - began:.0f} s", file=sys.stderr)
    loops = sum(each.get("loop", 0) for each in found.values())
    print(json.dumps({"bench": "agents", "model": "embedded", "runs": said.runs, "loops": loops, "kinds": found}))
    return int(loops > 0)


if __name__ == "__main__":
    sys.exit(main())
