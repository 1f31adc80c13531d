"""A LangGraph thread is a session of the engine, without code: of the thread, the agent and the node that asks."""

from __future__ import annotations

from typing import Any

import pytest
import script
from langchain.agents import create_agent
from langchain_core.messages import HumanMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph

THREAD: Any = {"configurable": {"thread_id": "one"}}


def resumed(message: Any) -> str:
    return str(message.response_metadata["agentcache"]["resumed"])


def tokens(model: Any, name: str) -> int:
    return int(model._engine().session(name, namespace=model.namespace).tokens)


@pytest.mark.parametrize("name", [None, "keeper"])
def test_an_agents_thread_is_its_session(chat: Any, name: str | None) -> None:
    model = chat(max_tokens=4)
    agent = create_agent(model, [], system_prompt="You keep a log.", checkpointer=InMemorySaver(), name=name)
    said = [agent.invoke({"messages": [HumanMessage(text)]}, THREAD)["messages"][-1] for text in ("Wind?", "Tide?")]
    assert [resumed(one) for one in said] == ["", "extend"]
    assert tokens(model, "one/keeper/model" if name else "one/model") > 0
    other = agent.invoke({"messages": [HumanMessage("Wind?")]}, {"configurable": {"thread_id": "two"}})
    assert resumed(other["messages"][-1]) == ""


def test_nodes_of_a_thread_have_sessions_of_their_own(chat: Any) -> None:
    model = chat(max_tokens=4)

    def ask(state: MessagesState) -> Any:
        return {"messages": [model.invoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("keeper", ask)
    graph.add_node("mate", ask)
    graph.add_edge(START, "keeper")
    graph.add_edge("keeper", "mate")
    app = graph.compile(checkpointer=InMemorySaver())
    said = app.invoke({"messages": [HumanMessage("Wind?")]}, THREAD)["messages"]
    assert [resumed(one) for one in said[1:]] == ["", ""]
    assert all(tokens(model, f"one/{node}") for node in ("keeper", "mate"))


@script.TOLD_IN_LOOPS
@pytest.mark.parametrize("streams", [False, True])
async def test_a_thread_in_a_loop_is_its_session(chat: Any, streams: bool) -> None:
    agent = create_agent(chat(max_tokens=4, streaming=streams), [], system_prompt="You keep a log.", checkpointer=InMemorySaver())
    said = [(await agent.ainvoke({"messages": [HumanMessage(text)]}, THREAD))["messages"][-1] for text in ("Wind?", "Tide?")]
    assert [resumed(one) for one in said] == ["", "extend"]


def test_a_call_names_its_session_or_none(chat: Any) -> None:
    model = chat(max_tokens=4)
    assert [resumed(model.invoke("Wind?", session=name)) for name in ("mine", "mine", "", "")] == ["", "exact", "", ""]
    assert resumed(model.invoke("Wind?")) == ""
