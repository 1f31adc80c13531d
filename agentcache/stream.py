"""What a caller holds of a running request: its chunks, its receipt, its completion. Knows nothing of how they come about."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from .errors import AgentCacheError, CancelledError
from .inflight import Chunk, Done, Progress, Request
from .model.call_stream import Delta
from .receipt import Receipt
from .reply import deltas
from .types import Message


@dataclass(frozen=True, slots=True)
class Completion:
    """What a request produced. `message` is the assistant turn to send back; unchanged, it costs nothing the next time."""

    text: str
    ids: tuple[int, ...]
    message: Message
    receipt: Receipt

    @property
    def finish_reason(self) -> str | None:
        """Why it ended: stop, length or tool_calls."""
        return self.receipt.finish_reason

    @property
    def usage(self) -> dict[str, Any]:
        """Token counts in OpenAI's shape, cached tokens included."""
        return self.receipt.usage


class Stream(Iterator[Chunk]):
    """Chunks of one running request. Leaving early (`close`, or the end of a `with` block) frees the device within one step.

    completion: the whole result; reading it runs the stream to its end.
    """

    def __init__(self, request: Request, finish: Callable[[Request], Completion] | None) -> None:
        self._request = request
        self._finish = finish
        self._completion: Completion | None = None
        self._error: AgentCacheError | None = None
        self._over = False

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Chunk:
        if self._over:
            raise StopIteration
        event = self._request.events.get()
        while isinstance(event, Progress):
            self._report(event)
            event = self._request.events.get()
        if isinstance(event, Chunk):
            return event
        self._over = True
        if isinstance(event, Done):
            self._completion = self._finish(self._request) if self._finish else None
            raise StopIteration
        self._error = event
        raise event

    def deltas(self) -> Iterator[Delta]:
        """What is left of the stream, taken apart: reasoning, text, calls and their arguments, each as soon as it is certain."""
        return deltas(self._request, (chunk.text for chunk in self))

    def _report(self, progress: Progress) -> None:
        told = False
        try:
            if self._request.on_progress:
                self._request.on_progress(progress.done, progress.total)
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
        """The whole result; runs what is left of the stream."""
        for _ in self:
            pass
        if self._completion is None:
            raise self._error or CancelledError("the stream was closed before it ended")
        return self._completion

    def close(self) -> None:
        """Stop the request; what it had computed stays reusable."""
        self._request.cancelled.set()
        self._over = True

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exc: object) -> None:
        if not self._over:
            self.close()

    def __del__(self) -> None:
        self._request.cancelled.set()
