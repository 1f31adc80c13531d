"""`python -m benchmarks.through langchain | llamaindex`: one recorded task through a framework's agents, with the class that people
use there today and with ours. Same agent, same weights, same recorded completions.

Physics: the stock class computes its whole prompt at every step, ours what is new; both then decode the same tokens. Text ReAct is as far
as the stock classes go: tools never reach their chat template. Beside it, on ours alone, an agent with real tool calls: the first token as
whoever reads the agent's stream sees it, against the engine's own account of that request. What lies between is framework and adapter.
"""

from __future__ import annotations

import json
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from rich.table import Table

from agentcache.answer.call_forms import HERMES
from agentcache.bench import report
from agentcache.engine import Engine
from agentcache.errors import ConfigError
from agentcache.receipt import Receipt
from agentcache.stream import Stream
from agentcache.types import Sampling

from .answers import parse
from .episode import Episode

Say = Callable[[str], None]
Load = Callable[[], tuple[Any, Any]]


@dataclass(slots=True)
class Way:
    """One episode with one class: milliseconds per call of the model, its texts, and what the agent answered in the end."""

    name: str
    step_ms: list[float] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    answer: str = ""

    @property
    def episode_ms(self) -> float:
        """All calls together, without the tools."""
        return sum(self.step_ms)


@dataclass(frozen=True, slots=True)
class Turn:
    """What the model is made to say at one step, and what the tools it calls answer."""

    said: str
    results: tuple[tuple[str, str], ...]  # (tool, result)


class Replies:
    """Results of tools, given out in order per tool. Notes when the last one left: there the next step begins."""

    def __init__(self, turns: Iterable[Turn]) -> None:
        self._left: dict[str, deque[str]] = {}
        self.began = 0.0
        for turn in turns:
            for name, result in turn.results:
                self._left.setdefault(name, deque()).append(result)

    def of(self, name: str) -> Callable[..., str]:
        """The function of a tool."""

        def answer(*args: Any, **kwargs: Any) -> str:
            result = self._left[name].popleft()
            self.began = time.perf_counter()
            return result

        return answer


class Recorded(Engine):
    """An engine whose completions are the recorded ones, in order; keeps every receipt."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        super().__init__(model, tokenizer, store=None)
        self._next: deque[tuple[int, ...]] = deque()
        self._asked: list[Stream] = []

    def expect(self, turns: Iterable[Turn]) -> None:
        """What comes next; accounts begin anew."""
        self._next, self._asked = deque(spelled(self.tokenizer, turns)), []

    @property
    def receipts(self) -> list[Receipt]:
        """Of the requests since `expect`."""
        return [stream.receipt for stream in self._asked]

    def stream(self, *asked: Any, **options: Any) -> Stream:
        """As of Engine."""
        ids = self._next.popleft()
        options["sampling"] = replace(options.get("sampling") or Sampling(), forced=ids, max_tokens=len(ids), stop=())
        self._asked.append(super().stream(*asked, **options))
        return self._asked[-1]


def spelled(tokenizer: Any, turns: Iterable[Turn]) -> list[tuple[int, ...]]:
    """The ids of what the model is made to say, each with its end."""
    return [(*tokenizer(turn.said, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id) for turn in turns]


def processors(tokenizer: Any, turns: Iterable[Turn]) -> Any:
    """Logits processors that make `generate` write the recorded completions, one per call."""
    import torch
    from transformers import LogitsProcessor, LogitsProcessorList

    class Forced(LogitsProcessor):  # type: ignore[misc]
        left, start, last = deque(spelled(tokenizer, turns)), 0, 0
        ids: tuple[int, ...] = ()

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            length = input_ids.shape[1]
            if length != self.last + 1 or length - self.start >= len(self.ids):  # another prompt
                self.ids, self.start = self.left.popleft(), length
            self.last = length
            forced = torch.full_like(scores, float("-inf"))
            forced[:, self.ids[length - self.start]] = 0.0
            return forced

    return LogitsProcessorList([Forced()])


def in_text(episode: Episode, thought: str, end: str) -> list[Turn]:
    """The task as ReAct steps of one call each; the last one answers. thought, end: what stands before a thought and before an answer."""
    turns = []
    for text, results in episode.steps:
        message = parse(text)
        for number, (call, result) in enumerate(zip(message.tool_calls, results)):
            why = (message.content or "One moment.") if not number else "The other one, too."
            arguments = json.dumps(call.arguments, ensure_ascii=False)
            turns.append(Turn(f"{thought}{why}\nAction: {call.name}\nAction Input: {arguments}", ((call.name, result),)))
    return [*turns, Turn(f"{thought}I know.\n{end}{episode.steps[-1][0]}", ())]


def in_calls(episode: Episode) -> list[Turn]:
    """The task as the engine's own tool calls. Every step begins with words: a call shows only once its name is whole."""
    turns = []
    for text, results in episode.steps:
        said = f"One moment.\n{text}" if text.startswith(HERMES.trigger) else text
        turns.append(Turn(said, tuple((call.name, result) for call, result in zip(parse(said).tool_calls, results))))
    return turns


def first(turns: list[Turn], calls: int | None) -> list[Turn]:
    """At most so many turns: the first ones, and the one that answers."""
    return turns if calls is None else [*turns[: calls - 1], turns[-1]]


def run(framework: ModuleType, load: Load, episode: Episode, *, calls: int | None = None, say: Say = lambda _: None) -> dict[str, Any]:
    """All ways in turn, on (model, tokenizer) from `load`; then first tokens through the agent with tool calls."""
    model, tokenizer = load()
    told = first(in_text(episode, framework.THOUGHT, framework.END), calls)
    ways: list[Way] = []
    for name in framework.STOCK:
        say(f"{name}: {len(told)} calls of the model")
        ways.append(framework.episode(name, framework.stock(model, tokenizer, told), episode, told))
    accounts: dict[str, list[Receipt]] = {}
    engine = Recorded(model, tokenizer)
    with engine:
        for name in framework.OURS:
            say(f"{name}: {len(told)} calls of the model")
            engine.expect(told)
            ways.append(framework.episode(name, framework.ours(engine, name), episode, told))
            accounts[name] = engine.receipts
        say("first tokens through an agent with tool calls")
        seen = first_tokens(framework, engine, episode, calls)
    _check(ways, told, accounts)
    return {"through": framework.NAME, "calls": len(told), "ways": [_figures(way, ways[0], accounts.get(way.name)) for way in ways], **seen}


def first_tokens(framework: ModuleType, engine: Recorded, episode: Episode, calls: int | None = None) -> dict[str, Any]:
    """Time to first token of each step of an agent, as the reader of its stream sees it and as the engine accounts for it."""
    turns = first(in_calls(episode), calls)
    engine.expect(turns[-1:])
    framework.watched(engine, episode, turns[-1:], "warm-up")  # what a framework makes once is not what a step costs
    engine.expect(turns)
    agent_ms = framework.watched(engine, episode, turns, "first tokens")
    receipts = engine.receipts
    assert len(agent_ms) == len(receipts) == len(turns), f"{len(agent_ms)} first tokens seen of {len(receipts)} requests"
    engine_ms = [receipt.ttft_ms for receipt in receipts]
    assert all(mine >= own for mine, own in zip(agent_ms, engine_ms)), "the agent saw a token before the engine had it"
    assert all(receipt.cached_tokens > 0 for receipt in receipts[1:]), "a step found nothing of the steps before it"
    later = slice(1, None) if len(turns) > 1 else slice(None)  # the first step computes the tools
    return {
        "agent": framework.AGENT,
        "first_tokens": {
            "prompt_tokens": [receipt.prompt_tokens for receipt in receipts],
            "computed_tokens": [receipt.computed_tokens for receipt in receipts],
            "engine_ms": [round(ms, 2) for ms in engine_ms],
            "agent_ms": [round(ms, 2) for ms in agent_ms],
            "added_ms": round(statistics.median(mine - own for mine, own in zip(agent_ms[later], engine_ms[later])), 2),
            "ratio": round(sum(agent_ms[later]) / sum(engine_ms[later]), 3),
        },
    }


def _check(ways: list[Way], told: list[Turn], accounts: Mapping[str, list[Receipt]]) -> None:
    """All agents did the same, and what ours did not compute, it had."""
    words = [turn.said.strip() for turn in told]
    for way in ways:
        assert [text.strip() for text in way.said] == words, f"{way.name} did not say what was recorded"
        assert len(way.step_ms) == len(told), f"{way.name}: {len(way.step_ms)} calls timed of {len(told)}"
        assert way.answer == ways[0].answer, f"{way.name} answers {way.answer!r}, {ways[0].name} {ways[0].answer!r}"
    for name, receipts in accounts.items():
        assert len(receipts) == len(told), f"{name}: {len(receipts)} requests for {len(told)} steps"
        for receipt in receipts:
            assert receipt.cached_tokens + receipt.computed_tokens == receipt.prompt_tokens, "a token is missing from the account"
        assert all(receipt.cached_tokens > 0 for receipt in receipts[1:]), f"{name}: a step found nothing of the steps before it"


def _figures(way: Way, base: Way, receipts: list[Receipt] | None) -> dict[str, Any]:
    tokens = {} if receipts is None else {key: [getattr(r, key) for r in receipts] for key in ("prompt_tokens", "computed_tokens")}
    return {
        "name": way.name,
        "step_ms": [round(ms, 1) for ms in way.step_ms],
        "episode_ms": round(way.episode_ms, 1),
        "ratio": round(base.episode_ms / way.episode_ms, 2),
        **tokens,
    }


def tables(found: Mapping[str, Any]) -> list[Table]:
    """The episode, call by call and way by way; first tokens."""
    ways, numbers = found["ways"], range(found["calls"])
    ours = [way for way in ways if "prompt_tokens" in way]
    columns = ["call", "prompt", *(f"computed by {way['name']}" for way in ours), *(f"{way['name']} ms" for way in ways)]
    lines = [
        [
            str(n + 1),
            report.number(ours[0]["prompt_tokens"][n]),
            *(report.number(way["computed_tokens"][n]) for way in ours),
            *(report.number(way["step_ms"][n]) for way in ways),
        ]
        for n in numbers
    ]
    lines.append(["all", *("" for _ in range(len(ours) + 1)), *(report.number(way["episode_ms"]) for way in ways)])
    lines.append(["ratio", *("" for _ in range(len(ours) + 1)), *(f"{way['ratio']:.1f}x" for way in ways)])
    seen = found["first_tokens"]
    shares = [
        [
            str(n + 1),
            *(report.number(seen[key][n]) for key in ("prompt_tokens", "computed_tokens")),
            *(report.number(seen[key][n], 1) for key in ("engine_ms", "agent_ms")),
            report.number(seen["agent_ms"][n] - seen["engine_ms"][n], 1),
            f"{seen['agent_ms'][n] / seen['engine_ms'][n]:.3f}",
        ]
        for n in range(len(seen["agent_ms"]))
    ]
    caption = f"behind the first step: {seen['added_ms']:.1f} ms more (median), {seen['ratio']:.3f} times the engine's own (sums)"
    titles = (f"one text ReAct episode through {found['through']}", f"first tokens of a step through {found['agent']}")
    return [
        report.table(titles[0], columns, lines, "ms: prompt and answer, without the tools"),
        report.table(titles[1], ["step", "prompt", "computed", "engine ms", "agent ms", "added ms", "agent/engine"], shares, caption),
    ]


def plot(found: Mapping[str, Any], path: Path) -> None:
    """Seconds per call, way by way, as one PNG."""
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigError("--plot needs matplotlib: pip install matplotlib") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4), layout="constrained")
    width = 0.8 / len(found["ways"])
    for number, way in enumerate(found["ways"]):
        places = [call + width * (number - (len(found["ways"]) - 1) / 2) for call in range(1, found["calls"] + 1)]
        axes.bar(places, [ms / 1e3 for ms in way["step_ms"]], width=width, label=f"{way['name']}: {way['episode_ms'] / 1e3:.1f} s")
    axes.set(xlabel="call of the model", ylabel="seconds", title=f"One text ReAct episode through {found['through']}")
    axes.set_xticks(range(1, found["calls"] + 1))
    axes.legend()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
