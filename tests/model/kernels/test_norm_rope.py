"""Norms and rotary angles in one compiled pass: the bits of PyTorch's operations."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from agentcache.model.kernels import dispatch, jit, norm_library, norm_rope

pytestmark = pytest.mark.skipif(jit.compiler() is None, reason="no compiler here")
TYPES = [torch.bfloat16, torch.float16, torch.float32]


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("n", [32, 96, 128, 1024, 3072])
@pytest.mark.parametrize("rows", [1, 3, 75])
def test_norms_have_pytorchs_bits(dtype: torch.dtype, n: int, rows: int) -> None:
    torch.manual_seed(n + rows)
    x, weight = (torch.randn(rows, n) * torch.randn(rows, 1).exp() * 30).to(dtype), torch.randn(n).to(dtype)
    if rows > 2:
        x[0], x[1] = 0, float("nan")
    assert norm_rope.norms_agree(dtype, n)
    assert same(norm_rope.norm(x, weight, 1e-5), norm_library.plain_norm(x, weight, 1e-5))
    assert same(dispatch.norm(x, weight, 1e-5), norm_library.plain_norm(x, weight, 1e-5))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize(("rows", "count", "dim"), [(1, 2, 32), (7, 1, 64), (190, 16, 128)])
def test_heads_have_pytorchs_bits(dtype: torch.dtype, normed: bool, rows: int, count: int, dim: int) -> None:
    torch.manual_seed(rows)
    x, cos, sin = (torch.randn(rows, n, dim).to(dtype) for n in (count, 1, 1))
    weight = torch.randn(dim).to(dtype) if normed else None
    assert norm_rope.heads_agree(dtype, dim, normed)
    assert torch.equal(norm_rope.heads(x, weight, 1e-6, cos, sin), norm_library.plain_heads(x, weight, 1e-6, cos, sin))


def test_other_types_and_layouts_take_pytorchs_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit, "run", lambda *_: pytest.fail("compiled"))
    x, weight = torch.randn(3, 64).double(), torch.randn(64).double()
    assert torch.equal(dispatch.norm(x, weight, 1e-6), norm_library.plain_norm(x, weight, 1e-6))
    turned, half = torch.randn(64, 3).bfloat16().t(), weight.bfloat16()
    assert torch.equal(dispatch.norm(turned, half, 1e-6), norm_library.plain_norm(turned, half, 1e-6))
    odd = torch.randn(3, 24).bfloat16()
    assert torch.equal(dispatch.norm(odd, half[:24], 1e-6), norm_library.plain_norm(odd, half[:24], 1e-6))
    given = (torch.randn(3, 2, 64).bfloat16(), half, 1e-6, torch.randn(3, 1, 64), torch.randn(3, 1, 64))  # angles in fp32
    assert torch.equal(dispatch.heads(*given), norm_library.plain_heads(*given))


def test_long_heads_take_pytorchs_operations() -> None:
    """Their squares are added up in more levels than a compiled head has."""
    x, weight, angles = torch.randn(3, 2, 512).bfloat16(), torch.randn(512).bfloat16(), torch.randn(3, 1, 512).bfloat16()
    given = (x, weight, 1e-6, angles, angles)
    assert torch.equal(dispatch.heads(*given), norm_library.plain_heads(*given))


def test_another_order_of_additions_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    found, original = jit.compiler(), norm_rope._squares
    assert found is not None
    monkeypatch.setattr(found, "_compiled", {})

    def halves(code: Any, vector: Any, n: int) -> Any:
        middle = n // 2
        return original(code, vector, middle) + original(code, lambda at: vector(at + middle), middle)

    monkeypatch.setattr(norm_rope, "_squares", halves)
    checks = (norm_rope._sums_agree, norm_rope.norms_agree, norm_rope.heads_agree)
    for check in checks:
        check.cache_clear()
    x, weight = torch.randn(64, 1024).bfloat16(), torch.randn(1024).bfloat16()
    assert not norm_rope.norms_agree(torch.bfloat16, 1024)
    assert torch.equal(dispatch.norm(x, weight, 1e-6), norm_library.plain_norm(x, weight, 1e-6))
    for check in checks:
        check.cache_clear()
