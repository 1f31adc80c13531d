"""LlamaIndex's side of through.py: ReActAgent over HuggingFaceLLM or AgentCacheLLM, and FunctionAgent. Knows only public faces."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

from .episode import Episode
from .integrations import integration
from .through_task import Recorded, Replies, Turn, Way, processors, spelled

NAME = "llamaindex"
NEEDED = {
    "llama_index.llms.agentcache": "llama-index-llms-agentcache",
    "llama_index.core": "llama-index-core",
    "llama_index.llms.huggingface": "llama-index-llms-huggingface",
}
STABLE = "AgentCacheLLM, StableReActAgent"
STOCK, OURS, AGENT = ("HuggingFaceLLM",), ("AgentCacheLLM", STABLE), "FunctionAgent"
THOUGHT, END = "Thought: ", "Answer: "


def stock(model: Any, tokenizer: Any, told: list[Turn]) -> Any:
    """HuggingFaceLLM that writes the recorded completions."""
    from llama_index.llms.huggingface import HuggingFaceLLM

    options = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "do_sample": False}
    return HuggingFaceLLM(
        model=model,
        tokenizer=tokenizer,
        context_window=model.config.max_position_embeddings,
        max_new_tokens=max(map(len, spelled(tokenizer, told))),
        tokenizer_outputs_to_remove=["token_type_ids"],  # which tokenizers without a model of their own return
        generate_kwargs={**options, "logits_processor": processors(tokenizer, told)},
        is_chat_model=True,
    )


def ours(engine: Recorded, name: str) -> Any:
    """AgentCacheLLM over the engine, in a namespace of its own."""
    return integration(NAME).AgentCacheLLM(engine=engine, namespace=name)


def episode(name: str, llm: Any, task: Episode, told: list[Turn]) -> Way:
    """The episode through a ReActAgent; what each call of the model took."""
    from llama_index.core.agent.workflow import ReActAgent
    from llama_index.core.instrumentation import get_dispatcher
    from llama_index.core.instrumentation.event_handlers import BaseEventHandler
    from llama_index.core.instrumentation.events.llm import LLMChatEndEvent, LLMChatStartEvent

    way, open_calls = Way(name), list[float]()

    class Clock(BaseEventHandler):
        def handle(self, event: Any, **kwargs: Any) -> None:
            if isinstance(event, LLMChatStartEvent):
                open_calls.append(time.perf_counter())
            elif isinstance(event, LLMChatEndEvent):
                began = open_calls.pop()
                if not open_calls:  # an endpoint that calls another one of its model's is one call
                    way.step_ms.append((time.perf_counter() - began) * 1e3)
                    way.said.append(str(event.response.message.content) if event.response else "")

    kind: Any = ReActAgent
    if name == STABLE:
        kind = integration(NAME).StableReActAgent
    agent = kind(tools=_tools(task, Replies(told)), llm=llm, system_prompt=task.system, streaming=False)
    handlers, clock = get_dispatcher().event_handlers, Clock()
    handlers.append(clock)
    try:
        way.answer = asyncio.run(_answer(agent, task.task, len(told)))
    finally:
        handlers.remove(clock)
    return way


async def _answer(agent: Any, question: str, steps: int) -> str:
    return str(await agent.run(question, max_iterations=steps + 1)).strip()


def watched(engine: Recorded, task: Episode, turns: list[Turn], namespace: str) -> list[float]:
    """Milliseconds from the beginning of each step of a FunctionAgent to the first piece of text that its events show."""
    from llama_index.core.agent.workflow import AgentStream, FunctionAgent

    replies, seen = Replies(turns), list[float]()
    ours = integration(NAME)
    llm = ours.AgentCacheLLM(engine=engine, namespace=namespace)
    agent = FunctionAgent(tools=_tools(task, replies), llm=llm, system_prompt=task.system)

    async def read() -> None:
        replies.began = time.perf_counter()
        handler = agent.run(task.task, memory=ours.AppendOnlyMemory(), max_iterations=len(turns) + 1)
        async for event in handler.stream_events():
            if isinstance(event, AgentStream) and event.delta and event.response == event.delta:  # all there is so far
                seen.append((time.perf_counter() - replies.began) * 1e3)
        await handler

    asyncio.run(read())
    return seen


def _tools(task: Episode, replies: Replies) -> list[Any]:
    """The task's tools; LlamaIndex takes classes for their arguments, and the task has JSON schemas."""
    from llama_index.core.bridge.pydantic import BaseModel
    from llama_index.core.tools import FunctionTool, ToolMetadata

    class Anything(BaseModel):
        model_config = {"extra": "allow"}

    class Described(ToolMetadata):
        parameters: Mapping[str, Any] = {}

        def get_parameters_dict(self) -> dict[str, Any]:
            return dict(self.parameters)

    made = []
    for tool in task.tools:
        metadata = Described(name=tool.name, description=tool.description, fn_schema=Anything)
        metadata.parameters = tool.parameters
        made.append(FunctionTool(fn=replies.of(tool.name), metadata=metadata))
    return made
