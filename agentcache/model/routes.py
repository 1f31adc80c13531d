"""Routes of one sequence through a mixture of experts: which experts each of its tokens chose, layer by layer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from blake3 import blake3


@dataclass(frozen=True, slots=True)
class RouteCheck:
    """Experts that the tokens of a request chose, as far as it ran them."""

    # of each layer with experts: of positions and experts
    digests: tuple[str, ...]
    # share of its routes, one for each token and layer, that are others without reuse
    changed: float


class Routes:
    """Experts by layer and position, as far as the sequence's tokens were run.

    modules: of experts, in the order of their layers.
    """

    def __init__(self, modules: Iterable[Any]) -> None:
        self._layers: dict[int, dict[int, tuple[int, ...]]] = {id(module): {} for module in modules}

    def record(self, module: Any, start: int, chosen: torch.Tensor) -> None:
        """Keep the experts [tokens, experts] that the tokens from position `start` on chose; their order says nothing."""
        rows = chosen.sort(-1).values.tolist()
        self._layers[id(module)].update({start + at: tuple(row) for at, row in enumerate(rows)})

    @property
    def digests(self) -> tuple[str, ...]:
        """One digest for each layer, of positions and experts."""
        return tuple(blake3(repr(sorted(chosen.items())).encode()).hexdigest(16) for chosen in self._layers.values())

    def changed(self, other: Routes) -> float:
        """Share of the routes, one for each layer and position, that differ from another sequence's, among those that both have."""
        pairs = [(chosen, other._layers[layer]) for layer, chosen in self._layers.items()]
        same = [one[at] == another[at] for one, another in pairs for at in one.keys() & another.keys()]
        return 1 - sum(same) / len(same) if same else 0.0
