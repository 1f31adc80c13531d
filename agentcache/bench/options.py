"""Options that the commands of the bench share, and the models they name. Loads torch only when asked for one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import ConfigError


class Shape(str, Enum):
    """Known shapes; the same names as in shapes.py, which would load too much for `--help`."""

    qwen3_06b = "qwen3-0.6b"
    qwen3_8b = "qwen3-8b"
    llama_32_1b = "llama-3.2-1b"
    mistral_7b = "mistral-7b"
    llama_2_7b = "llama-2-7b"
    gemma_3_1b = "gemma-3-1b"
    qwen3_5_08b = "qwen3.5-0.8b"
    granite_4_h_1b = "granite-4-h-1b"
    gpt_oss_tiny = "gpt-oss-tiny"
    small = "small"


class Dtype(str, Enum):
    """Types of weights and KV."""

    bfloat16 = "bfloat16"
    float16 = "float16"
    float32 = "float32"


class Weights(str, Enum):
    """Types that agentcache quantizes weights to."""

    int8 = "int8"


class Isa(str, Enum):
    """Sets of instructions that a command can be held to."""

    avx2 = "avx2"
    avx512 = "avx512"
    avx512_bf16 = "avx512_bf16"


# variables under which a process uses these instructions and no others: PyTorch, oneDNN and MKL read them when they are loaded, our own
# kernels follow the first two
VARIABLES = {
    Isa.avx2: {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
    Isa.avx512: {"ATEN_CPU_CAPABILITY": "avx512", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE", "MKL_ENABLE_INSTRUCTIONS": "AVX512"},
    Isa.avx512_bf16: {"ATEN_CPU_CAPABILITY": "avx512", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16", "MKL_ENABLE_INSTRUCTIONS": "AVX512"},
}


def hold_to(isa: Isa | None) -> Isa | None:
    """For an option that names instructions: run the same command with no others, in a process of its own, and exit as it does."""
    if isa is None:
        return None
    if any(os.environ.get(name) != value for name, value in VARIABLES[isa].items()):
        command = [sys.executable, "-m", "agentcache", *sys.argv[1:]]
        raise typer.Exit(subprocess.run(command, env={**os.environ, **VARIABLES[isa]}, check=False).returncode)
    from ..model.kernels.instructions import level

    if level() != isa.value:
        raise typer.BadParameter(f"{isa.value!r} is not to be had: this processor has {level()!r}; name one that it has")
    return isa


def to_write(path: Path | None) -> Path | None:
    """For an option that names a file to write: one that cannot be is refused before anything is computed."""
    if path is not None:
        folder = path.absolute().parent
        if path.is_dir() or not folder.is_dir():
            raise typer.BadParameter(f"{str(path)!r} {'is a folder' if path.is_dir() else 'is in a folder that is not there'}; name a file")
        if not os.access(path if path.exists() else folder, os.W_OK):
            raise typer.BadParameter(f"{str(path)!r} may not be written; name another file")
    return path


def write(path: Path, text: str) -> None:
    """A file that an option names; ConfigError if the disk does not take it."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{str(path)!r} cannot be written: {error.strerror or error}") from error


ModelOption = Annotated[str | None, typer.Option(help="Folder or Hugging Face id of a model; instead of --shape.")]
OwnModelOption = Annotated[str, typer.Option(help="Folder or Hugging Face id of a model; or the project's own small one.")]
TailOption = Annotated[int, typer.Option(min=1, help="Tokens after the tools: user turn and generation prompt.")]
RepeatsOption = Annotated[int, typer.Option(min=1, help="Medians of how many, interleaved.")]
ShapeOption = Annotated[Shape | None, typer.Option(help="A known shape with random weights: timing does not depend on them.")]
DtypeOption = Annotated[Dtype, typer.Option(help="Type of the weights (of a --shape, or to load a --model in).")]
IsaOption = Annotated[
    Isa | None, typer.Option(callback=hold_to, help="Run as on a processor with these instructions; by default all that this one has.")
]
DeviceOption = Annotated[str, typer.Option(help="Where the weights lie: cpu, or cuda where there is a GPU.")]
ThreadsOption = Annotated[int | None, typer.Option(min=1, help="Threads of torch; by default its own choice.")]
WeightsOption = Annotated[Weights | None, typer.Option(help="Quantize the weights, a scale for each output; needs the extra cpu.")]
JsonOption = Annotated[Path | None, typer.Option("--json", metavar="FILE", callback=to_write, help="Also write the JSON line to FILE.")]

ToolsDir = Annotated[Path | None, typer.Option(help="Folder of the catalogs that traces name; default: ../tools.")]


def numbers(text: str, option: str) -> tuple[int, ...]:
    """Positive integers with commas between; none in an empty text."""
    try:
        found = tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError as error:
        raise ConfigError(f"{option}={text!r}: give numbers with commas between, such as 5,10,20") from error
    if any(number < 1 for number in found):
        raise ConfigError(f"{option}={text!r}: all numbers must be at least 1")
    return found


def names(text: str) -> tuple[str, ...]:
    """Words with commas between."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


@dataclass(frozen=True, slots=True)
class Loading:
    """The model that a command measures, and its loading: a folder or id, or a shape with random weights."""

    model: str | None
    shape: Shape | None
    dtype: Dtype
    threads: int | None = None
    bits: int | None = None  # of a weight, by bitsandbytes: 4 is NF4, 8 is int8
    quantized: Weights | None = None  # quantized by agentcache itself
    device: str = "cpu"

    def weights(self, texts: Iterable[str] = ()) -> tuple[Any, Any]:
        """(model, tokenizer), without an engine. texts: what a shape's tokenizer is to be good at, besides the benchmark's own tools."""
        from ..model.loading import load, place, quantize
        from . import shapes

        if self.model is not None and self.shape is not None:
            raise ConfigError(f"model={self.model!r} and shape={self.shape.value!r}: give one of them")
        if self.bits not in (None, 4, 8) or (self.bits and self.model is None):
            raise ConfigError(f"bits={self.bits!r}: must be 4 or 8, of a --model: weights are quantized while its folder is read")
        if self.model is not None:
            return load(self.model, **self._given, load_in_4bit=self.bits == 4, load_in_8bit=self.bits == 8)
        on = place(self.device)
        loaded, tokenizer = shapes.load((self.shape or Shape.small).value, dtype=self.dtype.value, texts=texts)
        if self.quantized is not None:
            if on.type != "cpu":
                raise ConfigError(
                    f"weights={self.quantized.value!r} with device={self.device!r}: its kernels run on a CPU; leave out one of them"
                )
            quantize(loaded)
        return loaded.to(on), tokenizer

    @property
    def _given(self) -> dict[str, Any]:
        return {"dtype": self.dtype.value, "device": self.device, "weights": self.quantized and self.quantized.value}

    def engine(self, texts: Iterable[str] = (), store: Any = None, memory_bytes: int | None = None) -> Any:
        """A running engine; store: the place of its pages, None for memory; memory_bytes: its budget."""
        import torch

        from ..engine import Engine

        if self.threads is not None:
            torch.set_num_threads(self.threads)
        if self.model is not None and self.shape is None and self.bits is None:
            return Engine(self.model, **self._given, store=store, memory_bytes=memory_bytes)
        return Engine(*self.weights(texts), store=store, memory_bytes=memory_bytes)


def described(engine: Any) -> dict[str, Any]:
    """Machine, versions, model and numerics: what the figures depend on."""
    import torch

    from ..model.kernels.instructions import level
    from ..model.machine_report import kernel_times, limits
    from .environment import machine, versions

    numerics = engine.model.numerics
    return {
        "machine": {**machine(engine.model.device), "instructions": level(), "limits": limits(), "threads": torch.get_num_threads()},
        "versions": versions(),
        "model": {
            "name": engine.name,
            "dtype": str(engine.model.dtype).removeprefix("torch."),
            "weights": engine.model.weights or None,
            "parameters": sum(p.numel() for p in engine.model.model.parameters()),
            "kv_bytes_per_token": engine.model.spec.token_bytes if engine.model.spec else None,
            "stepped": engine.model.stepped,
            "bitwise": engine.model.bitwise,
        },
        "numerics": {**asdict(numerics), **kernel_times(engine.model.dtype)} if numerics else None,
    }
