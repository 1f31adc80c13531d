"""Short texts with which a match of a regular expression can end. Knows nothing of tokens."""

from __future__ import annotations

import importlib
import re
import sys
from typing import Any

# The standard library's own parser of patterns. Nodes say by their names of which kind they are.
parser = importlib.import_module("re._parser" if sys.version_info >= (3, 11) else "sre_parse")

CHARACTERS = "a0 A_-.,:x1\n!"  # tried for a set of characters, in this order
LONGEST = 200  # characters of a suffix
MOST = 64


def suffixes(pattern: str) -> list[str]:
    """One short text for each place in the pattern from which a match may end, shortest first; [] for syntax that Python does not read."""
    try:
        found, _ = _ends(parser.parse(pattern), "")
    except (re.error, RecursionError, OverflowError, ValueError):
        return []
    return sorted(dict.fromkeys(text for text in found if len(text) <= LONGEST), key=len)[:MOST]


def _ends(nodes: Any, rest: str) -> tuple[list[str], str]:
    """Suffixes from each place within these nodes, before `rest`, and a short text from their start."""
    found = [rest]
    for kind, value in reversed(list(nodes)):
        inside: list[str] = []
        if str(kind) in ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"):
            least, _, body = value
            inside, once = _ends(body, rest)
            text = once[: len(once) - len(rest)]
            rest = text * min(least, LONGEST) + rest
        elif str(kind) == "BRANCH":
            ways = [_ends(way, rest) for way in value[1]]
            inside = [text for found_in, _ in ways for text in found_in]
            rest = min((start for _, start in ways), key=len)
        elif str(kind) == "SUBPATTERN":
            inside, rest = _ends(value[-1], rest)
        elif str(kind) != "AT":
            rest = _character(kind, value) + rest
        found += [*inside, rest]
    return found, rest


def _character(kind: Any, value: Any) -> str:
    """A character that this node matches. Raises ValueError for a node of another kind."""
    if str(kind) == "LITERAL":
        return chr(value)
    if str(kind) == "ANY":
        return CHARACTERS[0]
    if str(kind) == "NOT_LITERAL":
        return next(each for each in CHARACTERS if ord(each) != value)
    if str(kind) != "IN":
        raise ValueError(f"{kind!s} has no character of its own")
    negated = str(value[0][0]) == "NEGATE"
    members = value[negated:]
    first = [chr(each) for code, each in members if str(code) == "LITERAL"]
    first += [chr(each[0]) for code, each in members if str(code) == "RANGE"]
    tried = [*CHARACTERS] if negated else [*first, *CHARACTERS]
    matching = (each for each in tried if any(_holds(code, part, each) for code, part in members) is not negated)
    return next(matching, "")


def _holds(code: Any, part: Any, character: str) -> bool:
    if str(code) == "LITERAL":
        return ord(character) == part
    if str(code) == "RANGE":
        return bool(part[0] <= ord(character) <= part[1])
    category = {"DIGIT": r"\d", "SPACE": r"\s", "WORD": r"\w"}[str(part).rsplit("_", 1)[-1]]
    return (re.match(category, character) is not None) is not ("_NOT_" in str(part))
