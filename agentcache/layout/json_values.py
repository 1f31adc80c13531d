"""Values that JSON cannot write, found in a caller's value by place. Knows nothing of messages and tools."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import shown

LEVELS = 128  # of lists and objects in each other: schemas have some ten, and what reads them recurses
DIGITS = 4_000  # of a whole number: Python writes no longer ones
_BITS = int(DIGITS * 3.3)
_PLACE = 160  # characters of a place that an error shows


def fault(value: Any, place: str) -> str | None:
    """The part of this value that is no JSON, and its place, for an error; None if all is JSON. place: the value's name."""
    left: list[tuple[Any, str, int]] = [(value, place, 0)]
    while left:
        value, place, level = left.pop()
        if (wrong := _wrong(value, level)) is not None:
            where = place if len(place) <= _PLACE else f"{place[:_PLACE]} ..."
            return f"{where}={shown(value)} {wrong}"
        if isinstance(value, Mapping):
            for key, inner in value.items():
                if not isinstance(key, (str, int, float, type(None))):
                    return f"{place[:_PLACE]} has the key {shown(key)}, which is no string"
                left.append((inner, f"{place}.{key if isinstance(key, str) else shown(key)}", level + 1))
        elif isinstance(value, (list, tuple)):
            left += [(inner, f"{place}[{number}]", level + 1) for number, inner in enumerate(value)]
    return None


def _wrong(value: Any, level: int) -> str | None:
    if isinstance(value, (Mapping, list, tuple)):
        return f"is nested in more than {LEVELS} levels, or in itself" if level >= LEVELS else None
    if isinstance(value, int):
        return f"has more than {DIGITS} digits" if value.bit_length() > _BITS else None
    if value is None or isinstance(value, (str, float)):
        return None
    return f"is of type {type(value).__name__}, which JSON has not: give a list, an object, text or a number"
