"""Closing a model over an engine that lives on: what it held is let go, what it ran ends, and others over the engine lose nothing."""

from __future__ import annotations

import asyncio
import copy
import multiprocessing
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from cases import tiny, tools, user
from llama_index.core.base.llms.types import CacheControl, CachePoint, ChatMessage, TextBlock
from llama_index.llms.agentcache import AgentCacheLLM, host

from agentcache import Engine
from agentcache.errors import EngineClosedError, EngineForkedError

Make = Callable[..., Any]
LONG = {"ignore_eos": True, "max_tokens": 4000}


@pytest.fixture
def engine() -> Iterator[Engine]:
    with tiny() as made:
        yield made


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, to be moved on."""
    at = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: at[0])
    return at


def _point(text: str, ttl: str = "5m", type: str = "ephemeral") -> list[ChatMessage]:
    point = CachePoint(cache_control=CacheControl(type=type, ttl=ttl))
    return [ChatMessage(role="system", blocks=[TextBlock(text=text * 30), point]), user("hello")]


def _ask(model: AgentCacheLLM, *point: str) -> Any:
    return model.chat(_point(*point), max_tokens=1).raw


# -- cache points ------------------------------------------------------------------------------------------------------


def test_a_point_whose_pages_were_forgotten_is_pinned_again(engine: Engine) -> None:
    with AgentCacheLLM(engine=engine) as model:
        _ask(model, "Be brief. ", "1h")
        (held,) = engine.groups
        engine.forget(namespace="default")
        assert engine.groups == ()
        _ask(model, "Be brief. ", "1h")
        (again,) = engine.groups
        assert again.name == held.name
        assert again.prefix_tokens == held.prefix_tokens


def test_closing_lets_go_what_cache_points_held(engine: Engine) -> None:
    for kind in (("Be brief. ", "5m"), ("Be long. ", "5m", "persistent")):
        with AgentCacheLLM(engine=engine) as model:
            _ask(model, *kind)
            assert len(engine.groups) == 1
        assert not engine.groups


def test_a_point_lasts_while_one_asker_is_open(engine: Engine) -> None:
    with AgentCacheLLM(engine=engine) as one:
        with AgentCacheLLM(engine=engine) as other:
            _ask(one, "Be brief. ", "5m", "persistent")
            _ask(other, "Be brief. ", "5m")
            _ask(other, "Be long. ", "5m")
            assert len(engine.groups) == 2
        assert len(engine.groups) == 1
        assert _ask(one, "Be brief. ", "5m")["receipt"]["cached_tokens"] > 30
    assert not engine.groups


def test_a_short_point_leaves_anothers_long_one(engine: Engine, now: list[float]) -> None:
    with AgentCacheLLM(engine=engine) as short, AgentCacheLLM(engine=engine) as long:
        _ask(long, "Be brief. ", "1h")
        _ask(short, "Be brief. ", "5s")
        (held,) = engine.groups
        now[0] += 6
        _ask(short, "Be long. ", "1h")
        assert held in engine.groups
        now[0] += 3600
        _ask(short, "Be long. ", "1h")
        assert [group.name for group in engine.groups] != [held.name]
        assert len(engine.groups) == 1


def test_a_later_short_point_shortens_no_long_one(engine: Engine, now: list[float]) -> None:
    with AgentCacheLLM(engine=engine) as model:
        _ask(model, "Be brief. ", "1h")
        _ask(model, "Be brief. ", "5s")
        now[0] += 6
        _ask(model, "Be long. ", "5s")
        assert len(engine.groups) == 2


def test_closing_a_model_after_its_engine_is_fine() -> None:
    with tiny() as engine:
        model = AgentCacheLLM(engine=engine)
        _ask(model, "Be brief. ", "5m")
    model.close()
    model.close()


# -- running requests --------------------------------------------------------------------------------------------------


def _idle(engine: Any, seconds: float = 30.0) -> bool:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        if not engine.scheduler.live and not engine.scheduler._waiting:
            return True
        time.sleep(0.01)
    return False


@pytest.mark.parametrize("streaming", [False, True])
def test_closing_ends_what_a_coroutine_waits_for(engine: Engine, run: Make, streaming: bool) -> None:
    model = AgentCacheLLM(engine=engine)

    async def ask() -> None:
        if streaming:
            async for _ in await model.astream_chat([user("count")], **LONG):
                began.set()
        else:
            began.set()
            await model.achat([user("count")], **LONG)

    async def closed() -> None:
        task = asyncio.create_task(ask())
        await began.wait()
        await asyncio.sleep(0.05)
        model.close()
        with pytest.raises(EngineClosedError, match="closed"):
            await asyncio.wait_for(task, 30)
        assert await asyncio.to_thread(_idle, engine)

    began = asyncio.Event()
    run(closed())
    with AgentCacheLLM(engine=engine) as other:
        assert other.chat([user("hello")], max_tokens=2).raw  # the engine lives on


def test_closing_ends_what_another_thread_reads(engine: Engine) -> None:
    model, began, ended = AgentCacheLLM(engine=engine), threading.Event(), []

    def read() -> None:
        try:
            for _ in model.stream_chat([user("count")], **LONG):
                began.set()
        except EngineClosedError as error:
            ended.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    assert began.wait(30)
    model.close()
    thread.join(30)
    assert not thread.is_alive()
    assert len(ended) == 1
    assert _idle(engine)


def test_who_waits_for_a_thread_is_told_of_the_closing(engine: Engine, run: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "WAITING", 1)
    model = AgentCacheLLM(engine=engine)

    async def closed() -> list[Any]:
        tasks = [asyncio.create_task(model.achat([user(f"count to {n}")], **LONG)) for n in range(3)]
        await asyncio.sleep(0.2)
        model.close()
        return await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 30)

    assert [type(one) for one in run(closed())] == [EngineClosedError] * 3


def test_a_cancelled_waiter_is_cancelled(engine: Engine, run: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "WAITING", 1)

    async def cancelled() -> list[Any]:
        tasks = [asyncio.create_task(model.achat([user(f"count to {n}")], **LONG)) for n in range(2)]
        await asyncio.sleep(0.2)
        for task in reversed(tasks):
            task.cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)

    with AgentCacheLLM(engine=engine) as model:
        assert [type(one) for one in run(cancelled())] == [asyncio.CancelledError] * 2


def test_nothing_is_pinned_for_a_model_that_was_closed_meanwhile(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    model, pin = AgentCacheLLM(engine=engine), engine.pin

    def closing(*args: Any, **options: Any) -> Any:
        made = pin(*args, **options)
        if "ttl_s" not in options:  # it is computed, and nobody's yet
            model.close()
        return made

    monkeypatch.setattr(engine, "pin", closing)
    with pytest.raises(EngineClosedError):
        _ask(model, "Be brief. ", "1h")
    assert not engine.groups


def test_closing_a_model_with_a_superset_leaves_the_model_open(engine: Engine) -> None:
    model = AgentCacheLLM(engine=engine, max_tokens=2)
    with model.with_superset(tools()) as sharing:
        _ask(sharing, "Be brief. ", "1h")
        assert engine.groups
    assert not engine.groups  # its own cache points go
    with pytest.raises(EngineClosedError):
        sharing.chat([user("?")])
    assert model.chat([user("?")]).raw
    other = model.with_superset(tools())
    model.close()
    for one in (model, other):
        with pytest.raises(EngineClosedError):
            one.chat([user("?")])
    with pytest.raises(EngineClosedError):
        model.with_superset(tools())


def test_closing_a_copy_leaves_the_model_open(engine: Engine) -> None:
    model = AgentCacheLLM(engine=engine, max_tokens=2)
    with model.model_copy(update={"max_tokens": 1}) as copied:
        assert copied.chat([user("?")]).raw["usage"]["completion_tokens"] == 1
    assert model.chat([user("?")]).raw["usage"]["completion_tokens"] == 2
    other = copy.deepcopy(model)
    model.close()
    for one in (copied, other, copy.copy(model)):
        with pytest.raises(EngineClosedError):
            one.chat([user("?")])


# -- forks -------------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("how", ["chat", "achat"])
def test_a_model_in_a_forked_child_is_refused(engine: Engine, how: str) -> None:
    """Also where threads wait for requests: none of them is there in the child."""
    fork = multiprocessing.get_context("fork")
    mine, its = fork.Pipe(duplex=False)
    with AgentCacheLLM(engine=engine) as model:
        for _ in range(2):  # leaves a waiting thread that is idle
            asyncio.run(model.achat([user("hello")], max_tokens=1))

        def ask() -> None:
            host.counting("another model")
            try:
                model.chat([user("hello")], max_tokens=1) if how == "chat" else asyncio.run(model.achat([user("hello")], max_tokens=1))
            except EngineForkedError as error:
                its.send(error)

        child = fork.Process(target=ask)
        with host._gate:  # as another thread may
            child.start()
        try:
            assert mine.poll(60), "the child hangs"
            assert "initializer=" in str(mine.recv())
        finally:
            child.kill()
            child.join()
