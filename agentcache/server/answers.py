"""An answer on its way to its client: opened off the loop, watched for a client that leaves and for its time, accounted for at the end."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import anyio.to_thread
from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from ..errors import AgentCacheError, CancelledError
from .errors import ServerError
from .records import Record
from .tenants import Tenant

if TYPE_CHECKING:
    from ..engine import Engine
    from ..stream import Completion, Stream
    from .state import ServerState

T = TypeVar("T")
PING_S = 15.0  # how often a stream that has nothing to tell shows that it is alive
EVENTS: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}}}}  # of routes that stream, for the schema
ANSWER = "x_agentcache"  # the receipt's name in answers, and that of its event in streams


@dataclass(eq=False)
class Answer:
    """One running answer. id: what its receipt is found by."""

    id: str
    stream: Stream
    engine: Engine
    record: Record
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def fingerprint(self) -> str | None:
        """Start of the fingerprint of the weights."""
        known = self.engine.fingerprint
        return f"fp_{known.whole[:12]}" if known else None

    async def completion(self) -> Completion:
        """The whole result, without holding a thread."""
        async for _ in self.stream:
            pass
        return self.stream.completion


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
    if state.closing.is_set():
        raise _closing()
    stack.enter_context(state.tenants.admit(tenant))
    engine = await stack.enter_async_context(state.models.use(model))
    identity = f"{prefix}-{secrets.token_hex(12)}"
    record = state.records.open(identity, tenant.namespace, name, request.url.path, group)
    try:
        stream = await anyio.to_thread.run_sync(ask, engine, tenant.namespace)
    except AgentCacheError as error:
        record.fail(str(error))
        raise ServerError.of(error) from error
    except BaseException:
        record.fail("refused")
        raise
    stack.callback(stream.close)
    return Answer(identity, stream, engine, record)


async def whole(state: ServerState, request: Request, answer: Answer, work: Awaitable[Mapping[str, Any]]) -> Response:
    """The answer at once, as `work` makes it. The request ends where its client leaves, or its time is over."""
    try:
        told = await _unless_gone(state, request, work)
    except TimeoutError as error:
        answer.record.fail("timeout")
        raise _late(state) from error
    except CancelledError as error:
        answer.record.leave()
        raise ServerError(499, str(error), code="client_left") from error
    except AgentCacheError as error:
        answer.record.fail(str(error))
        raise ServerError.of(error) from error
    answer.record.end(answer.stream.receipt)
    return JSONResponse({**told, ANSWER: answer.record.as_dict()})


async def _unless_gone(state: ServerState, request: Request, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled if the client leaves or the server ends. TimeoutError: it takes longer than it may."""
    task, gone, closing = asyncio.ensure_future(work), asyncio.ensure_future(_gone(request)), asyncio.ensure_future(state.closing.wait())
    try:
        waiting: tuple[asyncio.Future[Any], ...] = (task, gone, closing)
        done, _ = await asyncio.wait(waiting, timeout=state.limits.answer_s, return_when=asyncio.FIRST_COMPLETED)
        if task in done:
            return task.result()
        if not done:
            raise TimeoutError
        raise _closing() if closing in done else CancelledError("the client left before its answer was whole")
    finally:
        for each in (task, gone, closing):
            each.cancel()


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def streamed(
    state: ServerState, stack: AsyncExitStack, answer: Answer, events: AsyncIterator[str], *, failed: Callable[[ServerError], str], end: str
) -> Response:
    """The answer as server-sent events. failed: the event that tells of an error. end: what follows the last event."""

    async def told() -> AsyncIterator[str]:
        async with stack:
            try:
                async with aclosing(_alive(state, events)) as alive:
                    async for event in alive:
                        yield event
            except TimeoutError:
                answer.record.fail("timeout")
                yield failed(_late(state))
            except (AgentCacheError, ServerError) as error:
                answer.record.fail(str(error))
                yield failed(ServerError.of(error) if isinstance(error, AgentCacheError) else error)
            else:
                answer.record.end(answer.stream.receipt)
            finally:
                answer.record.leave()
            yield end
            yield sse(answer.record.as_dict(), ANSWER)

    headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    return StreamingResponse(told(), media_type="text/event-stream", headers=headers)


async def _alive(state: ServerState, events: AsyncIterator[str]) -> AsyncGenerator[str, None]:
    """The same events, with a comment where none comes for long. TimeoutError: they take longer than they may."""
    end = time.monotonic() + state.limits.answer_s
    closing = asyncio.ensure_future(state.closing.wait())
    coming: asyncio.Future[str | None] | None = None
    try:
        while True:
            coming = coming or asyncio.ensure_future(anext(events, None))
            left = end - time.monotonic()
            done, _ = await asyncio.wait((coming, closing), timeout=max(0.0, min(PING_S, left)), return_when=asyncio.FIRST_COMPLETED)
            if coming in done:
                event, coming = coming.result(), None
                if event is None:
                    return
                yield event
            elif closing in done:
                raise _closing()
            elif left <= PING_S:
                raise TimeoutError
            else:
                yield ": waiting\n\n"
    finally:
        closing.cancel()
        if coming is not None:
            coming.cancel()


def sse(data: Any, event: str | None = None) -> str:
    """One server-sent event."""
    name = f"event: {event}\n" if event else ""
    return f"{name}data: {data if isinstance(data, str) else json.dumps(data, separators=(',', ':'))}\n\n"


def _late(state: ServerState) -> ServerError:
    return ServerError(504, f"no whole answer within {state.limits.answer_s:.0f} s", kind="server_error", code="timeout")


def _closing() -> ServerError:
    return ServerError(
        503, "the server is shutting down: ask again", kind="server_error", code="shutting_down", headers={"Retry-After": "5"}
    )
