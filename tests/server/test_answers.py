"""Event streams: their comments while there is nothing to tell, and clients that leave."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from types import SimpleNamespace
from typing import Any

import pytest

from agentcache.server import answers
from agentcache.server.answers import Answer, EventStream
from agentcache.server.records import Records


async def told(events: AsyncIterator[str], sent: list[Any], receive: Any, commented: asyncio.Event) -> Answer:
    """Send these events, and collect their messages; `commented` is set by a comment."""
    record = Records().open("chatcmpl-1", "default", "m", "/v1/chat/completions")
    answer = Answer("chatcmpl-1", SimpleNamespace(receipt=None), SimpleNamespace(), record)  # type: ignore[arg-type]
    state: Any = SimpleNamespace(answer_s=600.0, closing=asyncio.Event())

    async def send(message: Any) -> None:
        sent.append(message)
        if message.get("body") == b": waiting\n\n":
            commented.set()

    stack = AsyncExitStack()
    stack.callback(record.leave)
    await EventStream(state, stack, answer, events, failed=str, end="data: [DONE]\n\n")({}, receive, send)
    return answer


def test_an_idle_stream_shows_that_it_is_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "PING_S", 0.01)
    sent: list[Any] = []

    async def run() -> Answer:
        alive = asyncio.Event()

        async def events() -> AsyncIterator[str]:
            await alive.wait()
            yield "data: 1\n\n"

        return await told(events(), sent, asyncio.Event().wait, alive)

    answer = asyncio.run(run())
    bodies = [message["body"] for message in sent[1:]]
    assert bodies[0] == b": waiting\n\n"
    assert b"data: 1\n\n" in bodies
    assert bodies[-2] == b"data: [DONE]\n\n"
    assert sent[-1] == {"type": "http.response.body", "body": b""}
    assert answer.record.state == "done"


def test_a_client_that_leaves_ends_its_events() -> None:
    sent: list[Any] = []

    async def run() -> Answer:
        never = asyncio.Event()

        async def events() -> AsyncIterator[str]:
            await never.wait()
            yield "data: 1\n\n"

        async def receive() -> dict[str, str]:
            return {"type": "http.disconnect"}

        return await told(events(), sent, receive, never)

    assert asyncio.run(run()).record.state == "cancelled"
    assert all(not message.get("body") for message in sent)


def test_a_client_that_reads_no_more_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "FAREWELL_S", 0.01)
    record = Records().open("chatcmpl-1", "default", "m", "/v1/chat/completions")
    state: Any = SimpleNamespace(answer_s=0.01, closing=asyncio.Event())
    left = AsyncExitStack()

    async def events() -> AsyncIterator[str]:
        yield "data: 1\n\n"

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":  # its connection takes nothing more
            await asyncio.Event().wait()

    async def run() -> bool:
        freed = asyncio.Event()
        left.callback(freed.set)
        answer = Answer("chatcmpl-1", SimpleNamespace(receipt=None), SimpleNamespace(), record)  # type: ignore[arg-type]
        stream = EventStream(state, left, answer, events(), failed=str, end="data: [DONE]\n\n")
        await asyncio.wait_for(stream({}, asyncio.Event().wait, send), 5.0)
        return freed.is_set()

    assert asyncio.run(run()), "it holds no place among the running requests"
    assert record.state == "failed"
