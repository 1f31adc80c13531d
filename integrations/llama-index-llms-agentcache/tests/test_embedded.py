"""LlamaIndex's agents on the embedded model: no script, it chooses the tools itself, by calls and by text ReAct."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from llama_index.core.agent.workflow import FunctionAgent, ReActAgent
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.tools import FunctionTool
from llama_index.llms.agentcache import AgentCacheLLM, StableReActAgent

from agentcache import Message

pytest.importorskip("llguidance", reason="the embedded model's calls are held to their schemas")

Asked = list[tuple[str, dict[str, Any]]]
QUESTIONS = [
    ("Get the invoice A-1204.", ("get_invoice", {"invoice_id": "A-1204"}), "240"),
    ("Cancel the order 77812.", ("cancel_order", {"order_id": "77812"}), "accepted"),
]


@pytest.fixture(scope="module")
def embedded() -> Iterator[AgentCacheLLM]:
    with AgentCacheLLM(model="embedded", max_tokens=120) as llm:
        yield llm


@pytest.fixture
def asked() -> Asked:
    """The calls that the tools got."""
    return []


@pytest.fixture
def tools(asked: Asked) -> list[FunctionTool]:
    def get_invoice(invoice_id: str) -> str:
        """Get an invoice."""
        asked.append(("get_invoice", {"invoice_id": invoice_id}))
        return '{"status": "open", "amount": 240}'

    def cancel_order(order_id: str) -> str:
        """Cancel an order."""
        asked.append(("cancel_order", {"order_id": order_id}))
        return '{"status": "accepted"}'

    return [FunctionTool.from_defaults(one) for one in (get_invoice, cancel_order)]


@pytest.mark.parametrize(("question", "call", "said"), QUESTIONS)
@pytest.mark.parametrize("kind", [FunctionAgent, ReActAgent, StableReActAgent])
def test_an_agent_chooses_the_tool_and_says_what_it_found(
    embedded: AgentCacheLLM, run: Callable[[Any], Any], tools: Any, asked: Asked, kind: Any, question: str, call: Any, said: str
) -> None:
    agent = kind(tools=tools, llm=embedded, system_prompt="You are a helpful assistant.")

    async def ask() -> str:
        return str(await agent.run(question))

    told = run(ask())
    assert asked == [call]
    assert said in told


@pytest.fixture(scope="module")
def bench() -> Iterator[Any]:
    """benchmarks/agents_llamaindex.py, which does the same hundreds of times."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[3]))
        made = importlib.import_module("benchmarks.agents_llamaindex")
    handlers = get_dispatcher().event_handlers
    handlers.append(made.shown)
    yield made
    handlers.remove(made.shown)


@pytest.mark.parametrize("name", ["FunctionAgent, two runs", "StableReActAgent, two runs", "answer_at_tail"])
def test_conversations_and_objects_are_solved(embedded: AgentCacheLLM, bench: Any, name: str) -> None:
    assert [bench.outcome(embedded, name, number) for number in range(2)] == ["solved"] * 2


@pytest.mark.parametrize("name", ["AgentWorkflow", "SharedAgentWorkflow", "structured_predict"])
def test_what_the_model_may_fail_at_ends_all_the_same(embedded: AgentCacheLLM, bench: Any, name: str) -> None:
    ended = bench.outcome(embedded, name, 0).rpartition(": ")[2]
    assert ended in {"solved", "no call", "another call", "misread", "another object", "StructuredOutputError"}


def test_a_misread_result_is_told_from_an_unshown_one(bench: Any) -> None:
    desk, wanted = bench.Desk(), [("get_invoice", "A-1")]
    assert bench.judged(desk, wanted, "240", "240") == "no call"
    desk.cancel_order("A-1")
    assert bench.judged(desk, wanted, "240", "240") == "another call"
    desk = bench.Desk()
    desk.get_invoice("A-1")
    assert [bench.judged(desk, wanted, said, "240") for said in ("It is 240.", " ", "It is 7.")] == ["solved", "no answer", "not shown"]
    receipt = {"model": "", "usage": {}, "finish_reason": "stop"}
    bench.shown.handle(bench.ReceiptEvent(receipt=receipt, prompt=[Message("tool", '{"amount": 240}')]))
    assert bench.judged(desk, wanted, "It is 7.", "240") == "misread"
