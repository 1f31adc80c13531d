"""AgentCacheMiddleware in agents: what changes stands at the end, what was there stays, and who breaks it is named."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import pytest
import script
from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware, SummarizationMiddleware, dynamic_prompt
from langchain_agentcache import AgentCacheMiddleware, ChatAgentCache
from langchain_core.caches import InMemoryCache
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from pydantic import BaseModel, Field

SYSTEM = "You are the keeper of a lighthouse. Write down wind, tide and every ship that passes. " * 4


@tool
def tide(harbour: str) -> str:
    """When is high water in a harbour?"""
    return f"High water in {harbour} at 3."


@tool
def log(text: str) -> str:
    """Write a text into the log."""
    return "written"


class Verdict(BaseModel):
    """How it went."""

    good: bool
    why: str = Field(max_length=10)


@pytest.fixture
def chat(model_folder: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ChatAgentCache:
    monkeypatch.setitem(script.LINES, "When is high water?", script.call("tide", harbour="Averil"))
    options: dict[str, Any] = {"memory_bytes": 64 << 20, "max_tokens": 40, "namespace": request.node.name, "cache_dir": ""}
    return ChatAgentCache(model=model_folder, **options)


def asked(text: str = "When is high water?") -> dict[str, Any]:
    return {"messages": [HumanMessage(text)]}


def answers(state: dict[str, Any]) -> list[AIMessage]:
    return [message for message in state["messages"] if isinstance(message, AIMessage)]


def test_an_agent_pays_for_new_tokens_only(chat: ChatAgentCache) -> None:
    agent = create_agent(chat, [tide, log], system_prompt=SYSTEM, middleware=[AgentCacheMiddleware()])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", ".* prompt tokens were computed again")  # once per process, in any test
        first, second = answers(agent.invoke(asked()))
    assert first.tool_calls[0]["name"] == "tide"
    read = second.usage_metadata["input_token_details"]["cache_read"]
    assert read >= first.usage_metadata["total_tokens"] - 1


def test_receipts_are_events(chat: ChatAgentCache) -> None:
    agent = create_agent(chat, [tide], system_prompt=SYSTEM, middleware=[AgentCacheMiddleware()])
    told = [part["agentcache.receipt"] for part in agent.stream(asked(), stream_mode="custom")]
    assert len(told) == 2
    assert told[1]["cached_tokens"] > told[0]["cached_tokens"]
    assert told[0]["usage"]["input_tokens"] == told[0]["prompt_tokens"]


def test_an_answer_of_langchains_cache_is_no_event(chat: ChatAgentCache) -> None:
    model = chat.model_copy(update={"cache": InMemoryCache()})
    agent = create_agent(model, middleware=[AgentCacheMiddleware()])
    assert [len(list(agent.stream(asked("Hi"), stream_mode="custom"))) for _ in range(2)] == [1, 0]


@script.TOLD_IN_LOOPS
async def test_events_of_async_agents(chat: ChatAgentCache) -> None:
    agent = create_agent(chat, [tide], middleware=[AgentCacheMiddleware()])
    events = [event async for event in agent.astream_events(asked(), version="v2") if event["event"] == "on_custom_event"]
    assert [event["name"] for event in events] == ["agentcache.receipt"] * 2


def test_volatile_text_stands_at_the_end(chat: ChatAgentCache) -> None:
    clock = itertools.count(12)
    agent = create_agent(
        chat, [tide], system_prompt=SYSTEM, middleware=[AgentCacheMiddleware(volatile=lambda state: f"It is {next(clock)} o'clock.")]
    )
    state = agent.invoke(asked())
    assert next(clock) == 14, "asked once for each step"
    assert all("o'clock" not in str(message.content) for message in state["messages"]), "for one call only"
    account = answers(state)[1].response_metadata["agentcache"]
    assert account["cached_tokens"] > 0.5 * account["prompt_tokens"]
    assert [(move["by"], move["to"], move["role"]) for move in account["moves"]] == [("volatile", "tail", "user")]
    assert account["ephemeral_tokens"] > 0


def test_facts_become_messages_when_they_change(chat: ChatAgentCache) -> None:
    facts = {"now": "The user is called Ada."}
    agent = create_agent(chat, [tide], middleware=[AgentCacheMiddleware(facts=lambda state: facts["now"])], checkpointer=InMemorySaver())
    config: Any = {"configurable": {"thread_id": "1"}}
    agent.invoke(asked("Hello"), config)
    agent.invoke(asked("Hello again"), config)
    facts["now"] = "The user is called Eve."
    state = agent.invoke(asked("And now?"), config)
    said = [message.content for message in state["messages"] if message.additional_kwargs.get("agentcache")]
    assert [text.split("called ")[1].split(".")[0] for text in said] == ["Ada", "Eve"]


@pytest.mark.parametrize("middleware", [[AgentCacheMiddleware()], []], ids=["with", "without"])
def test_blocks_behind_the_tagged_one_move(chat: ChatAgentCache, middleware: list[Any]) -> None:
    accounts = []
    for memory in ("Memory: none yet.", "Memory: two ships."):
        blocks = [{"type": "text", "text": SYSTEM, "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": memory}]
        agent = create_agent(chat, [tide], system_prompt=SystemMessage(blocks), middleware=middleware)
        accounts.append(answers(agent.invoke(asked("Hello")))[0].response_metadata["agentcache"])
        (move,) = accounts[-1]["moves"]
        assert (move["message"], move["start"], move["by"]) == (0, len(SYSTEM), "marker")
        assert (move["to"], move["role"]) == ("tail", "system")
    assert accounts[1]["computed_tokens"] < 40, "the tools behind the system prompt, and the question, are read all the same"


class Narrows(AgentMiddleware):
    """Takes away tools from the second step on, as tool selectors do."""

    def __init__(self, *keep: str) -> None:
        super().__init__()
        self.keep = keep
        self.calls = 0

    def wrap_model_call(self, request: Any, handler: Any) -> Any:
        self.calls += 1
        if self.calls > 1:
            request = request.override(tools=[one for one in request.tools if one.name in self.keep])
        return handler(request)


@pytest.mark.parametrize("keep", [("log",), ()])
def test_tools_that_were_taken_away_stay_and_cannot_be_called(chat: ChatAgentCache, keep: tuple[str, ...]) -> None:
    seen: list[dict[str, Any]] = []
    original = ChatAgentCache._open
    agent = create_agent(chat, [tide, log], system_prompt=SYSTEM, middleware=[Narrows(*keep), AgentCacheMiddleware()])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ChatAgentCache, "_open", lambda self, messages, stop, kw: seen.append(kw) or original(self, messages, stop, kw))
        state = agent.invoke(asked(), {"recursion_limit": 30})
    assert [len(kwargs["tools"]) for kwargs in seen] == [2] * len(seen)
    assert seen[1]["forbidden_tools"] == [name for name in ("tide", "log") if name not in keep]
    first, second = answers(state)[:2]
    assert second.usage_metadata["input_token_details"]["cache_read"] >= first.usage_metadata["total_tokens"] - 1
    assert not second.tool_calls or keep


def test_who_breaks_the_prefix_is_named(chat: ChatAgentCache) -> None:
    clock = itertools.count(12)

    @dynamic_prompt
    def prompt_with_time(request: Any) -> str:
        return f"It is {next(clock)} o'clock. {SYSTEM}"

    agent = create_agent(chat, [tide], middleware=[Narrows("tide"), prompt_with_time, AgentCacheMiddleware()])
    with pytest.warns(
        UserWarning, match=r"^prompt_with_time changed the system prompt: from character 7 on, .It is 12 o.* became .It is 13"
    ) as said:
        agent.invoke(asked())
    assert len(said) == 1


def test_edits_of_the_state_are_told_apart(chat: ChatAgentCache) -> None:
    class Forgets(AgentMiddleware):
        def before_model(self, state: Any, runtime: Any) -> Any:
            first = state["messages"][0]
            return {"messages": [HumanMessage("Something else", id=first.id)]} if len(state["messages"]) > 1 else None

    agent = create_agent(chat, [tide], middleware=[Forgets(), AgentCacheMiddleware()])
    with pytest.warns(UserWarning, match=r"^an edit of the agent's state changed message 0 \(human\)"):
        agent.invoke(asked())
    quiet = create_agent(chat, [tide], middleware=[Forgets(), AgentCacheMiddleware(on_change="ignore")])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", ".* prompt tokens were computed again")  # once per process, in any test
        quiet.invoke(asked())


def test_the_prefix_is_warm_before_the_first_step(chat: ChatAgentCache) -> None:
    middleware = AgentCacheMiddleware(model=chat, system_prompt=SYSTEM, tools=[tide, log])
    agent = create_agent(chat, [tide, log], system_prompt=SYSTEM, middleware=[middleware])
    first = answers(agent.invoke(asked()))[0]
    assert first.usage_metadata["input_token_details"]["cache_read"] > 200


@pytest.mark.parametrize("strategy", ["provider", "tool"])
def test_agents_with_a_form_for_their_answer(chat: ChatAgentCache, strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from langchain.agents.structured_output import ProviderStrategy, ToolStrategy

    form: Any = ProviderStrategy(Verdict) if strategy == "provider" else ToolStrategy(Verdict)
    if strategy == "tool":  # a model that must call something may call twice, which agents send back to it
        monkeypatch.setattr(script, "answer", lambda *asked: script.call("Verdict", good=True, why="calm"))
    chat = chat.model_copy(update={"max_tokens": 120, "temperature": 1.0, "seed": 5})
    agent = create_agent(chat, [], response_format=form, middleware=[AgentCacheMiddleware()])
    assert isinstance(agent.invoke(asked("How was it?"))["structured_response"], Verdict)
    assert chat.profile["structured_output"], "so that agents choose the form without a tool"


def test_beside_summarization(chat: ChatAgentCache) -> None:
    summary = SummarizationMiddleware(chat, trigger=("messages", 4), keep=("messages", 2))
    agent = create_agent(
        chat, [tide], system_prompt=SYSTEM, middleware=[summary, AgentCacheMiddleware(on_change="ignore")], checkpointer=InMemorySaver()
    )
    config: Any = {"configurable": {"thread_id": "1"}}
    for text in ("Hello", "How are you?", "And now?"):
        state = agent.invoke(asked(text), config)
    assert any("summary" in str(message.content).lower() for message in state["messages"])
    assert answers(state)[-1].usage_metadata["input_token_details"]["cache_read"] > 150, "the system prompt and the tools are still there"


def test_other_models_are_left_alone() -> None:
    from langchain_core.language_models import GenericFakeChatModel

    fake = GenericFakeChatModel(messages=iter([AIMessage("hello")]))
    state = create_agent(fake, [], middleware=[AgentCacheMiddleware(volatile=lambda state: None)]).invoke(asked())
    assert answers(state)[0].content == "hello"


def test_react_in_text(chat: ChatAgentCache, monkeypatch: pytest.MonkeyPatch) -> None:
    """Agents that write Thought and Action: bound stop strings, and a scratchpad that ends in a space."""
    from langchain_classic.agents import AgentExecutor, create_react_agent
    from langchain_core.prompts import PromptTemplate

    steps = iter(["I look.\nAction: tide\nAction Input: Averil\nObservation: invented", "I know.\nFinal Answer: At 3."])
    monkeypatch.setattr(script, "answer", lambda *asked: next(steps))
    prompt = PromptTemplate.from_template("{tools} {tool_names}\nQuestion: {input}\nThought:{agent_scratchpad}")
    agent = create_react_agent(chat, [tide], prompt)
    done = AgentExecutor(agent=agent, tools=[tide], return_intermediate_steps=True).invoke({"input": "When is high water?"})
    assert done["output"] == "At 3."
    ((action, observation),) = done["intermediate_steps"]
    assert (action.tool, observation) == ("tide", "High water in Averil at 3.")


def test_bad_settings() -> None:
    with pytest.raises(ValueError, match="on_change='shout'"):
        AgentCacheMiddleware(on_change="shout")  # type: ignore[arg-type]


def test_an_agent_takes_no_steps_for_what_is_not_used(chat: ChatAgentCache) -> None:
    """LangGraph runs each hook as a step, and saves a checkpoint behind it."""

    def steps(**said: Any) -> set[str]:
        agent = create_agent(chat, [tide], middleware=[AgentCacheMiddleware(**said)])
        return {name for name in agent.get_graph().nodes if "Middleware" in name}

    assert steps() == set()
    assert steps(facts=lambda state: "x") == {"AgentCacheMiddleware.before_model"}
    both = {"AgentCacheMiddleware.before_model", "AgentCacheMiddleware.before_agent"}
    assert steps(facts=lambda state: "x", model=chat, system_prompt=SYSTEM) == both
