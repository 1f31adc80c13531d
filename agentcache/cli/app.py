"""The command `agentcache`: one thin function per verb. Knows how to print, nothing else.

Nothing here imports torch before a verb needs it: `--help` answers at once.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from .. import __version__
from ..approximate.calibrate.cli import calibrate, rag, segments
from ..bench.cli import app as bench_app
from ..bench.options import to_write, write
from ..terminal import Verbs, facts, say_json
from . import lint, receipts, upkeep
from . import store as stores
from .replay import replay
from .serve import serve

app = typer.Typer(
    name="agentcache",
    cls=Verbs,
    help="Agents on your own models: a step pays only for its new tokens.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # help in boxes costs 200 ms of imports
    pretty_exceptions_enable=False,
)
bench_app.command()(segments)
bench_app.command()(rag)
app.add_typer(bench_app, name="bench")
app.add_typer(receipts.app, name="receipts")

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


def demo(
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", callback=to_write, help="Also write every figure to FILE.")
    ] = None,
) -> None:
    """Let the embedded model answer questions with real tools. Shows what each step paid: reuse off, cold, warm and in a second process."""
    from ..demo.run import run

    report = run(Console())
    if json_file is not None:
        write(json_file, json.dumps(report, indent=1) + "\n")


def doctor(
    context: typer.Context,
    model: Annotated[str | None, typer.Option(help="Folder or id of a model: also say how it can be served.")] = None,
    shape: Annotated[str | None, typer.Option(help="The same for a known shape with random weights (see bench --help).")] = None,
    store: stores.StoreOption = None,
    as_json: stores.JsonOption = False,
) -> None:
    """Say what is bit-identical on this machine, and what is not. With padding, threads, versions, the reasons, and the store's folder."""
    report = _examine(model, shape, context.obj)
    report["store"] = upkeep.examine(store)
    if as_json:
        say_json(report)
    else:
        Console().print(facts(report))
    if report["installation"] != "ok" or "problem" in report["store"]:
        raise typer.Exit(1)


def _examine(model: str | None, shape: str | None, conflict: Callable[[], str | None] | None) -> dict[str, Any]:
    """conflict: tells what is in the way of this package, given by the module that stands outside it."""
    import torch

    from ..bench.environment import machine, versions
    from ..model.machine_report import describe

    accelerator = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "none"
    report: dict[str, Any] = {
        "installation": (conflict and conflict()) or "ok",
        "versions": {"agentcache": __version__, **versions(_VERSIONS)},
        "machine": {**machine(), "accelerator": accelerator},
        "numerics": describe(),
    }
    if model or shape:
        report["model"] = _examine_model(model, shape)
    return report


def _examine_model(model: str | None, shape: str | None) -> dict[str, Any]:
    from ..bench.shapes import load
    from ..engine import Engine
    from ..model.verdict import verdict

    with Engine(model, store=None) if model is not None else Engine(*load(str(shape)), store=None) as engine:
        known, numerics = engine.model, engine.model.numerics
        return {
            "family": known.support.name,
            **verdict(known),
            "bitwise": known.bitwise,
            "layers stepped": known.stepped,
            "dtype": str(known.dtype).removeprefix("torch."),
            "context_tokens": known.context_tokens,
            **({"numerics": {**asdict(numerics), "probe_ms": round(numerics.probe_ms, 1)}} if numerics is not None else {}),
        }


# in the order of use, as `--help` lists them
_of_stores = (stores.warm, stores.ls, stores.inspect, stores.stats, upkeep.verify, upkeep.prune, upkeep.export, upkeep.import_)
for _verb in (demo, doctor, *_of_stores, serve, lint.lint, replay, calibrate):
    app.command(_verb.__name__.rstrip("_"))(_verb)
