"""Volatile text that a request declares: found, and taken out of the messages. Knows nothing of templates or tokens.

    marker          volatile(text) in the system prompt
    cache_control   content parts of a system message after the last one that has it
    rule            what a pattern of a reviewed layout.toml matches in the system prompt
    volatile        texts that the request brings along; where one stands in the system prompt, it is taken out there

Only the leading system messages are looked at: everything after them is history, which is appended to and never moved. Nothing is
guessed, and nothing depends on earlier requests.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from ..errors import ConfigError, MessageError
from ..toml_file import read_toml
from ..types import Message, Role
from .canonical import text_of
from .plain import VOLATILE, is_system, plain_message

OPEN, CLOSE = f"<{VOLATILE}", f"</{VOLATILE}"
By = Literal["marker", "cache_control", "rule", "volatile"]

_MARKED = re.compile(f"{re.escape(OPEN)}(.*?){re.escape(CLOSE)}", re.DOTALL)
_TAGS = re.compile(f"{re.escape(OPEN)}|{re.escape(CLOSE)}")


def volatile(text: object) -> str:
    """Marks text of a system prompt as volatile: f"You are a clerk. {volatile(now)}". The marks are never shown to the model."""
    return f"{OPEN}{text}{CLOSE}"


@dataclass(frozen=True, slots=True)
class Piece:
    """Volatile text, and its place."""

    text: str  # without marks
    role: Role
    by: By  # its declaration
    message: int | None = None  # index of the message where it stood; None: the request brought it
    start: int = 0  # characters [start, stop) of that message's text without marks
    stop: int = 0


@dataclass(frozen=True, slots=True)
class Declared:
    """Messages of a request, with their volatile text apart."""

    stable: list[Any]  # the messages without `pieces`, as many as there were
    whole: list[Any]  # with the pieces in their places, and without marks
    pieces: tuple[Piece, ...]

    @property
    def brought(self) -> tuple[Piece, ...]:
        """Text that stands in no message."""
        return tuple(piece for piece in self.pieces if piece.message is None)


Rule = re.Pattern[str]


def read_rules(path: str | os.PathLike[str]) -> tuple[Rule, ...]:
    """The patterns of a layout.toml: tables [[volatile]] with `pattern`, and `class` as a name. ConfigError names the fault."""
    found, _ = read_toml(path, f"layout file {os.fspath(path)!r}")
    tables = found.pop("volatile", [])
    if found or not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise ConfigError(f"layout file {os.fspath(path)!r}: expected only tables [[volatile]], got {sorted(found) or tables!r:.200}")
    return tuple(_rule(path, number, table) for number, table in enumerate(tables, 1))


def _rule(path: str | os.PathLike[str], number: int, table: dict[str, Any]) -> Rule:
    where = f"layout file {os.fspath(path)!r}, [[volatile]] number {number}"
    unknown = sorted(set(table) - {"pattern", "where", "class"})
    pattern = table.get("pattern")
    if unknown or not isinstance(pattern, str) or not pattern or not isinstance(table.get("class", ""), str):
        raise ConfigError(f"{where}: give pattern = '...' and, if you like, class = '...'; got {table!r:.200}")
    if table.get("where", "system") != "system":
        raise ConfigError(f"{where}: where={table['where']!r}: only text of the system prompt is moved")
    try:
        compiled = re.compile(pattern, re.MULTILINE)
    except re.error as error:
        raise ConfigError(f"{where}: pattern={pattern!r} is no regular expression: {error}") from error
    if compiled.fullmatch(""):
        raise ConfigError(f"{where}: pattern={pattern!r} matches nothing at all: name what is volatile")
    return compiled


def brought(volatile: Any) -> tuple[Message, ...]:
    """The texts of a request's `volatile` as messages: a string speaks for the user, a Message for its role."""
    if isinstance(volatile, (str, Message, Mapping)):
        volatile = (volatile,)
    if not isinstance(volatile, Sequence):
        raise MessageError(f"volatile={volatile!r:.200}: give a text, a Message, or a list of them")
    out = []
    for index, given in enumerate(volatile):
        message = Message("user", given) if isinstance(given, str) else given
        plain = plain_message(index, message)
        role, text = plain["role"], text_of(plain.get("content"))
        if role not in ("system", "user"):
            raise MessageError(f"volatile[{index}]: role={role!r}: volatile text speaks for the system or for the user")
        if text.strip():
            out.append(Message(role, text))
    return tuple(out)


def split(messages: Sequence[Message | Mapping[str, Any]], volatile: Sequence[Message] = (), rules: Sequence[Rule] = ()) -> Declared:
    """A request taken apart. Messages that cannot be read are left as they are: the renderer raises their error."""
    stable, whole, pieces = list(messages), list(messages), list[Piece]()
    texts = [message.content for message in volatile]
    for index, message in enumerate(messages):
        if not is_system(message):
            break
        plain = plain_message(index, message)
        content = plain.get("content")
        listed = [content] if isinstance(content, str) else content or []
        parts = [(text_of([part]), not isinstance(part, str) and bool(part.get("cache_control"))) for part in listed]
        kept, shown, found = _take(parts, texts, rules)
        if shown == kept and not found and shown == text_of(content):
            continue
        stable[index], whole[index] = ({**plain, "content": text} for text in (kept, shown))
        pieces += [replace(piece, message=index) for piece in found]
    taken = {piece.text for piece in pieces}
    pieces += [Piece(message.content, message.role, "volatile") for message in volatile if message.content not in taken]
    return Declared(stable, whole, tuple(pieces))


def _take(parts: Sequence[tuple[str, bool]], volatile: Sequence[str], rules: Sequence[Rule]) -> tuple[str, str, list[Piece]]:
    """(the text without its volatile pieces, with them, the pieces)"""
    given = "".join(text for text, _ in parts)
    found: list[tuple[int, int, By]] = []
    shown, at = "", 0
    for mark in _MARKED.finditer(given):  # positions are those of the text without marks
        shown += _TAGS.sub("", given[at : mark.start()])
        inner = _TAGS.sub("", mark.group(1))
        found.append((len(shown), len(shown) + len(inner), "marker"))
        shown, at = shown + inner, mark.end()
    shown += _TAGS.sub("", given[at:])
    tagged = [number for number, (_, cached) in enumerate(parts) if cached]
    if tagged:
        behind = "".join(text for text, _ in parts[tagged[-1] + 1 :])
        found.append((len(shown) - len(_TAGS.sub("", behind)), len(shown), "cache_control"))
    for text in volatile:
        at = shown.find(text)
        while at >= 0:
            found.append((at, at + len(text), "volatile"))
            at = shown.find(text, at + len(text))
    for rule in rules:
        found += [(match.start(), match.end(), "rule") for match in rule.finditer(shown)]
    pieces, kept, end = [], "", 0
    for start, stop, by in _united(found):
        if shown[start:stop].strip():
            pieces.append(Piece(shown[start:stop].strip(), "system", by, None, start, stop))
        kept, end = kept + shown[end:start], stop
        kept, end = _closed(kept, shown, end)
    return kept + shown[end:], shown, pieces


def _united(found: list[tuple[int, int, By]]) -> list[tuple[int, int, By]]:
    """Sorted, those that overlap as one."""
    out: list[tuple[int, int, By]] = []
    for start, stop, by in sorted(found, key=lambda one: (one[0], -one[1])):
        if stop == start:
            continue
        if out and start < out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], stop), out[-1][2])
        else:
            out.append((start, stop, by))
    return out


def _closed(kept: str, text: str, at: int) -> tuple[str, int]:
    """The gap between kept and text[at:] without the line or the space that would be left of it."""
    if (not kept or kept.endswith("\n")) and text.startswith("\n", at):
        at += 1
        if kept.endswith("\n\n") and text.startswith("\n", at):
            at += 1
    elif (not kept or kept.endswith(" ")) and text.startswith(" ", at):
        at += 1
    elif at == len(text):
        kept = kept.rstrip()
    return kept, at
