"""The choice between kernels of linear layers by their time on this machine: measured once, found again by this user's later processes.

A kernel decides bits, so equal processes must choose alike: the first candidate stays unless another one is clearly faster.
"""

from __future__ import annotations

import functools
import json
import operator
import platform
import time

import torch

from . import jit
from .dispatch import Kernel, compiled, linear
from .instructions import has_16bit_units, level
from .linear_library import onednn_takes

REVISION = "2"  # of the measurement: raise it when kernels or what is timed change
OUTS, INS, WEIGHTS = 2048, 1024, 8  # of weights that no second-level cache holds together
STEP_TOKENS, ANSWER_TOKENS = 128, 32  # of an agent's step: what is computed at once, and what is decoded
MOST_S, LEAST_REPEATS = 0.4, 4  # of the measurement
CLEARLY = 0.7  # of the first candidate's time


def candidates(dtype: torch.dtype) -> tuple[Kernel, ...]:
    """Kernels that can compute products of this type on this processor, the usual one first."""
    if dtype in (torch.bfloat16, torch.float16) and not has_16bit_units(dtype):
        return ("upcast",)
    if not onednn_takes(dtype):
        return ("aten",)
    return ("onednn",) if compiled("onednn", torch.empty(OUTS, INS, dtype=dtype), dtype) is None else ("onednn", "library")


def choose(dtype: torch.dtype) -> Kernel:
    """The kernel for linear layers of this type, for this thread's number of threads."""
    found = candidates(dtype)
    if len(found) == 1:
        return found[0]
    ms = times(dtype, torch.get_num_threads())
    return min((kernel for kernel in found if kernel == found[0] or ms[kernel] < CLEARLY * ms[found[0]]), key=ms.__getitem__)


@functools.cache
def times(dtype: torch.dtype, threads: int) -> dict[str, float]:
    """ms that each candidate takes for a weight's share of an agent's step, as this process or an earlier one measured.

    Other candidates than the first as they compare with it where that favours them least: another process may disturb some repeats.
    """
    from .object_cache import Objects

    verdicts, found = Objects(f"kernel {REVISION}"), candidates(dtype)
    versions = jit.binding and (jit.binding.llvm_version_info, jit.llvmlite.__version__)
    name = verdicts.name(f"{platform.processor()} {level()} {torch.__version__} {versions} {dtype} {threads} {found}")
    if (known := verdicts.find(name)) is not None:
        return json.loads(known)  # type: ignore[no-any-return]
    ms = _measured(found, dtype)
    verdicts.keep(name, json.dumps(ms).encode())
    return ms


@torch.inference_mode()
def _measured(found: tuple[Kernel, ...], dtype: torch.dtype) -> dict[str, float]:
    weights = [torch.nn.Parameter(torch.ones(OUTS, INS, dtype=dtype), requires_grad=False) for _ in range(WEIGHTS)]
    step, token = torch.ones(STEP_TOKENS, INS, dtype=dtype), torch.ones(2, INS, dtype=dtype)
    for kernel in found:  # compiles and packs
        for weight in weights:
            linear(kernel, token, weight)
        linear(kernel, step, weights[0])
    took: dict[Kernel, list[float]] = {kernel: [] for kernel in found}
    began = now = time.perf_counter()
    while now - began < MOST_S or len(took[found[-1]]) < LEAST_REPEATS:
        for kernel in found:
            linear(kernel, step, weights[0])
            filled = time.perf_counter()
            for weight in weights:
                linear(kernel, token, weight)
            start, now = now, time.perf_counter()
            took[kernel].append((filled - start) + ANSWER_TOKENS / WEIGHTS * (now - filled))
    first = took[found[0]]
    return {kernel: max(map(operator.truediv, took[kernel], first)) * min(first) * 1e3 for kernel in found}
