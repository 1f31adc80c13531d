"""Pages of fewer bits through the engine: only by consent, always said, and never a way back into what is exact."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from agentcache import Engine, Reason
from agentcache.model.hf import HFModel
from agentcache.types import StoreOptions
from benchmarks.drift import drift
from tests import models
from tests.engines import Spy, chat, check_store, decode, engine, long_text
from tests.families import tokens

TURNS = chat(long_text(230))
PRECISIONS = pytest.mark.parametrize("precision", ["int8", "int4"])


@pytest.fixture(scope="module")
def model() -> Any:
    return models.build("qwen3", num_hidden_layers=2)


def rows(running: Engine) -> list[tuple[bytes, str]]:
    assert running.flush()
    assert running.store.disk
    return sorted((row.page_key, row.precision) for row in running.store.disk.index.rows())


def scopes(running: Engine) -> dict[str, int]:
    """Tokens that memory holds, by how exact they are."""
    found: dict[str, int] = {}
    for entry in running.store.tree.entries():
        found[entry.scope.precision] = found.get(entry.scope.precision, 0) + len(entry.ids)
    return found


@PRECISIONS
def test_lossy_pages_serve_by_consent_only(model: Any, tmp_path: Path, precision: Any) -> None:
    options = StoreOptions(tmp_path / "store", precision=precision, check_one_in=1)
    with engine(model=model, store=options) as first:
        spy = Spy(first)
        off = first.generate(TURNS, sampling=decode(), reuse="off")
        wanted = list(spy.logits)
        first.generate(TURNS, sampling=decode())
        assert {kind for _, kind in rows(first)} == {precision}
        in_memory = first.generate(TURNS, sampling=decode(), reuse="lossy").receipt
        assert (in_memory.precision, in_memory.disk_tokens, in_memory.bitwise) == ("exact", 0, True), "the exact pages are nearer"
        size = first.store.disk.index.total()[1]
        assert size < first.store.bytes
    with engine(model=model, store=options) as second:
        spy = Spy(second)
        before = rows(second)
        exact = second.generate(TURNS, sampling=decode())
        assert exact.ids == off.ids
        assert (exact.receipt.cached_tokens, exact.receipt.disk_tokens, exact.receipt.precision) == (0, 0, "exact")
        assert exact.receipt.bitwise
        assert all(torch.equal(a, b) for a, b in zip(wanted, spy.logits, strict=True))
        assert rows(second) == before, "known as " + precision
    with engine(model=model, store=options) as third:
        spy = Spy(third)
        near = third.generate(TURNS, sampling=decode(forced=off.ids), reuse="lossy").receipt
        assert near.disk_tokens == near.cached_tokens > 1000
        assert (near.precision, near.bitwise, near.exact_until) == (precision, False, 0)
        (refusal,) = [refusal for refusal in near.refusals if refusal.reason == Reason.LOSSY]
        assert (refusal.start, refusal.stop) == (0, near.cached_tokens)
        assert precision in refusal.detail
        assert not any(torch.equal(a, b) for a, b in zip(wanted, spy.logits, strict=True)), "these are not the exact pages"
        assert rows(third) == before, "nothing computed behind lossy pages goes to disk"
        assert set(scopes(third)) == {precision}
        longer = [*TURNS, {"role": "assistant", "content": "x"}, {"role": "user", "content": long_text(20, 3)}]
        grown = third.generate(longer, sampling=decode(), reuse="lossy").receipt
        assert grown.precision == precision
        assert grown.cached_tokens > 1000
        assert rows(third) == before
        spy.logits.clear()
        exact = third.generate(TURNS, sampling=decode())
        assert exact.receipt.cached_tokens == 0, "lossy pages in memory are lent to nobody who is exact"
        assert exact.ids == off.ids
        assert all(torch.equal(a, b) for a, b in zip(wanted, spy.logits, strict=True))
        check_store(third.store)
        assert third.scheduler.hit_audit.checked_tokens == 0, "lossy hits are not compared with exact ones"


@pytest.mark.parametrize("turns", ["exact", "int8"])  # none of which are stored in fewer bits yet
def test_an_exact_store_serves_lossy_requests_exactly(model: Any, tmp_path: Path, turns: Any) -> None:
    options = StoreOptions(tmp_path / "store", turns=turns)
    with engine(model=model, store=options) as first:
        ids = first.generate(TURNS, sampling=decode()).ids
    with engine(model=model, store=options, reuse="lossy") as second:
        done = second.generate(TURNS, sampling=decode())
        assert done.ids == ids
        assert done.receipt.disk_tokens > 1000
        assert (done.receipt.precision, done.receipt.bitwise) == ("exact", True)
        assert {kind for _, kind in rows(second)} == {"exact"}


def test_exact_pages_of_an_earlier_setting_stay_exact(model: Any, tmp_path: Path) -> None:
    with engine(model=model, store=tmp_path / "store") as first:
        ids = first.generate(TURNS, sampling=decode()).ids
    with engine(model=model, store=StoreOptions(tmp_path / "store", precision="int8")) as second:
        done = second.generate(TURNS, sampling=decode())
        assert done.ids == ids
        assert done.receipt.disk_tokens > 1000
        assert (done.receipt.precision, done.receipt.bitwise) == ("exact", True)


def test_drift_is_small_and_smaller_with_more_bits() -> None:
    model = HFModel(models.build("qwen3", torch.bfloat16, num_hidden_layers=2, initializer_range=0.05))
    ids, tail = tokens(1100), tokens(40, seed=1)
    eight, four = (drift(model, ids, tail, precision) for precision in ("int8", "int4"))
    assert eight.tokens == four.tokens == 40
    assert 0 < eight.mean_kl < four.mean_kl < 0.1
    assert eight.mean_kl <= eight.most_kl < 0.01
    assert eight.top1_agreement >= 0.9  # of 40 tokens of a random model, some of whose choices are close
    assert four.top1_agreement >= 0.7
    model.close()
