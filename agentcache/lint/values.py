"""Values that the parts of lint hand to each other: requests as read, and findings in them. Reads and decides nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

Json = Mapping[str, Any]


class Note(Protocol):
    """Hears of unusable input: wording of ours, with %s for each value of the source, which may be redacted."""

    def __call__(self, said: str, *values: object) -> None: ...


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
    """One request. `number` counts from 1 in its source, `track` names its conversation if the source does.

    system: the leading system messages; history: the others; prompt: the text instead of both, where there are no messages.
    answer: what the model said to it, where it was recorded. tools_first: the provider puts tools before the system text.
    alone: its provider holds a history that the source does not tell, so that it is compared with no request before it.
    """

    number: int
    line: int
    track: str | None
    system: tuple[Said, ...] = ()
    tools: tuple[Shown, ...] = ()
    history: tuple[Said, ...] = ()
    prompt: str | None = None
    answer: Said | None = None
    tools_first: bool = False
    alone: bool = False


@dataclass(frozen=True, slots=True)
class Problem:
    """Something in the source that could not be used as it is."""

    line: int
    message: str


@dataclass(frozen=True, slots=True)
class Change:
    """One way in which a request differs from the one before it.

    where: "system", "tools" or "history"; at: index of the part there, in the later request; was: in the earlier one.
    """

    cause: Cause
    where: str
    at: int
    was: int
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
    """A request that could not go on from the one before it.

    token, char: where its prompt first differs. cost_tokens: what had to be computed again though it stood in the previous prompt.
    also: causes of further differences after the first. across: compared with another conversation instead of its own.
    pattern: finds the changed span of a system text again, "" where no pattern does.
    """

    request: int
    line: int
    conversation: str
    previous: int
    cause: Cause
    writer: str
    token: int
    char: int
    cost_tokens: int
    fix: str
    context: Context
    detail: str = ""
    also: tuple[Cause, ...] = ()
    across: bool = False
    pattern: str = ""


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
    """One request in numbers of tokens: those that the previous prompt of its conversation made reusable, and the rest.

    again: stood in the previous prompt and had to be computed all the same. parts: (kind, tokens), in order.
    """

    request: int
    conversation: str
    tokens: int
    reused: int
    again: int
    first: bool
    cause: Cause | None
    parts: Sequence[tuple[str, int]]
