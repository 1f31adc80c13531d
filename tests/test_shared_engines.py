"""`Engine.shared`: one engine per model and options in a process, closed with the last lease on it."""

from __future__ import annotations

import copy
import gc
import multiprocessing
import os
import pickle
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from agentcache import Engine, EngineLease, shared_engines
from agentcache.errors import ModelLoadError
from tests import models
from tests.engines import MB, chat, decode

Shared = Callable[..., Engine]


@pytest.fixture
def shared(model_folder: Path) -> Shared:
    """shared(lease, memory_bytes=...): the engine of the session's model folder."""
    return lambda lease, **options: Engine.shared(str(model_folder), lease=lease, **{"store": None, "memory_bytes": 32 * MB, **options})


def test_the_last_release_closes(shared: Shared) -> None:
    one, other = EngineLease(), EngineLease()
    engine = shared(one)
    assert shared(other) is engine
    assert shared(one) is engine, "asking again is no further use"
    one.release()
    one.release()
    assert not engine.closed
    assert engine.generate(chat("?"), sampling=decode(1)).ids
    other.release()
    assert engine.closed


def test_a_lease_serves_again_after_its_release(shared: Shared) -> None:
    with EngineLease() as lease:
        first = shared(lease)
    assert first.closed
    with lease:
        assert shared(lease) is not first
        assert shared(lease).generate(chat("?"), sampling=decode(1)).ids


def test_other_options_are_another_engine(shared: Shared) -> None:
    with EngineLease() as lease:
        assert shared(lease, memory_bytes=33 * MB) is not shared(lease)
        assert shared(lease, dtype="float32") is shared(lease, dtype=torch.float32), "one type, said in two ways"
        assert shared(lease, token="hf_x") is shared(lease, token="hf_y") is shared(lease), "a token changes no weights"


def test_a_loaded_model_is_shared_by_identity() -> None:
    model, tokenizer = models.build("qwen3"), models.toy_tokenizer()
    with EngineLease() as one, EngineLease() as other:
        engine = Engine.shared(model, tokenizer, lease=one, store=None)
        assert Engine.shared(model, tokenizer, lease=other, store=None) is engine
        assert Engine.shared(model, models.toy_tokenizer(), lease=other, store=None) is not engine


def test_a_subclass_is_another_engine(model_folder: Path) -> None:
    class Own(Engine):
        pass

    with EngineLease() as lease:
        made = Own.shared(str(model_folder), lease=lease, store=None)
        assert type(made) is Own
        assert type(Engine.shared(str(model_folder), lease=lease, store=None)) is Engine


def test_threads_that_ask_at_once_load_once(shared: Shared, monkeypatch: pytest.MonkeyPatch) -> None:
    leases, found = [EngineLease() for _ in range(6)], []
    made: list[Engine] = []
    original = Engine.__init__
    monkeypatch.setattr(Engine, "__init__", lambda self, *given, **options: made.append(self) or original(self, *given, **options))
    threads = [threading.Thread(target=lambda lease=lease: found.append(shared(lease))) for lease in leases]  # type: ignore[misc]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1
    assert len(set(found)) == 1
    for lease in leases:
        lease.release()
    assert found[0].closed


def test_what_cannot_be_loaded_is_tried_again(tmp_path: Path, shared: Shared) -> None:
    with EngineLease() as lease:
        for _ in range(2):
            with pytest.raises(ModelLoadError):
                Engine.shared(str(tmp_path / "nothing"), lease=lease, store=None)
        assert shared(lease)


def test_an_engine_that_its_user_closed_is_made_anew(shared: Shared) -> None:
    with EngineLease() as one, EngineLease() as other:
        first = shared(one)
        first.close()
        second = shared(other)
        assert second is not first
        one.release()
        assert not second.closed


def test_copies_and_pickles_are_further_users(shared: Shared) -> None:
    lease = EngineLease()
    engine = shared(lease)
    for again in (copy.copy(lease), copy.deepcopy([lease])[0], pickle.loads(pickle.dumps(lease))):
        assert again.join(engine)
        lease.release()
        assert not engine.closed, "the copy uses it"
        lease.join(engine)
        again.release()
        assert not engine.closed
    lease.release()
    assert engine.closed


def test_an_engine_of_its_owner_is_not_joined(model_folder: Path) -> None:
    with Engine(str(model_folder), store=None) as engine, EngineLease() as lease:
        assert not EngineLease.is_shared(engine)
        assert not lease.join(engine)
        lease.release()
        assert not engine.closed


def test_a_lease_that_is_collected_is_no_user(shared: Shared) -> None:
    gone, stays = EngineLease(), EngineLease()
    engine = shared(gone)
    assert shared(stays) is engine
    del gone
    stays.release()
    assert engine.closed


def test_an_engine_goes_with_its_last_user(shared: Shared) -> None:
    lease = EngineLease()
    engine = weakref.ref(shared(lease))
    gc.collect()
    assert engine() is not None, "the lease holds it"
    del lease
    gc.collect()
    assert engine() is None


class Slow:
    """An engine whose making, in one process, takes until it is told to end."""

    closed = False
    process = os.getpid()
    began, end = threading.Event(), threading.Event()

    def __init__(self, *given: Any) -> None:
        if os.getpid() == self.process:
            self.began.set()
            self.end.wait()

    def close(self) -> None:
        """Nothing to close."""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes do not fork here")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_makes_its_own(shared: Shared) -> None:
    def slow() -> Slow:
        return shared_engines.shared_engine(Slow, "slow", None, EngineLease(), {})

    with EngineLease() as lease:
        engine = shared(lease)
        expected = engine.generate(chat("?"), sampling=decode(2)).ids

        def answered() -> Any:
            own = shared(lease)
            return slow().closed, own is not engine, own.generate(chat("?"), sampling=decode(2)).ids

        fork = multiprocessing.get_context("fork")
        mine, its = fork.Pipe(duplex=False)
        loading = threading.Thread(target=slow)
        loading.start()
        Slow.began.wait()
        child = fork.Process(target=lambda: its.send(answered()))
        with shared_engines._lock:  # other threads of the parent load, and look up: what they hold is nobody's in the child
            child.start()
        Slow.end.set()
        loading.join()
        try:
            assert mine.poll(30), "the child hangs"
            assert mine.recv() == (False, True, expected)
        finally:
            child.kill()
            child.join()
        assert engine.generate(chat("?"), sampling=decode(2)).ids == expected, "the parent's goes on"
