"""The memory of the next page: zero, taken once, whatever of it is committed."""

from __future__ import annotations

import gc
import time
from typing import Any
from unittest import mock

import pytest
import torch

from agentcache import Engine, Sampling, page_memory
from agentcache.kv import Page
from agentcache.kv_spec import KVSpec
from agentcache.page_memory import PIECE_BYTES, PagePool, PreparedPages, prepared

SHAPES = ((2, 1, 32, 512), (2, 1, 512, 32))


def test_a_page_is_committed_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentcache.page_memory.PIECE_BYTES", 20_000)
    kept = PreparedPages()
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
    prepared.step(spec.shapes, spec.dtype)  # a piece of it is as good as all
    first, second = Page(spec), Page(spec)
    assert first.keys.data_ptr() != second.keys.data_ptr()
    first.keys.fill_(1)
    assert not second.keys.any()
    assert not second.values.any()


def spoilt(spec: KVSpec, whole: bool = False) -> Page:
    page = Page(spec, whole=whole)
    page.keys.fill_(float("nan"))
    page.values.fill_(float("inf"))
    return page


def test_freed_page_memory_serves_the_next_and_is_zero(pool: PagePool) -> None:
    spec = KVSpec(2, 1, 32, torch.bfloat16)
    page = spoilt(spec)
    places = {page.keys.data_ptr(), page.values.data_ptr()}
    assert pool.bytes == 0
    del page
    assert pool.bytes == spec.page_bytes
    again = Page(spec)
    assert {again.keys.data_ptr(), again.values.data_ptr()} == places
    assert pool.bytes == 0
    assert not again.keys.any()
    assert not again.values.any()


def test_memory_that_somebody_looks_at_is_not_taken(pool: PagePool) -> None:
    spec = KVSpec(2, 1, 32, torch.bfloat16)
    page = spoilt(spec)
    layer, raw = page.layer_keys[1], page.values.view(torch.uint8).numpy()
    del page
    assert pool.bytes == 0
    del layer
    assert pool.bytes == spec.page_bytes // 2
    assert raw.any()
    del raw
    assert pool.bytes == spec.page_bytes


def test_the_pool_keeps_its_bound_and_ends_with_engines(pool: PagePool, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = KVSpec(2, 1, 32, torch.bfloat16)
    monkeypatch.setattr(page_memory, "USED_BYTES", spec.page_bytes * 3 // 2)
    pages = [spoilt(spec), spoilt(spec)]
    pages.clear()
    assert pool.bytes == spec.page_bytes * 3 // 2
    pool.close(1 << 40)
    assert pool.bytes == 0
    page = spoilt(spec)
    del page
    assert pool.bytes == 0


def test_the_pool_keeps_a_quarter_of_what_engines_may() -> None:
    spec = KVSpec(2, 1, 32, torch.bfloat16)
    part = spec.page_bytes // 2  # keys, or values
    with mock.patch.object(page_memory, "pool", PagePool()) as pool:
        for budget in (3, 4):
            pool.open(budget * part)
        pages = [spoilt(spec), spoilt(spec)]
        pages.clear()
        assert pool.bytes == part
        pool.open(9 * part)
        pages = [spoilt(spec) for _ in range(5)]
        pages.clear()
        assert pool.bytes == 4 * part
        for budget in (4, 3):
            pool.close(budget * part)
        assert pool.bytes == 4 * part, "of an engine that is open"


def test_pages_that_are_read_to_whole_take_other_memory(pool: PagePool) -> None:
    """They will lie in the blob's own: zeroing would be for nothing."""
    spec = KVSpec(2, 1, 32, torch.bfloat16)
    page = spoilt(spec)
    del page
    Page(spec, whole=True)
    assert pool.bytes == 2 * spec.page_bytes


def test_an_idle_engine_prepares_a_page_until_closed() -> None:
    with Engine("embedded", store=None) as engine:
        spec = engine.model.spec
        assert spec is not None
        engine.generate("Hello", sampling=Sampling(max_tokens=2))
        until = time.monotonic() + 30
        while prepared.lacks(spec.shapes, spec.dtype) and time.monotonic() < until:
            time.sleep(0.01)
        assert not prepared.lacks(spec.shapes, spec.dtype)
        again = engine.generate("Hello", sampling=Sampling(max_tokens=2))
        assert again.text
    assert prepared.take(spec.shapes, spec.dtype) is None


def test_without_memory_an_idle_engine_prepares_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> torch.Tensor:
        raise OSError(12, "Cannot allocate memory")

    kept = PreparedPages()
    monkeypatch.setattr("agentcache.page_memory.zeros", refuse)
    kept.step(SHAPES, torch.bfloat16)
    assert not kept.lacks(SHAPES, torch.bfloat16)  # else it would be tried without end
    kept.step(SHAPES, torch.bfloat16)
    assert kept.take(SHAPES, torch.bfloat16) is None
    assert kept.lacks(SHAPES, torch.bfloat16)  # for the next page it is worth another try
    with Engine("embedded", store=None) as engine:
        assert engine.generate("Hello", sampling=Sampling(max_tokens=2)).receipt.computed_tokens
        assert engine.generate("Again", sampling=Sampling(max_tokens=2)).receipt.computed_tokens


def test_a_memory_profiler_ends_no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, zeros = [], page_memory.zeros

    def profiled(*given: Any) -> torch.Tensor:  # as from another thread, while memory is allocated
        seen.append(gc.get_objects())
        return zeros(*given)

    monkeypatch.setattr(page_memory, "zeros", profiled)
    PreparedPages().step(SHAPES, torch.bfloat16)
    assert len(seen) == len(SHAPES)
