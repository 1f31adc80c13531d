"""Places of messages, tools and the generation prompt in a joint rendering. Knows nothing of stores or models.

Positions are searched once from left to right, each message by the header its template was seen to write plus the start of its
content. Content that the template changes or drops leaves its text to the neighbour: the cover stays whole.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

from ..types import Span, SpanKind
from .canonical import Turn, text_of
from .template import Shape
from .tokenise import EMPTY, Encoded, Place

HEAD = 48  # characters of content that identify a message after its header
SURE = 8  # and as many that do so without one


class Frame:
    """Places of the parts of one rendering: worked out once, for splicing and for the spans.

    keys[i] names the history that ends in turn i. added: the text that the tools add. generation: an answer is asked for.
    """

    def __init__(self, turns: Sequence[Turn], keys: Sequence[bytes], shape: Shape, added: str, generation: bool) -> None:
        self.shape = shape
        self.places: list[Place] = []
        self._turns, self._keys, self._added, self._generation = turns, keys, added, generation
        self._stop = 0  # start of the generation prompt, the end of the text if there is none
        self._tools: tuple[int, int] | None = None

    def place(self, text: str, known: Encoded = EMPTY, shared: int = 0) -> None:
        """Find each turn. Places that `known` holds in the shared characters are taken over."""
        at = text.find(self._added) if self._added else -1
        self._tools = (at, at + len(self._added)) if at >= 0 else None
        asks = self.shape.generation if self._generation else ""
        self._stop = stop = len(text) - len(asks) if text.endswith(asks) else len(text)
        self.places = out = list[Place]()
        for place, key in zip(known.places, self._keys, strict=False):
            if place.key != key or place.stop > min(shared, stop):
                break
            out.append(place)
        while out and out[-1].start is None:  # not shown, it may be now: other arguments of the template
            out.pop()
        last = out[-1] if out else Place(b"", "start", 0, 0)
        for number in range(len(out), len(self._turns)):
            out.append(self._next(text, number, last))
            last = last if out[-1].start is None else out[-1]

    def _next(self, text: str, number: int, last: Place) -> Place:
        """Find turn `number` after the last one that is shown."""
        turn, stop = self._turns[number], self._stop
        content = text_of(turn.data.get("content")).strip()
        found = _find(text, turn, content, self.shape.headers.get((last.kind, turn.kind), ""), last.stop, stop)
        if found is None or (turn.kind == "system" and _overtaken(text, self._turns[number + 1 :], last.stop, found[1])):
            return Place(self._keys[number], turn.kind, None, last.stop)
        start, at, length = found
        if start is None:  # the header was not recognised: the turn starts after the closing text of the one before
            closer = self.shape.closers.get(last.kind, "")
            start = last.stop + (len(closer) if text.startswith(closer, last.stop, at) else 0)
        end = at + length
        if turn.kind == "call":
            name = str(turn.data["tool_calls"][-1]["function"]["name"])
            behind = text.find(name, at, stop)
            end = max(end, behind + len(name)) if behind >= 0 else end
        return Place(self._keys[number], turn.kind, start, end)

    def shows(self, number: int) -> bool:
        """Tell whether turn `number` was found, so that the end of the one before it is known; true after the last turn."""
        return number >= len(self.places) or self.places[number].start is not None

    def turn_stop(self, number: int, start: int) -> int:
        """The end of the turn after `start`: the next turn shown, the tools, or the generation prompt."""
        later = [place.start for place in self.places[number + 1 :] if place.start is not None and place.start > start]
        tools = [self._tools[0]] if self._tools is not None and self._tools[0] > start else []
        return min([*later[:1], *tools, self._stop])

    def spans(self, encoded: Encoded) -> tuple[Span, ...]:
        """Token spans that cover [0, len(ids)) in order; a token across a boundary belongs to the span in which it ends."""
        size = len(encoded.ids)
        if not encoded.ends:  # a slow tokenizer tells no offsets
            return (Span("text", 0, size),) if size else ()
        parts = self._parts(len(encoded.text))
        edges = [0, *(encoded.tokens_before(part.start) for part in parts[1:]), size]
        shown = zip(parts, edges[:-1], edges[1:], strict=True)
        return tuple(replace(part, start=start, stop=stop) for part, start, stop in shown if stop > start)

    def _parts(self, size: int) -> list[Span]:
        """The spans in characters."""
        first = self._turns[0] if self._turns else None
        leading = first.source if first and first.data["role"] == "system" and self.places[0].start is not None else None
        marks: list[tuple[int, SpanKind, int | None]] = [(0, "system", leading)]
        for number, (turn, place) in enumerate(zip(self._turns, self.places, strict=True)):
            if place.start is not None and (number or leading is None):
                marks.append((place.start, "system" if turn.kind == "system" else "turn", turn.source))
        if self._stop < size:
            marks.append((self._stop, "generation", None))
        stops = [*(start for start, _, _ in marks[1:]), size]
        out = [Span(kind, start, stop, message) for (start, kind, message), stop in zip(marks, stops, strict=True)]
        return out if self._tools is None else overlaid(out, "tools", *self._tools)


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


def overlaid(spans: Sequence[Span], kind: SpanKind, start: int, stop: int) -> list[Span]:
    """An interval of this kind laid over the others, which go on after it."""
    out: list[Span] = []
    for span in spans:
        if span.stop <= start or span.start >= stop:
            out.append(span)
            continue
        if span.start < start:
            out.append(replace(span, stop=start))
        if not out or out[-1].kind != kind:
            out.append(Span(kind, start, stop))
        if span.stop > stop:
            out.append(replace(span, start=stop))
    return out
