"""A completion's text, taken apart while it is still coming: reasoning, text, calls and their arguments. Knows nothing of tokens.

Piece by piece it says what `tool_calls.parse` says of the whole; only where a call that had begun turns out malformed or cut short, that is
text there and half a call here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from .tool_calls import HERMES, HERMES_END, LLAMA, MISTRAL, THINK, THINK_END, call_of

_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
_OPEN = re.compile(r"\s*\[")
_TAIL = re.compile(r'\s*,\s*"[^"]*"\s*:\s*"[^"]*"')
_BREAKS = re.compile(r'[{}\[\]"]')
_STRING_END = re.compile(r'(?:[^"\\]|\\.)*"', re.DOTALL)

DeltaKind = Literal["text", "reasoning", "call", "arguments", "cut"]
_Mode = Literal["start", "thought", "gap", "text", "call", "arguments", "after", "over"]


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of an answer.

    call: call number `index` begins, `text` is its tool's name, `id` its own. arguments: the next piece of their JSON text.
    cut: the completion ended inside that call; with `text` behind them its arguments are no JSON, however kindly somebody reads them.
    """

    kind: DeltaKind
    text: str
    index: int = 0
    id: str = ""


class CallStream:
    """Deltas of one completion. tools: names of those that were offered; None: everything behind a thought is text.

    opened: the prompt ended in the beginning of a thought.
    """

    def __init__(self, tools: Collection[str] | None, *, opened: bool = False) -> None:
        self._calls = tools is not None
        self._tools = tools or ()
        self._mode: _Mode = "thought" if opened else "start"
        self._form = ""
        self._held = ""  # not told yet
        self._space = ""  # white space that is told only if text of the same kind follows
        self._told = False  # something of the kind under way was told
        self._index = -1
        self._depth = 0
        self._quoted = False
        self._out: list[Delta] = []

    def push(self, text: str) -> list[Delta]:
        """What has become certain with this text."""
        self._held += text
        while self._step(final=False):
            pass
        out, self._out = self._out, []
        return out

    def finish(self) -> list[Delta]:
        """The rest, now that nothing follows."""
        while self._step(final=True):
            pass
        out, self._out = self._out, []
        return out

    def _step(self, final: bool) -> bool:
        """Take one step; whether another may be taken."""
        return bool(getattr(self, f"_in_{self._mode}")(final))

    # -- reasoning and text ----------------------------------------------------------------------------------------

    def _in_start(self, final: bool) -> bool:
        bare = self._held.lstrip()
        if bare.startswith(THINK):
            return self._go("thought", bare[len(THINK) :])
        if not final and THINK.startswith(bare):
            return False
        return self._go("gap", self._held)

    def _in_thought(self, final: bool) -> bool:
        thought, marker, rest = self._held.partition(THINK_END)
        if marker:
            self._tell("reasoning", thought, strip="\n")
            return self._go("gap", rest)
        return self._release("reasoning", (THINK_END,), final, strip="\n")

    def _in_gap(self, final: bool) -> bool:
        """Behind the thought, or where there is none: Llama's calls are the whole text."""
        bare = self._held.lstrip()
        if self._tools and bare.startswith(LLAMA):
            self._form = LLAMA
            return self._go("call", bare)
        if not final and (not bare or (self._tools and LLAMA.startswith(bare))):
            self._held = bare
            return False
        return self._go("text", bare)

    def _in_text(self, final: bool) -> bool:
        markers = (HERMES, MISTRAL) if self._calls else ()
        found = min((at, marker) for marker in (*markers, "") if (at := self._held.find(marker) if marker else len(self._held)) >= 0)
        if found[1]:
            at, self._form = found
            self._tell("text", self._held[:at])
            rest = self._held[at:]
            return self._go("call", rest)
        return self._release("text", markers, final)

    def _release(self, kind: DeltaKind, markers: tuple[str, ...], final: bool, strip: str = "") -> bool:
        held = 0 if final else max((_begun(self._held, marker) for marker in markers), default=0)
        cut = len(self._held) - held
        self._tell(kind, self._held[:cut], strip)
        self._held = self._held[cut:]
        return False

    def _tell(self, kind: DeltaKind, text: str, strip: str = "") -> None:
        """Text as it is, but for white space around all of its kind."""
        text = self._space + text
        if not self._told:
            text = text.lstrip(strip or None)
        kept = text.rstrip(strip or None)
        self._space = text[len(kept) :]
        if kept:
            self._told = True
            self._out.append(Delta(kind, kept))

    def _go(self, mode: _Mode, held: str) -> bool:
        if mode == "gap" and self._mode == "thought":
            self._told, self._space = False, ""
        self._mode, self._held = mode, held
        return True

    # -- calls -----------------------------------------------------------------------------------------------------

    def _in_call(self, final: bool) -> bool:
        """Before the arguments: `_held` starts with the trigger, or with the comma or bracket of a list."""
        at = self._body()
        if at < 0:
            return self._as_text() if final else False
        head = _HEAD.match(self._held, at)
        if head and self._may_call(name := str(json.loads(head.group(1)))):
            self._begin(name)
            return self._go("arguments", self._held[head.end() :])
        whole = self._whole(at, final)
        if whole is None:
            return self._as_text() if final else False
        body, rest = whole
        call = call_of(body)
        if call is None or not self._may_call(call.name):
            return self._as_text()
        self._begin(call.name)
        self._out.append(Delta("arguments", json.dumps(call.arguments, ensure_ascii=False), self._index))
        return self._go("after" if self._form == MISTRAL else "text", rest)

    def _may_call(self, name: str) -> bool:
        return self._form != LLAMA or name in self._tools

    def _body(self) -> int:
        """Where the object of the call starts in `_held`; -1 if that is not known yet."""
        if self._form == LLAMA:
            return 0
        if self._form == HERMES:
            return len(HERMES)
        if not self._held.startswith(MISTRAL):
            return 0
        found = _OPEN.match(self._held, len(MISTRAL))
        return found.end() if found else -1

    def _whole(self, at: int, final: bool) -> tuple[str, str] | None:
        """A call whose parts come in another order: (its text, what follows), once it is there."""
        if self._form == HERMES and HERMES_END in self._held:
            body, _, rest = self._held[at:].partition(HERMES_END)
            return body, rest
        if self._form == MISTRAL:
            start = at + len(self._held[at:]) - len(self._held[at:].lstrip())
            try:
                _, end = json.JSONDecoder().raw_decode(self._held, start)
            except (ValueError, RecursionError):
                return None
            return self._held[start:end], "}" + self._held[end:]
        return (self._held[at:], "") if final else None

    def _begin(self, name: str) -> None:
        self._index += 1
        self._depth, self._quoted = 0, False
        self._out.append(Delta("call", name, self._index))

    def _as_text(self) -> bool:
        """What looked like a call is none: tell it, and look on behind it."""
        skip = max(1, len(self._form)) if self._held.startswith(self._form) else 1
        self._tell("text", self._held[:skip])
        return self._go("text", self._held[skip:])

    def _in_arguments(self, final: bool) -> bool:
        """Tell the object as it comes, until its brackets are closed."""
        at = 0
        while at < len(self._held):
            if self._quoted:
                string = _STRING_END.match(self._held, at)
                at = string.end() if string else len(self._held) - _backslashes(self._held) % 2
                self._quoted = string is None
                if string is None:
                    break
                continue
            found = _BREAKS.search(self._held, at)
            at = found.end() if found else len(self._held)
            mark = found.group() if found else ""
            self._quoted = mark == '"'
            self._depth += (mark in ("{", "[")) - (mark in ("}", "]"))
            if mark and self._depth == 0 and not self._quoted:
                self._arguments(at)
                return self._go("after", self._held)
        self._arguments(at)
        return self._cut() if final else False

    def _arguments(self, upto: int) -> None:
        if upto:
            self._out.append(Delta("arguments", self._held[:upto], self._index))
            self._held = self._held[upto:]

    def _cut(self) -> bool:
        """Mark the call under way as half a call."""
        self._out.append(Delta("cut", ('"' if self._quoted else "") + "]" * (self._depth + 1), self._index))
        return self._go("over", "")

    def _in_over(self, final: bool) -> bool:
        return False

    def _in_after(self, final: bool) -> bool:
        """Behind the arguments: to the end of the call, and to the next one."""
        rest = self._held
        while found := _TAIL.match(rest):  # an id, for example
            rest = rest[found.end() :]
        rest = rest.lstrip()
        if not rest.startswith("}"):
            return self._cut() if final else False
        rest = rest[1:].lstrip()
        if self._form == MISTRAL:
            if rest.startswith(","):
                return self._go("call", rest[1:])
            return self._go("text", rest[1:]) if rest.startswith("]") else False
        if self._form == HERMES and rest.startswith(HERMES_END):
            return self._go("text", rest[len(HERMES_END) :])
        return False


def _backslashes(text: str) -> int:
    return len(text) - len(text.rstrip("\\"))


def _begun(text: str, marker: str) -> int:
    """Length of the longest end of the text that begins the marker."""
    return next((size for size in range(min(len(marker) - 1, len(text)), 0, -1) if text.endswith(marker[:size])), 0)
