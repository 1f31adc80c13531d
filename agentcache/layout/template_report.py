"""Report of a chat template: what it keeps and refuses, and where it puts tools. For lint, and prompts to which that matters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .template import ANSWER, FIRST, RESULTS, SECOND, SYSTEM, TOOL, Template, tool_step

ToolsAt = Literal["before system", "after system", "first user", "last user", "other", "absent"]


@dataclass(frozen=True, slots=True)
class TemplateReport:
    """Findings of probing. P1 = system, user; P2 = P1 + call, result; P3 = P2 + call, result; P4 = P3 + answer, user."""

    step_preserving: bool | None  # P1 is a prefix of P2 and P2 of P3; None: the template refused the probe
    turn_preserving: bool | None  # P3 is a prefix of P4; None as above
    tools_at: ToolsAt
    system: Literal["kept", "dropped", "refused"]
    renders_call_ids: bool
    parallel_calls: bool
    absent_is_empty: bool  # a call without content renders as one with empty content, or is refused
    dated: bool  # today's date may be shown


def report_of(template: Template) -> TemplateReport:
    """Render small conversations and compare them."""
    source = template.source(True)
    system, tools = _system(template), (TOOL,)
    start = [{"role": "system", "content": SYSTEM}] if system == "kept" else []
    conversation = [*start, {"role": "user", "content": FIRST}]
    prompts = [template.attempt(conversation, tools)]
    for number in (0, 1):
        conversation = [*conversation, *tool_step(1, number)]
        prompts.append(template.attempt(conversation, tools))
    conversation = [*conversation, {"role": "assistant", "content": ANSWER}, {"role": "user", "content": SECOND}]
    prompts.append(template.attempt(conversation, tools))
    kept = [None if one is None or two is None else two.startswith(one) for one, two in zip(prompts, prompts[1:], strict=False)]
    other = template.attempt([*start, {"role": "user", "content": FIRST}, *tool_step(1, 0, foreign=True)], tools)
    call, result = tool_step(1, 0)
    bare = template.attempt([*conversation[: len(start) + 1], {**call, "content": None}, result], tools)
    return TemplateReport(
        step_preserving=None if None in kept[:2] else all(kept[:2]),
        turn_preserving=kept[2],
        tools_at=_tools_at(prompts[0], prompts[3], template.attempt(conversation[: len(start) + 1]) or ""),
        system=system,
        renders_call_ids=other != prompts[1],
        absent_is_empty=bare is None or bare == prompts[1],
        parallel_calls=_shows(template.attempt([*conversation[: len(start) + 1], *tool_step(2, 0)], tools), *RESULTS),
        dated="strftime_now" in source,
    )


def _system(template: Template) -> Literal["kept", "dropped", "refused"]:
    shown = template.attempt([{"role": "system", "content": SYSTEM}, {"role": "user", "content": FIRST}], (TOOL,))
    if shown is None:
        return "refused"
    return "kept" if SYSTEM in shown else "dropped"


def _shows(text: str | None, *words: str) -> bool:
    return text is not None and all(word in text for word in words)


def _tools_at(first: str | None, last: str | None, plain: str) -> ToolsAt:
    """Places of the tool in P1 and P4, against the system text and the two user texts. `plain` is P1 without tools."""
    if first is None or "Zdescqg" not in first and "zprobe_fn" not in first:
        return "absent"
    word = "Zdescqg" if "Zdescqg" in first else "zprobe_fn"
    at = first.index(word)
    if last is not None and FIRST in last and SECOND in last and word in last and last.index(word) > last.index(FIRST):
        return "last user"
    if FIRST not in first or at > first.index(FIRST):
        return "other"
    if SYSTEM not in first or at < first.index(SYSTEM):
        return "before system"
    gap = plain[plain.index(SYSTEM) + len(SYSTEM) : plain.index(FIRST)].strip() if _shows(plain, SYSTEM, FIRST) else ""
    return "first user" if gap and gap in first[first.index(SYSTEM) : at] else "after system"
