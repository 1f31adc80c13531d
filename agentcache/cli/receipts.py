"""The verbs of evidence: verify, show and sum the receipts that engines wrote. Knows how to print, nothing else."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ..terminal import listing, say_json
from .store import JsonOption, count

app = typer.Typer(help="Receipts that engines wrote with `receipts=FOLDER`.", no_args_is_help=True)
FolderArgument = Annotated[Path, typer.Argument(metavar="FOLDER", help="The folder given as `Engine(receipts=...)`.")]


@app.command()
def verify(folder: FolderArgument, as_json: JsonOption = False) -> None:
    """Check that no receipt was changed, left out, doubled or moved. Exit code 1 if one was."""
    from .. import receipt_log

    held, faults = receipt_log.verify(folder)
    if as_json:
        say_json({"receipts": held, "faults": [asdict(fault) for fault in faults]})
    else:
        for fault in faults:
            typer.echo(f"{fault.file}, line {fault.line}: {fault.why}")
        typer.echo(f"{count(held, 'receipt')}: {'these hold' if faults else 'all hold'}")
    if faults:
        raise typer.Exit(1)


@app.command()
def show(folder: FolderArgument) -> None:
    """Print all receipts as JSON lines, chain by chain."""
    from .. import receipt_log

    for one in receipt_log.read(folder):
        typer.echo(json.dumps(one))


@app.command("sum")
def sum_(
    folder: FolderArgument,
    by: Annotated[str, typer.Option(help="namespace, model, adapter, group (a digest of the tools) or role.")] = "namespace",
    as_json: JsonOption = False,
) -> None:
    """Sum tokens, and the time that reuse saved."""
    from .. import receipt_log

    found = receipt_log.totals(receipt_log.read(folder), by)
    if as_json:
        say_json({"by": by, "totals": found})
        return
    kinds = ("requests", "prompt_tokens", "cached_tokens", "computed_tokens")
    rows = [(name, *(one[kind] for kind in kinds), f"{one['saved_ms'] / 1e3:.1f} s") for name, one in found.items()]
    Console().print(listing((by, "#requests", "#prompt tokens", "#cached", "#computed", "#saved"), rows))
