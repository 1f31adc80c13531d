"""An engine in a process that was forked after loading: refused by name, harmless to its parent, and replaced by another one."""

from __future__ import annotations

import asyncio
import gc
import importlib
import os
import sys
from collections.abc import Callable, Iterator
from multiprocessing.context import ForkProcess
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import pytest
import torch

from agentcache import Engine, StoreOptions
from agentcache.errors import EngineClosedError, EngineForkedError
from agentcache.model.fingerprint import Fingerprint
from agentcache.page_memory import pool, prepared
from tests import models
from tests.engines import MB, chat, decode
from tests.engines import engine as engine_of
from tests.store.index_rows import FORK, forks

LIMIT_S = 60.0  # a child that waits for a thread of its parent never ends
LARGE = 700  # rows of a product that PyTorch shares among threads

pytestmark = forks


def told(work: Callable[[], Any]) -> Any:
    """What `work` returns in a forked child, or the error it raises there, as a pool of processes gets it; a child that hangs is killed."""
    mine, its = FORK.Pipe(duplex=False)

    def run() -> None:
        try:
            its.send(work())
        except (EngineClosedError, AssertionError) as error:
            its.send(error)

    child: ForkProcess = FORK.Process(target=run)
    child.start()
    its.close()
    try:
        assert mine.poll(LIMIT_S), "the child hangs"
        found = mine.recv()
        child.join(LIMIT_S)
        assert child.exitcode == 0
    finally:
        if child.is_alive():
            child.kill()
            child.join()
        mine.close()
    return found


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """With a store, a pinned group, and a device thread that has computed."""
    with engine_of(store=StoreOptions(tmp_path_factory.mktemp("store"), refuse_slow=False)) as engine:
        engine.warm("You answer in one word. " * 30, name="clerk")
        engine.generate(chat("hello"), sampling=decode(4))
        engine.flush()
        yield engine


@pytest.mark.parametrize(
    "ask",
    [
        lambda engine: engine.generate(chat("hello"), sampling=decode(4)),
        lambda engine: engine.stream("hello"),
        lambda engine: engine.warm("You answer."),
        lambda engine: engine.pin(chat("hello")),
    ],
    ids=["generate", "stream", "warm", "pin"],
)
def test_a_forked_childs_request_is_refused_with_a_way_out(parent: Engine, ask: Callable[[Engine], Any]) -> None:
    error = told(lambda: ask(parent))
    assert isinstance(error, EngineForkedError)
    assert isinstance(error, EngineClosedError)
    for word in (str(os.getpid()), "post_fork", "worker_process_init", "initializer=", "'spawn'"):
        assert word in str(error)


def test_no_lock_of_the_parent_is_waited_for(parent: Engine) -> None:
    """Another thread may hold any of them while the process forks."""
    with parent.renderer._prefixes._lock, parent.renderer._memory._lock, parent.scheduler._gate, parent.store.disk.writer._changed:  # type: ignore[union-attr]
        assert isinstance(told(lambda: parent.generate("hello")), EngineForkedError)
        assert told(lambda: (parent.flush(), parent.release("clerk"), parent.close(), parent.closed)) == (False, False, None, True)


def test_a_parents_stream_ends_in_the_child(parent: Engine) -> None:
    def read_async() -> None:
        async def read() -> None:
            async for _ in stream:
                pass

        asyncio.run(read())

    with parent.stream("hello", sampling=decode(400)) as stream:
        next(stream)
        assert isinstance(told(lambda: list(stream)), EngineForkedError)
        assert isinstance(told(read_async), EngineForkedError)
    assert parent.generate("hello", sampling=decode(2)).ids


def test_what_the_child_does_leaves_the_parent_as_it_was(tmp_path: Path) -> None:
    options = StoreOptions(tmp_path / "store", refuse_slow=False)
    with engine_of(store=options) as engine:
        engine.warm("You answer in one word. " * 200, name="clerk")
        before = engine.generate(chat("hello"), sampling=decode(6)).ids
        assert engine.flush()  # what is written from here on is not the child's doing
        disk = engine.store.disk
        assert disk is not None
        pinned, files = disk.index.pinned(), sorted(str(path) for path in disk.folder.blobs.rglob("*"))
        assert pinned
        assert files
        held: list[Engine] = [engine]

        def leave() -> None:
            held[0].close()
            held.clear()
            gc.collect()

        told(leave)
        assert told(lambda: engine.closed) is True
        assert disk.index.pinned() == pinned
        assert sorted(str(path) for path in disk.folder.blobs.rglob("*")) == files
        assert not engine.closed
        assert [group.name for group in engine.groups] == ["clerk"]
        after = engine.generate(chat("hello"), sampling=decode(6))
        assert after.ids == before
        assert engine.flush()


def test_a_new_engine_in_the_child_works(parent: Engine, tmp_path: Path) -> None:
    """Also where the forking thread has a team of OpenMP threads, and where locks of the whole process were held."""
    tokenizer, folder = models.toy_tokenizer(), tmp_path / "child"
    expected = parent.generate(chat("hello"), sampling=decode(6)).ids

    def work() -> tuple[Any, ...]:
        with Engine(models.build("qwen3"), tokenizer, memory_bytes=64 * MB, store=StoreOptions(folder, refuse_slow=False)) as engine:
            return engine.generate(chat("hello"), sampling=decode(6)).ids, engine.flush(), engine.fingerprint.whole  # type: ignore[union-attr]

    torch.mm(torch.ones(LARGE, LARGE), torch.ones(LARGE, LARGE))
    with prepared._lock, pool._lock:
        assert told(work) == (expected, True, parent.fingerprint.whole)  # type: ignore[union-attr]


def test_a_child_that_closes_as_it_ends_writes_its_pages(parent: Engine, tmp_path: Path) -> None:
    """It ends by `os._exit`, which runs no exit handlers: docs/fork.md says what to write."""
    tokenizer, options = models.toy_tokenizer(), StoreOptions(tmp_path / "child", refuse_slow=False)
    kept = []  # as by a worker's global: no garbage collection closes it

    def work() -> bool:
        engine = Engine(models.build("qwen3"), tokenizer, memory_bytes=64 * MB, store=options)
        kept.append(engine)
        Finalize(None, engine.close, exitpriority=1)
        return bool(engine.generate(chat("hello"), sampling=decode(6)).ids)

    assert told(work)
    with engine_of(store=options) as engine:
        assert engine.generate(chat("hello"), sampling=decode(6)).receipt.cached_tokens


def test_hooks_of_two_forked_workers_have_two_names() -> None:
    """What only identity tells apart is no other worker's: neither reads the other's pages."""

    def work(factor: float) -> str:
        model = models.build("llama")
        model.model.layers[0].mlp.register_forward_hook(lambda module, args, output: output * factor)
        return Fingerprint(model, "aten").whole

    assert told(lambda: work(1.5)) != told(lambda: work(-4.0))


def test_an_engine_that_is_imported_in_the_child_works() -> None:
    """The forking thread has a team, and no code of ours knows that the process was forked."""
    if torch.get_num_threads() < 2:
        pytest.skip("one thread has no team")
    model, tokenizer = models.build("qwen3", torch.bfloat16), models.toy_tokenizer()

    def work() -> int:
        for name in [name for name in sys.modules if name.partition(".")[0] == "agentcache"]:
            del sys.modules[name]
        agentcache = importlib.import_module("agentcache")
        with agentcache.Engine(model, tokenizer, memory_bytes=64 * MB, store=None) as engine:
            return len(engine.generate("hello", sampling=agentcache.Sampling(max_tokens=3)).ids)

    torch.mm(torch.ones(LARGE, LARGE), torch.ones(LARGE, LARGE))
    assert told(work) == 3
