"""Rotary positions: every kind equals transformers within one regime, and a longer neighbour changes nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from agentcache.model.hf import HFModel
from agentcache.model.rope import Rotary
from tests import models
from tests.families import Run, differing, greedy, pack, stock_logits, tokens

WINDOW = 64
KINDS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": WINDOW},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": WINDOW,
    },
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "longrope": {
        "rope_type": "longrope",
        "factor": 8.0,
        "short_factor": [1.0 + i / 10 for i in range(8)],
        "long_factor": [2.0 + i for i in range(8)],
        "original_max_position_embeddings": WINDOW,
    },
}


def build(kind: str, family: str = "llama", **overrides: Any) -> Any:
    positions = WINDOW if kind == "dynamic" else 512
    if family == "phi3":
        overrides["original_max_position_embeddings"] = WINDOW
    return models.build(family, max_position_embeddings=positions, rope_parameters={"rope_theta": 10000.0, **KINDS[kind]}, **overrides)


def error(run: Run, stock: torch.Tensor) -> float:
    return max(float((row - stock[at]).abs().max()) for at, row in run.logits.items())


@pytest.mark.parametrize(("kind", "length"), [(k, n) for k in KINDS for n in (WINDOW, 300) if (k, n) != ("dynamic", 300)])
def test_equals_transformers_within_a_regime(kind: str, length: int) -> None:
    model, ids = build(kind), tokens(length)
    stock = stock_logits(model, ids)
    run = Run(HFModel(model), ids).chunks(40, 1, 30)
    assert error(run, stock) < 1e-4


@pytest.mark.parametrize("kind", ["linear", "yarn", "llama3", "longrope"])
def test_the_kind_matters(kind: str) -> None:
    """Otherwise the test above would pass with any frequencies."""
    ids = tokens(300)
    assert error(Run(HFModel(build("default")), ids).chunks(), stock_logits(build(kind), ids)) > 1e-2


@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_a_longer_neighbour_changes_nothing(family: str) -> None:
    model = HFModel(build("longrope", family))
    assert model.stepped is (family == "llama")
    long, short = tokens(200), tokens(60, seed=1)
    alone = Run(model, short).chunks()
    far = Run(model, long).chunks()
    assert (alone.regime, far.regime) == ("short", "long")
    packed, other = Run(model, short), Run(model, long)
    pack((other, 150))
    pack((packed, 50), (other, 40))
    for _ in range(10):
        pack((other, 1), (packed, 1))
    assert differing(alone, packed) == []
    assert differing(far, other) == []
    assert error(packed, stock_logits(model.model, short)) < 1e-4


@pytest.mark.parametrize("length", [WINDOW - 1, WINDOW, WINDOW + 1, 200])
def test_phi3_with_longrope_equals_transformers(length: int) -> None:
    model, ids = build("longrope", "phi3"), tokens(length)
    stock = stock_logits(model, ids)
    held = HFModel(model)
    assert error(Run(held, ids).chunks(30, 1), stock) < 1e-4
    assert error(Run(held, ids, regime="long" if length <= WINDOW else "short").chunks(), stock) > 1e-2  # the other set would show
    held.close()


def test_regimes() -> None:
    def rotary(kind: str) -> Rotary:
        found = HFModel(build(kind)).rotary
        assert found is not None
        return found

    for kind in ("default", "linear", "yarn", "llama3"):
        fixed = rotary(kind)
        assert (fixed.by_length, fixed.regime(1), fixed.regime(10**6), fixed.limit("")) == (False, "", "", None)
    longrope = rotary("longrope")
    assert [longrope.regime(n) for n in (1, WINDOW, WINDOW + 1, 500)] == ["short", "short", "long", "long"]
    assert (longrope.limit("short"), longrope.limit("long")) == (WINDOW, None)
    dynamic = rotary("dynamic")
    assert [dynamic.regime(n) for n in (1, WINDOW, WINDOW + 1)] == ["short", "short", None]
    assert dynamic.limit("short") == WINDOW


def test_dynamic_beyond_its_window_takes_the_stock_path() -> None:
    model = build("dynamic")
    ids = tokens(WINDOW + 30)
    expected = greedy(model, ids, 8)
    held = HFModel(model)
    assert held.context_tokens == 4 * WINDOW
    logits, state = held.stock(torch.tensor(ids), None)
    found = []
    for _ in range(8):
        found.append(int(logits.argmax()))
        logits, state = held.stock(torch.tensor(found[-1:]), state)
    assert found == expected


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_what_the_owner_ran_before_does_not_matter(kind: str) -> None:
    """Their modules keep the frequencies of the last call: a long one by the owner, or by us, must leave no trace."""
    ids, far = tokens(WINDOW), tokens(3 * WINDOW)
    model = build(kind)
    fresh = Run(HFModel(model), ids).chunks()
    before = stock_logits(model, far)
    assert differing(fresh, Run(HFModel(model), ids).chunks()) == []
    held = HFModel(model)
    if kind == "longrope":
        Run(held, far).chunks()
    Run(held, ids).chunks()
    assert torch.equal(before, stock_logits(model, far))


def test_frequencies_edited_in_place_are_noticed() -> None:
    model, ids = models.build("llama"), tokens(50)
    held = HFModel(model)
    before = Run(held, ids).chunks()
    with torch.no_grad():
        model.model.rotary_emb.inv_freq.mul_(0.5)
    after = Run(held, ids).chunks()
    assert differing(before, after)
    assert error(after, stock_logits(model, ids)) < 1e-4
