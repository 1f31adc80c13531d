"""What several AgentCacheLLM objects share: one engine, the threads that lay out prompts, and what runs on it for them. Knows no prompts.

Laying out a prompt may wait, for a cache point or a server, so that is done by threads. An event loop never waits: a reader gets pieces
through the loop, and leaving early ends the request on the device.
"""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from agentcache import Completion, Delta, Engine, EngineLease, Message, Stream
from agentcache.errors import CancelledError, EngineClosedError

from .hints import Hints
from .tools import Schema, Translator

WAITING = 64  # requests of one event loop at the same time; further ones queue here instead of in the engine, or at a server

Start = Callable[[], Stream]

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
    """An engine with its threads. lease: on the engine if that is shared, and on what is pinned for this."""

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
        self._turns: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = weakref.WeakKeyDictionary()
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

    async def pieces(self, start: Start) -> AsyncGenerator[Delta | Completion, None]:
        """The deltas of the stream that `start` opens, then its completion; a reader that stops ends the request."""
        loop = asyncio.get_running_loop()
        async with self._turns.setdefault(loop, asyncio.Semaphore(WAITING)):
            self.check_open()  # it may have been closed while this waited for its turn
            stream = await loop.run_in_executor(self._threads, start)  # of a reader that leaves meanwhile nobody holds it: that ends it
            with self.running(lambda: stream):
                async for delta in stream.adeltas():
                    yield delta
                yield stream.completion

    @contextmanager
    def running(self, start: Start) -> Iterator[Stream]:
        """The stream that `start` opens; closing this ends it, and its reader is told so."""
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
        self._threads.shutdown(wait=False)
