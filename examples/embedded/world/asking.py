"""How users word what they want, and what tools and assistants say back. Knows nothing of rules or formats."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .catalogs import Catalog, Wish
from .scenarios import phrase
from .tools import Param, Tool, draw_kinds, draw_params
from .words import ATTRIBUTES, CHOICES, NUMBERS, READING
from .world import Value, World

OPENERS = ("", "", "", "", "Please ", "Can you ", "Could you ", "I want to ", "I need to ", "Hi, please ", "We have to ", "Now ")
BEFORE = ("I am in a hurry. ", "Good morning. ", "It rains here. ", "My colleague asked me. ", "One more thing. ", "Thanks so far. ")
AFTER = (" Thanks!", " It is urgent.", " Take your time.", " That is all.", " I will wait.")
ARTICLES = ("the", "the", "the", "a", "this", "my", "")
STATES = ("done", "queued", "accepted", "finished", "ok", "in progress")
ERRORS = ("not found", "access denied", "timed out", "service unavailable", "invalid input")


@dataclass(frozen=True, slots=True)
class Turn:
    """One message: a user's or assistant's text, a call, or a tool's result. `final`: whether the assistant's turn ends with it."""

    role: str  # user | assistant | tool
    text: str = ""
    tool: Tool | None = None
    args: Mapping[str, Value] = field(default_factory=dict)
    thought: str = ""  # what is said before a call, or before the words of a refusal


def user(text: str) -> Turn:
    """What the user says, with a capital first."""
    return Turn("user", text[:1].upper() + text[1:])


def says(text: str, thought: str = "") -> Turn:
    """What the assistant answers in words."""
    return Turn("assistant", text, thought=thought)


def calls(tool: Tool, args: Mapping[str, Value], thought: str) -> Turn:
    """A call, its arguments in the order of the schema."""
    ordered = {param.name: args[param.name] for param in tool.params if param.name in args}
    assert len(ordered) == len(args), (tool.name, args)
    return Turn("assistant", "", tool, ordered, thought)


def results(text: str) -> Turn:
    """What a tool gave back."""
    return Turn("tool", text)


def dump(value: Any) -> str:
    """As JSON."""
    return json.dumps(value, ensure_ascii=False)


def show(value: Value) -> str:
    """As people write it."""
    return ("yes" if value else "no") if isinstance(value, bool) else str(value)


# Asking


def _mention(world: World, param: Param, value: Value, alone: bool) -> str:
    """A part of a sentence that gives one argument. alone: its name may be left out."""
    words, said = param.words, show(value)
    quoted = f'"{said}"' if param.kind == "text" and (" " in said or world.chance(0.4)) else said
    natural = {
        "person": ("for {}", "of {}"),
        "place": ("in {}", "at {}"),
        "date": ("on {}", "for {}"),
        "email": ("to {}", "with {}"),
        "text": ("called {}", "about {}"),
    }.get(param.kind)
    if natural and alone and world.chance(0.45):
        return world.pick(natural).format(quoted)
    if param.kind == "flag" and world.chance(0.7):
        return world.pick(("with {}", "{} on")).format(words) if value else world.pick(("without {}", "{} off")).format(words)
    if param.kind in ("choice", "integer", "number") and world.chance(0.25):
        return f"{said} {words}"
    return world.pick(("{} {}", "{} {}", "{} {}", "the {} {}", "{}: {}", "{} is {}", "{} = {}")).format(words, quoted)


def arguments(world: World, tool: Tool, given: Mapping[str, Value]) -> dict[str, Value]:
    """Values for what is required, and for some of what is not."""
    out: dict[str, Value] = {}
    for param in tool.params:
        if param.name in given:
            out[param.name] = given[param.name]
        elif param.required or world.chance(0.4):
            out[param.name] = param.draw(world)
    return out


def sentence(world: World, action: str, thing: str, tool: Tool, args: Mapping[str, Value], mentions: Mapping[str, str | None]) -> str:
    """A request for this action on this thing. mentions: words for some arguments instead of their values, None to leave them out."""
    said = thing
    parts: list[str] = []
    for param in world.shuffled([param for param in tool.params if param.name in args]):
        if param.name in mentions:
            words = mentions[param.name]
            parts += [world.pick(("for", "with", "using")) + f" {words}"] if words else []
        elif param.kind == "id" and said == thing and tool.obvious(param) and world.chance(0.6):
            said = f"{thing} {args[param.name]}"
        else:
            parts.append(_mention(world, param, args[param.name], tool.obvious(param)))
    article = world.pick(ARTICLES)
    core = f"{phrase(world, action)} {article} {said}".replace("  ", " ")
    if parts and world.chance(0.15):
        text = f"{world.pick(('With ', 'Given ', ''))}{' and '.join(parts)}: {core}"
    else:
        joint = world.pick((", ", " and ", " ")) if len(parts) > 1 else ""
        text = world.pick(OPENERS) + core + (world.pick((" ", " ", ", ")) + joint.join(parts) if parts else "")
    question = text.startswith(("Can ", "Could "))
    text += "?" if question else world.pick((".", ".", "", "!"))
    if world.chance(0.08):
        text = world.pick(BEFORE) + text[:1].upper() + text[1:]
    return text + (world.pick(AFTER) if world.chance(0.06) else "")


def _by_name(world: World, tool: Tool, args: Mapping[str, Value]) -> str:
    """A request that names the tool."""
    values = [show(args[param.name]) for param in tool.params if param.name in args]
    if len(values) == len(tool.params) and world.chance(0.5):
        form = world.pick(("What is the value of {}({})?", "Call {}({}).", "Run {}({}), please."))
        return form.format(tool.name, ", ".join(values))
    parts = [_mention(world, param, args[param.name], False) for param in tool.params if param.name in args]
    form = world.pick(("Use {}", "Call {}", "Please use the tool {}", "Use the {} tool"))
    return form.format(tool.name) + (f" with {' and '.join(parts)}." if parts else ".")


def ask(catalog: Catalog, wish: Wish) -> tuple[Turn, Tool | str, dict[str, Value], str]:
    """A user's request for a wish; the right tool, or the refusal; its arguments; and the thought that leads there."""
    world, right = catalog.world, catalog.right(wish.action, wish.thing)
    if isinstance(right, Tool):
        shape = right
    else:
        found = [tool for tool in catalog.tools if tool.meaning == (wish.action, wish.thing)]
        shape = found[0] if found else Tool("", "", draw_params(world, wish.thing, draw_kinds(world)), wish.action, wish.thing)
    args = arguments(world, shape, dict(wish.given))
    mentions: dict[str, str | None] = {name: None for name, _ in wish.given} | dict(wish.mentions)
    text = sentence(world, wish.action, wish.called or wish.thing, shape, args, mentions)
    if isinstance(right, Tool) and wish.kind == "plain" and not mentions and world.chance(0.07):
        return user(_by_name(world, right, args)), right, args, f"I need to use {right.name}."
    return user(text), right, args, thought(catalog, wish)


def thought(catalog: Catalog, wish: Wish) -> str:
    """What leads from a wish to its tool or refusal: what is wanted, and word for word what has to be known for it.

    Where the tools have another word for the thing, the wish is said again in theirs.
    """
    asked, quoted = wish.called or wish.thing, catalog.quote(wish.action, wish.thing)
    meant = catalog.words.get(wish.thing, asked)
    again = f"That is to {wish.action} the {meant}." if meant != asked and meant in quoted else ""
    return purpose(wish.action, asked, " ".join(part for part in (quoted, wish.why, again) if part))


def purpose(action: str, thing: str, known: str = "") -> str:
    """What is wanted, in the plainest words. What has to be known stands right behind the thing: there it is looked up by the thing."""
    return f"I need to {action} the {thing}: {known}" if known else f"I need to {action} the {thing}."


# Answering


def fields(world: World, action: str) -> dict[str, Any]:
    """What a tool returns."""
    if action in READING:
        names = world.sample([*ATTRIBUTES, *CHOICES], world.number(1, 3))
        return {name: attribute(world, name) for name in dict.fromkeys(names)}
    out: dict[str, Any] = {"status": world.pick(STATES)}
    if world.chance(0.3):
        out[world.pick(("id", "code", "number"))] = world.identifier()
    return out


def attribute(world: World, name: str) -> Value:
    """A value for an attribute of this name."""
    if name in NUMBERS:
        return world.integer()
    return world.choice(name) if name in CHOICES else world.person()


def answer(tool: Tool, found: Mapping[str, Any], asked: str = "") -> str:
    """What the assistant says about a result: the attribute that was asked for, or all of it."""
    if "error" in found:
        return f"That failed: {found['error']}."
    if asked:
        return f"The {asked} is {found[asked]}."
    said = ", ".join(f"{name} {value}" for name, value in found.items())
    return f"Here it is: {said}." if tool.action in READING else f"Done: {said}."


def outcome(world: World, tool: Tool, asked: str = "") -> list[Turn]:
    """A tool's result and the answer to it."""
    if world.chance(0.07):
        found: dict[str, Any] = {"error": world.pick(ERRORS)}
    else:
        found = fields(world, tool.action)
        if asked:
            found = {name: found.get(name, attribute(world, name)) for name in world.shuffled(sorted({*found, asked}))}
    if asked and len(found) == 1 and asked in found and world.chance(0.5):
        return [results(str(found[asked])), says(answer(tool, found, asked), "I know the answer.")]
    return [results(dump(found)), says(answer(tool, found, asked), "I know the answer.")]
