"""The instructions that products may use: those of this processor, or fewer if the environment says so. Compiles nothing.

PyTorch reads ATEN_CPU_CAPABILITY, oneDNN reads ONEDNN_MAX_CPU_ISA. Compiled kernels follow both: a process can run as on a processor with
fewer instructions.
"""

from __future__ import annotations

import os

import torch

_FEWER = ("amx", "avx10", "avx512", "avxvnni", "avxifma", "avxneconvert")  # LLVM's names of what comes after AVX2
_WITHOUT_BF16 = ("SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX512_CORE", "AVX512_CORE_VNNI")  # oneDNN's names
_WITHOUT_AMX = (*_WITHOUT_BF16, "AVX2_VNNI_2", "AVX512_CORE_BF16", "AVX512_CORE_FP16", "AVX10_1_512", "AVX10_2_512")


def _limited(names: tuple[str, ...]) -> bool:
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA", os.environ.get("DNNL_MAX_CPU_ISA", "")).upper()
    return limit in names or not torch.backends.cpu.get_cpu_capability().startswith("AVX512")


def has_16bit_units(dtype: torch.dtype) -> bool:
    """Whether products may use units that multiply 16-bit numbers of this type."""
    if dtype == torch.float16:
        return torch.cpu._is_amx_fp16_supported() and not _limited(_WITHOUT_AMX)
    return dtype == torch.bfloat16 and level() in ("amx", "avx512_bf16")


def level() -> str:
    """The largest set of instructions in use: amx, avx512_bf16, avx512, avx2, or PyTorch's name of another one."""
    if torch.cpu._is_amx_tile_supported() and not _limited(_WITHOUT_AMX):
        return "amx"
    if torch.cpu._is_avx512_bf16_supported() and not _limited(_WITHOUT_BF16):
        return "avx512_bf16"
    return torch.backends.cpu.get_cpu_capability().lower().replace(" ", "_")


def target(cpu: str, features: dict[str, bool]) -> tuple[str, dict[str, bool]]:
    """The processor and its features that kernels are compiled for, given LLVM's names of the host's."""
    most = level()
    if most in ("amx", "avx512_bf16"):
        without: tuple[str, ...] = () if most == "amx" else ("amx",)
    elif most == "avx512":
        without = ("amx", "avx10", "avx512bf16", "avx512fp16", "avxneconvert")
    else:
        without, cpu = _FEWER, "x86-64-v3" if features.get("avx512f") else cpu
    return cpu, {name: has and not name.startswith(without) for name, has in features.items()}


def lanes(features: dict[str, bool]) -> int:
    """Numbers of fp32 that kernels take at a time with these features, by LLVM's names; 0 where they lack an instruction.

    NEON of aarch64 always multiplies and adds at once, and converts fp16; eight numbers are two of its registers.
    """
    if features.get("avx512f") and features.get("avx512bw"):
        return 16
    return 8 if (features.get("fma") and features.get("f16c")) or features.get("neon") else 0
