"""Baselines of tool choice that need no model: BM25 over names and descriptions, the same with parameters, and the first tool.

Word overlap can solve many single requests, so these stand beside each figure of `python -m benchmarks.quality`.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from agentcache.bench.quality_cases import Case, Plain, words
from agentcache.bench.quality_score import Tally

BASELINES = ("bm25_tsa", "bm25_params_tsa", "first_tsa")


def baselines(cases: Sequence[Case]) -> dict[str, Any]:
    """The tool selection accuracy of each over the requests that a tool fits, with intervals."""
    tally = Tally(BASELINES)
    for case in cases:
        if case.right is not None:
            tally.add("bm25_tsa", case.catalog, bm25(case.query, case.tools) == case.right.name)
            tally.add("bm25_params_tsa", case.catalog, bm25(case.query, case.tools, params=True) == case.right.name)
            tally.add("first_tsa", case.catalog, first(case.tools) == case.right.name)
    return tally.row()


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
