"""From an answered request to its completion: the message, the ids to put back next time, the savings. Computes no tokens."""

from __future__ import annotations

from functools import partial

from .answer.parser import CUT, AnswerParser
from .layout import Renderer
from .miss_report import MissReport
from .model.hf import HFModel
from .namespace_lru import Covering
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
        parser = running.parser()
        parser.push(text.text)
        parser.finish(running.cut)
        message = parser.message
        account.record_message(text.tokens_of(parser.thought_chars), calls=bool(message.tool_calls))
        if spelled := generated[: text.spelled or 0]:  # what a stop string cut off is no part of the message
            keep = partial(self._renderer.remember, layout, spelled, message, namespace=asked.namespace, outlive=reuses)
            self._store.unless_deleted(asked.namespace, running.received, keep)
        repeated = len(generated) if layout.ephemeral_tokens else 0
        account.record_saving(cached * self._scheduler.ms_per_token, self._model.flops(cached), repeated, missed)
        logprobs = tuple(running.decoding.logprobs)
        shortened = running.decoding.guide is not None and running.decoding.guide.shortened
        if shortened:
            account.record_note(f"a text or a list of the answer ended early, to fit into max_tokens={asked.sampling.max_tokens}: raise it")
        return Completion(
            text.text, generated, message, running.receipt, parser.invalid_calls, _cut_short(running, parser), shortened, logprobs
        )


def _cut_short(running: Running, parser: AnswerParser) -> bool:
    """True if the completion ended inside an object, a call, or a thought with no answer after it."""
    guide, expected, message = running.decoding.guide, running.asked.expected, parser.message
    out_of_tokens, stopped = running.receipt.finish_reason == "length", running.decoding.text.stopped
    formed = expected is not None and expected.formed
    if guide is not None and (guide.cut or not guide.accepting or (formed and out_of_tokens and not guide.over)):
        return True
    if formed and stopped:
        return True
    answered = message.content or message.tool_calls or not message.reasoning
    return (out_of_tokens or stopped) and (any(call.error.startswith(CUT) for call in parser.invalid_calls) or not answered)
