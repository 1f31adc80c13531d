"""A plan covers the prompt exactly once and always computes its last token."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentcache.plan import Attach, Compute, make
from agentcache.types import Reason


@settings(derandomize=True, deadline=None, max_examples=100)
@given(st.integers(1, 5000), st.integers(0, 6000), st.sampled_from(Reason))
def test_covers_the_prompt_once_and_computes_the_last_token(prompt: int, prefix: int, missed: Reason) -> None:
    plan = make(prompt, prefix, missed)
    at = 0
    for step in plan.steps:
        assert step.start == at < step.stop
        at = step.stop
    assert at == prompt
    assert isinstance(plan.steps[-1], Compute)
    assert plan.cached_tokens + plan.computed_tokens == prompt
    assert plan.cached_tokens == min(prefix, prompt - 1)
    (refusal,) = plan.refusals
    assert (refusal.start, refusal.stop) == (plan.cached_tokens, prompt)


@pytest.mark.parametrize(
    ("prompt", "prefix", "missed", "said"),
    [
        (10, 0, Reason.COLD, Reason.COLD),
        (10, 4, Reason.DIVERGED, Reason.DIVERGED),
        (10, 9, Reason.DIVERGED, Reason.LAST_TOKEN),
        (10, 10, Reason.LAST_TOKEN, Reason.LAST_TOKEN),
        (1, 0, Reason.COLD, Reason.LAST_TOKEN),
        (1, 0, Reason.REUSE_OFF, Reason.REUSE_OFF),
        (10, 0, Reason.LAYER_KIND, Reason.LAYER_KIND),
    ],
)
def test_the_reason_is_the_one_that_holds(prompt: int, prefix: int, missed: Reason, said: Reason) -> None:
    assert make(prompt, prefix, missed).refusals[0].reason == said


def test_attach_names_its_source_shift_and_layers() -> None:
    assert make(10, 4, Reason.DIVERGED).steps == (Attach(0, 4, "prefix", 0, None), Compute(4, 10))
