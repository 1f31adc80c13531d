"""Tools that belong together in an episode of several steps or turns. Knows nothing of the episodes' words.

Each scenario adds its tools to a catalog and notes the plan, (kind, tools), that steps.py makes dialogues of.
"""

from __future__ import annotations

from collections.abc import Callable

from .catalogs import Catalog, Wish
from .scenarios import above, default, deprecated, forbid, glossary, like, preferred, reading, services, today
from .tools import Param, Tool, draw_params, snake
from .words import READING

CALCULATOR = ("expression", "formula", "input", "term")


def siblings(catalog: Catalog) -> None:
    """Several actions on one thing, each taking its id: what dialogues with references back are about."""
    world = catalog.world
    thing = catalog.thing()
    actions = catalog.actions(thing)
    if len(actions) < 2:
        return
    params = (Param(draw_params(world, thing, ["id"], 0.0)[0].name, "id"),)
    made = [catalog.make(action, thing, params=params) for action in world.sample(actions, min(len(actions), world.number(2, 3)))]
    for tool in made:
        catalog.add(tool)
    catalog.plans.append(("siblings", tuple(made)))


def watched(catalog: Catalog) -> None:
    """Something that can be looked at and acted upon, by its id: for conditions on what is found."""
    world = catalog.world
    thing = catalog.thing()
    actions = catalog.actions(thing)
    seen, done = [a for a in actions if a in ("get", "check", "find")], [a for a in actions if a not in READING]
    if not seen or not done:
        return
    params = (Param(draw_params(world, thing, ["id"], 0.0)[0].name, "id"),)
    made = tuple(catalog.make(world.pick(options), thing, params=params) for options in (seen, done))
    for tool in made:
        catalog.add(tool)
    catalog.plans.append(("condition", made))


def items(catalog: Catalog) -> None:
    """A tool that lists things, and one that acts on one of them."""
    world = catalog.world
    thing = catalog.thing()
    actions = catalog.actions(thing)
    seen, done = [a for a in actions if a in ("list", "find")], [a for a in actions if a not in READING]
    if not seen or not done:
        return
    lister = catalog.make(world.pick(seen), thing, params=draw_params(world, thing, [world.pick(("person", "place", "date"))], 0.0))
    actor = catalog.make(world.pick(done), thing, params=(Param(draw_params(world, thing, ["id"], 0.0)[0].name, "id"),))
    catalog.add(lister)
    catalog.add(actor)
    catalog.plans.append(("kth", (lister, actor)))


def linked(catalog: Catalog) -> None:
    """A tool that looks up the id that another one needs."""
    world = catalog.world
    action, thing = catalog.meaning(world.pick(("get", "find")))
    other_action, other = catalog.meaning()
    params = draw_params(world, thing, [world.pick(("person", "place", "email"))], 0.0)
    catalog.add(catalog.make(action, thing, params=params))
    needed = Param(f"{snake(thing)}_id", "id")
    extra = draw_params(world, other, ["text"] if world.chance(0.2) else [], 0.0)
    catalog.add(catalog.make(other_action, other, params=(needed, *extra)))
    catalog.plans.append(("chain", tuple(catalog.tools[-2:])))


def fallback(catalog: Catalog) -> None:
    """Two tools of which the second is for when the first fails."""
    world = catalog.world
    action, thing = catalog.meaning()
    params = draw_params(world, thing, [world.pick(("id", "person", "text"))], 0.0)
    first = catalog.make(action, thing, params=params)
    second = catalog.make(action, thing, name=catalog.vague(thing), text=f"For when {first.name} fails.", params=params, replaced=True)
    if world.chance(0.5):
        second = catalog.make(action, thing, params=params, replaced=True)
        catalog.rule(f"If {first.name} fails, use {second.name}.")
        catalog.rule(order := f"Try {first.name} before {second.name}.")
        catalog.note(action, thing, order)
        catalog.wishes.append(Wish(action, thing, "tried first"))
    catalog.add(first)
    catalog.add(second)
    catalog.plans.append(("fallback", (first, second)))


def calculator(catalog: Catalog) -> Tool:
    """The catalog's calculator, added if there is none."""
    world = catalog.world
    for tool in catalog.tools:
        if tool.action == "calculate":
            return tool
    name = world.pick(("calculator", "calculate", "compute", "calc", "evaluate", "arithmetic"))
    name = name if world.chance(0.95) and catalog.names.claim(name) else catalog.vague("number")
    text = world.pick(
        ("Evaluate an arithmetic expression.", "Calculate the value of an expression.", "Do arithmetic.", "Work out a formula.")
    )
    made = catalog.make("calculate", "number", name=name, text=text, params=(Param(world.pick(CALCULATOR), "expression"),))
    catalog.add(made)
    return made


def sums(catalog: Catalog) -> None:
    """A tool whose numbers have to be added up."""
    action, thing = catalog.meaning(catalog.world.pick(("get", "check")))
    params = (Param(draw_params(catalog.world, thing, ["id"], 0.0)[0].name, "id"),)
    tool = catalog.make(action, thing, params=params)
    catalog.add(tool)
    catalog.plans.append(("sum", (tool, calculator(catalog))))


def facts(catalog: Catalog) -> None:
    """A search over a text corpus, mostly with a calculator."""
    world = catalog.world
    if any(tool.action == "search" for tool in catalog.tools):
        return
    name = world.pick(("search", "lookup", "search_corpus", "wiki", "search_notes", "knowledge_search", "find_facts"))
    name = name if world.chance(0.95) and catalog.names.claim(name) else catalog.vague("fact")
    text = world.pick(("Search the knowledge base.", "Look up facts.", "Search the encyclopedia.", "Search a collection of texts."))
    tool = catalog.make(
        "search", "fact", name=name, text=text, params=(Param(world.pick(("query", "q", "text", "topic", "input")), "text"),)
    )
    catalog.add(tool)
    catalog.plans.append(("facts", (tool, calculator(catalog)) if world.chance(0.7) else (tool,)))


SCENARIOS: dict[str, tuple[float, Callable[[Catalog], None]]] = {  # name -> how often, what adds it
    "like": (1.2, like),
    "above": (1.2, above),
    "deprecated": (1.0, deprecated),
    "service": (1.2, services),
    "preferred": (0.6, preferred),
    "glossary": (1.2, glossary),
    "forbidden": (0.7, forbid),
    "reading only": (0.15, reading),
    "default": (1.0, default),
    "today": (0.6, today),
    "siblings": (1.6, siblings),
    "condition": (0.8, watched),
    "kth": (0.8, items),
    "chain": (1.0, linked),
    "fallback": (0.6, fallback),
    "sum": (0.8, sums),
    "facts": (0.8, facts),
}


def add_some(catalog: Catalog, count: int) -> None:
    """`count` scenarios, by their weights; those about the whole catalog at most once."""
    weights = {name: weight * catalog.world.often.get(name, 1.0) for name, (weight, _) in SCENARIOS.items()}
    for _ in range(count):
        name = catalog.world.rng.choices(list(weights), list(weights.values()))[0]
        SCENARIOS[name][1](catalog)
        if name in ("reading only", "today"):
            del weights[name]
