"""What makes the right tool depend on the text before it: rules of the system prompt, tools that refer to other tools.

Each scenario adds tools and rules to a catalog, and wishes whose right answer they decide. Knows nothing of dialogues.
"""

from __future__ import annotations

from .catalogs import READ_ONLY, Catalog, Wish
from .tools import Tool, description, draw_params
from .words import ACTIONS, READING
from .world import World


def phrase(world: World, action: str) -> str:
    """One of the ways to name an action."""
    return ACTIONS[action][0] if world.plain else world.pick(ACTIONS[action])


def _twin(catalog: Catalog, tool: Tool, head: str = "") -> str:
    """Another thing with which the tool's action is a tool of the split too."""
    return catalog.meaning(tool.action, head)[1]


def like(catalog: Catalog) -> None:
    """Tools described by another tool: "Like X, but for Y." Their own names do not say what they do."""
    world = catalog.world
    thing = ""
    for _ in range(world.pick((1, 2, 2))):
        original = catalog.make(*catalog.meaning())
        if not thing or original.action not in catalog.actions(thing):  # else only the reference tells the two copies apart
            thing = _twin(catalog, original)
        form = world.pick(("Like {}, but for the {}.", "Same as {}, for the {} instead.", "Does what {} does, for the {}."))
        text = form.format(original.name, thing)
        copy = catalog.make(original.action, thing, name=catalog.vague(thing), text=text)
        catalog.add(original)
        catalog.add(copy)
        catalog.note(*copy.meaning, text)
        catalog.wishes.append(Wish(copy.action, thing, "like"))


def above(catalog: Catalog) -> None:
    """Tools described by the tool listed before them: "As the tool above, but for Y.", up to twice in a row."""
    world = catalog.world
    for _ in range(world.pick((1, 2, 2))):
        group = [catalog.make(*catalog.meaning())]
        for _ in range(world.pick((1, 1, 2))):
            thing = _twin(catalog, group[0])
            form = world.pick(("As the tool above, but for the {}.", "Same as the previous tool, for the {}.", "As above, for the {}."))
            text = form.format(thing)
            group.append(catalog.make(group[0].action, thing, name=catalog.vague(thing), text=text))
            catalog.note(*group[-1].meaning, text)
            catalog.wishes.append(Wish(group[0].action, thing, "above"))
        catalog.add(*group)


def deprecated(catalog: Catalog) -> None:
    """A tool that another one replaces; the new one says so, or the old one does, or both."""
    world = catalog.world
    action, thing = catalog.meaning()
    old_name, new_name = catalog.name(action, thing), catalog.vague(thing)
    if world.chance(0.5):
        new_name = catalog.name(action, thing)
    params = draw_params(world, thing, [world.pick(("id", "person", "text"))])
    text = description(world, action, thing)
    notes = world.pick(
        (("Deprecated, use {}.", "Replaces {}."), ("Deprecated, use {}.", ""), ("", "Replaces {}."), ("Old: see {}.", "New {}."))
    )
    old = catalog.make(action, thing, name=old_name, text=f"{text} {notes[0].format(new_name)}".strip(), params=params, replaced=True)
    silent = all(notes) and world.chance(0.5)  # what replaces it is found by the old one's words only
    said = notes[1].format(old_name) if silent else f"{text} {notes[1].format(old_name)}".strip()
    catalog.add(old)
    catalog.add(catalog.make(action, thing, name=new_name, text=said, params=params))
    catalog.note(action, thing, notes[0].format(new_name) or notes[1].format(old_name))
    catalog.wishes.append(Wish(action, thing, "deprecated"))


def services(catalog: Catalog) -> None:
    """The same tools of two or three services; a rule says whose are right, directly or by where the user works."""
    world = catalog.world
    action, thing = catalog.meaning()
    names = [world.made_up() for _ in range(world.pick((2, 2, 3)))]
    if len(set(names)) < len(names):
        return
    params = draw_params(world, thing, [world.pick(("id", "person", "text"))])
    text = description(world, action, thing)
    hidden = world.chance(0.2)  # the service stands in the description only
    for name in names:
        made = catalog.vague(thing) if hidden else catalog.name(action, thing, "verb first", service=name)
        said = f"{text[:-1]}, for {name}." if hidden or world.chance(0.4) else text
        catalog.add(catalog.make(action, thing, name=made, text=said, params=params, service=name))
    right = world.pick(names)
    catalog.services[thing] = right
    catalog.settled.add(thing)
    catalog.plans.append(("switch", tuple(catalog.tools[-len(names) :])))
    if world.chance(0.6):
        rule = world.pick((f"For the {thing} use {right}.", f"Everything about the {thing} belongs to {right}."))
        catalog.rule(rule)
        catalog.note(action, thing, rule)
    else:
        place = catalog.user_place or world.place()
        there, rule = f"The user is in {place}.", f"Users in {place} must use {right} for the {thing}."
        if not catalog.user_place:
            catalog.user_place = place
            catalog.rule(there)
        catalog.rule(rule)
        catalog.note(action, thing, f"{there} {rule}")
        if world.chance(0.5):
            other = world.pick([name for name in names if name != right])
            elsewhere = world.place()
            if elsewhere != place:
                catalog.rule(f"Users in {elsewhere} must use {other} for the {thing}.")
    catalog.wishes.append(Wish(action, thing, "service"))


def preferred(catalog: Catalog) -> None:
    """Several tools that do the same; a rule says which of them is right."""
    world = catalog.world
    action, thing = catalog.meaning()
    params = draw_params(world, thing, [world.pick(("id", "person", "text"))])
    names = [catalog.vague(thing) if world.chance(0.3) else catalog.name(action, thing) for _ in range(world.pick((2, 2, 3)))]
    right = world.pick(names)
    for name in names:
        text = description(world, action, thing)
        catalog.add(catalog.make(action, thing, name=name, params=params, text=text, replaced=name != right))
    verb = phrase(world, action)
    rule = world.pick(
        (f"To {verb} the {thing} use {right}.", f"For the {thing} prefer {right}.", f"For the {thing}, {right} is the right tool.")
    )
    catalog.rule(rule)
    catalog.settled.add(thing)
    catalog.note(action, thing, rule)
    catalog.wishes.append(Wish(action, thing, "preferred"))


def glossary(catalog: Catalog) -> None:
    """A word that the house uses for a thing: in its tools or in requests, explained by a rule only."""
    world = catalog.world
    action, thing = catalog.meaning()
    word = world.made_up()
    rule = world.pick((f"'{word}' means {thing}.", f"Here the {thing} is called {word}.", f"{word}: our word for the {thing}."))
    catalog.rule(rule)
    catalog.note(action, thing, rule)
    in_tool = world.chance(0.5)
    catalog.words[thing] = word if in_tool else thing
    catalog.add(catalog.make(action, thing))
    catalog.wishes.append(Wish(action, thing, "glossary", called="" if in_tool else word))
    rest = catalog.actions(thing)
    if rest and world.chance(0.5):
        other = world.pick(rest)
        catalog.add(catalog.make(other, thing))
        catalog.wishes.append(Wish(other, thing, "glossary", called="" if in_tool else word))


def forbid(catalog: Catalog) -> None:
    """A tool that a rule forbids to use, and one beside it that is allowed."""
    world = catalog.world
    action, thing = catalog.meaning()
    catalog.add(catalog.make(action, thing))
    catalog.forbidden.add((action, thing))
    verb = phrase(world, action)
    rule = world.pick((f"Never {verb} the {thing}.", f"It is forbidden to {verb} the {thing}.", f"Users may not {verb} the {thing}."))
    catalog.rule(rule)
    catalog.note(action, thing, rule)
    catalog.wishes.append(Wish(action, thing, "forbidden"))
    for other in catalog.actions(thing)[:1]:
        catalog.add(catalog.make(other, thing))
        catalog.wishes.append(Wish(other, thing, "allowed"))


def reading(catalog: Catalog) -> None:
    """Nothing may be changed: half of the tools are refused."""
    world = catalog.world
    catalog.reading_only = True
    catalog.rule(world.pick(READ_ONLY))
    while len(catalog) < 4:
        action = world.pick(sorted(READING)) if len(catalog) % 2 else ""
        action, thing = catalog.meaning(action)
        catalog.add(catalog.make(action, thing))
        catalog.wishes.append(Wish(action, thing, "reading only"))


def default(catalog: Catalog) -> None:
    """A required argument that the request leaves out and a rule gives."""
    world = catalog.world
    action, thing = catalog.meaning()
    params = draw_params(world, thing, world.sample(["id", "person", "place", "date", "email", "integer", "text"], world.number(1, 3)), 0.0)
    param = world.pick(params)
    value = param.draw(world)
    catalog.add(catalog.make(action, thing, params=params))
    own = world.chance(0.5)
    if own:
        rule = world.pick((f"The {param.words} of the user is {value}.", f"The user's {param.words} is {value}."))
    else:
        rule = world.pick((f"If no {param.words} is given, use {value}.", f"The default {param.words} is {value}."))
    catalog.rule(rule)
    mentions = ((param.name, f"my {param.words}"),) if own else ()
    why = rule if own else ""  # that a value is missing shows where it is to be filled in, not before
    catalog.wishes.append(Wish(action, thing, "profile" if own else "default", given=((param.name, value),), mentions=mentions, why=why))


def today(catalog: Catalog) -> None:
    """A date argument that the request calls today."""
    world = catalog.world
    action, thing = catalog.meaning()
    params = draw_params(world, thing, ["date"] + (["id"] if world.chance(0.4) else []), 0.0)
    dated = next(param for param in params if param.kind == "date")
    date = world.date()
    rule = world.pick((f"Today is {date}.", f"The date is {date}.", f"Today: {date}."))
    catalog.rule(rule)
    catalog.add(catalog.make(action, thing, params=params))
    catalog.wishes.append(Wish(action, thing, "today", given=((dated.name, date),), mentions=((dated.name, "today"),), why=rule))
