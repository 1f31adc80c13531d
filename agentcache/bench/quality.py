"""`agentcache bench quality`: how well a model chooses tools and fills their arguments. Knows no options of a command line.

Cases are generated, so that no model has learnt them by heart and unseen ones are known (examples/embedded/world splits words, tools
and values by hashing). The embedded model's training saw the split "seen" and the forms of requests; other models saw none of it.
Word overlap can solve many single requests, so BM25 over the same requests stands beside each figure.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from rich.table import Table

from ..engine import Engine
from ..errors import ConfigError, GenerationError
from .quality_asking import Ask, all_of, all_solved, asking
from .quality_cases import EPISODE_TOOLS, SPLITS, STYLES, Case, Episode, read
from .quality_score import FIGURES, Ratio, Said, figures
from .report import table

PARTS = ("rows", "shares", "episodes", "selection", "paired")
Keep = Callable[[dict[str, Any]], None]
Say = Callable[[str], None]


class Source(Protocol):
    """A source of cases: the frozen ones (the module quality_cases), or a generator."""

    def selections(self, split: str, tools: int, count: int) -> list[Case]: ...

    def episodes(self, style: str, count: int) -> list[Episode]: ...


@dataclass(frozen=True, slots=True)
class Options:
    """Parts of a run."""

    tools: Sequence[int] = (5, 20, 50)
    splits: Sequence[str] = SPLITS
    count: int = 200  # requests of a cell
    episodes: int = 100  # dialogues of a style
    styles: Sequence[str] = ("hermes", "langchain", "llamaindex")
    selection: Sequence[Path] = ()  # files of cases
    tools_dir: Path | None = None
    agents: int = 8  # requests at a time
    paired: int = 0  # requests asked with reuse and without
    part_tools: int = 20  # tools of the requests of `paired`

    def __post_init__(self) -> None:
        for name, given, known in (("split", self.splits, SPLITS), ("style", self.styles, STYLES)):
            if unknown := [each for each in given if each not in known]:
                raise ConfigError(f"{name}={unknown[0]!r}: choose from {', '.join(map(repr, known))}")


@dataclass(slots=True)
class Found:
    """The rows of a report so far, by part."""

    keep: Keep
    parts: dict[str, list[dict[str, Any]]] = field(default_factory=lambda: defaultdict(list))

    def add(self, part: str, row: dict[str, Any]) -> None:
        self.parts[part].append(row)
        self.keep({part: self.parts[part]})


def run(engine: Engine, options: Options, source: Source, say: Say, keep: Keep = lambda part: None) -> dict[str, Any]:
    """All of it; `keep` gets each part of the report when it is done.

    rows      per split and number of tools: n and the figures of quality_score.py
    shares    the same for the requests that depend on what stands before them, and for those that do not
    episodes  per style: n, solved, and both per kind of dialogue
    selection per file of cases
    paired    the same requests with reuse and with reuse off, how many tokens reuse spared, how many answers are the same tokens
    """
    ask, found, began = asking(engine), Found(keep), time.perf_counter()
    for split in options.splits:
        for tools in options.tools if options.count else ():
            _cell(ask, found, source.selections(split, tools, options.count), {"split": split, "tools": tools}, options.agents, say)
    for style in options.styles if options.episodes else ():
        found.add("episodes", _episodes(ask, source.episodes(style, options.episodes), options.agents, say))
    for path in options.selection:
        cases = read(path, options.tools_dir)
        found.add("selection", {"file": path.name, **asked(ask, cases, options.agents, path.name, say)[0]})
    if options.paired:
        found.add("paired", _paired(engine, options, source, say))
    setting = {"agents": options.agents, "seconds": round(time.perf_counter() - began, 1)}
    keep(setting)
    empty: dict[str, Any] = {name: [] for name in PARTS}
    return {**empty, **found.parts, **setting}


def asked(ask: Ask, cases: Sequence[Case], agents: int, what: str, say: Say) -> tuple[dict[str, Any], list[Said]]:
    """The figures of these cases, and each one's answer."""
    said = all_of(ask, cases, agents, lambda done: say(f"{what}: {done} of {len(cases)}") if done % 10 == 0 else None)
    return figures(cases, said), said


def _cell(ask: Ask, found: Found, cases: Sequence[Case], of: Mapping[str, Any], agents: int, say: Say) -> None:
    row, said = asked(ask, cases, agents, f"{of['split']}, {of['tools']} tools", say)
    found.add("rows", {**of, **row})
    for context in (False, True):
        some = [number for number, case in enumerate(cases) if case.context is context]
        if some:
            part = figures([cases[number] for number in some], [said[number] for number in some])
            found.add("shares", {**of, "share": "context" if context else "independent", **part})


def _paired(engine: Engine, options: Options, source: Source, say: Say) -> dict[str, Any]:
    """Each request twice: on the kept tool group, and with everything computed anew."""
    tools = options.part_tools
    cases = source.selections("unseen tools", tools, options.paired)
    kept, said = asked(asking(engine), cases, options.agents, "with reuse", say)
    anew, again = asked(asking(engine, "off"), cases, options.agents, "without", say)
    spared, alike = sum(one.cached for one in said), sum(one.ids == other.ids and not one.failed for one, other in zip(said, again))
    if not spared or any(other.cached for other in again):
        raise GenerationError(
            f"nothing is compared: {spared!r} tokens were reused in one run, {sum(o.cached for o in again)!r} in the other"
        )
    return {"tools": tools, "n": len(cases), "same": alike, "cached_tokens": spared, "reuse": kept, "off": anew}


def _episodes(ask: Ask, played: Sequence[Episode], agents: int, say: Say) -> dict[str, Any]:
    style = played[0].style
    steps = all_solved(ask, played, agents, lambda done: say(f"{style}: {done} of {len(played)}") if done % 5 == 0 else None)
    kinds: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    catalogs: dict[int, list[bool]] = defaultdict(list)
    for one, done in zip(played, steps):
        kinds[one.kind][0] += done == len(one.steps)
        kinds[one.kind][1] += 1
        catalogs[one.catalog].append(done == len(one.steps))
    ratio = Ratio({catalog: (sum(solved), len(solved)) for catalog, solved in catalogs.items()})
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

SHOWN = [name.removesuffix("_tsa").replace("_", " ") for name in FIGURES]


def share(row: Mapping[str, Any], name: str, interval: bool = True) -> str:
    """A figure with its interval; a dash for what nothing counted in."""
    if row[name] is None:
        return "-"
    low, high = row[f"{name}_ci"]
    return f"{row[name]:.3f}" + (f" ({low:.2f}-{high:.2f})" if interval else "")


def cells(row: Mapping[str, Any]) -> list[str]:
    """n and the figures of a row, as SHOWN names them."""
    return [str(row["n"]), *(share(row, name, interval=not name.endswith("_tsa")) for name in FIGURES)]


def tables(found: Mapping[str, Any]) -> list[Table]:
    """Rows, shares, episodes, files of cases; nothing for parts that were not asked."""
    caption = "95 % intervals; fpr of requests that no tool fits, the others of those that one fits; then tsa of the baselines"
    rows = [[row["split"], str(row["tools"]), *cells(row)] for row in found["rows"]]
    shares = [[row["split"], str(row["tools"]), row["share"], *cells(row)] for row in found["shares"]]
    files = [[row["file"], *cells(row), str(row["too_long"])] for row in found["selection"]]
    played = [[row["style"], str(row["tools"]), str(row["n"]), share(row, "solved")] for row in found["episodes"]]
    return [
        table("choosing a tool and filling its arguments", ["split", "tools", "n", *SHOWN], rows, caption),
        table("by whether what is right depends on text before the tool or the request", ["split", "tools", "share", "n", *SHOWN], shares),
        table("dialogues of several calls, every step right", ["style", "tools", "n", "solved"], played),
        table("files of cases", ["file", "n", *SHOWN, "too long"], files),
    ]
