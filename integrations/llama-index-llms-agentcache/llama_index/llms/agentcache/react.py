"""ReAct in text, as the model wrote it. Knows nothing of engines; what the model is told is LlamaIndex's own header.

LlamaIndex parses each step, writes it anew (`Action Input: {'a': 1}`, a Python repr) and, when a run ends, joins all its steps into one
message. The model's own text is then never found again, nor is anything after it. Here a step keeps its text, a run ends as the turns
that it was, and the model stops where an observation would begin instead of making one up.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from llama_index.core.agent.react.formatter import ReActChatFormatter
from llama_index.core.agent.react.output_parser import ReActOutputParser
from llama_index.core.agent.react.types import ActionReasoningStep, BaseReasoningStep, ObservationReasoningStep, ResponseReasoningStep
from llama_index.core.agent.workflow import ReActAgent
from llama_index.core.agent.workflow.workflow_events import AgentOutput
from llama_index.core.base.llms.types import ChatMessage, ChatResponse, MessageRole, TextBlock
from llama_index.core.bridge.pydantic import Field, model_validator
from llama_index.core.memory import BaseMemory
from llama_index.core.tools import BaseTool
from llama_index.core.workflow import Context

from .answer import length_of
from .canonical import canonical_description, canonical_parameters
from .errors import NoToolCallError
from .translate import KEEP_IN_MESSAGE

STOP = "\nObservation:"


class OwnAction(ActionReasoningStep):
    """An action in the model's own words."""

    text: str = ""

    def get_content(self) -> str:
        return self.text


class OwnResponse(ResponseReasoningStep):
    """A final answer in the model's own words."""

    text: str = ""

    def get_content(self) -> str:
        return self.text


class StableReActOutputParser(ReActOutputParser):
    """LlamaIndex's parser; the steps it finds remember the text they were found in."""

    def parse(self, output: str, is_streaming: bool = False) -> BaseReasoningStep:
        step = super().parse(output, is_streaming)
        if is_streaming or isinstance(step, (OwnAction, OwnResponse)):
            return step
        if isinstance(step, ActionReasoningStep):
            return OwnAction(text=output, **step.model_dump())
        if isinstance(step, ResponseReasoningStep):
            return OwnResponse(text=output, **step.model_dump())
        return step


class StableReActFormatter(ReActChatFormatter):
    """Writes a ReAct prompt that only grows at its end, and tells the model to stop where an observation begins.

    The model's own text is shown for steps that carry it (StableReActOutputParser); others get their input as JSON. Tools are described
    alike in every process. `StableReActAgent` brings the parser with it and ends runs as turns.
    """

    stop: list[str] = Field(default_factory=lambda: [STOP], description="Ends an answer of the model's.")

    def format(
        self, tools: Sequence[BaseTool], chat_history: list[ChatMessage], current_reasoning: list[BaseReasoningStep] | None = None
    ) -> list[ChatMessage]:
        words = {"tool_desc": "\n".join(map(_described, tools)), "tool_names": ", ".join(tool.metadata.get_name() for tool in tools)}
        if self.context:
            words["context"] = self.context
        header = ChatMessage(role=MessageRole.SYSTEM, content=self.system_header.format(**words))
        header.additional_kwargs[KEEP_IN_MESSAGE] = {"stop": list(self.stop)}
        return [header, *chat_history, *turns_of(current_reasoning or [], self.observation_role)]


def turns_of(steps: Sequence[BaseReasoningStep], told_as: MessageRole) -> list[ChatMessage]:
    """The steps as the turns of a conversation: what the model said, and what it was told, in that role."""
    roles = [told_as if isinstance(step, ObservationReasoningStep) else MessageRole.ASSISTANT for step in steps]
    return [ChatMessage(role=role, content=_said(step)) for role, step in zip(roles, steps)]


def _said(step: BaseReasoningStep) -> str:
    if isinstance(step, ActionReasoningStep) and not isinstance(step, OwnAction):
        arguments = json.dumps(step.action_input, ensure_ascii=False, default=str)
        return f"Thought: {step.thought}\nAction: {step.action}\nAction Input: {arguments}"
    return step.get_content()


def _described(tool: BaseTool) -> str:
    description, _ = canonical_description(tool)
    arguments = json.dumps(canonical_parameters(tool, tool.metadata.get_parameters_dict()), ensure_ascii=False)
    return f"> Tool Name: {tool.metadata.name}\nTool Description: {description}\nTool Args: {arguments}\n"


def _stable_formatter(fields: dict[str, Any] | None = None) -> ReActChatFormatter:
    return StableReActFormatter.from_defaults(context=(fields or {}).get("system_prompt"))


class StableReActAgent(ReActAgent):
    """A ReActAgent whose prompts only grow at their end: from step to step, and from run to run.

    A formatter with a `format` of its own is asked as it is; the steps that it is shown carry the model's own text.
    """

    formatter: ReActChatFormatter = Field(default_factory=_stable_formatter, description="Formats steps and history into a prompt.")
    output_parser: ReActOutputParser = Field(default_factory=StableReActOutputParser, description="Finds the step in the model's text.")

    @model_validator(mode="after")
    def _keep_own_text(self) -> StableReActAgent:
        if type(self.formatter).format is ReActChatFormatter.format:
            self.formatter = StableReActFormatter(**self.formatter.model_dump())
        return self

    async def _get_response(self, current_llm_input: list[ChatMessage]) -> ChatResponse:
        return _whole(await super()._get_response(_stopped(current_llm_input)))

    async def _get_streaming_response(self, ctx: Any, current_llm_input: list[ChatMessage]) -> ChatResponse:
        return _whole(await super()._get_streaming_response(ctx, _stopped(current_llm_input)))

    async def finalize(self, ctx: Context, output: AgentOutput, memory: BaseMemory) -> AgentOutput:
        """Put the run into memory as the turns that it was, and take the answer out of the last one."""
        steps: list[BaseReasoningStep] = await ctx.store.get(self.reasoning_key, default=[])
        if not steps or not isinstance(last := steps[-1], ResponseReasoningStep):
            return output
        await memory.aput_messages(turns_of(steps, self.formatter.observation_role))
        await ctx.store.set(self.reasoning_key, [])
        others = [block for block in output.response.blocks if not isinstance(block, TextBlock)]
        output.response = ChatMessage(role=output.response.role, blocks=[*others, TextBlock(text=last.response)])
        return output


def _stopped(messages: list[ChatMessage]) -> list[ChatMessage]:
    """The messages, with the stop string that another formatter has not put there."""
    if not messages or any(KEEP_IN_MESSAGE in one.additional_kwargs for one in messages):
        return messages
    first = messages[0].model_copy(update={"additional_kwargs": {**messages[0].additional_kwargs, KEEP_IN_MESSAGE: {"stop": [STOP]}}})
    return [first, *messages[1:]]


def _whole(response: ChatResponse) -> ChatResponse:
    """The response; NoToolCallError where it ends inside an action, whose input LlamaIndex would complete: 12 where 1250 was meant."""
    told, text = response.raw if isinstance(response.raw, dict) else {}, response.message.content or ""
    if told.get("finish_reason") == "length" and "Action:" in text and "Answer:" not in text:
        raise NoToolCallError(f"the step {text!r:.300} was cut off after {length_of(told)} tokens; raise max_tokens")
    return response
