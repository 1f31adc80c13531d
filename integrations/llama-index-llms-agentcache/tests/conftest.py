"""What every test gets: the package importable from this folder, a tiny model of its own, scripted answers. Sockets are blocked."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE)]  # the package's namespace, and `cases`

os.environ["AGENTCACHE_DIR"] = ""  # nothing goes to disk
os.environ["HF_HUB_OFFLINE"] = "1"

from cases import tiny  # noqa: E402
from llama_index.llms.agentcache import ReplayLLM  # noqa: E402

from agentcache import Engine  # noqa: E402


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What LlamaIndex itself does of what is deprecated is not ours to mend; its stock agents are told so in a warning (test_hints.py)."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("ignore::pydantic.warnings.PydanticDeprecationWarning"), append=False)
            item.add_marker(pytest.mark.filterwarnings("ignore::agentcache.errors.ReuseWarning"), append=False)
            item.add_marker(pytest.mark.filterwarnings("ignore:a text or a list of the answer ended early:UserWarning"), append=False)
            item.add_marker(pytest.mark.filterwarnings("ignore:is_running called from within a step:DeprecationWarning"), append=False)


@pytest.fixture(scope="session")
def shared_engine() -> Iterator[Engine]:
    """One engine for all tests; each works in a namespace of its own."""
    with tiny() as engine:
        yield engine


@pytest.fixture
def llm(shared_engine: Engine, request: pytest.FixtureRequest) -> Iterator[Callable[..., ReplayLLM]]:
    """llm("first answer", "second"): a model that gives these answers, through the real path. constrain=False unless a test asks."""
    made = []

    def make(*script: Any, **options: Any) -> ReplayLLM:
        options = {"constrain": False, "namespace": request.node.name, "engine": shared_engine, **options}
        made.append(ReplayLLM(script=script, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def run() -> Callable[[Any], Any]:
    """run(coroutine): its result; an event loop of the test's own."""
    return lambda coroutine: asyncio.run(coroutine)
