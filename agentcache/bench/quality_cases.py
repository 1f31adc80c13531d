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
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..types import Message, Role
from .quality_world.asking import Turn
from .quality_world.dialogues import MULTI, Bundle, Dialogue, bundle, messages, single
from .quality_world.react import langchain, llamaindex
from .quality_world.world import sources

SPLITS = ("seen", "held-out requests", "unseen tools", "unseen words")
STYLES = ("hermes", "langchain", "langchain text", "llamaindex")
VARIANTS = ("as asked", "tools shuffled", "another system text", "history in front")
PER_CATALOG = 12  # dialogues on one catalog
LINKS = frozenset(  # of an answer, whoever words it
    "the is are was in of to it an and no not do answer here done found that by "
    "founder owner year opening place height number visitors birthplace".split()
)
Plain = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Right:
    """A call that is right. acceptable: for each argument the values that will do, "" if it may be left out; None: `arguments` only."""

    name: str
    arguments: Mapping[str, Any]
    acceptable: Mapping[str, Sequence[Any]] | None = None


@dataclass(frozen=True, slots=True)
class Case:
    """One decision. prompt: chat messages or a raw text; context: whether it depends on text before the tool or the request; volatile:
    what is shown at the prompt's tail.
    """

    prompt: Sequence[Plain] | str
    tools: Sequence[Plain]
    right: Right | None
    query: str
    catalog: int
    context: bool = False
    kind: str = ""
    style: str = "hermes"
    says: str = ""  # what the answer has to say where no call is right: words that come from results
    wants: bool = True  # whether anything is asked for: nobody calls a tool for a greeting
    rivals: bool = False  # whether another tool is about the same thing, so that its name alone does not lead to the right one
    volatile: tuple[Message, ...] = ()


@dataclass(frozen=True, slots=True)
class Episode:
    """The steps of one dialogue; solved when all of them are right. catalog: which it shares with others."""

    style: str
    kind: str
    catalog: int
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
            out.append(_first(made, talk, number))
            if len(out) == count:
                return out
    raise AssertionError("endless")


def variants(split: str, tools: int, count: int, seed: str = "bench", held: str = "test") -> dict[str, list[Case]]:
    """The same first decisions as they are, and with something changed that changes nothing about what is right."""
    out: dict[str, list[Case]] = {name: [] for name in VARIANTS}
    for number, made in enumerate(bundles(split, "hermes", tools, seed, held)):
        assert made.catalog is not None
        world = made.catalog.world
        groups = world.shuffled(made.catalog.groups)  # a tool that speaks of the one above it stays below that
        day = "" if re.search(r"oday|date is", made.system) else f" Today is {world.date()}."
        shuffled = replace(made, tools=tuple(tool for group in groups for tool in group))
        other = replace(made, system=f"You sit at the desk of {world.full_name()}.{day}\n{made.system}")
        for talk in made.dialogues:
            before = single(made.catalog, made.catalog.plain(), whole=True)
            held_up = replace(talk, turns=(*before, *talk.turns))
            for name, one, said in zip(VARIANTS, (made, shuffled, other, made), (talk, talk, talk, held_up)):
                out[name].append(_first(one, said, number, len(said.turns) - len(talk.turns)))
            if len(out[name]) == count:
                return out
    raise AssertionError("endless")


def _first(made: Bundle, talk: Dialogue, catalog: int, begins: int = 0) -> Case:
    """The first decision behind the first `begins` turns. Of several steps' first ones few depend on anything."""
    context = talk.context and (talk.kind not in MULTI or talk.kind in ("switch", "fallback"))
    case, right = _hermes_step(made, talk.turns, begins + 1, catalog, context, talk.kind), talk.turns[begins + 1].tool
    return replace(case, rivals=right is not None and any(tool is not right and tool.thing == right.thing for tool in made.tools))


def episodes(style: str, count: int, tools: int = 8, split: str = "unseen tools", seed: str = "bench", held: str = "test") -> list[Episode]:
    """`count` dialogues of at least two calls, in one of the styles."""
    out: list[Episode] = []
    for catalog, made in enumerate(bundles(split, style, tools, f"{seed} episodes", held)):
        for number, talk in enumerate(made.dialogues):
            if sum(turn.tool is not None for turn in talk.turns) < 2:
                continue
            out.append(Episode(style, talk.kind, catalog, tuple(_steps(made, number))))
            if len(out) == count:
                return out
    raise AssertionError("endless")


def with_clock(episode: Episode, role: Role) -> Episode:
    """The same dialogue with a clock at each step's tail that has moved on since the step before; the clock decides nothing."""
    steps = []
    for number, step in enumerate(episode.steps):
        minutes = 60 * (7 + episode.catalog % 12) + 13 * episode.catalog % 60 + 3 * number
        steps.append(replace(step, volatile=(Message(role, f"It is {minutes // 60:02}:{minutes % 60:02}."),)))
    return replace(episode, steps=tuple(steps))


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
    wants = right is not None or not (kind == "small talk" or kind in MULTI)
    return Case(messages(made, turns[:at]), tools, right, asked, catalog, context, kind, "hermes", _says(turns[: at + 1]), wants)


def _right(turn: Turn) -> Right | None:
    if turn.tool is None:
        return None
    args = dict(turn.args)
    if turn.tool.action != "calculate":
        return Right(turn.tool.name, args)
    return Right(turn.tool.name, args, {name: (value, str(value).replace(" ", "")) for name, value in args.items()})


def words(text: str) -> list[str]:
    """Words, numbers and ids of a text, in lower case."""
    return re.findall(r"(?:(?<![^\s\"'(])-(?=\d))?[^\W_]+(?:[-.@'][^\W_]+)*", text.lower())


def _says(turns: Sequence[Turn]) -> str:
    """What the last turn takes from the results before it: an answer in other words that says this is right too.

    From all of them: "unchanged" has to be answered with what an earlier one said. Of an error, all its words.
    """
    if turns[-1].tool is not None or turns[-2].role != "tool":
        return ""
    told = [word for turn in turns[:-1] if turn.role == "tool" for word in words(_values(turn.text))]
    links = LINKS if _result(turns[-2].text).keys() != {"error"} else ()
    return " ".join(word for word in words(turns[-1].text) if word in told and word not in links)


def _result(text: str) -> Mapping[str, Any]:
    """The object that a result is, or an empty one."""
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, Mapping) else {}


def _values(text: str) -> str:
    """A result without the names of its fields: nobody need say those."""
    return " ".join(map(str, _result(text).values())) or text


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
