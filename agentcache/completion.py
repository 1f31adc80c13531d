"""From an answered request to its completion: the message, the ids to put back next time, the savings. Computes no tokens."""

from __future__ import annotations

from functools import partial

from .layout import Renderer
from .miss_report import MissReport
from .model.hf import HFModel
from .namespace_lru import Covering
from .reply import cut_short, message_of
from .request import Running
from .scheduler import Scheduler
from .store.store import Store
from .stream import Completion


class Completions:
    """The completions of one engine, made in the callers' threads."""

    def __init__(self, renderer: Renderer, store: Store, model: HFModel, scheduler: Scheduler) -> None:
        self._renderer, self._store, self._model, self._scheduler = renderer, store, model, scheduler
        self._miss_report = MissReport()

    def forget(self, deletion: Covering) -> None:
        """Forget the last prompts of namespaces of which something was deleted on purpose."""
        self._miss_report.forget(deletion)

    def finish(self, running: Running) -> Completion:
        """Read the answer, remember its ids, and close the account."""
        asked, account, text = running.asked, running.account, running.decoding.text
        layout, reuses, cached = asked.layout, asked.reuse != "off", running.receipt.cached_tokens
        missed = self._miss_report.explain(asked.namespace, layout) if reuses else None
        self._store.forget_late(asked.namespace, running.received, self._miss_report.forget)
        generated = tuple(running.ids.all[asked.prompt_tokens :])
        message, invalid = message_of(running)
        if spelled := generated[: text.spelled or 0]:  # what a stop string cut off is no part of the message
            keep = partial(self._renderer.remember, layout, spelled, message, namespace=asked.namespace, outlive=reuses)
            self._store.unless_deleted(asked.namespace, running.received, keep)
        repeated = len(generated) if layout.ephemeral_tokens else 0
        account.record_saving(cached * self._scheduler.ms_per_token, self._model.flops(cached), repeated, missed)
        cut, logprobs = cut_short(running, message, invalid), tuple(running.decoding.logprobs)
        shortened = running.decoding.guide is not None and running.decoding.guide.shortened
        if shortened:
            account.record_note(f"a text or a list of the answer ended early, to fit into max_tokens={asked.sampling.max_tokens}: raise it")
        return Completion(text.text, generated, message, running.receipt, invalid, cut, shortened, logprobs)
