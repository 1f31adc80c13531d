"""Dialogues of several steps or turns: references back, conditions, look-ups, sums, searches. Knows nothing of formats.

Each maker gets the catalog and a plan's tools and returns the dialogue's turns. All of them depend on what was said before.
"""

from __future__ import annotations

from collections.abc import Callable

from .asking import OPENERS, answer, arguments, attribute, calls, dump, fields, outcome, purpose, results, says, sentence, user
from .asking import Turn as T
from .catalogs import Catalog
from .scenarios import phrase
from .tools import Tool
from .words import CHOICES, NUMBERS
from .world import World

Maker = Callable[[Catalog, tuple[Tool, ...]], list[T]]
KNOWN = "I know the answer."
ORDINALS = ("first", "second", "third", "last")
BUILDINGS = "Tower Museum Bridge Garden Castle Library Harbor Institute Lake Station Theater School Market Palace Gallery Mill".split()


def _act(world: World, tool: Tool, value: str, known: str = "") -> list[T]:
    """A call with an id, its result and the answer. known: what the thought has to recall first."""
    thought = f"{known} {purpose(*tool.meaning)}".strip()
    return [calls(tool, {tool.params[0].name: value}, thought), *outcome(world, tool)]


def _request(world: World, tool: Tool, value: str) -> T:
    return user(sentence(world, *tool.meaning, tool, {tool.params[0].name: value}, {}))


def siblings(catalog: Catalog, tools: tuple[Tool, ...]) -> list[T]:
    """Two or three turns in which the later ones only make sense with the earlier ones."""
    world = catalog.world
    makers = {"pronoun": 1.2, "again": 1.0, "sorry": 0.7, "nickname": 1.2, "unchanged": 0.7, "former": 0.7}
    return _SIBLINGS[world.rng.choices(list(makers), list(makers.values()))[0]](catalog, tools)


def _pronoun(catalog: Catalog, tools: tuple[Tool, ...]) -> list[T]:
    world, value = catalog.world, catalog.world.identifier()
    turns: list[T] = []
    for number, tool in enumerate(world.shuffled(tools)):
        then = world.pick(("Now {} it.", "Then {} it, please.", "{} it too.", "Good. {} that one."))
        turns += [user(then.format(phrase(world, tool.action))) if number else _request(world, tool, value), *_act(world, tool, value)]
    return turns


def _again(catalog: Catalog, tools: tuple[Tool, ...]) -> list[T]:
    world, tool = catalog.world, catalog.world.pick(tools)
    turns: list[T] = []
    for number in range(world.number(2, 3)):
        value = world.identifier()
        same = world.pick(("The same for {}.", "And {}?", "Do that for {} too.", "Also {}."))
        turns += [user(same.format(value)) if number else _request(world, tool, value), *_act(world, tool, value)]
    return turns


def _sorry(catalog: Catalog, tools: tuple[Tool, ...]) -> list[T]:
    world, tool = catalog.world, catalog.world.pick(tools)
    wrong, value = world.identifier(), world.identifier()
    fix = world.pick(("Sorry, I meant {}.", "No, {} is the right one.", "Wrong number: it is {}."))
    return [_request(world, tool, wrong), *_act(world, tool, wrong), user(fix.format(value)), *_act(world, tool, value)]


def _nickname(catalog: Catalog, tools: tuple[Tool, ...]) -> list[T]:
    world = catalog.world
    names = [(world.person(), world.identifier()) for _ in range(world.number(1, 3))]
    if len({name for name, _ in names}) < len(names):
        names = names[:1]
    form = world.pick(("We call {0} {1}.", "From now on {1} stands for {0}.", "{1} is short for {0}."))
    said = " ".join(form.format(value, name) for name, value in names)
    turns = [user(said), says("Understood.", "Nothing to do yet.")]
    for tool in world.shuffled(tools)[: world.number(1, 2)]:
        name, value = world.pick(names)
        turns += [_request(world, tool, name), *_act(world, tool, value, f"{name} is {value}.")]
    return turns


def _former(catalog: Catalog, tools: tuple[Tool, ...]) -> list[T]:
    """Two ids in one request, the second or the first of which is used again."""
    world, tool = catalog.world, catalog.world.pick(tools)
    one, two = world.identifier(), world.identifier()
    turns = [_request(world, tool, one), *_act(world, tool, one), user(f"Also {two}."), *_act(world, tool, two)]
    other = world.pick(tools)
    first = world.chance(0.5)
    which, value = world.pick(("first", "former") if first else ("second", "latter")), one if first else two
    return [
        *turns,
        user(f"{phrase(world, other.action)} the {which} one."),
        *_act(world, other, value, f"There were {one} and {two}. The {which} one is {value}."),
    ]


def _unchanged(catalog: Catalog, tools: tuple[Tool, ...]) -> list[T]:
    """A result that says what it says only together with an earlier one."""
    world, tool, value = catalog.world, catalog.world.pick(tools), catalog.world.identifier()
    found = {"status": world.choice("status")}
    call = calls(tool, {tool.params[0].name: value}, purpose(*tool.meaning))
    told = says(answer(tool, found), KNOWN)
    again = user(world.pick(("Once more, please.", "Again.", "And now?", "Do it again.")))
    same = dump({"status": world.pick(("unchanged", "as before", "same"))})
    return [_request(world, tool, value), call, results(dump(found)), told, again, call, results(same), told]


_SIBLINGS: dict[str, Maker] = {
    "pronoun": _pronoun,
    "again": _again,
    "sorry": _sorry,
    "nickname": _nickname,
    "unchanged": _unchanged,
    "former": _former,
}


def switch(catalog: Catalog, tools: tuple[Tool, ...]) -> list[T]:
    """The user overrules the system's choice among services."""
    world, tool = catalog.world, catalog.world.pick(tools)
    turns: list[T] = []
    order = world.pick(("From now on use {1} for the {0}.", "For the {0} take {1} today.", "I am in charge: {1} for the {0}."))
    said = order.format(tool.thing, tool.service)
    for number in range(world.number(1, 2)):
        args = arguments(world, tool, {})
        text = sentence(world, *tool.meaning, tool, args, {})
        turns += [user(text if number else f"{said} {text[:1].upper()}{text[1:]}")]
        turns += [calls(tool, args, purpose(*tool.meaning, said)), *outcome(world, tool)]
    return turns


def look_up(tool: Tool, which: str = "") -> str:
    """The purpose of a step that the request does not name: whichever tool reads the thing will do. which: its id or name."""
    return purpose("look up", f"{tool.thing} {which}".strip())


def condition(catalog: Catalog, tools: tuple[Tool, ...]) -> list[T]:
    """What to do depends on a result, and what the result means depends on the request."""
    world, (seen, done) = catalog.world, tools
    value, name = world.identifier(), world.pick(tuple(CHOICES))
    wanted = world.choice(name)
    actual = wanted if world.chance(0.5) else world.choice(name)
    positive = world.chance(0.75)
    test = "is" if positive else "is not"
    look, do = phrase(world, seen.action), phrase(world, done.action)
    text = world.pick(
        (
            f"{look} the {seen.thing} {value}. If the {name} {test} {wanted}, {do} it.",
            f"If the {name} of the {seen.thing} {value} {test} {wanted}, {do} it.",
            f"{do} the {seen.thing} {value} if its {name} {test} {wanted}.",
        )
    )
    found = {name: actual} | (fields(world, "get") if world.chance(0.4) else {}) | {name: actual}
    turns = [user(text), calls(seen, {seen.params[0].name: value}, look_up(seen, value)), results(dump(found))]
    if (actual == wanted) == positive:
        return [*turns, *_act(world, done, value, f"The {name} is {actual}.")]
    return [*turns, says(f"Nothing to do: the {name} is {actual}.", KNOWN)]


def kth(catalog: Catalog, tools: tuple[Tool, ...]) -> list[T]:
    """A list, and then something for one of its items."""
    world, (lister, actor) = catalog.world, tools
    args = arguments(world, lister, {})
    found = [world.identifier() for _ in range(world.number(2, 4))]
    place = world.pick([word for word in ORDINALS if word != "third" or len(found) > 2])
    value = found[-1] if place == "last" else found[ORDINALS.index(place)]
    known = f"The {place} one is {value}."
    call = [calls(lister, args, purpose(*lister.meaning)), results(dump({"ids": found}))]
    text = sentence(world, *lister.meaning, lister, args, {})
    do = phrase(world, actor.action)
    if world.chance(0.4):
        return [user(f"{text.rstrip('.!?')}, and then {do} the {place} one."), *call, *_act(world, actor, value, known)]
    told = says(f"Found: {', '.join(found)}.", KNOWN)
    return [user(text), *call, told, user(f"{do} the {place} one."), *_act(world, actor, value, known)]


def chain(catalog: Catalog, tools: tuple[Tool, ...]) -> list[T]:
    """An id has to be looked up before it can be used."""
    world, (seen, done) = catalog.world, tools
    key = seen.params[0]
    name = key.draw(world)
    value = world.identifier()
    needed = done.params[0].name
    rest = {param.name: param.draw(world) for param in done.params[1:]}
    tail = "".join(f', {param.words} "{rest[param.name]}"' for param in done.params[1:])
    of = world.pick(("of the {0} {1}", "for the {0} {1}", "that belongs to the {0} {1}")).format(seen.thing, name)
    text = f"{world.pick(OPENERS)}{phrase(world, done.action)} the {done.thing} {of}{tail}."
    found = {needed: value} | fields(world, "get")
    shown = {label: found[label] for label in world.shuffled(sorted(found))}
    call = calls(seen, {key.name: name}, look_up(seen, str(name)))
    return [
        user(text), call, results(dump(shown)),
        calls(done, {needed: value} | rest, f"The {done.params[0].words} is {value}. {purpose(*done.meaning)}"), *outcome(world, done),
    ]  # fmt: skip


def fallback(catalog: Catalog, tools: tuple[Tool, ...]) -> list[T]:
    """When the first tool fails, the second one is for the same."""
    world, (first, second) = catalog.world, tools
    args, known = arguments(world, first, {}), purpose(*first.meaning, catalog.quote(*first.meaning))
    turns = [user(sentence(world, *first.meaning, first, args, {})), calls(first, args, known)]
    if world.chance(0.3):
        return [*turns, *_well(world, first)]
    failed = results(dump({"error": world.pick(("timed out", "service unavailable", "out of order"))}))
    told = f"If {first.name} fails, use {second.name}."
    why = told if told in catalog.rules else second.description
    return [*turns, failed, calls(second, args, f"It failed. {why} I use {second.name}."), *_well(world, second)]


def _well(world: World, tool: Tool) -> list[T]:
    found = fields(world, tool.action)
    return [results(dump(found)), says(answer(tool, found), KNOWN)]


# Sums and searches


def calculated(world: World, tool: Tool, expression: str, value: float, known: str = "") -> list[T]:
    """A call of the calculator, its result and the answer. known: what the thought has to recall first."""
    said = f"{value:.12g}"
    shown = said if world.chance(0.6) else dump({"result": value})
    call = calls(tool, {tool.params[0].name: expression}, f"{known} I need to calculate {expression}.".strip())
    return [call, results(shown), says(f"The answer is {said}.", KNOWN)]


def arithmetic(catalog: Catalog, tools: tuple[Tool, ...]) -> list[T]:
    """A plain question for the calculator."""
    world = catalog.world
    a, b = world.integer(), world.integer()
    sign, word = world.pick((("+", "plus"), ("-", "minus"), ("*", "times"), ("/", "divided by")))
    said = world.pick((f"{a} {sign} {b}", f"{a} {word} {b}"))
    question = world.pick(("What is {}?", "How much is {}?", "Calculate {}.", "Work out {}.")).format(said)
    value = {"+": a + b, "-": a - b, "*": a * b, "/": round(a / b, 3)}[sign]
    return [user(question), *calculated(world, tools[-1], f"{a} {sign} {b}", value)]


def total(catalog: Catalog, tools: tuple[Tool, ...]) -> list[T]:
    """Numbers looked up one by one, then added or subtracted."""
    world, (tool, calculator) = catalog.world, tools
    if world.chance(0.25):
        return arithmetic(catalog, tools)
    name = world.pick(sorted(NUMBERS))
    ids = [world.identifier() for _ in range(world.pick((2, 2, 3)))]
    difference = len(ids) == 2 and world.chance(0.4)
    if difference:
        text = world.pick(("What is the difference of the {0} of the {1} {2} and {3}?", "How much more {0} has the {1} {2} than {3}?"))
        text = text.format(name, tool.thing, *ids)
    else:
        text = world.pick(("What is the total {} of the {} {}?", "Add up the {} of the {} {}."))
        text = text.format(name, tool.thing, ", ".join(ids[:-1]) + f" and {ids[-1]}")
    turns: list[T] = [user(text)]
    numbers: list[int] = []
    known = ""
    for key in ids:
        found = fields(world, "get") | {name: attribute(world, name)}
        found = {label: found[label] for label in world.shuffled(sorted(found))}
        numbers.append(int(found[name]))
        thought = f"{known} Next is {key}." if known else f"{look_up(tool)} First is {key}."
        turns += [calls(tool, {tool.params[0].name: key}, thought), results(dump(found))]
        known = f"The {name} is {numbers[-1]}."
    sign = " - " if difference else " + "
    value = numbers[0] - numbers[1] if difference else sum(numbers)
    return [*turns, *calculated(world, calculator, sign.join(map(str, numbers)), value, known)]
