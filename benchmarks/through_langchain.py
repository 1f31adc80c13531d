"""LangChain's side of through.py: text ReAct over ChatHuggingFace or ChatAgentCache, and create_agent. Knows only public faces."""

from __future__ import annotations

import json
import time
from typing import Any

from .episode import Episode
from .integrations import integration
from .through_task import Recorded, Replies, Turn, Way, processors, spelled

NAME = "langchain"
NEEDED = {
    "langchain_agentcache": "langchain-agentcache",
    "langchain": "langchain",
    "langchain_classic": "langchain-classic",
    "langchain_huggingface": "langchain-huggingface",
}
STOCK, OURS, AGENT = ("ChatHuggingFace",), ("ChatAgentCache",), "create_agent"
THOUGHT, END = " ", "Final Answer: "
PROMPT = (
    "{tools}\n\nAnswer as well as you can. Write a Thought, then\nAction: one of {tool_names}\nAction Input: its arguments as JSON\n"
    "and wait for the Observation. End with\nFinal Answer: what you found.\n\nQuestion: {input}\nThought:{agent_scratchpad}"
)


def stock(model: Any, tokenizer: Any, told: list[Turn]) -> Any:
    """ChatHuggingFace over a transformers pipeline that writes the recorded completions."""
    from langchain_huggingface import ChatHuggingFace, HuggingFacePipeline
    from transformers import pipeline

    made = pipeline(
        "text-generation",
        model=model,
        tokenizer=tokenizer,
        return_full_text=False,
        max_new_tokens=max(map(len, spelled(tokenizer, told))),
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        logits_processor=processors(tokenizer, told),
        do_sample=False,
    )
    return ChatHuggingFace(llm=HuggingFacePipeline(pipeline=made), tokenizer=tokenizer)


def ours(engine: Recorded, name: str) -> Any:
    """ChatAgentCache over the engine, in a namespace of its own."""
    return integration(NAME).ChatAgentCache(engine=engine, namespace=name)


def episode(name: str, chat: Any, task: Episode, told: list[Turn]) -> Way:
    """The episode through a text ReAct agent; what each call of the model took."""
    from langchain_classic.agents import AgentExecutor, create_react_agent
    from langchain_core.callbacks import BaseCallbackHandler
    from langchain_core.prompts import PromptTemplate
    from langchain_core.tools import Tool

    way, replies = Way(name), Replies(told)

    class Clock(BaseCallbackHandler):
        began = 0.0

        def on_chat_model_start(self, *args: Any, **kwargs: Any) -> None:
            self.began = time.perf_counter()

        def on_llm_end(self, response: Any, **kwargs: Any) -> None:
            way.step_ms.append((time.perf_counter() - self.began) * 1e3)
            way.said.append(str(response.generations[0][0].message.content))

    described = [(tool.name, f"{tool.description} {json.dumps(dict(tool.parameters))}") for tool in task.tools]
    tools = [Tool(name=name, description=text, func=replies.of(name)) for name, text in described]
    agent = create_react_agent(chat, tools, PromptTemplate.from_template(PROMPT))
    executor = AgentExecutor(agent=agent, tools=tools, max_iterations=len(told) + 1, stream_runnable=False)
    done = executor.invoke({"input": f"{task.system}\n\n{task.task}"}, {"callbacks": [Clock()]})
    way.answer = str(done["output"])
    return way


def watched(engine: Recorded, task: Episode, turns: list[Turn], namespace: str) -> list[float]:
    """Milliseconds from the beginning of each step of create_agent to the first chunk that its stream shows."""
    from langchain.agents import create_agent
    from langchain_core.messages import AIMessageChunk
    from langchain_core.tools import StructuredTool

    replies = Replies(turns)
    tools = [
        StructuredTool(name=tool.name, description=tool.description, args_schema=dict(tool.parameters), func=replies.of(tool.name))
        for tool in task.tools
    ]
    ours = integration(NAME)
    chat = ours.ChatAgentCache(engine=engine, namespace=namespace)
    agent = create_agent(chat, tools, system_prompt=task.system, middleware=[ours.AgentCacheMiddleware()])
    seen: dict[str, float] = {}
    replies.began = time.perf_counter()
    for chunk, _ in agent.stream({"messages": [("user", task.task)]}, stream_mode="messages"):
        if isinstance(chunk, AIMessageChunk) and chunk.text and str(chunk.id) not in seen:
            seen[str(chunk.id)] = (time.perf_counter() - replies.began) * 1e3
    return list(seen.values())
