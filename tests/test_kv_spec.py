"""One pass tells whether numbers are finite, wherever the one that is not lies."""

from __future__ import annotations

import pytest
import torch

from agentcache.kv_spec import finite


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("length", [1, 7, 64, 33_001])
@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
def test_one_number_that_is_not_finite_is_found(dtype: torch.dtype, length: int, wrong: float) -> None:
    highest = torch.finfo(dtype).max
    values = torch.full((length, 2), highest, dtype=dtype)[:, 0]  # strided; their sum would be infinite
    values[::2] = -highest
    assert finite(values)
    assert finite(values[:0])
    for at in {0, length // 2, length - 1}:
        spoilt = values.clone()
        spoilt[at] = wrong
        assert not finite(spoilt)
