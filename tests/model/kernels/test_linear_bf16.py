"""Compiled products of bf16 pairs, few rows and many, give the bits of oneDNN's product, for every shape, bias and number of threads."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from agentcache.model.kernels import accumulation, jit, linear_bf16, linear_few, linear_library
from agentcache.model.kernels.accumulation import pair_block
from agentcache.model.kernels.dispatch import linear, linears

if not jit.multiplies_pairs():
    pytest.skip("this processor has no products of bf16 pairs, or has matrix units", allow_module_level=True)


def opposed(rows: int, ins: int) -> torch.Tensor:
    """Numbers whose products with `turned` ones cancel out, so that all that is left is rounding, which shows the order of additions."""
    half = torch.randn(rows, ins // 2).bfloat16()
    return torch.cat((half, half.roll(7, 1)), 1)


def turned(outs: int, ins: int) -> torch.Tensor:
    half = torch.randn(outs, ins // 2).bfloat16()
    return torch.cat((half, -half.roll(7, 1)), 1)


def refuse(*_: object) -> None:
    raise AssertionError("the library was asked")


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize(("outs", "ins"), [(64, 64), (256, 96), (896, 896), (128, 2048), (192, 3072), (64, 4864), (1024, 1024)])
def test_any_rows_equal_the_librarys(
    outs: int, ins: int, count: int, threads: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    threads(count)
    torch.manual_seed(outs)
    weight, bias = turned(outs, ins), torch.randn(outs).bfloat16() * 1e-6
    x = opposed(512, ins)
    expected = {added is not None: linear_library.product_of_library(x, weight, added) for added in (None, bias)}
    assert expected[False].count_nonzero() > expected[False].numel() // 8
    block = pair_block(outs, ins, count)
    assert block is not None
    monkeypatch.setattr(linear_library, "product_of_library", refuse)
    for rows in (1, 2, 3, 8, 9, 12, 13, 70, 512):
        for added in (None, bias):
            assert torch.equal(linear("onednn", x[-rows:], weight, added), expected[added is not None][-rows:]), rows


def test_another_order_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = opposed(20, 2048), turned(64, 2048)
    assert not torch.equal(linear_few.product(x[:4], [weight], 512), linear_few.product(x[:4], [weight], 1024))
    assert not torch.equal(linear_bf16.products(x, [(weight, None)], 512)[0], linear_bf16.products(x, [(weight, None)], 1024)[0])
    pair_block.cache_clear()
    kept = linear_library.product_of_library
    for module in (accumulation, linear_library):  # a library that begins at the end
        monkeypatch.setattr(module, "product_of_library", lambda x, weight, bias: kept(x.flip(1), weight.flip(1), bias))
    assert pair_block(64, 2048, 1) is None
    assert torch.equal(linear("onednn", x, weight), linear_library.product_of_library(x, weight, None))
    pair_block.cache_clear()


def test_several_products_of_the_same_rows() -> None:
    weights = [torch.randn(outs, 256).bfloat16() for outs in (128, 64, 64)]
    biases = [torch.randn(128).bfloat16(), None, torch.randn(64).bfloat16()]
    for rows in (2, 40):
        x = torch.randn(rows, 256).bfloat16()
        for found, weight, bias in zip(linears("onednn", x, list(zip(weights, biases))), weights, biases):
            assert torch.equal(found, linear_library.product_of_library(x, weight, bias))
            assert found.is_contiguous()  # heads are normalised in one pass where they lie together


def test_what_tiles_do_not_take_runs_as_before() -> None:
    weight = torch.randn(128, 1024).bfloat16()
    assert linear_bf16.takes(weight, 512)
    for other in (weight[:100], weight[:, :1000], weight.t(), weight.float(), weight.half()):
        assert not linear_bf16.takes(other, 512)
    assert not linear_bf16.takes(weight, 400)
    x = torch.randn(30, 1024).bfloat16()
    for odd in (weight[:100], weight[:, :1000].contiguous()):
        mine = x[:, : odd.shape[1]]
        assert torch.equal(linear("onednn", mine, odd), linear_library.product_of_library(mine, odd, None))


def test_large_and_special_values() -> None:
    weight, x = torch.randn(64, 512).bfloat16(), torch.randn(15, 512).bfloat16()
    weight[7, 3], weight[9, 4], x[2, 8] = float("inf"), float("nan"), float("inf")
    for rows in (4, 15):
        out = linear("onednn", x[:rows], weight)
        assert out[:, 9].isnan().all()
        assert out[[0, 1, 3], :7].isfinite().all()
        assert torch.equal(out.isfinite(), linear_library.product_of_library(x[:rows], weight, None).isfinite())


def test_many_threads_at_once() -> None:
    weight, x = torch.randn(256, 512).bfloat16(), torch.randn(30, 512).bfloat16()
    expected = linear("onednn", x, weight)
    with ThreadPoolExecutor(4) as pool:
        for out in pool.map(lambda _: linear("onednn", x, weight), range(40)):
            assert torch.equal(out, expected)
