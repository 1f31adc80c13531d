"""A running request, as its caller holds it: its chunks, its receipt, its completion. Knows nothing of how they come about."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from .answer.parser import Delta, InvalidCall
from .errors import AgentCacheError, CancelledError, EngineForkedError
from .events import Chunk, Done, Event, Progress
from .receipt import Receipt
from .request import Running
from .types import Logprob, Message


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

    @property
    def finish_reason(self) -> str | None:
        """Reason of its end: stop, length or tool_calls."""
        return self.receipt.finish_reason

    @property
    def usage(self) -> dict[str, Any]:
        """Token counts in OpenAI's shape, cached tokens included."""
        return self.receipt.usage


class Stream(Iterator[Chunk], AsyncIterator[Chunk]):
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

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Chunk:
        chunk = None
        while not self._over and chunk is None:
            self._check_process()
            chunk = self._taken(self._request.events.get())
        if chunk is None:
            raise StopIteration
        return chunk

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Chunk:
        chunk = None
        while not self._over and chunk is None:
            self._check_process()
            chunk = self._taken(await self._next_event())
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
        yield from parser.finish(self._request.cut)

    async def adeltas(self) -> AsyncIterator[Delta]:
        """The same for `async for`."""
        parser = self._request.parser()
        async for chunk in self:
            for delta in parser.push(chunk.text):
                yield delta
        for delta in parser.finish(self._request.cut):
            yield delta

    def _report(self, progress: Progress) -> None:
        told = False
        try:
            if (on_progress := self._request.asked.on_progress) is not None:
                on_progress(progress.done, progress.total)
            told = True
        finally:
            if not told:
                self.close()  # the caller's own fault ends the caller's own request

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

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exc: object) -> None:
        if not self._over:
            self.close()

    def __del__(self) -> None:
        self._request.events.cancel()
