"""AgentCacheMiddleware where agents differ: async ones, trimmed histories, fallbacks, tools chosen by a model."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import script
from harbour import log, tide
from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware, LLMToolSelectorMiddleware, ModelFallbackMiddleware, dynamic_prompt
from langchain_agentcache import AgentCacheMiddleware, ChatAgentCache
from langchain_agentcache.errors import ModelInvalidRequestError
from langchain_core.language_models import GenericFakeChatModel
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_core.runnables import RunnableLambda
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver

SYSTEM = "You are the keeper of a lighthouse. Write down wind, tide and every ship that passes. " * 4


@tool
def wind(harbour: str) -> str:
    """How is the wind?"""
    return "Calm."


@pytest.fixture
def model(chat: Any, monkeypatch: pytest.MonkeyPatch) -> ChatAgentCache:
    monkeypatch.setitem(script.LINES, "When is high water?", script.call("tide", harbour="Averil"))
    return chat(max_tokens=40)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], list[str]]]:
    """(tools shown, of them forbidden) of each request with tools that a ChatAgentCache makes, but for forced ones."""
    seen: list[tuple[list[str], list[str]]] = []
    original = ChatAgentCache._open

    def look(self: ChatAgentCache, messages: Any, stop: Any, kwargs: dict[str, Any]) -> Any:
        if not kwargs.get("tool_choice"):
            seen.append(([each["function"]["name"] for each in kwargs.get("tools", ())], kwargs.get("forbidden_tools", [])))
        return original(self, messages, stop, kwargs)

    monkeypatch.setattr(ChatAgentCache, "_open", look)
    return seen


def asked(text: str = "When is high water?", **options: Any) -> Any:
    return {"messages": [HumanMessage(text, **options)]}


class Stamps(AgentMiddleware[Any, Any, Any]):
    """Puts a number into the system prompt."""

    def __init__(self) -> None:
        self.numbers = itertools.count(12)

    async def awrap_model_call(self, request: Any, handler: Any) -> Any:
        request = request.override(system_message=SystemMessage(f"{next(self.numbers)} {SYSTEM}"))
        return await handler(request)


class Passes(AgentMiddleware[Any, Any, Any]):
    """Changes nothing."""

    async def awrap_model_call(self, request: Any, handler: Any) -> Any:
        return await handler(request)


def _timed() -> Any:
    numbers = itertools.count(12)

    @dynamic_prompt
    async def timed(request: Any) -> str:
        return f"{next(numbers)} {SYSTEM}"

    return timed


@pytest.mark.parametrize(("made", "name"), [(Stamps, "Stamps"), (_timed, "timed")])
async def test_who_breaks_the_prefix_of_an_async_agent_is_named(model: ChatAgentCache, made: Any, name: str) -> None:
    agent = create_agent(model, [tide], middleware=[Passes(), made(), AgentCacheMiddleware()])
    with pytest.warns(UserWarning, match=f"^{name} changed the system prompt: .*volatile=") as said:
        await agent.ainvoke(asked())
    assert len(said) == 1


def test_the_hint_for_tools_says_tools(model: ChatAgentCache) -> None:
    class Grows(AgentMiddleware[Any, Any, Any]):
        def wrap_model_call(self, request: Any, handler: Any) -> Any:
            return handler(request.override(tools=request.tools[: len(request.messages)]))

    agent = create_agent(model, [tide, log, wind], middleware=[Grows(), AgentCacheMiddleware()])
    with pytest.warns(UserWarning, match=r"changed the tools: .*tools=\[\.\.\.\]") as said:
        agent.invoke(asked())
    assert [each.filename for each in said] == [__file__]


# -- which conversation a request belongs to ---------------------------------------------------------------------------


class Needs(AgentMiddleware[Any, Any, Any]):
    """Gives `wipe` to questions that ask for it; shows the newest message only, under a summary if there is more."""

    def __init__(self, summary: bool) -> None:
        self.summary = summary

    def wrap_model_call(self, request: Any, handler: Any) -> Any:
        tools = request.tools if "all" in request.messages[-1].text else request.tools[:1]
        kept = request.messages[-2:]
        first = [HumanMessage("Summary: wind and tide.", id=str(next(fresh)))] if self.summary and len(request.messages) > 2 else []
        return handler(request.override(tools=tools, messages=[*first, *kept]))


fresh = itertools.count()


@pytest.mark.parametrize("summary", [False, True])
@pytest.mark.parametrize("threads", [True, False])
def test_a_conversation_is_known_though_its_front_is_gone(model: ChatAgentCache, sent: list[Any], summary: bool, threads: bool) -> None:
    ours = AgentCacheMiddleware(on_change="ignore")
    agent = create_agent(model, [tide, log], middleware=[Needs(summary), ours], checkpointer=InMemorySaver() if threads else None)
    said: list[Any] = []
    for text in ("Hello, all", "Hello", "Hello", "Hello"):
        given = HumanMessage(text)
        config: Any = {"configurable": {"thread_id": "a"}} if threads else {}
        said = agent.invoke({"messages": [given] if threads else [*said, given]}, config)["messages"]
    assert [shown for shown, _ in sent] == [["tide", "log"]] * 4
    assert sent[-1][1] == ["log"]
    agent.invoke(asked("Hello"), {"configurable": {"thread_id": "b"}})
    assert sent[-1] == (["tide"], []), "another conversation is shown nothing of this one"


# -- what the functions are given --------------------------------------------------------------------------------------


async def test_functions_take_the_runtime_and_may_be_async(model: ChatAgentCache) -> None:
    async def now(state: Any, runtime: Any) -> str:
        return f"User {runtime.context['user']}, {len(state['messages'])} messages."

    async def profile(state: Any) -> str:
        return "Speaks Breton."

    def plain(state: Any, runtime: Any) -> str:
        return f"User {runtime.context['user']}."

    context: Any = {"user": "Ada"}
    agent = create_agent(model, [tide], middleware=[AgentCacheMiddleware(volatile=now, facts=profile)], context_schema=dict)
    state = await agent.ainvoke(asked(), context=context)
    assert [message.text for message in state["messages"] if message.additional_kwargs.get("agentcache")] == [
        "<context>\nSpeaks Breton.\n</context>"
    ]
    account = state["messages"][-1].response_metadata["agentcache"]
    assert [(move["by"], move["to"]) for move in account["moves"]] == [("volatile", "tail")]
    with pytest.raises(ModelInvalidRequestError, match=r"facts: the function is async: .*ainvoke"):
        agent.invoke(asked(), context=context)
    with pytest.raises(ModelInvalidRequestError, match=r"volatile: the function is async"):
        create_agent(model, [tide], middleware=[AgentCacheMiddleware(volatile=now)], context_schema=dict).invoke(asked(), context=context)
    both = create_agent(model, [tide], middleware=[AgentCacheMiddleware(volatile=plain, facts=plain)], context_schema=dict)
    for state in (both.invoke(asked(), context=context), await both.ainvoke(asked(), context=context)):
        assert any(message.text == "<context>\nUser Ada.\n</context>" for message in state["messages"])


class Fails(AgentMiddleware[Any, Any, Any]):
    """The first model cannot be reached."""

    def wrap_model_call(self, request: Any, handler: Any) -> Any:
        if isinstance(request.model, ChatAgentCache):
            raise ConnectionError("out of reach")
        return handler(request)


def test_a_fallback_of_another_class_is_told_what_changes(model: ChatAgentCache) -> None:
    heard: list[Any] = []

    class Fake(GenericFakeChatModel):
        def _generate(self, messages: Any, *args: Any, **kwargs: Any) -> Any:
            heard.append((messages, kwargs))
            return super()._generate(messages, *args, **{})

    fake = Fake(messages=iter([AIMessage("At 3.")]))
    ours = AgentCacheMiddleware(volatile=lambda state: "It is noon.", facts=lambda state: "The user is Ada.")
    agent = create_agent(model, [], middleware=[ModelFallbackMiddleware(fake), Fails(), ours])
    state = agent.invoke(asked())
    ((messages, kwargs),) = heard
    assert [message.text for message in messages][-2:] == ["<context>\nThe user is Ada.\n</context>", "<context>\nIt is noon.\n</context>"]
    assert not kwargs.keys() & {"volatile", "forbidden_tools"}
    assert all("noon" not in message.text for message in state["messages"]), "for one call only"


# -- tools that a model chooses ----------------------------------------------------------------------------------------


class Chooser(GenericFakeChatModel):
    """Chooses one tool after the other."""

    names: Any

    def with_structured_output(self, *args: Any, **kwargs: Any) -> Any:
        return RunnableLambda(lambda messages: {"tools": [next(self.names)]})


def selector(*names: str, **options: Any) -> Any:
    return LLMToolSelectorMiddleware(model=Chooser(messages=iter([]), names=itertools.cycle(names)), **options)


@pytest.fixture(autouse=True)
def no_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.filterwarnings("ignore", ".* prompt tokens were computed again")  # once per process, in any test
        yield


@pytest.mark.parametrize("awaited", [False, True])
async def test_chosen_tools_are_a_mask_over_one_list(model: ChatAgentCache, sent: list[Any], awaited: bool) -> None:
    middleware = [selector("tide", "wind"), AgentCacheMiddleware()]
    agent = create_agent(model, [tide, log, wind], system_prompt=SYSTEM, middleware=middleware)
    state = await agent.ainvoke(asked()) if awaited else agent.invoke(asked())
    everything = ["tide", "log", "wind"]
    assert sent == [(everything, ["log", "wind"]), (everything, ["tide", "log"])]
    first, second = [message for message in state["messages"] if isinstance(message, AIMessage)]
    assert second.usage_metadata["input_token_details"]["cache_read"] >= first.usage_metadata["total_tokens"] - 1


class NoTide(AgentMiddleware[Any, Any, Any]):
    """Whoever asks may not use `tide`."""

    def wrap_model_call(self, request: Any, handler: Any) -> Any:
        return handler(request.override(tools=[each for each in request.tools if each.name != "tide"]))


@pytest.mark.parametrize("order", [(NoTide(), selector("wind")), (selector("tide", always_include=["wind"]), NoTide())])
def test_what_another_middleware_refuses_is_not_shown(model: ChatAgentCache, sent: list[Any], order: Any) -> None:
    create_agent(model, [tide, log, wind], middleware=[*order, AgentCacheMiddleware()]).invoke(asked("Hello"))
    assert sent == [(["log", "wind"], ["log"])]
