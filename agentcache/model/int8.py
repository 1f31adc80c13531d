"""Weights as int8, each output with a scale of its own: `weights="int8"`. Computes no products itself.

    w[n, k] ~ scale[n] · q[n, k]        scale[n] = max |w[n]| / 127        q = w / scale, rounded, in [-127, 127]

Linear layers of the decoder and the head are quantized, as far as compiled kernels take their shapes; embeddings, norms and experts stay.
Activations keep their type, sums are fp32, and each row is computed by itself: a hit has the bits of a miss.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable

import torch
from torch import nn

from ..errors import ConfigError
from .kernels import jit, linear_compiled
from .kernels.dispatch import Int8Linear

BLOCK_ROWS = 1024  # of a weight quantized at a time
_LEAST = 2.0**-100  # of a scale: a row of zeros has one, too


def check(weights: str, bits: int | None = None, device: str | None = None) -> None:
    """ConfigError for weights that cannot be quantized here."""
    if weights != "int8":
        raise ConfigError(f"weights={weights!r}: must be 'int8', or None for the checkpoint's own")
    if bits:
        raise ConfigError(f"weights={weights!r} and load_in_{bits}bit=True: choose one")
    if device not in (None, "cpu"):
        raise ConfigError(f"weights={weights!r} with device={device!r}: its kernels run on a CPU; use load_in_8bit there")
    if jit.compiler() is None:
        raise ConfigError("weights='int8': its products are compiled, which does not work here; pip install 'agentcache-llm[cpu]'")


def wide(weight: torch.Tensor) -> torch.Tensor:
    """A weight as fp32: what its int8 numbers stand for, if it has such."""
    scale = linear_compiled.scale_of(weight)
    return weight.detach().float() if scale is None else weight.detach().float().mul_(scale[:, None])


def widened(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A copy of a model with weights of this type, those that are int8 included."""
    made = copy.deepcopy(model).to(dtype)
    for mine, module in zip(model.modules(), made.modules()):
        if type(mine) is Int8Linear:
            module.weight, module.__class__ = nn.Parameter(wide(mine.weight).to(dtype), requires_grad=False), nn.Linear
    return made


@torch.no_grad()
def quantize(modules: Iterable[nn.Module]) -> None:
    """Quantize the linear layers among modules in place, one after the other; ConfigError if there is none that fits.

    Small parameters are copied: the file of a checkpoint is mapped as long as a tensor lies in it, and its pages count as memory.
    """
    found, modules = jit.compiler(), list(modules)
    assert found is not None
    layers = [module for module in modules if type(module) is nn.Linear]
    fitting = [layer for layer in layers if linear_compiled.fits(layer.weight, found.lanes, 1)]
    if not fitting:
        raise ConfigError(f"weights='int8': its kernels take no shape of {len(layers)} linear layers; leave it out")
    for parameter in (p for module in modules for p in module.parameters(recurse=False) if p.ndim == 1):
        parameter.data = parameter.data.clone()
    for module in fitting:
        module.weight = _quantized(module.weight)
        module.__class__ = Int8Linear


def _quantized(weight: torch.Tensor) -> nn.Parameter:
    scales, numbers = torch.empty(len(weight)), torch.empty(weight.shape, dtype=torch.int8)
    for start in range(0, len(weight), BLOCK_ROWS):
        block = weight[start : start + BLOCK_ROWS].float()
        scale = (block.abs().amax(1) / 127).clamp_(min=_LEAST)
        scales[start : start + BLOCK_ROWS] = scale
        numbers[start : start + BLOCK_ROWS] = (block / scale[:, None]).round_().clamp_(-127, 127)
    made = nn.Parameter(numbers, requires_grad=False)
    made.scale = scales  # type: ignore[attr-defined]
    return made
