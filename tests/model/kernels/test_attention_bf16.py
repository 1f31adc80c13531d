"""Attention compiled for processors that multiply pairs of bf16 numbers: near the truth, row-pure, and nothing hidden ever counts."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from agentcache.model.kernels import attention_bf16, jit
from agentcache.model.numerics import probe

CPU = torch.device("cpu")
if not jit.multiplies_pairs():
    pytest.skip("this processor has no products of bf16 pairs, or has matrix units", allow_module_level=True)

SHAPES = (  # kv heads, group, tokens, first position, window
    (8, 2, 1, 2900, 0),
    (4, 2, 75, 1300, 0),
    (2, 2, 17, 0, 0),
    (1, 7, 1, 700, 100),
    (3, 3, 20, 1000, 64),
    (2, 1, 1, 5, 0),
    (1, 1, 9, 508, 0),
)


def case(heads: int, group: int, tokens: int, first: int, dim: int) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
    torch.manual_seed(dim + tokens)
    pages = (first + tokens - 1) // 512 + 1
    keys = [torch.randn(heads, dim, 512).bfloat16() for _ in range(pages)]
    values = [torch.randn(heads, 512, dim).bfloat16() for _ in range(pages)]
    return (torch.randn(tokens, heads * group, dim) * 1.5).bfloat16(), keys, values


def run(q: torch.Tensor, keys: Any, values: Any, first: int, window: int) -> torch.Tensor:
    return attention_bf16.attend(q, keys, values, first, q.shape[-1] ** -0.5, window, torch.empty)


def truth(q: torch.Tensor, keys: Any, values: Any, first: int, window: int) -> torch.Tensor:
    """In float64, written out."""
    k, v = torch.cat(list(keys), 2).double(), torch.cat(list(values), 1).double()
    group = q.shape[1] // k.shape[0]
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    scores = torch.einsum("thd,hdj->htj", q.double(), k) * q.shape[-1] ** -0.5
    positions, slots = first + torch.arange(len(q))[:, None], torch.arange(k.shape[2])[None]
    hidden = slots > positions
    if window:
        hidden |= slots <= positions - window
    return torch.einsum("htj,hjd->thd", scores.masked_fill(hidden, -math.inf).softmax(-1), v)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("dim", [16, 48, 64, 80, 96, 128])
def test_it_is_near_the_truth_and_row_pure(dim: int, count: int, threads: Callable[[int], None]) -> None:
    threads(count)
    for heads, group, tokens, first, window in SHAPES:
        q, keys, values = case(heads, group, tokens, first, dim)
        whole = run(q, keys, values, first, window)
        expected = truth(q, keys, values, first, window)
        assert (whole.double() - expected).abs().max() < 0.01 * expected.abs().max() + 0.002
        for start, stop in {(0, tokens), (0, 1), (tokens - 1, tokens), (tokens // 2, tokens), (tokens // 3, 2 * tokens // 3 + 1)}:
            needed = (first + stop - 1) // 512 + 1
            part = run(q[start:stop], keys[:needed], values[:needed], first + start, window)
            assert torch.equal(part, whole[start:stop]), (heads, group, tokens, first, window, start, stop)


def test_it_is_no_further_from_the_truth_than_the_library() -> None:
    q, keys, values = case(4, 2, 64, 1000, 128)
    expected = truth(q, keys, values, 1000, 0)
    k, v = (torch.cat(pages, at).repeat_interleave(2, 0) for pages, at in ((keys, 2), (values, 1)))
    mask = torch.arange(k.shape[2])[None] <= 1000 + torch.arange(64)[:, None]
    stock = torch.nn.functional.scaled_dot_product_attention(q.transpose(0, 1), k.transpose(1, 2), v, attn_mask=mask)
    mine = (run(q, keys, values, 1000, 0).double() - expected).abs()
    theirs = (stock.transpose(0, 1).double() - expected).abs()
    assert mine.max() <= 4 * theirs.max()
    assert mine.mean() <= 1.5 * theirs.mean()


def test_what_is_hidden_never_counts() -> None:
    q, keys, values = case(2, 2, 5, 600, 64)
    before = run(q, keys, values, 600, 0)
    keys[1][:, :, 605 - 512 :] = 1e30
    values[1][:, 605 - 512 :] = -1e30
    assert torch.equal(run(q, keys, values, 600, 0), before)
    window = run(q, keys, values, 600, 50)
    keys[0].fill_(1e30)
    values[0].fill_(1e30)
    assert torch.equal(run(q, keys, values, 600, 50), window)


def test_sharp_and_equal_scores_and_what_is_not_a_number() -> None:
    q, keys, values = case(1, 1, 1, 300, 32)
    keys[0].zero_()
    mean = values[0][:, :301].double().mean(1)
    assert (run(q, keys, values, 300, 0)[0].double() - mean).abs().max() < 2e-3, "all are seen alike"
    q.fill_(8.0)
    keys[0][:, :, 17] = 8.0  # 362 ahead of the rest: one weight of 1, zeros
    assert torch.equal(run(q, keys, values, 300, 0)[0], values[0][:, 17])
    keys[0][0, 3, 40] = math.nan
    assert bool(run(q, keys, values, 300, 0).isnan().all())


def test_weights_are_right_to_a_unit_or_two() -> None:
    """Through attention over two slots: the second weighs exp(-x) of the first."""
    worst = 0.0
    for x in torch.linspace(0.0, 20.0, 200).tolist():
        q, keys, values = torch.zeros(1, 1, 16).bfloat16(), [torch.zeros(1, 16, 512).bfloat16()], [torch.zeros(1, 512, 16).bfloat16()]
        q[0, 0, 0] = 1.0
        keys[0][0, 0, 1] = -x
        values[0][0, 1] = 1.0
        exact = math.exp(-float(keys[0][0, 0, 1].abs()))
        found = attention_bf16.attend(q, keys, values, 1, 1.0, 0, torch.empty)[0, 0, 0].item()
        worst = max(worst, abs(found / (exact / (1 + exact)) - 1))
    assert worst < 2**-7, "two roundings to bf16"


def test_numerics_say_so() -> None:
    found = probe(torch.bfloat16, CPU, (64,), 2, 32)
    assert (found.pairs, found.query_rows, found.pure) == (True, 1, True)
    assert not probe(torch.float32, CPU, (64,), 2, 32).pairs
    assert not attention_bf16.takes(torch.bfloat16, CPU, 40)
