"""Text that only the disk has, at another place: found by signatures, compared by ids, read verified, and left where that does not pay."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import pytest
import torch

from agentcache.approximate import ngram_index, segment_prefetch
from agentcache.approximate.minhash_index import MinHashIndex
from agentcache.approximate.segment_prefetch import SegmentPrefetch, SegmentQuery, longest_run, prefetch
from agentcache.errors import ConfigError, StoreError
from agentcache.kv import PAGE_TOKENS, Page
from agentcache.kv_spec import KVSpec
from agentcache.store.deletion import Deletion
from agentcache.store.forgetting import delete
from agentcache.store.keys import Ids, Scope, chain
from agentcache.store.policy import Rate
from agentcache.store.store import Store
from agentcache.types import Reason, StoreOptions
from tests.approximate.windows import WordWindow
from tests.store.stored_pages import blob_path, edit_file, noise_page, same_numbers

SPEC = KVSpec(2, 1, 16, torch.float32)
SCOPE = Scope("default", "weights")


def text(seed: int, count: int) -> Ids:
    return np.random.default_rng(seed).integers(0, 5000, count).astype(np.uint32)


def windows(ids: Ids, first: int = 0, size: int = 64) -> list[WordWindow]:
    """Every 32 tokens, each token its own word."""
    words = [f"w{token}" for token in ids.tolist()]
    starts = range(first, len(ids) - size + 1, 32)
    return [WordWindow(at, at + size, tuple(words[at : at + size]), tuple(words[max(0, at - 16) : at])) for at in starts]


def pages(ids: Ids) -> list[Page]:
    """Pages whose contents follow from their first id."""
    cuts = [ids[at : at + PAGE_TOKENS] for at in range(0, len(ids), PAGE_TOKENS)]
    return [noise_page(SPEC, len(cut), seed=int(cut[0])) for cut in cuts]


TEXTS: WeakKeyDictionary[Store, MinHashIndex] = WeakKeyDictionary()


def said(store: Store) -> MinHashIndex:
    """What the prompts of a store say."""
    return TEXTS.get(store) or TEXTS.setdefault(store, MinHashIndex(store))


def opened(folder: Path, memory_bytes: int = 64 << 20, **options: Any) -> Store:
    return said(Store(memory_bytes, 0, StoreOptions(folder, **options))).store


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture(autouse=True)
def stores(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Store]]:
    """All stores opened by a test, closed behind it."""
    made: list[Store] = []
    real = Store.__init__

    def init(self: Store, *args: Any, **more: Any) -> None:
        real(self, *args, **more)
        made.append(self)

    monkeypatch.setattr(Store, "__init__", init)
    yield made
    for store in made:
        store.close()


def keep(folder: Path, ids: Ids, scope: Scope = SCOPE, first: int = 0) -> None:
    """As a process that kept a prompt, noted its windows, and ended."""
    store = opened(folder)
    store.admit(scope, ids, pages(ids), "here")
    said(store).add(scope, ids, windows(ids, first))
    assert store.flush(20)
    store.close()


def brought(store: Store, ids: Ids, scope: Scope = SCOPE, ms: float = 1000.0, first: int = 0, **options: Any) -> SegmentPrefetch:
    """As a request that waits for it."""
    found = prefetch(said(store), SegmentQuery(scope, ids, windows(ids, first), ms, SPEC, **options), lambda: None)
    assert found is not None
    end = time.monotonic() + 20
    while found.pending():
        assert time.monotonic() < end
        time.sleep(0.002)
    return found


def repeats(store: Store, ids: Ids, scope: Scope = SCOPE) -> list[tuple[int, int, int]]:
    return [(run.start, run.stop, run.source) for run in ngram_index.repeats(store.tree, scope, ids, 0, 32)]


KEPT = text(1, 1300)
PROMPT = np.concatenate([text(2, 100), KEPT[604:904], text(3, 50)])  # windows of the kept prompt, 8 tokens beside the grid of this one


# -- what comes ----------------------------------------------------------------------------------------------------------


def test_a_later_process_finds_repeated_text_on_disk(folder: Path) -> None:
    keep(folder, KEPT)
    store = opened(folder)
    assert repeats(store, PROMPT) == []
    first = 4  # as anchors would have it: where the kept prompt has its windows, too
    found = brought(store, PROMPT, first=first)
    assert (found.tokens, found.refusals, found.notes) == (300, [], [])
    assert found.bytes > 0
    assert repeats(store, PROMPT) == [(100, 400, 604)]
    run = ngram_index.repeats(store.tree, SCOPE, PROMPT, 0, 32)[0]
    assert all(
        same_numbers(own, noise_page(SPEC, 512, seed=int(entry.ids[0])), 512) for own, entry in zip(run.pages, run.entries, strict=True)
    )
    assert [entry.place for entry in run.entries] == [1]
    assert len(store) == 2, "the page before it came, the page behind did not"


def test_a_run_over_page_borders_comes_whole(folder: Path) -> None:
    keep(folder, KEPT)
    store = opened(folder)
    prompt = np.concatenate([text(2, 32), KEPT[320:1300], text(3, 9)])
    found = brought(store, prompt)
    assert found.tokens == 980
    assert repeats(store, prompt) == [(32, 1012, 320)]


def test_text_of_a_grown_last_page_is_found(folder: Path) -> None:
    store = opened(folder)
    store.admit(SCOPE, KEPT[:700], pages(KEPT[:700]), "here")
    said(store).add(SCOPE, KEPT[:700], windows(KEPT[:700]))
    longer = pages(KEPT[:900])
    store.admit(SCOPE, KEPT[:900], longer, "here")
    assert store.flush(20)
    store.close()
    later = opened(folder)
    prompt = np.concatenate([text(2, 32), KEPT[544:850], text(3, 9)])
    assert brought(later, prompt).tokens == 306
    assert repeats(later, prompt) == [(32, 338, 544)]


def test_what_memory_holds_is_not_read_again(folder: Path) -> None:
    keep(folder, KEPT)
    store = opened(folder)
    assert brought(store, PROMPT, first=4).bytes > 0
    again = brought(store, PROMPT, first=4)
    assert (again.tokens, again.bytes, again.refusals) == (0, 0, [])


def test_two_runs_of_one_prompt_share_its_pages(folder: Path) -> None:
    keep(folder, KEPT)
    store = opened(folder)
    prompt = np.concatenate([text(2, 32), KEPT[64:264], text(3, 56), KEPT[1056:1256], text(4, 30)])
    found = brought(store, prompt)
    assert found.tokens == 400
    assert found.bytes == sum(row.bytes for row in store.disk.index.rows())  # type: ignore[union-attr]
    assert [run[:2] for run in repeats(store, prompt)] == [(32, 232), (288, 488)]


def test_tokens_before_since_and_the_last_are_never_part(folder: Path) -> None:
    keep(folder, KEPT)
    store = opened(folder)
    prompt = np.concatenate([text(2, 32), KEPT[64:264]])
    assert brought(store, prompt, since=96).tokens == 135
    assert brought(store, prompt, since=64, min_tokens=200).tokens == 0


def test_other_ids_under_the_same_words_are_not_attached(folder: Path) -> None:
    """Canonical words may be equal where ids are not: then nothing is read."""
    store = opened(folder)
    store.admit(SCOPE, KEPT, pages(KEPT), "here")
    other = text(9, 1300)
    said(store).add(
        SCOPE, KEPT, [WordWindow(one.start, one.stop, two.words, two.left) for one, two in zip(windows(KEPT), windows(other), strict=True)]
    )
    assert store.flush(20)
    store.close()
    later = opened(folder)
    found = brought(later, other)
    assert (found.tokens, found.bytes, found.refusals) == (0, 0, [])


# -- what does not -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("other", [Scope("other", "weights"), Scope("default", "others"), Scope("default", "weights", "long")])
def test_no_segment_crosses_a_scope(folder: Path, other: Scope) -> None:
    keep(folder, KEPT)
    store = opened(folder)
    found = brought(store, PROMPT, other, first=4)
    assert (found.tokens, found.bytes) == (0, 0)
    # Somebody who can write the index says that the text is the other scope's: the pages say whose they are.
    words = windows(KEPT)
    own = said(store).signatures
    keys = [SCOPE.root, *chain(SCOPE.root, KEPT)]
    said(store).refresh(SCOPE)
    for window in words:
        for proposal in said(store).find(SCOPE, KEPT, window):
            assert proposal.text.parent in keys
            own.add(other, proposal.text)
    assert own.find(other, own.signer.sign(words[20]), b"")
    found = brought(store, PROMPT, other, first=4)
    assert (found.tokens, found.bytes) == (0, 0)
    assert repeats(store, PROMPT, other) == []
    assert len(store) == 0


def test_a_damaged_page_is_refused_by_name(folder: Path) -> None:
    keep(folder, KEPT)
    store = opened(folder)
    assert store.disk is not None
    rows = list(store.disk.index.rows())
    edit_file(blob_path(store.disk.folder, rows[1]), lambda content: content.__setitem__(20_000, content[20_000] ^ 1))
    found = brought(store, PROMPT, first=4)
    assert found.tokens == 0
    [refusal] = found.refusals
    assert (refusal.reason, refusal.start, refusal.stop) == (Reason.BAD_BLOB, 100, 400)
    assert repeats(store, PROMPT) == []
    again = brought(store, PROMPT, first=4)
    assert (again.tokens, again.refusals) == (0, []), "it is quarantined"


@pytest.mark.impatient
def test_reading_that_takes_longer_than_computing_is_refused(folder: Path) -> None:
    keep(folder, KEPT)
    store = opened(folder)
    assert store.disk is not None
    store.disk.read_rate = Rate(1000.0)
    found = brought(store, PROMPT, ms=0.1, first=4)
    assert (found.tokens, found.bytes) == (0, 0)
    [refusal] = found.refusals
    assert (refusal.reason, refusal.start, refusal.stop) == (Reason.SLOW_DISK, 100, 400)
    assert "computing 30 ms" in refusal.detail
    assert brought(store, PROMPT, ms=10.0, first=4).tokens == 300


@pytest.mark.impatient
def test_deep_chains_are_left_and_shallow_ones_read(folder: Path) -> None:
    keep(folder, KEPT)
    store = opened(folder)
    assert store.disk is not None
    rows = list(store.disk.index.rows())
    prompt = np.concatenate([text(2, 32), KEPT[64:264], text(3, 56), KEPT[1056:1120], text(4, 30)])
    store.disk.read_rate = Rate(rows[0].bytes / 150)  # a page in 150 ms: three for 264 tokens do not pay, one for 200 does
    found = brought(store, prompt, ms=1.0)
    assert found.tokens == 200
    assert [(refusal.start, refusal.stop) for refusal in found.refusals] == [(288, 352)]


def test_no_more_is_read_than_allowed(folder: Path) -> None:
    keep(folder, KEPT)
    store = opened(folder)
    found = brought(store, PROMPT, first=4, most_bytes=1000)
    assert (found.tokens, found.bytes) == (0, 0)
    assert "1000 may be read" in found.refusals[0].detail
    small = opened(folder, memory_bytes=4 * SPEC.page_bytes)
    assert "may be read" in brought(small, PROMPT, first=4).refusals[0].detail, "a quarter of the memory"


def test_pages_that_are_gone_are_forgotten(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentcache.approximate.minhash_index.YOUNG_S", -1.0)
    keep(folder, KEPT)
    store = opened(folder)
    assert store.disk is not None
    store.disk.index.remove([row.id for row in store.disk.index.rows()], force=True)
    before = store.disk.index.stats()["segments"]
    found = brought(store, PROMPT, first=4)
    assert (found.tokens, found.refusals) == (0, [])
    assert store.flush(20)
    assert store.disk.index.stats()["segments"] < before  # type: ignore[operator]


def test_pages_of_another_precision_are_not_gone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep(folder, KEPT)
    monkeypatch.setattr("agentcache.approximate.minhash_index.YOUNG_S", -1.0)
    store = opened(folder)
    assert brought(store, PROMPT, replace(SCOPE, precision="int8"), first=4).tokens == 0
    assert store.flush(20)
    assert brought(store, PROMPT, first=4).tokens >= 300


@pytest.mark.parametrize("fault", [StoreError("the index is damaged"), OSError("gone"), MemoryError()])
def test_whatever_fails_breaks_no_request(folder: Path, monkeypatch: pytest.MonkeyPatch, fault: Exception) -> None:
    keep(folder, KEPT)

    def fail(*args: object, **more: object) -> None:
        raise fault

    for place in (
        "agentcache.approximate.minhash_index.MinHashIndex.refresh",
        "agentcache.store.disk.disk_tier.DiskTier.find",
        "agentcache.store.page_prefetch.PagePrefetch.pending",
    ):
        store = opened(folder)
        with monkeypatch.context() as patch:
            patch.setattr(place, fail)
            found = brought(store, PROMPT, first=4)
        assert (found.tokens, len(store)) == (0, 0)
        assert found.notes or found.refusals


def test_no_request_waits_for_a_closed_prefetch(folder: Path) -> None:
    keep(folder, KEPT)
    store = opened(folder)
    found = prefetch(said(store), SegmentQuery(SCOPE, PROMPT, windows(PROMPT, 4), 1.0, SPEC), lambda: None)
    assert found is not None
    found.close()
    assert not found.pending()


# -- when it is asked for ------------------------------------------------------------------------------------------------


def test_without_a_disk_nothing_is_noted_or_brought(folder: Path) -> None:
    memory = Store(64 << 20)
    said(memory).add(SCOPE, KEPT, windows(KEPT))
    assert said(memory).refresh(SCOPE) == 0
    assert prefetch(said(memory), SegmentQuery(SCOPE, KEPT, windows(KEPT), 1.0, SPEC), lambda: None) is None
    store = opened(folder)
    near = replace(SCOPE, precision="approximate")
    assert prefetch(said(store), SegmentQuery(near, KEPT, windows(KEPT), 1.0, SPEC), lambda: None) is None, "only memory holds such pages"
    assert prefetch(said(store), SegmentQuery(SCOPE, KEPT, [], 1.0, SPEC), lambda: None) is None
    with pytest.raises(ConfigError, match="tau=2"):
        MinHashIndex(store, 2)


def test_cleared_signatures_leave_memory_and_return_from_disk(folder: Path) -> None:
    keep(folder, KEPT)
    store = opened(folder)
    assert brought(store, PROMPT, first=4).tokens == 300
    store.clear()
    store.drop_deleted(Deletion("another"))
    assert len(said(store).signatures)
    store.drop_deleted(Deletion(SCOPE.namespace))
    assert len(said(store).signatures) == 0
    assert brought(store, PROMPT, first=4).tokens == 300


def test_noting_does_not_wait_for_the_disk(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened(folder)
    assert store.disk is not None
    returned, in_time = threading.Event(), list[bool]()
    put = said(store).add_now

    def slow(*given: Any) -> int:
        in_time.append(returned.wait(20))
        return put(*given)

    monkeypatch.setattr(said(store), "add_now", slow)
    store.defer_writes(True)
    said(store).add(SCOPE, KEPT, windows(KEPT))
    returned.set()
    assert store.flush(20)
    assert in_time == [True]
    assert store.disk.index.stats()["segments"] == len(windows(KEPT))


@pytest.mark.parametrize("when", ["before it is noted", "before it is signed", "while it is signed"])
def test_what_is_deleted_meanwhile_is_not_noted(folder: Path, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    store = opened(folder)
    assert store.disk is not None
    index, received, deleted = said(store), store.apply_deletions(), []

    def clear() -> None:
        deleted.append(delete(store, SCOPE.namespace, None, None))

    if when == "before it is noted":
        clear()
    else:
        part, name = (index, "add_now") if when == "before it is signed" else (index.signatures.signer, "sign")
        called = getattr(part, name)
        monkeypatch.setattr(part, name, lambda *given: (deleted or clear(), called(*given))[1])
    said(store).add(SCOPE, KEPT, windows(KEPT), received)
    assert store.flush(20)
    assert len(deleted) == 1
    assert store.disk.index.stats()["segments"] == 0
    assert len(index.signatures) == 0
    said(store).add(SCOPE, KEPT, windows(KEPT))
    assert store.flush(20)
    assert store.disk.index.stats()["segments"] == len(windows(KEPT)), "what comes later is noted"


# -- alignment -----------------------------------------------------------------------------------------------------------


def test_the_longest_run_is_found() -> None:
    one, other = text(1, 300), text(2, 300)
    assert longest_run(one, other) == (0, 0, 0)
    other[10:40], other[100:180] = one[200:230], one[20:100]
    assert longest_run(one, other) == (20, 100, 80)
    assert longest_run(one[:15], one[:15]) == (0, 0, 0)
    assert longest_run(one[:16], one) == (0, 0, 16)
    assert segment_prefetch.GRAM == 16
