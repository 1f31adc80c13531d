"""A report for a terminal or a browser: shares, findings by cause, each step as a strip. Finds nothing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from io import StringIO
from typing import NamedTuple

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from .history import counted
from .report import Report
from .values import Cause, Finding, Step

REUSED, AGAIN, NEW = "green", "red", "bright_black"


class Most(NamedTuple):
    """Limits of what is shown."""

    steps: int  # of one conversation
    conversations: int  # the costliest first
    findings: int  # of each cause
    others: int  # hazards, and problems


TERMINAL, PAGE = Most(40, 8, 3, 12), Most(1_000, 60, 200, 1_000)
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>agentcache lint</title>
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<style>{stylesheet} body {{ color: {foreground}; background: {background}; }} pre {{ white-space: pre-wrap; }}</style></head>
<body><pre>{code}</pre></body></html>
"""


def plain(text: str, most: int = 0) -> str:
    """Text of a trace without what a terminal would obey."""
    out = "".join(char if char.isprintable() else "↵" if char == "\n" else ascii(char)[1:-1] for char in text)
    return out if not most or len(out) <= most else out[: most - 1] + "…"


def page(report: Report) -> str:
    """The report as one page for a browser: no scripts, nothing loaded, all text escaped."""
    console = Console(record=True, file=StringIO(), width=160, legacy_windows=False)
    console.print(shown(report, most=PAGE))
    return console.export_html(code_format=_PAGE)


def shown(report: Report, encoding: str = "utf-8", most: Most = TERMINAL, coloured: bool = True) -> RenderableType:
    """All of it, for a stream of this encoding, with colours or without."""
    parts: list[RenderableType] = [_head(report)]
    marks = _marks(encoding, coloured)
    for part in (_strips(report, marks, most), _findings(report, most), _hazards(report, most), _problems(report, most)):
        if part is not None:
            parts += [Text(), part]
    return Group(*parts)


def _head(report: Report) -> Text:
    totals = report.totals()
    out = Text()
    requests, conversations, tokens = totals["requests"], totals["conversations"], totals["prompt_tokens"]
    out.append(f"{plain(report.source)}: ", "bold")
    of = "" if report.unit == "tokens" else f" ({report.unit})"
    out.append(f"{counted(requests, 'request')} in {counted(conversations, 'conversation')}, {tokens:,} prompt tokens{of}\n")
    if totals["reused_share"] is None:
        out.append("no conversation has a second request: nothing to compare")
    else:
        out.append(f"reusable as sent: {totals['reused_share']:.1%}", "bold")
        out.append(f" of the {totals['later_tokens']:,} tokens of later requests; with nothing moved {totals['possible_share']:.1%}")
        lost = totals["again_tokens"] + totals["across_tokens"]
        if lost:
            out.append(f"\ncomputed again though it was known: {lost:,} tokens in {counted(totals['findings'], 'finding')}", "bold red")
        elif not totals["findings"]:
            out.append("\nevery request goes on from the one before it", "green")
    if "price" in totals:
        out.append(f"\nprice of the prompts as sent: {totals['price']['as_sent']:,.4f}, of it wasted: {totals['price']['wasted']:,.4f}")
    return out


def _strip(step: Step, width: int) -> list[tuple[str, int]]:
    """(colour, columns) of one step: reused, computed again, new."""
    total = max(1, step.tokens)
    again = min(width, -(-step.again * width // total)) if step.again else 0
    reused = min(width - again, round(step.reused * width / total))
    return [(REUSED, reused), (AGAIN, again), (NEW, width - reused - again)]


def _marks(encoding: str, coloured: bool) -> dict[str, str]:
    """The character of a strip's column: blocks where colours tell them apart, shades where none do, letters where there are no blocks."""
    try:
        "█".encode(encoding)
    except UnicodeEncodeError:
        return {REUSED: "=", AGAIN: "x", NEW: "."}
    return dict.fromkeys((REUSED, AGAIN, NEW), "█") if coloured else {REUSED: "█", AGAIN: "▒", NEW: "░"}


def _strips(report: Report, marks: Mapping[str, str], most: Most) -> RenderableType | None:
    tracks: dict[str, list[Step]] = defaultdict(list)
    for step in report.steps:
        tracks[step.conversation].append(step)
    chosen = sorted((steps for steps in tracks.values() if len(steps) > 1), key=lambda steps: -sum(step.again for step in steps))
    if not chosen:
        return None
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(overflow="ellipsis", no_wrap=True, max_width=34)
    table.add_column(no_wrap=True)
    for steps in chosen[: most.conversations]:
        row = Text()
        for step in steps[: most.steps]:
            for colour, columns in _strip(step, 3):
                row.append(marks[colour] * columns, colour)
            row.append(" ")
        table.add_row(Text(plain(steps[0].conversation, 34)), row)
    caption = Text("each step: ")
    for colour, what in ((REUSED, "reused"), (AGAIN, "computed again"), (NEW, "new")):
        caption.append(f"{marks[colour]} ", colour)
        caption.append(f"{what}  ")
    if len(chosen) > most.conversations:
        caption.append(f"({counted(len(chosen) - most.conversations, 'more conversation')})")
    return Group(caption, table)


def _findings(report: Report, most: Most) -> RenderableType | None:
    """Findings by cause, the costliest cause first, and the costliest finding first in each."""
    if not report.findings:
        return None
    by: dict[Cause, list[Finding]] = defaultdict(list)
    for finding in sorted(report.findings, key=lambda finding: -finding.cost_tokens):
        by[finding.cause].append(finding)
    parts: list[RenderableType] = []
    for cost, cause in sorted(((sum(finding.cost_tokens for finding in found), cause) for cause, found in by.items()), reverse=True):
        parts.append(Text.assemble((str(cause), "bold red"), f": {counted(len(by[cause]), 'finding')}, {cost:,} tokens computed again"))
        parts += map(_one, by[cause][: most.findings])
        if (left := len(by[cause]) - most.findings) > 0:
            parts.append(Text(f"  and {left:,} more (--json has them all)", "dim"))
    return Group(*parts)


def _one(finding: Finding) -> Text:
    out = Text("  ")
    out.append(f"request {finding.request}", "bold")
    out.append(f" (line {finding.line}, after request {finding.previous}), token {finding.token:,}, character {finding.char:,}: ")
    out.append(plain(finding.writer), "bold")
    out.append(f"; {plain(finding.detail, 160)}; {finding.cost_tokens:,} tokens")
    if finding.also:
        out.append(f"; after it also: {', '.join(map(str, finding.also))}")
    before = plain(finding.context.before[-40:])
    out.append("\n    was ").append(before, "dim").append(plain(finding.context.was, 60), "green")
    out.append("\n    now ").append(before, "dim").append(plain(finding.context.now, 60), "red")
    return out.append(f"\n    {plain(finding.fix)}", "italic")


def _hazards(report: Report, most: Most) -> RenderableType | None:
    if not report.hazards:
        return None
    out = Text("hazards, in single requests:", "bold yellow")
    for hazard, requests, values in report.hazards[: most.others]:
        seen = f", {values} different" if values > 1 else ", always the same" if values and requests > 1 else ""
        out.append(f"\n  {hazard.cause}", "yellow").append(
            f" in {plain(hazard.writer)}: {plain(hazard.detail)} ({requests:,} requests{seen})"
        )
        if hazard.text:
            out.append(f"\n    {plain(hazard.text, 100)}", "dim")
    if len(report.hazards) > most.others:
        out.append(f"\n  and {len(report.hazards) - most.others} more (--json has them all)", "dim")
    return out


def _problems(report: Report, most: Most) -> RenderableType | None:
    if not report.problems:
        return None
    out = Text("not read as it is:", "bold yellow")
    for problem in report.problems[: most.others]:
        out.append(f"\n  line {problem.line}: {plain(problem.message, 200)}")
    if (more := len(report.problems) + report.unread - most.others) > 0:
        out.append(f"\n  and {more:,} more", "dim")
    return out
