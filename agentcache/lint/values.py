"""Values that the parts of lint hand to each other: requests as read, and findings in them. Reads and decides nothing."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol


class Note(Protocol):
    """Hears of unusable input: wording of ours, with %s for each value of the source, which may be redacted."""

    def __call__(self, said: str, *values: object) -> None: ...


class NoteAt(Protocol):
    """The same, with the line of the source."""

    def __call__(self, line: int, said: str, *values: object) -> None: ...


class Cause(str, Enum):
    """The cause that a prompt is not the previous prompt and more."""

    CLOCK = "clock"  # a date, a time of day, a duration
    ID = "id"  # a uuid, a session, an address, call ids made anew
    COUNTER = "counter"  # a number that goes up or down
    ORDER = "order"  # the same tools, keys, lines or results in another order
    ARGUMENTS = "re-serialised arguments"  # the same call, its arguments written differently
    REASONING = "dropped reasoning"
    EDITED = "edited history"  # an earlier message changed, inserted or taken out
    SUMMARY = "front summary"  # a summary or other text put before the history
    TRUNCATED = "truncated history"  # the oldest messages are gone
    TOOLS_MOVED = "moved tools"  # the template puts the same tools elsewhere
    TOOL_SET = "changed tool set"
    STATE = "changed system text"
    TEMPLATE = "template"  # the same messages, rendered differently
    BOUNDARY = "tokenizer boundary"  # the same characters, cut into other tokens

    __str__ = str.__str__


@dataclass(frozen=True, slots=True)
class Call:
    """One tool call as it was written: `arguments` is its text."""

    name: str
    arguments: str
    id: str | None = None


@dataclass(frozen=True, slots=True)
class Said:
    """One message. `source` is its index in the request's own list, which error messages and findings name."""

    role: str
    content: str = ""
    reasoning: str = ""
    calls: tuple[Call, ...] = ()
    call_id: str | None = None
    name: str | None = None
    source: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class Shown:
    """One tool as it was given: `text` is its JSON with the keys in their order."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class Request:
    """One request."""

    number: int  # from 1 in its source
    line: int
    track: str | None  # its conversation, if the source names it
    system: tuple[Said, ...] = ()  # the leading system messages
    tools: tuple[Shown, ...] = ()
    history: tuple[Said, ...] = ()  # the other messages
    prompt: str | None = None  # the text instead of both, where there are no messages
    answer: Said | None = None  # the model's answer, where it was recorded
    tools_first: bool = False  # the provider puts tools before the system text
    alone: bool = False  # its provider holds a history that the source does not tell: it is compared with no request before it


@dataclass(frozen=True, slots=True)
class Problem:
    """Something in the source that could not be used as it is."""

    line: int
    message: str


@dataclass(frozen=True, slots=True)
class Change:
    """One difference of a request from the one before it."""

    cause: Cause
    where: str  # "system", "tools" or "history"
    writer: str
    detail: str


@dataclass(frozen=True, slots=True)
class Context:
    """Decoded text around the first difference."""

    before: str
    was: str
    now: str


@dataclass(frozen=True, slots=True)
class Finding:
    """A request that could not go on from the one before it."""

    request: int
    line: int
    conversation: str
    previous: int
    cause: Cause
    writer: str
    token: int  # place of the first difference, in tokens
    char: int  # the same in characters
    cost_tokens: int  # tokens of the previous prompt that were computed again
    fix: str
    context: Context
    detail: str = ""
    also: tuple[Cause, ...] = ()  # causes of further differences after the first
    across: bool = False  # compared with another conversation instead of its own
    pattern: str = ""  # finds the changed span of a system text again, "" where no pattern does


@dataclass(frozen=True, slots=True)
class Hazard:
    """Something seen in one request that is likely to cost reuse, whether it did here or not. `pattern` finds it again."""

    request: int
    line: int
    cause: Cause
    writer: str
    char: int
    text: str
    detail: str
    pattern: str = ""


@dataclass(frozen=True, slots=True)
class Step:
    """One request in numbers of tokens: those that the previous prompt of its conversation made reusable, and the rest."""

    request: int
    conversation: str
    tokens: int
    reused: int
    again: int  # of the previous prompt, computed all the same
    first: bool
    cause: Cause | None
