"""One synthetic tool: its parameters, their values and words, its schema in the forms frameworks write. Knows nothing of catalogs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .words import ACTIONS, ATTRIBUTES, CHOICES
from .world import Value, World

# kind -> the JSON type, and names that say what it is; a made-up or compound name is always possible too.
KINDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "id": ("string", ("id", "code", "ref", "number", "key")),
    "person": ("string", ("name", "customer", "owner", "user", "person", "author")),
    "place": ("string", ("city", "location", "town", "place", "destination")),
    "date": ("string", ("date", "day", "due_date", "start_date", "deadline")),
    "email": ("string", ("email", "recipient", "mail", "contact")),
    "integer": ("integer", ("count", "limit", "days", "quantity", "page", "seats", "year")),
    "number": ("number", ("amount", "budget", "weight", "rate", "distance")),
    "text": ("string", ("title", "topic", "subject", "label", "note", "comment")),
    "choice": ("string", tuple(CHOICES)),
    "expression": ("string", ("expression",)),
    "flag": ("boolean", ("urgent", "notify", "recursive", "force", "confirmed", "hidden")),
}
DRAWN = [kind for kind in KINDS if kind != "expression"] + ["text", "id"]
PYTHON_TYPES = {"string": "str", "integer": "int", "number": "float", "boolean": "bool"}


@dataclass(frozen=True, slots=True)
class Param:
    """A parameter. `words`: how requests and descriptions call it."""

    name: str
    kind: str
    required: bool = True
    description: str = ""
    choices: tuple[str, ...] = ()

    @property
    def words(self) -> str:
        return self.name.replace("_", " ")

    @property
    def telling(self) -> bool:
        """Whether the name says of what kind the values are."""
        return self.name.endswith(KINDS[self.kind][1]) or bool(self.choices)

    @property
    def type(self) -> str:
        return KINDS[self.kind][0]

    def schema(self) -> dict[str, Any]:
        out: dict[str, Any] = {"type": self.type}
        if self.choices:
            out["enum"] = list(self.choices)
        if self.description:
            out["description"] = self.description
        return out

    def titled(self) -> dict[str, Any]:
        """As pydantic writes it: keys sorted, with a title, and a default where it is optional."""
        out = self.schema() | {"title": self.words.title()} | ({} if self.required else {"default": None})
        return {key: out[key] for key in sorted(out)}

    def draw(self, world: World) -> Value:
        """A value that a request may name."""
        if self.kind == "choice":
            return world.pick(self.choices)
        if self.kind == "flag":
            return world.chance(0.6)
        draws: dict[str, Callable[[], Value]] = {
            "id": world.identifier,
            "person": world.person,
            "place": world.place,
            "date": world.date,
            "email": world.email,
            "integer": world.integer,
            "number": world.decimal,
            "text": world.phrase,
        }
        return draws[self.kind]()


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool and what it means. service: whose it is, where several do the same. replaced: deprecated in favour of another."""

    name: str
    description: str
    params: tuple[Param, ...]
    action: str
    thing: str
    service: str = ""
    replaced: bool = False

    @property
    def meaning(self) -> tuple[str, str]:
        return self.action, self.thing

    def obvious(self, param: Param) -> bool:
        """Whether a value alone says that it is meant for this parameter: by its name, or because nothing else takes a string."""
        strings = [other for other in self.params if other.type == "string"]
        alone = sum(other.kind == param.kind for other in self.params) == 1
        return strings == [param] or (alone and param.telling and all(other.telling for other in strings))

    def required(self) -> list[Param]:
        return [param for param in self.params if param.required]

    def parameters(self, form: str = "openai") -> dict[str, Any]:
        """Their JSON schema. form: openai | pydantic (other order of keys) | titled (pydantic's, with titles and defaults)."""
        properties = {param.name: param.titled() if form == "titled" else param.schema() for param in self.params}
        out: dict[str, Any] = {"type": "object", "properties": properties}
        if self.required() or form == "openai":
            out["required"] = [param.name for param in self.required()]
        return out if form == "openai" else {key: out[key] for key in ("properties", "required", "type") if key in out}

    def schema(self, form: str = "openai") -> dict[str, Any]:
        """As a chat template gets it."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters(form)}
        return {"type": "function", "function": function}

    def signature(self) -> str:
        """As Python prints the signature of the function behind it."""
        parts = [f"{param.name}: {PYTHON_TYPES[param.type]}{'' if param.required else ' = None'}" for param in self.params]
        return f"({', '.join(parts)}) -> str"


@dataclass(slots=True)
class Names:
    """What is taken already in one catalog."""

    taken: set[str] = field(default_factory=set)

    def claim(self, name: str) -> bool:
        if name in self.taken:
            return False
        self.taken.add(name)
        return True


def snake(text: str) -> str:
    return text.replace(" ", "_").replace("-", "_")


def camel(text: str) -> str:
    first, *rest = text.split("_")
    return first + "".join(word.capitalize() for word in rest)


def draw_params(world: World, thing: str, kinds: list[str], optional: float = 0.2) -> tuple[Param, ...]:
    """One parameter per kind, required ones first, with names that differ."""
    out: list[Param] = []
    names = Names()
    for kind in kinds:
        name = _param_name(world, thing, kind)
        while not names.claim(name):
            name = _param_name(world, thing, kind)
        out.append(_param(world, thing, name, kind, required=not world.chance(optional)))
    return tuple(sorted(out, key=lambda param: not param.required))


def _param(world: World, thing: str, name: str, kind: str, required: bool) -> Param:
    choices: tuple[str, ...] = ()
    if kind == "choice":
        known = CHOICES.get(name, ())
        options = known or tuple({world.made_up() for _ in range(4)} if world.chance(0.5) else CHOICES[world.pick(tuple(CHOICES))])
        choices = tuple(world.shuffled(sorted(options))[: world.number(2, 4)])
    words = name.replace("_", " ")
    described = world.pick((f"The {words}.", f"Which {words} to use.", f"The {words} of the {thing}.")) if world.chance(0.12) else ""
    return Param(name, kind, required, described, choices)


def _param_name(world: World, thing: str, kind: str) -> str:
    at = world.rng.random()
    if at < 0.25:
        return world.made_up()
    if at < 0.4:
        return f"{world.noun()}_{world.pick(KINDS[kind][1])}"
    if at < 0.6 and kind == "id":
        return f"{snake(thing.split()[-1])}_id"
    return world.pick(KINDS[kind][1])


def draw_kinds(world: World) -> list[str]:
    """The kinds of a tool's parameters: mostly different ones."""
    count = world.pick((0, 1, 1, 1, 1, 2, 2, 2, 3, 3, 4))
    kinds = world.sample(DRAWN, count)
    if count and world.chance(0.3) and "id" not in kinds:
        kinds[0] = "id"
    return kinds


def tool_name(world: World, action: str, thing: str, style: str) -> str:
    verb = next(word for word in _verbs(world, action) if " " not in word)
    name = f"{snake(thing)}_{verb}" if style == "object first" else f"{verb}_{snake(thing)}"
    return camel(name) if style == "camel" else name


def _verbs(world: World, action: str) -> list[str]:
    words = list(ACTIONS[action])
    return words if world.plain or world.chance(0.6) else world.shuffled(words)


def description(world: World, action: str, thing: str) -> str:
    """What a tool does, in words: a verb of the action and the thing."""
    verb = _verbs(world, action)[0].capitalize()
    tail = world.pick(("", "", "", " in the system", " for the user", " by name", " on request", " of the team"))
    more = world.pick((f" Returns its {world.pick(ATTRIBUTES)}.", " Works at once.", " May take a while.")) if world.chance(0.12) else ""
    return f"{verb} {world.pick(('the', 'a', 'one', 'the given'))} {thing}{tail}.{more}"
