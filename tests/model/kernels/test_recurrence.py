"""Layers with a state by compiled kernels: transformers' references by rounding, and the same bits wherever a run is cut."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from transformers.models.granitemoehybrid import modeling_granitemoehybrid as mamba2
from transformers.models.mamba import modeling_mamba as mamba
from transformers.models.qwen3_next import modeling_qwen3_next as qwen

from agentcache.model.kernels import jit, recurrence

pytestmark = [
    pytest.mark.skipif(jit.compiler() is None, reason="no compiler here"),
    pytest.mark.filterwarnings("ignore:.*is falling back to its reference"),
]
TYPES = [torch.bfloat16, torch.float16, torch.float32]
CUTS = (1, 2, 19, 83)  # after one token, within and beyond what is made ready at once
TOKENS = 100


def near(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> bool:
    """Equal up to the rounding of a stored number."""
    bound = 4 * torch.finfo(dtype).eps * max(1.0, float(expected.abs().max()))
    return float((found.float() - expected.float()).abs().max()) <= bound


def in_pieces(run: Callable[[slice, Any], torch.Tensor], state: torch.Tensor, cuts: Sequence[int] = CUTS) -> torch.Tensor:
    """The outputs of all tokens, computed up to each cut by itself; the state goes from one to the next."""
    return torch.cat([run(slice(start, stop), state) for start, stop in zip([0, *cuts], [*cuts, TOKENS])])


def rule(heads: tuple[int, int], dim: int, width: int, dtype: torch.dtype, by_channel: bool) -> dict[str, torch.Tensor]:
    """Random rows for a delta rule with so many heads of keys, and of values."""
    torch.manual_seed(dim + width)
    q, k = (torch.randn(TOKENS, heads[0], dim).to(dtype) for _ in range(2))
    g = -torch.rand(TOKENS, heads[1], dim) if by_channel else -torch.rand(TOKENS, heads[1])
    return {"q": q, "k": k, "v": torch.randn(TOKENS, heads[1], width).to(dtype), "g": g, "b": torch.rand(TOKENS, heads[1])}


def delta(given: dict[str, torch.Tensor], normed: bool) -> Callable[[slice, Any], torch.Tensor]:
    """The rule over some of the rows."""

    def run(rows: slice, state: Any) -> torch.Tensor:
        q, k, v, g, b = (given[name][rows] for name in "qkvgb")
        return recurrence.delta(q, k, v, g.exp(), b, state, normed)

    return run


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("heads", "dim", "width"), [((2, 2), 64, 64), ((2, 4), 32, 48), ((1, 3), 128, 32)])
def test_the_delta_rule_is_that_of_transformers(dtype: torch.dtype, heads: tuple[int, int], dim: int, width: int) -> None:
    given, state = rule(heads, dim, width, dtype, False), torch.randn(heads[1], dim, width)
    rows = [given[name][None] for name in "qkvgb"]
    kept: dict[str, Any] = {"initial_state": state[None], "output_final_state": True, "use_qk_l2norm_in_kernel": True}
    expected, left = qwen.torch_recurrent_gated_delta_rule(*rows, **kept)
    now = state.clone()
    out = delta(given, True)(slice(None), now)
    assert out.dtype == dtype
    assert near(out, expected[0], dtype)
    assert near(now, left[0], torch.float32)
    again = state.clone()
    assert torch.equal(in_pieces(delta(given, True), again), out)
    assert torch.equal(again, now)


@pytest.mark.parametrize("normed", [True, False])
def test_a_decay_may_differ_by_channel(normed: bool) -> None:
    given, state = rule((2, 2), 32, 64, torch.float32, True), torch.randn(2, 32, 64)
    given["k"] *= 0.1  # keys that are not normalised let the state grow
    rows = [given[name][None] for name in "qkvgb"]
    kept: dict[str, Any] = {"initial_state": state[None], "output_final_state": True, "use_qk_l2norm_in_kernel": normed}
    kimi = pytest.importorskip("transformers.models.kimi_linear.modeling_kimi_linear")  # came after transformers 5.16
    expected, left = kimi.recurrent_kimi_delta_attention(*rows, **kept)
    now, again = state.clone(), state.clone()
    out = delta(given, normed)(slice(None), now)
    assert near(out, expected[0], torch.float32)
    assert near(now, left[0], torch.float32)
    assert torch.equal(in_pieces(delta(given, normed), again), out)
    assert torch.equal(again, now)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("taps", "silu", "biased"), [(4, True, False), (4, True, True), (3, False, True), (2, False, False)])
def test_a_convolution_goes_on_token_by_token(dtype: torch.dtype, taps: int, silu: bool, biased: bool) -> None:
    torch.manual_seed(taps)
    x, weight = torch.randn(TOKENS, 192).to(dtype), torch.randn(192, taps).to(dtype)
    bias, activation = torch.randn(192).to(dtype) if biased else None, "silu" if silu else None
    expected = mamba2.causal_conv1d_fn(x.t()[None], weight, bias, activation)[0].t()
    out = recurrence.convolution(x, weight, bias, silu)
    assert out.dtype == dtype
    assert near(out, expected, dtype)
    state = torch.zeros(192, taps, dtype=dtype)
    one_by_one = torch.stack([recurrence.convolution_step(row, state, weight, bias, silu) for row in x])
    assert torch.equal(one_by_one, out)
    assert torch.equal(state, x[-taps:].t())


def test_a_convolution_reads_rows_with_gaps() -> None:
    x, weight = torch.randn(9, 400), torch.randn(64, 4)
    expected = recurrence.convolution(x[:, 100:164].contiguous(), weight, None, True)
    assert torch.equal(recurrence.convolution(x[:, 100:164], weight, None, True), expected)
    turned = x.t().contiguous().t()
    assert torch.equal(recurrence.convolution(turned[:, 100:164], weight, None, True), expected)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("heads", "groups", "dim", "size", "skips"), [(4, 1, 8, 32, True), (6, 2, 16, 128, False), (2, 2, 64, 160, True)])
def test_a_scan_is_that_of_transformers(dtype: torch.dtype, heads: int, groups: int, dim: int, size: int, skips: bool) -> None:
    torch.manual_seed(size)
    x, dt, a = torch.randn(TOKENS, heads, dim).to(dtype), torch.rand(TOKENS, heads), -torch.rand(heads)
    b, c = (torch.randn(TOKENS, groups, size).to(dtype) for _ in range(2))
    d, state = torch.randn(heads) if skips else None, torch.randn(heads, dim, size)
    rows = (x[None], dt[None], a, b[None], c[None])
    expected, left = mamba2.mamba2_chunk_scan(*rows, chunk_size=64, D=d, initial_states=state[None], return_final_states=True)

    def run(rows: slice, state: Any) -> torch.Tensor:
        return recurrence.scan(x[rows], dt[rows], (dt[rows] * a).exp(), b[rows], c[rows], d, state)

    now, again = state.clone(), state.clone()
    out = run(slice(None), now)
    assert near(out / 32, expected[0] / 32, torch.float32)
    assert near(now, left[0], torch.float32)
    assert torch.equal(in_pieces(run, again), out)
    assert torch.equal(again, now)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("channels", "size", "skips"), [(24, 16, True), (7, 32, False)])
def test_a_selective_scan_is_that_of_transformers(dtype: torch.dtype, channels: int, size: int, skips: bool) -> None:
    torch.manual_seed(size)
    x, dt, rates = torch.randn(TOKENS, channels).to(dtype), torch.rand(TOKENS, channels), -torch.rand(channels, size) * 8
    b, c = (torch.randn(TOKENS, size).to(dtype) for _ in range(2))
    d = torch.randn(channels) if skips else None
    wide = (x.float().t()[None], dt.t()[None], rates, b.float().t()[None], c.float().t()[None])
    expected, left = mamba.mamba_selective_scan(*wide, D=d, return_last_state=True)

    def run(rows: slice, state: Any) -> torch.Tensor:
        return recurrence.selective_scan(x[rows], dt[rows], rates, b[rows], c[rows], d, state)

    now, again = torch.zeros(channels, size), torch.zeros(channels, size)
    out = run(slice(None), now)
    assert near(out / 8, expected[0].t() / 8, torch.float32)
    assert near(now, left[0], torch.float32)
    assert torch.equal(in_pieces(run, again), out)
    assert torch.equal(again, now)


def test_what_no_kernel_takes() -> None:
    weight = torch.randn(64, 4)
    for bias in (None, torch.randn(64)):
        assert recurrence.takes_convolution(torch.randn(3, 64), weight, bias)
    for x, w in ((torch.randn(3, 60), weight[:60]), (torch.randn(0, 64), weight), (torch.randn(3, 64).half(), weight)):
        assert not recurrence.takes_convolution(x, w, None)
    for bias in (torch.randn(64).half(), torch.randn(1).expand(64), torch.randn(64, 2)[:, 0]):
        assert not recurrence.takes_convolution(torch.randn(3, 64), weight, bias)
    q, v = torch.randn(3, 2, 32), torch.randn(3, 4, 32)
    assert recurrence.takes_delta(q, v)
    for queries, values in ((q[:, :, :30], v), (q, v[:, :3]), (q, v[:, :, :30]), (q[:0], v[:0]), (q.double(), v.double())):
        assert not recurrence.takes_delta(queries, values)
    assert recurrence.takes_scan(q, 32)
    assert not recurrence.takes_scan(q, 30)
    assert not recurrence.takes_scan(q.double(), 32)
    assert not recurrence.takes_scan(q[:0], 32)
