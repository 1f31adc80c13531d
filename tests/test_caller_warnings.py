"""CallerWarnings: a warning names the line of the program that asked, not a framework's."""

from __future__ import annotations

import asyncio
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from agentcache import CallerWarnings
from agentcache.errors import ReuseWarning

FRAMEWORK = ModuleType("framework.inside")
exec("def call(function):\n    return function()\n\nasync def told(warn):\n    warn('x')\n", FRAMEWORK.__dict__)


def caught(say: Callable[[], Any]) -> list[warnings.WarningMessage]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        say()
    return found


def heard(say: Callable[[], Any]) -> list[tuple[str, str, type[Warning]]]:
    return [(str(one.message), one.filename, one.category) for one in caught(say)]


@pytest.fixture
def framework() -> CallerWarnings:
    return CallerWarnings(["framework"], ReuseWarning)


@pytest.mark.parametrize("module", ["framework.inside", "nest_asyncio"])
def test_the_frames_of_a_framework_are_passed(framework: CallerWarnings, module: str) -> None:
    assert heard(lambda: FRAMEWORK.call(lambda: framework.warn("x"))) == [("x", __file__, ReuseWarning)]
    inside: dict[str, Any] = {"__name__": module, "warn": framework.warn}
    code = compile("def call():\n    warn('x')\n", "framework.py", "exec")
    exec(code, inside)
    assert heard(inside["call"]) == [("x", __file__, ReuseWarning)]


@pytest.mark.parametrize("how", ["a thread", "a task"])
def test_what_begins_in_a_block_names_its_line(framework: CallerWarnings, how: str) -> None:
    async def begun() -> None:
        with framework.from_here():
            if how == "a thread":
                await asyncio.to_thread(framework.warn, "x")
            else:
                await asyncio.create_task(FRAMEWORK.told(framework.warn))

    (said,) = caught(lambda: asyncio.run(begun()))
    assert (said.filename, said.lineno) == (__file__, begun.__code__.co_firstlineno + 1)


def test_threads_of_a_pool_name_the_line_that_waits(framework: CallerWarnings) -> None:
    inside: dict[str, Any] = {"__name__": "framework.inside", "ThreadPoolExecutor": ThreadPoolExecutor}
    code = "def batch(function):\n with ThreadPoolExecutor(2) as pool:\n  return list(pool.map(lambda _: function('x'), range(2)))"
    exec(compile(code, "framework.py", "exec"), inside)

    def begun() -> None:
        inside["batch"](framework.warn)

    assert [(said.filename, said.lineno) for said in caught(begun)] == [(__file__, begun.__code__.co_firstlineno + 1)] * 2


def test_work_in_a_pool_names_the_line_that_waits(framework: CallerWarnings) -> None:
    inside: dict[str, Any] = {"__name__": "framework.inside", "wait": wait, "Event": threading.Event}
    late = "def late(begins, function):\n begins.wait()\n function('x')\n"  # once its pool has taken it
    run = "def run(submit, function):\n begins = Event()\n work = {submit(late, begins, function)}\n begins.set()\n wait(work)"
    exec(compile(late + run, "framework.py", "exec"), inside)
    held = SimpleNamespace(pool=ThreadPoolExecutor(1))  # as LangGraph holds its own: no frame sees it

    def begun() -> None:
        inside["run"](held.pool.submit, framework.warn)

    (said,) = caught(begun)
    held.pool.shutdown()
    assert (said.filename, said.lineno) == (__file__, begun.__code__.co_firstlineno + 1)


def test_a_thread_of_nobody_is_warned_in_all_the_same(framework: CallerWarnings) -> None:
    def begun() -> None:
        thread = threading.Thread(target=framework.warn, args=["x"])
        thread.start()
        thread.join()

    assert [said for said, _, _ in heard(begun)] == ["x"]


def test_each_cause_is_told_once(framework: CallerWarnings) -> None:
    said = heard(lambda: [framework.warn_once(cause, cause) for cause in ("a", "b", "a")])
    assert [text for text, _, _ in said] == ["a", "b"]
    assert len(heard(lambda: CallerWarnings([]).warn_once("a", "a"))) == 1, "another one has told nothing yet"
