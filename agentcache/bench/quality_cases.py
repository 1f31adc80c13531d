"""Cases of `agentcache bench quality` with their right answers: frozen ones that come with the package, and files.

    Case      messages, tools, the call that is right (None: no call), which catalog it shares with others
    Episode   the requests of a dialogue's steps in order, each with its right answer

Knows no engine: quality.py asks, quality_score.py counts. examples/embedded/cases.py draws the frozen cases.
"""

from __future__ import annotations

import functools
import gzip
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from .. import traces
from ..errors import ConfigError
from ..types import Message

SPLITS = ("seen", "held-out requests", "unseen tools", "unseen words")
STYLES = ("hermes", "langchain", "langchain text", "llamaindex")
PER_CATALOG = 12  # dialogues on one catalog
EPISODE_TOOLS = 8
FROZEN = "cases.jsonl.gz"
MORE = "python -m benchmarks.quality, from a checkout, draws others"
Plain = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Right:
    """A call that is right. acceptable: for each argument the values that will do, "" if it may be left out; None: `arguments` only."""

    name: str
    arguments: Mapping[str, Any]
    acceptable: Mapping[str, Sequence[Any]] | None = None


@dataclass(frozen=True, slots=True)
class Case:
    """One decision."""

    prompt: Sequence[Plain] | str  # chat messages or a raw text
    tools: Sequence[Plain]
    right: Right | None
    query: str
    catalog: int
    context: bool = False  # it depends on text before the tool or the request
    kind: str = ""
    style: str = "hermes"
    says: str = ""  # what the answer has to say where no call is right: words that come from results
    wants: bool = True  # whether anything is asked for: a greeting needs no tool
    rivals: bool = False  # whether another tool is about the same thing, so that its name alone does not lead to the right one
    volatile: tuple[Message, ...] = ()  # text at the prompt's tail


@dataclass(frozen=True, slots=True)
class Episode:
    """The steps of one dialogue; solved when all of them are right. catalog: which it shares with others."""

    style: str
    kind: str
    catalog: int
    steps: tuple[Case, ...] = field(repr=False)


def words(text: str) -> list[str]:
    """Words, numbers and ids of a text, in lower case."""
    return re.findall(r"(?:(?<![^\s\"'(])-(?=\d))?[^\W_]+(?:[-.@'][^\W_]+)*", text.lower())


# Frozen cases, a line per catalog or dialogue: {"split", "tools", "cases"} and {"style", "kind", "catalog", "tools", "steps"}


@functools.cache
def _frozen() -> tuple[dict[tuple[str, int], list[Case]], dict[str, list[Episode]]]:
    """First decisions by split and number of tools; dialogues by style."""
    cases: dict[tuple[str, int], list[Case]] = {}
    played: dict[str, list[Episode]] = {}
    for line in gzip.decompress(files(__package__).joinpath(FROZEN).read_bytes()).splitlines():
        row = json.loads(line)
        if "split" in row:
            cases.setdefault((row["split"], len(row["tools"])), []).extend(_case(row, each) for each in row["cases"])
        else:
            steps = tuple(_case(row, each) for each in row["steps"])
            played.setdefault(row["style"], []).append(Episode(row["style"], row["kind"], row["catalog"], steps))
    return cases, played


def _case(row: Plain, each: Plain) -> Case:
    right = Right(**each["right"]) if each["right"] else None
    return Case(**{**each, "right": right}, tools=row["tools"], style=row.get("style", "hermes"))


def selections(split: str, tools: int, count: int) -> list[Case]:
    """The first `count` decisions of a split on so many tools; ConfigError where the package has none, or not so many."""
    cases, _ = _frozen()
    if not (found := cases.get((split, tools))):
        known = sorted(number for name, number in cases if name == split)
        raise ConfigError(f"tools={tools!r}: of the split {split!r} there are cases with {', '.join(map(str, known))} tools; {MORE}")
    return _first(found, count)


def episodes(style: str, count: int) -> list[Episode]:
    """The first `count` dialogues of at least two calls on 8 unseen tools; ConfigError if there are not so many."""
    return _first(_frozen()[1][style], count)


def _first(found: list[Any], count: int) -> list[Any]:
    if count > len(found):
        raise ConfigError(f"n={count!r}: {len(found)} cases of each kind come with the package; {MORE}")
    return found[:count]


# Files of cases: {"id", "group", "system", "tools" | "tools_ref", "query", "expected": [{"name", "arguments", "acceptable"}]}


def read(path: Path, tools_dir: Path | None = None) -> list[Case]:
    """The cases of a .jsonl file. tools_dir: where the catalogs lie that `tools_ref` names; by default ../tools beside the file."""
    out = []
    catalogs: dict[str, int] = {}
    shared = functools.cache(functools.partial(traces.catalog, tools_dir or path.resolve().parent.parent / "tools"))
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"selection={str(path)!r}: cannot be read: {error}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            tools = row["tools"] if "tools" in row else list(shared(row["tools_ref"]).values())
            first = row["expected"][0] if row["expected"] else None
            right = Right(first["name"], first["arguments"], first.get("acceptable")) if first else None
            query = str(row["query"])
        except (ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
            form = '{"query": ..., "tools": [...], "expected": [{"name": ..., "arguments": {...}}]}'
            raise ConfigError(f"selection={str(path)!r}, line {number}: not a case ({error!r}); each line is {form}") from error
        system = [{"role": "system", "content": row["system"]}] if row.get("system") else []
        catalog = catalogs.setdefault(str(row.get("tools_ref", row.get("id", number))), len(catalogs))
        out.append(Case([*system, {"role": "user", "content": query}], tools, right, query, catalog))
    if not out:
        raise ConfigError(f"selection={str(path)!r}: no case is in it")
    return out


# The same requests as traces


def recorded(cases: Sequence[Case]) -> list[traces.Episode]:
    """Each case as an episode of one call that was answered right."""
    found = []
    for number, case in enumerate(cases):
        answer: traces.Json = {"role": "assistant", "content": case.says or "No."}
        if case.right is not None:
            function = {"name": case.right.name, "arguments": dict(case.right.arguments)}
            answer = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
        assert not isinstance(case.prompt, str)
        call = traces.Call([dict(message) for message in case.prompt], tuple(dict(tool) for tool in case.tools), answer)
        found.append(traces.Episode(f"made up {number}", "chat", (call,)))
    return found


def made_up(tools: int, count: int) -> list[traces.Episode]:
    """Requests of the embedded model's world, on tools that its training never saw."""
    return recorded(selections("unseen tools", tools, count)) if count else []
