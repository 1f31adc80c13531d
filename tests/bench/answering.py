"""Models that know every right answer, or none. Holds no tests."""

from __future__ import annotations

from agentcache.bench.quality_cases import Case
from agentcache.bench.quality_score import Said


def right_answer(case: Case) -> Said:
    """What a perfect model says."""
    return Said(case.right.name, case.right.arguments) if case.right else Said(None, {}, case.says or "I have no tool for that.")


def empty_answer(case: Case) -> Said:
    return Said(None, {}, "")
