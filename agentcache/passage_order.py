"""Order of retrieved passages: along the longest cached run of them, by the pages that requests find. Computes nothing.

head | passage separator passage separator ... | tail        the head is what the prompt has before its first passage
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from .document_packs import Arrangement, Owner, listed, scope_of
from .errors import ConfigError
from .layout.request import Rendered
from .store.keys import Ids, Scope, as_ids
from .store.store import Store
from .types import PAGE_TOKENS, PASSAGES, Message

LEAST = 32  # tokens that another order must gain
SIZE = 4  # bytes of an id: as bytes, runs of ids are compared in a fraction of the time that arrays take
SEAM = 8 * SIZE  # between two passages at most, with the first token of the next where they are tokenised together
EDGE = 4 * SIZE  # by which a passage is recognised


class Passages:
    """The token ids of some passages, recognised in a cached run whatever their neighbours make of their first and last token."""

    def __init__(self, ids: Sequence[Ids]) -> None:
        self._inner = [each[1:-1].tobytes() for each in ids]
        self._starts: dict[bytes, list[int]] = {}
        for number, inner in enumerate(self._inner):
            if len(inner) >= EDGE:
                self._starts.setdefault(inner[:EDGE], []).append(number)

    def follow(self, run: bytes) -> tuple[list[int], list[int]]:
        """Walk along a run from passage to passage: their numbers, and at which token each ends. The run may end in the last one."""
        order: list[int] = []
        ends: list[int] = []
        at = seam = 0
        while True:
            start, number = at + seam, self._begun(run, at + seam, order)  # mostly after the same seam as the last one
            if number is None:
                tried = ((start, self._begun(run, start, order)) for start in range(at, at + SEAM, SIZE))
                start, number = next((found for found in tried if found[1] is not None), (0, None))
            if number is None:
                return order, ends
            seam = start - at
            at = min(start + len(self._inner[number]), len(run))
            order.append(number)
            ends.append(at // SIZE)

    def leads(self, run: bytes) -> bool:
        """Tell whether the first passage may be the first one in a run."""
        return any(inner[:EDGE] in run[: SEAM + EDGE] for inner in self._inner[:1])

    def _begun(self, run: bytes, start: int, order: list[int]) -> int | None:
        """The passage that begins at `start` and is not in `order`."""
        for number in self._starts.get(run[start : start + EDGE], ()):
            inner = self._inner[number]
            if number not in order and inner.startswith(run[start : start + len(inner)]):
                return number
        return None


def arrange(
    engine: Owner, passages: Sequence[str], messages: Sequence[Message | Mapping[str, Any]], tools: Sequence[Any], namespace: str,
    adapter: str | None, rendered: Mapping[str, Any],
) -> Arrangement:  # fmt: skip
    """See `Engine.arrange`."""
    engine.check_open()
    engine.store.apply_deletions()
    head = _head(engine, messages, tools, namespace, rendered)
    passages = listed("passages", passages)
    first: dict[str, int] = {}
    same = [first.setdefault(text, number) for number, text in enumerate(passages)]
    ids = [as_ids(engine.renderer.ids(text, namespace)) for text in passages]
    known, regime = engine.model.fingerprint, engine.model.regime(len(head) + sum(map(len, ids)))
    if regime is None or known is None or known.refusal or isinstance(messages, str):
        return Arrangement(tuple(first.values()), len(passages), 0, 0)
    # the last look at the weights: a new one costs as much as the search, and an order by older pages is only slower
    scope = Scope(namespace, f"{known.last_digest or known.whole}{scope_of(engine, adapter)}", regime)
    found = _best(engine.store, scope, head, ids, same)
    if engine.reuse == "lossy" and (disk := engine.store.disk):  # as a request looks there, too
        other = _best(engine.store, replace(scope, precision=disk.precision), head, ids, same)
        found = max(found, other, key=lambda one: one.cached_tokens)
    return found


def _head(
    engine: Owner, messages: Sequence[Message | Mapping[str, Any]], tools: Sequence[Any], namespace: str, rendered: Mapping[str, Any]
) -> Ids:
    """The ids before the first passage. They are remembered, whatever question follows the passages: rendering costs more than the walk."""
    shown = list(map(_cut, messages)) if isinstance(messages, (list, tuple)) else messages

    def found() -> list[int]:
        layout = engine.renderer.render(shown, tools, namespace=namespace, **rendered)
        if (at := layout.text.find(PASSAGES)) < 0:
            raise ConfigError(f"passages: no message holds {PASSAGES!r} in their place")
        # the last token may be another before a passage
        return list(layout.ids[: max(0, layout.encoded.tokens_before(at) - 1)]) if isinstance(layout, Rendered) else []

    key = hashlib.blake2b(repr((shown, tools, rendered)).encode(errors="surrogatepass")).hexdigest()
    return as_ids(engine.renderer.ids(key, namespace, found))


def _cut(message: Message | Mapping[str, Any]) -> Message | Mapping[str, Any]:
    """A message without the text after its passages."""
    text = message.content if isinstance(message, Message) else message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(text, str) or PASSAGES not in text:
        return message
    text = text[: text.index(PASSAGES) + len(PASSAGES)]
    return replace(message, content=text) if isinstance(message, Message) else {**message, "content": text}


def _best(store: Store, scope: Scope, head: Ids, ids: Sequence[Ids], same: Sequence[int]) -> Arrangement:
    """Put passages into the order in which most of their tokens are cached after `head`; as given where that gains nothing.

    ids: of each passage alone, the best first. same: for each the number of the first one with the same text.
    """
    given = [number for number in range(len(ids)) if same[number] == number]
    passages = Passages([ids[number] for number in given])
    best: list[int] = []
    most = kept = 0
    left = [(head[: len(head) // PAGE_TOKENS * PAGE_TOKENS], b"")]
    while left:
        before, run = left.pop()
        skip = max(0, len(head) - len(before))  # of the page in which the head ends
        pages = store.continuations(scope, before, head[len(before) :][:PAGE_TOKENS])
        for page in sorted(pages, key=len, reverse=True):  # a short one gains nothing after a long one, unless it follows the given order
            longer, last = run + page[skip:].tobytes(), len(page) < PAGE_TOKENS
            if last and len(longer) <= most * SIZE and not passages.leads(longer):
                continue
            order, ends = passages.follow(longer)
            if not ends:
                continue
            if ends[-1] > most:
                best, most = order, ends[-1]
            alike = next((place for place, number in enumerate(order) if number != place), len(order))
            kept = max(kept, ends[alike - 1] if alike else 0)
            if not last and len(longer) - ends[-1] * SIZE < SEAM and len(order) < len(given) + 1:
                left.append((np.concatenate((before, page)), longer))
    if most - kept < LEAST:
        return Arrangement(tuple(given), len(ids), kept, kept)
    moved = [*best, *(number for number in range(len(given)) if number not in best)]
    return Arrangement(tuple(given[number] for number in moved), len(ids), most, kept)
