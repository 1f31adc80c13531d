"""Compiled kernels in the place of transformers' references: in packed forwards only, and only while the owner changes nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from agentcache import kv
from agentcache.bench import families
from agentcache.model import behaviour, mixer_kernels, recurrent
from agentcache.model.hf import HFModel
from agentcache.model.kernels import jit, recurrence
from agentcache.model.kernels.dispatch import RowPureLinear
from tests.families import Run, stock_logits, tokens

pytestmark = [
    pytest.mark.skipif(jit.compiler() is None, reason="no compiler here"),
    pytest.mark.filterwarnings("ignore:.*is falling back to its reference"),
    pytest.mark.usefixtures("one_thread"),
]
FAMILIES = [
    "bailing_hybrid", "bamba", "falcon_h1", "granitemoehybrid", "kimi_linear", "lfm2", "mamba2", "nemotron_h", "olmo_hybrid",
    "qwen3_5_text", "qwen3_next", "zamba2",
]  # fmt: skip


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels that ran."""
    ran: list[str] = []

    def noted(name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *given, **named: ran.append(name) or kernel(*given, **named)

    for name in ("delta", "convolution", "convolution_step", "scan", "selective_scan"):
        monkeypatch.setattr(recurrence, name, noted(name, getattr(recurrence, name)))
    return ran


def mixers(model: Any) -> list[Any]:
    """The modules of a model whose forward is exchanged."""
    return [module for module in model.modules() if behaviour.has_our_forward(module)]


def running(held: HFModel, ids: list[int]) -> Run:
    """A sequence with a state of its own."""
    run = Run(held, ids)
    run.sequence = kv.Sequence(run.sequence.spec, state=held.new_state())
    return run


@pytest.mark.parametrize("family", FAMILIES)
def test_kernels_compute_what_references_do(family: str, calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = families.build(family), tokens(140, vocab=100)

    def logits() -> torch.Tensor:
        held = HFModel(model)
        assert held.bitwise
        run = running(held, ids).chunks(64, 64, 1, 1)
        held.close()
        return torch.stack([row for _, row in sorted(run.logits.items())])

    found = logits()
    assert {"convolution", "convolution_step"} <= set(calls)
    assert not mixers(model)
    calls.clear()
    monkeypatch.setattr(mixer_kernels, "install", lambda _: False)
    expected = logits()
    assert not calls
    assert float((found - expected).abs().max()) < 1e-3 * float(expected.abs().max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["jamba", "mamba", "falcon_mamba"])
def test_a_selective_scan_goes_on_where_its_reference_starts_anew(family: str, dtype: torch.dtype, calls: list[str]) -> None:
    model, ids = families.build(family, dtype), tokens(140, vocab=100)
    expected, held = stock_logits(model, ids), HFModel(model)
    assert held.support.paged
    assert held.support.packs_pieces
    calls.clear()
    run = running(held, ids).chunks(64, 64, 1, 1)
    assert calls.count("selective_scan") == 5 * len(mixers(model))
    found = torch.stack([row for _, row in sorted(run.logits.items())])
    alike = torch.cosine_similarity(found, expected, dim=-1)
    assert float(alike.min() if dtype == torch.float32 else alike.median()) > 1 - (1e-6 if dtype == torch.float32 else 1e-3)  # experts tie
    held.close()


@pytest.mark.parametrize("family", ["qwen3_5_text", "bamba", "lfm2", "jamba"])
def test_compiled_layers_run_once_and_note_states_amid_rows(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    held, given, ran = HFModel(families.build(family)), recurrent.RecurrentState.update_conv_state, []
    monkeypatch.setattr(recurrent.RecurrentState, "update_conv_state", lambda *some, **named: ran.append(1) or given(*some, **named))

    def checkpoints(*sizes: int) -> list[torch.Tensor | None]:
        run, cuts = running(held, tokens(140, vocab=100)), (1, 2, 70, 130)
        run.sequence.cuts, run.sequence.marks = cuts, frozenset(cuts)
        known = run.chunks(*sizes).sequence.pages[0].checkpoints
        assert sorted(known) == [*cuts]
        return [state for at in cuts for state in known[at].states]

    whole = checkpoints(140)
    assert len(ran) == len(mixers(held.model)) > 0
    for one, other in zip(whole, checkpoints(1, 1, 68, 60), strict=True):
        assert one is other is None or (one is not None and other is not None and torch.equal(one, other))
    held.close()


def test_states_that_no_kernel_noted_make_no_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    held = HFModel(families.build("bamba"))
    monkeypatch.setattr(recurrence, "takes_scan", lambda *_: False)
    run = running(held, tokens(140, vocab=100))
    run.sequence.cuts, run.sequence.marks = (70,), frozenset({70, 140})
    assert [*run.chunks(140).sequence.pages[0].checkpoints] == [140]
    held.close()


def test_the_owners_calls_run_the_references(calls: list[str]) -> None:
    model, ids = families.build("qwen3_next"), tokens(70, vocab=100)
    expected, held = stock_logits(model, ids), HFModel(model)
    calls.clear()
    assert torch.equal(stock_logits(model, ids), expected)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        next(iter(twin.parameters())).zero_()
    assert not torch.equal(stock_logits(twin, ids), expected)  # a copy runs its own weights
    assert not calls
    held.close()


@pytest.mark.parametrize("what", ["reference", "helper", "class"])
def test_a_patch_is_not_passed_over(what: str, calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.qwen3_next import modeling_qwen3_next as code

    model, ids, seen = families.build("qwen3_next"), tokens(70, vocab=100), []
    held = HFModel(model)
    owner: Any = {"class": code.Qwen3NextGatedDeltaNet}.get(what, code)
    name = {"reference": "torch_chunk_gated_delta_rule", "helper": "apply_mask_to_padding_states", "class": "forward"}[what]
    given = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *some, **named: seen.append(name) or given(*some, **named))
    calls.clear()
    running(held, ids).chunks(64)
    assert seen
    assert not calls
    held.close()


def test_a_patched_class_gets_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    model = families.build("qwen3_next")
    kind = next(type(module) for module in model.modules() if "DeltaNet" in type(module).__name__)

    def forward(self: Any, *some: Any, **named: Any) -> Any:
        return given(self, *some, **named)

    given = kind.forward
    monkeypatch.setattr(kind, "forward", forward)
    mixer_kernels._with_kernels.cache_clear()
    held = HFModel(model)
    assert not mixers(model)
    held.close()
    mixer_kernels._with_kernels.cache_clear()


def test_two_engines_share_one_models_modules() -> None:
    model = families.build("qwen3_5_text")
    one, other = HFModel(model), HFModel(model)
    count = len(mixers(model))
    one.close()
    assert count == len(mixers(model)) > 0
    other.close()
    assert not mixers(model)


def test_a_forward_of_the_owner_stays() -> None:
    model = families.build("qwen3_5_text")
    held = HFModel(model)
    module = mixers(model)[0]
    module.forward = own = lambda *some, **named: None
    held.close()
    assert module.forward is own
    assert not mixers(model)


@pytest.mark.parametrize("outs", [256, 250])
def test_a_weight_times_columns_sees_none_beside_another(outs: int) -> None:
    weight, x = torch.nn.Parameter(torch.randn(outs, 160)), torch.randn(1, 160, 70)
    with torch.no_grad(), RowPureLinear("onednn", 2):
        whole, one_by_one = weight @ x, torch.cat([weight @ column for column in x.split(1, -1)], -1)
    assert torch.equal(whole, one_by_one)
    assert torch.allclose(whole, (weight @ x).detach(), atol=1e-4)


def test_keys_of_another_type_are_left_to_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixer_kernels.running, "mixer", (None, 0), raising=False)
    q, v, rates = torch.ones(1, 3, 2, 32), torch.ones(1, 3, 2, 32), torch.zeros(1, 3, 2)
    assert mixer_kernels._delta(q, q, v, rates, rates) is not None
    assert mixer_kernels._delta(q, q.bfloat16(), v, rates, rates) is None
