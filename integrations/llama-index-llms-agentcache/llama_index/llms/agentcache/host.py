"""What several AgentCacheLLM objects share: one engine, the threads that wait for it, and what it has pinned. Knows no prompts.

The engine answers in a thread of its own and a stream is read by blocking. Here each running request has a waiting thread, so that an event
loop never waits: a reader gets pieces through the loop, and leaving early ends the request on the device.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from agentcache import Completion, Engine, Message, Stream
from agentcache.errors import ConfigError, EngineClosedError

from .tools import Schema, Translator

WAITING = 64  # requests that wait at the same time; further ones queue here instead of in the engine

Start = Callable[[], Stream]
Piece = tuple[str, str]  # kind and text of one of the engine's deltas


class Host:
    """An engine with its waiting threads. owned: whether closing this closes the engine."""

    def __init__(self, engine: Engine, owned: bool) -> None:
        self.engine = engine
        self.translator = Translator()
        self.pins = Pins(engine)
        self._owned = owned
        self._closed = False
        self._threads = ThreadPoolExecutor(WAITING, thread_name_prefix="agentcache-llama-index")

    async def pieces(self, start: Start) -> AsyncGenerator[Piece | Completion, None]:
        """The pieces of the stream that `start` opens, then its completion; whoever stops reading ends the request."""
        loop = asyncio.get_running_loop()
        arrived: asyncio.Queue[Piece | None] = asyncio.Queue()
        job = _Job(start, lambda piece: loop.call_soon_threadsafe(arrived.put_nowait, piece))
        result = loop.run_in_executor(self._threads, job.run)
        result.add_done_callback(lambda _: arrived.put_nowait(None))  # behind the last piece: both go through the loop in order
        try:
            while (piece := await arrived.get()) is not None:
                yield piece
            if (completion := await result) is not None:
                yield completion
        finally:
            job.leave()
            result.cancel()  # nobody asks for its outcome any more

    def check_open(self) -> None:
        """Refuse a request that would find no thread to wait for it."""
        if self._closed:
            raise EngineClosedError("this AgentCacheLLM is closed: make a new one, over the same engine= if that lives on")

    def close(self) -> None:
        """End what runs; close the engine if it was made here."""
        self._closed = True
        if self._owned:
            self.engine.close()
        self._threads.shutdown(wait=False, cancel_futures=True)


class _Job:
    """One stream, read in a thread of its own until its end or until its reader has left."""

    def __init__(self, start: Start, tell: Callable[[Piece], Any]) -> None:
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


class Pins:
    """Prefixes held because a CachePoint asked for it. Those whose time is over since they were last asked for are let go."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        self._ends: dict[tuple[str, str], float] = {}  # (namespace, name) -> when, on the monotonic clock

    def hold(self, name: str, turns: list[Message], tools: tuple[Schema, ...], seconds: float, options: dict[str, Any]) -> str | None:
        """Pin what these turns and tools begin, as `name`; returns why not, if so. What cannot be pinned is answered all the same."""
        key = (options["namespace"], name)
        with self._lock:  # the second of two that ask at once waits for the first
            self._let_go()
            if key not in self._ends:
                try:
                    self._engine.pin(turns, tools, name=name, **options)
                except ConfigError as error:
                    return f"cache point not pinned: {error}"
            self._ends[key] = time.monotonic() + seconds
        return None

    def _let_go(self) -> None:
        now = time.monotonic()
        for namespace, name in [key for key, end in self._ends.items() if end < now]:
            self._engine.release(name, namespace=namespace)
            del self._ends[namespace, name]
