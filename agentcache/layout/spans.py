"""Places of messages, tools and the generation prompt in a joint rendering. Knows nothing of stores or models.

Positions are searched once from left to right, each message by the header its template was seen to write plus the start of its
content. Content that the template changes or drops leaves its text to the neighbour: the cover stays whole.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from ..types import Span, SpanKind
from .canonical import Turn, text_of
from .template import Shape
from .tokenise import Encoded, Place

HEAD = 48  # characters of content that identify a message after its header
SURE = 8  # and as many that do so without one


@dataclass(frozen=True, slots=True)
class Mark:
    """From this character on, the text belongs to this kind of span."""

    char: int
    kind: SpanKind
    message: int | None = None


def places(text: str, turns: Sequence[Turn], keys: Sequence[bytes], shape: Shape, stop: int, known: Encoded, shared: int) -> list[Place]:
    """Find each turn in text[:stop]. Places that `known` holds in the shared characters are taken over; keys[i] ends in turn i."""
    out: list[Place] = []
    for place, key in zip(known.places, keys, strict=False):
        if place.key != key or place.stop > min(shared, stop):
            break
        out.append(place)
    shown = next((place for place in reversed(out) if place.start is not None), Place(b"", "start", 0, 0))
    for number in range(len(out), len(turns)):
        turn = turns[number]
        content = text_of(turn.data.get("content")).strip()
        found = _find(text, turn, content, shape.headers.get((shown.kind, turn.kind), ""), shown.stop, stop)
        if found is None or (turn.kind == "system" and _overtaken(text, turns[number + 1 :], shown.stop, found[1])):
            out.append(Place(keys[number], turn.kind, None, shown.stop))
            continue
        start, at, length = found
        if start is None:
            start = _boundary(text, shown.stop, at, shape.closers.get(shown.kind, ""))
        end = at + length
        if turn.kind == "call":
            name = str(turn.data["tool_calls"][-1]["function"]["name"])
            behind = text.find(name, at, stop)
            end = max(end, behind + len(name)) if behind >= 0 else end
        shown = Place(keys[number], turn.kind, start, end)
        out.append(shown)
    return out


def _find(text: str, turn: Turn, content: str, header: str, cursor: int, stop: int) -> tuple[int | None, int, int] | None:
    """(start of the header if it was recognised, start of the content, its length)."""
    heads = [content[:HEAD], json.dumps(content[:HEAD], ensure_ascii=False)[1:-1][:HEAD]] if content else []
    if turn.kind == "call" and not heads:
        heads = [""]  # the header alone; the names of the calls are looked for after it
    for head in heads if header else ():
        at = text.find(header + head, cursor, stop)
        if at >= 0:
            return at, at + len(header), _length(text, content, head, at + len(header))
    for head in heads:
        at = text.find(head, cursor, stop) if len(head) >= SURE else -1
        if at >= 0:
            return None, at, _length(text, content, head, at)
    at = text.find(header, cursor, stop) if header else -1
    if at >= 0:  # the template changed the content; what stands in messages cannot spell a header's special tokens
        return at, at + len(header), 0
    name = str(turn.data["tool_calls"][0]["function"]["name"]) if turn.kind == "call" else ""
    for head in (name, *heads):
        at = text.find(head, cursor, stop) if head else -1
        if at >= 0:
            return None, at, _length(text, content, head, at)
    return None


def _length(text: str, content: str, head: str, at: int) -> int:
    return len(content) if head and text.startswith(content, at) else len(head)


def _overtaken(text: str, later: Sequence[Turn], cursor: int, at: int) -> bool:
    """Tell whether a system text stands after the message that follows it: some templates glue it to the last user message."""
    head = text_of(later[0].data.get("content")).strip()[:HEAD] if later else ""
    return len(head) > 2 and 0 <= text.find(head, cursor, at) < at


def _boundary(text: str, end: int, at: int, closer: str) -> int:
    """The start of a turn whose header was not recognised: after the previous turn's closing text."""
    return end + len(closer) if closer and text.startswith(closer, end) and end + len(closer) <= at else end


def generation_start(text: str, shape: Shape, generation: bool) -> int:
    """The start of the generation prompt, the end of the text if there is none."""
    return len(text) - len(shape.generation) if generation and shape.generation and text.endswith(shape.generation) else len(text)


def marks(turns: Sequence[Turn], found: Sequence[Place], size: int, stop: int, tools: tuple[int, int] | None) -> list[Mark]:
    """Marks in ascending order, the first at 0. `size`: of the text; `stop`: start of the generation prompt."""
    leading = turns[0].source if turns and turns[0].data["role"] == "system" and found[0].start is not None else None
    out = [Mark(0, "system", leading)]
    for number, (turn, place) in enumerate(zip(turns, found, strict=True)):
        if place.start is not None and (number or leading is None):
            out.append(Mark(place.start, "system" if turn.kind == "system" else "turn", turn.source))
    if stop < size:
        out.append(Mark(stop, "generation"))
    return out if tools is None else _with_tools(out, *tools)


def _with_tools(out: list[Mark], start: int, stop: int) -> list[Mark]:
    """The tools' interval laid over the others, which go on after it."""
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
