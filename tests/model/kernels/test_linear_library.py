"""Packed copies of fp32 weights: bits, edits, memory."""

from __future__ import annotations

import errno
import os
from types import SimpleNamespace

import pytest
import torch

from agentcache.model.kernels import dispatch, jit, linear_library

pytestmark = pytest.mark.skipif(not linear_library.packing_agrees(torch.get_num_threads()), reason="no packed weights here")


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit, "compiler", lambda: None)
    linear_library.forget()


def test_few_packed_rows_have_the_bits_of_many(uncompiled: None) -> None:
    torch.manual_seed(3)
    weight, bias, x = torch.nn.Parameter(torch.randn(320, 704)), torch.randn(320), torch.randn(64, 704)
    full = dispatch.linear("onednn", x, weight, bias)
    assert not len(linear_library._packed)
    for rows in linear_library.FEW_ROWS:
        assert torch.equal(dispatch.linear("onednn", x[:rows], weight, bias), full[:rows])
    dispatch.linear("onednn", x[:2], weight[:160])  # a cut of a weight lives no longer than its product
    assert [made.is_mkldnn for _, made in linear_library._packed.values()] == [True]


@pytest.mark.parametrize("forgotten", [False, True])
def test_packed_weights_follow_edits(forgotten: bool, uncompiled: None) -> None:
    torch.manual_seed(3)
    weight, x = torch.nn.Parameter(torch.randn(320, 704)), torch.randn(2, 704)
    before = dispatch.linear("onednn", x, weight).detach()
    with torch.no_grad():
        (weight.data if forgotten else weight).mul_(2)
    if forgotten:  # torch does not count it
        linear_library.forget()
    assert torch.equal(dispatch.linear("onednn", x, weight), 2 * before)
    weight.data = weight.data * 2
    assert torch.equal(dispatch.linear("onednn", x, weight), 4 * before)


def test_weights_are_not_packed_when_memory_is_short(uncompiled: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_library.psutil, "virtual_memory", lambda: SimpleNamespace(available=1 << 20, total=1 << 30))
    assert not linear_library.packed(torch.randn(320, 704)).is_mkldnn


def test_weights_are_used_as_they_are_where_no_file_opens(uncompiled: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), "/proc/meminfo")

    monkeypatch.setattr(linear_library.psutil, "virtual_memory", refuse)
    assert not linear_library.packed(torch.randn(320, 704)).is_mkldnn
