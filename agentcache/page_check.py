"""Compare cached pages with computed ones: is a page equal, and which of the attached ones was wrong? Knows no model."""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import torch

from .errors import StoreError
from .kv import PAGE_TOKENS, Page, Sequence
from .request import Running
from .store.entry import Entry, Match
from .store.store import Store

CLOSE = 0.05  # relative error that kernels which round differently may have; wrong pages are far from it
LOSSY_CLOSE = 0.5  # the same of a page stored with fewer bits, with room to spare


def alike(own: Page, kept: Page, tokens: int, close: float, layers: int | None = None) -> bool:
    """Tell whether a cached page equals the computed one, in its first tokens and lowest layers (None: all). close: relative error allowed,
    0 for equal bits.

    Checkpoints that both have are compared, too.
    """
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
    for (keys, values), (kept_keys, kept_values) in zip(own.blocks[:layers], kept.blocks[:layers], strict=True):
        pairs.append((keys[..., :tokens], kept_keys[..., :tokens]))
        pairs.append((values[..., :tokens, :], kept_values[..., :tokens, :]))
    for slots in own.checkpoints.keys() & kept.checkpoints.keys():
        if slots <= tokens and own.checkpoints[slots].cuts == kept.checkpoints[slots].cuts:
            states = zip(own.checkpoints[slots].states, kept.checkpoints[slots].states, strict=True)
            pairs += [(a, b) for a, b in states if a is not None and b is not None]
    if not close:
        return all(torch.equal(a, b) for a, b in pairs)
    return all(bool((a.float() - b.float()).norm() <= close * a.float().norm()) for a, b in pairs)


def first_wrong(cached: Match, sequence: Sequence) -> Entry | None:
    """Find the first page of a cached prefix that differs from the computed one."""
    for entry, page, own in zip(cached.entries, cached.pages, sequence.pages, strict=False):
        tokens = min(cached.tokens - entry.first, PAGE_TOKENS)
        if not alike(own, page, tokens, CLOSE if entry.scope.precision == "exact" else LOSSY_CLOSE, cached.layers):
            return entry
    return None


def quarantine(store: Store, running: Running, suspects: tuple[Match, ...], sequence: Sequence) -> None:
    """A prompt computed without its suspects is finite: the first of them that differs from it is wrong, and quarantined."""
    entry = next(filter(None, (first_wrong(one, sequence) for one in suspects)), None)
    if entry is None or running.scope is None or entry.scope.weights != running.scope.weights:
        return  # where weights have changed since, nothing can be said
    ids, why = np.concatenate([running.ids.array(entry.first), entry.ids]), "what is computed after it is NaN or infinite"
    with suppress(StoreError):  # memory has dropped it
        store.quarantine(entry.scope, ids, entry.key, why)
    running.account.record_note(f"page {entry.place} of the kept prompt was wrong: {why}; it is not used again")
