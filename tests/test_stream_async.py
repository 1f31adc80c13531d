"""`async for` over a stream: the same chunks, no thread held, cancelled with its task, unharmed by a loop that is closed."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from threading import get_ident

import pytest

from agentcache import StoreOptions, Stream
from agentcache.errors import CancelledError
from tests.engines import chat, decode, engine, wait_until

ASKED = chat("Which ships passed?")


async def gathered(stream: Stream) -> str:
    return "".join([chunk.text async for chunk in stream])


def test_the_same_chunks() -> None:
    with engine() as running:
        expected = running.generate(ASKED, sampling=decode(12))

        async def many() -> list[str]:
            streams = [running.stream(ASKED, sampling=decode(12)) for _ in range(20)]
            before = threading.active_count()
            first = await anext(streams[0])
            waiting = [asyncio.create_task(gathered(stream)) for stream in streams]
            await asyncio.sleep(0)
            assert threading.active_count() < before + len(waiting) // 2, "waiting takes no threads of its own"
            texts = await asyncio.gather(*waiting)
            texts[0] = first.text + texts[0]
            assert all(stream.completion.ids == expected.ids for stream in streams)
            return list(texts)

        assert asyncio.run(many()) == [expected.text] * 20


@pytest.mark.parametrize("thread", [None, "t"], ids=["alone", "of a session"])
def test_a_loop_waits_for_no_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, thread: str | None) -> None:
    """`langgraph dev` ends a run in which its loop calls SQLite."""
    ended: list[int] = []
    with engine(store=StoreOptions(tmp_path)) as running:
        remember = running.renderer.remember
        monkeypatch.setattr(running.renderer, "remember", lambda *args, **given: (ended.append(get_ident()), remember(*args, **given))[1])

        async def ask() -> None:
            stream = running.stream(ASKED, sampling=decode(12), session=thread)
            assert await gathered(stream) == stream.completion.text

        asyncio.run(ask())
        assert len(ended) == 1
        assert ended[0] != get_ident()


def test_deltas_are_the_same_too() -> None:
    with engine() as running:

        async def told() -> list[object]:
            return [delta async for delta in running.stream(ASKED, sampling=decode(12)).adeltas()]

        assert asyncio.run(told()) == list(running.stream(ASKED, sampling=decode(12)).deltas())


def test_cancelled_with_its_task() -> None:
    with engine() as running:

        async def ask() -> None:
            with running.stream(ASKED, sampling=decode(3000)) as stream:
                await gathered(stream)

        async def both() -> None:
            task = asyncio.create_task(ask())
            await asyncio.sleep(0.1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        asyncio.run(both())
        assert wait_until(lambda: not running.scheduler.live)


def test_a_cancelled_reader_leaves_nothing_running() -> None:
    """Its task, whose traceback holds the stream, is held by somebody."""
    with engine() as running:

        async def both() -> None:
            stream = running.stream(ASKED, sampling=decode(4000))
            task = asyncio.create_task(gathered(stream))
            await asyncio.sleep(0.1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert await asyncio.to_thread(wait_until, lambda: not running.scheduler.live, 5)
            with pytest.raises(CancelledError, match="closed before it ended"):
                _ = stream.completion

        asyncio.run(both())


def test_a_loop_closed_mid_stream() -> None:
    with engine() as running:
        loop = asyncio.new_event_loop()
        stream = running.stream(ASKED, sampling=decode(3000))
        task = loop.create_task(gathered(stream))
        loop.run_until_complete(asyncio.sleep(0.2))
        loop.close()
        assert not task.done()
        assert wait_until(lambda: not running.scheduler.live), "nobody reads on, so nobody computes on"
        stream.close()
        del task
        with pytest.raises(CancelledError):
            _ = stream.completion
        assert running.generate(ASKED, sampling=decode(3)).receipt.cached_tokens


def test_a_loop_closed_between_two_reads() -> None:
    """The reader is kept by somebody, and will never read on."""
    with engine() as running:
        stream, loop = running.stream(ASKED, sampling=decode(4000)), asyncio.new_event_loop()
        loop.run_until_complete(stream.__anext__())
        assert len(running.scheduler.live) == 1
        loop.close()
        assert wait_until(lambda: not running.scheduler.live, 5)
        with pytest.raises(CancelledError):
            _ = stream.completion


def test_errors_reach_the_task() -> None:
    with engine() as running:
        stream = running.stream(ASKED, sampling=decode(3000))

        async def ask() -> None:
            await anext(stream)
            running.close()
            await gathered(stream)

        with pytest.raises(Exception, match="the engine was closed"):
            asyncio.run(ask())
