"""Tokenising a prompt whose start changed: text after the change is not tokenised again. Knows text and tokens only.

    known   |== shared ==|xx|========== moved ==========|..
    new     |== shared ==|yyyyy|========== moved ==========|.......
                         |-- window --|

The window is tokenised; where its tokens agree with the known ones over a run, the known ones go on (the proof of `layout.tokenise`,
read from the other side). Where it fails, all text after the change is tokenised.
"""

from __future__ import annotations

from array import array

from ..layout.tokenise import BACK, RUN, Encoded, Encoder, agreement, common_length
from .texts import shared_end

LEAST = 2_000  # characters after a change that are worth the search
ANCHOR = 256  # characters that are looked for in the new text
LAST = 64  # characters at the end of a prompt that the next one may not keep: the generation prompt


def resumed(encoder: Encoder, known: Encoded, text: str) -> Encoded:
    """`text` encoded, with what `known` has of it."""
    shared = common_length(known.text, text)
    start = _rejoined(encoder, known, text, shared) if known.ends and encoder.merges else None
    if start is not None:
        known, shared = start, len(start.text)
    return encoder.resume(known, shared, text)[0]


def _rejoined(encoder: Encoder, known: Encoded, text: str, shared: int) -> Encoded | None:
    """The longest start of `text` whose tokens follow from `known` and a window around the change; None if that is not worth it."""
    old_stop = len(known.text) - LAST
    found = text.find(known.text[old_stop - ANCHOR : old_stop], shared) if old_stop - shared >= LEAST else -1
    if found < 0:
        return None
    new_stop = found + ANCHOR
    size = shared_end(known.text[:old_stop], text[:new_stop], min(old_stop, new_stop) - shared)
    if size < LEAST:
        return None
    shift, first = new_stop - old_stop, known.tokens_before(old_stop - size) + 1
    last = min(first + 2 * BACK, known.tokens_before(old_stop))
    if last - first < 2 * RUN:
        return None
    window = text[: known.ends[last - 1] + shift]
    left = encoder.resume(known, shared, window)[0]
    begin = left.tokens_before(new_stop - size)
    ends = array("i", [end + shift for end in known.ends[first:last]])
    run, old, new = agreement(known.ids[first:last], ends, 0, left.ids[begin:], left.ends[begin:], len(window))
    if run < RUN:
        return None
    old_at, new_at, stop = first + old + run // 2, begin + new + run // 2, known.tokens_before(old_stop)
    ids = left.ids[:new_at] + known.ids[old_at:stop]
    ends = left.ends[:new_at] + array("i", [end + shift for end in known.ends[old_at:stop]])
    return Encoded(text[: ends[-1]], ids, ends)
