"""A pair of requests to a finding: position, context, cost, fix. Reads no files and prints nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ..layout.tokenise import common_chars
from .compare import compare
from .fixes import fix_of
from .render import Parting, Prompt, again, parting, shared_start
from .templated import Tokens, own_fault
from .values import Cause, Change, Context, Finding, Request
from .volatile import hidden, line_pattern, pattern

BEFORE, BEHIND = 60, 100  # characters of context


class Diagnosis(NamedTuple):
    """The result of one pair, in tokens: reusable ones, those to compute again, and the cause."""

    reused: int
    again: int
    finding: Finding | None


def diagnose(
    was: Request, now: Request, old: Prompt, new: Prompt, conversation: str, *, across: bool = False, redact: bool = False
) -> Diagnosis:
    """The finding of two consecutive requests and their prompts, if the later does not go on from the earlier."""
    if isinstance(old, Tokens) and isinstance(new, Tokens):
        at, shared = _token_parting(old, new)
    else:
        at = parting(old, new)
        shared = at.shared if at is not None else min(old.size, new.size)
    if at is None:
        return Diagnosis(new.tokens(shared), 0, None)
    changes = compare(was, now)
    cost = new.tokens(again(old, new, at))
    cause, writer, where, detail, also = _explained(was, old, new, at, changes)
    found = Finding(
        request=now.number,
        line=now.line,
        conversation=conversation,
        previous=was.number,
        cause=cause,
        writer=writer,
        token=shared // new.unit,
        char=new.char(shared) if isinstance(new, Tokens) else shared,
        cost_tokens=cost,
        fix=fix_of(cause, writer, where, detail),
        context=_context(old, new, at, redact),
        detail=detail,
        also=also,
        across=across,
        pattern="" if redact or where != "system" else _pattern(was, now, cause),
    )
    return Diagnosis(shared // new.unit, cost, found)


def _token_parting(old: Tokens, new: Tokens) -> tuple[Parting | None, int]:
    """The place where the ids part; a difference inside the generation prompt is none."""
    shared = shared_start(old.encoded.ids, new.encoded.ids)
    if shared >= min(old.stable, len(new.encoded.ids)):
        return None, shared
    left = shared
    for number, part in enumerate(new.parts):
        if left < len(part) or number == len(new.parts) - 1:
            return Parting(number, left, shared), shared
        left -= len(part)
    return None, shared


def _pattern(was: Request, now: Request, cause: Cause) -> str:
    """A pattern that finds the first changed span of the system text again."""
    for one, other in zip(was.system, now.system):
        if one.content != other.content:
            at = common_chars(one.content, other.content)
            if cause in (Cause.CLOCK, Cause.ID, Cause.COUNTER):
                return pattern(other.content, at, at + 1)
            return line_pattern(other.content, at) if cause is Cause.STATE else ""
    return ""


_WHERE = {"system": "system", "tools": "tools", "turn": "history"}


def _explained(
    was: Request, old: Prompt, new: Prompt, at: Parting, changes: Sequence[Change]
) -> tuple[Cause, str, str, str, tuple[Cause, ...]]:
    """(cause, writer, where, detail, further causes) of the first difference."""
    chosen = changes[0] if changes else None
    if isinstance(old, Tokens) and isinstance(new, Tokens):
        span = new.span_at(at.shared)
        where = _WHERE.get(span.kind) if span is not None else None
        here = [change for change in changes if change.where == where] or [change for change in changes if where is None]
        if not here and (where == "history" or not changes):
            cause, writer, detail = own_fault(old, new, at.shared, (*was.system, *was.history))
            if not changes or cause is not Cause.TEMPLATE:
                return cause, writer, "template", detail, tuple(dict.fromkeys(change.cause for change in changes))
        chosen = here[0] if here else chosen
    if chosen is None:
        return Cause.EDITED, "prompt", "prompt", "the text changed", ()
    also = tuple(dict.fromkeys(change.cause for change in changes if change is not chosen and change.cause is not chosen.cause))
    return chosen.cause, chosen.writer, chosen.where, chosen.detail, also


def _context(old: Prompt, new: Prompt, at: Parting, redact: bool) -> Context:
    if isinstance(old, Tokens) and isinstance(new, Tokens):
        start, shown = new.char(at.shared), new.encoded.text
        before, now, was = shown[max(0, start - BEFORE) : start], shown[start : start + BEHIND], old.encoded.text[start : start + BEHIND]
    else:
        before = _around(new.parts, at.part, at.inside, after=False)
        now, was = (_around(prompt.parts, at.part, at.inside, after=True) for prompt in (new, old))
    return Context(*map(hidden, (before, was, now))) if redact else Context(before, was, now)


def _around(parts: Sequence[Any], part: int, inside: int, after: bool) -> str:
    """Up to so many characters on one side of a place, across parts."""
    if part >= len(parts):
        return ""
    if after:
        text = str(parts[part][inside : inside + BEHIND])
        return text + (str(parts[part + 1][: BEHIND - len(text)]) if len(text) < BEHIND and part + 1 < len(parts) else "")
    text = str(parts[part][max(0, inside - BEFORE) : inside])
    return (str(parts[part - 1][-(BEFORE - len(text)) :]) if len(text) < BEFORE and part else "") + text
