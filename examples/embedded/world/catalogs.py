"""Catalogs of tools with near-duplicates, and the rules that decide between them. Knows nothing of how requests are worded.

A catalog answers one question, `right(action, thing)`: the tool to call, or why there is none. The scenarios in scenarios.py add
tools and rules; `fill` adds independent tools that are near-duplicates of what is there.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from .tools import Names, Param, Tool, description, draw_kinds, draw_params, snake, tool_name
from .words import ACTIONS, MODIFIERS, READING
from .world import Value, World, split_of

NO_TOOL = "I have no tool for that."
FORBIDDEN = "That is not allowed here."
READ_ONLY = ("Read-only mode: nothing but reading is allowed.", "Only reading is allowed.")
ENDINGS = ("tool", "helper", "service", "task", "job", "a", "b", "v2", "one", "two", "new", "alt")
NONSENSE = 0.15  # of the vague names do not even say what they are about
STYLES = ("verb first",) * 12 + ("object first",) * 3 + ("camel",)


@dataclass(frozen=True, slots=True)
class Wish:
    """Something to ask for. `given` are arguments that the rules fix and the request leaves out, `mentions` stands in their place.

    why: the sentence that says what those arguments are, as a thought recalls it.
    """

    action: str
    thing: str
    kind: str = "plain"
    called: str = ""
    given: tuple[tuple[str, Value], ...] = ()
    mentions: tuple[tuple[str, str], ...] = ()
    why: str = ""

    @property
    def context(self) -> bool:
        """Whether the right answer depends on text that stands before the tool or the request."""
        return self.kind not in ("plain", "allowed", "decline")


@dataclass(slots=True)
class Catalog:
    """Tools in groups that stay together, and the rules of the system prompt, in text and as they are meant."""

    world: World
    groups: list[list[Tool]] = field(default_factory=list)
    rules: list[str] = field(default_factory=list)
    names: Names = field(default_factory=Names)
    heads: set[str] = field(default_factory=set)  # things are disjoint between scenarios: no rule touches another's
    services: dict[str, str] = field(default_factory=dict)
    forbidden: set[tuple[str, str]] = field(default_factory=set)
    reading_only: bool = False
    wishes: list[Wish] = field(default_factory=list)
    plans: list[tuple[str, tuple[Tool, ...]]] = field(default_factory=list)
    words: dict[str, str] = field(default_factory=dict)  # by thing: what its tools call it, where a rule explains a word
    settled: set[str] = field(default_factory=set)  # things of which a rule speaks whatever is to be done with them
    user_place: str = ""  # where the rules say the user is
    notes: dict[str, list[tuple[str, str]]] = field(default_factory=dict)  # by thing: an action, and the sentence that decides about it

    @property
    def tools(self) -> list[Tool]:
        return [tool for group in self.groups for tool in group]

    @property
    def ordinary(self) -> list[Tool]:
        """Without calculator and search, whose meaning is not an action and a thing."""
        return [tool for tool in self.tools if tool.action in ACTIONS]

    def __len__(self) -> int:
        return sum(len(group) for group in self.groups)

    def meanings(self) -> set[tuple[str, str]]:
        return {tool.meaning for tool in self.tools}

    def right(self, action: str, thing: str) -> Tool | str:
        """The tool to call, or the words of the refusal."""
        if (action, thing) in self.forbidden or (self.reading_only and action not in READING):
            return FORBIDDEN
        found = [tool for tool in self.tools if tool.meaning == (action, thing) and not tool.replaced]
        if len(found) > 1 and thing in self.services:
            found = [tool for tool in found if tool.service == self.services[thing]]
        assert len(found) <= 1, found
        return found[0] if found else NO_TOOL

    def note(self, action: str, thing: str, sentence: str) -> None:
        """What has to be read before a tool for this can be chosen: a sentence of the system prompt or of a description."""
        self.notes.setdefault(thing, []).append((action, sentence))

    def quote(self, action: str, thing: str) -> str:
        """What a thought about this recalls, word for word; "" where comparing words is enough.

        A sentence about the thing is recalled for any action: whether it matters can be told once it has been read. Where nothing may be
        changed, that is all there is to know about a change.
        """
        if self.reading_only and action not in READING:
            return next(rule for rule in self.rules if rule in READ_ONLY)
        notes = self.notes.get(thing, [])
        return next((sentence for meant, sentence in notes if meant == action or len(notes) == 1), "")

    # adding

    def thing(self, head: str = "") -> str:
        """A thing that nothing in the catalog is about yet."""
        while True:
            drawn = self.world.thing(head)
            if drawn not in self.heads:
                self.heads.add(drawn)
                return drawn

    def actions(self, thing: str) -> list[str]:
        """Actions that make an unused meaning of the tools' split with this thing."""
        wanted, known = self.world.source.tools, self.meanings()
        return [action for action in ACTIONS if (action, thing) not in known and split_of("tools", f"{action} {thing}") == wanted]

    def meaning(self, action: str = "", head: str = "") -> tuple[str, str]:
        """A new meaning of the tools' split about a new thing."""
        while True:
            thing = self.thing(head)
            actions = self.actions(thing)
            if action in actions:
                return action, thing
            if actions and not action:
                return self.world.pick(actions), thing

    def vague(self, thing: str) -> str:
        """A tool name that says what it is about at most, never what the tool does."""
        while True:
            about = self.world.made_up() if self.world.chance(NONSENSE) else snake(thing)
            name = f"{about}_{self.world.pick(ENDINGS)}"
            if self.names.claim(name):
                return name

    def name(self, action: str, thing: str, style: str = "", service: str = "") -> str:
        prefix = f"{service}_" if service else ""
        for _attempt in range(20):
            name = prefix + tool_name(self.world, action, thing, style or self.world.pick(STYLES))
            if self.names.claim(name):
                return name
        return self.vague(thing)

    def make(
        self,
        action: str,
        thing: str,
        *,
        name: str = "",
        text: str = "",
        params: tuple[Param, ...] | None = None,
        service: str = "",
        replaced: bool = False,
    ) -> Tool:
        """A tool of this meaning, in the words that the catalog has for it, not yet part of it."""
        world, word = self.world, self.words.get(thing, thing)
        name = name or (self.vague(word) if not text and not world.plain and world.chance(world.vague) else self.name(action, word))
        params = draw_params(world, word, draw_kinds(world)) if params is None else params
        return Tool(name, text or description(world, action, word), params, action, thing, service, replaced)

    def add(self, *tools: Tool) -> None:
        """Tools that stay neighbours, in this order."""
        self.groups.append(list(tools))

    def rule(self, text: str) -> None:
        self.rules.append(text)

    def fill(self, size: int) -> None:
        """Independent tools until there are `size`: near-duplicates of each other and of what is there."""
        world = self.world
        while len(self) < size:
            at = world.rng.random()
            some = world.pick(self.ordinary) if self.ordinary else None
            some = None if world.plain else some
            others = self._others(some.thing) if some is not None and at < 0.3 else []
            if some is not None and others:
                action, thing = world.pick(others), some.thing
            elif some is not None and at < 0.5:
                action, thing = self.meaning(some.action)
            elif some is not None and at < 0.7:
                head = world.pick(some.thing.split())
                action, thing = self.meaning("", "" if head in MODIFIERS or self.crowded(head) else head)
            else:
                action, thing = self.meaning()
            self.add(self.make(action, thing))

    def _others(self, thing: str) -> list[str]:
        """Actions that one more tool for this thing may have: none that a rule is about, too, none that reads what a step looks up."""
        planned = any(tool.thing == thing for _, tools in self.plans for tool in tools)
        return [action for action in self.actions(thing) if thing not in self.settled and not (planned and action in READING)]

    def crowded(self, head: str) -> bool:
        """Whether many things share this word already, so that a new one is hard to find."""
        return sum(head in thing.split() for thing in self.heads) > 12

    def shuffle(self) -> None:
        self.groups = self.world.shuffled(self.groups)
        self.rules = self.world.shuffled(self.rules)

    # asking

    def plain(self) -> Wish:
        """A wish that a tool fits and that no rule is about."""
        world = self.world
        free = [tool for tool in self.ordinary if not tool.replaced and not tool.service and tool.meaning not in self.forbidden]
        if self.reading_only:
            free = [tool for tool in free if tool.action in READING] or free
        tool = world.pick(free or self.ordinary)
        return Wish(tool.action, tool.thing, self._kind(tool))

    def _kind(self, tool: Tool) -> str:
        """A tool that only a rule or another tool explains keeps its scenario's name, also when it is asked for by chance."""
        if self.reading_only and tool.action not in READING:
            return "reading only"
        kept = ("like", "above", "deprecated", "service", "preferred", "glossary", "tried first")
        named = [wish for wish in self.wishes if (wish.action, wish.thing) == tool.meaning]
        return next((wish.kind for wish in named if wish.kind in kept and not wish.called), "plain")

    def missing(self) -> Wish:
        """A wish that no tool fits: mostly a near-duplicate of one that is there."""
        world = self.world
        for _ in range(50):
            some = world.pick(self.ordinary)
            at = world.rng.random()
            if at < 0.4:
                action, thing = world.pick(tuple(ACTIONS)), some.thing
            elif at < 0.6:
                action, thing = some.action, world.thing()
            elif at < 0.8:
                action, thing = some.action, world.thing(some.thing.split()[-1])
            else:
                action, thing = world.pick(tuple(ACTIONS)), world.thing()
            if self.right(action, thing) == NO_TOOL and (action, thing) not in self.forbidden and not self._nearly(action, thing):
                return Wish(action, thing, "decline")
        return Wish("translate", world.made_up(), "decline")

    def _nearly(self, action: str, thing: str) -> bool:
        """Whether a tool might do it all the same: one for a kind of the thing, one for what it is a kind of, or a search."""
        if action in ("get", "find") and any(tool.action == "search" for tool in self.tools):
            return True
        kinds = (f" {tool.thing}" for tool in self.tools if tool.action == action)
        return any(kind.endswith(f" {thing}") or f" {thing}".endswith(kind) for kind in kinds)
