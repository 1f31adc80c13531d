"""Agents whose answer has a form: they work first, as without one, and end in an object."""

from __future__ import annotations

import json
from typing import Any

import pytest
import script
from harbour import ASKED, tide
from langchain.agents import create_agent
from langchain_agentcache import AgentCacheMiddleware, CacheCounts, ChatAgentCache
from langchain_agentcache.errors import ModelInvalidRequestError
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from pydantic import BaseModel, Field

pytest.importorskip("llguidance", reason="objects are held to their schemas")

LIMIT: Any = {"recursion_limit": 12}  # a loop ends the test, soon


class Invoice(BaseModel):
    """An invoice."""

    status: str = Field(max_length=20)
    amount: int = Field(ge=0, le=9999)


@tool
def get_invoice(invoice_id: str) -> dict[str, Any]:
    """Get an invoice."""
    return {"status": "open", "amount": 240}


@tool
def cancel_order(order_id: str) -> dict[str, Any]:
    """Cancel an order."""
    return {"status": "accepted"}


TOOLS = [get_invoice, cancel_order]


@pytest.fixture(scope="module")
def embedded() -> ChatAgentCache:
    return ChatAgentCache(model="embedded", max_tokens=96)


def agent(model: ChatAgentCache, tools: Any, **options: Any) -> Any:
    return create_agent(model, tools, system_prompt="You are a helpful assistant.", response_format=Invoice, **options)


def question(number: int) -> dict[str, Any]:
    return {"messages": [HumanMessage(f"Get the invoice A-{number}.")]}


@script.TOLD_IN_LOOPS
@pytest.mark.parametrize("middleware", [[], [AgentCacheMiddleware()]], ids=["alone", "with middleware"])
async def test_tools_first_then_the_object(embedded: ChatAgentCache, middleware: list[Any]) -> None:
    running, counts = agent(embedded, TOOLS, middleware=middleware), CacheCounts()
    for number, ask in ((1204, running.invoke), (77, running.ainvoke)):
        state = ask(question(number), {**LIMIT, "callbacks": [counts]})
        state = await state if ask == running.ainvoke else state
        assert state["structured_response"] == Invoice(status="open", amount=240)
        assert [message.content for message in state["messages"] if isinstance(message, ToolMessage)] == [
            '{"status": "open", "amount": 240}'
        ]
        first, last = [message for message in state["messages"] if isinstance(message, AIMessage)]
        assert [call["args"] for call in first.tool_calls] == [{"invoice_id": f"A-{number}"}]
        account = last.response_metadata["agentcache"]
        assert account["draft"]["cached_tokens"] >= first.usage_metadata["total_tokens"] - 2, "steps go on from each other"
        assert account["cached_tokens"] >= account["draft"]["prompt_tokens"], "and so does the request for the object"
        written = account["draft"]["completion_tokens"] + account["completion_tokens"]
        assert last.usage_metadata["output_tokens"] == written
    assert sum(counts.stats["requests"].values()) == 2 * len((first, account["draft"], last))


def test_no_agent_goes_round(embedded: ChatAgentCache) -> None:
    """A small part of what benchmarks/agents.py runs."""
    for tools in (TOOLS, []):
        running = agent(embedded, tools)
        for number in range(4):
            assert isinstance(running.invoke(question(4000 + number), LIMIT)["structured_response"], Invoice)


async def test_a_stream_tells_the_object_and_not_the_words(embedded: ChatAgentCache) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "Invoice", "schema": Invoice.model_json_schema()}}
    model = embedded.bind_tools(TOOLS, response_format=form)
    said: list[Any] = question(9)["messages"]
    asked = None
    for chunk in model.stream(said):
        asked = chunk if asked is None else asked + chunk
    assert [call["name"] for call in asked.tool_calls] == ["get_invoice"]
    assert asked.text == model.invoke(said).text != "", "words before a call are told, once it is one"
    said = [*said, asked, ToolMessage('{"status": "open", "amount": 240}', tool_call_id=asked.tool_calls[0]["id"])]
    texts = ["".join(chunk.text for chunk in model.stream(said)), "".join([chunk.text async for chunk in model.astream(said)])]
    assert [json.loads(text) for text in texts] == [{"status": "open", "amount": 240}] * 2


def form_of(**schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "tide", "schema": {"title": "tide", **schema}}}


@pytest.fixture
def shown(chat: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """shown(**options): [(tools of the prompt, constraint, last message)] of the requests that one call makes."""
    monkeypatch.setattr(script, "answer", lambda messages, tools, limits: seen.append((list(tools), limits, messages[-1])))
    seen: list[Any] = []

    def ask(**options: Any) -> list[Any]:
        seen.clear()
        chat(max_tokens=60).invoke(ASKED, **options)
        return [([each.name for each in tools], limits, last.content) for tools, limits, last in seen]

    return ask


SMALL = form_of(type="object", properties={"hour": {"type": "integer", "minimum": 0, "maximum": 23}}, required=["hour"])


def test_the_schema_is_shown_in_one_place(shown: Any) -> None:
    from langchain_agentcache._tools import formatted

    listed = formatted([tide])
    first, second = shown(tools=listed, response_format=SMALL)
    assert first[0] == second[0] == ["tide", "tide_answer"], "one prefix, and a name of its own"
    assert first[1].allowed == ("tide",), "not to be called while the model works"
    assert (second[1].tool_choice, second[2]) == ("tide_answer", "Give the answer as JSON.")
    ((names, limits, _),) = shown(tools=listed, response_format=SMALL, tool_choice="tide")
    assert (names, limits.tool_choice, limits.allowed) == (["tide", "tide_answer"], "tide", ("tide",))
    ((names, limits, _),) = shown(tools=listed, response_format=SMALL, tool_choice="none")
    assert (names, limits.tool_choice) == (["tide", "tide_answer"], "tide_answer")
    ((names, limits, _),) = shown(response_format=SMALL)
    assert (names, limits.tool_choice) == (["tide"], "tide")
    ((names, limits, _),) = shown(response_format=SMALL, show_schema=False)
    assert (names, limits.schema["title"]) == ([], "tide"), "held to it, and not shown"
    ((names, limits, _),) = shown(response_format=form_of(type="array", items={"type": "integer"}, maxItems=3))
    assert (names, limits.schema["type"]) == ([], "array"), "no object, no tool"


@tool
def tag_ship(tags: set[str]) -> str:
    """Tag a ship."""
    return "tagged"


@pytest.mark.parametrize("text", ["It is at noon.", script.call("tide", hour=7), script.call("tag_ship", tags=["a"])])
async def test_a_set_among_the_tools_leaves_the_form(chat: Any, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    def said(messages: Any, tools: Any, limits: Any) -> str | None:
        return text if limits is None else script.call("tide", hour=12) if limits.calls else None

    monkeypatch.setattr(script, "answer", said)
    model = chat(max_tokens=60).bind_tools([tag_ship], response_format=SMALL)
    chunks = list(model.stream(ASKED))
    for answer in (model.invoke(ASKED), sum(chunks[1:], chunks[0]), await model.ainvoke(ASKED)):
        assert [each["name"] for each in answer.tool_calls] == (["tag_ship"] if "tag_ship" in text else [])
        assert answer.tool_calls or json.loads(answer.text) == {"hour": 12}
    with pytest.raises(ModelInvalidRequestError, match="uniqueItems"):
        model.invoke(ASKED, strict=True)
