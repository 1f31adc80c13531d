"""What a user is told to change: in each response's `raw`, in events, and once in a warning, for what LlamaIndex does to prompts."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from typing import Any

import pytest
from cases import call, system, tide, tiny, tools, user, wind
from llama_index.core.agent.workflow import AgentWorkflow, FunctionAgent, ReActAgent
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.core.storage.chat_store import SimpleChatStore
from llama_index.core.workflow import Context
from llama_index.llms.agentcache import AppendOnlyMemory, ReceiptEvent, ReplayLLM, SharedAgentWorkflow, StableReActAgent, answer_at_tail
from pydantic import BaseModel

from agentcache.errors import ReuseWarning

Make = Callable[..., Any]
PROMPT = "You keep the light and answer what ships ask. " * 8
END = "Thought: I know.\nAnswer: Lit."
LONG = "Of the harbour that lies two miles north of the head, behind the long mole with the red lamp. " * 3


class Tide(BaseModel):
    """High water."""

    time: str


class Events(BaseEventHandler):
    """The receipts that were told."""

    heard: list[dict[str, Any]] = []

    def handle(self, event: Any, **kwargs: Any) -> None:
        if isinstance(event, ReceiptEvent):
            self.heard.append(event.receipt["receipt"])


async def retrieved(llm: Any) -> None:
    """Tools that change by step."""
    llm.expect("One.", "Two.")
    memory = AppendOnlyMemory()
    for tool in (tide, wind):
        await FunctionAgent(tools=[tool], llm=llm, system_prompt=PROMPT).run(LONG, memory=memory)


async def handoff(llm: Any) -> None:
    llm.expect(call("handoff", to_agent="pilot", reason="Wind."), "North.")
    await _two(AgentWorkflow, llm).run(LONG)


def _two(kind: Any, llm: Any) -> Any:
    keeper = FunctionAgent(name="keeper", description="Knows tides.", tools=[tide], llm=llm, system_prompt=f"You are the keeper. {PROMPT}")
    pilot = FunctionAgent(name="pilot", description="Knows winds.", tools=[wind], llm=llm, system_prompt=f"You are the pilot. {PROMPT}")
    return kind([keeper, pilot], root_agent="keeper")


async def full(llm: Any) -> None:
    memory = ChatMemoryBuffer.from_defaults(token_limit=200, tokenizer_fn=llm.count)
    for turn in range(10):
        llm.expect("It is lit.")
        memory.put(user(f"Question {turn}: what of the light {turn} at the head in harbour {turn}?"))
        memory.put((await llm.achat([system(PROMPT), *memory.get()])).message)


async def react(llm: Any) -> None:
    def log(day: int) -> str:
        """What the log says."""
        return f"Log of day {day}: {LONG}"

    made_up = 'Thought: I look.\nAction: log\nAction Input: {"day":1}\nObservation: ' + LONG
    llm.expect(made_up, "Thought: I know.\nAnswer: Lit.", "Thought: I know.\nAnswer: As I said.")
    agent, memory = ReActAgent(tools=[log], llm=llm, system_prompt=PROMPT), AppendOnlyMemory()
    for question in ("Lit on day 1?", "Sure?"):
        await agent.run(question, memory=memory)


class Copies(ChatMemoryBuffer):
    """A memory that hands out copies, as LlamaIndex's `Memory` does out of its database."""

    def get(self, *args: Any, **kwargs: Any) -> list[ChatMessage]:
        return [one.model_copy(deep=True) for one in super().get(*args, **kwargs)]


async def state(llm: Any) -> None:
    """The state that a workflow writes into the newest message is gone at the next step."""
    llm.expect(call("tide", harbour="Averil"), "At 14:05.")
    agent = FunctionAgent(name="keeper", tools=tools(), llm=llm, system_prompt=PROMPT)
    await AgentWorkflow([agent], initial_state={"lamp": "lit"}).run(LONG, memory=Copies.from_defaults(token_limit=8000))


async def stopped(llm: Any) -> None:
    llm.expect(call("tide", harbour="Averil"), call("tide", harbour="Averil"), "I could not say.")
    agent = FunctionAgent(tools=tools(), llm=llm, system_prompt=PROMPT, early_stopping_method="generate")
    await agent.run(LONG, max_iterations=2)


async def output(llm: Any) -> None:
    llm.expect("At 14:05.", '{"time": "14:05"}')
    await FunctionAgent(tools=tools(), llm=llm, system_prompt=PROMPT, output_cls=Tide).run(LONG)


async def clock(llm: Any) -> None:
    memory = AppendOnlyMemory()
    for minute in (11, 12):
        llm.expect("Lit.")
        await FunctionAgent(tools=tools(), llm=llm, system_prompt=f"It is 2026-11-23 10:{minute}:07. {PROMPT}").run(LONG, memory=memory)


async def passages(llm: Any) -> None:
    """Retrieved text in the system prompt, as context chat engines put it."""
    turns: list[ChatMessage] = []
    for topic in ("the mole", "the lamp"):
        llm.expect("So it is.")
        turns.append(user(f"What of {topic}? {LONG}"))
        turns.append((await llm.achat([system(f"{PROMPT} Context: all about {topic}, {topic} and {topic}."), *turns])).message)


async def ranked(llm: Any) -> None:
    """The same passages there, as they are ranked for each question."""
    turns: list[ChatMessage] = []
    known = [f"The mole of harbour {n} has a lamp that is seen for {n} miles." for n in range(8)]
    for found in (known, known[::-1]):
        llm.expect("So it is.")
        turns.append(user(f"What of it? {LONG}"))
        turns.append((await llm.achat([system("\n\n".join([PROMPT, *found])), *turns])).message)


CASES = [
    (retrieved, "changed tool set", "with_superset"),
    (handoff, "changed system text", "SharedAgentWorkflow"),
    (full, "truncated history", "AppendOnlyMemory"),
    (react, "edited history", "StableReActAgent"),
    (state, "edited history", "AppendOnlyMemory hands messages out as they were shown, a workflow's initial_state included"),
    (stopped, "tools left out", "with_superset"),
    (output, "rewritten conversation", "answer_at_tail"),
    (clock, "clock", "newest user message, or into volatile="),
    (passages, "changed system text", "retrieved passages, belongs into the newest user message"),
    (ranked, "order", "retrieved passages, belongs into the newest user message"),
]


@pytest.mark.filterwarnings("default::agentcache.errors.ReuseWarning")
@pytest.mark.parametrize(("case", "cause", "cure"), CASES, ids=[case.__name__ for case, _, _ in CASES])
def test_each_cause_is_told_with_its_cure(llm: Make, run: Make, case: Any, cause: str, cure: str) -> None:
    model, events = llm(), Events(heard=[])
    dispatcher = get_dispatcher()
    dispatcher.add_event_handler(events)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", ReuseWarning)
            run(case(model))
    finally:
        dispatcher.event_handlers.remove(events)
    told = [one["missed"] for one in events.heard if "missed" in one]
    assert {one["cause"] for one in told} == {cause}
    assert all(cure in f"{one['fix']} {one.get('hint', '')}" for one in told)
    assert all(one["cost_tokens"] >= 32 for one in told)
    said = [one for one in caught if issubclass(one.category, ReuseWarning)]
    assert len(said) == 1  # once per cause, however often it happens
    assert cure in str(said[0].message)
    assert f"{cause} (" in str(said[0].message)
    assert all(len(json.dumps(one)) < 1200 for one in events.heard)


@pytest.mark.filterwarnings("error::agentcache.errors.ReuseWarning")
def test_the_parts_that_are_named_are_told_of_nothing(llm: Make, run: Make) -> None:
    model = llm()

    async def ask() -> None:
        model.expect(call("handoff", to_agent="pilot", reason="Wind."), "North.", '{"time": "14:05"}')
        await answer_at_tail(_two(SharedAgentWorkflow, model), Tide).run(LONG)
        model.expect('Thought: I look.\nAction: tide\nAction Input: {"harbour":"A"}', END, END)
        agent, memory = StableReActAgent(tools=tools(), llm=model, system_prompt=PROMPT), AppendOnlyMemory()
        for _ in range(2):
            await agent.run(LONG, memory=memory)
        memory = AppendOnlyMemory.from_defaults(token_limit=300, tokenizer_fn=model.count)
        for turn in range(12):
            model.expect("It is lit.")
            memory.put(user(f"Question {turn}: what of the light {turn} at the head in harbour {turn}?"))
            memory.put((await model.achat([system(PROMPT), *memory.get()])).message)

    run(ask())
    assert model.receipts


def test_a_redacted_engine_names_no_tool(run: Make) -> None:
    with tiny(redact=True) as engine, ReplayLLM(engine=engine, constrain=False) as model:
        with pytest.warns(ReuseWarning) as caught:
            run(retrieved(model))
        (said,) = (str(one.message) for one in caught if one.category is ReuseWarning)
        assert "wind" not in said
        assert "with_superset" in said


def test_the_warning_stands_at_the_callers_line(llm: Make) -> None:
    model, history = llm("One.", "Two."), [system(PROMPT), user("?"), ChatMessage(role="assistant", content="!")]
    model.chat_with_tools(tools()[:1], user_msg=LONG, chat_history=history)
    with pytest.warns(ReuseWarning) as caught:
        model.chat_with_tools(tools()[1:], user_msg=LONG, chat_history=history)
    assert [one.filename for one in caught if one.category is ReuseWarning] == [__file__]


# -- a memory that LlamaIndex cannot save between two runs over a Context ----------------------------------------------------


class Unsaved(ChatMemoryBuffer):
    """A memory as LlamaIndex's own is with pydantic 2.14: its dict cannot be made."""

    def to_dict(self, **kwargs: Any) -> dict[str, Any]:
        raise ValueError("no serializer")


def _unsaved() -> Unsaved:
    return Unsaved.from_defaults(token_limit=4000)


def _two_runs(model: Any, memory: Any, again: Any = None) -> Any:
    async def ask() -> list[str]:
        agent = FunctionAgent(llm=model, system_prompt=PROMPT)
        ctx = Context(agent)
        await agent.run("My name is Ann.", ctx=ctx, memory=memory)
        await agent.run("What is my name?", ctx=ctx, memory=again)
        return [str(one.content) for one in await (await ctx.store.get("memory")).aget_all()]

    return ask()


@pytest.mark.filterwarnings("ignore:Skipping serialization of known unserializable key")  # LlamaIndex's word for it
@pytest.mark.filterwarnings("error::agentcache.errors.ReuseWarning")
def test_a_lost_memory_is_told_once(llm: Make, run: Make) -> None:
    model = llm(*["Ann."] * 12)
    with pytest.warns(ReuseWarning, match=r"lost: LlamaIndex .* with pydantic .* memory=AppendOnlyMemory"):
        assert run(_two_runs(model, _unsaved(), _unsaved())) == ["What is my name?", "Ann."]
    run(_two_runs(model, _unsaved(), _unsaved()))  # said already
    other = model.model_copy()
    other._host = model._host.view()
    other._host.hints = type(model._host.hints)()
    assert len(run(_two_runs(other, AppendOnlyMemory()))) == 4
    kept = _unsaved()
    assert len(run(_two_runs(other, kept, kept))) == 4  # given to each run: nothing is lost, and nothing is said


@pytest.mark.filterwarnings("ignore:Skipping serialization of known unserializable key")
def test_whether_llama_index_loses_its_own_memory_here(llm: Make, run: Make) -> None:
    """With pydantic 2.14 it does, with 2.13 it does not: either way the package says what is."""
    model = llm("Ann.", "Ann.")
    try:
        SimpleChatStore(store={"a": [user("?")]}).model_dump()
        saved = True
    except Exception:  # noqa: BLE001 - whatever pydantic raises
        saved = False
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        left = run(_two_runs(model, ChatMemoryBuffer.from_defaults(token_limit=4000)))
    assert len(left) == (4 if saved else 2)
    assert any("lost" in str(one.message) and one.category is ReuseWarning for one in caught) is not saved


def test_a_call_outside_a_workflow_looks_for_no_memory(llm: Make, run: Make) -> None:
    assert run(llm("Yes.").achat([user("Lit?")])).message.content == "Yes."
