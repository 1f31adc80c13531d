"""A report for a terminal: shares, findings by cause, each step as a strip. Finds nothing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from .history import counted
from .report import Report
from .values import Cause, Finding, Step

STRIP = 40  # steps of one conversation in the strip
CONVERSATIONS = 8  # strips shown, the costliest first
EXAMPLES = 3  # findings shown of each cause
PROBLEMS = 12
REUSED, AGAIN, NEW = "green", "red", "bright_black"


def plain(text: str, most: int = 0) -> str:
    """Text of a trace without what a terminal would obey."""
    out = "".join(char if char.isprintable() else "↵" if char == "\n" else ascii(char)[1:-1] for char in text)
    return out if not most or len(out) <= most else out[: most - 1] + "…"


def shown(report: Report, encoding: str = "utf-8") -> RenderableType:
    """All of it, for a stream of this encoding."""
    parts: list[RenderableType] = [_head(report)]
    for part in (_strips(report, _marks(encoding)), _findings(report), _hazards(report), _problems(report)):
        if part is not None:
            parts += [Text(), part]
    return Group(*parts)


def _head(report: Report) -> Text:
    totals = report.totals()
    out = Text()
    requests, conversations, tokens = totals["requests"], totals["conversations"], totals["prompt_tokens"]
    out.append(f"{plain(report.source)}: ", "bold")
    out.append(f"{counted(requests, 'request')} in {counted(conversations, 'conversation')}, {tokens:,} prompt tokens ({report.unit})\n")
    if totals["reused_share"] is None:
        out.append("no conversation has a second request: nothing to compare")
    else:
        out.append(f"reusable as sent: {totals['reused_share']:.1%}", "bold")
        out.append(f" of {totals['later_tokens']:,} tokens with a prompt before them; with nothing moved {totals['possible_share']:.1%}")
        lost = totals["again_tokens"] + totals["across_tokens"]
        if lost:
            out.append(f"\ncomputed again though it was known: {lost:,} tokens in {counted(totals['findings'], 'finding')}", "bold red")
        elif not totals["findings"]:
            out.append("\nevery request goes on from the one before it", "green")
    if "price" in totals:
        out.append(f"\nprice of the prompts as sent: {totals['price']['as_sent']:,.4f}, of it wasted: {totals['price']['wasted']:,.4f}")
    return out


def strip(step: Step, width: int) -> list[tuple[str, int]]:
    """(colour, columns) of one step: reused, computed again, new."""
    total = max(1, step.tokens)
    again = min(width, -(-step.again * width // total)) if step.again else 0
    reused = min(width - again, round(step.reused * width / total))
    return [(REUSED, reused), (AGAIN, again), (NEW, width - reused - again)]


def _marks(encoding: str) -> dict[str, str]:
    """The character of a strip's column; letters where the stream has no blocks: then it is likely to have no colours either."""
    try:
        "█".encode(encoding)
    except UnicodeEncodeError:
        return {REUSED: "=", AGAIN: "x", NEW: "."}
    return dict.fromkeys((REUSED, AGAIN, NEW), "█")


def _strips(report: Report, marks: Mapping[str, str]) -> RenderableType | None:
    tracks: dict[str, list[Step]] = defaultdict(list)
    for step in report.steps:
        tracks[step.conversation].append(step)
    chosen = sorted((steps for steps in tracks.values() if len(steps) > 1), key=lambda steps: -sum(step.again for step in steps))
    if not chosen:
        return None
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(overflow="ellipsis", no_wrap=True, max_width=34)
    table.add_column(no_wrap=True)
    for steps in chosen[:CONVERSATIONS]:
        row = Text()
        for step in steps[:STRIP]:
            for colour, columns in strip(step, 3):
                row.append(marks[colour] * columns, colour)
            row.append(" ")
        table.add_row(Text(plain(steps[0].conversation, 34)), row)
    caption = Text("each step: ")
    for colour, what in ((REUSED, "reused"), (AGAIN, "computed again"), (NEW, "new")):
        caption.append(f"{marks[colour]} ", colour)
        caption.append(f"{what}  ")
    if len(chosen) > CONVERSATIONS:
        caption.append(f"({counted(len(chosen) - CONVERSATIONS, 'more conversation')})")
    return Group(caption, table)


def grouped(findings: Sequence[Finding]) -> Iterator[tuple[Cause, list[Finding]]]:
    """Findings by cause, the costliest cause first, and the costliest finding first in each."""
    by: dict[Cause, list[Finding]] = defaultdict(list)
    for finding in findings:
        by[finding.cause].append(finding)
    for cause in sorted(by, key=lambda cause: -sum(finding.cost_tokens for finding in by[cause])):
        yield cause, sorted(by[cause], key=lambda finding: -finding.cost_tokens)


def _findings(report: Report) -> RenderableType | None:
    if not report.findings:
        return None
    parts: list[RenderableType] = []
    for cause, findings in grouped(report.findings):
        cost = sum(finding.cost_tokens for finding in findings)
        parts.append(Text.assemble((str(cause), "bold red"), f": {counted(len(findings), 'finding')}, {cost:,} tokens computed again"))
        for finding in findings[:EXAMPLES]:
            parts.append(_one(finding))
        if len(findings) > EXAMPLES:
            parts.append(Text(f"  and {len(findings) - EXAMPLES:,} more (--json has them all)", "dim"))
    return Group(*parts)


def _one(finding: Finding) -> Text:
    out = Text("  ")
    out.append(f"request {finding.request}", "bold")
    out.append(f" (line {finding.line}, after request {finding.previous}), token {finding.token:,}, character {finding.char:,}: ")
    out.append(plain(finding.writer), "bold")
    out.append(f"; {plain(finding.detail, 160)}; {finding.cost_tokens:,} tokens")
    if finding.also:
        out.append(f"; behind it also: {', '.join(map(str, finding.also))}")
    before = plain(finding.context.before[-40:])
    out.append("\n    was ").append(before, "dim").append(plain(finding.context.was, 60), "green")
    out.append("\n    now ").append(before, "dim").append(plain(finding.context.now, 60), "red")
    return out.append(f"\n    {plain(finding.fix)}", "italic")


def _hazards(report: Report) -> RenderableType | None:
    if not report.hazards:
        return None
    out = Text("hazards, in single requests:", "bold yellow")
    for hazard, requests, values in report.hazards[:PROBLEMS]:
        seen = f", {values} different" if values > 1 else ", always the same" if values and requests > 1 else ""
        out.append(f"\n  {hazard.cause}", "yellow").append(
            f" in {plain(hazard.writer)}: {plain(hazard.detail)} ({requests:,} requests{seen})"
        )
        if hazard.text:
            out.append(f"\n    {plain(hazard.text, 100)}", "dim")
    if len(report.hazards) > PROBLEMS:
        out.append(f"\n  and {len(report.hazards) - PROBLEMS} more (--json has them all)", "dim")
    return out


def _problems(report: Report) -> RenderableType | None:
    if not report.problems:
        return None
    out = Text("not read as it is:", "bold yellow")
    for problem in report.problems[:PROBLEMS]:
        out.append(f"\n  line {problem.line}: {plain(problem.message, 200)}")
    more = len(report.problems) + report.unread - PROBLEMS
    if more > 0:
        out.append(f"\n  and {more:,} more", "dim")
    return out
