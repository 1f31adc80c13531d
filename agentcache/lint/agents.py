"""The conversation under one id that a request continues: a planner, its sub-agents and a writer of titles have one each.

Requests of one agent share their front: its tools and how its system text begins. Where those changed, the messages decide.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from .history import alike, similar, speaks_of_summary
from .values import Request
from .volatile import masked

SIMILAR = 0.6  # share of the shorter text that two which are one, changed, have in common at their ends
LOOKED_AT = 16  # conversations of one id, the newest ones

FEW = 8  # words that name something; fewer say little of what a request is about, then all its words are compared
NAMED = 0.1  # share of the words that name something that a request must have in common with the conversation it may go on from
WORDED = 0.4  # the same of all words
_WORD = re.compile(r"\w[\w.:/@#-]*")

Front = tuple[bool, tuple[str, ...], str]


class Words(NamedTuple):
    """The words of a history: all, and those that name something: with digits, or long, and not the system text's."""

    naming: set[str]
    all: set[str]

    @classmethod
    def of(cls, request: Request) -> Words:
        """Words of one request."""
        found = set(_WORD.findall(" ".join(said.content for said in request.history)))
        common = set(_WORD.findall(" ".join(said.content for said in request.system)))
        naming = {word for word in found if len(word) >= 7 or any(letter.isdigit() for letter in word)}
        return cls(naming - common, {word for word in found if len(word) >= 3})

    def overlap(self, known: Words) -> bool:
        """True if this may be about the known text: two conversations of one application share some words too."""
        if min(len(self.naming), len(known.naming)) >= FEW:
            return share(self.naming, known.naming) >= NAMED
        return share(self.all, known.all) >= WORDED


def share(words: set[str], known: set[str]) -> float:
    """The share of the words that is known."""
    return len(words & known) / max(1, len(words))


@dataclass
class Conversation:
    """An open conversation."""

    name: str
    last: Request  # its newest request
    # the log has its beginning, or two requests of it that go on from each other, and so may have the next one too
    followed: bool = False
    number: int = 0  # its requests so far
    size: int = 0  # characters of the newest request
    # digests of the newest request's messages, with their weights
    marks: Counter[bytes] = field(default_factory=Counter)

    def set(self, request: Request, marks: Counter[bytes], size: int) -> None:
        """One more request, the newest now."""
        self.last, self.marks, self.size, self.number = request, marks, size, self.number + 1
        for derived in ("front", "words"):
            self.__dict__.pop(derived, None)

    @cached_property
    def front(self) -> Front:
        """The common front of its agent's requests."""
        return front_of(self.last)

    @cached_property
    def words(self) -> Words:
        """The words of the newest request."""
        return Words.of(self.last)


def front_of(request: Request) -> Front:
    """The common front of an agent's requests: its tools, and the start of its system text, but for times and ids; raw text has neither."""
    return request.prompt is not None, tuple(sorted({tool.name for tool in request.tools})), _start(request)[:200]


def whose(lines: Sequence[Conversation], request: Request) -> Conversation | None:
    """The conversation that this request continues, of those under one id, newest first; None: it begins another one."""
    if not lines:
        return None
    newest = lines[0].last
    if (newest.prompt is None) == (request.prompt is None) and newest.system[:1] == request.system[:1] and newest.tools == request.tools:
        found: Conversation | None = lines[0]
    else:
        front, before = front_of(request), lines[0].front
        if front != before and front[2] and front[2] == before[2] and _shared(newest, request):  # one agent, with other tools
            return lines[0]
        found = next((line for line in lines[:LOOKED_AT] if line.front == front), None) or _likest(lines[:LOOKED_AT], request)
    return None if found is not None and len(lines) > 1 and _asked_once(found.last, request) else found


def foreign(last: Request, request: Request) -> bool:
    """True if this is another agent, with the messages so far: its tools and system text are others, or all of that without tools."""
    old, new = _start(last), _start(request)
    had, has = {tool.name for tool in last.tools}, {tool.name for tool in request.tools}
    if had and has and not had & has:  # however alike: "You are a flight booking assistant", "You are a hotel booking assistant"
        return old != new
    if old and new:
        return (had != has and not similar(old, new, SIMILAR)) or not (had or has or similar(old, new))
    return had != has and old != new and not had & has  # one has no system text, as an agent for which another model chooses the tools


def _likest(lines: Sequence[Conversation], request: Request) -> Conversation | None:
    """The one that this may be with another front: its system text or its tools changed, and something stayed."""
    ranked = [((_likeness(line.last, request), _shared(line.last, request)), line) for line in lines]
    rank, best = max(ranked, key=lambda each: each[0])  # of equal ones the newest, which comes first
    return best if rank[0] else None


def _likeness(last: Request, request: Request) -> int:
    """The certainty that a request with another front is the same agent's; 0: it is not."""
    if (last.prompt is None) != (request.prompt is None):
        return 0
    old, new = _start(last), _start(request)
    had, has = {tool.name for tool in last.tools}, {tool.name for tool in request.tools}
    if old and new and similar(old, new, SIMILAR):
        return 3
    if had == has and any(map(speaks_of_summary, (old, new))):  # in place of the history, or of the one before
        return 2
    if had & has:
        return 2 if _shared(last, request) else 0
    grown = len(request.history) > len(last.history) > 0
    return 1 if grown and alike(last.history[-1]) in {alike(said) for said in request.history} else 0


def _asked_once(last: Request, request: Request) -> bool:
    """True if both are questions without continuation, and differ: each call of a writer of titles is one."""
    if last.prompt is not None or request.prompt is not None or not last.history or not request.history:
        return False
    if any(said.role in ("assistant", "tool") for said in (*last.history, *request.history)):
        return False
    return not _shared(last, request) and not similar(last.history[-1].content, request.history[-1].content, SIMILAR)


def _shared(last: Request, request: Request) -> int:
    return len({alike(said) for said in last.history} & {alike(said) for said in request.history})


def _start(request: Request) -> str:
    return masked(request.system[0].content[:400]) if request.system else ""
