"""Compiled products compute each row by itself, in one order of additions, for every shape, type, bias and number of threads."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest
import torch

from agentcache.model.kernels import dispatch, jit, linear_compiled, linear_few, linear_library
from agentcache.model.kernels.dispatch import linear, linears

pytestmark = pytest.mark.skipif(jit.compiler() is None, reason="needs llvmlite and PyTorch's OpenMP runtime")
WAYS = [
    pytest.param(torch.float32, False, id="float32"),
    pytest.param(torch.bfloat16, False, id="bfloat16"),
    pytest.param(torch.float16, False, id="float16"),
    pytest.param(
        torch.bfloat16, True, id="pairs", marks=pytest.mark.skipif(not jit.multiplies_pairs(), reason="multiplies no pairs of bf16 numbers")
    ),
]
EXACT = {torch.float32: 2.0**-21, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-9}
ROWS = (1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 18, 19, 70)


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, pairs: bool = False) -> torch.Tensor:
    return (linear_compiled.pairs if pairs else linear_compiled.chains)(x, [(weight, bias)])[0]


def assert_rows_are_alike(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, pairs: bool) -> None:
    """Any number of rows has the bits of all of them, which are near the exact products."""
    for added in (None, bias):
        whole = product(x, weight, added, pairs)
        exact = x.double() @ weight.double().t() + (0 if added is None else added.double())
        assert (whole - exact).abs().max() <= EXACT[x.dtype] * exact.abs().max()
        for rows in ROWS:
            assert torch.equal(product(x[-rows:], weight, added, pairs), whole[-rows:]), rows


def in_order(x: torch.Tensor, weight: torch.Tensor, lanes: int, parts: bool) -> torch.Tensor:
    """One row's product as linear_few.py writes it down, number by number: fp32 products of 16-bit numbers are exact in fp64.

    parts: as linear_transposed.py does.
    """
    out = torch.full((weight.shape[0],), -0.0)
    for begin in range(0, len(x), lanes * linear_few.CHAIN):
        chains, stop = torch.zeros(weight.shape[0], lanes), min(len(x), begin + lanes * linear_few.CHAIN)
        steps = (stop - begin) // lanes
        for step in range(steps):
            at = begin + torch.arange(lanes) * steps + step if parts else begin + step * lanes + torch.arange(lanes)
            terms = x[at].double() * weight[:, at].double()
            chains = (chains.double() + terms).float()
        for lane in range(lanes):
            out = out + chains[:, lane]
    return out


@pytest.mark.parametrize("rows", [1, 4, 20])
@pytest.mark.parametrize(("dtype", "other"), [(torch.bfloat16, torch.float32), (torch.float16, torch.bfloat16)])
def test_a_bias_of_another_type_is_refused_or_added(dtype: torch.dtype, other: torch.dtype, rows: int) -> None:
    weight, bias = torch.nn.Parameter(torch.ones(256, 512, dtype=dtype), requires_grad=False), torch.full((256,), 8.0, dtype=other)
    made = None
    with suppress(RuntimeError):  # PyTorch's, or oneDNN's, which takes one of fp32 where it has code for bf16
        made = linear("upcast", torch.ones(rows, 512, dtype=dtype), weight, bias)
    assert made is None or torch.equal(made, torch.full((rows, 256), 520.0, dtype=dtype))


@pytest.mark.parametrize("shape", [(512,), (1, 512), (2, 3, 512)])
def test_rows_may_stand_in_any_shape(shape: tuple[int, ...]) -> None:
    x, weight = torch.ones(shape), torch.ones(256, 512)
    assert torch.equal(linear("onednn", x, weight), torch.nn.functional.linear(x, weight))


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize(("dtype", "pairs"), WAYS)
@pytest.mark.parametrize(("outs", "ins"), [(64, 64), (896, 896), (128, 2048), (192, 3072), (64, 4864), (1024, 1024)])
def test_any_rows_have_the_bits_of_many(
    outs: int, ins: int, dtype: torch.dtype, pairs: bool, count: int, threads: Callable[[int], None]
) -> None:
    threads(count)
    torch.manual_seed(outs)
    weight, bias, x = torch.randn(outs, ins).to(dtype), torch.randn(outs).to(dtype), torch.randn(512, ins).to(dtype)
    assert_rows_are_alike(x, weight, bias, pairs)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize(("dtype", "pairs"), WAYS)
@pytest.mark.parametrize(("outs", "ins"), [(64, 64), (896, 896), (64, 4864), (2176, 320)])
def test_any_rows_times_a_transposed_weight_have_equal_bits(
    outs: int, ins: int, dtype: torch.dtype, pairs: bool, count: int, threads: Callable[[int], None]
) -> None:
    threads(count)
    torch.manual_seed(outs)
    weight, bias, x = torch.randn(ins, outs).to(dtype).t(), torch.randn(outs).to(dtype), torch.randn(70, ins).to(dtype)
    assert linear_compiled.takes(weight)
    assert_rows_are_alike(x, weight, bias, pairs)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("dtype", "pairs"), WAYS)
@pytest.mark.parametrize("outs", [16, 80, 144])
def test_outputs_of_no_whole_tile(outs: int, dtype: torch.dtype, pairs: bool, transposed: bool) -> None:
    torch.manual_seed(outs)
    weight, bias, x = torch.randn(192, 1024).to(dtype), torch.randn(192).to(dtype), torch.randn(70, 1024).to(dtype)
    weight = weight.t().contiguous().t() if transposed else weight
    for added in (None, bias):
        whole = product(x, weight, added, pairs)[:, :outs]
        for rows in ROWS:
            assert linear_compiled.takes(weight[:outs])
            assert torch.equal(product(x[-rows:], weight[:outs], None if added is None else added[:outs], pairs), whole[-rows:])


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("ins", [64, 1024, 4864])
def test_products_add_up_in_the_order_written_down(ins: int, dtype: torch.dtype, transposed: bool) -> None:
    found = jit.compiler()
    assert found is not None
    weight, x = torch.randn(64, ins).to(dtype), torch.randn(ins).to(dtype)
    lying = weight.t().contiguous().t() if transposed else weight
    assert torch.equal(product(x[None], lying)[0], in_order(x, weight, found.lanes, transposed).to(dtype))


def test_another_order_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the comparison of few rows with many relies on."""
    x, weight = torch.randn(20, 2048), torch.randn(64, 2048)
    whole, found = product(x, weight), jit.compiler()
    assert found is not None
    monkeypatch.setattr(found, "_compiled", {})
    monkeypatch.setattr(linear_few, "CHAIN", 64)
    assert not torch.equal(product(x[:2], weight), whole[:2])


def test_several_products_of_the_same_rows() -> None:
    weights = [*(torch.randn(outs, 256) for outs in (128, 64, 64)), torch.randn(256, 64).t(), torch.randn(64, 256)]
    biases = [torch.randn(128), None, torch.randn(64), torch.randn(64), None]
    for rows in (2, 40):
        x = torch.randn(rows, 256)
        for found, weight, bias in zip(linears("onednn", x, list(zip(weights, biases))), weights, biases):
            assert torch.equal(found, product(x, weight, bias))
            assert found.is_contiguous()  # heads are normalised in one pass where they lie together


@pytest.mark.parametrize("kernel", ["onednn", "upcast"])
def test_what_is_not_compiled_runs_by_the_library(kernel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    dtype = torch.bfloat16 if kernel == "upcast" else torch.float32
    weight, x = torch.randn(128, 1024).to(dtype), torch.randn(30, 1024).to(dtype)
    assert linear_compiled.takes(weight)
    assert dispatch.compiled(kernel, weight, dtype) is False
    for other in (weight[:100], weight[:, :1000], weight.t()[::2], weight.t()[:, :100], weight.t().to(torch.int8), weight.double()):
        assert not linear_compiled.takes(other)
    for odd in (weight[:100], weight[:, :1000].contiguous()):
        mine = x[:, : odd.shape[1]].contiguous()
        expected = linear_library.product_of_library(mine.float(), odd.float(), None).to(dtype)
        assert dispatch.compiled(kernel, odd, dtype) is None
        assert torch.equal(linear(kernel, mine, odd), expected)
        # what one weight is multiplied by does not depend on those beside it
        both = linears(kernel, mine, [(odd, None), (weight[:, : odd.shape[1]], None)])
        assert torch.equal(both[0], expected)
    monkeypatch.setattr(jit, "compiler", lambda: None)
    assert torch.equal(linear(kernel, x, weight), linear_library.product_of_library(x.float(), weight.float(), None).to(dtype))


@pytest.mark.parametrize("kernel", ["onednn", "upcast", "aten"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_an_expert_without_rows_has_a_product(kernel: dispatch.Kernel, dtype: torch.dtype) -> None:
    assert linear(kernel, torch.empty(0, 64, dtype=dtype), torch.ones(96, 64, dtype=dtype)).shape == (0, 96)


@pytest.mark.parametrize(("dtype", "pairs"), WAYS)
def test_large_and_special_values(dtype: torch.dtype, pairs: bool) -> None:
    """Infinity and NaN come out where they belong, and nowhere else."""
    weight, x = torch.randn(64, 512).to(dtype), torch.randn(20, 512).to(dtype)
    weight[7, 3], weight[9, 4], x[2, 8] = float("inf"), float("nan"), float("inf")
    for rows in (4, 20):
        out = product(x[:rows], weight, None, pairs)
        assert out[:, 9].isnan().all()
        assert not out[2].isfinite().any()
        rest = [n for n in range(64) if n not in (7, 9)]
        assert out[[0, 1, 3]][:, rest].isfinite().all()
        assert not out[:, 7].isfinite().any()


def test_many_threads_at_once() -> None:
    weight = torch.randn(256, 512)
    for rows in (8, 30):
        x = torch.randn(rows, 512)
        expected = product(x, weight)
        with ThreadPoolExecutor(4) as pool:
            for out in pool.map(lambda _, x=x: product(x, weight), range(40)):  # type: ignore[misc]
                assert torch.equal(out, expected)


def test_a_smaller_team_does_all_of_it(threads: Callable[[int], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """What each thread does follows from how many there are, not from how many were asked for."""
    threads(2)
    found = jit.compiler()
    assert found is not None
    team, x, weight = found._team, torch.randn(72, 1024).bfloat16(), torch.randn(4096, 1024).bfloat16()
    kinds: list[Callable[[], torch.Tensor]] = [
        lambda: product(x[:5], weight),
        lambda: product(x, weight),
        lambda: dispatch.norm(x, weight[0], 1e-6),
    ]
    expected = [kind() for kind in kinds]
    monkeypatch.setattr(found, "_team", lambda share, args, count, flags: team(share, args, 1, flags))
    for kind, whole in zip(kinds, expected):
        assert torch.equal(kind(), whole)


def test_processors_without_pairs_multiply_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those with matrix units, whose library is faster."""
    monkeypatch.setattr(jit, "multiplies_pairs", lambda: False)
    weight = torch.randn(64, 512).bfloat16()
    assert dispatch.compiled("onednn", weight, weight.dtype) is None
    assert dispatch.compiled("upcast", weight, weight.dtype) is False


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_wide_weight_is_no_head(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Feed-forward layers of large models have as many outputs as a vocabulary; many rows see them."""
    x, weight = torch.randn(70, 256).to(dtype), torch.randn(dispatch.SINGLE_ROW_OUTS + 64, 256).to(dtype)
    monkeypatch.setattr(jit, "compiler", lambda: None)
    expected = linear_library.product_of_library(x.float(), weight.float(), None).to(dtype)
    assert torch.equal(linear("upcast", x, weight), expected)
    head = linear("upcast", x[:9], weight, head=True)
    assert torch.equal(head, torch.cat([linear("upcast", row, weight, head=True) for row in x[:9].split(1)]))
