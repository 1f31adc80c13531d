"""The command `agentcache`: one thin function per verb. Knows how to print, nothing else.

Nothing here imports torch before a verb needs it: `--help` answers at once.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from . import __version__
from .bench.cli import app as bench_app
from .errors import AgentCacheError

app = typer.Typer(
    name="agentcache",
    help="Agents on your own models: a step pays only for its new tokens.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(bench_app, name="bench")

_VERSIONS = ("torch", "transformers", "tokenizers", "safetensors", "blake3", "numpy", "bitsandbytes")


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"agentcache {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")] = False,
) -> None:
    pass


@app.command()
def demo(
    json_file: Annotated[str | None, typer.Option("--json", metavar="FILE", help="Also write every figure to FILE.")] = None,
    layers: Annotated[int, typer.Option(min=1, help="Layers of the random model: more is slower and more like a real one.")] = 4,
) -> None:
    """Replay a recorded tool-calling episode with reuse off, cold and warm, and show what each step paid."""
    from .demo import run

    with _said_plainly():
        report = run(Console(), layers=layers)
        if json_file:
            with open(json_file, "w", encoding="utf-8") as out:
                json.dump(report, out, indent=1)


@app.command()
def doctor(
    model: Annotated[str | None, typer.Option(help="Folder or id of a model: also say how it can be served.")] = None,
    shape: Annotated[str | None, typer.Option(help="The same for a known shape with random weights (see bench --help).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Say what is bit-identical on this machine, with which padding, threads and versions, and what is not and why."""
    with _said_plainly():
        report = _examine(model, shape)
    if as_json:
        typer.echo(json.dumps(report, indent=1, default=str))
    else:
        Console().print(_table(report))
    if report["installation"] != "ok":
        raise typer.Exit(1)


class _said_plainly:
    """Turns the errors that agentcache raises on purpose into one line and exit code 1; others keep their traceback."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, AgentCacheError):
            typer.echo(f"agentcache: {error}", err=True)
            raise typer.Exit(1) from error


def _examine(model: str | None, shape: str | None) -> dict[str, Any]:
    import agentcache_llm

    from .bench.load import versions
    from .model.numerics import describe

    report: dict[str, Any] = {
        "installation": agentcache_llm.conflict() or "ok",
        "versions": {"agentcache": __version__, **versions(_VERSIONS)},
        "machine": {
            "system": f"{platform.system()} {platform.release()} {platform.machine()}",
            "processors": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "memory_bytes": _memory_bytes(),
            "accelerator": _accelerator(),
        },
        "numerics": describe(),
    }
    if model or shape:
        report["model"] = _examine_model(model, shape)
    return report


def _examine_model(model: str | None, shape: str | None) -> dict[str, Any]:
    from .engine import Engine

    if model is not None:
        engine = Engine(model, store=None)
    else:
        from .bench.shapes import load

        engine = Engine(*load(str(shape)), store=None)
    with engine:
        known, spec, numerics = engine.model, engine.model.spec, engine.model.numerics
        report: dict[str, Any] = {
            "family": known.support.family.name,
            "reuse": known.support.paged,
            "why not": known.support.why or "nothing stands against it",
            "bitwise": known.bitwise,
            "layers stepped": known.stepped,
            "dtype": str(known.dtype).removeprefix("torch."),
            "context_tokens": known.context_tokens,
        }
        if spec is not None and numerics is not None:
            report |= {"KV bytes per token": spec.token_bytes, "numerics": asdict(numerics)}
        return report


def _memory_bytes() -> int | None:
    if not hasattr(os, "sysconf") or sys.platform == "darwin":
        return None
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _accelerator() -> str:
    import torch

    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else "none"


def _rows(report: dict[str, Any], depth: int = 0) -> Iterator[tuple[str, str]]:
    for key, value in report.items():
        label = "  " * depth + str(key)
        if isinstance(value, dict):
            yield label, ""
            yield from _rows(value, depth + 1)
        elif isinstance(value, (list, tuple)):
            yield label, ", ".join(str(item) for item in value) or "none"
        elif isinstance(value, bool):
            yield label, "yes" if value else "no"
        elif str(key).endswith("_bytes") and isinstance(value, int):
            yield label.removesuffix("_bytes"), f"{value / 2**30:.1f} GB"
        else:
            yield label, "unknown" if value is None else str(value)


def _table(report: dict[str, Any]) -> Table:
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for label, value in _rows(report):
        table.add_row(label, value)
    return table
