"""Reports of `python -m benchmarks.segments` as Markdown: docs/segments-measured.md, from the JSON lines beside it. Measures nothing.

python -m benchmarks.segments_text docs/benchmarks/*-segments-*.json > docs/segments-measured.md
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from agentcache.bench.report import number

from .segments_verdicts import together

Report = Mapping[str, Any]
Named = Sequence[tuple[str, Report]]
HEAD = """# Text at another position: what was measured

Written by `python -m benchmarks.segments_text` from the JSON lines of `python -m benchmarks.segments` in `docs/benchmarks`; do not edit.
What the words mean stands in [segments.md](segments.md).
"""
UNMEASURED = """## What cannot be measured here

Drift, tool choice and task success on models that people use: their weights are not here. Random weights (`--shape`) tell time and tokens
only. On a machine that has them:

    agentcache calibrate --model MODEL --dtype bfloat16 --workload TRACES.jsonl
    python -m benchmarks.segments --model MODEL --workload TRACES.jsonl --calibration FILE --paired 1000 --rows rows.jsonl
"""


def markdown(reports: Named) -> str:
    """All of it. reports: name of the file and what it holds."""
    parts = [HEAD, "## Hypotheses\n\n" + _verdicts(together(reports))]
    for name, report in reports:
        parts.append(f"## {name}\n\n" + "\n".join(_report(report)))
    return "\n".join([*parts, UNMEASURED])


def _table(columns: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    return "\n".join(["| " + " | ".join(line) + " |" for line in (columns, ["---"] * len(columns), *cells)]) + "\n"


def _small(value: float | None, form: str = ".3g") -> str:
    return "-" if value is None else format(value, form)


def _verdicts(rows: Sequence[Mapping[str, Any]]) -> str:
    said = {"holds": "holds", "fails": "**fails**", "not measured": "not measured"}
    cells = [[row["hypothesis"], _small(row["figure"]), said[row["verdict"]], row["reason"], row["report"]] for row in rows]
    return _table(["hypothesis", "figure", "verdict", "of what", "from"], cells)


def _report(found: Report) -> Iterator[str]:
    model, machine = found["model"], found["machine"]
    kind = "random weights" if found.get("shape") else "trained"
    place = f"{machine['processor']}, {machine['threads']} threads"
    yield f"{model['name']} ({kind}, {model['parameters'] / 1e6:,.1f} million parameters, {model['dtype']}); {place}.\n"
    if rows := found.get("rows"):
        yield _shifts(rows, bool(found.get("shape")))
        if not found.get("shape"):
            yield _ablations(rows)
    if paired := found.get("paired"):
        yield _paired([row for row in paired if row["by"] != "family"])
        yield "By kind of shift, ours:\n\n" + _paired([row for row in paired if row["by"] == "family" and row["method"] == "ours"])
    if episodes := found.get("episodes"):
        yield _episodes([row for row in episodes if row["family"] == "all"])
        if any("tiers" in row for row in episodes):
            yield _tiers([row for row in episodes if row["family"] == "all" and "tiers" in row])
    if (sampled := found.get("sampled")) and sampled["n"]:
        yield _sampled(sampled)
    if find := found.get("find"):
        yield _find(find)


def _shifts(rows: Sequence[Report], shaped: bool) -> str:
    times = "KL, top-1 (random weights: they say nothing of drift)" if shaped else "KL, top-1"
    cells = [
        [
            row["family"],
            row["method"],
            *(number(row[name]) for name in ("cases", "prompt_tokens", "bound_tokens", "reused_tokens")),
            number(row["of_bound"], 2),
            number(row["work_tokens"]),
            *(number(row[name]) for name in ("step_ms", "exact_step_ms")),
            number(row["speedup"], 2),
            f"{_small(row['kl_mean'], '.2g')}, {_small(row['top1'], '.3f')}",
            str(row["refused"]),
        ]
        for row in rows
        if row["method"] in ("bare", "ours", "off")
    ]
    columns = ["shift", "method", "n", "prompt", "could", "reused", "of it", "computed", "ms", "exact ms", "exact / it", times, "refused"]
    return "First tokens, sums of tokens over n cases, medians of ms:\n\n" + _table(columns, cells)


def _ablations(rows: Sequence[Report]) -> str:
    """Over all kinds of shifts that repeat something."""
    cells = []
    for method in dict.fromkeys(row["method"] for row in rows):
        mine = [row for row in rows if row["method"] == method and row["bound_tokens"]]
        n = sum(row["cases"] for row in mine)
        if not n or method == "exact":
            continue
        kl, top1, same = (sum(row[name] * row["cases"] for row in mine) / n for name in ("kl_mean", "top1", "decision"))
        sums = [number(sum(row[name] for row in mine)) for name in ("bound_tokens", "reused_tokens", "work_tokens", "refused")]
        cells.append(
            [method, str(n), *sums[:3], f"{kl:.2g}", f"{max(row['kl_most'] for row in mine):.2g}", f"{top1:.4f}", f"{same:.4f}", sums[3]]
        )
    columns = [
        "method",
        "n",
        "could",
        "reused",
        "computed",
        "KL",
        "most (mean of an answer)",
        "top-1",
        "all first choices",
        "probes failed",
    ]
    return "One thing changed at a time, over all kinds of shifts:\n\n" + _table(columns, cells)


def _paired(rows: Sequence[Report]) -> str:
    cells = [
        [
            row["method"],
            f"tier {row['of']}" if row["by"] == "tier" else row["of"],
            number(row["n"]),
            number(row["of_bound"], 2),
            *(f"{row[name]:.3f}" for name in ("flops_of_exact", "flops_of_off")),
            f"{row['tool']:.4f} ({row['tool_ci'][0]:.3f}-{row['tool_ci'][1]:.3f})",
            *(f"{row[name]:.4f}" for name in ("arguments", "same", "changed")),
            f"{row['right']:.3f} / {row['right_off']:.3f}",
            *(_small(row.get(name), ".2g") for name in ("kl", "kl_first", "kl_first_p99", "kl_most")),
            *(f"{row[name]:.4f}" for name in ("top1", "distance")),
            str(row["refused"]),
        ]
        for row in rows
    ]
    columns = ["method", "of", "n", "of bound", "FLOPs / exact", "FLOPs / off", "same tool", "arguments", "same ids", "changed"]
    columns += ["right / off", "KL", "first token's", "99 of 100", "most", "top-1", "distance", "probes failed"]
    return "Made-up requests, whole greedy answers against everything computed:\n\n" + _table(columns, cells)


def _episodes(rows: Sequence[Report]) -> str:
    cells = [
        [
            row["style"],
            row["method"],
            *(number(row[name]) for name in ("n", "steps")),
            f"{row['solved']:.3f} ({row['solved_ci'][0]:.2f}-{row['solved_ci'][1]:.2f})",
            *(f"{row[name]:.3f}" for name in ("changed", "tool", "arguments")),
            number(row["computed_tokens"]),
            *(number(row[name]) for name in ("first_step_ms", "step_ms", "episode_ms")),
            *(f"{row[name]:.2f}" for name in ("off_over_ours", "exact_over_ours")),
        ]
        for row in rows
    ]
    columns = ["style", "method", "n", "steps", "solved", "changed", "same tool", "arguments", "computed", "first step ms", "step ms"]
    return "Dialogues of several steps:\n\n" + _table([*columns, "episode ms", "off / it", "exact / it"], cells)


def _tiers(rows: Sequence[Report]) -> str:
    cells = [
        [row["style"], row["method"], tier, *(number(each[name]) for name in ("steps", "reused_tokens", "step_ms", "ms"))]
        for row in rows
        for tier, each in row["tiers"].items()
    ]
    columns = ["style", "method", "tier", "steps", "reused", "first token ms", "whole step ms"]
    return "Their steps by tier, medians of ms:\n\n" + _table(columns, cells)


def _sampled(row: Report) -> str:
    names = ("distance", "distance_seeds", "same", "entropy_off", "entropy", "keys", "keys_most", "values", "values_most")
    head = f"{row['n']} requests drawn with {row['seeds']} seeds at temperature {row['temperature']}; deviation of what was taken:\n\n"
    return head + _table([name.replace("_", " ") for name in names], [[_small(row[name], ".4f") for name in names]])


def _find(found: Report) -> str:
    shares = ("recall", "recall_long", "precision", "precision_strict")
    head = ["", "window", "tau", "proposals", "recall", "long runs", "precision", "strict"]
    cells = [
        [row["source"], str(row["window"]), str(row["tau"]), number(row["proposals"]), *(_small(row[name], ".3f") for name in shares)]
        for row in found["verdicts"]
    ]
    steps = [
        [str(row["window"]), number(row["texts"]), *(_small(row[name], ".1f") for name in ("step_ms", "worst_ms"))]
        for row in found["steps"]
    ]
    step = _table(["window", "texts kept", "ms", "worst ms"], steps)
    return f"What finds text:\n\n{_table(head, cells)}\nA step of 4,096 tokens, 200 of them new, processor time:\n\n{step}"


def main(files: Sequence[str]) -> None:
    """Print it."""
    print(markdown([(Path(file).stem, json.loads(Path(file).read_text(encoding="utf-8"))) for file in sorted(files)]))


if __name__ == "__main__":
    main(sys.argv[1:])
