"""Weights that wrap a tensor of small numbers and one of scales, as quantising libraries build them. Holds no tests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from agentcache.model.loading import decoder_of
from tests import models


class Wrapped(torch.Tensor):
    """A weight [out, in] as int8 `numbers`, with a `scale` for each output; multiplied `gain` times. It has no memory of its own."""

    numbers: torch.Tensor
    scale: torch.Tensor
    gain: float

    @staticmethod
    def __new__(cls, numbers: torch.Tensor, scale: torch.Tensor, gain: float) -> Wrapped:
        return torch.Tensor._make_wrapper_subclass(cls, numbers.shape, dtype=scale.dtype)  # type: ignore[attr-defined, no-any-return]

    def __init__(self, numbers: torch.Tensor, scale: torch.Tensor, gain: float) -> None:
        self.numbers, self.scale, self.gain = numbers, scale, gain

    def __tensor_flatten__(self) -> tuple[list[str], dict[str, Any]]:
        return ["numbers", "scale"], {"gain": self.gain}

    @classmethod
    def __tensor_unflatten__(cls, inner: Mapping[str, Any], context: Mapping[str, Any], *_: Any) -> Wrapped:
        return cls(inner["numbers"], inner["scale"], context["gain"])

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is functional.linear:
            x, weight, *bias = args
            return functional.linear(x, weight.numbers.to(x.dtype) * (weight.scale * weight.gain), *bias, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return cls(args[0].numbers, args[0].scale, args[0].gain)
        raise NotImplementedError(f"{func} of a wrapped weight")


def build(**options: Any) -> Any:
    """A tiny model whose linear layers have wrapped weights."""
    return wrap(models.build("qwen3", **options))


def wrap(model: Any) -> Any:
    """The model, with wrapped weights in the place of those of its decoder's linear layers."""
    for layer in decoder_of(model).layers.modules():
        if type(layer) is nn.Linear:
            scale = layer.weight.detach().abs().amax(1, keepdim=True) / 127
            numbers = (layer.weight.detach() / scale).round().to(torch.int8)
            layer.weight = nn.Parameter(Wrapped(numbers, scale, 1.0), requires_grad=False)
    return model


class Held(MutableMapping[str, Any]):
    """Parameters of a module in a mapping that is no dictionary, as libraries hold them that offload."""

    def __init__(self, inner: dict[str, Any]) -> None:
        self.inner = inner

    def __getitem__(self, name: str) -> Any:
        return self.inner[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self.inner[name] = value

    def __delitem__(self, name: str) -> None:
        del self.inner[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.inner)

    def __len__(self) -> int:
        return len(self.inner)
