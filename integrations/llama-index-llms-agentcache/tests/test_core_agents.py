"""What LlamaIndex promises of its agents, with this model in them: kinds of agents mixed, stopped early, asked for objects.

llama-index-core's wheel brings no tests; these are the cases of its agents that take an LLM. Annotations are not postponed: LlamaIndex
finds a tool's Context by them.
"""

import json
from collections.abc import Callable
from typing import Any

import pytest
from cases import call, tide, tools, wind
from llama_index.core.agent.workflow import (
    AgentOutput,
    AgentStreamStructuredOutput,
    AgentWorkflow,
    CodeActAgent,
    FunctionAgent,
    ReActAgent,
    ToolCallResult,
)
from llama_index.core.tools import FunctionTool
from llama_index.core.workflow import Context, HumanResponseEvent, InputRequiredEvent, JsonSerializer, WorkflowRuntimeError
from llama_index.llms.agentcache import AppendOnlyMemory, SharedAgentWorkflow, StableReActAgent
from llama_index.llms.agentcache.replay import kept
from pydantic import BaseModel

Make = Callable[..., Any]
ACT = "Thought: I need a tool.\nAction: {name}\nAction Input: {arguments}"
END = "Thought: I can answer.\nAnswer: At 14:05."
REACT = [ReActAgent, StableReActAgent]


class High(BaseModel):
    """High water."""

    harbour: str
    time: str


def act(name: str, **arguments: Any) -> str:
    return ACT.format(name=name, arguments=json.dumps(arguments))


def test_a_workflow_from_functions(llm: Make, run: Make) -> None:
    model = llm(call("tide", harbour="Averil"), "At 14:05.")

    async def ask() -> str:
        return str(await AgentWorkflow.from_tools_or_functions([tide, wind], llm=model, system_prompt="Keep the light.").run("Tide?"))

    assert run(ask()) == "At 14:05."


@pytest.mark.parametrize("kind", REACT)
def test_a_react_agent_hands_off_and_back(llm: Make, run: Make, kind: Any) -> None:
    model = llm(
        act("handoff", to_agent="pilot", reason="Wind."),
        call("wind", harbour="Averil", hour=3),
        call("handoff", to_agent="keeper", reason="Tide."),
        act("tide", harbour="Averil"),
        END,
    )
    keeper = kind(name="keeper", description="Knows tides.", tools=[tide], llm=model, can_handoff_to=["pilot"])
    pilot = FunctionAgent(name="pilot", description="Knows winds.", tools=[wind], llm=model, can_handoff_to=["keeper"])

    async def ask() -> tuple[str, list[str]]:
        handler = AgentWorkflow([keeper, pilot], root_agent="keeper").run("Wind and tide?")
        names = [event.current_agent_name async for event in handler.stream_events() if isinstance(event, AgentOutput)]
        return str(await handler), names

    assert run(ask()) == ("At 14:05.", ["keeper", "pilot", "pilot", "keeper", "keeper"])


@pytest.mark.parametrize("kind", REACT)
def test_a_react_agent_stops_early_with_answer_or_error(llm: Make, run: Make, kind: Any) -> None:
    async def ask(method: str, *script: str) -> str:
        agent = kind(tools=tools(), llm=llm(*script), early_stopping_method=method)
        return str(await agent.run("Tide?", max_iterations=2))

    steps = [act("tide", harbour="Averil")] * 2
    assert "could not say" in run(ask("generate", *steps, "I could not say."))
    with pytest.raises(WorkflowRuntimeError, match="(?i)max iterations"):
        run(ask("force", *steps))


@pytest.mark.parametrize("kind", REACT)
def test_a_react_agent_gives_an_object(llm: Make, run: Make, kind: Any) -> None:
    wanted = {"harbour": "Averil", "time": "14:05"}

    async def ask() -> Any:
        return (await kind(tools=tools(), llm=llm(END, json.dumps(wanted)), output_cls=High).run("Tide?")).structured_response

    assert run(ask()) == wanted


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("kind", REACT)
def test_a_react_agent_runs_with_and_without_streaming(llm: Make, run: Make, kind: Any, streaming: bool) -> None:
    async def ask() -> str:
        model = llm(act("tide", harbour="Averil"), END)
        return str(await kind(tools=tools(), llm=model, streaming=streaming).run("Tide?"))

    assert run(ask()) == "At 14:05."


def test_a_tool_that_fails_is_told_to_the_model(llm: Make, run: Make) -> None:
    def broken(harbour: str) -> str:
        """A tool that fails."""
        raise ValueError("the gauge is stuck")

    model = llm(call("broken", harbour="Averil"), "I cannot say.")

    async def ask() -> str:
        return str(await FunctionAgent(tools=[FunctionTool.from_defaults(broken)], llm=model).run("Tide?"))

    assert run(ask()) == "I cannot say."
    assert model.receipts[1].prompt_tokens > model.receipts[0].prompt_tokens


# -- tools that see the run's Context ----------------------------------------------------------------------------------


async def note(ctx: Context, text: str) -> str:
    """Write a note."""
    async with ctx.store.edit_state() as stored:
        stored["state"]["notes"].append(text)
    return f"{len(stored['state']['notes'])} notes"


async def confirm(ctx: Context, what: str) -> str:
    """Ask the harbour master."""
    answer = await ctx.wait_for_event(
        HumanResponseEvent, waiter_id=what, waiter_event=InputRequiredEvent(prefix=what), requirements={"who": "master"}
    )
    return str(answer.response)


@pytest.mark.parametrize("shared", [False, True])
def test_a_tool_sees_the_state_that_other_agents_left(llm: Make, run: Make, shared: bool) -> None:
    model = llm(
        call("note", text="fog"),
        call("handoff", to_agent="pilot", reason="Wind."),
        call("note", text="wind"),
        call("note", text="swell"),
        "Done.",
    )
    keeper = FunctionAgent(name="keeper", description="Writes.", tools=[note], llm=model, can_handoff_to=["pilot"])
    pilot = FunctionAgent(name="pilot", description="Writes, too.", tools=[note], llm=model)
    kind = SharedAgentWorkflow if shared else AgentWorkflow

    async def ask() -> tuple[list[str], list[str]]:
        workflow = kind([keeper, pilot], root_agent="keeper", initial_state={"notes": []})
        ctx = Context(workflow)
        handler = workflow.run("Write.", ctx=ctx)
        told = [str(event.tool_output) async for event in handler.stream_events() if isinstance(event, ToolCallResult)]
        assert str(await handler) == "Done."
        return told, (await ctx.store.get("state"))["notes"]

    told, notes = run(ask())
    assert [text for text in told if "notes" in text] == ["1 notes", "2 notes", "3 notes"]
    assert notes == ["fog", "wind", "swell"]


def test_a_run_goes_on_from_a_context_that_was_saved(llm: Make, run: Make) -> None:
    """As JSON, into a new agent: what another process would do. LlamaIndex's own memories cannot be saved with it."""
    model = llm(call("note", text="fog"), "Written.", call("note", text="wind"), "Both.")

    def agent() -> FunctionAgent:
        return FunctionAgent(name="keeper", tools=[note], llm=model, system_prompt="Keep the light.", initial_state={"notes": []})

    async def ask() -> tuple[list[str], list[str]]:
        first = agent()
        ctx = Context(first)
        await first.run("Fog.", ctx=ctx, memory=AppendOnlyMemory.from_defaults(token_limit=4000))
        saved = json.loads(json.dumps(ctx.to_dict(serializer=JsonSerializer())))
        later = agent()
        ctx = Context.from_dict(later, saved, serializer=JsonSerializer())
        assert str(await later.run("And wind.", ctx=ctx)) == "Both."
        memory = await ctx.store.get("memory")
        assert type(memory) is AppendOnlyMemory
        return [one.role.value for one in await memory.aget_all()], (await ctx.store.get("state"))["notes"]

    roles, notes = run(ask())
    assert roles == ["user", "assistant", "tool", "assistant"] * 2
    assert notes == ["fog", "wind"]
    assert kept(model.receipts) == [1.0] * 3


def test_a_tool_waits_for_a_person(llm: Make, run: Make) -> None:
    model = llm(call("confirm", what="Light the lamp?"), "It is lit.")

    async def ask() -> tuple[str, list[str]]:
        handler = FunctionAgent(tools=[confirm], llm=model).run("Light?")
        told = []
        async for event in handler.stream_events():
            if isinstance(event, InputRequiredEvent):
                handler.ctx.send_event(HumanResponseEvent(response="yes", who="master"))
            elif isinstance(event, ToolCallResult):
                told.append(str(event.tool_output))
        return str(await handler), told

    assert run(ask()) == ("It is lit.", ["yes"])
    assert len(model.receipts) == 2


# -- stopping early, direct results, no arguments ----------------------------------------------------------------------


def test_a_runs_stop_setting_precedes_its_agents(llm: Make, run: Make) -> None:
    model = llm(*[call("tide", harbour="Averil")] * 2, "I could not say.")
    rendered: list[str] = []
    render = model.engine.renderer.render

    def spy(*args: Any, **options: Any) -> Any:
        rendered.append(render(*args, **options).text)
        return render(*args, **options)

    model.engine.renderer.render = spy

    async def ask() -> str:
        agent = FunctionAgent(tools=tools(), llm=model, early_stopping_method="force")
        return str(await agent.run("Tide?", max_iterations=2, early_stopping_method="generate"))

    try:
        assert run(ask()) == "I could not say."
    finally:
        del model.engine.renderer.render
    assert "maximum number of iterations" in rendered[-1]


def test_a_function_agent_is_stopped_with_an_error(llm: Make, run: Make) -> None:
    async def ask() -> None:
        await FunctionAgent(tools=tools(), llm=llm(*[call("tide", harbour="Averil")] * 3)).run("Tide?", max_iterations=3)

    with pytest.raises(WorkflowRuntimeError, match="early_stopping_method='generate'"):
        run(ask())


@pytest.mark.parametrize("streaming", [True, False])
def test_a_tool_without_arguments_runs_or_answers_itself(llm: Make, run: Make, streaming: bool) -> None:
    def lamp() -> str:
        """Is the lamp lit?"""
        return "it is lit"

    direct = FunctionTool.from_defaults(lamp, return_direct=True)

    async def ask(*script: str, tool: Any) -> str:
        return str(await FunctionAgent(tools=[tool], llm=llm(*script), streaming=streaming).run("Lit?"))

    assert run(ask(call("lamp"), "Yes.", tool=lamp)) == "Yes."
    assert run(ask(call("lamp"), tool=direct)) == "it is lit"


# -- objects -----------------------------------------------------------------------------------------------------------

WANTED = {"harbour": "Averil", "time": "14:05"}


def told_object(handler: Any) -> Any:
    """(the answer, its object, objects told while it ran)"""

    async def listen() -> tuple[str, Any, list[Any]]:
        told = [event.output async for event in handler.stream_events() if isinstance(event, AgentStreamStructuredOutput)]
        done = await handler
        return str(done), done.get_pydantic_model(High), told

    return listen()


@pytest.mark.parametrize("workflow", [False, True])
def test_output_cls_gives_an_object_and_tells_it(llm: Make, run: Make, workflow: bool) -> None:
    model = llm(call("tide", harbour="Averil"), "At 14:05.", json.dumps(WANTED))
    agent = FunctionAgent(name="keeper", tools=tools(), llm=model, output_cls=None if workflow else High)

    async def ask() -> Any:
        asked = AgentWorkflow([agent], root_agent="keeper", output_cls=High) if workflow else agent
        return await told_object(asked.run("Tide?"))

    assert run(ask()) == ("At 14:05.", High(**WANTED), [WANTED])


@pytest.mark.parametrize("waits", [False, True])
def test_an_object_made_by_a_function_of_ones_own(llm: Make, run: Make, waits: bool) -> None:
    def made(messages: list[Any]) -> dict[str, Any]:
        return {**WANTED, "harbour": messages[-1].content}

    async def awaited(messages: list[Any]) -> dict[str, Any]:
        return made(messages)

    async def ask() -> Any:
        agent = FunctionAgent(tools=tools(), llm=llm("At 14:05."), structured_output_fn=awaited if waits else made)
        return await told_object(agent.run("Tide?"))

    assert run(ask())[1] == High(harbour="At 14:05.", time="14:05")


# -- code --------------------------------------------------------------------------------------------------------------


def test_a_code_act_agent_runs_what_the_model_writes(llm: Make, run: Make) -> None:
    model = llm("I compute.\n<execute>\nprint(6 * 7)\n</execute>", "It is 42.")
    ran: list[str] = []

    def execute(code: str) -> str:
        ran.append(code.strip())
        return "42"

    async def ask() -> str:
        return str(await CodeActAgent(tools=[tide], llm=model, code_execute_fn=execute).run("How much?"))

    assert run(ask()) == "It is 42."
    assert ran == ["print(6 * 7)"]
    assert kept(model.receipts) == [1.0]


@pytest.mark.parametrize("runs", [True, False], ids=["beside code", "alone"])
def test_a_code_act_agent_hands_off(llm: Make, run: Make, runs: bool) -> None:
    """LlamaIndex keeps the result of the handoff, and of its call only the text."""
    begun = "<execute>\nprint(6 * 7)\n</execute>\n" if runs else ""
    model = llm(begun + call("handoff", to_agent="keeper", reason="Tides."), "At 14:05.")
    coder = CodeActAgent(name="coder", description="Computes.", llm=model, code_execute_fn=lambda code: "42")
    keeper = FunctionAgent(name="keeper", description="Knows tides.", tools=[tide], llm=model)

    async def ask() -> Any:
        return await AgentWorkflow(agents=[coder, keeper], root_agent="coder").run("Tide?")

    answer = run(ask())
    assert (str(answer), answer.current_agent_name) == ("At 14:05.", "keeper")
