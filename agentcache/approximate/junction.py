"""Junctions: the distance of stored keys and values from those that this context gives. Decides nothing.

Before a junction the head of a run (halo) is computed; from it on, stored keys and values are attached.
"""

from __future__ import annotations

import torch

from ..kv import Sequence
from ..plan import Attach
from ..runner import Runner


@torch.inference_mode()
def difference(runner: Runner, sequence: Sequence, step: Attach, start: int, stop: int, regime: str) -> float:
    """Distance of the keys computed for positions [start, stop) from the stored ones, re-indexed: relative, in the middle layer."""
    layer = sequence.spec.layers // 2
    computed = sequence.read(layer, start, stop)[0].permute(1, 2, 0).float()
    return float((computed - runner.stored_keys(step, layer, start, stop, regime)).norm() / computed.norm())


@torch.inference_mode()
def deviations(runner: Runner, sequence: Sequence, ids: list[int], start: int, regime: str) -> torch.Tensor:
    """Distance of layer 1's values, of tokens ahead from `start` on, from those that this context gives: relative, [tokens].

    Runs two layers over them, which leaves the true keys and values there.
    """
    stop = start + len(ids)
    stored = sequence.read(1, start, stop)[1].float()
    runner.run_below(sequence, ids, start, regime, layers=2)
    found = sequence.read(1, start, stop)[1].float()
    return (found - stored).flatten(1).norm(dim=1) / found.flatten(1).norm(dim=1).clamp_min(1e-9)
