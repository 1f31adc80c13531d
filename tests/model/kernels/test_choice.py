"""Kernels are chosen by time, once for a machine: what is clearly faster, found again by later processes, with bits of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from agentcache.model import machine_report, numerics
from agentcache.model.hf import HFModel
from agentcache.model.kernels import choice, jit
from tests import models
from tests.families import Run, differing, tokens

pytestmark = [
    pytest.mark.usefixtures("compiled_anew"),
    pytest.mark.skipif(jit.compiler() is None or len(choice.candidates(torch.float32)) == 1, reason="nothing to choose from"),
]
FP32 = torch.float32


@pytest.fixture(autouse=True)
def forgetful() -> Iterator[None]:
    for known in (choice.times, numerics._probe):
        known.cache_clear()
    yield
    for known in (choice.times, numerics._probe):
        known.cache_clear()


def timed(monkeypatch: pytest.MonkeyPatch, **ms: float) -> list[torch.dtype]:
    """Measurements have these results; returns the types that were measured."""
    measured: list[torch.dtype] = []
    monkeypatch.setattr(choice, "_measured", lambda found, dtype: measured.append(dtype) or ms)
    return measured


@pytest.mark.parametrize(("library", "chosen"), [(6.9, "library"), (7.1, "onednn"), (20.0, "onednn")])
def test_another_kernel_is_chosen_where_it_is_clearly_faster(library: float, chosen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    timed(monkeypatch, onednn=10.0, library=library)
    assert choice.choose(FP32) == chosen
    assert machine_report.describe()["float32"]["kernels_ms"] == {"onednn": 10.0, "library": library}


def test_later_processes_find_the_measurement_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTCACHE_DIR", str(tmp_path / "store"))
    measured = timed(monkeypatch, onednn=10.0, library=5.0)
    assert choice.choose(FP32) == "library"
    choice.times.cache_clear()  # as in a later process
    assert (choice.choose(FP32), measured) == ("library", [FP32])
    monkeypatch.setattr(choice, "level", lambda: "another processor")
    choice.times.cache_clear()
    assert (choice.choose(FP32), measured) == ("library", [FP32, FP32])
    monkeypatch.setenv("AGENTCACHE_DIR", "")
    choice.times.cache_clear()
    assert (choice.choose(FP32), measured) == ("library", [FP32] * 3)


def test_the_measurement_is_short_and_of_all_candidates() -> None:
    began = choice.time.perf_counter()
    found = choice.times(FP32, torch.get_num_threads())
    assert choice.time.perf_counter() - began < 5  # half a second on a machine that does nothing else
    assert set(found) == set(choice.candidates(FP32))
    assert min(found.values()) > 0


def test_each_kernel_has_its_digest_and_bits_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, Any] = {}
    for kernel, ms in (("onednn", 20.0), ("library", 1.0)):
        timed(monkeypatch, onednn=10.0, library=ms)
        choice.times.cache_clear()
        numerics._probe.cache_clear()
        held, ids = HFModel(models.build("qwen3")), tokens(200)
        assert held.numerics is not None
        assert (held.numerics.kernel, held.bitwise) == (kernel, True)
        whole = Run(held, ids).chunks()
        assert not differing(whole, Run(held, ids).chunks(1, 2, 3, 90))
        found[held.numerics.digest] = held.fingerprint and held.fingerprint.whole
        held.close()
    assert len(found) == len(set(found.values())) == 2
