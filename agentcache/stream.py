"""A running request, as its caller holds it: its chunks, its receipt, its completion. Computes no tokens.

Stream        chunks as they come      (caller's thread)
Completions   at the end: the message, the ids to put back next time, the savings
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from .answer.parser import CUT, AnswerParser, Delta, InvalidCall
from .errors import AgentCacheError, CancelledError, EngineForkedError
from .events import Chunk, Done, Event, Progress
from .miss_report import MissReport
from .receipt import Receipt
from .types import Logprob, Message

if TYPE_CHECKING:  # a stream of a server needs none of them
    from .layout import Renderer
    from .model.hf import HFModel
    from .request import Running
    from .scheduler import Scheduler
    from .store.store import Store


@dataclass(frozen=True, slots=True)
class Completion:
    """The result of a request. Of a cut one only the whole calls of `message` are results."""

    text: str
    ids: tuple[int, ...]
    message: Message  # the assistant turn to send back; unchanged, it costs nothing the next time
    receipt: Receipt
    invalid_calls: tuple[InvalidCall, ...] = ()  # calls that it began and that are none
    cut: bool = False  # max_tokens or a stop string ended it inside an object, a call, or a thought with no answer after it
    shortened: bool = False  # under a constraint a text or a list ended early, so that the whole fits into max_tokens; it is valid
    logprobs: tuple[Logprob, ...] = ()  # one for each of `ids`, if the sampling asked for them
    stop: str = ""  # the stop string that ended it

    @property
    def finish_reason(self) -> str | None:
        """Reason of its end: stop, length or tool_calls."""
        return self.receipt.finish_reason

    @property
    def usage(self) -> dict[str, Any]:
        """Token counts in OpenAI's shape, cached tokens included."""
        return self.receipt.usage


class Stream(Iterator[Chunk], AsyncIterator[Chunk], AbstractContextManager["Stream"]):
    """Chunks of one running request, by `for` or by `async for`. Leaving early (`close`, or the end of a `with` block) frees the device
    within one step.

    completion: the whole result; reading it runs the stream to its end.
    """

    def __init__(self, request: Running, finish: Callable[[Running], Completion] | None) -> None:
        self._request = request
        self._finish = finish
        self._completion: Completion | None = None
        self._error: AgentCacheError | None = None
        self._over = False
        self._process = os.getpid()

    def __next__(self) -> Chunk:
        chunk = None
        while not self._over and chunk is None:
            self._check_process()
            try:
                event = self._request.events.get()
            except BaseException:  # an interrupt: its traceback may hold the stream, and nobody reads on
                self.close()
                raise
            chunk = self._taken(event)
        if chunk is None:
            raise StopIteration
        return chunk

    async def __anext__(self) -> Chunk:
        chunk = None
        while not self._over and chunk is None:
            self._check_process()
            event = await self._next_event()
            # the end reads the answer and writes the session down: a loop does not wait for a disk
            chunk = await asyncio.to_thread(self._taken, event) if isinstance(event, Done) else self._taken(event)
        if chunk is None:
            raise StopAsyncIteration
        return chunk

    def _check_process(self) -> None:
        if self._process != os.getpid():
            raise EngineForkedError.of(self._process)

    async def _next_event(self) -> Event:
        """The next event, without holding a thread while there is none."""
        events = self._request.events
        while (event := events.take()) is None:
            loop = asyncio.get_running_loop()
            there = asyncio.Event()

            def wake(loop: asyncio.AbstractEventLoop = loop, there: asyncio.Event = there) -> None:
                try:
                    loop.call_soon_threadsafe(there.set)
                except RuntimeError:  # the loop was closed: no reader is left
                    self._request.events.cancel()

            events.listen(wake)
            try:
                if (event := events.take()) is not None:  # it came before there was a listener
                    break
                await there.wait()
            except asyncio.CancelledError:  # the task that reads is over, whatever still holds the stream
                self.close()
                raise
            finally:
                events.listen(partial(self._abandoned, loop))
        return event

    def _abandoned(self, loop: asyncio.AbstractEventLoop) -> None:
        """Cancel the request if the loop of its last reader was closed, while no other reader waits."""
        if loop.is_closed():
            self._request.events.cancel()

    def _taken(self, event: Event) -> Chunk | None:
        """The chunk that an event is, if it is one; the end and errors end the stream."""
        if isinstance(event, Progress):
            self._report(event)
            return None
        if isinstance(event, Chunk):
            return event
        self._over = True
        if isinstance(event, Done):
            self._completion = self._finish(self._request) if self._finish else None
            return None
        self._error = event
        raise event

    def deltas(self) -> Iterator[Delta]:
        """The rest of the stream, taken apart: reasoning, text, calls and their arguments, each as soon as it is certain."""
        parser = self._request.parser()
        for chunk in self:
            yield from parser.push(chunk.text)
        yield from parser.finish(self._request.cut_by)

    async def adeltas(self) -> AsyncIterator[Delta]:
        """The same for `async for`."""
        async for _, deltas in self.aparts():
            for delta in deltas:
                yield delta

    async def aparts(self) -> AsyncIterator[tuple[Chunk, list[Delta]]]:
        """The rest of the stream, chunk by chunk, with the deltas that each makes certain; at the end an empty chunk with the last."""
        parser = self._request.parser()
        async for chunk in self:
            yield chunk, parser.push(chunk.text)
        yield Chunk("", ()), parser.finish(self._request.cut_by)

    def _report(self, progress: Progress) -> None:
        try:
            if (on_progress := self._request.asked.on_progress) is not None:
                on_progress(progress.done, progress.total)
        except BaseException:  # the caller's own fault ends the caller's own request
            self.close()
            raise

    @property
    def receipt(self) -> Receipt:
        """The account so far; final once the stream has ended."""
        return self._request.receipt

    @property
    def completion(self) -> Completion:
        """The whole result; runs the rest of the stream."""
        for _ in self:
            pass
        if self._completion is None:
            raise self._error or CancelledError("the stream was closed before it ended")
        return self._completion

    def close(self) -> None:
        """Stop the request; its computed tokens stay reusable."""
        self._request.events.cancel()
        self._over = True

    def __exit__(self, *exc: object) -> None:
        if not self._over:
            self.close()

    def __del__(self) -> None:
        self._request.events.cancel()


class Completions:
    """The completions of one engine, made in the callers' threads."""

    def __init__(self, renderer: Renderer, store: Store, model: HFModel, scheduler: Scheduler) -> None:
        self._renderer, self._store, self._model, self._scheduler = renderer, store, model, scheduler
        self._miss_report = MissReport()
        self.forget = self._miss_report.forget

    def finish(self, running: Running) -> Completion:
        """Read the answer, remember its ids, and close the account."""
        asked, account, text = running.asked, running.account, running.decoding.text
        layout, reuses, cached = asked.layout, asked.reuse != "off", running.receipt.cached_tokens
        missed = self._miss_report.explain(asked.namespace, layout, running.receipt.computed_tokens) if reuses else None
        self._store.forget_late(asked.namespace, running.received, self._miss_report.forget)
        generated = tuple(running.ids.all[asked.prompt_tokens :])
        parser = running.parser()
        parser.push(text.text)
        parser.finish(running.cut_by)
        message = parser.message
        account.record_message(text.tokens_of(parser.thought_chars), calls=bool(message.tool_calls))
        if spelled := generated[: text.spelled or 0]:  # what a stop string cut off is no part of the message
            keep = partial(self._renderer.remember, layout, spelled, message, namespace=asked.namespace, outlive=reuses)
            running.decoding.splice_key = self._store.unless_deleted(asked.namespace, running.received, keep)
        repeated = len(generated) if layout.ephemeral_tokens else 0
        account.record_saving(cached * self._scheduler.ms_per_token, self._model.flops(cached), repeated, missed)
        logprobs = tuple(running.decoding.logprobs)
        cut, guide = _cut_short(running, parser), running.decoding.guide
        shortened = guide is not None and guide.shortened and not cut
        if shortened:
            account.record_note(f"a text or a list of the answer ended early, to fit into {running.bound}")
        return Completion(text.text, generated, message, running.receipt, parser.invalid_calls, cut, shortened, logprobs, text.stopped)


def _cut_short(running: Running, parser: AnswerParser) -> bool:
    """True if the completion ended inside an object, a call, or a thought with no answer after it."""
    guide, expected, message = running.decoding.guide, running.asked.expected, parser.message
    out_of_tokens, stopped = running.receipt.finish_reason == "length", running.decoding.text.stopped
    formed = expected is not None and expected.formed
    if (formed and stopped) or (guide and (guide.cut or not guide.accepting or (formed and out_of_tokens and not guide.over))):
        return True
    answered = message.content or message.tool_calls or not message.reasoning
    return bool(out_of_tokens or stopped) and (any(call.error.startswith(CUT) for call in parser.invalid_calls) or not answered)
