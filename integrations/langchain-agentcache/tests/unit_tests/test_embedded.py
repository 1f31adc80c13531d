"""LangChain's agent on the embedded model: no script, it chooses the tools itself."""

from __future__ import annotations

from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_agentcache import ChatAgentCache
from langchain_core.messages import AIMessage
from langchain_core.tools import tool

pytest.importorskip("llguidance", reason="the embedded model's calls are held to their schemas")

asked: list[tuple[str, dict[str, Any]]] = []


def _noted(name: str, **args: Any) -> None:
    asked.append((name, args))


@tool
def get_invoice(invoice_id: str) -> dict[str, Any]:
    """Get an invoice."""
    _noted("get_invoice", invoice_id=invoice_id)
    return {"status": "open", "amount": 240}


@tool
def cancel_order(order_id: str) -> dict[str, Any]:
    """Cancel an order."""
    _noted("cancel_order", order_id=order_id)
    return {"status": "accepted"}


@tool
def calculator(expression: str) -> str:
    """Evaluate an arithmetic expression."""
    _noted("calculator", expression=expression)
    left, sign, right = expression.split()
    return str(int(left) * int(right)) if sign == "*" else "unknown"


@pytest.fixture(scope="module")
def agent() -> Any:
    """The three tools on the embedded model."""
    chat = ChatAgentCache(model="embedded", max_tokens=120)
    return create_agent(chat, [get_invoice, cancel_order, calculator], system_prompt="You are a helpful assistant.")


@pytest.mark.parametrize(
    ("question", "call", "said"),
    [
        ("Get the invoice A-1204.", ("get_invoice", {"invoice_id": "A-1204"}), "240"),
        ("Cancel the order 77812.", ("cancel_order", {"order_id": "77812"}), "accepted"),
        ("What is 17 times 23?", ("calculator", {"expression": "17 * 23"}), "391"),
    ],
)
def test_an_agent_chooses_the_tool_and_says_what_it_found(agent: Any, question: str, call: Any, said: str) -> None:
    asked.clear()
    done = agent.invoke({"messages": [("user", question)]})["messages"]
    assert asked == [call]
    assert said in done[-1].text
    steps = [message for message in done if isinstance(message, AIMessage)]
    assert steps[-1].usage_metadata["input_token_details"]["cache_read"] > 100, "the second step goes on from the first"


def test_a_conversation_refers_back(agent: Any) -> None:
    asked.clear()
    first = agent.invoke({"messages": [("user", "Get the invoice A-1204.")]})["messages"]
    agent.invoke({"messages": [*first, ("user", "Cancel the order B-77.")]})
    assert asked == [("get_invoice", {"invoice_id": "A-1204"}), ("cancel_order", {"order_id": "B-77"})]
