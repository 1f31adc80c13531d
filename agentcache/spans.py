"""Where messages, tools and the generation prompt stand in a joint rendering. Knows nothing of stores or models.

Positions are searched once from left to right, each message by the header its template was seen to write plus the start of its
content. Content that the template changes or drops leaves its text to the neighbour: the cover stays whole.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from .canonical import Turn, text_of
from .template import Shape
from .tokenise import Encoded
from .types import Span, SpanKind

HEAD = 48  # characters of content that identify a message behind its header


@dataclass(frozen=True, slots=True)
class Mark:
    """From this character on, the text belongs to this kind of span."""

    char: int
    kind: SpanKind
    message: int | None = None


def turn_starts(text: str, turns: Sequence[Turn], shape: Shape, stop: int) -> list[int | None]:
    """The character at which each turn's header starts, or None where the rendering does not show the turn."""
    starts: list[int | None] = []
    before, end, cursor = "start", 0, 0
    for number, turn in enumerate(turns):
        content = text_of(turn.data.get("content")).strip()
        found = _find(text, turn, content, shape.headers.get((before, turn.kind), ""), cursor, stop)
        if found is None or (turn.kind == "system" and _overtaken(text, turns[number + 1 :], cursor, found[1])):
            starts.append(None)
            continue
        header, at, length = found
        starts.append(_boundary(text, end, at, shape.closers.get(before, "")) if header is None else header)
        before, cursor = turn.kind, at + length
        end = cursor
        if turn.kind == "call":
            name = str(turn.data["tool_calls"][-1]["function"]["name"])
            place = text.find(name, cursor, stop)
            end = cursor = place + len(name) if place >= 0 else cursor
    return starts


def _find(text: str, turn: Turn, content: str, header: str, cursor: int, stop: int) -> tuple[int | None, int, int] | None:
    """(start of the header if it was recognised, start of the content, its length)."""
    head = content[:HEAD]
    if header:
        at = text.find(header + head, cursor, stop)
        if at < 0 and turn.kind == "call":
            at, head = text.find(header, cursor, stop), ""  # some templates drop the text beside a call
        if at >= 0:
            inside = at + len(header)
            return at, inside, len(content) if head and text.startswith(content, inside) else len(head)
    if turn.kind == "call" and not head:
        head = content = str(turn.data["tool_calls"][0]["function"]["name"])
    for shown in (head, json.dumps(content, ensure_ascii=False)[1:-1][:HEAD]):
        at = text.find(shown, cursor, stop) if shown else -1
        if at >= 0:
            return None, at, len(content) if text.startswith(content, at) else len(shown)
    return None


def _overtaken(text: str, later: Sequence[Turn], cursor: int, at: int) -> bool:
    """Whether a system text stands behind the message that follows it: some templates glue it to the last user message."""
    head = text_of(later[0].data.get("content")).strip()[:HEAD] if later else ""
    return len(head) > 2 and 0 <= text.find(head, cursor, at) < at


def _boundary(text: str, end: int, at: int, closer: str) -> int:
    """Where a turn starts whose header was not recognised: behind the previous turn's closing text."""
    return end + len(closer) if closer and text.startswith(closer, end) and end + len(closer) <= at else end


def marks(text: str, turns: Sequence[Turn], shape: Shape, tools: str, generation: bool) -> list[Mark]:
    """Marks in ascending order, the first at 0."""
    stop = len(text)
    if generation and shape.generation and text.endswith(shape.generation):
        stop -= len(shape.generation)
    starts = turn_starts(text, turns, shape, stop)
    leading = turns[0].source if turns and turns[0].data["role"] == "system" and starts[0] is not None else None
    out = [Mark(0, "system", leading)]
    for number, (turn, start) in enumerate(zip(turns, starts, strict=True)):
        if start is not None and (number or leading is None):
            out.append(Mark(start, "system" if turn.data["role"] == "system" else "turn", turn.source))
    if stop < len(text) or generation:
        out.append(Mark(stop, "generation"))
    at = text.find(tools) if tools else -1
    if at >= 0:
        out = _with_tools(out, at, at + len(tools))
    return out


def _with_tools(out: list[Mark], start: int, stop: int) -> list[Mark]:
    """The tools' interval laid over the others, which go on behind it."""
    before = [mark for mark in out if mark.char < start] or [Mark(0, "system")]
    inside = [mark for mark in out if start <= mark.char < stop]
    after = [mark for mark in out if mark.char >= stop]
    resumed = inside[-1] if inside else before[-1]
    rest = [] if after and after[0].char == stop else [Mark(stop, resumed.kind, resumed.message)]
    head = before if start > 0 else []
    return [*head, Mark(start, "tools"), *rest, *after]


def spans(encoded: Encoded, found: Sequence[Mark]) -> tuple[Span, ...]:
    """Token spans that cover [0, len(ids)) in order; a token across a boundary belongs to the span in which it ends."""
    size = len(encoded.ids)
    if not encoded.ends:  # a slow tokenizer tells no offsets
        return (Span("text", 0, size),) if size else ()
    edges = [0, *(encoded.tokens_before(mark.char) for mark in found[1:]), size]
    out: list[Span] = []
    for mark, start, stop in zip(found, edges[:-1], edges[1:], strict=True):
        if stop > start:
            out.append(Span(mark.kind, start, stop, mark.message))
    return tuple(out)
