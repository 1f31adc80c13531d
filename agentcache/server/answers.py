"""An answer on its way to its client: opened off the loop, watched for a client that leaves and for its time, accounted for at the end."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import anyio
import anyio.to_thread
from anyio import CancelScope, create_task_group, current_time
from anyio.abc import TaskGroup
from fastapi import Request
from fastapi.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from ..errors import AgentCacheError, CancelledError
from .errors import ServerError
from .records import Record
from .tenants import Tenant

if TYPE_CHECKING:
    from ..engine import Engine
    from ..stream import Completion, Stream
    from .state import ServerState

T = TypeVar("T")
Failed = Callable[[ServerError], str]
FAREWELL_S = 5.0  # for the end of a stream whose time is over
PING_S = 15.0  # how often a stream that has nothing to tell shows that it is alive
EVENTS: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}}}}  # of routes that stream, for the schema
_compact = json.JSONEncoder(separators=(",", ":")).encode
ANSWER = "x_agentcache"  # the receipt's name in answers, and in the last event of streams but for usage


@dataclass(eq=False)
class Answer:
    """One running answer. id: what its receipt is found by. others: answers of the same request, which fail with it."""

    id: str
    stream: Stream
    engine: Engine
    record: Record
    created: int = field(default_factory=lambda: int(time.time()))
    others: Sequence[Answer] = ()

    @property
    def fingerprint(self) -> str | None:
        """Start of the fingerprint of the weights, as the engine found it when the request was made."""
        found = self.engine.fingerprint
        return f"fp_{found.last_digest[:12]}" if found else None

    def told(self) -> dict[str, Any]:
        """The answer is whole: its receipt, under its name."""
        self.record.end(self.stream.receipt)
        return {ANSWER: self.record.as_dict()}

    def fail(self, error: str) -> None:
        """The request will not be answered."""
        for each in (self, *self.others):
            each.record.fail(error)

    async def completion(self) -> Completion:
        """The whole result, without holding a thread."""
        async for _ in self.stream:
            pass
        return self.stream.completion


@asynccontextmanager
async def running(state: ServerState, request: Request, model: str | None) -> AsyncIterator[Engine]:
    """The engine of a model, for one request that is counted among the running ones. A client that leaves while it loads ends it."""
    if state.closing.is_set():
        raise _closing()
    with state.admit(request.state.tenant):
        try:
            async with state.models.use(model, lambda loaded: _unless_gone(state, request, loaded, None)) as engine:
                yield engine
        except CancelledError as error:
            raise ServerError(499, str(error), code="client_left") from error


async def opened(
    state: ServerState,
    request: Request,
    stack: AsyncExitStack,
    model: str | None,
    prefix: str,
    ask: Callable[[Engine, str], Stream],
    group: str | None = None,
) -> Answer:
    """Admit a request, wait for its model, and hand it to the engine. ask(engine, namespace) runs on a thread: layout takes a while.

    group: the registered tool group that the prompt begins with.
    """
    tenant: Tenant = request.state.tenant
    name = model if model is not None and state.models.get(model) else state.models.first.name
    engine = await stack.enter_async_context(running(state, request, model))
    identity = f"{prefix}-{secrets.token_hex(12)}"
    record = state.records.open(identity, tenant.namespace, name, request.url.path, group)
    stack.callback(record.leave)
    if group is not None:
        state.tools.use(tenant.namespace, group)
    try:
        stream = await anyio.to_thread.run_sync(ask, engine, tenant.namespace)
    except BaseException as error:
        record.fail(str(error) if isinstance(error, AgentCacheError) else "refused")
        raise
    stack.callback(stream.close)
    return Answer(identity, stream, engine, record)


async def whole(state: ServerState, request: Request, answer: Answer, work: Awaitable[Mapping[str, Any]]) -> Response:
    """The answer at once, as `work` makes it. The request ends where its client leaves, or its time is over."""
    try:
        told = await _unless_gone(state, request, work, state.answer_s)
    except TimeoutError as error:
        answer.fail("timeout")
        raise _late(state) from error
    except CancelledError:
        raise
    except AgentCacheError as error:
        answer.fail(str(error))
        raise
    return Json({**told, **answer.told()})


async def _unless_gone(state: ServerState, request: Request, work: Awaitable[T], most_s: float | None) -> T:
    """The result of `work`, which is cancelled if the client leaves or the server ends. TimeoutError: it takes longer than it may."""
    task = asyncio.ensure_future(work)
    gone, closing = asyncio.ensure_future(_gone(request.receive)), asyncio.ensure_future(state.closing.wait())
    try:
        waiting: tuple[asyncio.Future[Any], ...] = (task, gone, closing)
        done, _ = await asyncio.wait(waiting, timeout=most_s, return_when=asyncio.FIRST_COMPLETED)
        if task in done:
            return task.result()
        if not done:
            raise TimeoutError
        raise _closing() if closing in done else CancelledError("the client left before its answer was whole")
    finally:
        for each in (task, gone, closing):
            each.cancel()


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class Json(JSONResponse):
    """JSON in ASCII: what a caller sent may come back, and a lone surrogate has no UTF-8."""

    def render(self, content: Any) -> bytes:
        return _compact(content).encode()


class EventStream(Response):
    """An answer as server-sent events, with a comment where none comes for long.

    failed: the event that tells of an error. end: what follows the last event.
    """

    media_type = "text/event-stream"

    def __init__(
        self, state: ServerState, stack: AsyncExitStack, answer: Answer, events: AsyncIterator[str], *, failed: Failed, end: str
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["Content-Length"]
        self._state, self._stack, self._answer, self._events, self._failed, self._end = state, stack, answer, events, failed, end
        self._sent = 0.0  # time.monotonic() at the last event

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events until the answer is whole, its client leaves, its time is over, or the server ends."""
        async with self._stack, create_task_group() as group:
            group.start_soon(_cancel_after, partial(_gone, receive), group.cancel_scope)
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            self._sent = time.monotonic()
            group.start_soon(self._ping, send)
            await self._tell(send, group)
            group.cancel_scope.cancel()

    async def _tell(self, send: Send, group: TaskGroup) -> None:
        """Send the answer or its error, then the end."""
        state, error = self._state, None
        with CancelScope(deadline=current_time() + state.answer_s) as bound:
            group.start_soon(_cancel_after, state.closing.wait, bound)
            try:
                async for event in self._events:
                    await self._send(send, event)
            except (AgentCacheError, ServerError) as failure:
                error = ServerError.of(failure) if isinstance(failure, AgentCacheError) else failure
            else:
                self._answer.record.end(self._answer.stream.receipt)
        if bound.cancelled_caught:
            error = _closing() if state.closing.is_set() else _late(state)
        last = self._end
        if error is not None:
            self._answer.fail(error.detail)
            last = self._failed(error) + last
        end = max(bound.deadline, current_time()) + FAREWELL_S
        with CancelScope(deadline=end):  # a client that reads no more holds no place among the running
            await self._send(send, last)
            await send({"type": "http.response.body", "body": b""})

    async def _send(self, send: Send, event: str) -> None:
        self._sent = time.monotonic()
        await send({"type": "http.response.body", "body": event.encode(), "more_body": True})

    async def _ping(self, send: Send) -> None:
        """Show that the answer is alive where it has nothing to tell."""
        while True:
            await anyio.sleep(self._sent + PING_S - time.monotonic())
            if time.monotonic() >= self._sent + PING_S:
                await self._send(send, ": waiting\n\n")


async def _cancel_after(wait: Callable[[], Awaitable[Any]], scope: CancelScope) -> None:
    await wait()
    scope.cancel()


def sse(data: Any, event: str | None = None) -> str:
    """One server-sent event."""
    name = f"event: {event}\n" if event else ""
    return f"{name}data: {data if isinstance(data, str) else _compact(data)}\n\n"


def _late(state: ServerState) -> ServerError:
    return ServerError(504, f"no whole answer within {state.answer_s:.0f} s", kind="server_error", code="timeout")


def _closing() -> ServerError:
    return ServerError(
        503, "the server is shutting down: ask again", kind="server_error", code="shutting_down", headers={"Retry-After": "5"}
    )
