"""Rotary positions: every kind equals transformers within one regime, and a longer neighbour changes nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.models.phi3.modeling_phi3 import apply_rotary_pos_emb as apply_partial

from agentcache.model.hf import HFModel
from agentcache.model.rope import Rotary, turn
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
        assert (fixed.by_length, fixed.regime(1), fixed.regime(10**6)) == (False, "", "")
    longrope = rotary("longrope")
    assert [longrope.regime(n) for n in (1, WINDOW, WINDOW + 1, 500)] == ["short", "short", "long", "long"]
    dynamic = rotary("dynamic")
    assert [dynamic.regime(n) for n in (1, WINDOW, WINDOW + 1)] == ["short", "short", None]


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


def _exchanged(model: Any) -> None:
    model.model.rotary_emb = type(model.model.rotary_emb)(
        models.build("llama", rope_parameters={"rope_theta": 50.0, **KINDS["linear"]}).config
    )


def _patched(model: Any) -> None:
    inner = model.model.rotary_emb.forward
    model.model.rotary_emb.forward = lambda *args, **named: tuple(table * 0.7 for table in inner(*args, **named))


@pytest.mark.parametrize("family", ["llama", "granite"])
@pytest.mark.parametrize("change", [_exchanged, _patched])
def test_another_rotary_module_counts_from_then_on(change: Any, family: str) -> None:
    model, ids = models.build(family), tokens(50)
    held = HFModel(model)
    before = Run(held, ids).chunks()
    change(model)
    after = Run(held, ids).chunks()
    assert differing(before, after)
    assert error(after, stock_logits(model, ids)) < 1e-4


# -- re-indexing: keys that were computed at one place, used at another ---------------------------------------------------

FAR = 120_000


def rotary(kind: str, family: str = "llama", dtype: torch.dtype = torch.float32, **overrides: Any) -> Rotary:
    model = models.build(family, max_position_embeddings=131_072, rope_parameters={"rope_theta": 10000.0, **KINDS[kind]}, **overrides)
    return Rotary(model.get_decoder().rotary_emb, model.config, dtype, torch.device("cpu"))


def at(table: Rotary, raw: torch.Tensor, start: int, regime: str = "") -> torch.Tensor:
    """Raw keys [heads, tokens, head_dim] as a model has them at positions from `start` on, by transformers' own functions."""
    cos, sin = (t[start : start + raw.shape[1]] for t in table.table(regime, start + raw.shape[1]))
    return apply_partial(raw[None], raw[None], cos[None], sin[None])[1][0]


@pytest.mark.parametrize("kind", ["default", "linear", "yarn", "llama3", "longrope"])
@pytest.mark.parametrize(("source", "target"), [(0, 50), (50, 0), (7, FAR), (FAR, 3), (60_000, 60_001), (119_000, 120_500)])
def test_moved_keys_are_those_of_their_new_place(kind: str, source: int, target: int) -> None:
    table, regime = rotary(kind), "long" if kind == "longrope" else ""
    raw = torch.randn(2, 40, table.dims, generator=torch.Generator().manual_seed(source))
    here, there = (at(table, raw, place, regime=regime) for place in (source, target))
    moved = turn(here.transpose(1, 2), *table.turns(regime, source, target, 40)).transpose(1, 2)
    assert float((moved - there).abs().max()) <= 2e-6 * float(there.abs().max())
    if source != target + 1 and target != source + 1:
        assert float((here - there).abs().max()) > 0.1


def test_ideal_angles_would_not_do() -> None:
    """Otherwise the test above would pass with the textbook's formula."""
    table, raw = rotary("default"), torch.randn(2, 40, 16, generator=torch.Generator().manual_seed(0))
    here, there = at(table, raw, 7), at(table, raw, FAR)
    angles = (FAR - 7) * table._module.inv_freq.double()
    cos, sin = (wave.float()[:, None].expand(-1, 40) for wave in (angles.cos(), angles.sin()))
    moved = turn(here.transpose(1, 2), cos, sin).transpose(1, 2)
    assert float((moved - there).abs().max()) > 1e-3


def test_what_is_not_rotated_stays() -> None:
    table = rotary("default", "phi3", original_max_position_embeddings=131_072, head_dim=16, partial_rotary_factor=0.5)
    raw = torch.randn(2, 40, 16, generator=torch.Generator().manual_seed(1))
    here, there = at(table, raw, 5), at(table, raw, 9000)
    moved = turn(here.transpose(1, 2), *table.turns("", 5, 9000, 40)).transpose(1, 2)
    assert table.dims < 16
    assert torch.equal(moved[..., table.dims :], raw[..., table.dims :])
    assert float((moved - there).abs().max()) <= 2e-6 * float(there.abs().max())


def test_in_16_bits_the_models_own_rounded_tables_decide() -> None:
    table, exact = rotary("default", dtype=torch.bfloat16), rotary("default")
    raw = torch.randn(2, 40, 16, generator=torch.Generator().manual_seed(3)).bfloat16()
    here, there = at(table, raw, 5), at(table, raw, 9000)
    errors = []
    for tables in (table, exact):
        moved = turn(here.transpose(1, 2), *tables.turns("", 5, 9000, 40)).transpose(1, 2)
        errors.append(float((moved.float() - there.float()).pow(2).mean().sqrt()))
    assert errors[0] < errors[1], "nearer than with angles that the model itself does not use"
    assert errors[0] < 6e-3


def test_keys_turn_back_to_what_they_were() -> None:
    table, raw = rotary("llama3"), torch.randn(2, 40, 16, generator=torch.Generator().manual_seed(4))
    there = turn(raw.transpose(1, 2), *table.turns("", 3, 70_000, 40))
    back = turn(there, *table.turns("", 70_000, 3, 40)).transpose(1, 2)
    assert float((back - raw).abs().max()) <= 2e-6 * float(raw.abs().max())
