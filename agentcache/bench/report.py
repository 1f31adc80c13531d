"""Figures for people and for programs: tables, one JSON line. Measures nothing."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table

from ..errors import ConfigError
from .environment import peak_bytes
from .options import Loading, described, write

WIDTH = 170
_TTFT = ("stock", "static", "recipe", "kept", "off", "hit")
_OTHERS = ("llama_bf16", "llama_q8_0")
Row = Mapping[str, Any]
Cell = Callable[[Row], str]


def number(value: float | None, digits: int = 0) -> str:
    """The number with thousands separated; a dash for None."""
    return "-" if value is None else f"{value:,.{digits}f}"


def of(key: str, digits: int = 0, unit: float = 1) -> Cell:
    """A row's figure, divided by a unit."""
    return lambda row: number(None if row[key] is None else row[key] / unit, digits)


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], caption: str = "") -> Table:
    """A table of right-aligned cells."""
    made = Table(title=title, title_justify="left", caption=caption or None, caption_justify="left")
    for column in columns:
        made.add_column(column, justify="right", no_wrap=True)
    for cells in rows:
        made.add_row(*cells)
    return made


def drawn(title: str, columns: Mapping[str, Cell], rows: Sequence[Row], caption: str = "") -> Table:
    """A line per row, each column by its own rule."""
    return table(title, list(columns), [[cell(row) for cell in columns.values()] for row in rows], caption)


def fitted(made: Table, width: int) -> Iterator[Table]:
    """The table; in a narrower terminal its columns below each other, the first one again in each part: no figure is cut off."""
    need = [3 + max(map(cell_len, (str(c.header), *map(str, c.cells)))) if c.no_wrap else 20 for c in made.columns]
    parts, used = [[0]], 1 + need[0]
    for at, wide in enumerate(need[1:], 1):
        if used + wide > width and len(parts[-1]) > 1:
            parts.append([0])
            used = 1 + need[0]
        parts[-1].append(at)
        used += wide
    for part in parts:
        shown = copy(made)
        shown.columns = [replace(made.columns[at], _index=place) for place, at in enumerate(part)]
        shown.title = made.title if part is parts[0] else None
        shown.caption = made.caption if part is parts[-1] else None
        yield shown


def _disturbed(shares: Sequence[float]) -> str:
    """A caption that tells of other processes, which make all times longer; empty where they took little."""
    worst = max(shares, default=0.0)
    return f"other processes took up to {worst:.0%} of the processors: measure again on an idle machine" if worst > 0.1 else ""


def latency_tables(rows: Sequence[Row]) -> list[Table]:
    """First tokens; further tokens and what warming is worth."""
    first = {"tools": of("tools"), "prompt": of("prompt_tokens"), "tail": of("tail_tokens")}
    others = [name for name in _OTHERS if any(f"{name}_ttft_ms" in row for row in rows)]
    first |= {name: of(f"{name}_ttft_ms") for name in (*_TTFT, *others)} | {"floor": of("floor_ms")}
    first |= {"stock/hit": of("speedup", 1), "hit/floor": of("hit_over_floor", 2), "off/stock": of("off_over_stock", 2)}
    rest = {"tools": of("tools"), "stock ms/tok": of("stock_decode_ms", 1), "static ms/tok": of("static_decode_ms", 1)}
    rest |= {f"{name} ms/tok": of(f"{name}_decode_ms", 1) for name in others}
    rest |= {"ours ms/tok": of("decode_ms", 1)} | {f"{name} all": of(f"{name}_total_ms") for name in ("stock", "off", "hit")}
    rest |= {"warm ms": of("warm_ms"), "MB": of("group_bytes", 1, 1e6)}
    rest |= {"even after": of("break_even_requests", 2), "min saved": of("saved_ms_per_1000", 1, 6e4)}
    caption = "even after: requests that repay warming; saved: per 1,000 requests"
    loads = [load["foreign_median"] for row in rows for load in row.get("load", {}).values()]
    return [
        drawn("time to first token, ms (medians)", first, rows, _disturbed(loads)),
        drawn("decoding, whole answers in ms, and the tool group", rest, rows, caption),
    ]


def react_table(families: Mapping[str, Row]) -> Table:
    """One line per family of episodes."""
    columns: dict[str, Cell] = {"family": lambda row: str(row["family"])}
    columns |= {name: of(f"{name}_tokens") for name in ("prompt", "computed")} | {"calls": of("calls"), "skipped": of("skipped_calls")}
    columns |= {"stock ms": of("stock_ms"), "off ms": of("off_ms"), "ms": of("ms")}
    columns["off/ours"] = lambda row: f"{row['off_ms'] / row['ms']:.1f}x" if row["off_ms"] and row["ms"] else "-"
    columns["pages"] = of("pages_held")
    rows = [{"family": name, **row} for name, row in families.items()]
    return drawn("recorded episodes, sums over all calls", columns, rows, _disturbed([row["load"]["foreign"] for row in rows]))


def serve_table(rows: Sequence[Row]) -> Table:
    """One line per way to ask, and per number of agents."""
    columns: dict[str, Cell] = {"way": lambda row: str(row["way"]), "agents": of("agents"), "calls": of("calls")}
    columns |= {f"{what} {share} ms": of(f"{what}_{share}_ms", 1) for what in ("ttft", "gap") for share in ("p50", "p95")}
    columns |= {"tokens/s": of("tokens_per_s", 1), "cached": of("cached_share", 3)}
    columns["refused"] = lambda row: str(sum(row["refused"].values()))
    return drawn("first chunks, gaps between chunks", columns, rows)


def rag_table(rows: Sequence[Row]) -> Table:
    """One line per order, reuse and repair."""
    columns: dict[str, Cell] = {name: (lambda row, name=name: str(row[name])) for name in ("order", "reuse", "repair")}  # type: ignore[misc]
    columns |= {name: of(f"{name}_tokens") for name in ("prompt", "computed", "segment")}
    columns |= {"hit share": of("hit_share", 3), "ttft ms": of("ttft_ms", 1), "order ms": of("order_ms", 2)}
    columns |= {name: of(name, 3) for name in ("right", "f1", "agreement", "kl")}
    return drawn(f"{rows[0]['n']} questions over retrieved passages", columns, rows)


def store_table(found: Mapping[str, Any]) -> Table:
    """One line per way to read and write."""
    raw = found["rows"][0]
    columns: dict[str, Cell] = {"": lambda row: str(row["way"])}
    columns |= {f"{kind} ms": of(f"{kind}_ms", 1) for kind in ("write", "cold", "warm")}
    columns |= {f"{kind}/raw": of(f"{kind}_ms", 2, raw[f"{kind}_ms"]) for kind in ("cold", "warm")}
    columns |= {f"{kind} GB/s": _rate(f"{kind}_ms", found["bytes"]) for kind in ("cold", "warm")}
    title = f"{found['bytes'] / 1e6:,.0f} MB of pages ({found['tokens']:,} tokens), every byte touched"
    return drawn(title, columns, found["rows"])


def _rate(key: str, count: int) -> Cell:
    return lambda row: number(count / row[key] / 1e6, 2)


def segments_table(title: str, rows: Sequence[Row]) -> Table:
    """Segment reuse by kind of shift and method."""
    columns: dict[str, Cell] = {"kind": lambda row: str(row["family"]), "method": lambda row: str(row["method"]), "n": of("cases")}
    columns |= {"prompt": of("prompt_tokens"), "could": of("bound_tokens"), "reused": of("reused_tokens"), "of it": of("of_bound", 2)}
    columns |= {"computed": of("work_tokens"), "step ms": of("step_ms"), "exact/step": of("speedup", 2)}
    columns |= {"KL": lambda row: "-" if row["kl_mean"] is None else f"{row['kl_mean']:.2g}", "top-1": of("top1", 3)}
    columns |= {"same": of("decision", 3), "refused": of("refused")}
    caption = "could: tokens after the prefix that stand in a cached prompt; computed: in tokens through all layers; KL: nats per token"
    return drawn(title, columns, rows, caption)


def turns_table(found: Mapping[str, Any], passed: Sequence[str]) -> Table:
    """Answers after turns in fewer bits, by precision."""
    rows = [{"precision": name, "passed": name in passed, **asdict(one)} for name, one in found.items()]
    columns: dict[str, Cell] = {"precision": lambda row: str(row["precision"]), "answers": of("answers"), "calls": of("calls")}
    columns |= {"changed": of("changed_calls"), "top-1": of("top1", 4)}
    columns |= {"KL p99": lambda row: f"{row['kl_p99']:.2g}", "most": lambda row: f"{row['kl_most']:.2g}"}
    columns |= {"passed": _outcome("passed")}
    return drawn("turns in fewer bits", columns, rows, "changed: answers with other tool calls; KL: nats per token")


def adapters_table(rows: Sequence[Row]) -> Table:
    """A line per kind of adapter, and the round robin."""
    ways = {"base hit": "base_hit", "switch": "switch", "switch back": "back", "hit": "hit", "cold": "cold"}
    filled = [{**dict.fromkeys(["back_over_hit", *(f"{way}_ttft_ms" for way in ways.values())]), **row} for row in rows]
    columns: dict[str, Cell] = {"adapter": lambda row: str(row["kind"]), "prompt": of("prompt_tokens")}
    columns |= {f"{name} ms": of(f"{way}_ttft_ms") for name, way in ways.items()}
    columns |= {"back/hit": of("back_over_hit", 2), "computed": of("computed_tokens"), "new": of("new_tokens"), "equal": _outcome("equal")}
    caption = "hit: of the same adapter; back/hit: of pairs in a row; new: what no cached layer could have spared"
    return drawn("time to first token, ms (medians); tokens by layers", columns, filled, caption)


def families_table(found: Row) -> Table:
    """One line per family, and how many of each outcome."""
    columns: dict[str, Cell] = {"family": lambda row: str(row["family"]), "path": lambda row: str(row["path"])}
    columns |= {"group": of("group"), "step": of("step"), "2nd process": of("second_process")}
    columns |= {key: _outcome(key) for key in ("equal", "bitwise")} | {"why": lambda row: str(row["why"])}
    caption = ", ".join(f"{count} {outcome}" for outcome, count in found["summary"].items())
    made = drawn("cached tokens of each family", columns, found["rows"], caption)
    made.columns[-1].no_wrap, made.columns[-1].justify = False, "left"
    return made


def _outcome(key: str) -> Cell:
    return lambda row: {None: "-", True: "yes", False: "NO"}[row[key]]


def finish(report: Mapping[str, Any], tables: Sequence[Table], json_file: Path | None) -> None:
    """The report into a file, if one is named; tables and the same line, the last one, to standard output."""
    line = json.dumps(report, allow_nan=False)
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)  # tables keep their columns in a file or a pipe
    for each in tables:
        for part in fitted(each, console.width) if each.row_count else ():
            console.print(part)
    print(line, flush=True)
    if json_file is not None:
        write(json_file, line + "\n")  # after the printed line: a full disk loses nothing


class Progress:
    """Progress on standard error: one line that is rewritten, or a line each where that is not a terminal."""

    def __call__(self, text: str) -> None:
        rewritten = sys.stderr.isatty()
        print(f"\r\x1b[K{text}" if rewritten else text, end="" if rewritten else "\n", file=sys.stderr, flush=True)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exc: object) -> None:
        if sys.stderr.isatty():
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


@dataclass(slots=True)
class Run:
    """A measurement under way: the engine, its description, the figures, and the tables that are shown at its end."""

    engine: Any  # None where none is open all the time
    say: Progress
    found: dict[str, Any]
    json_file: Path | None
    tables: list[Table] = field(default_factory=list)

    def keep(self, part: Mapping[str, Any]) -> None:
        """One more part of the report, into the file too: a long run that is ended loses one."""
        self.found.update(part)
        if self.json_file is not None:
            try:
                write(self.json_file, json.dumps(self.found, allow_nan=False) + "\n")
            except ConfigError as error:  # a full disk may be emptied while the next part is measured
                print(f"agentcache: {error}", file=sys.stderr, flush=True)


@contextmanager
def measuring(name: str, loading: Loading, json_file: Path | None, texts: Sequence[str] = (), store: Any = None) -> Iterator[Run]:
    """A model on its engine to measure; at the end tables and the JSON line, unless something went wrong."""
    with loading.engine(texts, store) as engine, Progress() as say:
        run = Run(engine, say, {"bench": name, **described(engine), "loaded_bytes": peak_bytes()}, json_file)
        yield run
        run.found["peak_bytes"] = peak_bytes()
    finish(run.found, run.tables, json_file)
