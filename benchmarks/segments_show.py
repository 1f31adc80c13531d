"""Tables of `python -m benchmarks.segments`. Measures nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from agentcache.bench.report import number, segments_table, table

Rows = Sequence[Mapping[str, Any]]


def small(value: float | None) -> str:
    """Two digits of a small number; a dash for none."""
    return "-" if value is None else f"{value:.2g}"


def _interval(row: Mapping[str, Any], name: str) -> str:
    low, high = row[f"{name}_ci"]
    return f"{row[name]:.4f} ({low:.3f}-{high:.3f})"


def paired_table(rows: Rows) -> Table:
    """One line per method, tier and kind of request; per family too for ours."""
    columns = ["method", "of", "n", "of bound", "FLOPs/exact", "tool", "arguments", "same", "changed", "right", "off"]
    columns += ["KL", "most", "top-1", "distance", "refused"]
    cells = [
        [
            r["method"],
            r["of"] if r["by"] != "tier" else f"tier {r['of']}",
            number(r["n"]),
            number(r["of_bound"], 2),
            f"{r['flops_of_exact']:.2f}",
            _interval(r, "tool"),
            f"{r['arguments']:.4f}",
            f"{r['same']:.3f}",
            f"{r['changed']:.4f}",
            *(f"{r[name]:.3f}" for name in ("right", "right_off")),
            *(small(r[name]) for name in ("kl", "kl_most")),
            f"{r['top1']:.4f}",
            f"{r['distance']:.4f}",
            number(r["refused"]),
        ]
        for r in rows
        if r["by"] != "family" or r["method"] == "ours"
    ]
    caption = "tool, arguments, same (ids): equal to the greedy answer with everything computed; changed: right or wrong otherwise; "
    return table("made-up requests, whole answers", columns, cells, caption + "distance: Levenshtein's, share of the answer")


def episodes_table(rows: Rows) -> Table:
    """One line per style, family and method."""
    columns = ["style", "family", "method", "n", "steps", "solved", "changed", "tool", "arguments", "computed", "FLOPs/off"]
    columns += ["first ms", "step ms", "episode ms", "off/it", "exact/it"]
    cells = [
        [
            r["style"],
            r["family"],
            r["method"],
            number(r["n"]),
            number(r["steps"]),
            f"{r['solved']:.3f}",
            *(f"{r[name]:.3f}" for name in ("changed", "tool", "arguments")),
            number(r["computed_tokens"]),
            f"{r['flops_of_off']:.2f}",
            *(number(r[name]) for name in ("first_step_ms", "step_ms", "episode_ms")),
            *(f"{r[name]:.2f}" for name in ("off_over_ours", "exact_over_ours")),
        ]
        for r in rows
    ]
    caption = "step ms: to the first token; episode ms: all steps with their answers; off/it, exact/it: medians of paired whole episodes"
    return table("dialogues of several steps", columns, cells, caption)


def tiers_table(rows: Rows) -> Table:
    """One line per style, method and tier of the dialogues' steps."""
    cells = [
        [r["style"], r["method"], tier, *(number(each[name]) for name in ("steps", "reused_tokens", "step_ms", "ms"))]
        for r in rows
        if r["family"] == "all"
        for tier, each in r["tiers"].items()
    ]
    return table("their steps by tier", ["style", "method", "tier", "steps", "reused", "first token ms", "whole step ms"], cells)


def sampled_table(row: Mapping[str, Any]) -> Table:
    """Answers drawn with several seeds, and deviation of keys and values."""
    names = ("distance", "distance_seeds", "same", "entropy_off", "entropy", "keys", "keys_most", "values", "values_most")
    cells = [[number(row["n"]), *("-" if row[name] is None else f"{row[name]:.4f}" for name in names)]]
    title = f"{row['seeds']} seeds at temperature {row['temperature']}; keys, values: relative deviation of what was taken"
    return table(title, ["n", *(name.replace("_", " ") for name in names)], cells if row["n"] else [])


def find_tables(found: Mapping[str, Any]) -> list[Table]:
    """Windows and thresholds of the signatures; what a step costs."""
    shares = ("recall", "recall_long", "precision", "precision_strict")
    cells = [
        [r["source"], number(r["window"]), str(r["tau"]), *("-" if r[name] is None else f"{r[name]:.3f}" for name in shares)]
        for r in found["verdicts"]
    ]
    steps = [
        [*(number(r[name]) for name in ("window", "texts")), *(f"{r[name]:.1f}" for name in ("step_ms", "worst_ms"))]
        for r in found["steps"]
    ]
    return [
        table("signatures against the exact index", ["", "window", "tau", "recall", "long runs", "precision", "strict"], cells),
        table("looking for text: a step of 4,096 tokens, 200 of them new", ["window", "texts", "ms", "worst ms"], steps),
    ]


def verdicts_table(rows: Rows) -> Table:
    """One line per hypothesis."""
    cells = [[r["hypothesis"], "-" if r["figure"] is None else f"{r['figure']:.4g}", r["verdict"], r["reason"]] for r in rows]
    made = table("hypotheses", ["hypothesis", "figure", "verdict", "of what"], cells)
    for column in made.columns:
        column.justify, column.no_wrap = "left", False
    return made


def tables(found: Mapping[str, Any]) -> list[Table]:
    """Of all that a report has."""
    made = [segments_table("text at another position", found["rows"])]
    if found.get("paired"):
        made.append(paired_table(found["paired"]))
    if found.get("episodes"):
        made += [episodes_table(found["episodes"]), tiers_table(found["episodes"])]
    if found.get("sampled"):
        made.append(sampled_table(found["sampled"]))
    if found.get("find"):
        made += find_tables(found["find"])
    return [*made, verdicts_table(found["verdicts"])]
