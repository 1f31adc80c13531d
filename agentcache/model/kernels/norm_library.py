"""Norms and rotary angles of rows by PyTorch's operations. Compiles nothing."""

from __future__ import annotations

import torch


def plain_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Root mean square norm of x [.., n] times weight [n] by PyTorch's operations."""
    wide = x.float()
    wide = wide * wide.pow(2).mean(-1, keepdim=True).add_(epsilon).rsqrt_()
    return weight * wide.to(x.dtype)


def plain_heads(x: torch.Tensor, weight: torch.Tensor | None, epsilon: float, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Norms, if there is a weight, and rotation of x [rows, heads, dim] by PyTorch's operations."""
    x = x if weight is None else plain_norm(x, weight, epsilon)
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return (x * cos) + (turned * sin)
