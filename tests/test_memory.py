"""The memory of the next page: zero, taken once, whatever of it is committed."""

from __future__ import annotations

import time

import pytest
import torch

from agentcache import Engine, Sampling
from agentcache.kv import KVSpec, Page
from agentcache.memory import PIECE_BYTES, Ready, ready

SHAPES = ((2, 1, 32, 512), (2, 1, 512, 32))


def test_a_page_is_committed_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentcache.memory.PIECE_BYTES", 20_000)
    kept = Ready()
    assert kept.take(SHAPES, torch.bfloat16) is None
    steps = 0
    while kept.lacks(SHAPES, torch.bfloat16):
        kept.step(SHAPES, torch.bfloat16)
        steps += 1
    assert steps == 2 * -(-2 * 32 * 512 * 2 // 20_000)
    kept.step(SHAPES, torch.bfloat16)  # nothing left: nothing happens
    found = kept.take(SHAPES, torch.bfloat16)
    assert found is not None
    assert [tuple(tensor.shape) for tensor in found] == list(SHAPES)
    assert not any(tensor.any() for tensor in found)
    assert kept.take(SHAPES, torch.bfloat16) is None
    assert kept.lacks(SHAPES, torch.float16)
    assert PIECE_BYTES > 0


def test_a_page_takes_what_is_ready_once() -> None:
    spec = KVSpec(2, 1, 32, torch.bfloat16)
    ready.step(spec.shapes, spec.dtype)  # a piece of it is as good as all
    first, second = Page(spec), Page(spec)
    assert first.keys.data_ptr() != second.keys.data_ptr()
    first.keys.fill_(1)
    assert not second.keys.any()
    assert not second.values.any()


def test_an_idle_engine_makes_its_next_page_ready_and_a_closed_one_keeps_nothing() -> None:
    with Engine("embedded", store=None) as engine:
        spec = engine.model.spec
        assert spec is not None
        engine.generate("Hello", sampling=Sampling(max_tokens=2))
        until = time.monotonic() + 30
        while ready.lacks(spec.shapes, spec.dtype) and time.monotonic() < until:
            time.sleep(0.01)
        assert not ready.lacks(spec.shapes, spec.dtype)
        again = engine.generate("Hello", sampling=Sampling(max_tokens=2))
        assert again.text
    assert ready.take(spec.shapes, spec.dtype) is None


def test_without_memory_for_it_nothing_is_ready_and_an_idle_engine_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> torch.Tensor:
        raise OSError(12, "Cannot allocate memory")

    kept = Ready()
    monkeypatch.setattr("agentcache.memory.zeros", refuse)
    kept.step(SHAPES, torch.bfloat16)
    assert not kept.lacks(SHAPES, torch.bfloat16)  # else it would be tried without end
    kept.step(SHAPES, torch.bfloat16)
    assert kept.take(SHAPES, torch.bfloat16) is None
    assert kept.lacks(SHAPES, torch.bfloat16)  # for the next page it is worth another try
    with Engine("embedded", store=None) as engine:
        assert engine.generate("Hello", sampling=Sampling(max_tokens=2)).receipt.computed_tokens
        assert engine.generate("Again", sampling=Sampling(max_tokens=2)).receipt.computed_tokens
