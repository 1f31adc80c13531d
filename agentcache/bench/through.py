"""`agentcache bench react --through langchain`: one recorded task as a text ReAct agent of LangChain, over ChatHuggingFace with a local
pipeline and over ChatAgentCache. Same agent, same weights, same recorded completions. Knows only public faces.

Physics: the pipeline computes its whole prompt at every step, ChatAgentCache what is new; both then decode the same tokens. Text ReAct is
as far as ChatHuggingFace over a pipeline goes: tools never reach its chat template. The prompt of such an agent is one user message that
grows, and does not hold the model's turns.
"""

from __future__ import annotations

import importlib.util
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from ..engine import Engine
from ..errors import ConfigError
from ..model.tool_calls import parse
from ..stream import Stream
from ..types import Sampling, Tool

NEEDED = ("langchain_agentcache", "langchain_classic", "langchain_huggingface")
VOCAB = 4096
PROMPT = (
    "{tools}\n\nAnswer as well as you can. Write a Thought, then\nAction: one of {tool_names}\nAction Input: its arguments as JSON\n"
    "and wait for the Observation. End with\nFinal Answer: what you found.\n\nQuestion: {input}\nThought:{agent_scratchpad}"
)


@dataclass(frozen=True, slots=True)
class Task:
    """The recorded task that the demo replays: what the user asked, and per step the completion and the results of its calls."""

    system: str
    tools: tuple[Tool, ...]
    asked: str
    steps: tuple[tuple[str, tuple[str, ...]], ...]
    texts: tuple[str, ...]


def load() -> Task:
    """The task that ships with the package."""
    raw = json.loads(files("agentcache").joinpath("demo_data", "museum.json").read_text(encoding="utf-8"))
    steps = tuple((step["completion"], tuple(step["results"])) for step in raw["steps"])
    texts = (
        raw["system"],
        raw["task"],
        *map(json.dumps, raw["tools"]),
        *(text for completion, results in steps for text in (completion, *results)),
    )
    return Task(raw["system"], tuple(Tool(**tool) for tool in raw["tools"]), raw["task"], steps, texts)


@dataclass(slots=True)
class Way:
    """What one chat model took for the episode: milliseconds per step, and what the agent answered in the end."""

    name: str
    step_ms: list[float] = field(default_factory=list)
    prompt_tokens: list[int] = field(default_factory=list)
    computed_tokens: list[int] = field(default_factory=list)
    answer: str = ""

    @property
    def episode_ms(self) -> float:
        """All steps together, without the tools."""
        return sum(self.step_ms)


def react(task: Task) -> list[tuple[str, str]]:
    """The task as ReAct steps: (completion, observation), one call each; the last one answers."""
    steps = []
    for text, results in task.steps:
        message = parse(text)
        for number, (call, result) in enumerate(zip(message.tool_calls, results)):
            thought = message.content if not number else "The other one, too."
            arguments = json.dumps(call.arguments, ensure_ascii=False)
            steps.append((f" {thought}\nAction: {call.name}\nAction Input: {arguments}", result))
    return [*steps, (f" I know.\nFinal Answer: {task.steps[-1][0]}", "")]


def compare(*, layers: int = 4, hidden: int = 384, steps: int | None = None, plot: Path | None = None) -> dict[str, Any]:
    """Run the episode both ways, in turn, on a random model of this size. steps: only the first so many calls, then the answer."""
    _needed()
    task = load()
    told = react(task)
    told = told if steps is None else [*told[:steps], told[-1]]
    ways = [_through(name, task, told, layers, hidden) for name in ("ChatHuggingFace", "ChatAgentCache")]
    stock, ours = ways
    assert stock.answer == ours.answer, "the two agents did not do the same"
    assert len(stock.step_ms) == len(ours.step_ms) == len(told)
    if plot is not None:
        _plot(ways, plot)
    return {
        "bench": "through langchain",
        "steps": len(told),
        "prompt_tokens": ours.prompt_tokens,
        "computed_tokens": ours.computed_tokens,
        **{f"{way.name}_step_ms": [round(ms, 1) for ms in way.step_ms] for way in ways},
        "step_ratios": [round(a / b, 2) for a, b in zip(stock.step_ms, ours.step_ms)],
        "episode_ratio": round(stock.episode_ms / ours.episode_ms, 2),
    }


def _needed() -> None:
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"--through langchain: {missing!r} not installed; pip install {' '.join(NEEDED).replace('_', '-')}")


def _through(name: str, task: Task, told: list[tuple[str, str]], layers: int, hidden: int) -> Way:
    from .. import toy

    model, tokenizer = toy.model(VOCAB, layers=layers, hidden=hidden), toy.tokenizer(task.texts, VOCAB)
    ids = [(*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id) for text, _ in told]
    if name == "ChatHuggingFace":
        return _run(name, _pipeline_chat(model, tokenizer, ids), task, told)
    from langchain_agentcache import ChatAgentCache

    with _Recorded(model, tokenizer, iter(ids)) as engine:
        return _run(name, ChatAgentCache(engine=engine), task, told)


class _Recorded(Engine):
    """An engine whose completions are the recorded ones, in order."""

    def __init__(self, model: Any, tokenizer: Any, completions: Iterator[tuple[int, ...]]) -> None:
        super().__init__(model, tokenizer, store=None)
        self._completions = completions

    def stream(self, *asked: Any, **options: Any) -> Stream:
        """As of Engine."""
        ids = next(self._completions)
        options["sampling"] = replace(options.get("sampling") or Sampling(), forced=ids, max_tokens=len(ids), stop=())
        return super().stream(*asked, **options)


def _pipeline_chat(model: Any, tokenizer: Any, completions: list[tuple[int, ...]]) -> Any:
    """ChatHuggingFace over a transformers pipeline that writes the recorded completions."""
    import torch
    from langchain_huggingface import ChatHuggingFace, HuggingFacePipeline
    from transformers import LogitsProcessor, LogitsProcessorList, pipeline

    class Recorded(LogitsProcessor):  # type: ignore[misc]
        left, start, last = iter(completions), 0, 0
        ids: tuple[int, ...] = ()

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            length = input_ids.shape[1]
            if length != self.last + 1 or length - self.start >= len(self.ids):
                self.ids, self.start = next(self.left), length
            self.last = length
            forced = torch.full_like(scores, float("-inf"))
            forced[:, self.ids[length - self.start]] = 0.0
            return forced

    made = pipeline(
        "text-generation",
        model=model,
        tokenizer=tokenizer,
        return_full_text=False,
        max_new_tokens=max(map(len, completions)),
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        logits_processor=LogitsProcessorList([Recorded()]),
        do_sample=False,
    )
    return ChatHuggingFace(llm=HuggingFacePipeline(pipeline=made), tokenizer=tokenizer)


def _run(name: str, chat: Any, task: Task, told: list[tuple[str, str]]) -> Way:
    """The episode through LangChain's agent; what each call of the model took, and used."""
    from langchain_classic.agents import AgentExecutor, create_react_agent
    from langchain_core.callbacks import BaseCallbackHandler
    from langchain_core.prompts import PromptTemplate
    from langchain_core.tools import Tool

    way, observations = Way(name), iter([observation for _, observation in told])

    class Clock(BaseCallbackHandler):
        began = 0.0

        def on_chat_model_start(self, *args: Any, **kwargs: Any) -> None:
            self.began = time.perf_counter()

        def on_llm_end(self, response: Any, **kwargs: Any) -> None:
            way.step_ms.append((time.perf_counter() - self.began) * 1e3)
            if used := response.generations[0][0].message.usage_metadata:
                way.prompt_tokens.append(used["input_tokens"])
                way.computed_tokens.append(used["input_token_details"]["cache_creation"])

    def answered(_: str) -> str:
        return next(observations)

    tools = [
        Tool(name=tool.name, description=f"{tool.description} {json.dumps(dict(tool.parameters))}", func=answered) for tool in task.tools
    ]
    agent = create_react_agent(chat, tools, PromptTemplate.from_template(PROMPT))
    executor = AgentExecutor(agent=agent, tools=tools, max_iterations=len(told) + 1, stream_runnable=False)
    done = executor.invoke({"input": f"{task.system}\n\n{task.asked}"}, {"callbacks": [Clock()]})
    way.answer = str(done["output"])
    return way


def _plot(ways: list[Way], path: Path) -> None:
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigError("--plot needs matplotlib: pip install 'agentcache-llm[bench]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4))
    for number, way in enumerate(ways):
        places = [step + 0.4 * number for step in range(1, len(way.step_ms) + 1)]
        axes.bar(places, [ms / 1e3 for ms in way.step_ms], width=0.4, label=f"{way.name}: {way.episode_ms / 1e3:.1f} s")
    axes.set(xlabel="step", ylabel="seconds", title="One ReAct episode through LangChain")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
