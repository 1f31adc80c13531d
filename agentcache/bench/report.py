"""Figures for people and for programs: tables, one JSON line. Measures nothing."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ..errors import ConfigError
from .given import write

WIDTH = 170
_TTFT = ("stock", "static", "recipe", "kept", "off", "disk_cold", "disk_warm", "hit")


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], caption: str = "") -> Table:
    """A table of right-aligned cells."""
    made = Table(title=title, title_justify="left", caption=caption or None, caption_justify="left")
    for column in columns:
        made.add_column(column, justify="right", no_wrap=True)
    for cells in rows:
        made.add_row(*cells)
    return made


def number(value: float | None, digits: int = 0) -> str:
    """With thousands separated; a dash for what was not measured."""
    return "-" if value is None else f"{value:,.{digits}f}"


def latency_tables(rows: Sequence[Mapping[str, Any]]) -> list[Table]:
    """First tokens; further tokens and what warming is worth."""
    first = [
        [
            number(r["tools"]),
            number(r["prompt_tokens"]),
            number(r["tail_tokens"]),
            *(number(r[f"{key}_ttft_ms"]) for key in _TTFT),
            number(r["floor_ms"]),
            f"{r['speedup']:.1f}x",
            f"{r['hit_over_floor']:.2f}",
            f"{r['off_over_stock']:.2f}",
        ]
        for r in rows
    ]
    columns = ["tools", "prompt", "tail", *(name.replace("_", " ") for name in _TTFT), "floor", "stock/hit", "hit/floor", "off/stock"]
    stored = [
        [
            number(r["tools"]),
            number(r["group_bytes"] / 1e6, 1),
            *(number(r[key], 1) for key in ("read_cold_ms", "read_warm_ms")),
            *(number(r[f"disk_{kind}_ttft_ms"] - r["floor_ms"], 1) for kind in ("cold", "warm")),
            *(f"{r['stock_ttft_ms'] / r[f'disk_{kind}_ttft_ms']:.1f}x" for kind in ("cold", "warm")),
            *(number(r["second_process"][kind]["ttft_ms"] if "second_process" in r else None) for kind in ("cold", "warm")),
        ]
        for r in rows
    ]
    disk = ["tools", "MB", "read cold", "read warm", "cold - floor", "warm - floor", "stock/cold", "stock/warm", "2nd cold", "2nd warm"]
    rest = [
        [
            number(r["tools"]),
            *(number(r[f"{key}_decode_ms"], 1) for key in ("stock", "static")),
            number(r["decode_ms"], 1),
            *(number(r[f"{key}_total_ms"]) for key in ("stock", "off", "hit")),
            number(r["warm_ms"]),
            number(r["group_bytes"] / 1e6, 1),
            number(r["break_even_requests"], 2),
            number(r["saved_ms_per_1000"] / 6e4, 1),
        ]
        for r in rows
    ]
    others = ["tools", *(f"{name} ms/tok" for name in ("stock", "static", "ours")), *(f"{name} all" for name in ("stock", "off", "hit"))]
    others += ["warm ms", "MB", "even after", "min saved"]
    caption = "even after: requests that repay warming; saved: per 1,000 requests"
    return [
        table("time to first token, ms (medians)", columns, first),
        table("the tool group from disk, ms (page cache cold or warm; 2nd: another process)", disk, stored),
        table("decoding, whole answers in ms, and the tool group", others, rest, caption),
    ]


def react_table(families: Mapping[str, Mapping[str, Any]]) -> Table:
    """One line per family of episodes."""
    lines = [
        [
            name,
            *(number(f[key]) for key in ("calls", "prompt_tokens", "new_tokens", "computed_tokens")),
            f"{(f['computed_tokens'] - f['calls']) / max(1, f['new_tokens']):.3f}",
            "yes" if f["within_bound"] else "NO",
            *(number(f[key]) for key in ("stock_ms", "off_ms", "ms")),
            f"{f['off_ms'] / f['ms']:.1f}x" if f["off_ms"] and f["ms"] else "-",
            *(number(f[key]) for key in ("pages_held", "group_pages", "skipped_calls")),
        ]
        for name, f in families.items()
    ]
    columns = ["family", "calls", "prompt", "new", "computed", "(computed-calls)/new", "in bound", "stock ms", "off ms", "ms", "off/ours"]
    return table("recorded episodes, sums over all calls", [*columns, "pages", "group pages", "skipped"], lines)


def store_table(found: Mapping[str, Any]) -> Table:
    """One line per way to read and write."""
    raw = found["rows"][0]
    lines = [
        [
            str(r["way"]),
            *(number(r[f"{kind}_ms"], 1) for kind in ("write", "cold", "warm")),
            *(f"{r[f'{kind}_ms'] / raw[f'{kind}_ms']:.2f}" for kind in ("cold", "warm")),
            *(number(found["bytes"] / r[f"{kind}_ms"] / 1e6, 2) for kind in ("cold", "warm")),
        ]
        for r in found["rows"]
    ]
    columns = ["", "write ms", "cold ms", "warm ms", "cold/raw", "warm/raw", "cold GB/s", "warm GB/s"]
    return table(f"{found['bytes'] / 1e6:,.0f} MB of pages ({found['tokens']:,} tokens), every byte touched", columns, lines)


def segments_table(title: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    """Segment reuse by kind of shift and method."""
    counts = ["n", "prompt", "could", "reused", "of it", "computed"]
    columns = ["kind", "method", *counts, "step ms", "exact/step", "KL", "top-1", "same", "refused"]
    cells = [
        [
            r["family"],
            r["method"],
            number(r["cases"]),
            number(r["prompt_tokens"]),
            number(r["bound_tokens"]),
            number(r["reused_tokens"]),
            number(r["of_bound"], 2),
            number(r["work_tokens"]),
            number(r["step_ms"]),
            number(r["speedup"], 2),
            "-" if r["kl_mean"] is None else f"{r['kl_mean']:.2g}",
            number(r["top1"], 3),
            number(r["decision"], 3),
            number(r["refused"]),
        ]
        for r in rows
    ]
    caption = "could: tokens behind the prefix that stand in a kept prompt; computed: in tokens through all layers; KL: nats per token"
    return table(title, columns, cells, caption)


def save(report: Mapping[str, Any], json_file: Path | None) -> None:
    """The report as one JSON line, into a file if one is named. Called after each part, so that a long run that is ended loses one."""
    if json_file is not None:
        try:
            write(json_file, json.dumps(report, allow_nan=False) + "\n")
        except ConfigError as error:  # a full disk may be emptied while the next part is measured
            print(f"agentcache: {error}", file=sys.stderr, flush=True)


def finish(report: Mapping[str, Any], tables: Sequence[Table], json_file: Path | None) -> None:
    """The report into a file, if one is named; tables and the same line, the last one, to standard output."""
    line = json.dumps(report, allow_nan=False)
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)  # tables keep their columns in a file or a pipe
    for each in tables:
        if each.row_count:
            console.print(each)
    print(line, flush=True)
    if json_file is not None:
        write(json_file, line + "\n")  # behind what is printed: a full disk loses nothing


class Progress:
    """What runs, on standard error: one line that is rewritten, or a line each where that is not a terminal."""

    def __call__(self, text: str) -> None:
        rewritten = sys.stderr.isatty()
        print(f"\r\x1b[K{text}" if rewritten else text, end="" if rewritten else "\n", file=sys.stderr, flush=True)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exc: object) -> None:
        if sys.stderr.isatty():
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
