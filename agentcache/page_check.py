"""Compare pages: are their numbers finite, and is a kept page equal to a computed one? Knows no model and no request."""

from __future__ import annotations

import torch

from .kv import PAGE_TOKENS, Page, Sequence
from .store.entry import Entry, Match

CLOSE = 0.05  # relative error that kernels which round differently may have; wrong pages are far from it
LOSSY_CLOSE = 0.5  # the same of a page stored with fewer bits, with room to spare


def finite(sequence: Sequence, start: int, stop: int) -> bool:
    """Tell whether positions [start, stop) are free of NaN and infinity. The last layer tells: the residual stream carries them there.

    Recurrent layers may come after it: their checkpoints are looked at.
    """
    for page, slot, count, _ in sequence.slots(start, stop):
        if not all(known.finite for slots, known in page.checkpoints.items() if slot < slots <= slot + count):
            return False
        keys, values = page.layer_keys[-1][..., slot : slot + count], page.layer_values[-1][:, slot : slot + count]
        if not bool(torch.isfinite(keys).all() & torch.isfinite(values).all()):
            return False
    return True


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
