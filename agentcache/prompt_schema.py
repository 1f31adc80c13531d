"""Schema of a prompt: named parts, of which each prompt shows some, and holes that each prompt fills. Knows no model and no store.

always, always | chosen, one of several, always, ...     a part begins with its text; then its nested parts, or one of them
^ leading        ^ found at this place if it is the first; else at another position, by consent
"""

from __future__ import annotations

import hashlib
import os
import string
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Protocol

from .errors import SchemaError, shown
from .toml_file import read_toml
from .types import Message, Role


class Named(Protocol):
    """A learnt text, as `Engine.documents` lists it."""

    @property
    def source(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a schema. With holes, its text shows each as {name}, and a brace is written twice."""

    name: str
    text: str = ""
    # the most characters of each hole, by name
    holes: Mapping[str, int] = field(default_factory=dict)
    # left out unless it, or a part in it, is asked for
    optional: bool = False
    # parts after its text, all of them
    parts: Sequence[Part] = ()
    # parts after its text, of which a prompt shows one
    one_of: Sequence[Part] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name or not isinstance(self.text, str) or not isinstance(self.optional, bool):
            raise SchemaError(f"part {shown(self.name)}: a name and a text are strings, `optional` is true or false")
        if not isinstance(self.holes, Mapping) or not all(type(most) is int and most > 0 for most in self.holes.values()):
            raise SchemaError(
                f"part {self.name!r}, holes={shown(self.holes)}: give the most characters of each, a whole number of at least 1"
            )
        shows = {hole for _, hole in self.pieces() if hole is not None}
        if shows != set(self.holes):
            raise SchemaError(
                f"part {self.name!r} shows the holes {sorted(shows)!r} and bounds {sorted(self.holes)!r}: they must be the same"
            )
        if self.parts and self.one_of:
            raise SchemaError(f"part {self.name!r} has `parts` and `one_of`: put one of them into a part of its own")
        if not (self.text.strip() or self.parts or self.one_of):
            raise SchemaError(f"part {self.name!r} is empty: give it a text, `parts` or `one_of`")

    def pieces(self) -> Iterator[tuple[str, str | None]]:
        """Fixed text, and the name of the hole after it."""
        if not self.holes:
            yield self.text, None
            return
        try:
            for fixed, hole, _, _ in string.Formatter().parse(self.text):
                yield fixed, hole
        except ValueError as error:
            raise SchemaError(f"part {self.name!r}, text={shown(self.text)}: {error}; a brace that is no hole is written twice") from error

    @property
    def nested(self) -> Sequence[Part]:
        """The parts in it."""
        return self.parts or self.one_of


@dataclass(frozen=True, slots=True)
class Module:
    """A fixed run of text of one part, as it is learnt."""

    part: str
    # the caller's name of it among documents
    source: str
    text: str
    # text before it when it is learnt: the leading parts
    before: str


@dataclass(frozen=True, slots=True)
class SchemaPrompt:
    """A prompt made by a schema."""

    messages: tuple[Message, ...]
    # characters [start, stop) of each shown part in the message's text, by name; a part contains its nested parts
    spans: Mapping[str, tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Schema:
    """Parts of a prompt in order. Their text is one message, the first of the prompt."""

    # of its documents
    name: str
    parts: Sequence[Part]
    # of the message
    role: Role = "system"
    # between parts
    separator: str = "\n\n"

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name or not self.parts or self.role not in ("system", "user"):
            raise SchemaError(f"schema {shown(self.name)}: give a name, at least one part, and a role of 'system' or 'user'")
        if not isinstance(self.separator, str):
            raise SchemaError(f"schema {self.name!r}, separator={shown(self.separator)}: must be a text")
        names = [part.name for part, _, _ in self._walk(self.parts)]
        if doubled := sorted({name for name in names if names.count(name) > 1}):
            raise SchemaError(f"schema {self.name!r} has two parts of the name {doubled[0]!r}: give each its own")

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> Schema:
        """Read a TOML file: `name`, `role`, `separator`, and [[parts]] with the fields of `Part`. SchemaError names the fault."""
        found, _ = read_toml(path, f"schema file {os.fspath(path)!r}", SchemaError)
        table = {"name": Path(path).stem, **found, "parts": _parts(found.get("parts", ()), "parts")}
        return cls(**_known(table, cls, f"{os.fspath(path)!r}"))

    def render(self, parts: Sequence[str] = (), params: Mapping[str, str] | None = None, *, learnt: Iterable[Named] = ()) -> SchemaPrompt:
        """Show the parts that every prompt has, and those named, with their holes filled.

        A nested part brings the parts around it. learnt: as `Engine.documents(schema.name)` lists them; a shown part whose text is not
        the one that was learnt is refused. SchemaError: an unknown part, no choice or two of one_of, a hole that is missing, unknown or
        too long.
        """
        given, text = dict(params or {}), ""
        spans: dict[str, tuple[int, int]] = {}
        holes: set[str] = set()
        for part, within in self._shown((parts,) if isinstance(parts, str) else parts):
            own = "".join(fixed + ("" if hole is None else _filling(part, hole, given)) for fixed, hole in part.pieces())
            start = len(text := text + self.separator if text and own else text)
            text += own
            for name in within if own else ():
                spans[name] = spans.get(name, (start,))[0], len(text)
            holes |= part.holes.keys()
        if spare := sorted(given.keys() - holes):
            raise SchemaError(f"params={spare[0]!r}: no part that is shown has this hole; these are {sorted(holes)!r}")
        self._check_unchanged(spans, learnt)
        return SchemaPrompt((Message(self.role, text),), spans)

    def modules(self) -> Iterator[Module]:
        """Every fixed run of text, in order: what is learnt."""
        before, leading = "", True
        for part, _, always in self._walk(self.parts):
            leading = leading and always
            for text, hole in part.pieces():
                if text.strip():
                    yield Module(part.name, f"{part.name}@{_digest(text)}", text, before)
                leading = leading and hole is None
                if leading and text:
                    before += text + self.separator

    def _walk(
        self, parts: Iterable[Part], around: tuple[str, ...] = (), always: bool = True
    ) -> Iterator[tuple[Part, tuple[str, ...], bool]]:
        """Every part, the names of the parts around it and its own, and whether every prompt shows it."""
        for part in parts:
            within, here = (*around, part.name), always and not part.optional
            yield part, within, here
            yield from self._walk(part.nested, within, here and not part.one_of)

    def _shown(self, wanted: Sequence[str]) -> Iterator[tuple[Part, tuple[str, ...]]]:
        """The parts of one prompt, as of `_walk`."""
        known = {part.name: within for part, within, _ in self._walk(self.parts)}
        if unknown := [name for name in wanted if name not in known]:
            raise SchemaError(f"part {unknown[0]!r}: schema {self.name!r} has {', '.join(map(repr, known))}")
        chosen = {name for each in wanted for name in known[each]}
        choices: dict[str, Part] = {"": Part("schema", parts=self.parts)}  # shown parts, by name
        for part, within, _ in self._walk(self.parts):
            parent = choices.get(within[-2] if len(within) > 1 else "")
            if parent is None or (part.name not in chosen and (part.optional or parent.one_of)):
                continue
            choices[part.name] = part
            asked = [one.name for one in part.one_of if one.name in chosen]
            if part.one_of and len(asked) != 1:
                raise SchemaError(f"part {part.name!r} shows one of {[one.name for one in part.one_of]!r}: asked for are {asked!r}")
            yield part, within

    def _check_unchanged(self, spans: Mapping[str, Any], learnt: Iterable[Named]) -> None:
        known: dict[str, set[str]] = {}
        for one in learnt:
            known.setdefault(one.source.rpartition("@")[0], set()).add(one.source)
        for module in self.modules():
            if module.part in spans and module.source not in known.get(module.part, {module.source}):
                raise SchemaError(
                    f"part {module.part!r} has changed since schema {self.name!r} was learnt: call engine.learn(schema) again"
                )


def _filling(part: Part, hole: str, given: Mapping[str, str]) -> str:
    if hole not in given:
        raise SchemaError(f"part {part.name!r} has the hole {hole!r}: give it in params")
    said, most = given[hole], part.holes[hole]
    if not isinstance(said, str) or len(said) > most:
        raise SchemaError(f"params[{hole!r}]={shown(said)}: must be a text of at most {most} characters, for part {part.name!r}")
    return said


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=6).hexdigest()


def _parts(tables: Any, where: str) -> tuple[Part, ...]:
    """Parts of a file, with those in them."""
    if not isinstance(tables, (list, tuple)) or not all(isinstance(table, dict) for table in tables):
        raise SchemaError(f"{where}={shown(tables)}: must be tables, each begun with [[{where}]]")
    made = []
    for table in tables:
        nested = {kind: _parts(table.get(kind, ()), f"{where}.{kind}") for kind in ("parts", "one_of")}
        made.append(Part(**_known({"name": "", **table, **nested}, Part, f"part {shown(table.get('name'))}")))
    return tuple(made)


def _known(table: dict[str, Any], kind: Any, what: str) -> dict[str, Any]:
    names = [each.name for each in fields(kind)]
    if unknown := sorted(table.keys() - names):
        raise SchemaError(f"{what}: {unknown[0]!r} is none of {', '.join(map(repr, names))}")
    return table
