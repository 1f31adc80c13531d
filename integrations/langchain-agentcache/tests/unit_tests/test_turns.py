"""Ids of calls: unique within a conversation, also where a shortened history makes one prompt of two turns."""

from __future__ import annotations

from typing import Any

import pytest
import script
from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware
from langchain_agentcache import ChatAgentCache
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph


@tool
def tide(harbour: str) -> str:
    """When is high water in a harbour?"""
    return f"High water in {harbour} at 3."


class LastTurn(AgentMiddleware[Any, Any, Any]):
    """Shows the model the newest turn only."""

    def wrap_model_call(self, request: Any, handler: Any) -> Any:
        first = max(at for at, message in enumerate(request.messages) if isinstance(message, HumanMessage))
        return handler(request.override(messages=request.messages[first:]))


@pytest.fixture
def model(chat: Any, monkeypatch: pytest.MonkeyPatch) -> ChatAgentCache:
    monkeypatch.setitem(script.LINES, "When is high water?", script.call("tide", harbour="Averil"))
    return chat(max_tokens=40)


@pytest.mark.parametrize("kept", ["checkpointer", "caller"])
def test_a_question_that_returns_runs_its_tool_again(model: ChatAgentCache, kept: str) -> None:
    agent = create_agent(model, [tide], middleware=[LastTurn()], checkpointer=InMemorySaver() if kept == "checkpointer" else None)
    said: list[Any] = []
    for _ in range(3):
        asked = [HumanMessage("When is high water?")]
        said = agent.invoke({"messages": asked if kept == "checkpointer" else said + asked}, {"configurable": {"thread_id": "1"}})[
            "messages"
        ]
    calls = [call["id"] for message in said if isinstance(message, AIMessage) for call in message.tool_calls]
    assert len(set(calls)) == len(calls) == 3
    assert [message.tool_call_id for message in said if isinstance(message, ToolMessage)] == calls


def test_nodes_that_ask_at_once_have_their_own_ids(model: ChatAgentCache) -> None:
    bound = model.bind_tools([tide])
    graph = StateGraph(MessagesState)
    for name in ("first", "second"):
        graph.add_node(name, lambda state: {"messages": [bound.invoke(state["messages"])]})
        graph.add_edge(START, name)
    said = graph.compile().invoke({"messages": [HumanMessage("When is high water?")]})["messages"][1:]
    assert len({call["id"] for message in said for call in message.tool_calls}) == 2


def test_ids_follow_from_the_messages(model: ChatAgentCache) -> None:
    bound = model.bind_tools([tide])

    def asked(identity: str | None) -> str:
        message = HumanMessage("When is high water?", id=identity)
        (call,) = bound.invoke([message]).tool_calls
        assert [part["id"] for chunk in bound.stream([message]) for part in chunk.tool_call_chunks if part["id"]] == [call["id"]]
        return str(call["id"])

    assert asked(None) == asked(None)
    assert asked("1") == asked("1")
    assert len({asked(None), asked("1"), asked("2")}) == 3
