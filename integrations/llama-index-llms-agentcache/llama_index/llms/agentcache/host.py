"""What several AgentCacheLLM objects share: one engine, the threads that wait for it, and what runs on it for them. Knows no prompts.

The engine answers in a thread of its own and a stream is read by blocking. Here each running request has a waiting thread, so that an event
loop never waits: a reader gets pieces through the loop, and leaving early ends the request on the device.
"""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from agentcache import Completion, Engine, EngineLease, Message, Stream
from agentcache.errors import CancelledError, EngineClosedError

from .hints import Hints
from .tools import Schema, Translator

WAITING = 64  # requests that wait at the same time; further ones queue here instead of in the engine

Start = Callable[[], Stream]
Piece = tuple[str, str]  # kind and text of one of the engine's deltas

_engines: weakref.WeakSet[Engine] = weakref.WeakSet()  # those of this process
_gate = threading.Lock()


def _begin_child() -> None:
    """Take a lock that no thread holds: those of a forked process's parent are not there."""
    global _gate
    _gate = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_child)


def count(engine: Engine, text: str) -> list[int]:
    """The engine's own token ids of a text."""
    return list(engine.tokenizer(text, add_special_tokens=False)["input_ids"])


def counting(name: str) -> Callable[[str], list[int]] | None:
    """`count` of an open engine of this name, if there is one in this process."""
    with _gate:
        found = next((engine for engine in _engines if not engine.closed and engine.name == name), None)
    return None if found is None else lambda text: count(found, text)


class Host:
    """An engine with its waiting threads. lease: on the engine if that is shared, and on what is pinned for this."""

    def __init__(self, engine: Engine, lease: EngineLease) -> None:
        self.engine = engine
        self.translator = Translator()
        self.hints = Hints()
        with _gate:
            _engines.add(engine)
        self._lease = lease
        self._closed = False
        self._lock = threading.Lock()
        self._live: set[Stream] = set()
        self._views: weakref.WeakSet[Host] = weakref.WeakSet()
        self._threads = ThreadPoolExecutor(WAITING, thread_name_prefix="agentcache-llama-index")

    def view(self) -> Host:
        """A host over the same engine: closing it leaves this one open, closing this one closes it."""
        made = Host(self.engine, EngineLease())
        made._lease.join(self.engine)
        made._closed = self._closed
        made.translator, made.hints = self.translator, self.hints
        self._views.add(made)
        return made

    def pin(self, turns: list[Message], tools: tuple[Schema, ...], **options: Any) -> None:
        """Pin what these turns and tools begin until its time is over, or this is closed; options as of `Engine.pin`."""
        self.engine.pin(turns, tools, lease=self._lease, **options)
        if self._closed:  # while it was computed
            self._lease.release()

    async def pieces(self, start: Start) -> AsyncGenerator[Piece | Completion, None]:
        """The pieces of the stream that `start` opens, then its completion; a reader that stops ends the request."""
        loop = asyncio.get_running_loop()
        arrived: asyncio.Queue[Piece | None] = asyncio.Queue()
        job = _Job(lambda: self.running(start), lambda piece: loop.call_soon_threadsafe(arrived.put_nowait, piece))
        result = loop.run_in_executor(self._threads, job.run)
        result.add_done_callback(lambda _: arrived.put_nowait(None))  # after the last piece: both go through the loop in order
        try:
            while (piece := await arrived.get()) is not None:
                yield piece
            if result.cancelled():  # by close(), before a thread was free for it
                raise self._over()
            if (completion := await result) is not None:
                yield completion
        finally:
            job.leave()
            result.cancel()  # its outcome is not needed any more

    @contextmanager
    def running(self, start: Start) -> Iterator[Stream]:
        """The stream that `start` opens; closing this ends it, and its reader is told so."""
        self.check_open()
        with start() as stream:
            with self._lock:
                self.check_open()  # it may have been closed while the prompt was laid out
                self._live.add(stream)
            try:
                yield stream
            except CancelledError as error:
                if self._closed:
                    raise self._over() from error
                raise
            finally:
                self._live.discard(stream)  # without the lock: a generator may be ended by a collection while this thread holds it

    def check_open(self) -> None:
        """Refuse a request that would find no thread to wait for it."""
        if self._closed:
            raise self._over()
        self.engine.check_open()  # no thread of this pool is there in a forked child: nothing would run the request that fails

    @staticmethod
    def _over() -> EngineClosedError:
        return EngineClosedError("this AgentCacheLLM is closed: make a new one, over the same engine= if that lives on")

    def close(self) -> None:
        """End what runs, let go what is pinned, here and in the views; a shared engine is closed with the last that uses it."""
        for view in list(self._views):
            view.close()
        with self._lock:
            self._closed = True
            live = list(self._live)
        for stream in live:
            stream.close()
        self._lease.release()
        self._threads.shutdown(wait=False, cancel_futures=True)


class _Job:
    """One stream, read in a thread of its own until its end or until its reader has left."""

    def __init__(self, start: Callable[[], AbstractContextManager[Stream]], tell: Callable[[Piece], Any]) -> None:
        self._start = start
        self._tell = tell
        self._left = threading.Event()
        self._stream: Stream | None = None

    def run(self) -> Completion | None:
        if self._left.is_set():
            return None
        with self._start() as stream:
            self._stream = stream
            if self._left.is_set():  # the reader left while the prompt was laid out
                return None
            for delta in stream.deltas():
                self._tell((delta.kind, delta.text))
            return stream.completion

    def leave(self) -> None:
        self._left.set()
        if self._stream is not None:
            self._stream.close()
