"""transformers' reference functions of layers with a state, by compiled kernels in packed forwards on a CPU. Knows no families.

A module's own forward runs, as it is written, with other functions under the names of those references. Each takes what its reference
takes; what a kernel cannot take, the reference computes. So it does in calls of the owner, and once a class or function is patched.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from .attention_interface import running
from .behaviour import has_our_forward
from .description import root
from .kernels import recurrence
from .kernels.dispatch import elementwise

Function = Callable[..., Any]
_SILU = {"silu": True, "swish": True, None: False}


def _state(held: torch.Tensor | None, *shape: int) -> torch.Tensor | None:
    """The state [...] that a kernel changes: the one of its sequence, or a new one; None if it is of another kind."""
    if held is None:
        return torch.zeros(shape, dtype=torch.float32)
    fits = held.dtype == torch.float32 and held.shape == (1, *shape) and held.is_contiguous()
    return held[0] if fits else None


def _through(state: torch.Tensor, kernel: Function, *given: torch.Tensor) -> torch.Tensor:
    """Run rows [rows, ...] through a state, which the kernel changes in place: all at once, or up to where the cache notes it."""
    cache, layer = running.mixer
    if cache is None:
        return kernel(*given)  # type: ignore[no-any-return]
    done = [kernel(*(one[rows] for one in given)) for rows in cache.through(layer, state[None], len(given[0]))]
    return done[0] if len(done) == 1 else torch.cat(done)


def _delta(q: Any, k: Any, v: Any, g: Any, beta: Any, *more: Any, initial_state: Any = None, **kw: Any) -> Any:
    if more or len(q) > 1 or k.dtype != q.dtype or not recurrence.takes_delta(q[0], v[0]):
        return None
    if (state := _state(initial_state, v.shape[2], q.shape[3], v.shape[3])) is None:
        return None
    kernel = functools.partial(recurrence.delta, state=state, normed=bool(kw.get("use_qk_l2norm_in_kernel")))
    out = _through(state, kernel, q[0], k[0], v[0], g[0].float().exp(), beta[0].float())
    return out[None], state[None] if kw.get("output_final_state") else None


def _convolution(x: Any, weight: Any, bias: Any = None, activation: Any = None, **_: Any) -> Any:
    if len(x) > 1 or activation not in _SILU or not recurrence.takes_convolution(rows := x[0].t(), weight, bias):
        return None
    return recurrence.convolution(rows, weight, bias, _SILU[activation]).t()[None]


def _convolution_step(x: Any, state: Any, weight: Any, bias: Any = None, activation: Any = None) -> Any:
    if x.shape[::2] != (1, 1) or activation not in _SILU or not recurrence.takes_convolution(x[0].t(), weight, bias):
        return None
    if state.dtype != x.dtype or state.shape[1:] != weight.shape or not state.is_contiguous():
        return None
    return recurrence.convolution_step(x[0, :, 0], state[0], weight, bias, _SILU[activation])[None, :, None]


def _scan(x: Any, dt: Any, a: Any, b: Any, c: Any, *more: Any, **kw: Any) -> Any:
    if more or len(x) > 1 or kw.get("z") is not None or not recurrence.takes_scan(x[0], b.shape[3]):
        return None
    if (state := _state(kw.get("initial_states"), *x.shape[2:], b.shape[3])) is None:
        return None
    dt = _step_size(dt, kw.get("dt_bias"), kw.get("dt_softplus")).clamp(*kw.get("dt_limit", (0.0, float("inf"))))[0].float()
    kernel = functools.partial(recurrence.scan, d=kw.get("D"), state=state)
    out = _through(state, kernel, x[0], dt, (dt * a.float()).exp(), b[0], c[0])[None]
    return (out, state[None]) if kw.get("return_final_states") else out


def _scan_step(state: Any, x: Any, dt: Any, a: Any, b: Any, c: Any, d: Any = None, **kw: Any) -> Any:
    bias = kw.get("dt_bias")
    spread = all(given is None or not given.stride(-1) for given in (dt, a, d, bias))  # each head's number, over its channels
    if not spread or len(x) > 1 or not recurrence.takes_scan(x, b.shape[2]):
        return None
    if (held := _state(state, *x.shape[1:], b.shape[2])) is None:
        return None
    step = _step_size(dt[..., 0], None if bias is None else bias[:, 0], kw.get("dt_softplus")).float()
    out = recurrence.scan(x, step, (step * a[:, 0, 0].float()).exp(), b, c, None if d is None else d[:, 0], held)
    return out if kw.get("z") is None else out * elementwise(nn.functional.silu, kw["z"])


def _selective_scan(x: Any, dt: Any, a: Any, b: Any, c: Any, *more: Any, **kw: Any) -> Any:
    """Goes on from the state of the sequence, from which the reference starts anew."""
    if more or len(x) > 1 or not recurrence.takes_scan(rows := x[0].t(), a.shape[1]):
        return None
    cache, layer = running.mixer
    if (state := _state(None if cache is None else cache.recurrent_state(layer), *a.shape)) is None:
        return None
    dt = _step_size(dt[0].t(), kw.get("delta_bias"), kw.get("delta_softplus")).float()
    kernel = functools.partial(recurrence.selective_scan, rates=a.float(), d=kw.get("D"), state=state)
    out = _through(state, lambda x, dt, b, c: kernel(x, dt, b=b, c=c), rows, dt, b[0].t(), c[0].t())
    if kw.get("z") is not None:
        out = out * elementwise(nn.functional.silu, kw["z"][0].t())
    return (out.t()[None], state[None]) if kw.get("return_last_state") else out.t()[None]


def _selective_scan_step(state: Any, x: Any, dt: Any, a: Any, b: Any, c: Any, d: Any = None, **kw: Any) -> Any:
    if len(x) > 1 or not recurrence.takes_scan(x, a.shape[-1]) or (held := _state(state, *a.shape)) is None:
        return None
    step = _step_size(dt, kw.get("dt_bias"), kw.get("dt_softplus")).float()
    out = recurrence.selective_scan(x, step, a.float(), b, c, d, held)
    return out if kw.get("z") is None else out * elementwise(nn.functional.silu, kw["z"])


def _step_size(dt: torch.Tensor, bias: torch.Tensor | None, softplus: bool | None) -> torch.Tensor:
    dt = dt if bias is None else dt + bias.to(dt.dtype)
    return elementwise(nn.functional.softplus, dt) if softplus else dt


_OURS: dict[str, Function] = {  # by the reference's name; None: the reference has to compute it
    "torch_chunk_gated_delta_rule": _delta,
    "torch_recurrent_gated_delta_rule": _delta,
    "chunk_kimi_delta_attention": _delta,
    "recurrent_kimi_delta_attention": _delta,
    "causal_conv1d_fn": _convolution,
    "causal_conv1d_update": _convolution_step,
    "mamba2_chunk_scan": _scan,
    "mamba2_selective_state_update": _scan_step,
    "mamba_selective_scan": _selective_scan,
    "mamba_selective_state_update": _selective_scan_step,
}


def _instead(reference: Function, ours: Function) -> Function:
    """Our function where it takes what it is given, else the reference."""

    def function(*given: Any, **kw: Any) -> Any:
        with torch._C.DisableTorchFunction():  # of RowPureLinear, which looks at each use of a tensor
            done = ours(*given, **kw)
        return reference(*given, **kw) if done is None else done

    return function


_owners: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()  # how many engines' models have a module's forward exchanged


def install(module: nn.Module) -> bool:
    """Have compiled kernels work for a module in packed forwards, until `remove`; False if it calls no reference, or code of others."""
    if module in _owners:
        _owners[module] += 1
        return True
    if "forward" in vars(module) or (own := _with_kernels(type(module))) is None:  # type: ignore[arg-type]
        return False
    module.forward = MethodType(own, module)  # a method: a deep copy of the module binds its own
    _owners[module] = 1
    return True


def remove(module: nn.Module) -> None:
    """Give a module back as it was, if nobody else had it installed, too."""
    if left := _owners[module] - 1:
        _owners[module] = left
        return
    del _owners[module]
    if has_our_forward(module):
        del module.forward


@functools.cache
def _with_kernels(kind: type[nn.Module]) -> Function | None:
    """The forward of a class with compiled functions in it."""
    given: Any = kind.forward
    written = given
    while _of_library(written) and hasattr(written, "__wrapped__"):
        written = written.__wrapped__
    if not isinstance(written, FunctionType) or not _of_library(written) or written.__closure__:
        return None
    space = written.__globals__
    named = {name: space[name] for name in written.__code__.co_names if name in space}
    ours = {name: _instead(value, _OURS[name]) for name, value in named.items() if name in _OURS and _of_library(inspect.unwrap(value))}
    if not ours:
        return None
    own = FunctionType(written.__code__, {**space, **ours}, written.__name__, written.__defaults__)
    own.__kwdefaults__ = written.__kwdefaults__

    def forward(self: Any, *args: Any, **kw: Any) -> Any:
        packed = getattr(running, "batch", None) is not None
        patched = type(self).forward is not given or any(space.get(name) is not value for name, value in named.items())
        if not packed or patched:
            return type(self).forward(self, *args, **kw)
        cache = kw.get("cache", kw.get("cache_params"))
        running.mixer = cache, self.layer_idx
        try:
            return own(self, *args, **kw)
        finally:
            running.mixer = None, 0

    return forward


def _of_library(function: Any) -> bool:
    return root(getattr(function, "__module__", None)) == "transformers"
