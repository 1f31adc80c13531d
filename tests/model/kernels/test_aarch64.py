"""Kernels for aarch64: which of them its compiler takes, which name instructions of x86, and whether products have the same bits there.

The last is run in an emulator, where there is one and a compiler for its C library; no test here has run on such a processor.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import shutil
import struct
import subprocess
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from agentcache.model import int8, kernels
from agentcache.model.kernels import jit, linear_compiled, linear_few, linear_many, linear_transposed
from agentcache.model.kernels.ir import Code

pytestmark = pytest.mark.skipif(jit.binding is None or jit.binding.llvm_version_info < jit.OLDEST_LLVM, reason="needs llvmlite")
LANES = 8  # two registers of 128 bits
ELF, MACH = b"\x7fELF", b"\xcf\xfa\xed\xfe"
TRIPLES = ("aarch64-unknown-linux-gnu", "arm64-apple-macosx14.0.0")
# of a writer's parameters: any that it takes
SIZES = {
    "rows": 4, "n": 256, "total": 512, "dim": 64, "wide": 2, "count": 2, "width": 64,
    "taps": 4, "lines": 2, "key_heads": 2, "heads": 4, "groups": 2, "size": 64,
}  # fmt: skip
GCC, QEMU = "aarch64-linux-gnu-gcc", "qemu-aarch64"
# reads fields (8 bytes: a size, 0 for a number; then 8 bytes or so many), calls the kernel with them, writes all that had a size
RUNNER = """
#include <stdio.h>
#include <stdlib.h>
#include <stdint.h>
void share(int64_t *args);
int omp_get_thread_num(void) { return 0; }
int omp_get_num_threads(void) { return 1; }
int main(int argc, char **argv) {
    FILE *in = fopen(argv[1], "rb"), *out = fopen(argv[2], "wb");
    int64_t args[64], sizes[64], count = 0;
    while (fread(&sizes[count], 8, 1, in) == 1) {
        if (sizes[count]) {
            args[count] = (int64_t)aligned_alloc(64, (sizes[count] + 4159) / 64 * 64);
            if (fread((void *)args[count], 1, sizes[count], in) != sizes[count]) return 1;
        } else if (fread(&args[count], 8, 1, in) != 1) return 1;
        count++;
    }
    share(args);
    for (int at = 0; at < count; at++) if (sizes[at]) fwrite((void *)args[at], 1, sizes[at], out);
    fclose(out);
    return 0;
}
"""


def writers() -> Iterator[tuple[str, Callable[..., None], tuple[int | bool, ...]]]:
    """Every function that writes a whole kernel, with sizes that it takes: (its name and switches, itself, sizes)."""
    for found in (module for module in pkgutil.iter_modules(kernels.__path__) if module.name != "cuda"):  # those are Triton's
        module = importlib.import_module(f"{kernels.__name__}.{found.name}")
        for name, write in inspect.getmembers(module, inspect.isfunction):
            parameters = list(inspect.signature(write).parameters.values())
            takes = [parameter.annotation for parameter in parameters]
            if write.__module__ != module.__name__ or name.startswith("_") or takes[:1] != ["Code"] or set(takes[1:]) - {"int", "bool"}:
                continue
            given = [(False, True) if parameter.annotation == "bool" else (SIZES[parameter.name],) for parameter in parameters[1:]]
            for sizes in product(*given):
                on = [parameter.name for parameter, size in zip(parameters[1:], sizes) if size is True]
                yield " ".join((f"{found.name}.{name}", *on)), write, sizes


def source(write: Callable[..., None], element: str, sizes: Sequence[int | bool], lanes: int) -> str:
    code = Code(lanes, element)
    write(code, *sizes)
    return code.module()


def emitted(text: str, triple: str) -> bytes:
    """A module's object for another processor. Whoever calls it has looked for functions of x86, which end the process."""
    binding = jit.binding
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    machine = binding.Target.from_triple(triple).create_target_machine(cpu="generic", features="", opt=3, reloc="pic", codemodel="small")
    module = binding.parse_assembly(text)
    module.verify()
    return bytes(machine.emit_object(module))


def test_kernels_compile_for_aarch64_but_for_pairs_of_bf16() -> None:
    x86, others = set(), set()
    for name, write, sizes in writers():
        if "@llvm.x86." in source(write, "bfloat", sizes, 16):
            x86.add(name)
            continue
        others.add(name)
        for element, triple in zip(jit.NUMBERS.values(), (*TRIPLES, TRIPLES[0])):
            assert emitted(source(write, element, sizes, LANES), triple)[:4] in (ELF, MACH), f"{name}: no object for {triple}"
    assert {name.split(".")[0] for name in x86} == {"linear_few", "linear_many", "linear_transposed", "paged_attention"}
    assert all(" pairs" in name for name in x86)
    products = {"linear_few", "linear_many", "linear_transposed"}
    assert {name.split(".")[0] for name in others} == {"layer", "norm_rope", "paged_attention", "recurrence", *products}


def test_pairs_of_bf16_are_refused_without_their_instruction(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit, "compiler", lambda: Machine({"neon": True, "fp-armv8": True}))
    assert not jit.multiplies_pairs()
    monkeypatch.setattr(jit, "compiler", lambda: Machine({"avx512bf16": True}))
    assert jit.multiplies_pairs()


class Machine:
    """What a compiler says of its processor."""

    def __init__(self, features: dict[str, bool]) -> None:
        self._features = features

    def has(self, name: str) -> bool:
        return name in self._features


@pytest.mark.parametrize(
    ("features", "lanes"),
    [
        ({"neon": True, "fp-armv8": True}, 8),
        ({"fma": True, "f16c": True, "avx2": True}, 8),
        ({"fma": True, "f16c": True, "avx512f": True, "avx512bw": True}, 16),
        ({"fma": True, "avx2": True}, 0),
        ({"neon": False}, 0),
    ],
)
@pytest.mark.skipif(jit.openmp.runtime() is None, reason="needs PyTorch's OpenMP runtime")
def test_kernels_are_chosen_by_what_a_processor_has(features: dict[str, bool], lanes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    monkeypatch.setattr(jit.instructions, "target", lambda cpu, given: (cpu, features))
    monkeypatch.setattr(jit, "Compiler", lambda team, lanes: made.append(lanes) or lanes)
    assert jit.compiler.__wrapped__() == (lanes or None)
    assert made == ([lanes] if lanes else [])


@pytest.mark.slow
@pytest.mark.skipif(jit.compiler() is None, reason="nothing to compare with")
@pytest.mark.skipif(not (shutil.which(GCC) and shutil.which(QEMU)), reason=f"needs {GCC} and {QEMU}")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("lanes", "quantized", "lying"), [(4, False, False), (8, False, False), (8, True, False), (4, False, True), (8, False, True)]
)
def test_a_product_has_the_same_bits(
    dtype: torch.dtype, lanes: int, quantized: bool, lying: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """lying: of a weight that lies transposed."""
    torch.manual_seed(5)
    rows, outs, ins = 4, 64, 1024
    layer = torch.nn.Linear(ins, outs).to(dtype)
    if quantized:
        int8.quantize([layer])
    x, bias = torch.randn(rows, ins).to(dtype), layer.bias.detach()
    weight = layer.weight.detach().T.contiguous().T if lying else layer.weight  # an int8 one holds its scale
    compiler, scale = jit.compiler(), linear_compiled.scale_of(weight)
    monkeypatch.setattr(compiler, "lanes", lanes)  # the order of additions depends on them
    monkeypatch.setattr(compiler, "_compiled", {})
    expected = linear_compiled.chains(x, [(weight, bias)])[0]
    run, tiles = Emulator(jit.NUMBERS[dtype], lanes, tmp_path), outs // linear_many.TILES[lanes]

    stored, out = weight.detach().T if lying else weight.detach(), torch.zeros_like(expected)
    if lying:
        fields = stored, x.float(), out.float(), torch.zeros(linear_transposed.scratch_numbers(rows)), outs, outs, ins, 1, 1, outs
        few = (run(linear_transposed.product_code, (rows, False), *fields)[2] + bias.float()).to(dtype)
    else:
        fields = stored, x.float(), out, bias, torch.zeros(linear_few.scratch_numbers(lanes, rows)), scale, outs, ins, outs // lanes, 1
        few = run(linear_few.product_code, (rows, False, quantized, True), *fields)[2]
    assert torch.equal(few, expected)

    packed = run(linear_many.pack_code, (False, lying), x, torch.zeros(ins * linear_many.ROWS), ins, 1, rows - 1)[1]
    own = linear_many.scratch_bytes(lanes, 1)
    fields = stored, packed, torch.zeros_like(expected), bias, torch.zeros(own // 4), scale, outs, ins, tiles, own, 1, rows - 1, outs
    many = run(linear_many.product_code, (False, quantized, True, lying), *fields)[2]
    assert many.abs().sum() > 0
    assert torch.equal(many, expected)


class Emulator:
    """Runs kernels of one type on another processor, emulated."""

    def __init__(self, element: str, lanes: int, folder: Path) -> None:
        self.element, self.lanes, self.folder = element, lanes, folder

    def __call__(self, write: Callable[..., None], sizes: tuple[int | bool, ...], *fields: Any) -> list[torch.Tensor]:
        """The tensors among the fields as the kernel leaves them."""
        place = self.folder
        (place / "kernel.o").write_bytes(emitted(source(write, self.element, sizes, self.lanes), TRIPLES[0]))
        (place / "runner.c").write_text(RUNNER, encoding="ascii")
        build = [GCC, "-O1", "-static", "-o", place / "runner", place / "runner.c", place / "kernel.o", "-lm"]
        subprocess.run(build, check=True, capture_output=True)
        (place / "fields").write_bytes(b"".join(map(_field, fields)))
        subprocess.run([QEMU, place / "runner", place / "fields", place / "after"], check=True)
        left, found = bytearray((place / "after").read_bytes()), []
        for field in fields:
            if isinstance(field, torch.Tensor):
                found.append(torch.frombuffer(left[: field.nbytes], dtype=field.dtype).view_as(field))
                left = left[field.nbytes :]
        return found


def _field(value: Any) -> bytes:
    if isinstance(value, torch.Tensor):
        held = value.contiguous().view(torch.uint8).numpy().tobytes()
        return struct.pack("<q", len(held)) + held
    return struct.pack("<qq", 0, value or 0)
