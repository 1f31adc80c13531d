"""Coroutines: the loop is never held up, leaving early frees the device, and many at once get what each of them asked for."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable
from typing import Any

import pytest
from cases import call, tiny, tools, user
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.llms.agentcache import AgentCacheLLM, ReplayLLM

from agentcache.errors import AgentCacheError, MessageError

Make = Callable[..., Any]


def test_the_loop_goes_on_while_the_model_computes(llm: Make, run: Make) -> None:
    async def longest_pause() -> tuple[float, float]:
        model, pauses, over = llm("tide " * 40), [0.0], asyncio.Event()

        async def tick() -> None:
            while not over.is_set():
                at = time.perf_counter()
                await asyncio.sleep(0.001)
                pauses.append(time.perf_counter() - at)

        ticking = asyncio.create_task(tick())
        await asyncio.sleep(0.01)  # it is at it
        start = time.perf_counter()
        await model.achat([user("the log " * 800)])
        took = time.perf_counter() - start
        over.set()
        await ticking
        return max(pauses), took

    for _ in range(4):  # others on the machine pause the loop now and then, a model that blocks it does so each time
        pause, took = run(longest_pause())
        if pause < took / 3:
            return
    raise AssertionError(f"the loop stood still for {pause:.2f} s of {took:.2f} s, four times")


def test_leaving_a_stream_ends_the_request(run: Make, caplog: pytest.LogCaptureFixture) -> None:
    with tiny() as engine, AgentCacheLLM(engine=engine, max_tokens=4000) as model:

        async def leave() -> int:
            stream = await model.astream_chat([user("count")], ignore_eos=True)
            got = 0
            async for _ in stream:
                got += 1
                if got == 3:
                    break
            await stream.aclose()
            assert await asyncio.to_thread(_quiet, engine)  # while the loop still lives: a closed one would end it, too
            return got

        assert run(leave()) == 3
        gc.collect()
        assert not caplog.records  # no outcome that nobody asked for


def test_cancelling_a_task_ends_the_request(run: Make) -> None:
    with tiny() as engine, AgentCacheLLM(engine=engine, max_tokens=4000) as model:

        async def cancel() -> None:
            task = asyncio.create_task(model.achat([user("count")], ignore_eos=True))
            await asyncio.sleep(0.3)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert await asyncio.to_thread(_quiet, engine)

        run(cancel())


def test_leaving_a_generator_ends_the_request() -> None:
    with tiny() as engine, AgentCacheLLM(engine=engine, max_tokens=4000) as model:
        stream = model.stream_chat([user("count")], ignore_eos=True)
        next(stream)
        stream.close()
        assert _quiet(engine)


def _quiet(engine: Any, seconds: float = 10.0) -> bool:
    """Whether the device has nothing to do any more."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if not engine.scheduler.live and not engine.scheduler._waiting:
            return True
        time.sleep(0.01)
    return False


def test_errors_reach_the_coroutine(llm: Make, run: Make) -> None:
    model = llm("never")

    async def wrong() -> None:
        async for _ in await model.astream_chat([]):
            pass

    with pytest.raises(MessageError):
        run(wrong())


def test_closing_the_engine_fails_what_waits(run: Make) -> None:
    with tiny() as engine, AgentCacheLLM(engine=engine, max_tokens=4000) as model:

        async def closed() -> None:
            task = asyncio.create_task(model.achat([user("count")], ignore_eos=True))
            await asyncio.sleep(0.2)
            engine.close()
            with pytest.raises(AgentCacheError):
                await task

        run(closed())


def test_half_of_twenty_cancelled(run: Make, request: pytest.FixtureRequest) -> None:
    """Those who stay get their own answer, and nothing of those who left goes on running."""
    with tiny() as engine, AgentCacheLLM(engine=engine, max_tokens=24) as model:

        async def one(number: int) -> str:
            return str((await model.achat([user(f"Count to {number}")], ignore_eos=True, seed=number, temperature=1.0)).message.content)

        async def some() -> list[Any]:
            tasks = [asyncio.create_task(one(number)) for number in range(20)]
            await asyncio.sleep(0.05)
            for task in tasks[::2]:
                task.cancel()
            return await asyncio.gather(*tasks, return_exceptions=True)

        answers = run(some())
        assert _quiet(engine)
        assert all(isinstance(answer, asyncio.CancelledError) for answer in answers[::2])
        assert answers[1::2] == [run(one(number)) for number in range(1, 20, 2)]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore:coroutine:RuntimeWarning")
def test_a_loop_that_closes_in_the_middle_ends_the_request() -> None:
    with tiny() as engine, AgentCacheLLM(engine=engine, max_tokens=4000) as model:
        loop = asyncio.new_event_loop()

        async def first() -> Any:
            stream = await model.astream_chat([user("count")], ignore_eos=True)
            await stream.__anext__()
            return stream

        stream = loop.run_until_complete(first())
        loop.close()
        assert _quiet(engine)
        del stream


def test_sync_calls_work_where_a_loop_is_running(llm: Make, run: Make) -> None:
    async def as_in_a_notebook() -> str:
        return str(llm("One.").chat([user("hello")]))

    assert run(as_in_a_notebook()) == "assistant: One."


def test_twenty_at_once(shared_engine: Any, run: Make, request: pytest.FixtureRequest) -> None:
    """Twenty agents on one engine and one tool group, each with its own task: nobody gets another's words."""

    async def one(number: int) -> str:
        script = [call("tide", harbour=f"Port {number}"), lambda messages: f"Told: {messages[-1].content}"]
        model = ReplayLLM(engine=shared_engine, script=script, constrain=False, namespace=request.node.name)
        agent = FunctionAgent(tools=tools(), llm=model, system_prompt="You keep the light. " * 20)
        answer = str(await agent.run(f"When is high water in Port {number}?"))
        receipts.extend(model.receipts)
        model.close()
        return answer

    async def all_of_them() -> list[str]:
        return await asyncio.gather(*(one(number) for number in range(20)))

    receipts: list[Any] = []
    run(one(99))
    assert run(all_of_them()) == [f"Told: high water in Port {number} at 14:05" for number in range(20)]
    assert len(receipts) == 42
    assert all(receipt.cached_tokens > 300 for receipt in receipts[1:])  # all but the very first found the shared start
