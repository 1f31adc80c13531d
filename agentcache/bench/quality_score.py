"""Counts answers against the right ones, with intervals, and the baselines BM25 (twice) and first tool. Knows no model.

tsa   tool selection accuracy: of the requests that a tool fits, how often the right one was called
pf1   F1 over arguments (name and value), pooled; a wrong tool has none right
em    of the requests that a tool fits, how often call and arguments are all right
fpr   of the requests that no tool fits (no greeting), how often one was called          fnr   of those that one fits, how often none was
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .quality_cases import Case, Plain, Right, words

FIGURES = ("tsa", "pf1", "em", "fpr", "fnr", "bm25_tsa", "bm25_params_tsa", "first_tsa")


@dataclass(frozen=True, slots=True)
class Said:
    """A model's answer."""

    name: str | None  # of the called tool
    arguments: Mapping[str, Any]
    text: str = ""
    failed: str = ""  # the reason that there is no answer
    ids: tuple[int, ...] = ()  # the tokens it drew
    cached: int = field(default=0, compare=False)  # prompt tokens that were not computed


# Values


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


# Baselines


def _terms(text: str) -> list[str]:
    parted = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", text.replace("_", " "))
    return [word[:-1] if len(word) > 3 and word.endswith("s") else word for word in words(parted)]


def bm25(query: str, tools: Sequence[Plain], params: bool = False, k1: float = 1.5, b: float = 0.75) -> str:
    """The tool whose name and description the query's words fit best; the first of those that fit as well.

    params: names and descriptions of parameters are read too. Requests that say them often give the tool away.
    """
    functions = [tool.get("function", tool) for tool in tools]
    texts = [Counter(_terms(f"{each['name']} {each.get('description', '')} {_params(each) if params else ''}")) for each in functions]
    mean = sum(sum(text.values()) for text in texts) / len(texts) or 1.0
    scores = [0.0] * len(texts)
    for term in set(_terms(query)):
        holds = sum(term in text for text in texts)
        weight = math.log(1 + (len(texts) - holds + 0.5) / (holds + 0.5))
        for number, text in enumerate(texts):
            count = text[term]
            scores[number] += weight * count * (k1 + 1) / (count + k1 * (1 - b + b * sum(text.values()) / mean))
    return str(functions[scores.index(max(scores))]["name"])


def _params(function: Plain) -> str:
    known: Mapping[str, Any] = (function.get("parameters") or {}).get("properties") or {}
    return " ".join(f"{name} {each.get('description', '') if isinstance(each, Mapping) else ''}" for name, each in known.items())


def first(tools: Sequence[Plain]) -> str:
    """The baseline that always calls the first tool."""
    return str(tools[0].get("function", tools[0])["name"])


# Counting


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


def figures(cases: Sequence[Case], said: Sequence[Said]) -> dict[str, Any]:
    """The row of these cases: n, how many a tool fits, each figure and its interval (`<figure>_ci`); None where nothing counts."""
    table: dict[str, dict[int, list[float]]] = {name: {} for name in FIGURES}

    def add(name: str, catalog: int, part: float, whole: float = 1.0) -> None:
        at = table[name].setdefault(catalog, [0.0, 0.0])
        at[0] += part
        at[1] += whole

    for case, answer in zip(cases, said, strict=True):
        if case.right is None:
            if case.wants and not answer.failed:
                add("fpr", case.catalog, answer.name is not None)
            continue
        chosen = answer.name == case.right.name
        hits, wrong, missing = pairs(case.right, answer.arguments) if chosen else (0, len(answer.arguments), len(case.right.arguments))
        add("tsa", case.catalog, chosen)
        add("em", case.catalog, chosen and not wrong and not missing)
        add("pf1", case.catalog, 2 * hits, 2 * hits + wrong + missing)
        add("fnr", case.catalog, answer.name is None)
        add("bm25_tsa", case.catalog, bm25(case.query, case.tools) == case.right.name)
        add("bm25_params_tsa", case.catalog, bm25(case.query, case.tools, params=True) == case.right.name)
        add("first_tsa", case.catalog, first(case.tools) == case.right.name)
    calls = sum(case.right is not None for case in cases)
    row: dict[str, Any] = {"n": len(cases), "calls": calls, "too_long": sum(answer.failed == "too long" for answer in said)}
    for name, found in table.items():
        ratio = Ratio({catalog: (pair[0], pair[1]) for catalog, pair in found.items()})
        row[name], row[f"{name}_ci"] = ratio.value, ratio.interval()
    return row


def right(case: Case, answer: Said) -> bool:
    """Judge a step of an episode: the same call, or no call and an answer that says what the last result says."""
    if answer.failed:
        return False
    if case.right is None:
        return answer.name is None and set(case.says.split()) <= set(words(answer.text))
    return answer.name == case.right.name and pairs(case.right, answer.arguments)[1:] == (0, 0)
