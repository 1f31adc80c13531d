"""Volatile spans as a `layout.toml` for a person to review, in the form that `Engine` reads. Applies nothing.

    [[volatile]]
    where = "system"
    class = "clock"         # a name: clock, id, counter, text
    pattern = "The current time is \\d+:\\d+"

A pattern is a Python regular expression, searched for in the system text as it stands before rendering.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import NamedTuple

from .report import Report
from .values import Cause, Finding, Hazard

HEAD = """\
# Proposed by `agentcache lint --suggest-layout`. Review it: what stands here is declared volatile, and only that may be moved to the end
# of the prompt. Delete what must stay where it is; a pattern should match the volatile text and nothing else.
"""
_VOLATILE = {Cause.CLOCK: "clock", Cause.ID: "id", Cause.COUNTER: "counter", Cause.STATE: "text"}


class Entry(NamedTuple):
    """One proposed span of the system text. seen: in how many requests, as a comment."""

    kind: str
    pattern: str
    seen: int
    example: str
    changed: bool = False


def entries(report: Report) -> list[Entry]:
    """Spans to declare volatile: those of the system text that are likely to change, and others that did."""
    found: dict[str, Entry] = {}
    for entry in _likely(report.hazards):
        found.setdefault(entry.pattern, entry)
    for entry in _changed(report.findings):
        known = found.get(entry.pattern)
        found[entry.pattern] = entry if known is None else known._replace(seen=known.seen + known.changed)
    return [entry for entry in found.values() if re.fullmatch(entry.pattern, "") is None]


def toml(report: Report) -> str:
    """The entries as a file of volatile values."""
    out = [HEAD]
    for entry in entries(report):
        shown = re.sub(r"[^\x20-\x7e]", "?", entry.example)[:100]
        out.append(
            f'\n# {entry.seen} times; for example: {shown}\n[[volatile]]\nwhere = "system"\n'
            f"class = {_quoted(entry.kind)}\npattern = {_quoted(entry.pattern)}\n"
        )
    return "".join(out)


def _changed(findings: list[Finding]) -> Iterator[Entry]:
    for finding in findings:
        kind = _VOLATILE.get(finding.cause)
        if kind is not None and 0 < len(finding.pattern) < 1_000:
            yield Entry(kind, finding.pattern, 1, (finding.context.before + finding.context.now).replace("\n", " "), True)


def _likely(hazards: list[tuple[Hazard, int, int]]) -> Iterator[Entry]:
    for hazard, requests, _ in hazards:
        if hazard.cause in _VOLATILE and hazard.writer.startswith("system") and 0 < len(hazard.pattern) < 1_000:
            yield Entry(_VOLATILE[hazard.cause], hazard.pattern, requests, hazard.text.replace("\n", " ").strip())


def _quoted(text: str) -> str:
    """A TOML basic string: JSON's, but for characters outside the basic plane and invisible ones."""
    written = json.dumps(text.encode("utf-8", "replace").decode(), ensure_ascii=False)
    return "".join(char if char.isprintable() else f"\\U{ord(char):08X}" for char in written)
