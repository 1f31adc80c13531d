"""Pages of other adapters whose lowest layers a request computes alike: attached up to the first layer that differs. Computes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from .model.hf import HFModel
from .page import states_until
from .receipt import AttachedPart
from .request import Running
from .store.entry import Match
from .store.keys import Scope
from .store.store import Store


def shared_layers(model: HFModel, store: Store, running: Running, tokens: int) -> Match | None:
    """A match longer than `tokens` among pages of other adapters, with its number of equal `layers`: the one that spares most computing.

    It ends where pages keep no inputs of the next layer. None: there is none.
    """
    scope = running.scope
    if scope is None or scope.precision != "exact" or running.asked.reuse == "off" or not model.stepped:
        return None
    best: tuple[int, Scope, int, int] | None = None
    for layers, other in _others(model, running, scope):
        found = store.match(other, running.covered_ids, peek=True)
        stop = states_until(found.pages, layers, tokens, found.tokens) if found.tokens > tokens else tokens
        if stop > tokens and (best is None or (stop - tokens) * layers > best[0]):
            best = (stop - tokens) * layers, other, stop, layers
    if best is None:
        return None
    _, other, stop, layers = best
    used = store.match(other, running.covered_ids)  # counted as used, and all of it on the device
    return replace(used, tokens=stop, layers=layers) if used.tokens >= stop else None


def attached_parts(model: HFModel, running: Running) -> Iterator[AttachedPart]:
    """The attached parts of a prompt, each with the adapter that computed it."""
    start, known = 0, model.adapters
    for one in running.attached:
        stop, digest = min(one.tokens, len(running.ids) - 1), one.entries[0].scope.adapter
        yield AttachedPart(start, stop, digest, known[digest].name if digest in known else "", one.layers)
        start = stop


def _others(model: HFModel, running: Running, scope: Scope) -> Iterator[tuple[int, Scope]]:
    """Scopes under which others compute the same lowest layers as this request, and how many."""
    whole = model.spec.layers if model.spec else 0
    asked = running.asked.adapter
    own = whole if asked is None or asked.invocation else asked.first_layer
    firsts = {known.digest: known.first_layer for known in list(model.adapters.values()) if not known.invocation}
    for first, other in [(whole, scope.weights), *((first, f"{scope.weights}+{digest}") for digest, first in firsts.items())]:
        if other != scope.fingerprint and (layers := min(own, first)):
            yield layers, replace(scope, fingerprint=other)
