"""An agent's Context is a session of the engine, without code: the id that its state keeps, and the agent's name."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from cases import tools, user
from llama_index.core.agent.workflow import AgentWorkflow, FunctionAgent
from llama_index.core.workflow import Context, JsonSerializer
from llama_index.llms.agentcache import AppendOnlyMemory
from llama_index.llms.agentcache.contexts import KEY

Make = Callable[..., Any]
PROMPT = "You keep the light and answer what ships ask. "


def _agent(llm: Any, **options: Any) -> FunctionAgent:
    return FunctionAgent(name="keeper", tools=tools(), llm=llm, system_prompt=PROMPT, **options)


def _words(model: Any) -> list[str]:
    return [one.resumed for one in model.receipts]


@pytest.mark.parametrize("way", ["same", "saved"])
def test_runs_over_a_context_go_on_with_its_session(llm: Make, run: Make, way: str) -> None:
    model = llm("At 14:05.", "Yes.", "At 14:05.")

    async def ask() -> Any:
        agent = _agent(model)
        ctx = Context(agent)
        await agent.run("Tide?", memory=AppendOnlyMemory.from_defaults(llm=model), ctx=ctx)
        if way == "saved":
            ctx = Context.from_dict(agent, json.loads(json.dumps(ctx.to_dict(serializer=JsonSerializer()))), serializer=JsonSerializer())
        await agent.run("Sure?", ctx=ctx)
        await agent.run("Tide?")  # a Context of its own
        return await ctx.store.get(KEY)

    name = run(ask())
    assert _words(model) == ["", "extend", ""]
    assert model.engine.session(name, namespace=model.namespace).tokens > 0


def test_agents_of_a_workflow_have_sessions_of_their_own(llm: Make, run: Make) -> None:
    model = llm("At 14:05.")

    async def ask() -> Any:
        flow = AgentWorkflow(agents=[_agent(model)], root_agent="keeper")
        ctx = Context(flow)
        await flow.run("Tide?", memory=AppendOnlyMemory.from_defaults(llm=model), ctx=ctx)
        return await ctx.store.get(KEY)

    assert model.engine.session(f"{run(ask())}/keeper", namespace=model.namespace).tokens > 0


def test_a_call_names_its_session_or_none(llm: Make, run: Make) -> None:
    model = llm(*["At 14:05."] * 5, additional_kwargs={"session": "mine"})
    for options in ({}, {}, {"session": "other"}, {"session": ""}):
        model.chat([user("Tide?")], **options)

    async def ask() -> None:
        await _agent(model).run("Tide?")

    run(ask())
    assert _words(model)[:4] == ["", "exact", "", ""]
    assert _words(model)[4] == "diverge", "the model's own setting holds for agents, too"
