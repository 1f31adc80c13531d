"""Compiled attention: near the truth, row-pure, and nothing hidden ever counts."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from agentcache.model.attention import Attention
from agentcache.model.kernels import jit, paged_attention
from agentcache.model.numerics import probe

CPU = torch.device("cpu")
TYPES = (torch.float32, torch.bfloat16, torch.float16)
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 0.01, torch.float16: 2e-3}
if jit.compiler() is None:
    pytest.skip("nothing is compiled here", allow_module_level=True)

SHAPES = (  # kv heads, group, tokens, first position, window
    (8, 2, 1, 2900, 0),
    (4, 2, 75, 1300, 0),
    (2, 2, 17, 0, 0),
    (1, 7, 1, 700, 100),
    (3, 3, 20, 1000, 64),
    (2, 1, 1, 5, 0),
    (1, 1, 9, 508, 0),
)


def case(
    dtype: torch.dtype, heads: int, group: int, tokens: int, first: int, dim: int, width: int = 0
) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
    torch.manual_seed(dim + tokens)
    pages = (first + tokens - 1) // 512 + 1
    keys = [torch.randn(heads, dim, 512).to(dtype) for _ in range(pages)]
    values = [torch.randn(heads, 512, width or dim).to(dtype) for _ in range(pages)]
    return (torch.randn(tokens, heads * group, dim) * 1.5).to(dtype), keys, values


def run(q: torch.Tensor, keys: Any, values: Any, first: int, attn: Attention) -> torch.Tensor:
    return paged_attention.attend(q, keys, values, first, attn.scale, attn.window, attn.chunk, attn.softcap, attn.sinks, torch.empty)


def truth(q: torch.Tensor, keys: Any, values: Any, first: int, attn: Attention) -> torch.Tensor:
    """In float64, written out."""
    k, v = torch.cat(list(keys), 2).double(), torch.cat(list(values), 1).double()
    group = q.shape[1] // k.shape[0]
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    scores = torch.einsum("thd,hdj->htj", q.double(), k) * attn.scale
    if attn.softcap:
        scores = attn.softcap * (scores / attn.softcap).tanh()
    hidden = attn.hidden(first + torch.arange(len(q))[:, None], torch.arange(k.shape[2])[None])
    scores = scores.masked_fill(hidden, -math.inf)
    if attn.sinks is not None:
        scores = torch.cat((scores, attn.sinks.double()[:, None, None].expand(-1, len(q), 1)), 2)
    return torch.einsum("htj,hjd->thd", scores.softmax(-1)[..., : k.shape[2]], v)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("dim", [16, 48, 64, 80, 96, 128])
def test_it_is_near_the_truth_and_row_pure(dim: int, dtype: torch.dtype, threads: Callable[[int], None]) -> None:
    for heads, group, tokens, first, window in SHAPES:
        q, keys, values = case(dtype, heads, group, tokens, first, dim)
        attn = Attention(dim**-0.5, window)
        expected = truth(q, keys, values, first, attn)
        for count in (1, 2):
            threads(count)
            whole = run(q, keys, values, first, attn)
            assert (whole.double() - expected).abs().max() < ROUNDING[dtype] * (expected.abs().max() + 0.2)
            for start, stop in {(0, tokens), (0, 1), (tokens - 1, tokens), (tokens // 2, tokens), (tokens // 3, 2 * tokens // 3 + 1)}:
                needed = (first + stop - 1) // 512 + 1
                part = run(q[start:stop], keys[:needed], values[:needed], first + start, attn)
                assert torch.equal(part, whole[start:stop]), (heads, group, tokens, first, window, start, stop)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    "attn",
    [
        Attention(0.2, softcap=2.0),
        Attention(0.2, softcap=50.0, window=70),
        Attention(0.2, chunk=300),
        Attention(0.2, sinks=torch.tensor([0.5, -2.0, 4.0, 60.0])),
        Attention(0.2, window=40, sinks=torch.tensor([0.5, -2.0, 4.0, -90.0])),
    ],
    ids=["cap", "cap and window", "chunk", "sinks", "sinks and window"],
)
def test_caps_chunks_and_sinks_are_near_the_truth(attn: Attention, dtype: torch.dtype) -> None:
    for tokens, first, width in ((40, 580, 32), (1, 700, 32), (40, 580, 64)):
        q, keys, values = case(dtype, 2, 2, tokens, first, 32, width)
        whole = run(q, keys, values, first, attn)
        expected = truth(q, keys, values, first, attn)
        assert (whole.double() - expected).abs().max() < ROUNDING[dtype] * (expected.abs().max() + 0.2)
        plain = truth(q, keys, values, first, Attention(0.2))
        assert (whole.double() - plain).abs().max() > ROUNDING[dtype] * (expected.abs().max() + 0.2), "it changes the outcome"
        for start in range(0, tokens, 7):
            needed = (first + start) // 512 + 1
            assert torch.equal(run(q[start : start + 1], keys[:needed], values[:needed], first + start, attn)[0], whole[start])


@pytest.mark.parametrize("dtype", TYPES)
def test_it_is_no_further_from_the_truth_than_the_library(dtype: torch.dtype) -> None:
    q, keys, values = case(dtype, 4, 2, 64, 1000, 128)
    attn = Attention(128**-0.5)
    expected = truth(q, keys, values, 1000, attn)
    k, v = (torch.cat(pages, at).repeat_interleave(2, 0) for pages, at in ((keys, 2), (values, 1)))
    mask = torch.arange(k.shape[2])[None] <= 1000 + torch.arange(64)[:, None]
    stock = torch.nn.functional.scaled_dot_product_attention(q.transpose(0, 1), k.transpose(1, 2), v, attn_mask=mask)
    mine = (run(q, keys, values, 1000, attn).double() - expected).abs()
    theirs = (stock.transpose(0, 1).double() - expected).abs()
    assert mine.max() <= 4 * theirs.max()
    assert mine.mean() <= 2 * theirs.mean()


@pytest.mark.parametrize("dtype", TYPES)
def test_what_is_hidden_never_counts(dtype: torch.dtype) -> None:
    q, keys, values = case(dtype, 2, 2, 5, 600, 64)
    attn, near, large = Attention(0.125), Attention(0.125, 50), 1e30 if dtype != torch.float16 else 6e4
    before = run(q, keys, values, 600, attn)
    keys[1][:, :, 605 - 512 :] = large
    values[1][:, 605 - 512 :] = -large
    assert torch.equal(run(q, keys, values, 600, attn), before)
    window = run(q, keys, values, 600, near)
    keys[0].fill_(large)
    values[0].fill_(large)
    assert torch.equal(run(q, keys, values, 600, near), window)


@pytest.mark.parametrize("dtype", TYPES)
def test_sharp_and_equal_scores_and_what_is_not_a_number(dtype: torch.dtype) -> None:
    q, keys, values = case(dtype, 1, 1, 1, 300, 32)
    attn = Attention(32**-0.5)
    keys[0].zero_()
    mean = values[0][:, :301].double().mean(1)
    assert (run(q, keys, values, 300, attn)[0].double() - mean).abs().max() < 2e-3, "all are seen alike"
    q.fill_(8.0)
    keys[0][:, :, 17] = 8.0  # 362 ahead of the rest: one weight of 1, zeros
    assert torch.equal(run(q, keys, values, 300, attn)[0], values[0][:, 17])
    keys[0][0, 3, 40] = math.nan
    assert bool(run(q, keys, values, 300, attn).isnan().all())


@pytest.mark.parametrize("dtype", TYPES)
def test_weights_are_right_to_a_unit_or_two(dtype: torch.dtype) -> None:
    """Through attention over two slots: the second weighs exp(-x) of the first."""
    worst = 0.0
    for x in torch.linspace(0.0, 9.0, 200).tolist():
        q, keys, values = (torch.zeros(*shape, dtype=dtype) for shape in ((1, 1, 16), (1, 16, 512), (1, 512, 16)))
        q[0, 0, 0] = 1.0
        keys[0, 0, 1] = -x
        values[0, 1] = 1.0
        exact = math.exp(-float(keys[0, 0, 1].abs()))
        found = run(q, [keys], [values], 1, Attention(1.0))[0, 0, 0].item()
        worst = max(worst, abs(found / (exact / (1 + exact)) - 1))
    assert worst < 2 * torch.finfo(dtype).eps


def test_numerics_say_so() -> None:
    for dtype in TYPES:
        found = probe(dtype, CPU, (64,), 2, (32, 48))
        assert (found.compiled, found.query_rows, found.pure) == (paged_attention.takes(dtype, CPU, (32,)), 1, True)
    assert not probe(torch.float32, CPU, (64,), 2, (32, 44)).compiled
