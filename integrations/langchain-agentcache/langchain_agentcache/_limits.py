"""How long a request may take, and how often it is made again. Knows nothing of messages and texts."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TypeVar

from agentcache import Stream
from agentcache import errors as own

from ._answer import Answer
from .errors import ModelTimeoutError

T = TypeVar("T")


@contextmanager
def limited(streams: Sequence[Answer | Stream], limit: float | None) -> Iterator[None]:
    """The streams, ended with this block, or earlier if `limit` seconds are over."""
    late = threading.Event()

    def end() -> None:
        late.set()
        for stream in streams:
            stream.close()

    timer = threading.Timer(limit, end) if limit else None
    if timer:
        timer.daemon = True
        timer.start()
    try:
        with ExitStack() as stack:
            for stream in streams:
                stack.enter_context(stream)
            yield
    except own.CancelledError as error:
        if late.is_set():
            raise ModelTimeoutError(f"timeout={limit!r}: passed before the completion ended; what was computed is kept") from error
        raise
    finally:
        if timer:
            timer.cancel()


def repeated(ask: Callable[[], T], retries: int) -> T:
    """The answer; what a time limit ended is asked again so many times, and goes on where it was ended."""
    for _ in range(retries):
        try:
            return ask()
        except ModelTimeoutError:
            continue
    return ask()


async def arepeated(ask: Callable[[], Awaitable[T]], retries: int) -> T:
    """The same for coroutines."""
    for _ in range(retries):
        try:
            return await ask()
        except ModelTimeoutError:
            continue
    return await ask()
