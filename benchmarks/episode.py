"""The recorded task that `python -m benchmarks.through` replays. Knows no engine."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.resources import files

from agentcache.types import Tool


@dataclass(frozen=True, slots=True)
class Episode:
    """A recorded task: what the user asked, and for each step the completion and the results of its tool calls."""

    system: str
    tools: tuple[Tool, ...]
    task: str
    steps: tuple[tuple[str, tuple[str, ...]], ...]
    texts: tuple[str, ...]


def load_episode() -> Episode:
    """The museum's, which comes with the package: the tokenizers of random weights are trained on its text."""
    raw = json.loads(files("agentcache.bench").joinpath("museum.json").read_text(encoding="utf-8"))
    steps = tuple((step["completion"], tuple(step["results"])) for step in raw["steps"])
    texts = (raw["system"], raw["task"], *(json.dumps(tool) for tool in raw["tools"]), *(part for c, r in steps for part in (c, *r)))
    return Episode(raw["system"], tuple(Tool(**tool) for tool in raw["tools"]), raw["task"], steps, texts)
