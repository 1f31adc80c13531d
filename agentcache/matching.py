"""Lookup of cached pages for a request: its scope, and the longest exact prefix. Computes nothing.

fingerprint of pages of the base, and before an Activated LoRA acts      that of the weights
fingerprint of pages of any other adapter                                the same + the adapter's digest
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from .kv import last_checkpoint
from .model.hf import HFModel
from .request import RENEWALS, Running
from .store.entry import Match
from .store.keys import Scope
from .store.store import Store
from .types import PAGE_TOKENS, Reason

if TYPE_CHECKING:
    from .model.adapters import Adapter


def fingerprint_of(weights: str, adapter: Adapter | None) -> str:
    """The fingerprint of pages that an adapter (None: the base) computes over these weights."""
    return weights if adapter is None or adapter.invocation else f"{weights}+{adapter.digest}"


def at_checkpoint(found: Match, cuts: tuple[int, ...] | None) -> Match:
    """A match shortened to its last checkpoint that serves a prompt cut at `cuts`; all of it for None: no layer needs checkpoints."""
    tokens = found.tokens if cuts is None else last_checkpoint(found.pages, found.tokens, cuts)
    if tokens == found.tokens:
        return found
    count = -(-tokens // PAGE_TOKENS)
    numerics = frozenset[str]().union(*(entry.numerics for entry in found.entries[:count]))
    detail = f"{found.tokens - tokens} tokens after the last checkpoint of recurrent layers are computed again"
    return Match(tokens, found.pages[:count], Reason.CHECKPOINT, numerics, detail, found.entries[:count])


class Matching:
    """The lookups of all requests of one engine, on the device's thread."""

    def __init__(self, model: HFModel, store: Store) -> None:
        self.model, self.store = model, store

    def scope(self, running: Running) -> Scope | None:
        """The scope in which a request of this length finds its pages; None if its state cannot be paged."""
        model = self.model
        regime = model.regime(len(running.ids))
        refused = model.fingerprint is not None and model.fingerprint.refusal
        if regime is None or refused or running.weights_unstable:
            return None
        return Scope(running.asked.namespace, fingerprint_of(running.provenance.fingerprint, running.asked.adapter), regime)

    def why_unpaged(self, running: Running) -> tuple[Reason, str]:
        """The reason why a sequence cannot be paged."""
        model = self.model
        if running.weights_unstable:
            return Reason.FINGERPRINT, f"weights, adapters or hooks changed {RENEWALS} times while it waited or was filled"
        if model.fingerprint is not None and model.fingerprint.refusal:
            return Reason.FINGERPRINT, model.fingerprint.refusal
        if model.support.paged:
            return Reason.ROPE_REGIME, f"no fixed frequencies beyond {model.rotary.original if model.rotary else 0} tokens"
        return Reason.LAYER_KIND, model.support.why

    def match(self, running: Running, cuts: tuple[int, ...] | None) -> Match:
        """The longest prefix in memory: an exact one, unless the request allows for less and finds more there. cuts: where its pieces
        end, None where it needs no checkpoint."""
        scope = running.scope
        assert scope is not None
        if running.asked.reuse == "off":
            return Match(0, (), Reason.REUSE_OFF)
        if running.suspects:
            longest = max(one.tokens for one in running.suspects)
            detail = f"NaN or infinity after {longest} tokens that were attached: computed again without reuse"
            return Match(0, (), Reason.NON_FINITE, detail=detail)
        found = at_checkpoint(self.store.match(scope, running.covered_ids), cuts)
        if running.asked.reuse == "lossy" and (disk := self.store.disk):
            lossy = replace(scope, precision=disk.precision)
            other = at_checkpoint(self.store.match(lossy, running.covered_ids), cuts)
            if other.tokens > found.tokens:
                running.scope, found = lossy, other
        elif running.ranges is not None:
            found = at_checkpoint(running.ranges.match(scope, found.tokens) or found, cuts)
        adapter = running.asked.adapter
        if adapter is not None and found.tokens == running.covered_tokens:
            found = replace(found, missed=Reason.ADAPTER, detail="the adapter acts from here on")
        return found
