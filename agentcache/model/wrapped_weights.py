"""Weights that wrap other tensors: subclasses by which torchao, quanto and others quantise. Computes nothing.

A wrapper has no memory of its own: it is known by the numbers and scales that it is made of, and products are left to its class.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass as is_wrapper

from .description import release

_LIBRARIES = ("torch.nn.", "transformers.models.", "transformers.activations")
_FLOATS = frozenset((torch.float64, torch.float32, torch.bfloat16, torch.float16))


def wrappers(module: torch.nn.Module) -> list[tuple[str, Any]]:
    """The parameters and buffers of one module that wrap others, by name."""
    own = module.__dict__
    held = [*own["_parameters"].items(), *own["_buffers"].items()]
    return [(name, tensor) for name, tensor in held if tensor is not None and is_wrapper(tensor)]


def parts(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors that hold the values of one, named after it: itself, unless it wraps others."""
    if not is_wrapper(tensor):
        yield name, tensor
        return
    for inner in tensor.__tensor_flatten__()[0]:  # type: ignore[attr-defined]
        yield from parts(f"{name}.{inner}", getattr(tensor, inner))


def settings(module: torch.nn.Module) -> list[Any]:
    """What wrappers of a module compute by beside the tensors within: class, its release, and what it keeps, such as sizes of blocks."""
    return [(name, type(tensor), release(type(tensor).__module__), tensor.__tensor_flatten__()[1]) for name, tensor in wrappers(module)]


def is_quantized(model: torch.nn.Module) -> bool:
    """Tell whether weights are stored as other numbers than they multiply as. Those that loading has dequantised are not."""
    if any(map(wrappers, model.modules())):
        return True
    asked = getattr(model, "hf_quantizer", None) is not None or bool(getattr(model, "quantization_method", None))
    plain = all(f"{type(module).__module__}.".startswith(_LIBRARIES) for module in model.modules())
    return asked and not (plain and all(parameter.dtype in _FLOATS for parameter in model.parameters()))
