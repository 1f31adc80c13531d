"""A pair of requests to a finding: position, context, cost, fix. Reads no files and prints nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..layout.tokenise import common_length
from .compare import compare
from .render import Parting, Prompt, again, parting
from .templated import Tokens, own_fault
from .values import Cause, Change, Context, Finding, Request
from .volatile import hidden, line_pattern, pattern

BEFORE, AFTER = 60, 100  # characters of context


class Diagnosis(NamedTuple):
    """The result of one pair, in tokens: reusable ones, those to compute again, and the cause."""

    reused: int
    again: int
    finding: Finding | None


def diagnose(
    was: Request, now: Request, old: Prompt, new: Prompt, conversation: str, *, across: bool = False, redact: bool = False
) -> Diagnosis:
    """The finding of two consecutive requests and their prompts, if the later does not go on from the earlier."""
    shared = common_length(old.whole, new.whole)
    if shared >= min(old.stable, len(new.whole)) or not new.parts:
        return Diagnosis(new.tokens(shared), 0, None)
    at = parting(new, shared)
    changes = compare(was, now)
    cost = new.tokens(again(old, new, at))
    change, also = _explained(was, old, new, at, changes)
    found = Finding(
        request=now.number,
        line=now.line,
        conversation=conversation,
        previous=was.number,
        cause=change.cause,
        writer=change.writer,
        token=shared // new.unit,
        char=new.char(shared),
        cost_tokens=cost,
        fix=_fix(change),
        context=_context(old, new, shared, redact),
        detail=change.detail,
        also=also,
        across=across,
        pattern="" if redact or change.where != "system" else _pattern(was, now, change.cause),
    )
    return Diagnosis(shared // new.unit, cost, found)


def _pattern(was: Request, now: Request, cause: Cause) -> str:
    """A pattern that finds the first changed span of the system text again."""
    for one, other in zip(was.system, now.system):
        if one.content != other.content:
            at = common_length(one.content, other.content)
            if cause in (Cause.CLOCK, Cause.ID, Cause.COUNTER):
                return pattern(other.content, at, at + 1)
            return line_pattern(other.content, at) if cause is Cause.STATE else ""
    return ""


_WHERE = {"system": "system", "tools": "tools", "turn": "history"}


def _explained(was: Request, old: Prompt, new: Prompt, at: Parting, changes: Sequence[Change]) -> tuple[Change, tuple[Cause, ...]]:
    """The change at the first difference, and the causes of further ones."""
    chosen = changes[0] if changes else None
    if isinstance(old, Tokens) and isinstance(new, Tokens):
        span = new.span_at(at.shared)
        where = _WHERE.get(span.kind) if span is not None else None
        here = [change for change in changes if change.where == where] or [change for change in changes if where is None]
        if not here and (where == "history" or not changes):
            fault = own_fault(old, new, at.shared, (*was.system, *was.history))
            if not changes or fault.cause is not Cause.TEMPLATE:
                return fault, tuple(dict.fromkeys(change.cause for change in changes))
        chosen = here[0] if here else chosen
    if chosen is None:
        return Change(Cause.EDITED, "prompt", "prompt", "the text changed"), ()
    return chosen, tuple(dict.fromkeys(change.cause for change in changes if change.cause is not chosen.cause))


def _context(old: Prompt, new: Prompt, shared: int, redact: bool) -> Context:
    start, was, now = new.char(shared), old.text, new.text
    found = now[max(0, start - BEFORE) : start], was[start : start + AFTER], now[start : start + AFTER]
    return Context(*map(hidden, found)) if redact else Context(*found)


# Fixes: a sentence for each cause, which names the writer

_FIXES = {
    Cause.CLOCK: "Move the time out of {writer}: say it in the newest message, round it to the day, or let a tool tell it.",
    Cause.ID: "Take the id out of {writer}, or make it once for the conversation and keep it.",
    Cause.COUNTER: "Move the number out of {writer} to the newest message.",
    Cause.ORDER: "Give {writer} in one fixed order: sort it by name or by call before it is sent.",
    Cause.ARGUMENTS: "Send the arguments in {writer} as the text that the model wrote: keep the string, do not parse and dump it.",
    Cause.REASONING: "Send {writer} back with its reasoning, or without it from the first time on; do not take it out later.",
    Cause.EDITED: "Leave {writer} as it was first sent: bound or shorten it before its first use, and put new text after the history.",
    Cause.SUMMARY: "Do not rewrite {writer} at every step: summarise seldom, in large pieces, and keep a summary unchanged until the next.",
    Cause.TRUNCATED: "Drop old messages seldom and many at once, instead of a few at every step, so that the history before {writer} stays the same.",  # noqa: E501
    Cause.TOOLS_MOVED: "Use a chat template that keeps the tools in one place: {writer} moves them with the newest user message.",
    Cause.TOOL_SET: "Keep one list of tools for the whole conversation ({writer} changed it): add new tools at its end and forbid instead of removing.",  # noqa: E501
    Cause.STATE: "Move what changes out of {writer} into the newest message, and keep the system text as it was.",
    Cause.TEMPLATE: "Use a chat template that is prefix-preserving: {writer} renders earlier messages anew; `agentcache lint --template` shows where.",  # noqa: E501
    Cause.BOUNDARY: "End prompts where a token ends: without trailing white space, or after a special token ({writer}).",
}
_TEMPLATE_FIXES = {Cause.REASONING: "Use a template, or an option of it, that keeps the reasoning of earlier turns: {writer} takes it out."}


def _fix(change: Change) -> str:
    cause, where, detail = change.cause, change.where, change.detail
    text = _FIXES[cause]
    if change.writer == "template":
        text = _TEMPLATE_FIXES.get(cause, text)
    elif cause is Cause.ORDER and "keys" in detail:
        text = "Write the JSON of {writer} with its keys in one fixed order."
    elif cause is Cause.ORDER and where == "system":
        text = "Keep the lines of {writer} in one order, or move what changes places, such as retrieved passages, into the newest message."
    elif cause is Cause.ORDER and where == "history" and "messages" in detail:
        text = "Put the results before {writer} in the order of their calls, whichever came first."
    elif cause is Cause.ID and "tool calls" in detail:
        text = "Keep the ids of tool calls as they were first sent ({writer}), or number them by position."
    elif cause is Cause.EDITED and "taken out again" in detail:
        text = "Keep text for one request only out of the history, or keep it for good: {writer} stands where it was taken out again."
    tools = where == "tools" and cause is Cause.ORDER and "keys" not in detail
    return text.format(writer="the list of tools" if tools else change.writer)
