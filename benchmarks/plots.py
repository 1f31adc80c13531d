"""Pictures of reports: `python -m benchmarks.plots REPORT.json PICTURE.png`. Measures nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import matplotlib
import typer

from agentcache.bench.options import to_write
from agentcache.errors import ConfigError
from agentcache.terminal import report_errors

matplotlib.use("Agg")
from matplotlib import pyplot

Rows = Sequence[Mapping[str, Any]]

# key -> how its line is drawn; stock is the reference of the right panel
_LINES: dict[str, dict[str, Any]] = {
    "stock": {"label": "generate, DynamicCache", "color": "tab:blue"},
    "static": {"label": "generate, StaticCache", "color": "tab:cyan", "linestyle": "--"},
    "recipe": {"label": "prefix cache, deep copied", "color": "tab:orange"},
    "kept": {"label": "DynamicCache kept by hand", "color": "tab:green"},
    "off": {"label": "agentcache, reuse off", "color": "tab:purple", "linestyle": "--"},
    "hit": {"label": "agentcache, tool group warm", "color": "tab:red", "linewidth": 2.8, "zorder": 5},
    "floor": {"label": "floor: forward of the tail alone", "color": "black", "linestyle": ":", "marker": ""},
}
_MARKS = ("o", "^", "s", "D")  # of ten colours each


def latency(rows: Rows, path: Path, title: str) -> None:
    """Time to first token (log scale) and speed-up over stock, against the number of tools."""
    figure, left, right = _panels()
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
    figure.suptitle(title)
    _finish(figure, left, right, path)


def segments(rows: Rows, path: Path) -> None:
    """Speed-up over the exact prefix, and KL, against the share of prompt tokens taken from other positions."""
    figure, left, right = _panels()
    shown = [r for r in rows if r["method"] not in ("exact", "off") and r["reused_tokens"]]
    methods = sorted({r["method"] for r in shown}, key=lambda method: (method == "ours", method))  # drawn last, so on top
    for number, method in enumerate(methods):
        mine = [r for r in shown if r["method"] == method]
        shares = [r["reused_tokens"] / r["prompt_tokens"] for r in mine]
        ours = method == "ours"
        mark = {"marker": "*" if ours else _MARKS[number // 10], "color": "black" if ours else f"C{number % 10}", "s": 90 if ours else 26}
        left.scatter(shares, [r["speedup"] for r in mine], label=method, **mark)
        right.scatter(shares, [r["kl_mean"] for r in mine], **mark)
    left.axhline(1.0, color="tab:gray", linewidth=1)
    left.set_ylabel("first token: times faster than the exact prefix alone")
    _finish_drift(figure, left, right, path)


def paired(rows: Rows, path: Path) -> None:
    """Per made-up request: FLOPs against the share of the prompt that was taken, and KL by kind of request."""
    figure, left, right = _panels()
    for method in dict.fromkeys(name for row in rows for name in row["methods"]):
        mine = [(row, row["methods"][method]) for row in rows if method in row["methods"]]
        shares = [near["reused_tokens"] / row["prompt_tokens"] for row, near in mine]
        left.scatter(shares, [near["exact_flops"] / near["spent_flops"] for _, near in mine], s=8, alpha=0.5, label=method)
        right.scatter(shares, [near["kl"] for _, near in mine], s=8, alpha=0.5)
    left.set_ylabel("prefill: times fewer FLOPs than the exact prefix alone")
    _finish_drift(figure, left, right, path)


def rag(rows: Rows, path: Path) -> None:
    """Agreement with full prefill, and KL, against the share of the prompt that is computed: a line for each choice of repaired tokens."""
    figure, left, right = _panels()
    lines: dict[str, list[Mapping[str, Any]]] = {}
    for each in rows:
        halo, _, share = each["repair"].partition(", ")
        if not halo.startswith("halo"):
            named = [f"{each['order']} order, {halo or each['reuse']}"]
        else:  # a halo alone begins both of its lines
            named = [f"{halo}, more {choice}" for choice in ("by question", "by deviation") if share.endswith(choice) or not share]
        for line in named:
            lines.setdefault(line, []).append(each)
    for number, (label, mine) in enumerate(lines.items()):
        shares = [each["computed_tokens"] / each["prompt_tokens"] for each in mine]
        mark = {"marker": _MARKS[number // 10], "color": f"C{number % 10}"}
        left.plot(shares, [each["agreement"] for each in mine], label=label, **mark)
        right.plot(shares, [each["kl"] for each in mine], **mark)
    left.axhline(0.97, color="tab:gray", linewidth=1)
    left.set_ylabel("answers as of full prefill")
    _scale_kl(right, "KL of the first answer token, nats", 1e-4)
    for axes in (left, right):
        axes.set_xlabel("share of the prompt that is computed")
    figure.suptitle(f"{rows[0]['n']} questions over retrieved passages")
    _finish(figure, left, right, path)


def _panels() -> tuple[Any, Any, Any]:
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 5.4), layout="constrained")
    return figure, left, right


def _scale_kl(axes: Any, what: str, least: float) -> None:
    """Values of at least `least` on a log scale, smaller ones below it down to 0, where exact methods stand."""
    axes.set_yscale("symlog", linthresh=least)
    axes.set_ylim(bottom=-least / 5)  # marks at 0 are whole
    axes.set_ylabel(f"{what} (log above {least:g})")


def _finish_drift(figure: Any, left: Any, right: Any, path: Path) -> None:
    """The right panel shows KL, both over the share of reused text."""
    _scale_kl(right, "KL, nats per token of the answer", 1e-9)
    for axes in (left, right):
        axes.set_xlabel("share of the prompt taken from other positions")
    _finish(figure, left, right, path)


def _finish(figure: Any, left: Any, right: Any, path: Path) -> None:
    for axes in (left, right):
        axes.grid(alpha=0.3, which="both")
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


app = typer.Typer(add_completion=False)


@app.command()
def main(
    report: Annotated[Path, typer.Argument(help="The JSON line of `latency`, `segments` or `rag`, or the --rows of `segments`.")],
    picture: Annotated[Path, typer.Argument(help="The PNG to write.", callback=to_write)],
) -> None:
    """Draw a report."""
    with report_errors():
        try:
            lines = [json.loads(line) for line in report.read_text(encoding="utf-8").splitlines()]
        except (OSError, ValueError) as error:
            raise ConfigError(f"report={str(report)!r} cannot be read: {error}") from error
        if lines and lines[0].get("part") == "settings":
            paired([line for line in lines if line["part"] == "paired"], picture)
        elif lines and lines[0].get("bench") == "segments":
            segments(lines[0]["rows"], picture)
        elif lines and lines[0].get("bench") == "rag":
            rag(lines[0]["rows"], picture)
        elif lines and lines[0].get("bench") == "latency" and lines[0]["rows"]:
            model, threads = lines[0]["model"], lines[0]["machine"]["threads"]
            latency(lines[0]["rows"], picture, f"{model['name']}, {model['dtype']}, {threads} threads")
        else:
            raise ConfigError(f"report={str(report)!r} has no row of `latency`, `segments` or `rag`: name the JSON line of one")


if __name__ == "__main__":
    app()
