"""A chat model that answered before its process was forked, as under gunicorn --preload, Celery or ProcessPoolExecutor."""

from __future__ import annotations

import multiprocessing
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
from langchain_agentcache import ChatAgentCache, errors

FORK = multiprocessing.get_context("fork")
LIMIT_S = 60.0  # a child that waits for a thread of its parent never ends

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")


def told(work: Callable[[], Any]) -> Any:
    """What `work` returns in a forked child, or its error there; a child that hangs is killed."""
    mine, its = FORK.Pipe(duplex=False)

    def run() -> None:
        try:
            its.send(work())
        except (errors.EngineClosedError, AssertionError) as error:
            its.send(error)

    child = FORK.Process(target=run)
    child.start()
    try:
        assert mine.poll(LIMIT_S), "the child hangs"
        return mine.recv()
    finally:
        child.kill()
        child.join()


def test_a_child_loads_a_named_model_again(model_folder: str) -> None:
    model = ChatAgentCache(model=model_folder, max_tokens=4, memory_bytes=35 << 20)
    answer = model.invoke("hello").content
    assert told(lambda: (model.invoke("hello").content, model.invoke("hello").content)) == (answer, answer)
    assert model.invoke("hello").content == answer


def wind(harbour: str) -> str:
    """Tell the wind."""
    return "North."


def locks() -> list[Any]:
    """Those of the package's modules, which any thread of the parent may hold while it forks."""
    modules = [module for name, module in sys.modules.items() if name.partition(".")[0] == "langchain_agentcache"]
    found = {id(lock): lock for module in modules for value in vars(module).values() for lock in (value, getattr(value, "_lock", None))}
    return [lock for lock in found.values() if isinstance(lock, type(threading.Lock()))]


def test_no_lock_of_the_parent_is_waited_for(model_folder: str) -> None:
    model = ChatAgentCache(model=model_folder, max_tokens=2, memory_bytes=35 << 20)
    model.invoke("hello")
    with ExitStack() as held:
        for lock in locks():
            held.enter_context(lock)
        assert told(lambda: model.bind_tools([wind]).invoke("hello").usage_metadata["output_tokens"]) == 2


def test_a_given_engine_is_refused_in_the_child(model_folder: str) -> None:
    engine = ChatAgentCache(model=model_folder)._engine()
    error = told(lambda: ChatAgentCache(engine=engine, max_tokens=4).invoke("hello"))
    assert isinstance(error, errors.EngineClosedError)
    assert "post_fork" in str(error)
