"""Norms and rotary angles in one compiled pass: the bits of PyTorch's operations. And what stores keys and values in pages."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from agentcache.kv import PAGE_TOKENS
from agentcache.model.kernels import layer_code, linear_few, norm_rope, write_kv

pytestmark = pytest.mark.skipif(linear_few.kernels() is None, reason="no compiler here")
HALVES = [torch.bfloat16, torch.float16]


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("n", [32, 96, 128, 1024, 3072])
@pytest.mark.parametrize("rows", [1, 3, 75])
def test_norms_have_pytorchs_bits(dtype: torch.dtype, n: int, rows: int) -> None:
    torch.manual_seed(n + rows)
    x, weight = (torch.randn(rows, n) * torch.randn(rows, 1).exp() * 30).to(dtype), torch.randn(n).to(dtype)
    if rows > 2:
        x[0], x[1] = 0, float("nan")
    assert norm_rope._norms_agree(dtype, n)
    assert same(norm_rope._compiled_norm(x, weight, 1e-5), norm_rope._plain_norm(x, weight, 1e-5))
    assert same(norm_rope.norm(x, weight, 1e-5), norm_rope._plain_norm(x, weight, 1e-5))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize(("rows", "count", "dim"), [(1, 2, 32), (7, 1, 64), (190, 16, 128)])
def test_heads_have_pytorchs_bits(dtype: torch.dtype, normed: bool, rows: int, count: int, dim: int) -> None:
    torch.manual_seed(rows)
    x, cos, sin = (torch.randn(rows, n, dim).to(dtype) for n in (count, 1, 1))
    weight = torch.randn(dim).to(dtype) if normed else None
    assert norm_rope._heads_agree(dtype, dim, normed)
    assert torch.equal(norm_rope._compiled_heads(x, weight, 1e-6, cos, sin), norm_rope._plain_heads(x, weight, 1e-6, cos, sin))


def test_other_types_and_layouts_take_pytorchs_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norm_rope, "_run", lambda *_: pytest.fail("compiled"))
    x, weight = torch.randn(3, 64), torch.randn(64)
    assert torch.equal(norm_rope.norm(x, weight, 1e-6), norm_rope._plain_norm(x, weight, 1e-6))
    turned, half = torch.randn(64, 3).bfloat16().t(), weight.bfloat16()
    assert torch.equal(norm_rope.norm(turned, half, 1e-6), norm_rope._plain_norm(turned, half, 1e-6))
    odd = torch.randn(3, 24).bfloat16()
    assert torch.equal(norm_rope.norm(odd, half[:24], 1e-6), norm_rope._plain_norm(odd, half[:24], 1e-6))
    given = (torch.randn(3, 2, 64).bfloat16(), half, 1e-6, torch.randn(3, 1, 64), torch.randn(3, 1, 64))  # angles in fp32
    assert torch.equal(norm_rope.heads(*given), norm_rope._plain_heads(*given))


def test_another_order_of_additions_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    found, original = linear_few.kernels(), layer_code._squares
    assert found is not None
    monkeypatch.setattr(found, "_compiled", {})

    def halves(code: Any, vector: Any, n: int) -> str:
        middle = n // 2
        behind = original(code, lambda at: vector(code.plus(at, middle) if isinstance(at, str) else at + middle), middle)
        return str(code.both("fadd", original(code, vector, middle), behind))

    monkeypatch.setattr(layer_code, "_squares", halves)
    checks = (norm_rope.sums_agree, norm_rope._norms_agree, norm_rope._heads_agree)
    for check in checks:
        check.cache_clear()
    x, weight = torch.randn(64, 1024).bfloat16(), torch.randn(1024).bfloat16()
    assert not norm_rope._norms_agree(torch.bfloat16, 1024)
    assert torch.equal(norm_rope.norm(x, weight, 1e-6), norm_rope._plain_norm(x, weight, 1e-6))
    for check in checks:
        check.cache_clear()


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("heads", "dim"), [(8, 128), (1, 64), (3, 96), (2, 32)])
@pytest.mark.parametrize(("tokens", "slot"), [(1, 0), (1, 511), (16, 3), (75, 100), (512, 0), (33, 479)])
def test_keys_and_values_go_where_they_belong_and_nowhere_else(dtype: torch.dtype, heads: int, dim: int, tokens: int, slot: int) -> None:
    torch.manual_seed(tokens)
    keys, values = (torch.randn(tokens, heads, dim).to(dtype) for _ in range(2))
    key_page, value_page = torch.randn(heads, dim, PAGE_TOKENS).to(dtype), torch.randn(heads, PAGE_TOKENS, dim).to(dtype)
    expected = key_page.clone(), value_page.clone()
    expected[0][:, :, slot : slot + tokens] = keys.permute(1, 2, 0)
    expected[1][:, slot : slot + tokens] = values.transpose(0, 1)
    assert write_kv.takes(keys)
    write_kv.store(keys, values, key_page, value_page, slot)
    assert torch.equal(key_page, expected[0])
    assert torch.equal(value_page, expected[1])


def test_only_16_bits_on_a_cpu_are_stored_so() -> None:
    assert not write_kv.takes(torch.zeros(1, 2, 32))
    assert not write_kv.takes(torch.zeros(1, 2, 24, dtype=torch.bfloat16))
