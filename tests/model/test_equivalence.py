"""Row purity: equal ids give equal bits of keys, values and logits, whatever the chunks, packs, branches, decoding or threads."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentcache.model import steps
from agentcache.model.attention import Part
from agentcache.model.hf import HFModel
from tests import models
from tests.families import DENSE, STEPPED, Run, differing, pack, tokens

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
TOKENS = 1100  # three pages, the last one private
EVERYWHERE = pytest.mark.parametrize(("name", "dtype"), [(name, dtype) for name in DENSE for dtype in (FP32, BF16)], ids=str)


@functools.cache
def miss(name: str, dtype: torch.dtype, threads: int) -> Run:
    """The reference of all tests: one sequence filled alone, in whole pages; nobody writes into its pages afterwards."""
    assert torch.get_num_threads() == threads
    family, overrides = DENSE[name]
    model = HFModel(models.build(family, dtype, **overrides))
    assert model.bitwise
    assert model.stepped is (name in STEPPED)
    run = Run(model, tokens(TOKENS)).chunks()
    return run


pytestmark = pytest.mark.usefixtures("one_thread")


@EVERYWHERE
def test_a_hit_equals_a_miss_wherever_it_starts(name: str, dtype: torch.dtype) -> None:
    whole = miss(name, dtype, 1)
    for length in (1, 511, 512, 513, 1024, TOKENS - 1):
        hit = whole.branch(length, whole.ids[: length + 40]).chunks(3, 1)
        assert differing(whole, hit) == [], f"attached {length} tokens"


@EVERYWHERE
def test_chunk_ends_do_not_matter(name: str, dtype: torch.dtype) -> None:
    whole = miss(name, dtype, 1)
    assert differing(whole, Run(whole.model, whole.ids).chunks(301, 1, 1, 2, 7, 400)) == []


@EVERYWHERE
def test_a_prefix_grown_by_decoding_is_a_prefix(name: str, dtype: torch.dtype) -> None:
    whole = miss(name, dtype, 1)
    grown = whole.branch(1010)
    for _ in range(20):
        pack((grown, 1))
    assert differing(whole, grown) == []
    assert differing(whole, grown.branch(1030).chunks()) == [], "behind decoded tokens"


@EVERYWHERE
def test_company_does_not_matter(name: str, dtype: torch.dtype) -> None:
    whole = miss(name, dtype, 1)
    for members in (2, 3, 7, 8):
        decoding = [whole.branch(1040 + i) for i in range(members - 1)]
        stranger = Run(whole.model, tokens(100, seed=members))
        for count in (33, 1, 2):
            pack(*[(run, 1) for run in decoding[1:]], (stranger, count), (decoding[0], 1))
        for run in decoding:
            assert differing(whole, run) == [], f"{members} members"
        assert differing(Run(whole.model, stranger.ids[:36]).chunks(), stranger, 36) == [], f"the stranger among {members}"


@EVERYWHERE
def test_asking_for_few_logits_changes_none(name: str, dtype: torch.dtype) -> None:
    """In the last layer only the rows go on whose logits are asked for."""
    whole = miss(name, dtype, 1)
    one, other = whole.branch(600), whole.branch(1000)
    for counts in ((70, 1), (200, 40), (100, 17)):
        pack((one, counts[0]), (other, counts[1]), last=True)
    for run, asked in ((one, {669, 869, 969}), (other, {1000, 1040, 1057})):
        assert set(run.logits) == asked
        assert differing(whole, run) == []


def test_unwanted_rows_end_below_the_last_layers_mlp(monkeypatch: pytest.MonkeyPatch) -> None:
    model = miss("qwen3", BF16, 1).model
    rows: list[int] = []
    kept, down = steps.linears, model.model.model.layers[-1].mlp.down_proj.weight
    monkeypatch.setattr(
        steps,
        "linears",
        lambda kernel, x, pairs, **more: rows.append(len(x) * any(w is down for w, _ in pairs)) or kept(kernel, x, pairs, **more),
    )
    run = Run(model, tokens(300))
    run.sequence.reserve(200)
    part = Part(run.sequence, 0, 200)
    assert len(model.forward(torch.tensor(run.ids[:200]), [part], [run.regime], [])) == 0
    assert max(rows) == 0
    model.forward(torch.tensor(run.ids[:200]), [part], [run.regime], [199, 3])
    assert 0 < max(rows) < 100


@pytest.mark.alone
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("name", ["llama_gqa", "qwen3", "mistral_window", "phi3", "smollm3"])
def test_two_threads(name: str, dtype: torch.dtype, threads: Callable[[int], None]) -> None:
    threads(2)
    whole = miss(name, dtype, 2)
    beside = Run(whole.model, tokens(50, seed=3))
    hit = whole.branch(700)
    pack((hit, 37), (beside, 9))
    assert differing(whole, hit.chunks(5, 1, 130, 1)) == []
    decoding = [whole.branch(1040 + i) for i in range(7)]
    for _ in range(2):
        pack(*[(run, 1) for run in decoding])
    assert [differing(whole, run) for run in decoding] == [[]] * 7


@pytest.mark.parametrize("name", ["llama_gqa", "qwen3", "phi3"])
def test_half_precision(name: str) -> None:
    whole = miss(name, FP16, 1)
    beside = Run(whole.model, tokens(50, seed=3))
    hit = whole.branch(513)
    pack((hit, 37), (beside, 9))
    assert differing(whole, hit.chunks(5, 1, 1, 130)) == []


def test_real_widths() -> None:
    """Matrices as wide as small real models have: libraries choose other code for them."""
    sizes = {"hidden_size": 896, "intermediate_size": 2432, "num_attention_heads": 14, "num_key_value_heads": 2, "num_hidden_layers": 2}
    for dtype in (FP32, BF16):
        model = HFModel(models.build("qwen2", dtype, **sizes))
        whole = Run(model, tokens(600)).chunks()
        hit = whole.branch(513)
        pack((hit, 3), (Run(model, tokens(60, seed=1)), 39), (whole.branch(590), 1))
        assert differing(whole, hit.chunks(1, 1, 17)) == []


@pytest.mark.alone
@pytest.mark.parametrize(
    ("family", "width", "act", "count"),
    [
        ("qwen2", 683, "silu", 1),
        ("qwen2", 1000, "silu", 1),
        ("qwen2", 1536, "silu", 6),
        ("olmo2", 1536, "silu", 6),
        ("llama", 40, "gelu_pytorch_tanh", 3),
    ],
)
def test_activations_take_whole_vectors(family: str, width: int, act: str, count: int, threads: Callable[[int], None]) -> None:
    """PyTorch computes by other code what is left at the end of its vectors, and of each thread's part of them."""
    threads(count)
    model = HFModel(models.build(family, intermediate_size=width, hidden_act=act))
    whole = Run(model, tokens(600)).chunks()
    assert differing(whole, whole.branch(409).chunks(1, 1, 30, 1, 64)) == []
    assert differing(whole, Run(model, whole.ids).chunks(200, 7, 1)) == []


CHUNKS = st.lists(st.integers(1, 160), max_size=6)


@pytest.mark.parametrize("name", ["llama_gqa", "mistral_window", "granite"])
@settings(max_examples=5, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(dtype=st.sampled_from([FP32, BF16]), at=st.integers(0, TOKENS - 1), mine=CHUNKS, company=st.lists(CHUNKS, max_size=7))
def test_random_chunks_branches_and_packs(name: str, dtype: torch.dtype, at: int, mine: list[int], company: list[list[int]]) -> None:
    whole = miss(name, dtype, 1)
    at = max(at, TOKENS - 400)  # the rest is what earlier tests did
    run = whole.branch(at)
    others = [Run(whole.model, tokens(200, seed=i)) for i in range(len(company))]
    for step, size in enumerate(mine):
        members = [(o, min(c[step], o.rest)) for o, c in zip(others, company, strict=True) if step < len(c) and o.rest]
        if run.rest:
            pack(*members, (run, min(size, run.rest, 512 - sum(c for _, c in members) % 512)))
    assert differing(whole, run.chunks()) == []


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("name", STEPPED)
def test_our_layers_equal_transformers_modules(name: str, dtype: torch.dtype) -> None:
    stepped = miss(name, dtype, 1)
    family, overrides = DENSE[name]
    generic = HFModel(models.build(family, dtype, **overrides))
    generic._shape = None
    assert not generic.stepped
    run = Run(generic, stepped.ids[:700]).chunks(130, 1, 1, 7)
    assert differing(stepped, run) == []
    generic.close()


def test_the_comparison_can_fail() -> None:
    """Another token at the start must show in every layer's later keys, values and logits."""
    whole = miss("llama_gqa", FP32, 1)
    other = Run(whole.model, [(whole.ids[0] + 1) % 600, *whole.ids[1:40]]).chunks()
    other.ids[0] = whole.ids[0]
    assert {d.split(" from")[0] for d in differing(whole, other)} >= {f"{k} of layer {i}" for k in ("keys", "values") for i in range(3)}
