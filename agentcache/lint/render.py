"""A request's prompt as parts with one writer each, in characters: compared when no tokenizer is given. Knows no templates.

The rendering is neutral: each part once, in the order in which the provider shows them; four characters stand for one token.
"""

from __future__ import annotations

import json
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

from ..layout.tokenise import common_length
from .texts import shared_end
from .values import Request, Said

CHARS_PER_TOKEN = 4
RUN = 16  # ids in a row by which a text is found again at another place


@dataclass(frozen=True, slots=True)
class Prompt:
    """One rendered prompt."""

    parts: tuple[Any, ...]  # characters or token ids, a part for each writer
    unit: int = CHARS_PER_TOKEN  # characters that count as a token; 1 where parts are ids

    @property
    def text(self) -> str:
        """The prompt as text."""
        return "".join(self.parts)

    @property
    def whole(self) -> str | Sequence[int]:
        """All characters, or all ids."""
        return self.text

    @property
    def size(self) -> int:
        """Characters or ids in all parts."""
        return sum(map(len, self.parts))

    @property
    def stable(self) -> int:
        """Characters or ids that the next prompt is to go on from."""
        return self.size

    def tokens(self, size: int) -> int:
        """So many characters or ids in tokens."""
        return -(-size // self.unit)

    def char(self, at: int) -> int:
        """The character at which a character or an id starts."""
        return at


class Parting(NamedTuple):
    """The place where two prompts part: the index of the part, the shared length of it, and the shared length in all."""

    part: int
    inside: int
    shared: int


def written(request: Request) -> Prompt:
    """The neutral rendering."""
    if request.prompt is not None:
        return Prompt((request.prompt,))
    system, tools = map(_message, request.system), (f"{tool.text}\n" for tool in request.tools)
    front = (*tools, *system) if request.tools_first else (*system, *tools)
    return Prompt((*front, *map(_message, request.history)))


def _message(said: Said) -> str:
    out = [f"<{said.role}>"]
    if said.call_id is not None or said.name is not None:
        out.append(f"{json.dumps([said.call_id, said.name], ensure_ascii=False)}")
    if said.reasoning:
        out.append(f"<reasoning>{said.reasoning}</reasoning>")
    out.append(said.content)
    out += [f"<call {call.id or ''}>{call.name}({call.arguments})" for call in said.calls]
    return "\n".join([*out, ""])


def parting(now: Prompt, shared: int) -> Parting:
    """The place in a prompt after so many characters or ids."""
    left = shared
    for number, part in enumerate(now.parts[:-1]):
        if left < len(part):
            return Parting(number, left, shared)
        left -= len(part)
    return Parting(len(now.parts) - 1, left, shared)


def again(was: Prompt, now: Prompt, at: Parting) -> int:
    """Characters or ids after the parting that stood in the earlier prompt too, and must be computed again all the same."""
    left = Counter(was.parts[at.part :])
    ids = None if isinstance(now.parts[at.part], str) else array("q", chain.from_iterable(was.parts[at.part :]))
    total = 0
    for number, part in enumerate(now.parts[at.part :], at.part):
        if left.get(part, 0) > 0:
            left[part] -= 1
            total += len(part)
        elif number < len(was.parts):
            skip = at.inside if number == at.part else 0
            alike = _alike(was.parts[number], part, skip)
            total += alike if ids is None else max(alike, _elsewhere(ids, part[skip:]))
    return total


def _elsewhere(known: array[int], ids: Sequence[int]) -> int:
    """Count these ids that stand in a row somewhere among the known: a message that was wrapped in more text, or is wrapped in it now.

    Its first ids may be cut otherwise beside other text, so that a run is looked for at a few places.
    """
    whole, width = known.tobytes(), known.itemsize
    for start in range(0, min(len(ids) - RUN, 3 * RUN) + 1, RUN // 4):
        wanted, at = array("q", ids[start : start + RUN]).tobytes(), -1
        while (at := whole.find(wanted, at + 1)) >= 0:
            if at % width == 0:
                return common_length(known[at // width :], array("q", ids[start:]))
    return 0


def _alike(one: Any, other: Any, skip: int) -> int:
    """The common parts of two bodies: at their start, after `skip`, and at their end."""
    one, other = one[skip:], other[skip:]
    head = common_length(one, other)
    most = min(len(one), len(other)) - head
    if isinstance(one, str):
        return head + max(shared_end(one, other, most), _inner(one, other))
    tail = common_length(one[::-1], other[::-1])
    return head + min(tail, most)


def _inner(one: str, other: str) -> int:
    """The part of a text that is found at another place: raw prompts whose middle moved."""
    for size in (200, 60):
        if len(one) < size or len(other) < size:
            continue
        for text, moved in ((one, other), (other, one)):
            if (at := text.find(moved[:size])) > 0:
                return common_length(text[at:], moved)
    return 0
