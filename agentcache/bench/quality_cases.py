"""What a model is asked in `agentcache bench quality`, and what is right: from the generated world, or from files of cases.

    Case      messages, tools, the call that is right (None: no call), which catalog it shares with others
    Episode   the requests of a dialogue's steps in order, each with what is right there

Knows no engine: quality_play.py asks, quality_score.py counts.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from .quality_world.asking import Turn
from .quality_world.dialogues import Bundle, bundle, messages
from .quality_world.react import langchain, llamaindex
from .quality_world.world import sources

SPLITS = ("seen", "held-out requests", "unseen tools", "unseen words")
STYLES = ("hermes", "langchain", "langchain text", "llamaindex")
PER_CATALOG = 12  # dialogues on one catalog
Plain = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Right:
    """A call that is right. acceptable: for each argument the values that will do, "" if it may be left out; None: `arguments` only."""

    name: str
    arguments: Mapping[str, Any]
    acceptable: Mapping[str, Sequence[Any]] | None = None


@dataclass(frozen=True, slots=True)
class Case:
    """One decision. prompt: chat messages or a raw text; context: whether it depends on text before the tool or the request."""

    prompt: Sequence[Plain] | str
    tools: Sequence[Plain]
    right: Right | None
    query: str
    catalog: int
    context: bool = False
    kind: str = ""
    style: str = "hermes"
    says: str = ""  # what the answer has to say where no call is right: words that come from the last result


@dataclass(frozen=True, slots=True)
class Episode:
    """The steps of one dialogue; solved when all of them are right."""

    style: str
    kind: str
    steps: tuple[Case, ...] = field(repr=False)


def bundles(split: str, style: str, tools: int, seed: str, held: str) -> Iterator[Bundle]:
    """Bundles without end on exactly `tools` tools, always the same ones for a seed. Their dialogues start with what they are about."""
    source = sources(held)[split]
    number = 0
    while True:
        name = f"{seed} {held} {split} {style} {tools} {number}"
        yield bundle(name, style, tools, PER_CATALOG, source, exact=True, hold=False)
        number += 1


def selections(split: str, tools: int, count: int, seed: str = "bench", held: str = "test") -> list[Case]:
    """`count` first decisions of dialogues."""
    out: list[Case] = []
    for number, made in enumerate(bundles(split, "hermes", tools, seed, held)):
        for talk in made.dialogues:
            out.append(_hermes_step(made, talk.turns, 1, number, talk.context, talk.kind))
            if len(out) == count:
                return out
    raise AssertionError("endless")


def episodes(style: str, count: int, tools: int = 8, split: str = "unseen tools", seed: str = "bench", held: str = "test") -> list[Episode]:
    """`count` dialogues of at least two calls, in one of the styles."""
    out: list[Episode] = []
    for made in bundles(split, style, tools, f"{seed} episodes", held):
        for number, talk in enumerate(made.dialogues):
            if sum(turn.tool is not None for turn in talk.turns) < 2:
                continue
            out.append(Episode(style, talk.kind, tuple(_steps(made, number))))
            if len(out) == count:
                return out
    raise AssertionError("endless")


def _steps(made: Bundle, number: int) -> Iterator[Case]:
    talk = made.dialogues[number]
    if made.style == "hermes":
        for at, turn in enumerate(talk.turns):
            if turn.role == "assistant":
                yield _hermes_step(made, talk.turns, at, number, talk.context, talk.kind)
        return
    said = [(at, turn) for at, turn in enumerate(talk.turns) if turn.role == "assistant"]
    samples = [sample for sample in (langchain if made.style.startswith("langchain") else llamaindex)(made) if sample.dialogue == number]
    for (at, turn), sample in zip(said, samples, strict=True):
        text = "".join(piece.text for piece in sample.pieces[:-1])
        prompt = text if made.style == "langchain text" else chat(text)
        yield Case(prompt, (), _right(turn), talk.turns[0].text, number, talk.context, talk.kind, made.style, _says(talk.turns[: at + 1]))


def _hermes_step(made: Bundle, turns: Sequence[Turn], at: int, catalog: int, context: bool, kind: str) -> Case:
    """The decision that turn `at` is."""
    tools = [tool.schema(made.form) for tool in made.tools]
    asked = next(turn.text for turn in reversed(turns[:at]) if turn.role == "user")
    right = _right(turns[at])
    return Case(messages(made, turns[:at]), tools, right, asked, catalog, context, kind, "hermes", _says(turns[: at + 1]))


def _right(turn: Turn) -> Right | None:
    return None if turn.tool is None else Right(turn.tool.name, dict(turn.args))


def words(text: str) -> list[str]:
    """Words, numbers and ids of a text, in lower case."""
    return re.findall(r"[^\W_]+(?:[-.@'][^\W_]+)*", text.lower())


def _says(turns: Sequence[Turn]) -> str:
    """What the last turn takes from the last result before it: an answer in other words that says this is right too."""
    told = [turn for turn in turns[:-1] if turn.role == "tool"]
    if turns[-1].tool is not None or not told:
        return ""
    known = set(words(told[-1].text))
    return " ".join(word for word in words(turns[-1].text) if word in known)


_CHATML = re.compile(r"<\|im_start\|>(\w+)\n(.*?)<\|im_end\|>\n", re.DOTALL)


def chat(text: str) -> list[dict[str, Any]]:
    """The messages of a ChatML text that ends with the opening of an assistant's turn."""
    return [{"role": role, "content": content} for role, content in _CHATML.findall(text)]


# Files of cases: {"id", "group", "system", "tools" | "tools_ref", "query", "expected": [{"name", "arguments", "acceptable"}]}


@functools.cache
def _shared(folder: Path, name: str) -> list[Plain]:
    path = folder / f"{name}.jsonl"
    try:
        lines = path.read_text("utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"tools_ref={name!r}: {str(path)!r} cannot be read: {error}; name its folder with --tools-dir") from error
    return [json.loads(line) for line in lines if line.strip()]


def read(path: Path, tools_dir: Path | None = None) -> list[Case]:
    """The cases of a .jsonl file. tools_dir: where the catalogs lie that `tools_ref` names; by default ../tools beside the file."""
    out = []
    catalogs: dict[str, int] = {}
    try:
        lines = path.read_text("utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"selection={str(path)!r}: cannot be read: {error}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            tools = row["tools"] if "tools" in row else _shared(tools_dir or path.resolve().parent.parent / "tools", row["tools_ref"])
            first = row["expected"][0] if row["expected"] else None
            right = Right(first["name"], first["arguments"], first.get("acceptable")) if first else None
            query = str(row["query"])
        except (ValueError, KeyError, TypeError, IndexError) as error:
            form = '{"query": ..., "tools": [...], "expected": [{"name": ..., "arguments": {...}}]}'
            raise ConfigError(f"selection={str(path)!r}, line {number}: not a case ({error!r}); each line is {form}") from error
        system = [{"role": "system", "content": row["system"]}] if row.get("system") else []
        catalog = catalogs.setdefault(str(row.get("tools_ref", row.get("id", number))), len(catalogs))
        out.append(Case([*system, {"role": "user", "content": query}], tools, right, query, catalog))
    return out
