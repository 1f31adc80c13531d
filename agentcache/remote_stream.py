"""Stream of a request that a server runs: its events read off the connection, its errors in the classes that the engine raised."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from . import errors
from .answer.parser import Delta
from .errors import FAULTS, AgentCacheError, CancelledError, ConfigError, EngineClosedError, GenerationError
from .events import Chunk, Done, Events
from .receipt import Receipt
from .stream import Completion, Stream

if TYPE_CHECKING:
    import httpx

_CLOSED = "the stream was closed by its caller"
_STATUS: dict[int, type[AgentCacheError]] = {503: EngineClosedError}  # of errors that come from the server and not from its engine


@dataclass(frozen=True, slots=True)
class RemoteChunk(Chunk):
    """A chunk, with what it makes certain of the answer."""

    deltas: tuple[Delta, ...] = ()


class RemoteEvents(Events):
    """The events of a request; cancelling ends its connection, and so the request on the server."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._loop = loop
        self.reader: asyncio.Task[None] | None = None

    def begin(self, reader: asyncio.Task[None]) -> None:
        """Take the events of a reader. One that is cancelled before its first turn puts no end itself."""
        self.reader = reader
        reader.add_done_callback(lambda task: self.put(CancelledError(_CLOSED)) if task.cancelled() else None)

    def cancel(self) -> None:
        """Say that the caller wants no more events, and leave."""
        if not self.cancelled and self.reader is not None:
            with suppress(RuntimeError):  # the engine was closed
                self._loop.call_soon_threadsafe(self.reader.cancel)
        super().cancel()


@dataclass(eq=False)
class RemoteRequest:
    """One request as a Stream reads it. last: the deltas after all chunks."""

    events: RemoteEvents
    last: tuple[Delta, ...] = ()
    receipt: Receipt = field(default_factory=Receipt)
    completion: Completion | None = None


class RemoteStream(Stream):
    """Chunks of a request that a server runs."""

    def __init__(self, request: RemoteRequest) -> None:
        super().__init__(request, lambda _: request.completion)  # type: ignore[arg-type, return-value]
        self._remote = request

    def deltas(self) -> Iterator[Delta]:
        for chunk in self:
            assert isinstance(chunk, RemoteChunk)
            yield from chunk.deltas
        yield from self._remote.last

    async def aparts(self) -> AsyncIterator[tuple[Chunk, list[Delta]]]:
        async for chunk in self:
            assert isinstance(chunk, RemoteChunk)
            yield chunk, list(chunk.deltas)
        yield Chunk("", ()), list(self._remote.last)


async def read(response: httpx.Response, request: RemoteRequest) -> None:
    """Put what the server tells into the request's events."""
    told: Mapping[str, Any] | None = None
    events = request.events
    try:
        async for event, data in _sse(response):
            if event == "chunk":
                events.put(RemoteChunk(data["text"], tuple(data["ids"]), _deltas(data)))
            elif event == "completion":
                told, request.last = data, _deltas(data)
            elif "error" in data and event == "message":
                raise _error(data, 500)
        if told is None:
            raise GenerationError("the server ended the answer before it was whole")
        request.completion = reads(Completion)(told)
        request.receipt = request.completion.receipt
        events.put(Done())
    except asyncio.CancelledError:
        events.put(CancelledError(_CLOSED))
    except AgentCacheError as error:
        events.put(error)
    except FAULTS as error:  # the caller waits for it
        events.put(GenerationError(f"the server's answer broke off: {error or type(error).__name__}"))
    finally:
        await response.aclose()


@functools.cache
def reads(kind: Any) -> Callable[[Any], Any]:
    """Reader of JSON as that class."""
    from pydantic import TypeAdapter  # of the extra `client`: all names of the package are had without it

    return TypeAdapter(kind).validate_python


def _deltas(data: Mapping[str, Any]) -> tuple[Delta, ...]:
    return tuple(Delta(**one) for one in data["deltas"])


async def _sse(response: httpx.Response) -> AsyncIterator[tuple[str, Any]]:
    """Named events and their JSON."""
    event = "message"
    async for line in response.aiter_lines():
        name, _, value = line.partition(": ")
        if name == "event":
            event = value
        elif name == "data":
            yield event, json.loads(value)
            event = "message"


def checked(response: httpx.Response, kind: str = "application/json") -> httpx.Response:
    """The response, of that media type; the error that it tells of is raised. Other servers know none of the routes asked for."""
    if response.is_success and kind in response.headers.get("content-type", ""):
        return response
    try:
        body = response.json()
    except ValueError:
        body = None
    told = body.get("error") if isinstance(body, Mapping) else None
    named = isinstance(told, Mapping) and isinstance(told.get("code"), str)
    if body is None or response.is_success or (response.status_code == 404 and not named):
        raise ConfigError(f"{str(response.url)!r} answered {response.status_code} {response.text!r:.100}: is it an `agentcache serve`?")
    raise _error(body, response.status_code)


def _error(body: Any, status: int) -> AgentCacheError:
    """The engine's error that a server tells of, in its own class; else one by its status."""
    own = body.get("x_agentcache", {}) if isinstance(body, Mapping) else {}
    kind = getattr(errors, str(own.get("error")), None)
    if isinstance(kind, type) and issubclass(kind, AgentCacheError):
        return kind(*own["args"])
    told = body.get("error", body) if isinstance(body, Mapping) else body
    message = str(told.get("message", told)) if isinstance(told, Mapping) else str(told)
    return _STATUS.get(status, ConfigError if 400 <= status < 500 and status != 429 else GenerationError)(message)
