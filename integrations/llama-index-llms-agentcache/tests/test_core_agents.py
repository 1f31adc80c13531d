"""What LlamaIndex promises of its agents, with this model in them: kinds of agents mixed, stopped early, asked for objects.

llama-index-core's wheel brings no tests; these are the cases of its agents that take an LLM.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from cases import call, tide, tools, wind
from llama_index.core.agent.workflow import AgentOutput, AgentWorkflow, FunctionAgent, ReActAgent
from llama_index.core.tools import FunctionTool
from llama_index.core.workflow import WorkflowRuntimeError
from llama_index.llms.agentcache import StableReActAgent
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
def test_a_react_agent_hands_off_to_a_function_agent_and_back(llm: Make, run: Make, kind: Any) -> None:
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
def test_a_react_agent_is_stopped_early_with_an_answer_or_an_error(llm: Make, run: Make, kind: Any) -> None:
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
