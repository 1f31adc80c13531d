"""Engines over tiny models for tests of the runner's side, and what is patched into them. Holds no tests."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from agentcache import Engine, Sampling
from agentcache.store.memory.prefix_tree import PrefixTree
from agentcache.store.store import Store
from tests import models

MB = 1 << 20
SYSTEM = "You are the keeper of a lighthouse. Write down wind, tide and every ship that passes. "


def tool(name: str, argument: str) -> dict[str, Any]:
    """A function schema with one string argument."""
    parameters = {"type": "object", "properties": {argument: {"type": "string"}}, "required": [argument]}
    return {"type": "function", "function": {"name": name, "description": f"Looks up a {argument}.", "parameters": parameters}}


TOOLS = [tool("get_weather", "city"), tool("search", "query")]


@contextmanager
def engine(family: str = "qwen3", dtype: torch.dtype = torch.float32, *, model: Any = None, **options: Any) -> Iterator[Engine]:
    """An engine over a tiny model of its own, with 64 MB for kept pages."""
    made = model if model is not None else models.build(family, dtype)
    with Engine(made, models.toy_tokenizer(), **{"memory_bytes": 64 * MB, **options}) as running:
        yield running


def decode(max_tokens: int = 8, **fields: Any) -> Sampling:
    """So many tokens, whatever they are."""
    return Sampling(max_tokens=max_tokens, ignore_eos=True, **fields)


def chat(*texts: str, system: str = SYSTEM) -> list[dict[str, Any]]:
    """A conversation: user and assistant in turn."""
    turns = [{"role": "assistant" if i % 2 else "user", "content": text} for i, text in enumerate(texts)]
    return [{"role": "system", "content": system}, *turns]


def long_text(words: int, salt: int = 0) -> str:
    """Text of about 4 tokens per word that differs from the first word on for each salt."""
    return " ".join(f"n{salt}-{(i * 7919 + salt) % 997}" for i in range(words))


def wait_until(holds: Callable[[], Any], seconds: float = 20.0) -> bool:
    """Wait for what the device thread does in its own time."""
    end = time.monotonic() + seconds
    while not holds() and time.monotonic() < end:
        time.sleep(0.005)
    return bool(holds())


class Spy:
    """Counts forwards of an engine, remembers who was in each, and in order the logits from which tokens were chosen."""

    def __init__(self, running: Engine) -> None:
        self.forwards: list[list[tuple[int, int]]] = []
        self.logits: list[torch.Tensor] = []
        inner, stream = running.model.forward, running.stream

        def forward(ids: torch.Tensor, parts: list[Any], regimes: list[str], wanted: Any) -> torch.Tensor:
            self.forwards.append([(part.start, part.count) for part in parts])
            return inner(ids, parts, regimes, wanted)

        def listen(logits: torch.Tensor) -> None:
            self.logits.append(logits.clone())

        running.model.forward = forward  # type: ignore[method-assign]
        running.stream = partial(stream, on_logits=listen)  # type: ignore[method-assign]


def check_store(store: PrefixTree | Store) -> None:
    """The store's own account holds."""
    store = store.tree if isinstance(store, Store) else store
    entries = store.entries()
    assert store.bytes == sum(page.spec.page_bytes for page in {id(e.page): e.page for e in entries}.values()), "lent pages count once"
    assert len({(e.scope, id(e.page)) for e in entries}) == len(entries), "a page is kept twice"
    seen: set[int] = set()
    for entry in entries:
        assert entry.page is not None
        assert entry.page.filled >= len(entry.ids) > 0
        assert entry.parent is None or entry.key in entry.parent.children
        assert id(entry.parent) not in seen, "a parent is older than its child"
        seen.add(id(entry))
