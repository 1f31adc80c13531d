"""What every test gets: warnings are errors and sockets are blocked (pyproject.toml), two or fewer threads, tiny models on request.

Imports PyTorch only where a test is run: pytest's own process, which starts those that run tests, needs none.
"""

from __future__ import annotations

import functools
import gc
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import typer.main

from tests import compiled

if TYPE_CHECKING:
    from agentcache import Engine
    from agentcache.page_memory import PagePool
    from tests.asking import Asking

os.environ["AGENTCACHE_DIR"] = ""  # nothing goes to disk but where a test asks for it
os.environ["HF_HUB_OFFLINE"] = "1"  # a name that is not a folder fails at once instead of asking a network that is blocked


def pytest_collection_finish() -> None:
    """Leave what was imported out of collections. Let Hypothesis draw no numbers that stand in modules loaded by then: examples of
    derandomized tests would depend on what else was imported."""
    if providers := sys.modules.get("hypothesis.internal.conjecture.providers"):
        none = providers.Constants()
        providers._get_local_constants = lambda: none  # type: ignore[attr-defined]
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def one_parser() -> Iterator[None]:
    """Build the parser of all commands once, not for each one that a test gives."""
    with mock.patch("typer.testing._get_command", functools.cache(typer.main.get_command)):
        yield


@pytest.fixture(scope="session", autouse=True)
def compiled_once(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Compile a kernel, choose among kernels and prove a model once for all workers, whose folders lie beside each other."""
    place = tmp_path_factory.getbasetemp()
    compiled.share((place.parent if "PYTEST_XDIST_WORKER" in os.environ else place) / "compiled")


@pytest.fixture
def compiled_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Find nothing of other tests and leave them nothing: for tests of what is kept, or of a proof that something else decides."""
    monkeypatch.setattr(compiled, "shared", None)


@pytest.fixture(autouse=True)
def patient(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine reading a few kB may look slower than computing them, which is the question in few tests: `impatient` ones."""
    if request.node.get_closest_marker("impatient") is None:
        for name in ("store.page_prefetch.give_up", "store.page_prefetch.slow_load_ms", "approximate.segment_prefetch.slow_load_ms"):
            monkeypatch.setattr(f"agentcache.{name}", lambda *_: False)


@pytest.fixture(scope="session")
def tiny() -> Callable[..., Any]:
    """tiny("llama", torch.bfloat16): a model shared by the session; build your own with models.build if you change its weights."""
    from tests import models

    return functools.cache(models.build)


@pytest.fixture(scope="session")
def model(tiny: Callable[..., Any]) -> Any:
    """A model of two layers, for tests that do not change its weights."""
    return tiny("qwen3", num_hidden_layers=2)


@pytest.fixture(params=["memory", "disk"])
def running(model: Any, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Engine]:
    """An engine that keeps pages in memory alone, and one that has a store on disk."""
    from tests.engines import engine

    with engine(model=model, store=tmp_path / "store" if request.param == "disk" else None) as made:
        yield made


@pytest.fixture
def toy_tokenizer() -> Any:
    """A tokenizer of this test's own, with a ChatML template that takes tools."""
    from tests import models

    return models.toy_tokenizer()


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as a user has one: weights, config, tokenizer and chat template of a tiny Qwen3."""
    from tests import models

    folder = tmp_path_factory.mktemp("model")
    models.build("qwen3").save_pretrained(folder)
    models.toy_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """threads(1): run the rest of this test on so many; what was set before comes back."""
    import torch

    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def one_thread(threads: Callable[[int], None]) -> None:
    """One thread, unless a test asks for more: the machine decides nothing."""
    threads(1)


@pytest.fixture
def no_garbage() -> Iterator[None]:
    """Collect no garbage meanwhile: what it runs may parse, and Python before 3.11.8 and 3.12.2 loses count of the parse around it."""
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def pieces_matter() -> Iterator[None]:
    """Models with states are loaded as if these depended on where pieces end, as those of references do."""
    from tests.asking import by_pieces

    with by_pieces():
        yield


@pytest.fixture
def asking() -> Iterator[Callable[..., Asking]]:
    """asking("lfm2", folder): an engine of a tiny model of a family, over a store, asked for answers; closed after the test."""
    from tests.asking import Asking

    made: list[Asking] = []

    def make(*args: Any, **options: Any) -> Asking:
        made.append(Asking(*args, **options))
        return made[-1]

    yield make
    for one in made:
        one.engine.close()


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> PagePool:
    """As while an engine is open, with nothing kept."""
    from agentcache import page_memory

    fresh = page_memory.PagePool()
    fresh.open(1 << 40)
    monkeypatch.setattr(page_memory, "pool", fresh)
    return fresh
