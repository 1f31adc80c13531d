"""Compiled products of few rows give the bits of oneDNN's large fp32 products, for every shape, type and number of rows."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from agentcache.model.kernels import accumulation, dispatch, jit, linear_bf16, linear_few, linear_library
from agentcache.model.kernels.dispatch import linear
from agentcache.model.kernels.ir import Code

pytestmark = pytest.mark.skipif(jit.compiler() is None, reason="needs llvmlite and PyTorch's OpenMP runtime")
TYPES = [torch.bfloat16, torch.float16]


def large(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The product that more rows take: in fp32, with the weight converted first."""
    return linear_library.product_of_library(x.float(), weight.float(), None)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("ins", [64, 512, 768, 1024, 1536, 2048, 3072, 4096, 8192])
def test_few_rows_equal_those_of_a_large_product(ins: int, dtype: torch.dtype, count: int, threads: Callable[[int], None]) -> None:
    threads(count)
    torch.manual_seed(ins)
    block = accumulation.chain_block(ins, count)
    assert block is not None
    for outs in (64, 256, 1024):
        weight, x = torch.randn(outs, ins).to(dtype), torch.randn(128, ins).to(dtype)
        expected = large(x, weight)
        for rows in (*range(1, 10), 15, 16, 17, 31, 32):
            start = 128 - 3 * rows
            assert torch.equal(linear_few.product(x[start : start + rows].float(), [weight], block), expected[start : start + rows])


def test_a_wrong_order_is_noticed() -> None:
    """What the probe relies on: another block size gives other bits."""
    x, weight = torch.randn(4, 2048), torch.randn(64, 2048).bfloat16()
    assert not torch.equal(linear_few.product(x, [weight], 512), linear_few.product(x, [weight], 1024))


@pytest.mark.parametrize("bias", [False, True])
def test_linear_is_row_pure_across_the_change_of_kernels(bias: bool) -> None:
    torch.manual_seed(5)
    weight, x = torch.randn(192, 1024).bfloat16(), torch.randn(40, 1024).bfloat16()
    added = torch.randn(192).bfloat16() if bias else None
    whole = linear("upcast", x, weight, added)
    for rows in (2, 4, 8, 9, 16, 17, 25, 32, 34):
        assert torch.equal(linear("upcast", x[:rows], weight, added), whole[:rows])


def test_what_it_does_not_take_runs_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(96, 1024).bfloat16()
    assert linear_few.takes(weight)
    for rows in (1, linear_few.MOST_ROWS, linear_few.MOST_ROWS + 1):
        assert dispatch.by_itself("upcast", weight, rows) == (rows <= linear_few.MOST_ROWS)
    for other in (weight[:95], weight[:, :1000], weight.t(), weight.float()):
        assert not linear_few.takes(other)
    x = torch.randn(2, 1024).bfloat16()
    compiled = linear("upcast", x, weight)
    monkeypatch.setattr(jit, "compiler", lambda: None)
    assert torch.equal(linear("upcast", x, weight), compiled)


@pytest.mark.parametrize("kernel", ["onednn", "upcast", "aten"])
@pytest.mark.parametrize("dtype", [*TYPES, torch.float32])
def test_an_expert_without_rows_has_a_product(kernel: dispatch.Kernel, dtype: torch.dtype) -> None:
    assert linear(kernel, torch.empty(0, 64, dtype=dtype), torch.ones(96, 64, dtype=dtype)).shape == (0, 96)


def test_large_and_special_values() -> None:
    """Infinity and NaN come out where they belong, and nowhere else."""
    weight, x = torch.randn(64, 512).bfloat16(), torch.randn(3, 512).bfloat16()
    weight[7, 3], weight[9, 4] = float("inf"), float("nan")
    block = accumulation.chain_block(512, torch.get_num_threads())
    assert block
    out, expected = linear_few.product(x.float(), [weight], block), large(x, weight)
    assert torch.equal(out.nan_to_num(1.5, 2.5, 3.5), expected.nan_to_num(1.5, 2.5, 3.5))
    assert out[:, 9].isnan().all()
    assert out[:, :7].isfinite().all()


def test_many_threads_at_once() -> None:
    from concurrent.futures import ThreadPoolExecutor

    torch.manual_seed(1)
    weight, x = torch.randn(256, 512).bfloat16(), torch.randn(8, 512)
    expected = linear_few.product(x, [weight], 512)
    with ThreadPoolExecutor(4) as pool:
        for out in pool.map(lambda _: linear_few.product(x, [weight], 512), range(40)):
            assert torch.equal(out, expected)


# -- attention ---------------------------------------------------------------------------------------------------------


def test_a_compiler_that_is_too_old_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert jit.compiler.__wrapped__() is not None
    monkeypatch.setattr(jit, "OLDEST_LLVM", (999,))
    assert jit.compiler.__wrapped__() is None


def test_a_smaller_team_does_all_of_it(threads: Callable[[int], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """What each thread does follows from how many there are, not from how many were asked for."""
    threads(2)
    found = jit.compiler()
    assert found is not None
    team, x, weight = found._team, torch.randn(5, 1024), torch.randn(4096, 1024).bfloat16()
    kinds: list[Callable[[], torch.Tensor]] = [
        lambda: linear_few.product(x, [weight], 1024),
        lambda: dispatch.norm(x.bfloat16(), weight[0], 1e-6),
    ]
    if jit.multiplies_pairs():
        many = torch.randn(72, 1024).bfloat16()
        kinds.append(lambda: linear_bf16.products(many, [(weight, None)], 1024)[0])
    expected = [kind() for kind in kinds]
    monkeypatch.setattr(found, "_team", lambda share, args, count, flags: team(share, args, 1, flags))
    for kind, whole in zip(kinds, expected):
        assert torch.equal(kind(), whole)


@pytest.mark.parametrize("dtype", TYPES)
def test_a_wide_weight_is_no_head(dtype: torch.dtype) -> None:
    """Feed-forward layers of large models have as many outputs as a vocabulary; many rows see them."""
    torch.manual_seed(3)
    x, weight = torch.randn(70, 2048).to(dtype), torch.randn(dispatch.SINGLE_ROW_OUTS + 64, 2048).to(dtype)
    many = linear("upcast", x, weight)
    assert torch.equal(many, large(x, weight).to(dtype))
    for rows in (1, 2, 7):
        assert torch.equal(linear("upcast", x[:rows], weight), many[:rows]) or jit.compiler() is None
    head = linear("upcast", x, weight, head=True)
    assert torch.equal(head, torch.cat([linear("upcast", row, weight, head=True) for row in x.split(1)]))


def test_a_kernel_is_compiled_once_whoever_asks_first() -> None:
    found, written = jit.compiler(), []
    assert found is not None

    def nothing(_: Code) -> None:
        written.append(1)
        time.sleep(0.05)

    with ThreadPoolExecutor(20) as pool:
        addresses = list(pool.map(lambda _: found.function(nothing, "bfloat"), range(20)))
    assert len(written) == 1
    assert len(set(addresses)) == 1
