"""Draws what a model is asked, and what is right, from the generated world. `python -m examples.embedded.cases` freezes some.

    selections   first decisions of dialogues           episodes   the decisions of dialogues of at least two calls
    variants     first decisions with something changed that changes nothing about what is right

Knows no engine. A seed gives the same cases everywhere; `agentcache bench quality` asks the frozen ones of `frozen`.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from agentcache.bench import quality_cases as kept
from agentcache.bench.quality_cases import Case, Episode, Right, words
from agentcache.types import Message, Role

from .world.asking import Turn
from .world.dialogues import MULTI, Bundle, Dialogue, bundle, messages, single
from .world.react import langchain, llamaindex
from .world.world import sources

HELD, SEED = "test", "bench"  # the part of the world that the frozen cases are drawn from, and the word
VARIANTS = ("as asked", "tools shuffled", "another system text", "history in front")
LINKS = frozenset(  # of an answer, whoever words it
    "the is are was in of to it an and no not do answer here done found that by "
    "founder owner year opening place height number visitors birthplace".split()
)


def bundles(split: str, style: str, tools: int, seed: str, held: str) -> Iterator[Bundle]:
    """Bundles without end on exactly `tools` tools, always the same ones for a seed. Their dialogues start with what they are about."""
    source = sources(held)[split]
    number = 0
    while True:
        name = f"{seed} {held} {split} {style} {tools} {number}"
        yield bundle(name, style, tools, kept.PER_CATALOG, source, exact=True, hold=False)
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
        yield Case(prompt, [], _right(turn), talk.turns[0].text, number, talk.context, talk.kind, made.style, _says(talk.turns[: at + 1]))


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
    return Right(turn.tool.name, args, {name: [value, str(value).replace(" ", "")] for name, value in args.items()})


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


# The cases of the wheel

CELLS = tuple((split, tools, SEED) for split in kept.SPLITS for tools in (5, 20, 50))
MADE_UP = ("unseen tools", 8, "segments")  # what `agentcache calibrate --made-up` asks
COUNT, EPISODES = 200, 100
OF_LINE = ("tools", "style")  # what a case has from its line


def frozen() -> str:
    """The lines that `agentcache.bench.quality_cases` reads."""
    lines: list[dict[str, Any]] = []
    for split, tools, seed in (*CELLS, MADE_UP):
        of: dict[int, list[Case]] = {}
        for case in selections(split, tools, COUNT, seed, HELD):
            of.setdefault(case.catalog, []).append(case)
        lines += [{"split": split, "tools": some[0].tools, "cases": [_plain(case) for case in some]} for some in of.values()]
    for style in kept.STYLES:
        for one in episodes(style, EPISODES, kept.EPISODE_TOOLS, seed=SEED, held=HELD):
            steps = [_plain(step) for step in one.steps]
            lines.append({"style": style, "kind": one.kind, "catalog": one.catalog, "tools": one.steps[0].tools, "steps": steps})
    return "".join(json.dumps(line, ensure_ascii=False, separators=(",", ":")) + "\n" for line in lines)


def _plain(case: Case) -> dict[str, Any]:
    """A case without its defaults and what its line has."""
    found = {each.name: getattr(case, each.name) for each in fields(case) if each.name not in OF_LINE}
    usual = {each.name: each.default for each in fields(case)}
    found["right"] = asdict(case.right) if case.right else None
    return {name: value for name, value in found.items() if name == "right" or value != usual[name]}


@dataclass(frozen=True, slots=True)
class Drawn:
    """Cases of one seed, from the part of the world that is held out for `held`: for `agentcache.bench.quality.run`."""

    seed: str = SEED
    held: str = HELD

    def selections(self, split: str, tools: int, count: int) -> list[Case]:
        return selections(split, tools, count, self.seed, self.held)

    def episodes(self, style: str, count: int) -> list[Episode]:
        return episodes(style, count, kept.EPISODE_TOOLS, seed=self.seed, held=self.held)


if __name__ == "__main__":
    path = Path(kept.__file__).with_name(kept.FROZEN)
    path.write_bytes(gzip.compress(frozen().encode(), 9, mtime=0))
