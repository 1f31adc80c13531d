"""Is what was computed finite, and is a kept page what computing gives? Knows no model, and decides nothing about a request."""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import torch

from .errors import StoreError
from .kv import PAGE_TOKENS, Page, Sequence
from .request import Request
from .store.store import Store

CLOSE = 0.05  # relative error that kernels which round differently may have; wrong pages are far from it
LOSSY_CLOSE = 0.5  # of a page stored with fewer bits, with room to spare


def finite(sequence: Sequence, start: int, stop: int) -> bool:
    """Whether positions [start, stop) are free of NaN and infinity. The last layer tells: the residual stream carries them there."""
    for page, slot, count, _ in sequence.slots(start, stop):
        keys, values = page.layer_keys[-1][..., slot : slot + count], page.layer_values[-1][:, slot : slot + count]
        if not bool(torch.isfinite(keys).all() & torch.isfinite(values).all()):
            return False
    return True


def alike(own: Page, kept: Page, tokens: int, close: float) -> bool:
    """Whether a kept page is what was computed, in its first tokens. close: relative error allowed, 0 for equal bits."""
    pairs = (
        (own.keys[..., :tokens], kept.keys[..., :tokens]),
        (own.values[..., :tokens, :], kept.values[..., :tokens, :]),
    )
    if not close:
        return all(torch.equal(a, b) for a, b in pairs)
    return all(bool((a.float() - b.float()).norm() <= close * a.float().norm()) for a, b in pairs)


def accuse(store: Store, request: Request) -> None:
    """The prompt is computed without `request.suspects`: if it is finite now, the first of them that differs is wrong, and quarantined."""
    suspects, sequence, request.suspects = request.suspects, request.sequence, None
    if suspects is None or not isinstance(sequence, Sequence) or not finite(sequence, 0, sequence.length):
        return
    for entry, page, own in zip(suspects.entries, suspects.pages, sequence.pages, strict=False):
        if request.scope is None or entry.scope.fingerprint != request.scope.fingerprint:
            return  # weights have changed since: nothing can be said
        tokens = min(suspects.tokens - entry.first, PAGE_TOKENS)
        if not alike(own, page, tokens, CLOSE if entry.scope.precision == "exact" else LOSSY_CLOSE):
            ids, why = np.concatenate([request.array(entry.first), entry.ids]), "what is computed after it is NaN or infinite"
            with suppress(StoreError):  # memory has dropped it
                store.quarantine(entry.scope, ids, entry.key, why)
            request.receipt.notes.append(f"page {entry.place} of the kept prompt was wrong: {why}; it is not used again")
            return
