"""LlamaIndex's agents on this model: what they do, in which order, and what each step has to compute."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from cases import call, system, tide, tools, user, wind
from llama_index.core.agent.react.formatter import ReActChatFormatter
from llama_index.core.agent.workflow import AgentOutput, AgentStream, AgentWorkflow, FunctionAgent, ReActAgent, ToolCallResult
from llama_index.core.base.llms.types import ChatMessage, TextBlock
from llama_index.core.llms.mock import MockFunctionCallingLLM, MockLLM
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.core.objects import ObjectRetriever
from llama_index.core.tools import FunctionTool
from llama_index.core.workflow import Context
from llama_index.llms.agentcache import AgentCacheLLM, AppendOnlyMemory, SharedAgentWorkflow, StableReActAgent, answer_at_tail
from llama_index.llms.agentcache.replay import kept
from llama_index.llms.agentcache.workflow import with_told
from pydantic import BaseModel

from agentcache.errors import ConfigError

Make = Callable[..., Any]
PROMPT = "You keep the light and answer what ships ask. " * 8


class Tide(BaseModel):
    """High water."""

    harbour: str
    time: str


TIDE = json.dumps({"harbour": "Averil", "time": "14:05"})


def _agent(llm: Any, **options: Any) -> FunctionAgent:
    return FunctionAgent(name="keeper", tools=tools(), llm=llm, system_prompt=PROMPT, **options)


# -- FunctionAgent -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("streaming", [True, False])
def test_function_agent_runs_tools_and_pays_for_new_tokens_only(llm: Make, run: Make, streaming: bool) -> None:
    model = llm(call("tide", harbour="Averil"), call("wind", harbour="Averil", hour=3), "High water at 14:05, wind north.")

    async def ask() -> str:
        return str(await _agent(model, streaming=streaming).run("Tide and wind?"))

    assert run(ask()) == "High water at 14:05, wind north."
    assert [one.completion_tokens > 0 for one in model.receipts] == [True] * 3
    assert kept(model.receipts) == [1.0, 1.0]


def test_events_carry_deltas_calls_and_small_raws(llm: Make, run: Make) -> None:
    model = llm("<think>\nThe log.\n</think>\nLet me look.\n" + call("tide", harbour="Averil"), "At 14:05.")

    async def listen() -> list[Any]:
        handler = _agent(model).run("Tide?")
        events = [event async for event in handler.stream_events()]
        await handler
        return events

    events = run(listen())
    streamed = [event for event in events if isinstance(event, AgentStream)]
    assert "".join(event.delta for event in streamed) == "Let me look.At 14:05."
    assert "".join(event.thinking_delta or "" for event in streamed) == "The log."
    assert [event.tool_calls[0].tool_name for event in streamed if event.tool_calls] == ["tide"]
    assert all(event.raw is None or len(json.dumps(event.raw)) < 1500 for event in streamed)
    assert [event.tool_name for event in events if isinstance(event, ToolCallResult)] == ["tide"]
    assert [event.response.content for event in events if isinstance(event, AgentOutput)] == ["Let me look.", "At 14:05."]


def test_results_are_told_in_the_order_of_their_calls(llm: Make, run: Make) -> None:
    async def slow(harbour: str) -> str:
        """A tool that takes its time."""
        await asyncio.sleep(0.2)
        return f"slow {harbour}"

    async def fast(harbour: str) -> str:
        """A tool that does not."""
        return f"fast {harbour}"

    both = call("slow", harbour="A") + "\n" + call("fast", harbour="B")
    model = llm(both, "Done.")
    rendered: list[str] = []

    async def ask() -> list[str]:
        agent = FunctionAgent(tools=[slow, fast], llm=model)
        handler = agent.run("Both?")
        arrived = [event.tool_name async for event in handler.stream_events() if isinstance(event, ToolCallResult)]
        await handler
        return arrived

    render = model.engine.renderer.render

    def spy(*args: Any, **options: Any) -> Any:
        layout = render(*args, **options)
        rendered.append(layout.text)
        return layout

    model.engine.renderer.render = spy
    try:
        assert run(ask()) == ["fast", "slow"]
    finally:
        del model.engine.renderer.render
    assert 0 < rendered[-1].index("slow A") < rendered[-1].index("fast B")


def test_memory_goes_on_where_the_last_run_ended(llm: Make, run: Make) -> None:
    model = llm(call("tide", harbour="Averil"), "At 14:05.", "As I said, at 14:05.")

    async def ask() -> None:
        agent, memory = _agent(model), AppendOnlyMemory.from_defaults(llm=model)
        await agent.run("Tide?", memory=memory)
        await agent.run("When?", memory=memory)
        assert [one.role.value for one in memory.get_all()] == ["user", "assistant", "tool", "assistant", "user", "assistant"]

    run(ask())
    assert kept(model.receipts) == [1.0, 1.0]


def test_initial_state_stays_in_the_prompt(llm: Make, run: Make) -> None:
    model = llm(call("tide", harbour="Averil"), "At 14:05.", "Yes.")

    async def ask() -> None:
        agent, memory = _agent(model, initial_state={"lamp": "lit"}), AppendOnlyMemory()
        ctx = Context(agent)
        await agent.run("Tide?", memory=memory, ctx=ctx)
        await agent.run("Sure?", memory=memory, ctx=ctx)
        assert "lamp" in memory.get_all()[0].content

    run(ask())
    assert kept(model.receipts) == [1.0, 1.0]


@pytest.mark.parametrize("superset", [False, True])
def test_early_stopping_asks_for_an_answer(llm: Make, run: Make, superset: bool) -> None:
    model = llm(call("tide", harbour="Averil"), call("tide", harbour="Averil"), "I could not say.")
    model = model.with_superset(tools()) if superset else model

    async def ask() -> str:
        agent = _agent(model, early_stopping_method="generate")
        return str(await agent.run("Tide?", max_iterations=2))

    assert run(ask()) == "I could not say."
    last = kept(model.receipts)[-1]
    assert last > 0.5 if superset else last < 0.5  # the last request brings no tools: only the superset keeps them in the prompt


def test_initial_tool_choice_is_the_first_call_only(llm: Make, run: Make) -> None:
    model = llm(call("tide", harbour="Averil"), "At 14:05.")
    said: list[Any] = []
    ask_inner = model._ask

    def spy(messages: Any, given: Any) -> Any:
        made = ask_inner(messages, given)
        said.append(made[0].choice)
        return made

    object.__setattr__(model, "_ask", spy)

    async def ask() -> str:
        return str(await _agent(model, initial_tool_choice="tide").run("Tide?"))

    run(ask())
    assert said == ["tide", "auto"]


# -- objects -----------------------------------------------------------------------------------------------------------


def test_output_cls_gives_an_object(llm: Make, run: Make) -> None:
    model = llm("At 14:05.", TIDE)

    async def ask() -> Any:
        return (await _agent(model, output_cls=Tide).run("Tide?")).structured_response

    assert run(ask()) == {"harbour": "Averil", "time": "14:05"}
    assert kept(model.receipts)[-1] < 0.5  # LlamaIndex has rewritten the conversation


@pytest.mark.parametrize("kind", ["function", "react"])
def test_answer_at_tail_gives_an_object_and_keeps_the_prompt(llm: Make, run: Make, kind: str) -> None:
    first = "At 14:05." if kind == "function" else "Thought: I know.\nAnswer: At 14:05."
    model = llm(first, TIDE)
    agent = _agent(model) if kind == "function" else StableReActAgent(tools=tools(), llm=model, system_prompt=PROMPT)

    async def ask() -> Any:
        return (await answer_at_tail(agent, Tide).run("Tide?", memory=AppendOnlyMemory())).structured_response

    assert run(ask()) == {"harbour": "Averil", "time": "14:05"}
    assert kept(model.receipts) == [1.0]


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("handed", [False, True])
def test_answer_at_tail_of_a_workflow(llm: Make, run: Make, shared: bool, handed: bool) -> None:
    """The agent that answered is asked, with its tools, the handoff among them: nothing of its prompt is computed again."""
    model = llm(*([call("handoff", to_agent="pilot", reason="Wind.")] if handed else []), "At 14:05.", TIDE)
    workflow = answer_at_tail((SharedAgentWorkflow if shared else AgentWorkflow)(_pilots(model), root_agent="keeper"), Tide)

    async def ask() -> Any:
        return (await workflow.run("Tide?", memory=AppendOnlyMemory())).structured_response

    assert run(ask()) == {"harbour": "Averil", "time": "14:05"}
    assert kept(model.receipts)[-1] == 1.0


@pytest.mark.parametrize("kind", ["agent", "workflow"])
def test_answer_at_tail_with_workflows_that_tell_no_context(llm: Make, run: Make, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.delattr(Context, "get_step_context")
    model = llm("At 14:05.", TIDE)
    agent = _agent(model)

    async def ask() -> Any:
        asked: Any = answer_at_tail(agent if kind == "agent" else AgentWorkflow([agent]), Tide)
        return (await asked.run("Tide?", memory=AppendOnlyMemory())).structured_response

    if kind == "agent":
        assert run(ask()) == {"harbour": "Averil", "time": "14:05"}
    else:
        with pytest.warns(UserWarning, match="upgrade llama-index-workflows"):
            assert run(ask()) is None


def test_answer_at_tail_shows_the_tools_that_were_retrieved(llm: Make, run: Make) -> None:
    class Retriever(ObjectRetriever[Any]):
        def __init__(self) -> None: ...

        async def aretrieve(self, query: Any) -> list[Any]:
            return tools()[:1] if "Tide" in str(query) else tools()[1:]

    model = llm("At 14:05.", TIDE)
    agent = FunctionAgent(tool_retriever=Retriever(), llm=model, system_prompt=PROMPT)

    async def ask() -> Any:
        return (await answer_at_tail(agent, Tide).run("Tide?", memory=AppendOnlyMemory())).structured_response

    assert run(ask()) == {"harbour": "Averil", "time": "14:05"}
    assert kept(model.receipts) == [1.0]


def test_answer_at_tail_needs_this_model() -> None:
    workflow = AgentWorkflow([FunctionAgent(llm=MockFunctionCallingLLM())])
    with pytest.raises(ConfigError, match="MockFunctionCallingLLM"):
        answer_at_tail(workflow, Tide)
    with pytest.raises(ConfigError, match="an agent of llama_index"):
        answer_at_tail("keeper", Tide)  # type: ignore[type-var]
    with pytest.raises(ConfigError, match="MockLLM"):
        answer_at_tail(ReActAgent(llm=MockLLM()), Tide)


# -- handoffs ----------------------------------------------------------------------------------------------------------


KEEPER, PILOT = "You are the keeper. " * 10, "You are the pilot. " * 10


def _pilots(llm: Any) -> list[Any]:
    keeper = FunctionAgent(name="keeper", description="Knows tides.", tools=[tide], llm=llm, can_handoff_to=["pilot"], system_prompt=KEEPER)
    pilot = FunctionAgent(name="pilot", description="Knows winds.", tools=[wind], llm=llm, system_prompt=PILOT)
    return [keeper, pilot]


SCRIPT = (
    call("tide", harbour="Averil"),
    call("handoff", to_agent="pilot", reason="The wind is asked for."),
    call("wind", harbour="Averil", hour=3),
    "High water at 14:05, wind north.",
)


@pytest.mark.parametrize("shared", [False, True])
def test_agent_workflow_hands_off(llm: Make, run: Make, shared: bool) -> None:
    model = llm(*SCRIPT)
    agents = _pilots(model)
    workflow = (
        SharedAgentWorkflow(agents, root_agent="keeper", system_prompt=PROMPT) if shared else AgentWorkflow(agents, root_agent="keeper")
    )

    async def ask() -> tuple[str, list[str]]:
        handler = workflow.run("Tide and wind?", memory=AppendOnlyMemory())
        names = [event.current_agent_name async for event in handler.stream_events() if isinstance(event, AgentOutput)]
        return str(await handler), names

    assert run(ask()) == ("High water at 14:05, wind north.", ["keeper", "keeper", "pilot", "pilot"])
    shares = kept(model.receipts)
    assert shares[0] == shares[2] == 1.0
    assert shares[1] == 1.0 if shared else shares[1] < 0.3  # the step behind the handoff


def test_a_shared_workflow_puts_the_next_instructions_at_the_tail(llm: Make, run: Make) -> None:
    model = llm(*SCRIPT)
    agents = _pilots(model)
    workflow = SharedAgentWorkflow(agents, root_agent="keeper", system_prompt=PROMPT)
    memory = AppendOnlyMemory()

    async def ask() -> None:
        await workflow.run("Tide and wind?", memory=memory)

    run(ask())
    told = [one.content for one in memory.get_all() if one.role == "tool"]
    assert "You are the pilot." in told[1]
    assert "You are the pilot." not in workflow.agents["pilot"].system_prompt
    assert [agent.system_prompt for agent in agents] == [KEEPER, PILOT]  # the given agents are as they were


class Told:
    """What the model was sent, request by request."""

    def __init__(self, model: Any) -> None:
        self.prompts: list[list[Any]] = []
        ask_inner = model._ask

        def spy(messages: Any, given: Any) -> Any:
            made = ask_inner(messages, given)
            self.prompts.append(list(made[0].prompt))
            return made

        object.__setattr__(model, "_ask", spy)


def _shared(llm: Make, *script: str, pilot: str = PILOT, **options: Any) -> tuple[SharedAgentWorkflow, Any, Told]:
    """A workflow whose keeper hands off to the pilot at once, its model, and what that is sent."""
    model = llm(call("handoff", to_agent="pilot", reason="The wind is asked for."), *script)
    told, agents = Told(model), _pilots(model)
    agents[1] = agents[1].model_copy(update={"system_prompt": pilot})
    return SharedAgentWorkflow(agents, root_agent="keeper", system_prompt=PROMPT, **options), model, told


def _later(workflow: SharedAgentWorkflow, memory: Any) -> Any:
    """Runs in one context, after the first of which the memory has let the handoff go."""

    async def ask() -> Any:
        ctx = Context(workflow)
        await workflow.run("Tide and wind?", memory=memory, ctx=ctx)
        for number in range(6):
            await workflow.run(f"Question {number}, of the wind at sea." * 3, ctx=ctx, memory=memory)
        return await ctx.store.get("current_agent_name")

    return ask()


@pytest.mark.filterwarnings("ignore:Skipping serialization of known unserializable key")  # LlamaIndex's own memory
@pytest.mark.parametrize("memory", ["append", "buffer"])
def test_an_agent_keeps_instructions_when_memory_drops_the_handoff(llm: Make, run: Make, memory: str) -> None:
    workflow, model, told = _shared(llm, *["North."] * 8)
    kind = {"append": AppendOnlyMemory, "buffer": ChatMemoryBuffer}[memory]
    assert run(_later(workflow, kind.from_defaults(token_limit=200 if memory == "append" else 300, tokenizer_fn=model.count))) == "pilot"
    for prompt in told.prompts[1:]:
        text = "\n".join(one.content for one in prompt)
        assert text.count(PILOT.strip()) == 1
        assert [one.role for one in prompt[:2]] == ["system", "user"]  # no two turns in a row that a template would refuse
    assert told.prompts[-1][1].content.startswith("You are now the agent 'pilot'. From here on these instructions hold:\n" + PILOT)
    assert all(prompt[0] == told.prompts[0][0] for prompt in told.prompts)  # system prompt and tools stay shared
    if memory == "append":
        assert sum(share == 1.0 for share in kept(model.receipts)) >= 5  # only where turns were dropped is anything computed again


@pytest.mark.parametrize("way", ["chat_history", "reset"])
def test_an_agent_keeps_its_instructions_in_a_fresh_history(llm: Make, run: Make, way: str) -> None:
    workflow, _, told = _shared(llm, "North.", "West.", initial_state={"lamp": "lit"})

    async def ask() -> str:
        ctx = Context(workflow)
        await workflow.run("Tide and wind?", memory=AppendOnlyMemory(), ctx=ctx)
        if way == "reset":
            (await ctx.store.get("memory")).reset()
            await workflow.run("And now?", ctx=ctx)
        else:
            history = [ChatMessage(role="assistant", content="Hello."), user("And now?")]
            await workflow.run(chat_history=history, ctx=ctx)
        return "".join(str(one.content) for one in (await ctx.store.get("memory")).get_all())

    remembered = run(ask())
    last = told.prompts[-1]
    assert last[-1].content.count(PILOT.strip()) == 1
    assert "And now?" in last[-1].content
    assert "lit" in last[-1].content
    assert "And now?" in remembered
    assert PILOT.strip() not in remembered  # put back for the model, not into the memory


def test_an_agent_without_instructions_is_told_who_it_is(llm: Make, run: Make) -> None:
    workflow, model, told = _shared(llm, *["North."] * 8, pilot="")
    run(_later(workflow, AppendOnlyMemory.from_defaults(token_limit=200, tokenizer_fn=model.count)))
    for prompt in told.prompts[1:]:
        assert "\n".join(one.content for one in prompt).count("You are now the agent 'pilot'.") == 1


def test_the_first_agent_is_told_nothing_again(llm: Make, run: Make) -> None:
    model = llm("Lit.", "Lit.")
    told = Told(model)
    workflow = SharedAgentWorkflow(_pilots(model), root_agent="keeper")

    async def ask() -> None:
        ctx, memory = Context(workflow), AppendOnlyMemory()
        for _ in range(2):
            memory.reset()
            await workflow.run("Lit?", ctx=ctx, memory=memory)

    run(ask())
    assert "".join(one.content for one in told.prompts[-1]).count(KEEPER.strip()) == 1


def test_an_agent_that_is_stopped_early_answers_by_its_instructions(llm: Make, run: Make) -> None:
    workflow, model, told = _shared(llm, call("wind", harbour="Averil"), "North.", early_stopping_method="generate")

    async def ask() -> str:
        ctx, memory = Context(workflow), AppendOnlyMemory()
        await ctx.store.set("current_agent_name", "pilot")
        return str(await workflow.run("Wind?", ctx=ctx, memory=memory, max_iterations=2))

    model._script.popleft()  # no handoff: it is the pilot from the start
    model._script.appendleft(call("wind", harbour="Averil"))
    assert run(ask()) == "North."
    assert all("".join(one.content for one in prompt).count(PILOT.strip()) == 1 for prompt in told.prompts)
    assert len(told.prompts) == 3


def test_instructions_return_before_the_first_user_turn() -> None:
    image = ChatMessage(role="user", blocks=[TextBlock(text="one"), TextBlock(text="two")], additional_kwargs={"k": 1})
    said = [system("s"), ChatMessage(role="assistant", content="a"), image, user("b")]
    made = with_told(said, "Told.")
    assert [one.content for one in made] == ["s", "a", "Told.\n\none\ntwo", "b"]
    assert made[2].additional_kwargs == {"k": 1}
    assert said[2].content == "one\ntwo"
    without = [system("s"), system("t"), ChatMessage(role="assistant", content="a")]
    assert [(one.role.value, one.content) for one in with_told(without, "Told.")][1:] == [
        ("system", "t"),
        ("user", "Told."),
        ("assistant", "a"),
    ]


def test_a_masked_tool_is_not_run(llm: Make, run: Make) -> None:
    model = llm(call("wind", harbour="Averil", hour=3), "I cannot see the wind.")  # as if the mask had a hole

    async def ask() -> list[Any]:
        handler = SharedAgentWorkflow(_pilots(model), root_agent="keeper").run("Wind?")
        results = [event async for event in handler.stream_events() if isinstance(event, ToolCallResult)]
        await handler
        return results

    (result,) = run(ask())
    assert result.tool_output.is_error
    assert "not found" in str(result.tool_output)


def test_who_cannot_share_is_named(llm: Make) -> None:
    react = ReActAgent(name="r", description="d", tools=[tide], llm=llm())
    keeper = FunctionAgent(name="k", description="d", tools=[tide], llm=llm())
    other = FunctionAgent(name="o", description="d", tools=[FunctionTool.from_defaults(wind, name="tide")], llm=llm())
    with pytest.raises(ConfigError, match="'r' is a ReActAgent"):
        SharedAgentWorkflow([keeper, react], root_agent="k")
    with pytest.raises(ConfigError, match="'tide'"):
        SharedAgentWorkflow([keeper, other], root_agent="k")


def test_one_agent_alone_is_a_workflow_too(llm: Make, run: Make) -> None:
    async def ask() -> str:
        return str(await SharedAgentWorkflow([_agent(llm("Yes."))]).run("Lit?"))

    assert run(ask()) == "Yes."


# -- ReAct -------------------------------------------------------------------------------------------------------------

STEPS = (
    'Thought: I need a tool.\nAction: tide\nAction Input: {"harbour":"Averil"}\nObservation: high water at noon',
    "Thought: I can answer.\nAnswer: At 14:05.",
    "Thought: I know it already.\nAnswer: At 14:05, as I said.",
)


def _two_turns(agent: Any, memory: Any) -> Any:
    async def ask() -> list[str]:
        return [str(await agent.run(question, memory=memory)) for question in ("Tide?", "When?")]

    return ask()


def test_stable_react_keeps_its_prompt_over_steps_and_runs(llm: Make, run: Make) -> None:
    model, memory = llm(*STEPS), AppendOnlyMemory()
    agent = StableReActAgent(tools=tools(), llm=model, system_prompt=PROMPT)
    assert run(_two_turns(agent, memory)) == ["At 14:05.", "At 14:05, as I said."]
    said = [one.content for one in memory.get_all()]
    assert said[1] == STEPS[0].partition("\nObservation")[0]  # the model's own text, cut where it began to make up a result
    assert said[2] == "Observation: high water in Averil at 14:05"
    assert kept(model.receipts) == [1.0, 1.0]
    for before, after in zip(model.receipts, model.receipts[1:]):
        assert after.cached_tokens >= before.prompt_tokens + before.completion_tokens - 4


def test_runs_in_one_context_do_not_repeat_what_was_said(llm: Make, run: Make) -> None:
    model = llm(*STEPS)
    agent = StableReActAgent(tools=tools(), llm=model, system_prompt=PROMPT)

    async def ask() -> list[str]:
        ctx, memory = Context(agent), AppendOnlyMemory()
        for question in ("Tide?", "When?"):
            await agent.run(question, memory=memory, ctx=ctx)
        memory = await ctx.store.get("memory")
        return [one.role.value for one in memory.get_all()]

    assert run(ask()) == ["user", "assistant", "user", "assistant", "user", "assistant"]


def test_stock_react_loses_it(llm: Make, run: Make) -> None:
    """What the class above is for; if LlamaIndex mends this, it can go."""
    model = llm(*STEPS)
    agent = ReActAgent(tools=tools(), llm=model, system_prompt=PROMPT)
    run(_two_turns(agent, ChatMemoryBuffer.from_defaults(token_limit=4000)))
    before, after = model.receipts[:2]
    assert after.cached_tokens < before.prompt_tokens + before.completion_tokens - 4
    assert kept(model.receipts)[1] < 1.0


def test_the_formatter_alone_writes_json_and_stops(llm: Make, run: Make) -> None:
    from llama_index.core.agent.react.types import ActionReasoningStep
    from llama_index.llms.agentcache import StableReActFormatter

    formatter = StableReActFormatter.from_defaults(context="Be brief.")
    step = ActionReasoningStep(thought="t", action="tide", action_input={"harbour": "Avéril", "sure": True})
    turns = formatter.format(tools(), [user("?")], [step])
    assert turns[-1].content == 'Thought: t\nAction: tide\nAction Input: {"harbour": "Avéril", "sure": true}'
    model = llm(*STEPS[:2])
    agent = ReActAgent(tools=tools(), llm=model, formatter=formatter)

    async def ask() -> str:
        return str(await agent.run("Tide?"))

    assert run(ask()) == "At 14:05."
    assert model.receipts[0].finish_reason == "stop"


@pytest.mark.parametrize("where", ["stop", "additional_kwargs"])
def test_react_stops_where_the_model_was_told_to_as_well(llm: Make, run: Make, where: str) -> None:
    stop = {"stop": ["Averil"]} if where == "stop" else {"additional_kwargs": {"stop": "Averil"}}
    model = llm("Thought: I can answer.\nAnswer: At 14:05 in Averil, twice.", STEPS[0], STEPS[1], **stop)
    agent = StableReActAgent(tools=tools(), llm=model)

    async def ask() -> str:
        return str(await agent.run("Tide?"))

    assert run(ask()) == "At 14:05 in"  # the setting's stop
    turns = agent.formatter.format(tools(), [user("Tide?")])
    assert model.chat(turns, stop=None).message.content == STEPS[0].partition("Averil")[0]
    assert model.chat(turns, stop=[]).message.content == STEPS[1]  # a call's own replaces both


def test_stops_of_formatter_and_model_are_joined(llm: Make) -> None:
    model = llm(STEPS[0], stop=["never said"])
    turns = StableReActAgent(tools=tools(), llm=model).formatter.format(tools(), [user("Tide?")])
    assert model.chat(turns).message.content == STEPS[0].partition("\nObservation")[0]
    for name in ("stop", "stop_sequences", "stop_strings"):  # a call's own replaces both
        assert AgentCacheLLM._ask(model, turns, {name: ["x"]})[0].sampling.stop == ("x",)


def test_react_retries_what_it_cannot_read(llm: Make, run: Make) -> None:
    model = llm("Action: tide\nno input", STEPS[1])

    async def ask() -> str:
        return str(await StableReActAgent(tools=tools(), llm=model).run("Tide?"))

    assert run(ask()) == "At 14:05."


def test_react_returns_a_tools_result_directly(llm: Make, run: Make) -> None:
    model = llm(STEPS[0])
    direct = FunctionTool.from_defaults(tide, return_direct=True)

    async def ask() -> str:
        return str(await StableReActAgent(tools=[direct], llm=model).run("Tide?"))

    assert run(ask()) == "high water in Averil at 14:05"


class Terse(ReActChatFormatter):
    """A formatter of a user's own: another header, observations in capitals."""

    def format(self, tools: Any, chat_history: Any, current_reasoning: Any = None) -> list[ChatMessage]:
        turns = [
            user(step.get_content().upper()) if "observation" in type(step).__name__.lower() else _spoken(step)
            for step in current_reasoning or []
        ]
        return [system(f"TERSE. {self.context} {[one.metadata.name for one in tools]}"), *chat_history, *turns]


def _spoken(step: Any) -> ChatMessage:
    return ChatMessage(role="assistant", content=step.get_content())


@pytest.mark.parametrize("streaming", [True, False])
def test_a_formatter_of_ones_own_is_asked(llm: Make, run: Make, streaming: bool) -> None:
    model = llm(*STEPS)
    told = Told(model)
    agent = StableReActAgent(tools=tools(), llm=model, formatter=Terse(), system_prompt="Keep the light.", streaming=streaming)
    assert type(agent.formatter) is Terse
    run(_two_turns(agent, AppendOnlyMemory()))
    assert all(prompt[0].content == "TERSE. Keep the light. ['tide', 'wind']" for prompt in told.prompts)
    assert (
        told.prompts[1][-2].content == STEPS[0].partition("\nObservation")[0]
    )  # the model's own words, stopped where an observation begins
    assert told.prompts[1][-1].content == "OBSERVATION: HIGH WATER IN AVERIL AT 14:05"


def test_a_header_of_ones_own_is_kept(llm: Make, run: Make) -> None:
    model = llm(*STEPS[:2])
    told = Told(model)
    formatter = ReActChatFormatter.from_defaults(system_header="MINE: {tool_names} of {tool_desc} {context}", context="Be brief.")

    async def ask() -> str:
        return str(await StableReActAgent(tools=tools(), llm=model, formatter=formatter).run("Tide?"))

    assert run(ask()) == "At 14:05."
    assert told.prompts[0][0].content.startswith("MINE: tide, wind of ")
    assert told.prompts[0][0].content.endswith("Be brief.")
