"""What is bitwise on this machine, with which kernels, and what is not and why: for `agentcache doctor`. Computes no requests."""

from __future__ import annotations

import os
import platform
from typing import Any

import torch

from ..openmp import use_threads
from .kernels import choice, jit
from .kernels.instructions import has_16bit_units, level
from .numerics import probe


def describe() -> dict[str, Any]:
    """What is bitwise on this machine, with which kernels, paddings and threads, and what is not: for `agentcache doctor`."""
    report: dict[str, Any] = {
        "processor": platform.processor() or platform.machine(),
        "instructions": level(),
        "limits of the environment": limits() or "none",
        "threads": use_threads(torch.get_num_threads()),
        "16-bit matrix units": {str(d).removeprefix("torch."): has_16bit_units(d) for d in (torch.bfloat16, torch.float16)},
    }
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        found = probe(dtype, torch.device("cpu"), (1024,), 4, (128,))
        report[str(dtype).removeprefix("torch.")] = {
            "bitwise": found.pure,
            "kernel": found.kernel,
            **kernel_times(dtype),
            "attention": "compiled" if found.compiled else "batched products",
            "linear rows padded to": found.even or "not padded, each by itself",
            "attention rows padded to": found.query_rows,
            "numerics": found.digest,
            "probe_ms": round(found.probe_ms, 1),
        }
    report["products with weights"] = (
        "compiled, each row by itself" if jit.compiler() else "not compiled: pip install 'agentcache-llm[cpu]' computes faster"
    )
    report["not bitwise"] = {
        "experts outside transformers' interface": "as in Llama 4: their bits depend on the rest of the pack: tokens are promised",
        "bitsandbytes": "its own kernels choose by row count: tokens are promised",
        "cuda": "cuBLAS chooses its code by the number of rows: tokens are promised",
    }
    return report


def limits() -> dict[str, str]:
    """Variables that are set and hold a library to fewer instructions; MKL computes stock transformers' fp32 products."""
    names = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS")
    return {name: os.environ[name] for name in names if name in os.environ}


def kernel_times(dtype: torch.dtype) -> dict[str, dict[str, float]]:
    """The times in ms that decided for a kernel; nothing where there was no choice."""
    if len(choice.candidates(dtype)) == 1:
        return {}
    return {"kernels_ms": {kernel: round(ms, 2) for kernel, ms in choice.times(dtype, torch.get_num_threads()).items()}}
