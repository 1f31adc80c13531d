"""Tokens of attached passages to which the question attends most, found by one pass below a middle layer. Computes no token whole.

[0 prefix )[ halo )[ attached ....)[ text )[ halo )[ attached ....)[ the question, n)
             below the middle        below   below                   below, then its queries against all attached keys
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ..kv import Sequence as PageTable
from ..model.attention import Part
from ..model.hf import HFModel
from ..model.numerics import MAX_ROWS
from ..model.steps import queries
from ..plan import Attach

ASKING = 64  # last tokens of a prompt at most, whose attention counts


@torch.inference_mode()
def most_attended(model: HFModel, sequence: PageTable, ids: Sequence[int], steps: Sequence[Attach], regime: str, share: float) -> list[int]:
    """Positions, in order, of the attached tokens to which the prompt's end attends most in the middle layer. share: of those tokens.

    Leaves keys and values below that layer at positions that are computed later.
    """
    layer = sequence.spec.layers // 2
    whole = [place for step in steps if step.layers is None for place in range(step.start, step.stop)]
    count = round(share * len(whole))
    if not count:
        return []
    sequence.reserve(len(ids) - sequence.length)
    hidden = []
    for chunk in _packs(_holes(sequence.length, steps, len(ids))):
        parts, offset = [], 0
        for start, stop in chunk:
            parts.append(Part(sequence, start, stop - start, offset))
            offset += stop - start
        packed = torch.tensor([token for start, stop in chunk for token in ids[start:stop]])
        hidden.append(model.forward(packed, parts, [regime] * len(parts), range(offset), layers=layer))
    states, asking = torch.cat(hidden), min(ASKING, len(ids) - steps[-1].stop)
    assert model.rotary is not None and model.numerics is not None
    cos, sin = model.rotary.rows([(regime, len(ids) - asking, len(ids))], asking)
    query = queries(model.model, layer, states[-asking:], cos, sin, model.numerics)
    keys = torch.cat([sequence.read(layer, step.start, step.stop)[0] for step in steps if step.layers is None])
    best = _attention(query.float(), keys.float()).topk(count).indices
    return sorted(whole[at] for at in best.tolist())


def _attention(query: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Attention of queries [rows, heads, dim] to keys [tokens, kv_heads, dim], summed: [tokens]."""
    rows, heads, dim = query.shape
    grouped = query.view(rows, keys.shape[1], heads // keys.shape[1], dim)
    scores = torch.einsum("rkgd,tkd->rkgt", grouped, keys) * dim**-0.5
    return scores.softmax(-1).sum((0, 1, 2))


def _holes(start: int, steps: Sequence[Attach], stop: int) -> list[tuple[int, int]]:
    """Parts of [start, stop) that are not attached."""
    edges: list[Any] = [start, *(edge for step in steps for edge in (step.start, step.stop)), stop]
    return [(one, other) for one, other in zip(edges[::2], edges[1::2], strict=True) if one < other]


def _packs(holes: Sequence[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
    """Ranges of at most MAX_ROWS tokens together, in order."""
    pack: list[tuple[int, int]] = []
    room = MAX_ROWS
    for start, stop in holes:
        while start < stop:
            pack.append((start, min(stop, start + room)))
            room -= pack[-1][1] - start
            start = pack[-1][1]
            if not room:
                yield pack
                pack, room = [], MAX_ROWS
    if pack:
        yield pack
