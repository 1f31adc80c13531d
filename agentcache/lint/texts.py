"""Two texts: in which pieces they differ, and whether by a volatile value or an order only. Knows no requests."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from difflib import Match, SequenceMatcher
from itertools import accumulate
from typing import Any, NamedTuple

from ..layout.tokenise import common_length
from .values import Cause
from .volatile import Value, kind_of, values

WINDOW = 160  # characters around the difference that are cut into values, so that values are whole
MOST = 1_500  # values on each side up to which pieces are aligned; longer differences are one piece
PAIRS = 1_000_000  # of equal values that aligning may look at; the rest is one piece, not a second of waiting


class Aligner(SequenceMatcher[Value]):
    """difflib's, for texts that say the same words over and over: there its time grows with the square of the text, or the cube.

    Here no more than PAIRS pairs of equal values are looked at.
    """

    def __init__(self, before: list[Value], after: list[Value]) -> None:
        super().__init__(None, before, after, autojunk=False)
        there = Counter(after)
        self._pairs = list(accumulate((there[value] for value in before), initial=0))  # of the values before each one
        self._left = PAIRS

    def find_longest_match(self, alo: int = 0, ahi: int | None = None, blo: int = 0, bhi: int | None = None) -> Match:
        """The longest common run of these ranges; an empty one if looking for it would go beyond what may be looked at."""
        self._left -= self._pairs[len(self._pairs) - 1 if ahi is None else ahi] - self._pairs[alo]
        return super().find_longest_match(alo, ahi, blo, bhi) if self._left >= 0 else Match(alo, blo, 0)


class Piece(NamedTuple):
    """One changed piece: what stood there, what stands there now, and the cause if it is plain from the piece alone."""

    was: str
    now: str
    cause: Cause | None


def shared_end(one: str, other: str, most: int) -> int:
    """Length of the common suffix, at most `most`, by bisection over memory compares."""
    low, high = 0, min(len(one), len(other), most)
    while low < high:
        middle = (low + high + 1) // 2
        if one[len(one) - middle : len(one) - low] == other[len(other) - middle : len(other) - low]:
            low = middle
        else:
            high = middle - 1
    return low


def window(was: str, now: str) -> tuple[int, int, int]:
    """(start, stop in `was`, stop in `now`) of what differs, widened to whole values."""
    head = common_length(was, now)
    tail = shared_end(was, now, min(len(was), len(now)) - head)
    start = max(now.rfind("\n", 0, head) + 1, head - WINDOW)
    after = now.find("\n", len(now) - tail)
    more = min(tail, WINDOW, (len(now) if after < 0 else after) - (len(now) - tail))
    return start, len(was) - tail + more, len(now) - tail + more


def pieces(was: str, now: str, in_system: bool = False) -> list[Piece]:
    """The changed pieces, in order."""
    start, was_stop, now_stop = window(was, now)
    before, after = values(was[start:was_stop]), values(now[start:now_stop])
    if max(len(before), len(after)) > MOST:
        return [Piece(was[start:was_stop], now[start:now_stop], None)]
    out, rest = [], now[now_stop : now_stop + WINDOW]
    for kind, i, j, k, m in _joined(Aligner(before, after).get_opcodes(), before):
        if kind != "equal":
            left, right = "".join(v.text for v in after[:k]), "".join(v.text for v in after[m:]) + rest
            cause = kind_of(before[i:j], after[k:m], now[max(0, start - WINDOW) : start] + left, right, in_system)
            out.append(Piece("".join(v.text for v in before[i:j]), "".join(v.text for v in after[k:m]), cause))
    return out


def _joined(codes: Sequence[tuple[str, int, int, int, int]], before: list[Value]) -> list[tuple[str, int, int, int, int]]:
    """Opcodes with changes joined that only white space or a mark keeps apart."""
    out: list[tuple[str, int, int, int, int]] = []
    for at, (kind, i, j, k, m) in enumerate(codes):
        thin = kind == "equal" and j - i <= 2 and all(value.kind in ("space", "mark") and value.text != "\n" for value in before[i:j])
        if out and (thin and 0 < at < len(codes) - 1 or (kind != "equal" and out[-1][0] != "equal")):
            last = out.pop()
            out.append((last[0], last[1], j, last[3], m))
        else:
            out.append((kind, i, j, k, m))
    return out


def causes(was: str, now: str, in_system: bool = False) -> list[Cause | None]:
    """The causes of all differences between two texts, the first first; None for one that is no volatile value and no order."""
    if same_items(was, now):
        return [Cause.ORDER]
    return [piece.cause for piece in pieces(was, now, in_system)] or [None]


def same_items(was: str, now: str) -> bool:
    """True if the texts hold the same in another order: JSON keys, lines, or items of a list."""
    if was == now or abs(len(was) - len(now)) > 8:
        return False
    if (one := parsed(was)) is not None and one == parsed(now):
        return bool(json.dumps(one) != json.dumps(parsed(now)))  # the same order: only written differently
    start, was_stop, now_stop = window(was, now)
    one_text, other_text = was[start:was_stop], now[start:now_stop]
    return any(_permuted(cut.split(one_text), cut.split(other_text)) for cut in _CUTS)


_CUTS = (re.compile(r"\n"), re.compile(r"\s*[,;\n\[\]{}()]\s*"), re.compile(r"\s*[,;:\n\[\]{}()'\"]+\s*"))


def _permuted(one: list[str], other: list[str]) -> bool:
    one, other = [item.strip() for item in one if item.strip()], [item.strip() for item in other if item.strip()]
    return len(one) > 1 and one != other and Counter(one) == Counter(other)


def parsed(text: str) -> Any:
    """The value that a JSON text stands for, None if it is not an object or a list."""
    if text.lstrip()[:1] not in ("{", "["):
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
