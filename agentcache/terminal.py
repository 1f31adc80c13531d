"""Output of the command line: sizes, tables, bars, errors in one line. Knows no verbs, and loads no torch."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer.core import TyperGroup

from .errors import AgentCacheError, ConfigError

UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}  # 1 GB is 2**30 bytes everywhere here
AGES = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


class report_errors(AbstractContextManager[None]):
    """Turns the errors that agentcache raises on purpose into one line and exit code 1; others keep their traceback."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, AgentCacheError):
            typer.echo(f"agentcache: {shown(' '.join(str(error).split()))}", err=True)
            raise typer.Exit(1) from error


class Verbs(TyperGroup):
    """All verbs: what agentcache refuses on purpose ends any of them with one line."""

    def invoke(self, context: Any) -> Any:
        with report_errors():
            return super().invoke(context)


def shown(text: str) -> str:
    """A text that may come from elsewhere, without what a terminal would obey."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def size(count: float) -> str:
    """Bytes as a person reads them."""
    for unit in ("bytes", "kB", "MB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GB"


def bytes_of(text: str, option: str) -> int:
    """`5GB`, `500 MB`, `1.5g`, `4096`."""
    found = re.fullmatch(r"(?a:\s*(\d+(?:\.\d*)?)\s*([kmgt]?)i?b?\s*)", text, re.IGNORECASE)
    if found is None:
        raise ConfigError(f"{option}={text!r}: give a size such as 5GB or 500MB")
    return int(float(found[1]) * UNITS[found[2].lower()])


def seconds_of(text: str, option: str) -> float:
    """`30d`, `12h`, `2w`."""
    found = re.fullmatch(r"(?a:\s*(\d+(?:\.\d*)?)\s*([smhdw])\s*)", text, re.IGNORECASE)
    if found is None:
        raise ConfigError(f"{option}={text!r}: give an age such as 30d, 12h or 2w")
    return float(found[1]) * AGES[found[2].lower()]


def say_json(found: dict[str, Any]) -> None:
    """One JSON object on standard output."""
    typer.echo(json.dumps(found, indent=1, default=str))


def listing(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    """A table with a head, which is never broken; columns whose name starts with `#` are numbers or dates, which are not either."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        name, whole = column.removeprefix("#"), column.startswith("#")
        table.add_column(name, justify="right" if whole else "left", overflow="fold", no_wrap=whole, min_width=len(name))
    for row in rows:
        table.add_row(*(Text(f"{cell:,}" if isinstance(cell, int) else shown(str(cell))) for cell in row))
    return table


def facts(report: dict[str, Any]) -> Table:
    """A nested report, one line for each value."""
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for label, value in lines(report):
        table.add_row(Text(shown(label)), Text(shown(value)))
    return table


def lines(report: dict[str, Any], depth: int = 0) -> Iterator[tuple[str, str]]:
    """Labels, indented, and values of a nested report."""
    for key, value in report.items():
        label = "  " * depth + str(key)
        if isinstance(value, dict):
            yield label, "" if value else "none"
            yield from lines(value, depth + 1)
        elif isinstance(value, (list, tuple)):
            yield label, ", ".join(str(item) for item in value) or "none"
        elif isinstance(value, bool):
            yield label, "yes" if value else "no"
        elif str(key).endswith("bytes") and isinstance(value, int):
            yield label.removesuffix("bytes").removesuffix("_") if label.strip() != "bytes" else label, size(value)
        elif isinstance(value, int):
            yield label, f"{value:,}"
        elif isinstance(value, float):
            yield label, f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
        else:
            yield label, "unknown" if value is None else str(value)


@contextmanager
def bar(doing: str, hidden: bool) -> Iterator[Callable[[int, int], None]]:
    """Shows tell(done, total) as a bar on standard error, where that is a terminal."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f} %"), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True, disable=hidden or not console.is_terminal) as progress:
        task = progress.add_task(doing, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)
