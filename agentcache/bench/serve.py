"""`agentcache bench serve`: recorded agents at one server, many at once: first tokens, tokens per second, what was cached.

Physics: all ways answer the same prompts on the same machine. Over HTTP a request costs parsing, one hop of each event through the server's
loop, and the load generator's own time; a server that computes each prompt anew pays for all of it at every step of an agent.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import httpx

from ..errors import AgentCacheError
from ..traces import Call, Episode
from ..types import Sampling
from . import catalog, servers
from .environment import Keep, Say, percentile

if TYPE_CHECKING:
    from ..engine import Engine

WARM_UP = Call([{"role": "user", "content": "Say nothing."}], (), "")
TIMEOUT_S = 900.0


@dataclass(slots=True)
class Told:
    """One answer as its caller saw it: seconds on perf_counter, and tokens."""

    began: float = field(default_factory=time.perf_counter)
    seen: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0

    def count(self, usage: dict[str, Any]) -> None:
        """Take the counts of a usage in OpenAI's shape."""
        self.prompt_tokens, self.completion_tokens = usage["prompt_tokens"], usage["completion_tokens"]
        self.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


Ask = Callable[[Call], Awaitable[Told]]


@dataclass(frozen=True, slots=True)
class Options:
    """Measurements to make."""

    agents: tuple[int, ...]  # how many agents at once, one measurement each
    max_tokens: int  # of an answer
    transformers_dtype: str | None  # the type that transformers serve loads the weights in


def repeated(tools: int, calls: int, agents: int) -> list[Episode]:
    """Episodes of one prompt with made-up tools, asked again and again by every agent."""
    prompt = [{"role": "system", "content": catalog.SYSTEM}, {"role": "user", "content": "Which invoices of May are open?"}]
    call = Call(prompt, catalog.tools(tools), "")
    return [Episode(f"agent {number}", "chat", (call,) * calls) for number in range(agents)]


def in_process(engine: Engine, max_tokens: int) -> Ask:
    """Ask an engine of this process."""

    async def ask(call: Call) -> Told:
        told = Told()
        stream = engine.stream(call.prompt, call.tools, sampling=Sampling(max_tokens=max_tokens))
        async for delta in stream.adeltas():
            if delta.text:
                told.seen.append(time.perf_counter())
        told.count(stream.completion.usage)
        return told

    return ask


def over_http(http: httpx.AsyncClient, model: str, max_tokens: int) -> Ask:
    """Ask a server in OpenAI's shape; each event that has a part of the answer is a chunk."""

    async def ask(call: Call) -> Told:
        text = isinstance(call.prompt, str)
        asked: dict[str, Any] = {"prompt": call.prompt} if text else {"messages": call.prompt, "tools": list(call.tools) or None}
        body = {**asked, "model": model, "max_tokens": max_tokens, "stream": True, "stream_options": {"include_usage": True}}
        told = Told()
        async with http.stream("POST", "/v1/completions" if text else "/v1/chat/completions", json=body) as answer:
            answer.raise_for_status()
            async for line in answer.aiter_lines():
                if line == "data: [DONE]":
                    break
                if line.startswith("data: "):
                    _read(told, json.loads(line.removeprefix("data: ")))
        return told

    return ask


def _read(told: Told, event: dict[str, Any]) -> None:
    now = time.perf_counter()
    for choice in event.get("choices", ()):
        said = choice.get("delta") or choice
        if any(said.get(part) for part in ("content", "text", "reasoning_content", "tool_calls")):
            told.seen.append(now)
    if event.get("usage"):
        told.count(event["usage"])


async def load(ask: Ask, episodes: Sequence[Episode], agents: int) -> dict[str, Any]:
    """Figures of so many agents at once, each with an episode of its own until none is left."""
    waiting, answers, refused = iter(episodes), list[Told](), Counter[str]()

    async def agent() -> None:
        for episode in waiting:
            for call in episode.calls:
                try:
                    answers.append(await ask(call))
                except (httpx.HTTPError, AgentCacheError) as error:
                    refused[f"{type(error).__name__}: {error}"[:200]] += 1

    began = time.perf_counter()
    await asyncio.gather(*(agent() for _ in range(agents)))
    return figures(answers, time.perf_counter() - began) | {"agents": agents, "refused": dict(refused)}


def figures(answers: Sequence[Told], seconds: float) -> dict[str, Any]:
    """First chunks, gaps between chunks, tokens per second and the cached share. An answer without a chunk has no first one."""
    first = [(told.seen[0] - told.began) * 1e3 for told in answers if told.seen]
    gaps = [(later - sooner) * 1e3 for told in answers for sooner, later in zip(told.seen, told.seen[1:])]
    prompt, cached = sum(told.prompt_tokens for told in answers), sum(told.cached_tokens for told in answers)
    return {
        "calls": len(answers),
        **{f"ttft_p{share}_ms": percentile(first, share / 100) if first else None for share in (50, 95)},
        **{f"gap_p{share}_ms": percentile(gaps, share / 100) if gaps else None for share in (50, 95)},
        "tokens_per_s": sum(told.completion_tokens for told in answers) / seconds,
        "prompt_tokens": prompt,
        "cached_share": cached / prompt if prompt else 0.0,
    }


def run(model: str, episodes: Sequence[Episode], options: Options, say: Say, keep: Keep) -> None:
    """Measure the engine in process, agentcache serve, and transformers serve, one after the other; forget between measurements."""
    rows: list[dict[str, Any]] = []

    async def measure(way: str, ask: Ask, forget: Callable[[], Any]) -> None:
        for agents in options.agents:
            say(f"{way}: {agents} agents")
            await ask(WARM_UP)
            forget()
            rows.append({"way": way, **await load(ask, episodes, agents)})
            keep({"rows": rows})

    async def over(way: str, served: servers.Served, name: str, forget: Callable[[], Any]) -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=served.url, timeout=TIMEOUT_S, trust_env=False, limits=limits) as http:
            await measure(way, over_http(http, name, options.max_tokens), forget)

    from .. import embedded
    from ..engine import Engine

    with Engine(model, store=None) as engine:
        asyncio.run(measure("engine", in_process(engine, options.max_tokens), lambda: engine.store.clear("default")))
        name = engine.name
    with servers.agentcache(f"{name}={model}") as served:
        forget = partial(httpx.post, f"{served.url}/v1/cache/forget", json={"older_than": 0}, trust_env=False)
        asyncio.run(over("agentcache serve", served, name, forget))
    folder = str(embedded.folder()) if model == embedded.NAME else model
    if options.transformers_dtype and find_spec("transformers.cli.serve"):
        with servers.transformers(folder, options.transformers_dtype) as served:
            asyncio.run(over("transformers serve", served, folder, lambda: None))
