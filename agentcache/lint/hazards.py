"""Hazards: likely costs of reuse, seen in one request alone, or in an answer that came back. Compares no prompts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from .history import turned
from .values import Cause, Hazard, Request, Said
from .volatile import hidden, masked, pattern, spots

NEAR = 40  # characters shown on each side


@dataclass(slots=True)
class Hazards:
    """The hazards of one source, each once, with how many requests had it and how many values were seen."""

    redact: bool = False
    found: dict[tuple[object, ...], Hazard] = field(default_factory=dict)
    requests: Counter[tuple[object, ...]] = field(default_factory=Counter)
    seen: dict[tuple[object, ...], set[int]] = field(default_factory=dict)
    _texts: dict[int, list[tuple[tuple[object, ...], int]]] = field(default_factory=dict)

    def look(self, request: Request) -> None:
        """Looks at what every request of an application repeats: system text and tools, or the start of a raw prompt."""
        for writer, text, strict in _stable(request):
            key = hash((writer, text))
            if key not in self._texts:
                if len(self._texts) > 4_096:
                    self._texts.clear()
                self._texts[key] = list(self._spots(request, writer, text, strict))
            for name, value in self._texts[key]:
                self.requests[name] += 1
                if len(seen := self.seen.setdefault(name, set())) < 1_000:
                    seen.add(value)

    def _spots(self, request: Request, writer: str, text: str, strict: bool) -> Iterator[tuple[tuple[object, ...], int]]:
        for spot in spots(text, strict):
            around = text[max(0, spot.start - NEAR) : spot.stop + NEAR]
            found = pattern(text, spot.start, spot.stop)
            name = (spot.cause, writer, masked(around) if len(found) > 500 else found)
            shown = hidden(around) if self.redact else around
            kept = "" if self.redact else found
            detail = f"a {spot.cause} that is likely to be another in the next request"
            self.found.setdefault(name, Hazard(request.number, request.line, spot.cause, writer, spot.start, shown, detail, kept))
            yield name, hash(text[spot.start : spot.stop])

    def came_back(self, was: Request, now: Request) -> None:
        """Notes a recorded answer of the model that does not stand in the next request unchanged."""
        at = len(was.history)
        if was.answer is None or at >= len(now.history) or now.history[at].role != "assistant":
            return
        back = now.history[at]
        found = turned([_plain(was.answer)], [_plain(back)])
        if found is not None and found.cause in (Cause.ARGUMENTS, Cause.REASONING):
            detail = f"the model's answer came back changed: {found.detail}; what it generated is computed again"
            self.note(now, found.cause, f"message {back.source} (assistant)", detail, name=(found.cause, "answer"))

    def note(self, request: Request, cause: Cause, writer: str, detail: str, name: tuple[object, ...] = ()) -> None:
        """One hazard found elsewhere, the same for all of one name: by default of one writer and detail."""
        name = name or (cause, writer, detail)
        self.found.setdefault(name, Hazard(request.number, request.line, cause, writer, 0, "", detail))
        self.requests[name] += 1

    def listed(self) -> list[tuple[Hazard, int, int]]:
        """(hazard, requests that had it, different values seen)."""
        return [(hazard, self.requests[name], len(self.seen.get(name, ()))) for name, hazard in self.found.items()]


def _stable(request: Request) -> Iterator[tuple[str, str, bool]]:
    for at, said in enumerate(request.system):
        yield ("system" if at == 0 else f"system message {at}"), said.content, False
    for at, tool in enumerate(request.tools):
        yield f"tool {at} {tool.name!r}", tool.text, True
    if request.prompt is not None:
        yield "prompt", request.prompt[:2_000], True


def _plain(said: Said) -> Said:
    return replace(said, calls=tuple(replace(call, id=None) for call in said.calls), call_id=None, name=None)
