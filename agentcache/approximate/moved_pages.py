"""Stored keys and values ahead of a sequence: copied to where a prompt wants them, keys re-indexed. Finds no text, and repairs none."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ..ahead import Ahead
from ..kv import PAGE_TOKENS, Page, Sequence, stored_slots, stored_states
from ..model.attention import Part
from ..model.hf import HFModel
from ..model.numerics import MAX_ROWS
from ..model.rope import turn
from ..plan import Attach


@torch.no_grad()  # not inference mode: pages made here are written outside of it, too
def attach(model: HFModel, sequence: Sequence, ranges: Iterable[Attach], regime: str, held: bool = False) -> None:
    """Copy the keys, re-indexed, and values of stored runs to where the plan wants them, ahead of the sequence's length.

    held: the sequence stops at the first range of each run.
    """
    spans: list[Ahead] = []
    for step in ranges:
        start, stop = step.start - step.shift, step.stop - step.shift
        assert step.run is not None
        sequence.reserve(step.stop - sequence.length)
        for page, slot, count, _ in stored_slots(step.pages, step.base, start, stop):
            _move(model, sequence, step, page, slot, count, regime)
        states = None if step.layers is None else stored_states(step.pages, step.base, step.layers, start, stop)
        first = step.run not in [span.run for span in spans]
        spans.append(Ahead(step.start, step.stop, step.layers, states, step.run, held and first))
    sequence.place(spans)


def _move(model: HFModel, sequence: Sequence, step: Attach, page: Page, slot: int, count: int, regime: str) -> None:
    """Copy `count` slots of one stored page to where they are wanted."""
    assert model.rotary is not None and model.unrotated is not None
    source = step.base + step.pages.index(page) * PAGE_TOKENS + slot
    target, moved = source + step.shift, step.shift != 0
    cos, sin = model.rotary.turns(regime, source, target, count)
    fixed = model.unrotated
    for own, into, some, offset in sequence.slots(target, target + count):
        span, here = slice(slot + offset, slot + offset + some), slice(into, into + some)
        for layer in range(sequence.spec.layers if step.layers is None else step.layers):
            keys = page.layer_keys[layer][..., span]
            if layer not in fixed and moved:
                keys = turn(keys, cos[:, offset : offset + some], sin[:, offset : offset + some])
            own.layer_keys[layer][..., here] = keys
            own.layer_values[layer][:, here] = page.layer_values[layer][:, span]


@torch.inference_mode()
def stored_keys(model: HFModel, step: Attach, layer: int, start: int, stop: int, regime: str) -> torch.Tensor:
    """Keys of one layer as stored with the range's pages, re-indexed to prompt positions [start, stop): fp32."""
    assert model.rotary is not None and model.unrotated is not None
    cos, sin = model.rotary.turns(regime, start - step.shift, start, stop - start)
    pieces = stored_slots(step.pages, step.base, start - step.shift, stop - step.shift)
    stored = torch.cat([page.layer_keys[layer][..., slot : slot + count] for page, slot, count, _ in pieces], -1).float()
    return stored if layer in model.unrotated else turn(stored, cos, sin)


@torch.inference_mode()
def run_below(model: HFModel, sequence: Sequence, ids: list[int], start: int, regime: str, layers: int) -> None:
    """Run tokens ahead of the sequence through the first layers, which leaves their true keys and values there."""
    for at in range(start, start + len(ids), MAX_ROWS):
        some = ids[at - start : at - start + MAX_ROWS]
        model.forward(torch.tensor(some), [Part(sequence, at, len(some))], [regime], [], layers=layers)
