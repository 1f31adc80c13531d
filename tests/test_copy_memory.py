"""Copies of states take memory that an idle engine committed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from agentcache import Sampling, copy_memory, page_memory
from agentcache.copy_memory import CopyMemory
from agentcache.page_memory import PagePool
from tests.asking import Asking
from tests.engines import wait_until

STATE = torch.randn(2, 300, 300)
BYTES = STATE.numel() * 4


def test_copies_take_what_an_idle_engine_committed(pool: PagePool) -> None:
    memory = CopyMemory()
    copies = [memory.copied(STATE) for _ in range(3)]
    assert pool.bytes == 0
    while memory.pending:
        memory.step()
    assert pool.bytes == 3 * BYTES
    again = memory.copied(STATE)
    assert pool.bytes == 2 * BYTES
    assert all(torch.equal(copy, STATE) for copy in (*copies, again))
    assert not memory.pending  # one copy since: two maps are enough
    del copies, again
    assert pool.bytes == 6 * BYTES  # what is gone serves the next, too


def test_what_is_committed_for_copies_is_bounded(pool: PagePool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_memory, "READY_BYTES", 2 * BYTES)
    memory = CopyMemory()
    copies = [memory.copied(STATE) for _ in range(5)]
    while memory.pending:
        memory.step()
    assert pool.bytes == 2 * BYTES
    pool.take(BYTES)
    assert memory.pending
    monkeypatch.setattr(page_memory, "USED_BYTES", 0)
    memory.step()
    assert not memory.pending  # else an idle engine would try without end
    assert len(copies) == 5


def test_small_and_spread_tensors_are_cloned(pool: PagePool) -> None:
    memory = CopyMemory()
    for tensor in (torch.randn(3), torch.randn(400, 300).T):
        copy = memory.copied(tensor)
        assert torch.equal(copy, tensor)
        assert copy.stride() == tensor.stride()
    assert not memory.pending


def test_an_idle_engine_commits_memory_for_states(asking: Callable[..., Asking], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(copy_memory, "SMALL_BYTES", 1)
    engine = asking("qwen3_5_text", tmp_path / "store").engine
    engine.generate("Hello " * 80, sampling=Sampling(max_tokens=2))
    wait_until(lambda: not copy_memory.copies.pending)
    assert page_memory.pool.bytes
    assert engine.generate("Hello " * 80, sampling=Sampling(max_tokens=2)).receipt.cached_tokens
