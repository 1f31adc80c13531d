"""`agentcache bench quality`: how well a model chooses tools and fills their arguments. Knows no options of a command line.

Cases are generated, so that no model has learnt them by heart and unseen ones are known (examples/embedded/world splits words, tools
and values by hashing). The embedded model's training saw the split "seen" and the forms of requests; other models saw none of it.
"""

from __future__ import annotations

import json
import re
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from rich.table import Table

from ..engine import Engine
from ..errors import ConfigError, ContextOverflowError
from ..types import Reuse, Sampling
from . import quality_cases
from .environment import Keep, Say
from .quality_cases import EPISODE_TOOLS, SPLITS, STYLES, Case, Episode, read
from .quality_score import FIGURES, Ratio, Said, figures, right
from .report import table

ANSWER_TOKENS = 200
_ACTION = re.compile(r"^Action\s*:[ \t]*(.*?)\s*$\n\s*Action Input\s*:[ \t]*(.*)", re.DOTALL | re.MULTILINE)
_END = re.compile(r"^(?:Final )?Answer\s*:\s*(.*)", re.DOTALL | re.MULTILINE)

Ask = Callable[[Case], Said]
T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Options:
    """Parts of a run."""

    tools: Sequence[int] = (5, 20, 50)
    splits: Sequence[str] = SPLITS
    count: int = 200  # requests of a split and a number of tools
    episodes: int = 100  # dialogues of a style
    styles: Sequence[str] = ("hermes", "langchain", "llamaindex")
    selection: Sequence[Path] = ()  # files of cases
    tools_dir: Path | None = None  # folder of the catalogs that these files name
    agents: int = 8  # requests at a time

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
    files = {path: read(path, options.tools_dir) for path in options.selection}  # before anything is asked
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
    for path, cases in files.items():
        add("selection", {"file": path.name, **asked(ask, cases, options.agents, path.name, say)[0]})
    return found


def asked(ask: Ask, cases: Sequence[Case], agents: int, what: str, say: Say) -> tuple[dict[str, Any], list[Said]]:
    """The figures of these cases, and each one's answer."""
    said = all_of(ask, cases, agents, lambda done: say(f"{what}: {done} of {len(cases)}") if done % 10 == 0 else None)
    return figures(cases, said), said


def _episodes(ask: Ask, played: Sequence[Episode], agents: int, say: Say) -> dict[str, Any]:
    style = played[0].style
    steps = all_of(partial(solved, ask), played, agents, lambda done: say(f"{style}: {done} of {len(played)}") if done % 5 == 0 else None)
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


def asking(engine: Engine, reuse: Reuse | None = None) -> Ask:
    """A function that puts a case to an engine."""
    calm = Sampling(max_tokens=ANSWER_TOKENS)
    until = Sampling(max_tokens=ANSWER_TOKENS, stop=("\nObservation:",))

    def ask(case: Case) -> Said:
        prompt = case.prompt if isinstance(case.prompt, str) else list(case.prompt)
        try:
            sampling = calm if case.style == "hermes" else until
            done = engine.generate(prompt, case.tools, sampling=sampling, reuse=reuse, volatile=case.volatile)
        except ContextOverflowError:
            return Said(None, {}, failed="too long")
        said = react(done.text, case) if case.style != "hermes" else hermes(done.message)
        return replace(said, ids=tuple(done.ids), cached=done.receipt.cached_tokens)

    return ask


def hermes(message: Any) -> Said:
    """The first call of a message, in the model family's own form."""
    if not message.tool_calls:
        return Said(None, {}, message.content or "")
    call = message.tool_calls[0]
    return Said(call.name, call.arguments if isinstance(call.arguments, Mapping) else {}, message.content or "")


def react(text: str, case: Case) -> Said:
    """The action or the answer of a text ReAct step, as the agents' parsers read it. A bare input is the only argument's value."""
    found, end = _ACTION.search(text), _END.search(text)
    if found is None or (end is not None and end.start() < found.start()):
        return Said(None, {}, end.group(1).strip() if end else text, failed="" if end else "neither action nor answer")
    given = found.group(2).strip()
    try:
        value = json.loads(given)
    except ValueError:
        value = given.strip('"')
    if not isinstance(value, Mapping):
        wanted = case.right.arguments if case.right is not None else {}
        name, expected = next(iter(wanted.items()), ("", ""))
        value = {name: given if isinstance(expected, str) and not isinstance(value, str) else value} if len(wanted) == 1 else {"": given}
    return Said(found.group(1), value, text)


def all_of(ask: Callable[[T], R], items: Sequence[T], agents: int, say: Callable[[int], None]) -> list[R]:
    """The answer to every case, or of every episode, `agents` at a time."""
    out = []
    with ThreadPoolExecutor(agents) as pool:
        for number, said in enumerate(pool.map(ask, items), 1):
            out.append(said)
            say(number)
    return out


def solved(ask: Ask, episode: Episode) -> int:
    """Count the steps that were right before the first wrong one: all, if it is solved."""
    for number, step in enumerate(episode.steps):
        if not right(step, ask(step)):
            return number
    return len(episode.steps)


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
