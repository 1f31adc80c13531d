"""Compiles what ir.py writes for this processor and runs it on PyTorch's threads. Knows no kernels.

Needs llvmlite (the extra `cpu`) and PyTorch's OpenMP runtime, whose threads it borrows.
"""

from __future__ import annotations

import ctypes
import functools
import os
import struct
import threading
from collections.abc import Callable
from typing import Any

import torch

from ... import openmp
from . import instructions

try:
    import llvmlite
    from llvmlite import binding
except (ImportError, OSError):  # OSError: its library is of another system
    binding = None

NUMBERS = {torch.bfloat16: "bfloat", torch.float16: "half", torch.float32: "float"}  # LLVM's names
ALONE = 1 << 20  # multiplications of a kernel that is done sooner than a second thread has woken up
OLDEST_LLVM = (20,)  # older ones do not read `ptr`
# A thread that forks takes it: LLVM's own locks would stay taken in the child if another thread compiled meanwhile.
_compiling = threading.Lock()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_compiling.acquire, after_in_parent=_compiling.release, after_in_child=_compiling.release)
Writer = Callable[..., None]  # of a function's body, given an empty `Code` and its sizes
Sizes = tuple[int | bool, ...]


class Compiler:
    """Compiled functions by writer, type and sizes; they live as long as the process."""

    def __init__(self, team: Any, lanes: int) -> None:
        from .object_cache import Objects

        self.lanes = lanes
        self._team = team
        cpu, self._features = instructions.target(binding.get_host_cpu_name(), binding.get_host_cpu_features())
        features = ",".join(f"{'+' if has else '-'}{name}" for name, has in sorted(self._features.items()))
        self._machine = binding.Target.from_default_triple().create_target_machine(cpu=cpu, features=features, opt=3)
        self._objects = Objects(f"{self._machine.triple} {cpu} {features} {binding.llvm_version_info} {llvmlite.__version__}")
        self._engines: list[Any] = []
        self._compiled: dict[tuple[Writer, str, Sizes], int] = {}

    def has(self, feature: str) -> bool:
        """True if the processor has it, by LLVM's name."""
        return bool(self._features.get(feature))

    def function(self, write: Writer, element: str, *sizes: int | bool) -> int:
        """The address of a function, compiled once, by whichever thread asks first; or by a process before this one."""
        key = (write, element, sizes)
        if key not in self._compiled:
            from .ir import Code

            with _compiling:
                if key not in self._compiled:
                    code = Code(self.lanes, element)
                    write(code, *sizes)
                    engine = binding.create_mcjit_compiler(binding.parse_assembly(""), self._machine)
                    engine.add_object_file(binding.ObjectFileRef.from_data(self._object(code.module())))
                    engine.finalize_object()
                    self._engines.append(engine)
                    self._compiled[key] = engine.get_function_address("share")
        return self._compiled[key]

    def _object(self, source: str) -> bytes:
        """The machine's code of a module."""
        name = self._objects.name(source)
        code = self._objects.find(name)
        if code is None:
            module = binding.parse_assembly(source)
            module.verify()
            code = self._machine.emit_object(module)
            self._objects.keep(name, code)
        return code

    def run(self, function: int, threads: int, *fields: int) -> None:
        """Run it on so many threads, or as many of them as there are to be had; each finds its own part of what the fields say."""
        args = block(*fields)
        self._team(function, ctypes.addressof(args), threads, 0)


_made: list[Compiler] = []  # threads that ask at once make several, and LLVM ends the process where one is collected


@functools.cache
def compiler() -> Compiler | None:
    """The compiler, if everything it needs is here."""
    runtime = openmp.runtime()
    if binding is None or binding.llvm_version_info < OLDEST_LLVM or runtime is None:
        return None
    team = runtime.GOMP_parallel
    team.argtypes, team.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint), None
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    binding.add_symbol("GOMP_parallel", ctypes.cast(team, ctypes.c_void_p).value)
    for name in ("omp_get_thread_num", "omp_get_num_threads"):
        binding.add_symbol(name, ctypes.cast(getattr(runtime, name), ctypes.c_void_p).value)
    lanes = instructions.lanes(instructions.target(binding.get_host_cpu_name(), binding.get_host_cpu_features())[1])
    if not lanes:
        return None
    _made.append(Compiler(team, lanes))
    return _made[-1]


def multiplies_pairs() -> bool:
    """True if this processor has the instruction for pairs of bf16 numbers, and no matrix units besides."""
    found = compiler()
    return found is not None and found.has("avx512bf16") and not found.has("amx-bf16")


def run(write: Writer, element: str, sizes: Sizes, threads: int, *fields: int) -> None:
    """Run the function of this writer, type and sizes on so many threads. fields: its argument block."""
    found = compiler()
    assert found is not None
    found.run(found.function(write, element, *sizes), threads, *fields)


def threads_for(work: int, tasks: int, alone: int = ALONE) -> int:
    """The number of threads for so much work; up to `alone` it is done before two have met."""
    return min(torch.get_num_threads(), tasks) if work > alone else 1


def block(*fields: int) -> Any:
    """An argument block: 64 bits a field."""
    return (ctypes.c_int64 * len(fields))(*fields)


def address(tensor: torch.Tensor | None) -> int:
    """A tensor as a field."""
    return tensor.data_ptr() if tensor is not None else 0


def bits_of(number: float) -> int:
    """An fp32 number as a field."""
    return int(struct.unpack("<I", struct.pack("<f", number))[0])
