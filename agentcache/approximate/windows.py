"""Windows of a rendered prompt: runs of tokens that may come again elsewhere, and their canonical words. Knows no stores.

Windows start at anchors, and every `stride` tokens after one up to the next: equal text after equal anchors has equal windows, wherever
it stands. Words are canonical for finding only (case, white space; times, ids, long numbers masked); reuse compares tokens.

    anchors     messages · tools, each schema · Thought / Action / Action Input / Observation · tool results · documents · paragraphs
                · what a line of dashes or one word with a colon heads · long texts in JSON
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from ..namespace_lru import NamespaceLRU
from ..types import Layout

Texts = Callable[[Sequence[int]], Sequence[str]]  # what each of these tokens says

WINDOW = 64
STRIDE = 32
BACK = 512  # how far before new text its anchor is looked for
LEFT = 16  # words directly left of a window that are stored with it
MARGIN = 96  # tokens that are sure to hold so many words
NAMESPACES = 16  # whose tokens' texts are remembered: some megabytes each for a large vocabulary
CLOSE = 8  # an anchor so near after another one is none

_ANCHOR = re.compile(
    r"((?<=\n)[ \t]*\n+|^[ \t]*(?:[-=_*~]{3,}|\w+:)[ \t]*\n+|[:\[,][ \t]*\"(?=[^\"\n]{64}))"  # paragraph; below a rule, "Context:"; in JSON
    r"|^[ \t]*(?:Action Input|Action|Thought|Observation)[ \t]*\d*[ \t]*:"
    r"|<tool_response>|<function_results?>|<\|tool\|>|\[TOOL_RESULTS\]"
    r"|<(?:document|doc|source|passage)\b|^[ \t]*(?:Document|Passage|Source|Title)[ \t]*\[?\d*\]?[ \t]*:|^#{1,6}[ \t]|^\[\d+\][ \t]"
    r'|\{[ \t]*"type"[ \t]*:[ \t]*"function"',  # where a template's tools have no span of their own
    re.MULTILINE,
)

_HEADER = re.compile(r"[^\n]{0,64}\n\s*(?:<(?:tool_response|function_results?)>\s*)?")  # of a message, where it has a line of its own

_WORD = re.compile(
    r"([0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12})"  # uuid
    r"|(\d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d(?::\d\d(?:\.\d+)?)?(?:Z|[+-]\d\d:?\d\d)?)?|\d{1,2}:\d\d(?::\d\d(?:\.\d+)?)?)"  # date, time of day
    r"|\w+|[^\w\s]"
)
_LONG = 5  # digits of a number that looks like an id


@dataclass(frozen=True, slots=True)
class Window:
    """Prompt tokens [start, stop) and their words."""

    start: int
    stop: int
    words: tuple[str, ...]  # canonical
    left: tuple[str, ...]  # the words directly before


class TokenTexts:
    """Texts of single tokens of a tokenizer; each is decoded once in a namespace. Safe to use from many threads."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._known: NamespaceLRU[str, dict[int, str]] = NamespaceLRU(NAMESPACES)

    def __call__(self, ids: Sequence[int], namespace: str = "default") -> list[str]:
        if (known := self._known.get(namespace, "")) is None:
            self._known.put(namespace, "", known := {})
        for token in set(ids) - known.keys():
            known[int(token)] = str(self._tokenizer.decode([int(token)]))
        return [known[token] for token in ids]


def canonical(text: str) -> list[tuple[int, str]]:
    """Its words with the characters at which they start."""
    found = []
    for match in _WORD.finditer(text):
        group = match.lastindex
        found.append((match.start(), _masked(match.group()) if group is None else ("<id>", "<time>")[group - 1]))
    return found


def _masked(word: str) -> str:
    if word.isalpha() or len(word) == 1:
        return word.lower()
    digits = sum(map(str.isdigit, word))
    if digits >= _LONG or (digits >= 2 and digits < len(word) and len(word) >= 6):
        return "<id>"
    return word.lower()


def windows(layout: Layout, texts: Texts, since: int = 0, *, size: int = WINDOW, stride: int = STRIDE) -> list[Window]:
    """Windows of `size` tokens that hold a token from `since` on, in order; none reaches into text that is for this prompt only.

    Those of two prompts with a common start are the same there, so the windows of the shorter one need not be signed again.
    """
    assert 0 < stride <= size
    limit = len(layout.ids) - layout.ephemeral_tokens
    if limit < size or since >= limit:
        return []
    part = _Part(layout, texts, _begin(layout, since, size), limit)
    found = []
    for start in _starts(part.anchors(), part.first, limit, stride):
        stop = start + size
        if since < stop <= limit:
            low, high = bisect_left(part.at, start), bisect_left(part.at, stop)
            words = tuple(part.words[low:high])
            found.append(Window(start, stop, words, tuple(part.words[max(0, low - LEFT) : low])))
    return found


def _begin(layout: Layout, since: int, size: int) -> int:
    """Find where to look from, so that the windows with tokens from `since` on are those that a look from the start would find."""
    back = max(0, since - size)
    span = next((span for span in reversed(layout.spans) if span.start <= back), None)
    if span is None:
        return 0
    return span.start if span.kind == "tools" else max(span.start, back - BACK)


def _starts(found: Sequence[int], first: int, limit: int, stride: int) -> Iterator[int]:
    """Anchors, and every `stride` tokens after each until the next one is near."""
    if not found or found[0] > first:  # no anchor within sight: places that do not depend on where one began to look
        found = [-(-first // stride) * stride, *found]
    for anchor, after in zip(found, [*found[1:], limit + stride], strict=True):
        yield anchor
        yield from range(anchor + stride, after - stride // 2, stride)


class _Part:
    """Tokens [first, stop) of a prompt as text: words with their tokens, from MARGIN tokens before; and anchors."""

    def __init__(self, layout: Layout, texts: Texts, first: int, stop: int) -> None:
        self.first = first
        self._layout, self._stop, self._from = layout, stop, max(0, first - MARGIN)
        pieces = texts(layout.ids[self._from : stop])
        self._ends = list(accumulate(map(len, pieces)))
        self._text = "".join(pieces)
        said = canonical(self._text)
        self.words = [word for _, word in said]
        self.at = [self._token(char) for char, _ in said]

    def _token(self, char: int) -> int:
        """The token in which a character lies."""
        return self._from + bisect_right(self._ends, char)

    def _char(self, token: int) -> int:
        return self._ends[token - self._from - 1] if token > self._from else 0

    def anchors(self) -> list[int]:
        """In order; one that follows another closely gives way, whichever of them it is, so that anchors do not depend on ones far away."""
        exact = {span.start for span in self._layout.spans} | {self._token(char) for char in (*self._schemas(), *self._contents())}
        schemas = [range(span.start, span.stop) for span in self._layout.spans if span.kind == "tools"]
        found, last = set(exact), -CLOSE
        for match in _ANCHOR.finditer(self._text):
            paragraph = match[1] is not None
            token = self._token(match.end() if paragraph else match.start() + len(match.group()) - len(match.group().lstrip()))
            if match[0].endswith('"') and any(token in each for each in schemas):
                continue  # they have anchors of their own
            if token - last >= (2 * CLOSE if paragraph else CLOSE) and exact.isdisjoint(range(token - CLOSE + 1, token + 1)):
                found.add(token)
            last = token
        return [token for token in sorted(found) if self.first <= token < self._stop]

    def _contents(self) -> Iterator[int]:
        """Characters at which the texts of messages start: they stand elsewhere without this header."""
        for span in self._layout.spans:
            if span.kind != "tools" and self._from <= span.start and span.start < self._stop:
                header = _HEADER.match(self._text, self._char(span.start), self._char(min(span.stop, self._stop)))
                if header is not None:
                    yield header.end()

    def _schemas(self) -> Iterator[int]:
        """Characters at which the single schemas start in the tools' text."""
        decoder = json.JSONDecoder()
        for span in self._layout.spans:
            if span.kind != "tools" or span.stop <= self.first:
                continue
            at, stop = self._char(max(span.start, self.first)), self._char(min(span.stop, self._stop))
            while 0 <= (at := self._text.find("{", at, stop)) < stop:
                try:
                    said, end = decoder.raw_decode(self._text, at)
                except ValueError:  # no JSON: a template that writes schemas in another way
                    at += 1
                    continue
                if isinstance(said, dict) and ("function" in said or "name" in said):
                    yield at
                at = end
