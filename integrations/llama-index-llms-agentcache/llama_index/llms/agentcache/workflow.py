"""Agents that leave the start of a prompt alone: one tool group for a whole workflow, objects asked for at the tail. Knows no engine.

AgentWorkflow, agent by agent            SharedAgentWorkflow, every agent
the agent's own system prompt            one system prompt: common text, and the first agent's instructions
the agent's own tools                    the tools of all, and one handoff tool; a mask says which may be called
its handoff tool, naming the others
conversation                             conversation; a handoff's result brings the next agent's instructions
"""
# Annotations are not postponed here: LlamaIndex finds the context of a tool by its annotation.

import json
from collections.abc import Sequence
from typing import Any, Literal, TypeVar

from llama_index.core.agent.workflow import AgentWorkflow, FunctionAgent, ReActAgent
from llama_index.core.agent.workflow.base_agent import BaseWorkflowAgent
from llama_index.core.agent.workflow.multi_agent_workflow import handoff as llama_index_handoff
from llama_index.core.base.llms.types import ChatMessage, MessageRole
from llama_index.core.bridge.pydantic import BaseModel, Field, create_model
from llama_index.core.tools import AsyncBaseTool, BaseTool, FunctionTool
from llama_index.core.workflow import Context

from agentcache.errors import ConfigError

from .base import AgentCacheLLM
from .structured import read, schema_of, with_instruction

Agent = TypeVar("Agent", bound=BaseWorkflowAgent)

START = "Several agents answer in turn. You begin as the agent {name!r}; a handoff makes you another one, with the instructions it brings."


class SharedAgentWorkflow(AgentWorkflow):
    """An AgentWorkflow whose agents share one tool group, so that a handoff costs its own text and not a new prompt.

    system_prompt: what holds for all agents; their own prompts reach the model with the handoff to them. The given agents are not changed.
    All of them must be FunctionAgents on an AgentCacheLLM, and tools of one name must be the same tool.
    """

    def __init__(self, agents: list[BaseWorkflowAgent], *, root_agent: str | None = None, system_prompt: str = "", **options: Any) -> None:
        for agent in agents:
            if not isinstance(agent, BaseWorkflowAgent):
                raise ConfigError(f"agents: {agent!r:.100} is no agent; make it a FunctionAgent")
        super().__init__(agents=agents, root_agent=root_agent, **options)
        self._own = {name: self._instructions(agent) for name, agent in self.agents.items()}
        start = START.format(name=self.root_agent) if len(self.agents) > 1 else ""
        common = "\n\n".join(part for part in (system_prompt, start, self._own[self.root_agent]) if part)
        tools = self._all_tools()
        self.agents = {name: self._sharing(agent, tools, common) for name, agent in self.agents.items()}

    def _instructions(self, agent: BaseWorkflowAgent) -> str:
        """What only this agent is told."""
        if agent.can_handoff_to is None or len(self.agents) == 1:
            return agent.system_prompt or ""
        may = ", ".join(repr(name) for name in agent.can_handoff_to) or "nobody"
        return "\n\n".join(part for part in (agent.system_prompt, f"As {agent.name!r} you may hand off to {may}.") if part)

    def _sharing(self, agent: BaseWorkflowAgent, tools: Sequence[BaseTool], common: str) -> BaseWorkflowAgent:
        if not isinstance(agent, FunctionAgent):
            raise ConfigError(
                f"agent {agent.name!r} is a {type(agent).__name__}: it writes its tools into its own text; only FunctionAgents can share"
            )
        if not isinstance(agent.llm, AgentCacheLLM):
            raise ConfigError(f"agent {agent.name!r} has the model {type(agent.llm).__name__}: sharing needs an AgentCacheLLM")
        llm = agent.llm.with_superset(tools)
        llm.offered([*map(as_tool, agent.tools or ())])  # names a tool that is another agent's tool by name only
        return agent.model_copy(update={"llm": llm, "system_prompt": common})

    def _all_tools(self) -> list[BaseTool]:
        """The tools of all agents, each once, in the order of the agents, and the handoff tool last."""
        found: dict[str, BaseTool] = {}
        for agent in self.agents.values():
            for tool in map(as_tool, agent.tools or ()):
                found.setdefault(tool.metadata.get_name(), tool)
        handoff = self._get_handoff_tool(self.agents[self.root_agent])
        return [*found.values(), *([handoff] if handoff else [])]

    def _get_handoff_tool(self, current_agent: BaseWorkflowAgent) -> AsyncBaseTool | None:
        """The same tool for every agent: it names all of them. Who may go where is in the agents' instructions, and checked when called."""
        if len(self.agents) == 1:
            return None
        names: Any = Literal[tuple(self.agents)]  # type: ignore[valid-type]
        schema = create_model(
            "handoff",
            to_agent=(names, Field(description="The agent that goes on.")),
            reason=(str, Field(description="Why, in one sentence.")),
        )
        info = json.dumps({name: agent.description for name, agent in self.agents.items()}, ensure_ascii=False)
        text = self.handoff_prompt.format(agent_info=info)
        return FunctionTool.from_defaults(async_fn=self._handoff, name="handoff", description=text, fn_schema=schema, return_direct=True)

    async def _handoff(self, ctx: Context, to_agent: str, reason: str) -> str:
        said = await llama_index_handoff(ctx, to_agent, reason)
        if await ctx.store.get("next_agent", default=None) != to_agent or not self._own[to_agent]:
            return said
        return f"{said}\n\nFrom here on these instructions hold:\n{self._own[to_agent]}"


def as_tool(tool: Any) -> BaseTool:
    """A tool of an agent's: agents wrap plain functions when they are made."""
    assert isinstance(tool, BaseTool)
    return tool


def answer_at_tail(agent: Agent, output_cls: type[BaseModel]) -> Agent:
    """Have `agent` end its runs with an object of `output_cls`, asked for behind the conversation as the model knows it.

    The same as `output_cls=` of the agent, which rewrites the whole conversation as XML: nothing of it is then found again. Sets and
    returns the agent; its result is `structured_response` as before.
    """
    schema = schema_of(output_cls)
    if not isinstance(agent, BaseWorkflowAgent):
        raise ConfigError(f"agent={agent!r:.100}: must be an agent of llama_index, such as a FunctionAgent")
    if not isinstance(agent.llm, AgentCacheLLM):
        raise ConfigError(f"agent {agent.name!r} has the model {type(agent.llm).__name__}: answer_at_tail needs an AgentCacheLLM")
    llm = agent.llm

    async def ask(messages: list[ChatMessage]) -> dict[str, Any]:
        tools: list[Any] = list(agent.tools or ())
        if isinstance(agent, ReActAgent):
            turns = agent.formatter.format(tools, list(messages), [])
            response = await llm.achat(with_instruction(turns, schema), schema=schema, stop=[])
        else:
            system = [ChatMessage(role=MessageRole.SYSTEM, content=agent.system_prompt)] if agent.system_prompt else []
            response = await llm.achat(with_instruction([*system, *messages], schema), tools=tools, tool_choice="none", schema=schema)
        return read(output_cls, response).model_dump(mode="json")

    agent.output_cls = None
    agent.structured_output_fn = ask  # type: ignore[assignment]
    return agent
