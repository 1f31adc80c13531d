"""Bundles: one system prompt and catalog with several independent dialogues, and their ChatML / Hermes form. Knows no tokens.

bundle   system text, tools, dialogues [turns with tags]
sample   one text in pieces, each with or without loss; samples of a bundle share their first pieces (packing.py)
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from .asking import Turn, ask, calls, outcome, says, thought, user
from .catalogs import FORBIDDEN, NO_TOOL, Catalog, Wish
from .facts import facts
from .plans import add_some
from .steps import KNOWN, chain, condition, fallback, kth, siblings, switch, total
from .tools import Tool
from .words import ATTRIBUTES, CHOICES
from .world import TRAIN, USUAL, VAGUE, Source, World

MAKERS = {
    "siblings": siblings,
    "switch": switch,
    "condition": condition,
    "kth": kth,
    "chain": chain,
    "fallback": fallback,
    "sum": total,
    "facts": facts,
}
PERSONAS = (
    "You are a helpful assistant.",
    "You are an assistant that can use tools.",
    "Answer with the help of the tools.",
    "You help the staff of the company.",
    "Be brief and precise.",
    "You are an agent. Never guess.",
)
ASIDES = (
    "Answer in one sentence.",
    "Be polite.",
    "Speak English.",
    "Never make up values.",
    "The team works from 9 to 5.",
    "Do not repeat the question.",
)
SILENT = ("Call tools without a word.", "No thoughts, only calls.", "Do not explain your calls.")
THINK = "<think>\n{}\n</think>\n\n"  # where a thought stands that is not to be said
SMALL_TALK = (("Hello!", "Hello! How can I help?"), ("Thanks!", "You are welcome."), ("Good morning.", "Hello! How can I help?"))
MULTI = frozenset(MAKERS)


@dataclass(frozen=True, slots=True)
class Dialogue:
    """kind: which scenario; context: whether the right answers depend on what stands before; solved when every answer is right."""

    turns: tuple[Turn, ...]
    kind: str
    context: bool


@dataclass(frozen=True, slots=True)
class Bundle:
    """One catalog in one prompt style: hermes | langchain | langchain text | llamaindex.

    aloud: whether the thought before a Hermes call is said to the user, or stands between <think> and </think>; text ReAct says it.
    """

    style: str
    system: str
    tools: tuple[Tool, ...]
    dialogues: tuple[Dialogue, ...]
    form: str = "openai"
    aloud: bool = True
    catalog: Catalog | None = field(default=None, compare=False)


class Piece(NamedTuple):
    """kind: what the model is to say, "" if nothing. pick: how many of its characters decide between tools (to the end of the name)."""

    text: str
    kind: str = ""  # call | refusal | answer
    pick: int = 0

    @property
    def loss(self) -> bool:
        return bool(self.kind)


@dataclass(frozen=True, slots=True)
class Sample:
    """A prompt with completions, and where it comes from: its dialogue's number, so that dialogues can be counted as solved."""

    pieces: tuple[Piece, ...]
    dialogue: int


def make_catalog(world: World, size: int, exact: bool = False, bare: bool = False) -> Catalog:
    """A catalog of about (or exactly) `size` tools, with one scenario for every four or so; without any if `bare`."""
    while True:
        catalog = Catalog(world)
        if not (world.plain or bare):
            add_some(catalog, max(1, round(size * world.pick((0.12, 0.2, 0.28)))))
        if exact and len(catalog) > size:
            continue
        catalog.fill(max(size, len(catalog)))
        if not catalog.ordinary:
            catalog.fill(len(catalog) + 1)
        catalog.shuffle()
        if not exact or len(catalog) == size:
            return catalog


def system_text(catalog: Catalog) -> str:
    """Persona, rules, and lines that do not matter, in any order."""
    world = catalog.world
    lines = list(catalog.rules)
    if not any("oday" in line or "date is" in line for line in lines) and world.chance(0.25):
        lines.append(f"Today is {world.date()}.")
    if world.chance(0.3):
        lines.append(world.pick(ASIDES))
    lines = world.shuffled(lines)
    if world.chance(0.8):
        lines.insert(
            0, world.pick(PERSONAS) if world.chance(0.8) else f"You work for {world.person()} {world.pick(('Ltd', 'Inc', 'Group'))}."
        )
    return world.pick((" ", "\n")).join(lines)


def single(catalog: Catalog, wish: Wish, whole: bool = False) -> list[Turn]:
    """A request, the call or the refusal, and mostly the result with the answer to it (always if `whole`)."""
    world, right = catalog.world, catalog.right(wish.action, wish.thing)
    if asked := _attribute_question(catalog, wish, right):
        return asked
    turn, right, args, known = ask(catalog, wish)
    if isinstance(right, str):
        return [turn, says(right, known)]
    turns = [turn, calls(right, args, known)]
    return [*turns, *outcome(world, right)] if whole or world.chance(0.6) else turns


def _attribute_question(catalog: Catalog, wish: Wish, right: Tool | str) -> list[Turn]:
    """Sometimes a question instead: what is some attribute of a thing that only one tool gets."""
    world = catalog.world
    if not isinstance(right, Tool) or wish.action != "get" or wish.given or world.chance(0.7):
        return []
    key = right.params[0] if len(right.params) == 1 and right.params[0].kind in ("id", "person", "place") else None
    rivals = [tool for tool in catalog.tools if tool.thing == wish.thing and tool.action in ("find", "check", "measure", "track", "count")]
    if key is None or rivals:
        return []
    name, value = world.pick([*ATTRIBUTES, *CHOICES]), key.draw(world)
    thing = wish.called or wish.thing
    form = world.pick(("What is the {} of the {} {}?", "Which {} has the {} {}?", "Tell me the {} of the {} {}."))
    turns = [user(form.format(name, thing, value)), calls(right, {key.name: value}, thought(catalog, wish))]
    return [*turns, *outcome(world, right, name)]


def dialogue(catalog: Catalog, context_share: float = 0.55, hold: bool = True) -> Dialogue:
    """One dialogue: about half of them depend on context. hold: sometimes behind others that do not matter."""
    world = catalog.world
    at = world.rng.random()
    plans = [] if catalog.reading_only else catalog.plans  # most of them change something
    options: list[Wish | tuple[str, tuple[Tool, ...]]] = [*catalog.wishes, *plans]
    if at < context_share and options:
        option = world.pick(options)
        if isinstance(option, Wish):
            kind, context, turns = option.kind, option.context, single(catalog, option)
        else:
            kind, context, turns = option[0], True, MAKERS[option[0]](catalog, option[1])
    elif at > 0.985:
        said, reply = world.pick(SMALL_TALK)
        kind, context, turns = "small talk", False, [user(said), says(reply, KNOWN)]
    else:
        missing = (0.1 if world.plain else 0.28) * world.often.get("decline", 1.0)
        wish = catalog.missing() if world.chance(missing) else catalog.plain()
        kind, context, turns = wish.kind, wish.context, single(catalog, wish)
    if hold and world.chance(0.2):
        before = single(catalog, catalog.plain(), whole=True)
        turns = [*before, *turns]
    return Dialogue(tuple(turns), kind, context)


def bundle(
    seed: str,
    style: str,
    size: int,
    count: int,
    source: Source = TRAIN,
    exact: bool = False,
    hold: bool = True,
    context_share: float = 0.55,
    plain: bool = False,
    bare: bool = False,
    vague: float = VAGUE,
    often: Mapping[str, float] = USUAL,
    pieces: Sequence[str] = (),
) -> Bundle:
    """The bundle that a seed stands for. LangChain's text agents have no history: their dialogues have one user turn.

    plain: no scenarios, no near-duplicates, one word for each action: what is left is to compare words. bare: no scenarios. vague: the
    share of tools that no rule is about and whose names do not say what they do all the same. often, pieces: see World.
    """
    world = World(seed, source, plain, vague, often, pieces)
    catalog = make_catalog(world, size, exact, bare)
    alone = style.startswith("langchain")
    found: list[Dialogue] = []
    for _ in range(20 * count):
        made = dialogue(catalog, context_share, hold=hold and not alone)
        if not alone or sum(turn.role == "user" for turn in made.turns) == 1:
            found.append(made)
        if len(found) == count:
            break
    form = world.pick(("openai", "openai", "openai", "pydantic", "titled")) if style == "hermes" else "titled"
    silent = style == "hermes" and not plain and world.chance(0.05 * world.often.get("silent", 1.0))
    if silent:
        catalog.rule(world.pick(SILENT))
    return Bundle(style, system_text(catalog), tuple(catalog.tools), tuple(found), form, not silent, catalog)


# ChatML, tools and calls as Hermes models have them: what template.jinja writes, without the cost of rendering it


TOOLS_HEAD = "# Tools\n\nYou may call one function per turn. The functions, between <tools></tools>:\n<tools>"
TOOLS_TAIL = "\n</tools>\n\nA call is a JSON object between <tool_call></tool_call>:\n<tool_call>\n"
TOOLS_TAIL += '{"name": <name>, "arguments": <object>}\n</tool_call>'


def start(role: str) -> str:
    """How a turn begins."""
    return f"<|im_start|>{role}\n"


END = "<|im_end|>"


def system_piece(made: Bundle) -> str:
    schemas = "".join("\n" + json.dumps(tool.schema(made.form), ensure_ascii=False) for tool in made.tools)
    system = f"{made.system}\n\n" if made.system else ""
    return f"{start('system')}{system}{TOOLS_HEAD}{schemas}{TOOLS_TAIL}{END}\n"


def kind_of(turn: Turn) -> str:
    """What an assistant's turn is."""
    if turn.tool is not None:
        return "call"
    return "refusal" if turn.text in (NO_TOOL, FORBIDDEN) else "answer"


def spoken(turn: Turn, aloud: bool) -> tuple[str, str]:
    """What is thought in this turn and what is said: before a call and before a refusal, the thought that leads there is one of them."""
    if turn.tool is None and kind_of(turn) == "answer":
        return "", turn.text
    return ("", f"{turn.thought} {turn.text}".strip()) if aloud else (turn.thought, turn.text)


def completion(turn: Turn, aloud: bool = True) -> Piece:
    """What the model says in this turn, up to the end of the turn."""
    (thought, said), kind = spoken(turn, aloud), kind_of(turn)
    said = (THINK.format(thought) if thought else "") + said
    if turn.tool is None:
        return Piece(said + END, kind, len(said) if kind == "refusal" else 1)
    joint = "\n" if said and not thought else ""
    head = f'{said}{joint}<tool_call>\n{{"name": "{turn.tool.name}'
    return Piece(f'{head}", "arguments": {json.dumps(dict(turn.args), ensure_ascii=False)}}}\n</tool_call>{END}', "call", len(head))


def hermes(made: Bundle) -> list[Sample]:
    """One sample per dialogue: it only ever grows."""
    first = Piece(system_piece(made))
    out = []
    for number, talk in enumerate(made.dialogues):
        pieces = [first]
        for turn in talk.turns:
            if turn.role == "assistant":
                pieces += [completion(turn, made.aloud), Piece("\n")]
            elif turn.role == "tool":
                pieces.append(Piece(f"{start('user')}<tool_response>\n{turn.text}\n</tool_response>{END}\n{start('assistant')}"))
            else:
                pieces.append(Piece(f"{start('user')}{turn.text}{END}\n{start('assistant')}"))
        out.append(Sample(tuple(pieces), number))
    return out


def messages(made: Bundle, turns: Sequence[Turn]) -> list[dict[str, object]]:
    """The same as a chat template gets it."""
    out: list[dict[str, object]] = [{"role": "system", "content": made.system}] if made.system else []
    for turn in turns:
        if turn.role != "assistant":
            out.append({"role": turn.role, "content": turn.text})
            continue
        thought, said = spoken(turn, made.aloud)
        message: dict[str, object] = {"role": "assistant", "content": said}
        if thought:
            message["reasoning_content"] = thought
        if turn.tool is not None:
            call = {"name": turn.tool.name, "arguments": dict(turn.args)}
            message["tool_calls"] = [{"type": "function", "function": call}]
        out.append(message)
    return out
