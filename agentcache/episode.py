"""The recorded task that the demo and the benchmarks replay. Knows no engine."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.resources import files

from .types import Tool


@dataclass(frozen=True, slots=True)
class Episode:
    """A recorded task: what the user asked, and for each step the completion and the results of its tool calls."""

    system: str
    tools: tuple[Tool, ...]
    task: str
    steps: tuple[tuple[str, tuple[str, ...]], ...]
    texts: tuple[str, ...]


def load_episode(name: str = "museum") -> Episode:
    """An episode that ships with the package."""
    raw = json.loads(files("agentcache").joinpath("demo_data", f"{name}.json").read_text(encoding="utf-8"))
    steps = tuple((step["completion"], tuple(step["results"])) for step in raw["steps"])
    texts = (raw["system"], raw["task"], *(json.dumps(tool) for tool in raw["tools"]), *(part for c, r in steps for part in (c, *r)))
    return Episode(raw["system"], tuple(Tool(**tool) for tool in raw["tools"]), raw["task"], steps, texts)
