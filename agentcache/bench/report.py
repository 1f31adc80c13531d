"""Figures for people and for programs: tables, one plot, one JSON line. Measures nothing."""

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


def extra_tables(found: Mapping[str, Any]) -> list[Table]:
    """What was measured on demand; nothing for what was not."""
    tables = []
    if step := found.get("later_step"):
        cells = [
            number(step["prompt_tokens"]),
            number(step["new_tokens"]),
            number(step["ms"]),
            number(step["kept_ms"]),
            f"{step['ratio']:.2f}",
        ]
        tables.append(table("a later step, ms to the first token", ["prompt", "new", "ours", "kept", "ours/kept"], [cells]))
    if decode := found.get("decode"):
        lines = [
            [
                number(d["context_tokens"]),
                *(number(d[key], 1) for key in ("stock_ms", "static_ms", "ms", "stock_over_ours", "static_over_ours")),
            ]
            for d in decode
        ]
        tables.append(table("decoding, ms per token", ["context", "stock", "static", "ours", "stock/ours", "static/ours"], lines))
    if mixed := found.get("mixed"):
        cells = [number(mixed["prefill_tokens"]), *(number(mixed[f"gap_{key}_ms"], 1) for key in ("alone", "median", "p95"))]
        tables.append(table("ms between tokens while another request prefills", ["prefill", "alone", "median", "p95"], [cells]))
    if agents := found.get("agents"):
        cells = [number(agents["agents"]), number(agents["one_per_s"], 1), number(agents["all_per_s"], 1), f"{agents['ratio']:.2f}x"]
        tables.append(table("agents decoding at once, tokens per second", ["agents", "one", "all", "ratio"], [cells]))
    if admitting := found.get("admitting"):
        cells = [*(number(admitting[key]) for key in ("prompt_tokens", "without_ms", "ms")), f"{admitting['ratio']:.3f}"]
        title = "a cold request and its answer, ms, without and with writing its pages to disk"
        tables.append(table(title, ["prompt", "without", "with", "with/without"], [cells]))
    if overhead := found.get("overhead"):
        lines = [
            [number(o["prompt_tokens"]), *(number(o[key], 2) for key in ("layout_ms", "match_ms", "ms", "worst_ms"))]
            for o in overhead.values()
        ]
        tables.append(table("around the forwards, ms per step", ["prompt", "layout", "match", "both", "worst"], lines))
    if memory := found.get("memory"):
        names = ("before", "live_kv", "chunk_buffer", "bound", "peak")
        cells = [*(number(memory[f"{name}_bytes"] / 1e6) for name in names), "yes" if memory["within"] else "NO"]
        title = "peak resident memory, MB: before + live KV x 1.15 + one chunk buffer = bound"
        tables.append(table(title, ["before", "live KV", "chunk buffer", "bound", "peak", "within"], [cells]))
    return tables


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


def index_table(found: Mapping[str, Any]) -> Table:
    """One line: what a large index costs."""
    columns = {"open ms": "open_ms", "first lookup ms": "first_ms", "lookup ms": "hit_ms", "miss ms": "miss_ms"}
    return table(f"an index of {found['rows']:,} pages", list(columns), [[number(found[key], 2) for key in columns.values()]])


def drift_table(found: Mapping[str, Any]) -> Table:
    """One line per precision."""
    lines = [
        [
            r["precision"],
            number(r["bytes_per_token"]),
            f"{r['share']:.2f}",
            f"{r['mean_kl']:.2e}",
            f"{r['most_kl']:.2e}",
            f"{r['top1_agreement']:.3f}",
        ]
        for r in found["rows"]
    ]
    title = f"{found['tail_tokens']} next tokens behind {found['prompt_tokens']:,} stored ones, against exact pages"
    return table(title, ["", "bytes/token", "of exact", "mean KL", "most KL", "same top-1"], lines)


# key -> how its line is drawn; stock is the reference of the right panel
_LINES: dict[str, dict[str, Any]] = {
    "stock": {"label": "generate, DynamicCache", "color": "tab:blue"},
    "static": {"label": "generate, StaticCache", "color": "tab:cyan", "linestyle": "--"},
    "recipe": {"label": "prefix cache, deep copied", "color": "tab:orange"},
    "kept": {"label": "DynamicCache kept by hand", "color": "tab:green"},
    "off": {"label": "agentcache, reuse off", "color": "tab:purple", "linestyle": "--"},
    "disk_cold": {"label": "agentcache, tool group on disk", "color": "tab:red", "linestyle": "--"},
    "hit": {"label": "agentcache, tool group warm", "color": "tab:red", "linewidth": 2.8, "zorder": 5},
    "floor": {"label": "floor: forward of the tail alone", "color": "black", "linestyle": ":", "marker": ""},
}


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


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigError("--plot needs matplotlib: pip install 'agentcache-llm[bench]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


_MARKS = ("o", "^", "s", "D")  # of ten colours each


def segments_plot(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Speed-up over the exact prefix, and KL, against the share of prompt tokens taken from other positions, as one PNG."""
    pyplot = _pyplot()
    shown = [r for r in rows if r["method"] not in ("exact", "off") and r["reused_tokens"]]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 5.4), layout="constrained")
    methods = sorted({r["method"] for r in shown}, key=lambda method: (method == "ours", method))  # drawn last, so on top
    for number, method in enumerate(methods):
        mine = [r for r in shown if r["method"] == method]
        shares = [r["reused_tokens"] / r["prompt_tokens"] for r in mine]
        ours = method == "ours"
        mark = {"marker": "*" if ours else _MARKS[number // 10], "color": "black" if ours else f"C{number % 10}", "s": 90 if ours else 26}
        mark["label"] = method
        left.scatter(shares, [r["speedup"] for r in mine], **mark)
        right.scatter(shares, [max(r["kl_mean"], 1e-9) for r in mine], **mark)
    left.axhline(1.0, color="tab:gray", linewidth=1)
    left.set_ylabel("first token: times faster than the exact prefix alone")
    finish_drift(figure, left, right, path)
    pyplot.close(figure)


def finish_drift(figure: Any, left: Any, right: Any, path: Path) -> None:
    """Labels, legend and file of a picture of two panels over the share of reused text; the right one shows KL."""
    right.set_ylabel("KL, nats per token of the answer (log scale)")
    right.set_yscale("log")
    for axes in (left, right):
        axes.set_xlabel("share of the prompt taken from other positions")
        axes.grid(alpha=0.3, which="both")
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(path, dpi=130)


def plot(rows: Sequence[Mapping[str, Any]], path: Path, title: str) -> None:
    """Time to first token (log scale) and speed-up over stock, against the number of tools, as one PNG."""
    if not rows:
        raise ConfigError("--plot: no row was measured; give --tools whose prompts fit the context")
    pyplot = _pyplot()
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 5.4), layout="constrained")
    places = range(len(rows))  # evenly spaced: tool counts double from one to the next
    for key, style in _LINES.items():
        values = [r["floor_ms" if key == "floor" else f"{key}_ttft_ms"] for r in rows]
        left.plot(places, values, **{"marker": "o", **style})
        if key != "stock":
            right.plot(places, [r["stock_ttft_ms"] / value for r, value in zip(rows, values)], **{"marker": "o", **style})
    for place, r in zip(places, rows):
        right.annotate(f"{r['speedup']:.0f}x", (place, r["speedup"]), (9, -12), textcoords="offset points", color="tab:red")
    left.set_yscale("log")
    left.set_ylabel("time to first token, ms (log scale)")
    right.set_ylabel("times faster than stock generate")
    right.set_ylim(bottom=0)
    for axes in (left, right):
        axes.set_xlabel("tools (tokens) in the prompt")
        axes.set_xticks(places, [f"{r['tools']}\n({r['prompt_tokens']:,})" for r in rows])
        axes.grid(alpha=0.3, which="both")
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    figure.suptitle(title)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


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
