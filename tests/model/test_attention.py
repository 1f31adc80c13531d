"""Attention over pages by the library, where nothing is compiled: near the truth in float64, its bits against themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch.nn import functional

from agentcache import kv
from agentcache.kv_spec import KVSpec
from agentcache.model import attention, numerics
from agentcache.model.attention import Attention, Batch, Part, attend, attend_gathered
from agentcache.model.kernels import paged_attention
from agentcache.model.numerics import probe

CPU = torch.device("cpu")
SHAPES = pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 4, 16), (6, 2, 32), (8, 1, 64)], ids=["mha", "gqa", "mqa"])
TYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


@pytest.fixture(autouse=True)
def one_thread(threads: Callable[[int], None], monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One thread, and nothing compiled."""
    threads(1)
    monkeypatch.setattr(paged_attention, "takes", lambda dtype, device, widths: False)
    numerics._probe.cache_clear()
    yield
    numerics._probe.cache_clear()


def case(tokens: int, heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> tuple[kv.Sequence, torch.Tensor]:
    """A sequence with random keys and values in one layer, and queries for all its positions."""
    made = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(tokens, h, dim, generator=made).to(dtype) for h in (heads, kv_heads, kv_heads))
    sequence = kv.Sequence(KVSpec(1, kv_heads, dim, dtype))
    sequence.reserve(tokens)
    sequence.write(0, 0, k, v)
    sequence.advance(tokens)
    return sequence, q


def run(sequence: kv.Sequence, q: torch.Tensor, start: int, count: int, window: int = 0) -> torch.Tensor:
    spec = sequence.spec
    part = Part(sequence, start, count)
    batch = Batch([part], count, probe(spec.dtype, CPU, (64,), spec.kv_heads, (spec.head_dim,)))
    return attend(batch, part, 0, q[start : start + count], Attention(spec.head_dim**-0.5, window))


def plain(sequence: kv.Sequence, q: torch.Tensor, window: int, dtype: torch.dtype) -> torch.Tensor:
    """Softmax attention of all positions with everything materialised; in float64 the truth, else torch's own kernel."""
    k, v = sequence.read(0)
    at = torch.arange(len(q))
    seen = (at[None] <= at[:, None]) & ((at[None] > at[:, None] - window) if window else True)
    q, k, v = (t.to(dtype).transpose(0, 1) for t in (q, *(t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))))
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=seen).transpose(0, 1)


@TYPES
@SHAPES
@pytest.mark.parametrize("window", [0, 1, 96, 513])
def test_error_against_float64(heads: int, kv_heads: int, dim: int, dtype: torch.dtype, window: int) -> None:
    sequence, q = case(580, heads, kv_heads, dim, dtype)
    truth = plain(sequence, q, window, torch.float64)
    ours = run(sequence, q, 0, 580, window).double() - truth
    stock = plain(sequence, q, window, dtype).double() - truth
    assert ours.abs().max() <= (1e-5 if dtype == torch.float32 else 4 * stock.abs().max())
    assert ours.pow(2).mean() <= max(16 * stock.pow(2).mean(), 1e-12)
    gathered = attend_gathered(Part(sequence, 300, 280), 0, q[300:], Attention(dim**-0.5, window)).double()
    assert (gathered - truth[300:]).abs().max() <= (1e-5 if dtype == torch.float32 else 4 * stock.abs().max())


@TYPES
@SHAPES
@pytest.mark.parametrize("window", [0, 96])
def test_a_row_does_not_know_its_neighbours(heads: int, kv_heads: int, dim: int, dtype: torch.dtype, window: int) -> None:
    sequence, q = case(1100, heads, kv_heads, dim, dtype)
    whole = run(sequence, q, 0, 1100, window)
    for start, count in [(0, 1), (1, 2), (510, 3), (511, 1), (512, 1), (512, 7), (700, 324), (1023, 2), (1099, 1)]:
        assert torch.equal(run(sequence, q, start, count, window), whole[start : start + count]), (start, count)


@pytest.mark.parametrize("elements", [1, 3000, 1 << 14, 1 << 30])
def test_the_size_of_a_tile_does_not_show(elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sequence, q = case(600, 6, 2, 32, torch.float32)
    whole = run(sequence, q, 560, 40)
    monkeypatch.setattr(attention, "SCORE_ELEMENTS", elements)
    assert torch.equal(run(sequence, q, 560, 40), whole)


def test_what_lies_behind_a_row_does_not_show() -> None:
    """A page that a longer reader has filled further, and stale slots, are masked to exact zeros."""
    sequence, q = case(600, 6, 2, 32, torch.float32)
    before = run(sequence, q, 540, 20)
    sequence.pages[1].keys[..., 48:] = 7.0
    sequence.pages[1].values[..., 48:, :] = -3.0
    assert torch.equal(run(sequence, q, 540, 20), before)
    sequence.pages[1].keys[..., 47] = 7.0
    assert not torch.equal(run(sequence, q, 540, 20), before)


@pytest.mark.parametrize(("score", "weighs"), [(-80.0, True), (-87.0, False), (-100.0, False), (float("-inf"), False)])
def test_weights_are_normal_numbers_or_nothing(score: float, weighs: bool) -> None:
    """Products with subnormal numbers are slow; what is not a number must be seen all the same."""
    sequence, q = case(2, 1, 1, 16, torch.float32)
    page = sequence.pages[0]
    page.keys.zero_()
    page.keys[..., 0, 0], page.values[..., 0, :], page.values[..., 1, :] = score, 1e38, 0.0
    q[1].zero_()
    q[1, 0, 0] = 4.0
    assert bool((run(sequence, q, 1, 1) > 0).all()) == weighs
    page.keys[..., 0, 0] = float("nan")
    assert run(sequence, q, 1, 1).isnan().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("heads", "dim"), [(8, 128), (1, 64), (3, 96), (2, 32), (2, 24)])
@pytest.mark.parametrize(("tokens", "slot"), [(1, 0), (1, 511), (16, 3), (75, 100), (512, 0), (33, 479), (40, 500)])
def test_keys_and_values_go_where_they_belong_and_nowhere_else(dtype: torch.dtype, heads: int, dim: int, tokens: int, slot: int) -> None:
    torch.manual_seed(tokens)
    sequence = kv.Sequence(KVSpec(1, heads, dim, dtype))
    sequence.reserve(slot + tokens)
    for page in sequence.pages:
        page.layer_keys[0].normal_()
        page.layer_values[0].normal_()
    keys, values = (torch.randn(tokens, heads, dim).to(dtype) for _ in range(2))
    expected = [torch.cat([stored.clone() for stored in pages], at) for pages, at in _stored(sequence)]
    expected[0][:, :, slot : slot + tokens] = keys.permute(1, 2, 0)
    expected[1][:, slot : slot + tokens] = values.transpose(0, 1)
    attention.write(Part(sequence, slot, tokens), 0, keys, values)
    for (pages, at), whole in zip(_stored(sequence), expected, strict=True):
        assert torch.equal(torch.cat(pages, at), whole)


def _stored(sequence: kv.Sequence) -> list[tuple[list[torch.Tensor], int]]:
    """Keys and values of all pages, and along which dimension their slots lie."""
    return [([page.layer_keys[0] for page in sequence.pages], 2), ([page.layer_values[0] for page in sequence.pages], 1)]
