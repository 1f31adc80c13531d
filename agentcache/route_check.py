"""Routes of a request through its experts, held against those of the same tokens without reuse. Computes all of them once more."""

from __future__ import annotations

from .kv import PAGE_TOKENS, Sequence
from .model.routes import Routes
from .request import Running
from .runner import Runner, Work


def check_routes(runner: Runner, running: Running) -> None:
    """Put the routes of a request that is about to end into its receipt."""
    own, other = getattr(running.sequence, "routes", None), _without_reuse(runner, running)
    if own is not None and other is not None:
        running.account.record_routes(own.digests, own.changed(other))
    else:
        running.account.record_note("diagnose='routes': the model runs no experts that can be looked at, or its weights moved")


def _without_reuse(runner: Runner, running: Running) -> Routes | None:
    """Routes of the same tokens, all of them computed; None if that cannot be."""
    taken, model = running.sequence, runner.model
    if not isinstance(taken, Sequence) or taken.routes is None or running.scope is None:
        return None
    sequence = Sequence(taken.spec, state=model.new_state(), cuts=taken.cuts, adapter=taken.adapter, acts_from=taken.acts_from)
    sequence.routes = routes = Routes(model.experts)
    ids = running.ids.all[: taken.length]
    try:
        while (start := sequence.length) < len(ids):
            stop = min(len(ids), start + PAGE_TOKENS)
            stop = stop if sequence.state is None else min(stop, sequence.next_cut() or stop)
            [outcome] = runner.run([Work(sequence, ids[start:stop], running.scope.regime, False, running.scope.weights)])
            if outcome.error is not None or outcome.weights_changed:
                return None
    finally:
        sequence.close()
    return routes
