"""Experts in packed forwards: bits of a token do not depend on the tokens beside it, and the sum is the one that transformers computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

from agentcache.bench import families
from agentcache.model import experts
from agentcache.model.hf import HFModel
from agentcache.model.kernels.dispatch import RowPureLinear
from tests.families import Run, differing, pack, stock_logits, tokens

# alike, transposed with biases, of other layouts, chosen by sigmoids in groups, beside a shared one with a sigmoid of its own
KINDS = ["mixtral", "gpt_oss", "granitemoe", "deepseek_v3", "glm4_moe", "qwen2_moe"]
NAMED = [functional.sigmoid, functional.silu, functional.gelu, functional.softplus]


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", KINDS)
def test_bits_do_not_depend_on_the_tokens_beside(family: str, dtype: torch.dtype) -> None:
    held = HFModel(families.build(family, dtype))
    assert held.bitwise
    whole = Run(held, tokens(180)).chunks()
    assert differing(whole, Run(held, whole.ids).chunks(1, 63, 2, 37)) == []
    for count in (1, 2, 7):
        run, beside = whole.branch(90 + count), Run(held, tokens(60, count))
        for _ in range(6):
            pack((beside, count), (run, 1))
        assert differing(whole, run) == [], f"beside {count}"
    held.close()


@pytest.mark.parametrize("before", ["eager", "grouped_mm", "batched_mm"])
@pytest.mark.parametrize("family", KINDS)
def test_the_sum_is_the_one_of_transformers(family: str, before: str) -> None:
    model, ids = families.build(family), tokens(70)
    model.set_experts_implementation(before)
    expected = stock_logits(model, ids)
    held = HFModel(model)
    assert model.config._experts_implementation == f"agentcache_{before}"
    found = Run(held, ids).chunks()
    torch.testing.assert_close(
        torch.stack([found.logits[at] for at in range(70)]), expected, rtol=0, atol=1e-4 * float(expected.abs().max())
    )
    assert torch.equal(stock_logits(model, ids), expected), "the owner's calls go on as before"
    held.close()
    assert model.config._experts_implementation == before


def test_experts_see_no_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    product = experts._product

    def counted(module: Any, name: str, expert: int, x: torch.Tensor) -> torch.Tensor:
        seen.append(len(x))
        return product(module, name, expert, x)

    held = HFModel(families.build("gpt_oss"))
    assert held.numerics is not None
    monkeypatch.setattr(experts, "_product", counted)
    Run(held, tokens(9)).chunks(8)
    seen.clear()
    Run(held, tokens(1)).chunks()
    chosen = held.config.num_experts_per_tok * held.config.num_hidden_layers
    assert seen == [1] * 2 * chosen  # none for the padding of the forward
    held.close()


def test_experts_that_the_owner_exchanges_are_ours_again() -> None:
    held = HFModel(families.build("mixtral"))
    before = Run(held, tokens(30)).chunks()
    held.model.set_experts_implementation("batched_mm")
    assert differing(before, Run(held, before.ids).chunks()) == []
    held.close()


def test_experts_without_the_interface_promise_no_bits() -> None:
    for family in ("llama4_text", "jetmoe", "longcat_flash"):
        held = HFModel(families.build(family))
        assert (held.support.paged, held.bitwise) == (True, False)
        held.close()


@pytest.mark.parametrize("function", [torch.sigmoid, torch.Tensor.sigmoid, *NAMED])
def test_a_number_alone_has_the_bits_of_many(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = torch.randn(999, 1, generator=torch.Generator().manual_seed(2)) * 3
    with torch.inference_mode(), RowPureLinear("aten"):
        assert torch.equal(torch.cat([function(row) for row in x.split(1)]), function(x))
        assert function(x[:, 0]).shape == (999,)
