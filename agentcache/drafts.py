"""Drafts: guesses at the next tokens of a completion, which one forward computes along with the last token. Runs no model.

A product of few rows takes as long as reading its weights, so a forward of `DRAFT_ROWS` rows takes little longer than one of a single
row. Each token is still chosen from its own logits. The first one that differs from its draft discards the drafts after it. Where a row's
bits do not depend on the rows beside it, an answer is the same with drafts and without.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .kv import Sequence
from .store.keys import Ids, as_ids

if TYPE_CHECKING:
    from .model.hf import HFModel
    from .request import Running

DRAFT_ROWS = 8  # that compiled products read a weight once for (kernels/layer.py)
DRAFTED_TOKENS = (0, 1, 3, 3, 7)  # tokens that are drafted after a repetition of so many


def draft(model: HFModel, running: Running, most: int) -> list[int]:
    """At most `most` ids that may follow the last one, fewer by tokens before it that run again. None where bits are not promised, or where
    states depend on pieces, or run them one by one."""
    sequence, asked, length = running.sequence, running.asked, len(running.ids)
    most = min(most + 1 - running.remaining, asked.sampling.draft_tokens, asked.sampling.max_tokens - running.completion_tokens - 1)
    if most <= 0 or not running.receipt.bitwise or running.ranges is not None or model.experts:  # each row has experts of its own
        return []
    if not isinstance(sequence, Sequence) or running.scope is None:
        return []
    if (state := sequence.state) is not None and (state.alignment > 1 or not state.packs_pieces):
        return []
    if model.regime(length + most) != running.scope.regime:
        return []
    ids, guide = running.ids.array(), running.decoding.guide
    scored = asked.sampling.logprobs is not None  # what is replayed for its time alone is guessed, as the answer was
    known = guide.forced()[:most] if guide else list(running.decoding.forced)[:most] if scored else []
    return known + repeated(np.concatenate([ids, as_ids(known)]))[: most - len(known)]


def repeated(ids: Ids) -> list[int]:
    """The ids that followed the last ones where these stood before: at the latest place of the longest repetition."""
    at, length, last = 0, 0, len(ids) - 1
    places = np.flatnonzero(ids[:last] == ids[last])
    while len(places) and length < len(DRAFTED_TOKENS) - 1:
        at, length = int(places[-1]) + 1, length + 1
        places = places[places >= length]
        places = places[ids[places - length] == ids[last - length]]
    return ids[at : at + DRAFTED_TOKENS[length]].tolist()  # type: ignore[no-any-return]
