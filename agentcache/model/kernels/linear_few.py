"""Products of few rows with 16-bit weights, compiled at run time. Knows nothing of models.

A decoding step multiplies one row per request with every weight, and waits for memory: each weight is read once here. On processors without
16-bit matrix units larger products convert the weights to fp32 first, which reads and writes three times their bytes; on those that
multiply pairs of bf16 numbers the library reads weights at half of what memory gives. Accumulated in the very order of oneDNN's
product, which `Numerics` finds out: so the bits are those of the large products, and rows never depend on each other.

    out[m, n] = Σ over blocks b, in order, of chain(b)        chain(b) = fma(x[m, k], w[n, k], ...) for k of the block, ascending, from 0;
                                                              "pairs": the same of x[m, k] w[n, k] + x[m, k + 1] w[n, k + 1], k even

A tile is `lanes` outputs: per step one 64 byte line of each of their weight rows is loaded, the lines are transposed in registers,
and each lane then runs its own chain. More rows than registers hold are further passes over the tile, which lies in the cache by then.
Needs llvmlite (the extra `cpu`) and PyTorch's OpenMP runtime, whose threads it borrows.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from collections.abc import Callable, Sequence
from string import Template
from typing import Any

import torch

from . import openmp
from .ir import splat, transposed
from .object_cache import Objects

try:
    import llvmlite
    from llvmlite import binding
except ImportError:
    binding = None

ROWS = (1, 2, 4, 8)  # rows of one pass over a tile's weights: more need more registers than there are
PASS = ROWS[-1]
MOST_ROWS = 32  # above it, converting the weights first is as fast
PAIRS = "pairs"  # of bf16 numbers, multiplied by one instruction
ALONE = 1 << 20  # multiplications of a product that is done sooner than a second thread has woken up
OLDEST_LLVM = (20,)  # older ones do not read `ptr`
# Taken by whoever forks: LLVM's own locks would stay taken in the child if another thread compiled meanwhile.
_compiling = threading.Lock()
os.register_at_fork(before=_compiling.acquire, after_in_parent=_compiling.release, after_in_child=_compiling.release)
_FIELDS = 8  # of the argument block, 64 bits each: weight, x, out, outs, ins, block, tiles, passes
BINARY = {torch.bfloat16: "bfloat", torch.float16: "half"}


def _wide(lanes: int, element: str, word: str, name: str) -> list[str]:
    """IR that makes %{name}0 and %{name}1, fp32 vectors, of the low and the high 16-bit numbers of the words."""
    ints, floats = f"<{lanes} x i32>", f"<{lanes} x float>"
    if element == "bfloat":
        return [
            f"%{name}l = shl {ints} {word}, {splat(lanes, 'i32 16')}",
            f"%{name}h = and {ints} {word}, {splat(lanes, 'i32 -65536')}",
            f"%{name}0 = bitcast {ints} %{name}l to {floats}",
            f"%{name}1 = bitcast {ints} %{name}h to {floats}",
        ]
    lines = [f"%{name}s = lshr {ints} {word}, {splat(lanes, 'i32 16')}"]
    for number, source in ((0, word), (1, f"%{name}s")):
        lines += [
            f"%{name}n{number} = trunc {ints} {source} to <{lanes} x i16>",
            f"%{name}b{number} = bitcast <{lanes} x i16> %{name}n{number} to <{lanes} x half>",
            f"%{name}{number} = fpext <{lanes} x half> %{name}b{number} to {floats}",
        ]
    return lines


def _everywhere(lanes: int, kind: str, at: str, index: int) -> list[str]:
    """IR that makes %xv{at}: number `index` of x, of this kind, in every lane."""
    vector = f"<{lanes} x {kind}>"
    return [
        f"%xp{at} = getelementptr {kind}, ptr %xk, i64 {index}",
        f"%xs{at} = load {kind}, ptr %xp{at}, align 4",
        f"%xi{at} = insertelement {vector} poison, {kind} %xs{at}, i32 0",
        f"%xv{at} = shufflevector {vector} %xi{at}, {vector} poison, <{lanes} x i32> zeroinitializer",
    ]


def _step(lanes: int, rows: int, element: str) -> tuple[list[str], list[str]]:
    """IR of one step: 2 * lanes products for each lane and row; also the names of the chains behind it."""
    floats, ints = f"<{lanes} x float>", f"<{lanes} x i32>"
    lines = []
    for i in range(lanes):
        lines += [f"%p{i} = getelementptr i8, ptr %w{i}, i64 %kb", f"%r{i} = load {ints}, ptr %p{i}, align 2"]
        if element == PAIRS:  # the next tile, line after line: sixteen rows at once wait longer for memory
            lines += [f"%g{i} = add i64 %behind0, {64 * i}", f"%f{i} = getelementptr i8, ptr %w0, i64 %g{i}"]
        else:
            lines.append(f"%f{i} = getelementptr i8, ptr %p{i}, i64 512")
        lines.append(f"call void @llvm.prefetch.p0(ptr %f{i}, i32 0, i32 {2 if element == PAIRS else 3}, i32 1)")

    def named(operation: str) -> str:
        lines.append(f"%t{len(lines)} = {operation}")
        return f"%t{len(lines) - 1}"

    words = transposed(named, [f"%r{i}" for i in range(lanes)])
    chains = [f"%acc{m}" for m in range(rows)]
    if element == PAIRS:
        for j, word in enumerate(words):
            for m in range(rows):
                at = f"{m}_{j}"
                lines += _everywhere(lanes, "i32", at, j * rows + m)
                lines.append(f"%a{at} = call {floats} {_BOTH}({floats} {chains[m]}, {ints} %xv{at}, {ints} {word})")
                chains[m] = f"%a{at}"
        return lines, chains
    for j, word in enumerate(words):
        lines += _wide(lanes, element, word, f"v{j}_")
        for half in (0, 1):
            for m in range(rows):
                at = f"{m}_{j}_{half}"
                lines += _everywhere(lanes, "float", at, (2 * j + half) * rows + m)
                lines.append(f"%a{at} = call {floats} @llvm.fma.v{lanes}f32({floats} %xv{at}, {floats} %v{j}_{half}, {floats} {chains[m]})")
                chains[m] = f"%a{at}"
    return lines, chains


_BOTH = "@llvm.x86.avx512bf16.dpbf16ps.512"
_MODULE = Template("""
${both}
declare i32 @omp_get_thread_num()
declare i32 @omp_get_num_threads()
declare void @llvm.prefetch.p0(ptr, i32, i32, i32)
declare ${floats} @llvm.fma.v${lanes}f32(${floats}, ${floats}, ${floats})

define void @share(ptr %args) {
entry:
${fields}
  %w = inttoptr i64 %u0 to ptr
  %x = inttoptr i64 %u1 to ptr
  %out = inttoptr i64 %u2 to ptr
  %outs = add i64 %u3, 0
  %ins = add i64 %u4, 0
  %line = mul i64 %ins, 2
  %me32 = call i32 @omp_get_thread_num()
  %me = sext i32 %me32 to i64
  %team32 = call i32 @omp_get_num_threads()
  %team = sext i32 %team32 to i64
  %before = mul i64 %me, %u6
  %from = udiv i64 %before, %team
  %next = add i64 %me, 1
  %behind = mul i64 %next, %u6
  %to = udiv i64 %behind, %team
  %some = icmp ult i64 %from, %to
  br i1 %some, label %tile, label %end
tile:
  %t = phi i64 [ %from, %entry ], [ %tnext, %done ]
  %first = mul i64 %t, ${lanes}
${weights}
  br label %pass
pass:
  %pn = phi i64 [ 0, %tile ], [ %pnext, %stored ]
  %prow = mul i64 %pn, ${rows}
  %pall = mul i64 %prow, %ins
  %pxo = lshr i64 %pall, ${halves}
  %px = getelementptr i32, ptr %x, i64 %pxo
  %poo = mul i64 %prow, %outs
  %po = getelementptr float, ptr %out, i64 %poo
  br label %block
block:
  %kstart = phi i64 [ 0, %pass ], [ %kend, %closed ]
${totals}
  %kraw = add i64 %kstart, %u5
  %over = icmp ugt i64 %kraw, %ins
  %kend = select i1 %over, i64 %ins, i64 %kraw
  br label %step
step:
  %k = phi i64 [ %kstart, %block ], [ %knext, %step ]
${starts}
  %kb = mul i64 %k, 2
  %here = add i64 %line, %kb
  %behind0 = mul i64 %here, ${lanes}
  %kx = lshr i64 %k, ${halves}
  %xo = mul i64 %kx, ${rows}
  %xk = getelementptr i32, ptr %px, i64 %xo
  ${steps}
  %knext = add i64 %k, ${stride}
  %more = icmp ult i64 %knext, %kend
  br i1 %more, label %step, label %closed
closed:
${closes}
  %blocks = icmp ult i64 %kend, %ins
  br i1 %blocks, label %block, label %stored
stored:
${stores}
  %pnext = add i64 %pn, 1
  %passes = icmp ult i64 %pnext, %u7
  br i1 %passes, label %pass, label %done
done:
  %tnext = add i64 %t, 1
  %tiles = icmp ult i64 %tnext, %to
  br i1 %tiles, label %tile, label %end
end:
  ret void
}
""")


def _source(lanes: int, rows: int, element: str) -> str:
    """The module: `share` computes the tiles of one thread of a team."""
    floats = f"<{lanes} x float>"
    fields = "\n".join(f"  %q{i} = getelementptr i64, ptr %args, i64 {i}\n  %u{i} = load i64, ptr %q{i}, align 8" for i in range(_FIELDS))
    body, chains = _step(lanes, rows, element)
    rows_of = range(rows)
    minus_zero = splat(lanes, "float -0.0")
    weights = "\n".join(
        f"  %n{i} = add i64 %first, {i}\n  %o{i} = mul i64 %n{i}, %line\n  %w{i} = getelementptr i8, ptr %w, i64 %o{i}"
        for i in range(lanes)
    )
    totals = "\n".join(f"  %sum{m} = phi {floats} [ {minus_zero}, %pass ], [ %new{m}, %closed ]" for m in rows_of)
    starts = "\n".join(f"  %acc{m} = phi {floats} [ zeroinitializer, %block ], [ {chains[m]}, %step ]" for m in rows_of)
    closes = "\n".join(f"  %new{m} = fadd {floats} %sum{m}, {chains[m]}" for m in rows_of)
    stores = "\n".join(
        f"  %so{m} = mul i64 %outs, {m}\n  %sn{m} = add i64 %so{m}, %first\n  %sp{m} = getelementptr float, ptr %po, i64 %sn{m}\n"
        f"  store {floats} %new{m}, ptr %sp{m}, align 4"
        for m in rows_of
    )
    steps = "\n  ".join(body)
    return _MODULE.substitute(
        both=f"declare {floats} {_BOTH}({floats}, <{lanes} x i32>, <{lanes} x i32>)" if element == PAIRS else "",
        halves=int(element == PAIRS),
        floats=floats,
        lanes=lanes,
        rows=rows,
        fields=fields,
        weights=weights,
        totals=totals,
        starts=starts,
        steps=steps,
        stride=2 * lanes,
        closes=closes,
        stores=stores,
    )


class _Kernels:
    """Compiled kernels by rows and type; they live as long as the process."""

    def __init__(self, team: Any, lanes: int) -> None:
        self.lanes = lanes
        self._team = team
        self._features = binding.get_host_cpu_features()
        host, cpu, features = binding.Target.from_default_triple(), binding.get_host_cpu_name(), self._features.flatten()
        self._machine = host.create_target_machine(cpu=cpu, features=features, opt=3)
        self._objects = Objects(f"{self._machine.triple} {cpu} {features} {binding.llvm_version_info} {llvmlite.__version__}")
        self._engines: list[Any] = []
        self._compiled: dict[str, int] = {}

    def has(self, feature: str) -> bool:
        """Whether the processor has it, by LLVM's name."""
        return bool(self._features.get(feature))

    def compiled(self, name: str, source: Callable[[], str]) -> int:
        """The address of `share` in this module, compiled once, by whichever thread asks first; or by a process before this one."""
        if name not in self._compiled:
            with _compiling:
                if name not in self._compiled:
                    engine = binding.create_mcjit_compiler(binding.parse_assembly(""), self._machine)
                    engine.add_object_file(binding.ObjectFileRef.from_data(self._object(source())))
                    engine.finalize_object()
                    self._engines.append(engine)
                    self._compiled[name] = engine.get_function_address("share")
        return self._compiled[name]

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

    def product(self, rows: int, element: str) -> int:
        """The address of the product of so many rows (of `ROWS`) with weights of this type."""
        return self.compiled(f"{rows} {element}", functools.partial(_source, self.lanes, rows, element))

    def team(self, share: int, args: Any, threads: int) -> None:
        """Run it on so many threads, or as many of them as there are to be had; each finds its own part."""
        self._team(share, ctypes.addressof(args), threads, 0)


@functools.cache
def kernels() -> _Kernels | None:
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
    has = binding.get_host_cpu_features()
    if not (has.get("fma") and has.get("f16c")):
        return None
    return _Kernels(team, 16 if has.get("avx512f") and has.get("avx512bw") else 8)


def compile_products() -> None:
    """Have the products of few rows with bf16 weights ready: they depend on the processor alone, so weights may load meanwhile."""
    if (found := kernels()) is not None:
        for rows in ROWS:
            found.product(rows, PAIRS if multiplies_pairs() else BINARY[torch.bfloat16])


def takes(weight: torch.Tensor, rows: int) -> bool:
    """Whether this product can run here."""
    found = kernels() if rows <= MOST_ROWS and weight.dtype in BINARY else None
    return (
        found is not None
        and weight.device.type == "cpu"
        and weight.is_contiguous()
        and weight.shape[0] % found.lanes == 0
        and weight.shape[1] % (2 * found.lanes) == 0
    )


def multiplies_pairs() -> bool:
    """Whether this processor has the instruction for pairs of bf16 numbers, and no matrix units besides."""
    found = kernels()
    return found is not None and found.has("avx512bf16") and not found.has("amx-bf16")


def product(x: torch.Tensor, weights: Sequence[torch.Tensor], block: int) -> torch.Tensor:
    """x [rows, ins] times each weight [outs, ins] transposed, side by side -> [rows, all outs] fp32.

    x: fp32, or bf16 to be multiplied in pairs where `multiplies_pairs`. Accumulated in blocks of `block` inputs. Only weights that `takes`
    accepts; block is a multiple of 32.
    """
    found = kernels()
    assert found is not None and block % (2 * found.lanes) == 0
    (rows, ins), element = x.shape, BINARY[weights[0].dtype]
    if x.dtype == torch.bfloat16:
        x, element = x.contiguous().view(torch.int32), PAIRS
    count = next(n for n in ROWS if n >= min(rows, PASS))
    passes = -(-rows // count)
    if short := passes * count - rows:
        x = torch.cat((x, x.new_zeros(short, x.shape[1])))
    x = x.view(passes, count, -1).transpose(1, 2).contiguous()  # as it is read: whole rows would lie on each other in the cache
    outs = [weight.shape[0] for weight in weights]
    total = sum(outs)
    out = torch.empty(passes * count, total)
    share = found.product(count, element)
    at = out.data_ptr()
    for weight, some in zip(weights, outs):
        threads = torch.get_num_threads() if passes * count * some * ins > ALONE else 1
        args = (ctypes.c_int64 * _FIELDS)(weight.data_ptr(), x.data_ptr(), at, total, ins, block, some // found.lanes, passes)
        found.team(share, args, threads)
        at += 4 * some
    return out[:rows]
