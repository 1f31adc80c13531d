"""Agents that leave the start of a prompt alone: one tool group for a whole workflow, objects asked for at the tail. Knows no engine.

AgentWorkflow, agent by agent            SharedAgentWorkflow, every agent
the agent's own system prompt            one system prompt: common text, and the first agent's instructions
the agent's own tools                    the tools of all, and one handoff tool; a mask says which may be called
its handoff tool, naming the others
conversation                             conversation; a handoff's result brings the next agent's instructions, and once the
                                         memory has let that go they stand in front of the first user turn that is left
"""
# Annotations are not postponed here: LlamaIndex finds the context of a tool by its annotation.

import json
from collections.abc import Sequence
from typing import Any, Literal, TypeVar

from llama_index.core.agent.workflow import AgentWorkflow, FunctionAgent, ReActAgent
from llama_index.core.agent.workflow.base_agent import BaseWorkflowAgent
from llama_index.core.agent.workflow.multi_agent_workflow import handoff as llama_index_handoff
from llama_index.core.agent.workflow.workflow_events import AgentInput, AgentSetup
from llama_index.core.base.llms.types import ChatMessage, ChatResponse, MessageRole, TextBlock
from llama_index.core.bridge.pydantic import BaseModel, Field, create_model
from llama_index.core.tools import AsyncBaseTool, BaseTool, FunctionTool
from llama_index.core.workflow import Context, step

from agentcache.errors import ConfigError

from .base import AgentCacheLLM
from .structured import read, schema_of, with_instruction

Asked = TypeVar("Asked", bound=BaseWorkflowAgent | AgentWorkflow)

BROUGHT = "From here on these instructions hold:\n{own}"
NOW = "You are now the agent {name!r}."
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
        if await ctx.store.get("next_agent", default=None) != to_agent:
            return said  # refused
        return f"{said}\n\n{self._brought(to_agent)}"

    def _brought(self, name: str) -> str:
        """What a handoff to this agent ends with."""
        return BROUGHT.format(own=self._own[name]) if self._own[name] else NOW.format(name=name)

    @step
    async def setup_agent(self, ctx: Context, ev: AgentInput) -> AgentSetup:
        scratchpad = await ctx.store.get(getattr(self.agents[ev.current_agent_name], "scratchpad_key", ""), default=[])
        messages = self._with_own(ev.input, ev.current_agent_name, scratchpad)
        made: AgentSetup = await super().setup_agent(ctx, AgentInput(input=messages, current_agent_name=ev.current_agent_name))
        return made

    async def _get_llm_response(self, ctx: Context, llm_input: list[ChatMessage], agent: BaseWorkflowAgent) -> ChatResponse:
        """The answer of an agent that is stopped early, which is not set up once more."""
        return await super()._get_llm_response(ctx, self._with_own(llm_input, agent.name), agent)

    def _with_own(self, messages: list[ChatMessage], name: str, after: Sequence[ChatMessage] = ()) -> list[ChatMessage]:
        """The messages, with the agent's own instructions put back where a memory has let the handoff go that brought them.

        after: what follows the messages in the prompt. What is put back goes to the model only, not into the memory.
        """
        brought = self._brought(name)
        if name == self.root_agent or any((one.content or "").strip().endswith(brought.strip()) for one in (*messages, *after)):
            return messages
        return with_told(messages, f"{NOW.format(name=name)} {brought}" if self._own[name] else brought)


def as_tool(tool: Any) -> BaseTool:
    """A tool of an agent's: agents wrap plain functions when they are made."""
    assert isinstance(tool, BaseTool)
    return tool


def with_told(messages: list[ChatMessage], text: str) -> list[ChatMessage]:
    """The messages with `text` in front of the first user turn, in that turn: not every template takes two user turns in a row.

    There it stays as long as the memory only appends, and system prompt and tools before it are those of all agents.
    """
    first = next((at for at, one in enumerate(messages) if one.role == MessageRole.USER), None)
    if first is None:
        start = next((at for at, one in enumerate(messages) if one.role not in (MessageRole.SYSTEM, MessageRole.DEVELOPER)), len(messages))
        return [*messages[:start], ChatMessage(role=MessageRole.USER, content=text), *messages[start:]]
    turn = messages[first]  # its blocks stay the memory's own: LlamaIndex writes a workflow's state into them
    told = ChatMessage(role=turn.role, blocks=[TextBlock(text=f"{text}\n"), *turn.blocks], additional_kwargs=turn.additional_kwargs)
    return [*messages[:first], told, *messages[first + 1 :]]


def answer_at_tail(asked: Asked, output_cls: type[BaseModel]) -> Asked:
    """Have an agent, or a workflow of agents, end its runs with an object of `output_cls`, asked for at the end of the conversation.

    The same as `output_cls=`, which rewrites the whole conversation as XML: nothing of it is then found again. Sets and returns what is
    given; the result is `structured_response` as before. Of agents in a workflow, give the workflow: it knows their handoffs.
    """
    schema = schema_of(output_cls)
    if not isinstance(asked, (BaseWorkflowAgent, AgentWorkflow)):
        raise ConfigError(f"agent={asked!r:.100}: must be an agent of llama_index, such as a FunctionAgent, or an AgentWorkflow")
    for agent in asked.agents.values() if isinstance(asked, AgentWorkflow) else [asked]:
        if not isinstance(agent.llm, AgentCacheLLM):
            raise ConfigError(f"agent {agent.name!r} has the model {type(agent.llm).__name__}: answer_at_tail needs an AgentCacheLLM")

    async def ask(messages: list[ChatMessage]) -> dict[str, Any]:
        agent, tools, messages = await _answering(asked, messages)
        assert isinstance(agent.llm, AgentCacheLLM)
        if isinstance(agent, ReActAgent):
            turns = agent.formatter.format(tools, messages, [])
            response = await agent.llm.achat(with_instruction(turns, schema), schema=schema, stop=[])
        else:
            system = [ChatMessage(role=MessageRole.SYSTEM, content=agent.system_prompt)] if agent.system_prompt else []
            response = await agent.llm.achat(with_instruction([*system, *messages], schema), tools=tools, tool_choice="none", schema=schema)
        return read(output_cls, response).model_dump(mode="json")

    asked.output_cls = None
    asked.structured_output_fn = ask  # type: ignore[assignment]
    return asked


async def _answering(
    asked: BaseWorkflowAgent | AgentWorkflow, messages: Sequence[ChatMessage]
) -> tuple[BaseWorkflowAgent, Sequence[BaseTool], list[ChatMessage]]:
    """The agent that gave the answer, with the tools and the conversation as its prompts have shown them."""
    if not hasattr(Context, "get_step_context"):
        if isinstance(asked, BaseWorkflowAgent):
            return asked, await asked.get_tools(), list(messages)
        raise ConfigError(
            "answer_at_tail(workflow) asks which agent has answered by Context.get_step_context: upgrade llama-index-workflows"
        )
    store = Context.get_step_context().store
    said = str(await store.get("user_msg_str", default=""))
    if isinstance(asked, BaseWorkflowAgent):
        return asked, await asked.get_tools(said), list(messages)
    name = str(await store.get("current_agent_name", default=asked.root_agent))
    told = asked._with_own(list(messages), name) if isinstance(asked, SharedAgentWorkflow) else list(messages)
    return asked.agents[name], await asked.get_tools(name, said), told
