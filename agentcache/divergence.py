"""The distance of two next-token distributions. Knows no model and no request."""

from __future__ import annotations

import math

import torch


def divergence(exact: torch.Tensor, near: torch.Tensor) -> float:
    """KL(exact ‖ near) of two rows of logits, in nats; infinite if they are not numbers."""
    logs = torch.log_softmax(exact.double(), -1), torch.log_softmax(near.double(), -1)
    share = logs[0].exp()
    found = float(torch.where(share == 0, 0.0, share * (logs[0] - logs[1])).sum())
    return max(0.0, found) if math.isfinite(found) else math.inf
