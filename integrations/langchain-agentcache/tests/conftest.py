"""What every test gets: the package importable from this folder, tiny models on disk, answers by script. Sockets are blocked.

The scripted engine forces what a trained model would have said through decoding, after checking that the request's own constraint allows
it; where the script says nothing, random weights choose. Keys, values, prefixes and receipts are the real ones.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE)]  # the package, and `script`

os.environ["AGENTCACHE_DIR"] = ""  # nothing goes to disk but where a test asks for it
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["LANGSMITH_TRACING"] = "false"

pytest.importorskip("langchain_tests", reason="the LangChain integration is tested where langchain-tests is installed")

import script  # noqa: E402
from langchain_agentcache import ChatAgentCache  # noqa: E402

from agentcache import Engine, Sampling, Stream  # noqa: E402


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What LangChain itself does of what is deprecated is not ours to mend."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("ignore::DeprecationWarning:langchain.*"), append=False)
            item.add_marker(pytest.mark.filterwarnings("ignore::langchain_core._api.LangChainBetaWarning"), append=False)
            item.add_marker(pytest.mark.filterwarnings("ignore:Core Pydantic V1:UserWarning"), append=False)
            # said once per process, in whichever test comes first
            item.add_marker(pytest.mark.filterwarnings("ignore:.* prompt tokens were computed again:UserWarning"), append=False)
            item.add_marker(pytest.mark.filterwarnings("ignore:a text or a list of the answer ended early:UserWarning"), append=False)
            if item.path.name == "test_standard.py":  # LangChain's: each model is given a key
                item.add_marker(pytest.mark.filterwarnings("ignore:.* ignores api_key=...:UserWarning"), append=False)
            if item.name == "test_message_with_name":  # LangChain's: the name need not be shown
                item.add_marker(pytest.mark.filterwarnings("ignore:.*shows no names of users:UserWarning"), append=False)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Tests that are coroutines run in a loop of their own, with or without a plugin for it."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}))
    return True


class ScriptedEngine(Engine):
    """An engine that says what tests/script.py says."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        script.MADE.add(self)

    def stream(self, messages: Any, tools: Any = (), **options: Any) -> Stream:
        """As of Engine, with the completion forced where the script has one."""
        sampling = options.get("sampling") or Sampling()
        text = None if sampling.forced else script.answer(messages, tools, options.get("constraint"))
        if text is not None:
            if (constraint := options.get("constraint")) is not None:
                self.check(text, constraint, tools)
            ids = (*self.tokenizer(text, add_special_tokens=False)["input_ids"], self.tokenizer.eos_token_id)
            options["sampling"] = replace(sampling, forced=ids)
        return super().stream(messages, tools, **options)

    def check(self, text: str, constraint: Any, tools: Any) -> None:
        """The script may not say what the constraint forbids."""
        guide = self.grammars.guide(constraint, tools, "")
        for token in self.tokenizer(text, add_special_tokens=False)["input_ids"]:
            assert guide.accept(token) == "", f"{constraint!r} does not allow {text!r}"


@pytest.fixture(scope="session", autouse=True)
def scripted() -> Iterator[None]:
    """Engines that the package loads are scripted ones."""
    shared = Engine.__dict__["shared"]
    Engine.shared = lambda *given, **options: shared.__func__(ScriptedEngine, *given, **options)  # type: ignore[method-assign]
    yield
    for engine in list(script.MADE):
        engine.close()
    Engine.shared = shared  # type: ignore[method-assign]


@pytest.fixture(scope="session")
def model_folder() -> str:
    """The model of most tests."""
    return script.folder("first", script.save)


@pytest.fixture(autouse=True)
def free_pages() -> Iterator[None]:
    """No test leaves a request on the device."""
    yield
    for engine in list(script.MADE):
        assert script.until(lambda engine=engine: not engine.scheduler.live), "a request still holds pages"


@pytest.fixture
def chat(model_folder: str, request: pytest.FixtureRequest) -> Any:
    """chat(max_tokens=5): a model in a namespace of this test's own."""

    def make(**options: Any) -> ChatAgentCache:
        options = {"model": model_folder, "memory_bytes": 64 << 20, "max_tokens": 16, "namespace": request.node.name, **options}
        return ChatAgentCache(**options)

    return make
