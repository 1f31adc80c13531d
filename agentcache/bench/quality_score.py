"""Counts answers against the right ones, with intervals. Knows no model.

tsa   tool selection accuracy: of the requests that a tool fits, how often the right one was called
pf1   F1 over arguments (name and value), pooled; a wrong tool has none right
em    of the requests that a tool fits, how often call and arguments are all right
fpr   of the requests that no tool fits (no greeting), how often one was called          fnr   of those that one fits, how often none was
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .quality_cases import Case, Right, words

FIGURES = ("tsa", "pf1", "em", "fpr", "fnr")


@dataclass(frozen=True, slots=True)
class Said:
    """A model's answer."""

    name: str | None  # of the called tool
    arguments: Mapping[str, Any]
    text: str = ""
    failed: str = ""  # the reason that there is no answer
    ids: tuple[int, ...] = ()  # the tokens it drew
    cached: int = field(default=0, compare=False)  # prompt tokens that were not computed


def same(one: Any, other: Any) -> bool:
    """Compare two argument values by meaning: 5 is 5.0, "a " is "a", but "5" is not 5."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, (int, float)) and isinstance(other, (int, float)):
        return math.isclose(one, other, rel_tol=1e-9)
    if isinstance(one, str) and isinstance(other, str):
        return one.strip() == other.strip()
    if isinstance(one, Sequence) and isinstance(other, Sequence) and not isinstance(one, str) and not isinstance(other, str):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other))
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return bool(one == other)


def fits(value: Any, options: Sequence[Any]) -> bool:
    """Look for a value among those that will do. An object's options hold, for each key, the values that will do there."""
    for option in options:
        if isinstance(option, Mapping) and isinstance(value, Mapping):
            known = value.keys() <= option.keys() and all(_listed(value[key], option[key]) for key in value)
            if known and all(key in value or "" in _options(option[key]) for key in option):
                return True
        elif isinstance(option, str) and isinstance(value, str):
            if option.strip().lower() == value.strip().lower():
                return True
        elif same(value, option):
            return True
    return False


def _options(given: Any) -> Sequence[Any]:
    return given if isinstance(given, Sequence) and not isinstance(given, str) else [given]


def _listed(value: Any, given: Any) -> bool:
    return fits(value, _options(given)) or same(value, given)


def pairs(right: Right, arguments: Mapping[str, Any]) -> tuple[int, int, int]:
    """Arguments that are right, that were given and are not, and that are missing or wrong."""
    if right.acceptable is None:
        hits = {name for name, value in arguments.items() if name in right.arguments and same(value, right.arguments[name])}
        return len(hits), len(arguments) - len(hits), len(right.arguments.keys() - hits)
    hits = {name for name, value in arguments.items() if name in right.acceptable and _listed(value, right.acceptable[name])}
    left = {name for name in right.arguments.keys() - hits if name in arguments or "" not in _options(right.acceptable.get(name, []))}
    return len(hits), len(arguments) - len(hits), len(left)


@dataclass(frozen=True, slots=True)
class Ratio:
    """Per catalog, how many of how many: a figure is the sum of the ones over the sum of the others."""

    of: Mapping[int, tuple[float, float]]

    @property
    def value(self) -> float | None:
        part, whole = (sum(pair[n] for pair in self.of.values()) for n in (0, 1))
        return part / whole if whole else None

    def interval(self, z: float = 1.96, draws: int = 1000) -> tuple[float, float] | None:
        """95 %: the wider of Wilson's and of a bootstrap over catalogs, whose requests are not independent."""
        table = np.array(list(self.of.values()), dtype=np.float64).reshape(-1, 2)
        n = table[:, 1].sum()
        if not n:
            return None
        p = table[:, 0].sum() / n
        middle, half = (p + z * z / 2 / n) / (1 + z * z / n), z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / 4 / n / n)
        drawn = table[np.random.default_rng(0).integers(0, len(table), (draws, len(table)))].sum(1)
        shares = drawn[:, 0] / np.maximum(drawn[:, 1], 1e-9)
        low, high = np.quantile(shares[drawn[:, 1] > 0], (0.025, 0.975))
        return max(0.0, min(middle - half, float(low))), min(1.0, max(middle + half, float(high)))


class Tally:
    """Counts of several figures, each per catalog."""

    def __init__(self, names: Sequence[str]) -> None:
        self._counts: dict[str, dict[int, tuple[float, float]]] = {name: {} for name in names}

    def add(self, name: str, catalog: int, part: float, whole: float = 1.0) -> None:
        before = self._counts[name].get(catalog, (0.0, 0.0))
        self._counts[name][catalog] = before[0] + part, before[1] + whole

    def row(self) -> dict[str, Any]:
        """Each figure and its interval (`<figure>_ci`); None where nothing counts."""
        ratios = {name: Ratio(of) for name, of in self._counts.items()}
        return {name: one.value for name, one in ratios.items()} | {f"{name}_ci": one.interval() for name, one in ratios.items()}


def figures(cases: Sequence[Case], said: Sequence[Said]) -> dict[str, Any]:
    """The row of these cases: n, how many a tool fits, each figure and its interval."""
    tally = Tally(FIGURES)
    for case, answer in zip(cases, said, strict=True):
        if case.right is None:
            if case.wants and not answer.failed:
                tally.add("fpr", case.catalog, answer.name is not None)
            continue
        chosen = answer.name == case.right.name
        hits, wrong, missing = pairs(case.right, answer.arguments) if chosen else (0, len(answer.arguments), len(case.right.arguments))
        tally.add("tsa", case.catalog, chosen)
        tally.add("em", case.catalog, chosen and not wrong and not missing)
        tally.add("pf1", case.catalog, 2 * hits, 2 * hits + wrong + missing)
        tally.add("fnr", case.catalog, answer.name is None)
    calls = sum(case.right is not None for case in cases)
    return {"n": len(cases), "calls": calls, "too_long": sum(answer.failed == "too long" for answer in said), **tally.row()}


def right(case: Case, answer: Said) -> bool:
    """Judge a step of an episode: the same call, or no call and an answer that says what the last result says."""
    if answer.failed:
        return False
    if case.right is None:
        return answer.name is None and set(case.says.split()) <= set(words(answer.text))
    return answer.name == case.right.name and pairs(case.right, answer.arguments)[1:] == (0, 0)
