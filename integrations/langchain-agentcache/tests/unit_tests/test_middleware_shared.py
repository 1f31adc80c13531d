"""One AgentCacheMiddleware for several conversations and agents, and subclasses of it: nothing goes from one to another."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware
from langchain_agentcache import AgentCacheMiddleware, ChatAgentCache
from langchain_agentcache.middleware import conversations
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver

from agentcache import toy

SYSTEM = "You are the keeper of a lighthouse. Write down wind, tide and every ship that passes. " * 4


@tool
def read(page: int) -> str:
    """Read a page of the log."""
    return "Calm."


@tool
def wipe(page: int) -> str:
    """Wipe a page of the log: for the harbour master only."""
    return "Gone."


class ByRank(AgentMiddleware):
    """Who is not the master may only read."""

    def __init__(self, is_master: Callable[[Any], bool] = lambda request: "master" in request.messages[0].text) -> None:
        self.is_master = is_master

    def wrap_model_call(self, request: Any, handler: Any) -> Any:
        may = {"read", "wipe"} if self.is_master(request) else {"read"}
        return handler(request.override(tools=[one for one in request.tools if one.name in may]))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], list[str]]]:
    """(tools shown, of them forbidden) of each request."""
    seen: list[tuple[list[str], list[str]]] = []
    original = ChatAgentCache._open

    def look(self: ChatAgentCache, messages: Any, stop: Any, kwargs: dict[str, Any]) -> Any:
        seen.append(([each["function"]["name"] for each in kwargs.get("tools", ())], kwargs.get("forbidden_tools", [])))
        return original(self, messages, stop, kwargs)

    monkeypatch.setattr(ChatAgentCache, "_open", look)
    return seen


@pytest.fixture
def model(chat: Any) -> ChatAgentCache:
    return chat(max_tokens=4)


@pytest.fixture(autouse=True)
def no_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.filterwarnings("ignore", ".* prompt tokens were computed again")  # once per process, in any test
        yield


def thread(name: str) -> Any:
    return {"configurable": {"thread_id": name}}


def test_each_conversation_has_its_own_tools(model: ChatAgentCache, asked: list[Any]) -> None:
    agent = create_agent(
        model, [read, wipe], system_prompt=SYSTEM, middleware=[ByRank(), AgentCacheMiddleware()], checkpointer=InMemorySaver()
    )
    mate = agent.invoke({"messages": [HumanMessage("I am the mate.")]}, thread("b"))["messages"][-1]
    agent.invoke({"messages": [HumanMessage("I am the master.")]}, thread("a"))
    again = agent.invoke({"messages": [HumanMessage("And now?")]}, thread("b"))["messages"][-1]
    agent.invoke({"messages": [HumanMessage("I am the cook.")]}, thread("c"))
    assert asked == [(["read"], []), (["read", "wipe"], []), (["read"], []), (["read"], [])]
    assert again.usage_metadata["input_token_details"]["cache_read"] >= mate.usage_metadata["total_tokens"] - 1


def test_ids_that_callers_choose_join_no_conversations(model: ChatAgentCache, asked: list[Any]) -> None:
    agent = create_agent(model, [read, wipe], middleware=[ByRank(), AgentCacheMiddleware()], checkpointer=InMemorySaver())
    for name in ("master", "mate"):
        agent.invoke({"messages": [HumanMessage(f"I am the {name}.", id="1")]}, thread(name))
    assert asked == [(["read", "wipe"], []), (["read"], [])]


def test_agents_of_one_instance_keep_to_their_tools(model: ChatAgentCache, asked: list[Any]) -> None:
    ours = AgentCacheMiddleware()
    reads, wipes = (create_agent(model, [one], name=one.name, middleware=[ours]) for one in (read, wipe))
    for message in (HumanMessage("I am the master."), HumanMessage("I am the master.", id="1")):  # handed on from agent to agent
        for agent in (reads, wipes):
            agent.invoke({"messages": [message]}, thread("a"))
    assert asked == [(["read"], []), (["wipe"], [])] * 2


def test_namespaces_that_share_a_thread_id_share_no_tools(model: ChatAgentCache, asked: list[Any]) -> None:
    ours = AgentCacheMiddleware()
    for namespace, one in (("alice", read), ("bob", wipe)):
        mine = ChatAgentCache(engine=model._engine(), max_tokens=4, namespace=namespace)
        create_agent(mine, [one], middleware=[ours]).invoke({"messages": [HumanMessage("Hello.")]}, thread("1"))
    assert asked == [(["read"], []), (["wipe"], [])]


def test_tools_that_were_given_are_shown_from_the_first_step(model: ChatAgentCache, asked: list[Any]) -> None:
    ours = AgentCacheMiddleware(tools=[wipe, read])
    agent = create_agent(model, [read, wipe], middleware=[ByRank(), ours])
    for name in ("mate", "cook"):
        agent.invoke({"messages": [HumanMessage(f"I am the {name}.")]})
    assert asked == [(["wipe", "read"], ["wipe"])] * 2


def test_examples_that_all_users_are_shown_join_no_conversations(model: ChatAgentCache, asked: list[Any]) -> None:
    by_rank = ByRank(lambda request: "I am the master." in request.messages[-1].text)
    agent = create_agent(model, [read, wipe], middleware=[by_rank, AgentCacheMiddleware()])
    examples = [HumanMessage("How was Monday?"), AIMessage("Calm.")]  # objects of all conversations: one id each
    greeting = HumanMessage("Hello.")
    said = {name: agent.invoke({"messages": [*examples, greeting, HumanMessage(f"I am the {name}.")]}) for name in ("master", "mate")}
    said["cook"] = agent.invoke({"messages": [*examples, greeting]})
    assert asked == [(["read", "wipe"], []), (["read"], []), (["read"], [])]
    agent.invoke({"messages": [*said["master"]["messages"], HumanMessage("And now?")]})
    agent.invoke({"messages": [*said["mate"]["messages"], HumanMessage("And now?")]})
    assert asked[3:] == [(["read", "wipe"], ["wipe"]), (["read"], [])], "each goes on with what it was shown"


def test_a_question_that_all_users_ask_joins_no_conversations(model: ChatAgentCache, asked: list[Any]) -> None:
    is_master = iter([True, False])
    agent = create_agent(model, [read, wipe], middleware=[ByRank(lambda request: next(is_master)), AgentCacheMiddleware()])
    question = HumanMessage("What may I do?")
    for _ in range(2):
        agent.invoke({"messages": [question]})
    assert asked == [(["read", "wipe"], []), (["read"], [])]


def request(*messages: Any) -> Any:
    return SimpleNamespace(messages=messages)


def test_so_many_conversations_are_remembered() -> None:
    known = conversations.Conversations({})
    answers = [AIMessage("x", id=str(number)) for number in range(conversations.CONVERSATIONS + 1)]
    for answer in answers:
        found = known.find(request())
        found.shown({"read": 1})
        found.answered([answer])
    assert known.find(request(answers[-1])).shown({}) == {"read": 1}
    assert known.find(request(answers[0])).shown({}) == {}, "the oldest is forgotten"
    assert len(known._known) == conversations.CONVERSATIONS


def test_what_has_no_id_is_not_remembered() -> None:
    known, message = conversations.Conversations({"log": 0}), HumanMessage("x")
    for name in ("read", "wipe"):
        found = known.find(request(message))
        assert found.shown({name: 1}) == {"log": 0, name: 1}
        found.answered([AIMessage("y")])
    assert known.find(request()).shown({}) == {"log": 0}


# -- warming -----------------------------------------------------------------------------------------------------------

WITH_MODE = "{%- if enable_thinking is defined %}{{- '<|im_start|>thinking: ' + (enable_thinking | string) }}{%- endif %}"


def test_what_is_warmed_is_what_is_asked(chat: Any) -> None:
    model = chat(max_tokens=4, reasoning=False, chat_template=WITH_MODE + toy.CHAT_TEMPLATE)
    ours = AgentCacheMiddleware(model=model, system_prompt=SYSTEM, tools=[read, wipe])
    agent = create_agent(model, [read, wipe], system_prompt=SYSTEM, middleware=[ours])
    first = agent.invoke({"messages": [HumanMessage("Hello")]})["messages"][-1]
    assert isinstance(first, AIMessage)
    assert first.usage_metadata["input_token_details"]["cache_read"] > 200


def test_a_group_is_warmed_in_its_own_order(chat: Any) -> None:
    model = chat(max_tokens=4, tools_order="sticky", group="log")
    model._engine().warm(SYSTEM, [{"type": "function", "function": {"name": "wipe"}}], name="log", namespace=model.namespace)
    ours = AgentCacheMiddleware(model=model, system_prompt=SYSTEM, tools=[read, wipe])
    agent = create_agent(model, [read, wipe], system_prompt=SYSTEM, middleware=[ours])
    first = agent.invoke({"messages": [HumanMessage("Hello")]})["messages"][-1]
    assert first.usage_metadata["input_token_details"]["cache_creation"] < 40


# -- subclasses --------------------------------------------------------------------------------------------------------


class Greets(AgentCacheMiddleware):
    """Knows who asks."""

    def __init__(self, who: str = "") -> None:
        super().__init__(facts=lambda state: f"The user is {who}.")


class Counts(AgentCacheMiddleware):
    """Has a hook of its own."""

    steps = 0

    async def abefore_model(self, state: Any, runtime: Any) -> None:
        self.steps += 1

    def before_model(self, state: Any, runtime: Any) -> None:
        self.steps += 1


def nodes(agent: Any) -> set[str]:
    return {name for name in agent.get_graph().nodes if "." in name}


def test_a_subclass_gives_what_it_likes(model: ChatAgentCache) -> None:
    for ours in (Greets("Ada"), Greets(who="Ada")):
        agent = create_agent(model, [read], middleware=[ours])
        assert nodes(agent) == {"Greets.before_model"}
        said = [message.text for message in agent.invoke({"messages": [HumanMessage("Hello")]})["messages"]]
        assert any("The user is Ada." in text for text in said)
        assert isinstance(ours, Greets)
        assert type(ours).__module__ == __name__


def test_a_subclass_keeps_its_own_hooks(model: ChatAgentCache) -> None:
    ours = Counts(facts=lambda state: "never asked", model=model, system_prompt=SYSTEM)
    agent = create_agent(model, [read], system_prompt=SYSTEM, middleware=[ours])
    assert nodes(agent) == {"Counts.before_model", "Counts.before_agent"}
    said = agent.invoke({"messages": [HumanMessage("Hello")]})["messages"]
    assert ours.steps == len([message for message in said if isinstance(message, AIMessage)]) > 0
    assert nodes(create_agent(model, [read], middleware=[AgentCacheMiddleware()])) == set(), "other instances stay as they are"
