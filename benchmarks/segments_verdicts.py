"""What the figures of `python -m benchmarks.segments` say of each hypothesis: its figure, the verdict, the reason.

Measures one thing itself: how far re-indexed keys are from keys computed at their new place.

holds | fails     by the figure and its bound             not measured     with what would measure it

Several reports together are judged by the worst figure among those that may speak: times of known shapes, answers of trained weights, the
rest of all.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import eq, ge, gt, le, lt
from typing import Any, Literal

import torch

from agentcache.approximate.calibrate.shifts import NOTHING
from agentcache.engine import Engine
from agentcache.model.rope import Rotary, turn

SHIFTS = ((0, 50), (50, 0), (7, 120_000), (120_000, 3), (60_000, 60_001))
TOKENS = 40
TEMPLATE_HEAVY = ("added tool", "removed tool", "changed tool", "moved tool", "dated system", "second agent", "held-out tool")
LATENCY, SAVED, CHANGED, KL, PRECISION, MOVED = 0.20, 0.20, 0.01, 0.1, 0.7, 2e-6
OF_BOUND, FASTER, LONG, SLOWER, AGREED, STEP_MS = 0.8, 1.5, 1000, 1.03, 0.99, 15.0
HALO = 8  # at most, of what boundary KL is asked of
Report = Mapping[str, Any]
Row = dict[str, Any]
Of = Literal["times", "answers", "all"]


@dataclass(frozen=True, slots=True)
class Judged:
    """A verdict. of: what it is a figure of, and so which reports may speak. least: a smaller figure is a worse one."""

    row: Row
    of: Of
    least: bool


@torch.inference_mode()
def moved(engine: Engine) -> float | None:
    """Largest error of re-indexed keys over shifts to 120,000 positions, as a share of the largest key, in fp32; None without rotary.

    Measured on random keys with the model's own frequencies; regimes that change with length (longrope, dynamic NTK) are None.
    """
    module = getattr(engine.model.model.get_decoder(), "rotary_emb", None)
    if module is None or engine.model.rotary is None or engine.model.rotary.by_length:
        return None
    table = Rotary(module, engine.model.config.get_text_config(), torch.float32, torch.device("cpu"))
    keys, pairs = torch.randn(4, table.dims, TOKENS, generator=torch.Generator().manual_seed(0)), table.dims // 2
    worst = 0.0
    for source, target in SHIFTS:
        cos, sin = table.table("", max(source, target) + TOKENS)
        here, there = (turn(keys, cos[at : at + TOKENS, :pairs].T, sin[at : at + TOKENS, :pairs].T) for at in (source, target))
        error = (turn(here, *table.turns("", source, target, TOKENS)) - there).abs().max()
        worst = max(worst, float(error / there.abs().max()))
    return worst


def _row(
    of: Of, hypothesis: str, figure: float | None, holds: Callable[[float, float], bool], bound: float, reason: str, unmeasured: str
) -> Judged:
    verdict = "not measured" if figure is None else "holds" if holds(figure, bound) else "fails"
    row = {"hypothesis": hypothesis, "figure": figure, "verdict": verdict, "reason": unmeasured if figure is None else reason}
    return Judged(row, of, holds in (ge, gt))


def verdicts(found: Report) -> list[Row]:
    """One row per hypothesis of what these parts of a report say; parts that are not there are not measured."""
    return [judged.row for judged in _judged(found)]


def together(reports: Sequence[tuple[str, Report]]) -> list[Row]:
    """One row per hypothesis: the worst figure of all reports that may speak of it. report: whose."""
    speak = {
        "times": [named for named in reports if named[1].get("shape")],
        "answers": [named for named in reports if not named[1].get("shape")],
        "all": list(reports),
    }
    found = []
    for at, plain in enumerate(_judged({})):
        known = [{**verdicts(report)[at], "report": name} for name, report in speak[plain.of]]
        known = [row for row in known if row["figure"] is not None]
        worst = (min if plain.least else max)(known, key=lambda row: row["figure"], default=None)
        found.append(worst or {**plain.row, "report": ""})
    return found


def _judged(found: Report) -> list[Judged]:
    rows: list[Row] = list(found.get("rows") or ())
    paired, episodes = list(found.get("paired") or ()), list(found.get("episodes") or ())
    return [
        *_times(rows, paired, found.get("shape") is not None),
        *_episodes(episodes),
        *_flops(paired),
        *_near(found, rows, paired),
        *_drift(rows, paired),
        *_finding(found.get("find") or {}),
        _row("all", "re-indexing is stable: error of keys <= 2e-6 of the largest, shifts to 120,000", found.get("moved"), le, MOVED,
             "fp32, the model's own frequencies", "no rotary positions, or a regime that changes with length"),
    ]  # fmt: skip


def _of(rows: Sequence[Row], method: str) -> dict[str, Row]:
    return {row["family"]: row for row in rows if row["method"] == method}


def _times(rows: Sequence[Row], paired: Sequence[Row], shaped: bool) -> list[Judged]:
    ours, off = _of(rows, "ours"), _of(rows, "off")
    ran = "--workload FILE --shape qwen3-0.6b measures it"
    both = {name: 1 - row["step_ms"] / off[name]["step_ms"] for name, row in ours.items() if name in off and row["reused_tokens"]}
    middle = statistics.median(both.values()) if both else None
    least = min(both.items(), key=lambda pair: pair[1], default=("", 0.0))
    known = {name: row for name, row in ours.items() if row["bound_tokens"] and name != NOTHING}
    whole = {row["of"]: row for row in paired if (row["by"], row["method"]) == ("family", "ours") and row.get("bound_tokens")}
    share = min(((row["of_bound"], name) for each in (known, whole) for name, row in each.items()), default=None)
    long = {name: row for name, row in known.items() if row["bound_tokens"] >= LONG * row["cases"] and row["reused_tokens"]}
    slow = min(((row["speedup"], name) for name, row in long.items()), default=None)
    nothing = [row for name, row in ours.items() if name == NOTHING and row["speedup"]]
    cost = max((1 / row["speedup"] for row in nothing), default=None)
    pages = "" if shaped else " (not on a known shape)"
    return [
        _row("times", "first token at least 20 % sooner than without reuse, where text has moved", middle, ge, LATENCY,
             f"median of {len(both)} families, least {least[1]:.2f} ({least[0]}){pages}", f"no row both ways; {ran}"),
        _row("all", "reused >= 0.8 x the text-match bound in each family", share[0] if share else None, ge, OF_BOUND,
             f"least of {len({*known, *whole})} families: {share[1] if share else ''}", f"nothing repeats; {ran}"),
        _row("times", "first token >= 1.5 x sooner than by the exact prefix where >= 1,000 tokens are reusable", slow[0] if slow else None,
             ge, FASTER, f"least of {len(long)} families: {slow[1] if slow else ''}{pages}", f"no such prompts; {ran}"),
        _row("times", "never slower than 1.03 x the exact prefix where nothing repeats", cost, le, SLOWER,
             f"median of {sum(row['cases'] for row in nothing)} prompts{pages}", f"no row; --families 'nothing repeats' {ran}"),
    ]  # fmt: skip


def _episodes(episodes: Sequence[Row]) -> list[Judged]:
    ours = next((row for row in episodes if row["method"] == "ours" and row["family"] == "all"), None)
    changed = ours["changed"] if ours else None
    return [
        _row("answers", "whole episodes at least 20 % faster than without reuse", 1 - 1 / ours["off_over_ours"] if ours else None,
             ge, LATENCY, f"median of {ours['n'] if ours else 0} episodes, answers included; embedded model or --model's",
             "--episodes N measures it"),
        _row("answers", "episodes solved otherwise than without reuse: at most 1 %", changed, le, CHANGED,
             f"{ours['n'] if ours else 0} episodes, steps as recorded", "--episodes N measures it"),
    ]  # fmt: skip


def _flops(paired: Sequence[Row]) -> list[Judged]:
    ours = {row["of"]: row for row in paired if row["method"] == "ours" and row["by"] == "family" and row["of"] in TEMPLATE_HEAVY}
    n = sum(row["n"] for row in ours.values())
    spent = sum(row["spent_flops"] for row in ours.values())
    exact = sum(row["exact_flops"] for row in ours.values())
    changed = sum(row["changed"] * row["n"] for row in ours.values()) / n if n else None
    run = "--paired N measures it"
    return [
        _row("all", "at least 20 % fewer prefill FLOPs than the exact prefix alone on template-heavy shifts",
             1 - spent / exact if exact else None, ge, SAVED, f"{n} requests, {len(ours)} families", run),
        _row("answers", "tasks right or wrong otherwise than with everything computed, on these: at most 1 %", changed,
             le, CHANGED, f"{n} requests", run),
    ]  # fmt: skip


def _near(report: Report, rows: Sequence[Row], paired: Sequence[Row]) -> list[Judged]:
    """KL with a halo of at most 8: along the answer, and at its first token, which has nothing but the prompt behind it."""
    if report.get("shape"):
        rows, paired = (), ()  # random weights say nothing
    eight = [row for row in rows if row["method"] == "halo 8" and row["reused_tokens"]]
    kls = [(row["kl_mean"], f"{row['family']}, {row['cases']} cases") for row in eight]
    steps: Sequence[Sequence[int]] = report.get("steps") or []
    ours = "ours" if len(steps) == 1 and steps[0][0] <= HALO else ""
    first: list[tuple[float, str]] = []
    tail: list[tuple[float, str]] = []
    for row in paired:
        if row["by"] == "all" and row["method"] in ("halo 8", ours):
            what = f"{row['method']}, {row['n']} made-up requests"
            for kept, name in ((kls, "kl"), (first, "kl_first"), (tail, "kl_first_p99")):
                kept += [(row[name], what)] if row.get(name) is not None else []
    found = []
    for name, ran, seen in (
        ("KL below 0.1 nats per token of the answer", "--ablations or --paired N measures it", kls),
        ("KL below 0.1 nats at the first token of the answer (mean)", "--paired N measures it", first),
        ("KL below 0.1 nats at the first token of 99 of 100 answers", "--paired N measures it", tail),
    ):
        worst = max(seen, default=None)
        why = f"most of {len(seen)}: {worst[1] if worst else ''}"
        found.append(_row("answers", f"{name} with a halo of 8", worst[0] if worst else None, lt, KL, why, ran))
    return found


def _drift(rows: Sequence[Row], paired: Sequence[Row]) -> list[Judged]:
    found = []
    for by, of in (("all", "all"), ("share", "context"), ("share", "independent")):
        row = next((row for row in paired if row["method"] == "ours" and (row["by"], row["of"]) == (by, of)), None)
        low, high = row["tool_ci"] if row else (0.0, 0.0)
        name = "all requests" if of == "all" else "requests that depend on context" if of == "context" else "independent requests"
        found.append(
            _row("answers", f"same tool as with everything computed, {name}: at least 0.99", row["tool"] if row else None, ge, AGREED,
                 f"{row['n'] if row else 0} requests, 95 %: {low:.4f} to {high:.4f}", "--paired N measures it")
        )  # fmt: skip
    exact = [row["kl_mean"] for row in rows if row["method"] == "off" and row["kl_mean"] is not None]
    why = f"KL of {len(exact)} families, the exact prefix against no reuse, asked between approximate requests"
    found.append(_row("all", "exact requests are untouched", max(exact, default=None), eq, 0.0, why, "rows with --off measure it"))
    return found


def _finding(find: Report) -> list[Judged]:
    found = []
    for source in ("traces", "duplicates"):
        row = next((row for row in find.get("verdicts", ()) if (row["source"], row["window"], row["tau"]) == (source, 64, 0.8)), None)
        said = (
            f"{row['proposals'] if row else 0} proposals, windows of 64, recall {_plain(row['recall_long'] if row else None)} of long runs"
        )
        name = "recorded prompts" if source == "traces" else "edited copies"
        figure = row["precision"] if row else None
        found.append(_row("all", f"precision above 0.7 at tau 0.8, {name}", figure, gt, PRECISION, said, "--find measures it"))
    steps = find.get("steps", ())
    most = max((row["step_ms"] for row in steps), default=None)
    why = f"most of {len(steps)} sizes of windows, 200 new tokens, processor time"
    found.append(_row("all", "looking for text at most 15 ms per step of 4,096 tokens", most, le, STEP_MS, why, "--find measures it"))
    return found


def _plain(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
