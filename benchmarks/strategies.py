"""`python -m benchmarks.layout`: the cost of one text that changes at every call, by its place. Counts tokens; times are optional.

Sessions are made of recorded episodes: tasks one after another in one conversation until there are so many calls, behind tools and a
system prompt of so many tokens. Each session is asked under every strategy, so that strategies are compared pair by pair.

    none      there is no such text: what could be reused at best
    front     at the start of the system prompt, as written by most who think of nothing
    system    at its end: system prompt and tools may be reused, nothing behind them
    results   in every tool result, so that what stands behind the first one is new
    kept      behind the last user message
    tail      behind everything
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from agentcache.bench import engine_timing
from agentcache.engine import Engine
from agentcache.errors import ConfigError
from agentcache.layout import Renderer
from agentcache.traces import Episode, Json
from agentcache.types import LayoutOptions

from .oracle import Oracle

STRATEGIES = ("none", "front", "system", "results", "kept", "tail")
DRAWS = 2000  # of sessions, with replacement, for an interval
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Session:
    """A conversation of several tasks. calls: how many messages stand before each model call."""

    system: str
    tools: tuple[Json, ...]
    messages: list[Json]
    calls: tuple[int, ...]


@dataclass(slots=True)
class Asked:
    """Totals of one session under one strategy. ttft_ms: None if nothing was timed."""

    prompt_tokens: int = 0
    computed_tokens: int = 0
    ttft_ms: float | None = None

    def cost(self, cached: float) -> float:
        """In prices of a computed token, when a cached one costs `cached` of it."""
        return self.computed_tokens + cached * (self.prompt_tokens - self.computed_tokens)


def sessions(episodes: Sequence[Episode], size: Callable[[str, Sequence[Json]], int], prompt: int, calls: int, count: int) -> list[Session]:
    """Sessions whose system prompt and tools have about `prompt` tokens as `size` counts them; fewer if there are not enough tasks."""
    chats = [one for one in episodes if one.kind == "chat" and one.calls]
    if not chats:
        raise ConfigError("the workload has no chat episodes: layouts are compared on conversations with messages")
    out: list[Session] = []
    at = 0
    for _ in range(count):
        first = chats[at % len(chats)]
        messages: list[Json] = []
        stops: list[int] = []
        while len(stops) < calls and at < len(chats) * (count + calls):
            part, ends = _task(chats[at % len(chats)], f"{at}.")
            at += 1
            stops += [len(messages) + end for end in ends]
            messages += part
        given = first.calls[0].prompt
        assert not isinstance(given, str)
        system = "\n".join(message["content"] for message in given if message["role"] == "system")
        system, tools = _sized(system, first.calls[0].tools, chats, size, prompt, len(out))
        out.append(Session(system, tools, messages, tuple(stops[:calls])))
    return out


def _task(one: Episode, name: str) -> tuple[list[Json], list[int]]:
    """The messages of an episode without its system prompt, ids its own, and how many of them stand before each call."""
    last = one.calls[-1]
    assert not isinstance(last.prompt, str) and not isinstance(last.answer, str)
    messages = [message for message in (*last.prompt, last.answer) if message["role"] != "system"]
    if messages[-1].get("tool_calls"):  # whose result is not recorded
        messages = messages[:-1]
    out: list[Json] = []
    for message in messages:
        made = dict(message)
        if message.get("tool_calls"):
            made["tool_calls"] = [{**call, "id": name + str(call.get("id"))} for call in message["tool_calls"]]
        if message.get("tool_call_id"):
            made["tool_call_id"] = name + str(message["tool_call_id"])
        out.append(made)
    first = next((number for number, message in enumerate(out) if message["role"] == "user"), len(out))
    return out, [number for number, message in enumerate(out) if message["role"] == "assistant" and number > first]


def _sized(
    system: str, tools: Sequence[Json], chats: Sequence[Episode], size: Callable[[str, Sequence[Json]], int], wanted: int, number: int
) -> tuple[str, tuple[Json, ...]]:
    """Fewer tools and less text, or more text, until system prompt and tools have about the tokens wanted."""
    listed = list(tools)
    while listed and size("", listed) > 0.8 * wanted:
        listed.pop()
    left = wanted - size("", listed)
    text = system
    for step in range(len(chats)):
        if size(text, ()) >= left:
            break
        prompt = chats[(number + step) % len(chats)].calls[-1].prompt
        text += "\n" + "\n".join(str(message.get("content") or "") for message in prompt if isinstance(message, dict))
    low, high, known = 0, len(text), 0
    most = size(text, ())
    while low < high and known < left - 1:  # tokens grow with characters, nearly in proportion
        middle = low + max(1, min(high - low, (high - low) * (left - known) // max(1, most - known)))
        found = size(text[:middle], ())
        low, known, high, most = (middle, found, high, most) if found <= left else (low, known, middle - 1, found)
    return text[:low], tuple(listed)


def requests(session: Session, strategy: str) -> Iterator[tuple[list[Json], str]]:
    """(messages, volatile text) of each call; the text that changes is in one of them, or nowhere."""
    for number, stop in enumerate(session.calls):
        said = f"Call {number + 1}. It is {9 + number // 60:02d}:{number % 60:02d}."
        system = {"front": f"{said}\n{session.system}", "system": f"{session.system}\n{said}"}.get(strategy, session.system)
        messages: list[Json] = [{"role": "system", "content": system}, *session.messages[:stop]]
        if strategy == "results":
            messages = [{**m, "content": f"{said} {m['content']}"} if m["role"] == "tool" else m for m in messages]
        yield messages, said if strategy in ("kept", "tail") else ""


def count(renderers: dict[str, Renderer], session: Session, strategy: str) -> Asked:
    """Tokens of a session when every prompt of it is kept. Recorded answers are new text, whatever the strategy."""
    oracle, done, renderer = Oracle(), Asked(), renderers[strategy]
    for messages, volatile in requests(session, strategy):
        layout = renderer.render(messages, session.tools, volatile=volatile, namespace=strategy)
        ids = list(layout.ids)
        known = min(oracle.known(ids), len(ids) - 1)  # the last one is always computed: its logits are needed
        done.prompt_tokens += len(ids)
        done.computed_tokens += len(ids) - known
        oracle.add(ids)
    return done


def timed(engine: Engine, session: Session, strategy: str, namespace: str) -> Asked:
    """The same through an engine, with the time to each first token; the counts are the engine's own."""
    done = Asked(ttft_ms=0.0)
    for messages, volatile in requests(session, strategy):
        answer, receipt = engine_timing.ask(engine, messages, session.tools, 1, namespace=namespace, volatile=volatile)
        assert receipt.cached_tokens + receipt.computed_tokens == receipt.prompt_tokens, "a token is missing from the account"
        done.prompt_tokens += receipt.prompt_tokens
        done.computed_tokens += receipt.computed_tokens
        done.ttft_ms = (done.ttft_ms or 0.0) + answer.ttft_ms
    engine.store.clear(namespace)
    return done


def interval(pairs: Sequence[tuple[float, float]], seed: str) -> tuple[float, float, float]:
    """The ratio of two sums over the same sessions, and its 95 % interval from drawing sessions with replacement."""

    def ratio(chosen: Sequence[tuple[float, float]]) -> float:
        return sum(one for one, _ in chosen) / sum(other for _, other in chosen)

    rng = random.Random(seed)
    drawn = sorted(ratio(rng.choices(pairs, k=len(pairs))) for _ in range(DRAWS))
    return ratio(pairs), drawn[int(0.025 * DRAWS)], drawn[int(0.975 * DRAWS) - 1]


def options(strategy: str) -> LayoutOptions:
    """How an engine is to be made for a strategy."""
    return LayoutOptions(keep=strategy == "kept")


def run(
    tokenizer: Any,
    episodes: Sequence[Episode],
    prompts: Sequence[int],
    calls: Sequence[int],
    number: int,
    cached_price: float,
    engine_of: Callable[[str], Any] | None = None,
    say: Say = lambda _: None,
) -> dict[str, Any]:
    """All cells. engine_of: a context manager with an engine for a strategy; without one tokens are counted and nothing is timed."""
    renderers = {strategy: Renderer(tokenizer, tail=options(strategy)) for strategy in STRATEGIES}
    sizes: dict[tuple[str, int], int] = {}

    def size(text: str, tools: Sequence[Json]) -> int:
        key = text, len(tools)
        if key not in sizes:
            system = [{"role": "system", "content": text}] if text else []
            sizes[key] = len(renderers["none"].prefix(system, tools).ids) if tools else len(tokenizer(text).input_ids)
        return sizes[key]

    cells: list[dict[str, Any]] = []
    for prompt in prompts:
        for wanted in calls:
            made = sessions(episodes, size, prompt, wanted, number)
            asked: dict[str, list[Asked]] = {}
            for strategy in STRATEGIES:
                say(f"{prompt} tokens, {wanted} calls: {strategy}")
                if engine_of is None:
                    asked[strategy] = [count(renderers, session, strategy) for session in made]
                    continue
                with engine_of(strategy) as engine:
                    asked[strategy] = [timed(engine, session, strategy, f"{prompt} {wanted} {n}") for n, session in enumerate(made)]
            sizes.clear()
            cells.append({"prompt": prompt, "calls": wanted, "sessions": len(made), "strategies": _compared(asked, cached_price)})
    return {"cells": cells, "cached_price": cached_price}


def _compared(asked: dict[str, list[Asked]], cached_price: float) -> dict[str, Any]:
    out: dict[str, Any] = {}
    base = asked["front"]
    for strategy, found in asked.items():
        prompt, computed = sum(one.prompt_tokens for one in found), sum(one.computed_tokens for one in found)
        figures: dict[str, Callable[[Asked], float | None]] = {
            "computed": lambda one: float(one.computed_tokens),
            "cost": lambda one: one.cost(cached_price),
            "ttft": lambda one: one.ttft_ms,
        }
        row: dict[str, Any] = {"prompt_tokens": prompt, "computed_tokens": computed, "hit_share": 1 - computed / prompt}
        for name, figure in figures.items():
            pairs = [(mine, theirs) for one, other in zip(found, base) if (mine := figure(one)) and (theirs := figure(other))]
            row[f"{name}_over_front"] = interval(pairs, f"{strategy} {name}") if pairs else None
        times = [one.ttft_ms for one in found if one.ttft_ms is not None]
        row["ttft_ms"] = sum(times) if times else None
        out[strategy] = row
    return out
