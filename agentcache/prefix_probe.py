"""Probe of a prompt: the tokens of it that are cached now, per tier, by the lookup that requests use. Computes and reads nothing."""

from __future__ import annotations

from .checkpoints import cuts_of, in_text, marks_of
from .matching import at_checkpoint, fingerprint_of
from .model.adapters import Adapter
from .model.hf import HFModel
from .store.entry import PageQuery
from .store.keys import Scope, as_ids
from .store.store import Store
from .types import Layout, Probe, Reason


def probe(
    model: HFModel,
    store: Store,
    layout: Layout,
    namespace: str,
    ms_per_token: float,
    adapter: Adapter | None,
    acts_from: int,
) -> Probe:
    """Look a prompt up. ms_per_token: measured cost of computing, which decides whether a disk is too slow."""
    total, ids = len(layout.ids), as_ids(layout.ids)
    ids = ids[: acts_from + 1] if adapter is not None and adapter.invocation else ids
    regime, known = model.regime(total), model.fingerprint

    def found(memory: int, disk: int, reason: Reason, detail: str) -> Probe:
        return Probe(total, layout.prefix_tokens, memory, disk, total - memory - disk, str(reason), detail)

    if regime is None or known is None or model.spec is None:
        return found(0, 0, Reason.ROPE_REGIME if model.support.paged else Reason.LAYER_KIND, model.support.why)
    if known.refusal:
        return found(0, 0, Reason.FINGERPRINT, known.refusal)
    scope = Scope(namespace, fingerprint_of(known.whole, adapter), regime)
    match, disk_tokens = store.probe(PageQuery(scope, ids, ms_per_token, model.spec))
    adds = disk_tokens > match.tokens
    if model.spec.recurrent:
        match = at_checkpoint(match, cuts_of(marks_of(layout, model.support.alignment), total, model.support.alignment, in_text(layout)))
    disk = disk_tokens - match.tokens if adds else 0
    reason = Reason.LAST_TOKEN if match.tokens + disk == total - 1 else match.missed
    return found(match.tokens, disk, reason, "" if disk else match.detail)
