"""Calls in JSON, read while they are written: one object with a name and arguments, or a list. Knows nothing of the text around them.

Brackets and strings are followed as they come, so that a call's arguments can be told piece by piece and its end is found whatever its
strings say. Nothing is a call until its whole text is JSON.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from typing import Any, Literal

from ..types import ToolCall
from .call_forms import CallKeys, load

_SPACE = re.compile(r"\s*")
_BREAK = re.compile(r"[^\s,:0-9.eE+\-trufalsnNIiy]")  # outside strings: quotes, brackets, and what JSON does not have
_STRING = re.compile(r'[^"\\\x00-\x1f]*(?:\\.[^"\\\x00-\x1f]*)*')
_TEXT = r'"(?:[^"\\]|\\.)*"'

State = Literal["value", "element", "call", "next", "over", "text", "bad", "cut"]
Told = tuple[Literal["call", "arguments"], str] | ToolCall


@functools.lru_cache(maxsize=64)
def _head(keys: CallKeys) -> re.Pattern[str]:
    """The beginning of a call, with its name and, once it is there, the place of its arguments."""
    arguments = "|".join(map(re.escape, keys.arguments))
    return re.compile(rf'\s*\{{\s*"{re.escape(keys.name)}"\s*:\s*({_TEXT})(?:\s*,\s*"(?:{arguments})"\s*:\s*())?', re.DOTALL)


class CallReader:
    """Calls of one region.

    state:  value ---{--> call ------> over
            value ---[--> element ---{--> call ---> next ---]--> over
                             <--------------- , ----'
            text: it begins no call        bad: what is under way is none        cut: the text ends in it

    at: the text before it is read. start: where the call under way starts. count: whole calls. told: whether the call under way was
    told of. name: of the tool, where the mark of the region has it. offered: names that may be called, None for any.
    """

    def __init__(self, keys: CallKeys, at: int, name: str = "", offered: frozenset[str] | None = None) -> None:
        self.state: State = "value"
        self.at = self.start = at
        self.count, self.told = 0, False
        self._keys, self._name, self._offered = keys, name, offered
        self._listed = False
        self._call: ToolCall | None = None
        self._begin(at)

    def _begin(self, at: int) -> None:
        self.start, self.told = at, False
        self._depth, self._quoted = 0, False
        self._arguments = self._said = self._stop = -1  # where the arguments start, to where they are told, where they end

    def after_space(self, text: str) -> int:
        """The first place from `at` on that is no white space."""
        found = _SPACE.match(text, self.at)
        return found.end() if found else self.at

    def read(self, text: str, *, final: bool) -> list[Told]:
        """All that has become certain of the text. final: nothing follows."""
        out: list[Told] = []
        while self.state in ("value", "element", "call", "next"):
            if self.state == "call":
                if not self._in_call(text, out):
                    break
                continue
            self.at = self.after_space(text)
            mark = text[self.at : self.at + 1]
            if not mark:
                break
            self._between(mark)
        if final and self.state in ("value", "element", "call", "next"):
            self.state = "over" if self.state == "next" else "cut"
        return out

    def _between(self, mark: str) -> None:
        """Go on by the mark at `at`."""
        if self.state == "next":  # a list that is not closed ends as well
            self.state = "element" if mark == "," else "over"
            self.at += mark in (",", "]")
            self.start = self.at
        elif mark == "{":
            self.state = "call"
            self._begin(self.at)
        elif mark == "[" and self.state == "value" and self._keys.name:
            self.state, self._listed = "element", True
            self.at += 1
        else:
            self.state = "over" if self.count else "text"

    def _in_call(self, text: str, out: list[Told]) -> bool:
        """Read on in a call; whether there is more to read behind it."""
        if not self.told and not self._find_head(text, out):
            self.state = "text"
            return False
        ended = self._scan(text)
        stop = self.at if self._stop < 0 else self._stop
        if self.told and self._said < stop:
            out.append(("arguments", text[self._said : stop]))
            self._said = stop
        if not ended:
            return False
        self._call = self._made(text[self.start : self.at])
        self.state = "bad" if self._call is None else "next" if self._listed else "over"
        if self._listed:
            out += self.confirm()
        return self._call is None and self.state == "next"

    def confirm(self) -> list[Told]:
        """The call that is whole, and what was not told of it. One that is no part of a list is none before its region has ended."""
        call, told = self._call, self.told
        if call is None:
            return []
        self._call, self.told = None, False
        self.count += 1
        return [call] if told else whole(call)

    def _find_head(self, text: str, out: list[Told]) -> bool:
        """Tell of the call as soon as its arguments begin; False if it names a tool that may not be called."""
        if self._keys.name:
            found = _head(self._keys).match(text, self.start)
            if found is None:
                return True
            name, place = load(found.group(1)), found.start(2)
            if self._offered is not None and name not in self._offered:
                return False
            if name is None or place < 0 or text[place : place + 1] != "{":
                return True
        else:
            name, place = self._name, self.start
        out.append(("call", name))
        self.told, self._arguments, self._said = True, place, place
        self._name = name
        return True

    def _scan(self, text: str) -> bool:
        """Follow strings and brackets; whether the call's object ends at `at`. state: bad where no JSON can go on."""
        outer = 1 if self._keys.name else 0
        while self.at < len(text):
            if self._quoted:
                string = _STRING.match(text, self.at)
                assert string is not None
                self.at = string.end()
                if self.at == len(text) or (text[self.at] == "\\" and self.at + 1 == len(text)):
                    return False
                if text[self.at] != '"':
                    self.state = "bad"
                    return False
                self.at, self._quoted = self.at + 1, False
                continue
            found = _BREAK.search(text, self.at)
            self.at = found.end() if found else len(text)
            mark = found.group() if found else ""
            self._quoted = mark == '"'
            self._depth += (mark in ("{", "[")) - (mark in ("}", "]"))
            if mark and mark not in '"{}[]':
                self.state = "bad"
                return False
            if mark in ("}", "]") and self._depth == outer and self._arguments >= 0 and self._stop < 0:
                self._stop = self.at
            if mark in ("}", "]") and self._depth == 0:
                return True
        return False

    def _made(self, text: str) -> ToolCall | None:
        value, keys = load(text), self._keys
        if not isinstance(value, Mapping):
            return None
        if not keys.name:
            return ToolCall(self._name, value)
        name = self._name if self.told else value.get(keys.name)
        arguments: Any = next((value[key] for key in keys.arguments if key in value), {} if keys.optional else None)
        arguments = load(arguments) if isinstance(arguments, str) else arguments
        allowed = isinstance(name, str) and (self._offered is None or name in self._offered)
        return ToolCall(str(name), arguments) if allowed and isinstance(arguments, Mapping) else None

    def half(self, text: str, stop: int) -> tuple[str, str]:
        """Name and arguments of the call under way in text[:stop], as far as they are there."""
        if not self._keys.name:
            return self._name, text[self.start : stop]
        found = _head(self._keys).match(text, self.start, stop)
        if found is None:
            return "", ""
        return str(load(found.group(1)) or ""), text[found.start(2) : stop] if found.start(2) >= 0 else ""

    @property
    def unreadable(self) -> str:
        """The end with which what was told of the call is no JSON, however kindly it is read."""
        return "]" if self._stop >= 0 else ('"' if self._quoted else "") + "]" * (self._depth + 1)


def whole(call: ToolCall) -> list[Told]:
    """A call that was not told of before."""
    return [("call", call.name), ("arguments", json.dumps(call.arguments, ensure_ascii=False)), call]
