"""A plan covers the prompt exactly once and always computes its last token."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentcache.approximate.ngram_index import Run
from agentcache.approximate.segments import ranges
from agentcache.calibration import Calibration
from agentcache.plan import Attach, Compute, make
from agentcache.store.entry import Entry
from agentcache.store.keys import Scope, as_ids
from agentcache.types import Reason

SCOPE = Scope("default", "weights")
ENTRY = Entry(b"page", SCOPE, as_ids([]), None, Entry(b"root", SCOPE, as_ids([]), None, None))


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
    assert make(10, 4, Reason.DIVERGED).steps == (Attach(0, 4), Compute(4, 10))


@st.composite
def repeats(draw: st.DrawFn) -> tuple[int, int, list[tuple[Run, frozenset[int]]]]:
    """A prompt, its prefix, and disjoint runs behind it."""
    prefix = draw(st.integers(0, 50))
    found, at = [], prefix
    for _ in range(draw(st.integers(0, 5))):
        start = at + draw(st.integers(0, 40))
        at = start + draw(st.integers(1, 90))
        source = start - draw(st.integers(-30, start))
        found.append((Run(start, at, (ENTRY,), source), draw(st.sampled_from([frozenset(), frozenset((2,)), frozenset((2, 5))]))))
    return at + draw(st.integers(1, 30)), prefix, found


@settings(derandomize=True, deadline=None, max_examples=200)
@given(repeats(), st.sampled_from([((0, 8),), ((8, 8),), ((4, 2), (20, 8)), ((0, 2), (16, 5), (40, 8))]))
def test_segments_attach_by_distance_and_cover_everything_once(
    given_: tuple[int, int, list[tuple[Run, frozenset[int]]]], steps: tuple[tuple[int, int], ...]
) -> None:
    prompt, prefix, runs = given_
    known = Calibration("x", 8, steps, 60, 1.0)
    taken, segments = ranges(runs, known)
    plan = make(prompt, prefix, Reason.DIVERGED, "", taken)
    at = 0
    for step in plan.steps:
        assert step.start == at < step.stop
        at = step.stop
    assert at == prompt
    assert isinstance(plan.steps[-1], Compute)
    assert plan.cached_tokens == prefix + sum(segment.whole_tokens for segment in segments)
    layer_of = {}
    for step in plan.steps:
        for token in range(step.start, step.stop):
            layer_of[token] = 0 if isinstance(step, Compute) else 8 if step.layers is None else step.layers
    for (run, boundaries), segment in zip(runs, segments, strict=True):
        for token in range(run.start, run.stop):
            allowed = [layer for distance, layer in steps if distance <= token - run.start and (layer == 8 or layer in boundaries)]
            assert layer_of[token] == max(allowed, default=0)
        assert segment.whole_tokens + segment.resumed_tokens + segment.halo_tokens == run.stop - run.start
        own = [step for step in plan.steps if isinstance(step, Attach) and step.run is not None and run.start <= step.start < run.stop]
        assert {step.shift for step in own} <= {run.shift}
