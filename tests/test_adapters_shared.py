"""Pages that lie over the lowest layers of others: what becomes of them when those are evicted, deleted or found wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from agentcache import Engine, Reason, StoreOptions
from tests.engines import chat, decode, engine, long_text
from tests.saved_adapters import answer, same, save

PROMPT = chat(long_text(160))


@pytest.fixture
def upper(tmp_path: Path) -> Path:
    """An adapter of the highest layer."""
    return save(tmp_path / "upper", layers_to_transform=[2])


def entries(running: Engine, adapter: str | None) -> list[Any]:
    """Pages in memory that an adapter computed, root first."""
    digest = "" if adapter is None else running.adapters[adapter]
    return sorted((e for e in running.store.tree.entries() if e.scope.adapter == digest), key=lambda entry: entry.place)


def drop_base(running: Engine) -> None:
    """Evict the base's pages, the last one first."""
    for entry in reversed(entries(running, None)):
        with running.store.tree.lock:
            running.store.tree.eviction._drop(entry)


def quarantine_base(running: Engine) -> None:
    first = entries(running, None)[0]
    running.store.quarantine(first.scope, first.ids, first.key, "wrong")


def forget_base(running: Engine) -> None:
    running.forget(group="base")


WAYS = {"evicted": drop_base, "deleted": forget_base}


@pytest.mark.parametrize("running_then", [False, True])
@pytest.mark.parametrize("how", WAYS)
def test_answers_survive_the_loss_of_the_pages_below(how: str, running_then: bool, upper: Path, tmp_path: Path) -> None:
    options = StoreOptions(tmp_path / "store", refuse_slow=False)
    more = chat(long_text(160), "Yes.", "Why?")
    with engine(store=options) as running:
        running.add_adapter("a", upper)
        running.pin(PROMPT, name="base")
        expected = {name: [answer(running, asked, name, "off")[0] for asked in (PROMPT, more)] for name in (None, "a")}
        spent = bytes_of(running)
        if running_then:
            with running.stream(PROMPT, adapter="a", sampling=decode(4)) as stream:
                first = next(stream)
                WAYS[how](running)
                ids = [*first.ids, *(token for chunk in stream for token in chunk.ids)]
            assert tuple(ids) == expected["a"][0][0]
        else:
            answer(running, PROMPT, "a")
            assert running.flush()
            WAYS[how](running)
        assert not entries(running, None)
        held = [entry.page for entry in entries(running, "a")]
        bytes_of(running)
        assert spent or not held
        for name in ("a", None, "a"):
            for asked, wanted in zip((PROMPT, more), expected[name]):
                assert same(answer(running, asked, name)[0], wanted)
        bytes_of(running)
    with engine(store=options) as later:
        later.add_adapter("a", upper)
        for name in ("a", None):
            assert same(answer(later, more, name)[0], expected[name][1])
        bytes_of(later)


@pytest.mark.parametrize("running_then", [False, True])
def test_pages_over_a_wrong_one_are_never_used_again(running_then: bool, upper: Path, tmp_path: Path) -> None:
    options = StoreOptions(tmp_path / "store", refuse_slow=False)
    with engine(store=options) as running:
        running.add_adapter("a", upper)
        expected = {name: answer(running, PROMPT, name, "off")[0] for name in (None, "a")}
        answer(running, PROMPT, None)
        assert running.flush(), "a page that still waits to be written is dropped, not quarantined"
        entries(running, None)[0].page.layer_values[0].add_(1.0)
        with running.stream(PROMPT, adapter="a", sampling=decode(4)) as stream:
            next(stream)
            if running_then:
                quarantine_base(running)
            for _ in stream:
                pass
        assert running.flush()
        if not running_then:
            assert not same(answer(running, PROMPT, "a")[0], expected["a"])
            quarantine_base(running)
            assert entries(running, "a") == []
        bad = {row.fingerprint for row in running.store.disk.index.rows(bad=True)}
        assert len(bad) == 1 + (not running_then)
        for name in ("a", None, "a"):
            assert same(answer(running, PROMPT, name)[0], expected[name])
        bytes_of(running)
    with engine(store=options) as later:
        later.add_adapter("a", upper)
        for name in ("a", None):
            assert same(answer(later, PROMPT, name)[0], expected[name])


def bytes_of(running: Engine) -> int:
    """The bytes of pages in memory, which are those of all that is alive for them."""
    alive = {id(page): page.bytes for entry in running.store.tree.entries() for page in entry.page.chain}
    assert running.store.bytes == sum(alive.values())
    return running.store.bytes


def test_memory_below_counts_until_the_last_page_over_it_goes(upper: Path) -> None:
    with engine(store=None) as running:
        running.add_adapter("a", upper)
        answer(running, PROMPT, None)
        whole = bytes_of(running)
        answer(running, PROMPT, "a")
        both, over = bytes_of(running), entries(running, "a")
        assert over[0].page.shared_layers == 2
        drop_base(running)
        sealed = [entry.page for entry in over if entry.page.shared_layers]
        assert sealed
        assert bytes_of(running) == sum(entry.page.bytes for entry in over) + len(sealed) * running.model.spec.page_bytes
        running.remove_adapter("a")
        assert running.store.bytes == 0
        assert whole < both


def test_eviction_frees_memory_and_not_pages_below_others(upper: Path) -> None:
    with engine(store=None) as running:
        running.add_adapter("a", upper)
        answer(running, PROMPT, None)
        answer(running, PROMPT, "a")
        tree = running.store.tree
        below = entries(running, None)[0]
        while tree.eviction.drop_oldest(tree.eviction):
            assert below.page is not None or not entries(running, "a")
        assert bytes_of(running) == 0


@pytest.mark.parametrize(("part", "place"), [("below", 1), ("own", 0)])
def test_a_spoiled_page_below_costs_one_computation(part: str, place: int, upper: Path) -> None:
    with engine(store=None) as running:
        running.add_adapter("a", upper)
        answer(running, PROMPT, None)
        expected = answer(running, PROMPT, "a", "off")[0]
        if part == "own":
            answer(running, PROMPT, "a")
        entries(running, None)[place].page.layer_values[0][0, 7] = float("nan")
        found, receipt = answer(running, PROMPT, "a")
        assert same(found, expected)
        assert Reason.NON_FINITE in {refusal.reason for refusal in receipt.refusals}
        assert f"page {place} of the kept prompt was wrong" in " ".join(receipt.notes)
        assert not any(bool(torch.isnan(e.page.layer_values[0]).any()) for e in running.store.tree.entries())
        assert same(answer(running, PROMPT, None)[0], answer(running, PROMPT, None, "off")[0])
        bytes_of(running)
