"""Questions whose answers stand in short texts that a search finds. Knows nothing of catalogs' rules or formats."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from .asking import Turn as T
from .asking import calls, results, says, user
from .catalogs import Catalog
from .steps import BUILDINGS, KNOWN, arithmetic, calculated
from .tools import Tool
from .world import World


@dataclass(frozen=True, slots=True)
class Relation:
    """What can be asked about an entity: questions, the sentences that tell it, what its value is, and what answers call it."""

    questions: tuple[str, ...]
    sentences: tuple[str, ...]
    draw: Callable[[World], str]
    label: str

    def said(self, value: str) -> str:
        """An answer first says what was asked for: by that the value is found among others in the text."""
        return f"The {self.label} is {value}."


def _year(world: World) -> str:
    return world.value(lambda: str(world.number(1700, 2020)))


def _size(world: World) -> str:
    return str(world.integer())


RELATIONS = {
    "founder": Relation(
        ("Who founded {e}?", "Who was the founder of {e}?"), ("{E} was founded by {v}.", "{v} founded {e}."), World.full_name, "founder"
    ),
    "owner": Relation(
        ("Who owns {e}?", "Who is the owner of {e}?"), ("{E} belongs to its owner {v}.", "{v} owns {e}."), World.full_name, "owner"
    ),
    "opened": Relation(
        ("When did {e} open?", "In which year did {e} open?"), ("{E} opened in {v}.", "In {v} {e} opened."), _year, "year of opening"
    ),
    "place": Relation(
        ("Where is {e}?", "In which city is {e}?"), ("{E} is in {v}.", "{E} stands in the city of {v}."), World.place, "place"
    ),
    "height": Relation(
        ("How high is {e}?", "What is the height of {e}?"), ("{E} is {v} metres high.", "The height of {e} is {v} metres."), _size, "height"
    ),
    "visitors": Relation(
        ("How many visitors has {e}?", "How many visitors come to {e}?"), ("{E} has {v} visitors a day.",), _size, "number of visitors"
    ),
}
BORN = (("Where was {e} born?", "What is the birthplace of {e}?"), ("{e} was born in {v}.", "The birthplace of {e} is {v}."))
NUMERIC = {
    "opened": ("How many years after {b} did {a} open?",),
    "height": ("How much higher is {a} than {b}?", "By how many metres is {a} higher than {b}?"),
}


def _entity(world: World) -> str:
    return f"{world.person()} {world.pick(BUILDINGS)}"


def _text(world: World, entity: str, known: dict[str, str], others: Collection[str] = RELATIONS) -> str:
    """A short text with these relations and some of the others, in any order."""
    known = dict(known)
    for name in world.sample(sorted(others), world.number(0, 2)):
        known.setdefault(name, RELATIONS[name].draw(world))
    lines = []
    for name in world.shuffled(sorted(known)):
        lines.append(world.pick(RELATIONS[name].sentences).format(e=f"the {entity}", E=f"The {entity}", v=known[name]))
    return " ".join(lines)


def _look_up(tool: Tool, query: str, text: str, known: str = "") -> list[T]:
    """A search and its result. known: what the thought says first, of the results before."""
    return [calls(tool, {tool.params[0].name: query}, f"{known} I need to search for {query}.".strip()), results(text)]


def facts(catalog: Catalog, tools: tuple[Tool, ...]) -> list[T]:
    """One search, two that build on each other, or two and a calculation."""
    world = catalog.world
    at = world.rng.random()
    if len(tools) > 1 and at < 0.15:
        return arithmetic(catalog, tools)
    if len(tools) > 1 and at < 0.45:
        return _compare(world, tools)
    return _born(world, tools[0]) if at > 0.75 else _one(world, tools[0])


def _one(world: World, tool: Tool) -> list[T]:
    """One question, sometimes a second one about the same; every question is searched for."""
    entity, names = _entity(world), world.sample(sorted(RELATIONS), 2 if world.chance(0.4) else 1)
    known = {name: RELATIONS[name].draw(world) for name in names}
    turns: list[T] = []
    others = RELATIONS.keys() - names  # a text may tell nothing of what is asked for next: it would be another value
    for number, name in enumerate(names):
        question = world.pick(RELATIONS[name].questions).format(e="it" if number else f"the {entity}")
        told = {name: known[name]} if number == 0 else known
        found = _look_up(tool, entity, _text(world, entity, told, others))
        turns += [user(question), *found, says(RELATIONS[name].said(known[name]), KNOWN)]
    return turns


def _born(world: World, tool: Tool) -> list[T]:
    entity, role, person, place = _entity(world), world.pick(("founder", "owner")), world.full_name(), world.place()
    question = world.pick(("Where was the {r} of {e} born?", "What is the birthplace of the {r} of {e}?")).format(r=role, e=f"the {entity}")
    first = _look_up(tool, entity, _text(world, entity, {role: person}))
    second = _look_up(tool, person, world.pick(BORN[1]).format(e=person, v=place), RELATIONS[role].said(person))
    return [user(question), *first, *second, says(f"The birthplace is {place}.", KNOWN)]


def _compare(world: World, tools: tuple[Tool, ...]) -> list[T]:
    name = world.pick(sorted(NUMERIC))
    a, b = _entity(world), _entity(world)
    one, two = RELATIONS[name].draw(world), RELATIONS[name].draw(world)
    question = world.pick(NUMERIC[name]).format(a=f"the {a}", b=f"the {b}")
    first = _look_up(tools[0], a, _text(world, a, {name: one}))
    second = _look_up(tools[0], b, _text(world, b, {name: two}), RELATIONS[name].said(one))
    difference = calculated(world, tools[-1], f"{one} - {two}", int(one) - int(two), RELATIONS[name].said(two))
    return [user(question), *first, *second, *difference]
