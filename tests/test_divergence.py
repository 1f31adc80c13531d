"""The distance of two next-token distributions."""

from __future__ import annotations

import math

import torch

from agentcache.divergence import divergence


def test_drift_of_what_is_no_number_is_infinite() -> None:
    row = torch.tensor([1.0, 2.0, float("-inf")])
    assert divergence(row, row) == 0.0, "what neither allows is no difference"
    assert divergence(row, torch.tensor([1.0, float("nan"), 0.0])) == math.inf
    assert divergence(torch.tensor([1.0, 2.0, 0.0]), row) == math.inf
