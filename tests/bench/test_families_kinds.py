"""Kinds of layers on pages: wherever a run is cut, branched, decoded or continued, keys, values and logits are those of one whole run."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentcache.bench import families
from agentcache.checkpoints import CHECKPOINT_TOKENS
from agentcache.kv import Sequence
from agentcache.model.attention import Part
from agentcache.model.hf import HFModel
from tests.families import Run, differing, stock_logits, tokens

# kind of layer -> a family that has it, and its settings; windows and chunks are shorter and longer than the prompts below
DENSE: dict[str, tuple[str, dict[str, Any]]] = {
    "window of 5": ("gemma3_text", {"sliding_window": 5}),
    "window of 100": ("gemma3_text", {"sliding_window": 100}),
    "window of 400": ("gemma3_text", {"sliding_window": 400}),
    "soft caps": ("gemma2", {}),
    "keys of another layer": ("gemma3n_text", {}),
    "widths that differ": ("gemma4_text", {}),
    "widths that differ, keys of another layer": ("gemma4_text", {"num_kv_shared_layers": 2, "hidden_size_per_layer_input": 16}),
    "latent": ("youtu", {}),
    "some without positions": ("cohere2", {"layer_types": ["sliding_attention", "full_attention"] * 2}),
}
EXPERTS: dict[str, tuple[str, dict[str, Any]]] = {
    "sinks": ("gpt_oss", {}),
    "chunks of 40": ("llama4_text", {"attention_chunk_size": 40}),
    "latent": ("deepseek_v3", {}),
}
STATES = ("qwen3_5_text", "lfm2", "zamba2")
FEW = settings(max_examples=5, derandomize=True, deadline=None)
SIZES = st.lists(st.integers(1, 90), max_size=4)


@functools.cache
def held(family: str, changed: tuple[tuple[str, Any], ...]) -> HFModel:
    """A tiny model of a family; the tests only run it."""
    model = HFModel(families.build(family, **{key: list(value) if isinstance(value, tuple) else value for key, value in changed}))
    assert model.support.paged, model.support.why
    return model


def model_of(family: str, changed: dict[str, Any]) -> HFModel:
    """The same, from settings that may be lists."""
    return held(family, tuple((key, tuple(value) if isinstance(value, list) else value) for key, value in changed.items()))


def decoded(run: Run, count: int) -> Run:
    """So many greedy tokens more, one at a time."""
    run.chunks()
    for _ in range(count):
        run.ids.append(int(run.logits[len(run.ids) - 1].argmax()))
        run.chunks(1)
    return run


@pytest.mark.parametrize("kind", DENSE)
@FEW
@given(count=st.integers(20, 220), cuts=SIZES, at=st.integers(1, 219), seed=st.integers(0, 9), answer=st.integers(1, 5))
def test_a_dense_kind_has_one_result(kind: str, count: int, cuts: list[int], at: int, seed: int, answer: int) -> None:
    model = model_of(*DENSE[kind])
    assert model.bitwise
    whole = Run(model, tokens(count, seed)).chunks()
    expected = stock_logits(model.model, whole.ids)
    torch.testing.assert_close(
        torch.stack([whole.logits[row] for row in range(count)]), expected, rtol=0, atol=1e-3 * float(expected.abs().max())
    )
    assert differing(whole, Run(model, whole.ids).chunks(*cuts)) == [], "cut"
    at = min(at, count)
    ids = whole.ids[:at] + tokens(60, seed + 10)
    assert differing(Run(model, ids).chunks(), whole.branch(at, ids).chunks(*cuts)) == [], "branched"
    grown = decoded(Run(model, whole.ids), answer)
    grown.ids += tokens(30, seed + 20)
    assert differing(Run(model, grown.ids).chunks(), grown.chunks(*cuts)) == [], "continued after decoding"


@pytest.mark.parametrize("kind", EXPERTS)
@FEW
@given(count=st.integers(60, 220), cuts=SIZES, at=st.integers(1, 50), seed=st.integers(0, 9))
def test_a_kind_with_experts_has_one_result_but_for_rounding(kind: str, count: int, cuts: list[int], at: int, seed: int) -> None:
    model = model_of(*EXPERTS[kind])
    ids = tokens(count, seed)
    expected = stock_logits(model.model, ids)
    whole = Run(model, ids).chunks()
    for run in (whole, Run(model, ids).chunks(*cuts), whole.branch(at).chunks(*cuts)):
        off = [
            row for row, logits in run.logits.items() if float((logits - expected[row]).abs().max()) > 1e-3 * float(expected.abs().max())
        ]
        assert len(off) <= 0.1 * count, off


def pieces(model: HFModel, ids: list[int], stops: list[int], prefix: Sequence | None = None) -> tuple[Sequence, torch.Tensor]:
    """Run ids up to each stop in a forward of its own, from the beginning or after a prefix; the sequence, and the last logits [vocab]."""
    assert model.spec is not None
    sequence, done, logits = Sequence(model.spec, state=model.new_state()), 0, torch.empty(0)
    if prefix is not None:
        sequence.attach(prefix.pages, done := prefix.length)
    sequence.marks = frozenset(stops)
    for stop in stops:
        sequence.reserve(stop - done)
        part, regime = Part(sequence, done, stop - done), model.regime(stop) or ""
        logits = model.forward(torch.tensor(ids[done:stop]), [part], [regime], [stop - done - 1])
        sequence.advance(stop - done)
        done = stop
    return sequence, logits


@pytest.mark.parametrize("family", STATES)
@FEW
@given(stops=st.sets(st.integers(1, 3), min_size=1), tail=st.integers(1, 70), answer=st.integers(0, 3), seed=st.integers(0, 9))
def test_a_state_goes_on_from_its_copy(family: str, stops: set[int], tail: int, answer: int, seed: int) -> None:
    model = model_of(family, {})
    assert model.bitwise
    marks = [CHECKPOINT_TOKENS * stop for stop in sorted(stops)]
    ends = [marks[-1] + tail, *(marks[-1] + tail + more for more in range(1, answer + 1))]
    ids = tokens(ends[-1], seed)
    prefix, _ = pieces(model, ids, marks)
    for _ in range(2):  # the copy stays as it was
        hit, found = pieces(model, ids, ends, prefix)
        miss, expected = pieces(model, ids, [*marks, *ends])
        assert torch.equal(found, expected)
        assert all(torch.equal(a, b) for layer in range(hit.spec.layers) for a, b in zip(hit.read(layer), miss.read(layer), strict=True))
        assert hit.state is not None
        assert miss.state is not None
        assert all(a is b or torch.equal(a, b) for a, b in zip(hit.state.copy(), miss.state.copy(), strict=True))
