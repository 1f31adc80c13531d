"""`agentcache bench quality`: how well a model chooses tools and fills their arguments. Knows no options of a command line.

Cases are generated, so that no model has learnt them by heart and unseen ones are known (examples/embedded/world splits words, tools
and values by hashing). The embedded model's training saw the split "seen" and the forms of requests; other models saw none of it.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from ..engine import Engine
from ..errors import ConfigError
from . import quality_cases
from .quality_asking import Ask, all_of, asking, solved
from .quality_cases import EPISODE_TOOLS, SPLITS, STYLES, Case, Episode, read
from .quality_score import FIGURES, Ratio, Said, figures
from .report import table

Keep = Callable[[dict[str, Any]], None]
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Options:
    """Parts of a run."""

    tools: Sequence[int] = (5, 20, 50)
    splits: Sequence[str] = SPLITS
    # requests of a split and a number of tools
    count: int = 200
    # dialogues of a style
    episodes: int = 100
    styles: Sequence[str] = ("hermes", "langchain", "llamaindex")
    # files of cases
    selection: Sequence[Path] = ()
    # folder of the catalogs that these files name
    tools_dir: Path | None = None
    # requests at a time
    agents: int = 8

    def __post_init__(self) -> None:
        for name, given, known in (("split", self.splits, SPLITS), ("style", self.styles, STYLES)):
            if unknown := [each for each in given if each not in known]:
                raise ConfigError(f"{name}={unknown[0]!r}: choose from {', '.join(map(repr, known))}")


def run(engine: Engine, options: Options, say: Say, keep: Keep = lambda part: None, source: Any = quality_cases) -> dict[str, Any]:
    """All of it; `keep` gets the report at its start, and hears of each row that joins it. source: a drawer of other cases than the frozen.

    rows      per split and number of tools: n and the figures of quality_score.py
    episodes  per style: n, solved, and both per kind of dialogue
    selection per file of cases
    """
    ask, began = asking(engine), time.perf_counter()
    found: dict[str, Any] = {"rows": [], "episodes": [], "selection": [], "agents": options.agents}

    def add(part: str, row: dict[str, Any]) -> None:
        found[part].append(row)
        keep({"seconds": round(time.perf_counter() - began, 1)})

    keep(found)
    for split in options.splits:
        for tools in options.tools if options.count else ():
            cases = source.selections(split, tools, options.count)
            add("rows", {"split": split, "tools": tools, **asked(ask, cases, options.agents, f"{split}, {tools} tools", say)[0]})
    for style in options.styles if options.episodes else ():
        add("episodes", _episodes(ask, source.episodes(style, options.episodes), options.agents, say))
    for path in options.selection:
        cases = read(path, options.tools_dir)
        add("selection", {"file": path.name, **asked(ask, cases, options.agents, path.name, say)[0]})
    return found


def asked(ask: Ask, cases: Sequence[Case], agents: int, what: str, say: Say) -> tuple[dict[str, Any], list[Said]]:
    """The figures of these cases, and each one's answer."""
    said = all_of(ask, cases, agents, lambda done: say(f"{what}: {done} of {len(cases)}") if done % 10 == 0 else None)
    return figures(cases, said), said


def _episodes(ask: Ask, played: Sequence[Episode], agents: int, say: Say) -> dict[str, Any]:
    style = played[0].style

    def told(done: int) -> None:
        if done % 5 == 0:
            say(f"{style}: {done} of {len(played)}")

    steps = all_of(lambda one: solved(ask, one), played, agents, told)
    kinds: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    catalogs: dict[int, list[bool]] = defaultdict(list)
    for one, done in zip(played, steps):
        kinds[one.kind][0] += done == len(one.steps)
        kinds[one.kind][1] += 1
        catalogs[one.catalog].append(done == len(one.steps))
    ratio = Ratio({catalog: (sum(right), len(right)) for catalog, right in catalogs.items()})
    return {
        "style": style,
        "tools": EPISODE_TOOLS,
        "n": len(played),
        "solved": ratio.value,
        "solved_ci": ratio.interval(),
        "steps": sum(len(one.steps) for one in played),
        "steps_before_first_error": sum(steps),
        "kinds": {kind: {"solved": count[0], "n": count[1]} for kind, count in sorted(kinds.items())},
    }


# Showing


def share(row: Mapping[str, Any], name: str) -> str:
    """A figure with its interval; a dash for what nothing counted in."""
    if row[name] is None:
        return "-"
    low, high = row[f"{name}_ci"]
    return f"{row[name]:.3f} ({low:.2f}-{high:.2f})"


def cells(row: Mapping[str, Any]) -> list[str]:
    """n and the figures of a row."""
    return [str(row["n"]), *(share(row, name) for name in FIGURES)]


def tables(found: Mapping[str, Any]) -> list[Table]:
    """Rows, episodes, files of cases; nothing for parts that were not asked."""
    caption = "95 % intervals; fpr of requests that no tool fits, the others of those that one fits"
    rows = [[row["split"], str(row["tools"]), *cells(row)] for row in found["rows"]]
    files = [[row["file"], *cells(row), str(row["too_long"])] for row in found["selection"]]
    played = [[row["style"], str(row["tools"]), str(row["n"]), share(row, "solved")] for row in found["episodes"]]
    return [
        table("choosing a tool and filling its arguments", ["split", "tools", "n", *FIGURES], rows, caption),
        table("dialogues of several calls, every step right", ["style", "tools", "n", "solved"], played),
        table("files of cases", ["file", "n", *FIGURES, "too long"], files),
    ]
