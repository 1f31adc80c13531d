"""Repeated text in kept prompts: found wherever it stands, token for token, and only within its own scope."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentcache.approximate.ngram_index import GRAM, Run, grams, merge_runs, repeats, stored_repeats
from agentcache.kv import PAGE_TOKENS, Page
from agentcache.kv_spec import KVSpec
from agentcache.store.keys import Ids, Scope, as_ids
from agentcache.store.memory.prefix_tree import PrefixTree
from agentcache.store.store import Store

SPEC = KVSpec(1, 1, 2, torch.float32)
SCOPE = Scope("default", "weights")


def text(seed: int, count: int) -> Ids:
    return np.random.default_rng(seed).integers(0, 500, count).astype(np.uint32)


def keep(tree: PrefixTree, ids: Ids, scope: Scope = SCOPE) -> None:
    tree.admit(scope, ids, [Page(SPEC) for _ in range(-(-len(ids) // PAGE_TOKENS))], "here")


def kept_ids(run: Run) -> Ids:
    """The ids that the run's pages stand for."""
    return np.concatenate([entry.ids for entry in run.entries])[run.offset : run.offset + run.stop - run.start]


def found(tree: PrefixTree, ids: Ids, since: int = 0, min_tokens: int = 32, scope: Scope = SCOPE) -> list[Run]:
    runs = repeats(tree, scope, ids, since, min_tokens)
    for run in runs:
        assert since <= run.start <= run.stop - min_tokens < run.stop < len(ids)
        assert np.array_equal(kept_ids(run), ids[run.start : run.stop])
    assert all(one.stop <= two.start for one, two in zip(runs, runs[1:], strict=False))
    return runs


def test_a_run_is_found_elsewhere_and_across_pages() -> None:
    tree, kept = PrefixTree(1 << 30), text(1, 1500)
    keep(tree, kept)
    prompt = np.concatenate([text(2, 100), kept[300:1400], text(3, 50)])
    [run] = found(tree, prompt)
    assert (run.start, run.stop, run.source, run.shift) == (100, 1200, 300, -200)
    assert [entry.place for entry in run.entries] == [0, 1, 2]


def test_runs_come_in_order_each_from_its_longest_source() -> None:
    tree, one, two = PrefixTree(1 << 30), text(1, 600), text(2, 600)
    keep(tree, one)
    keep(tree, np.concatenate([text(4, 40), one[100:200], two]))
    prompt = np.concatenate([two[50:300], text(5, 30), one[90:300], text(6, 3)])
    assert [(run.start, run.stop) for run in found(tree, prompt)] == [(0, 250), (280, 490)]


def test_the_last_token_and_the_prefix_are_never_part() -> None:
    tree, kept = PrefixTree(1 << 30), text(1, 400)
    keep(tree, kept)
    assert [(run.start, run.stop) for run in found(tree, kept[50:250])] == [(0, 199)]
    assert [(run.start, run.stop) for run in found(tree, kept[50:250], since=60)] == [(60, 199)]


def test_short_repeats_are_left_alone() -> None:
    tree, kept = PrefixTree(1 << 30), text(1, 400)
    keep(tree, kept)
    prompt = np.concatenate([text(2, 100), kept[100:160], text(3, 100)])
    assert len(found(tree, prompt, min_tokens=60)) == 1
    assert found(tree, prompt, min_tokens=61) == []


@pytest.mark.parametrize("other", [Scope("other", "weights"), Scope("default", "others"), Scope("default", "weights", "long")])
def test_no_scope_sees_anothers_text(other: Scope) -> None:
    tree, kept = PrefixTree(1 << 30), text(1, 400)
    keep(tree, kept)
    prompt = np.concatenate([text(2, 10), kept])
    assert found(tree, prompt)
    assert found(tree, prompt, scope=other) == []
    keep(tree, kept[:200], other)
    assert [run.entries[0].scope for run in found(tree, prompt, scope=other)] == [other]


def test_approximate_pages_are_never_a_source() -> None:
    tree, kept = PrefixTree(1 << 30), text(1, 400)
    keep(tree, kept, Scope("default", "weights", precision="approximate"))
    prompt = np.concatenate([text(2, 10), kept])
    assert found(tree, prompt) == []
    assert repeats(tree, Scope("default", "weights", precision="approximate"), prompt, 0, 32) == []


def test_lossy_pages_serve_on_request_after_exact_ones() -> None:
    store = Store(1 << 30)
    kept = text(1, 700)
    keep(store.tree, kept, Scope("default", "weights", precision="int8"))
    keep(store.tree, kept[200:420])
    prompt = np.concatenate([text(2, 10), kept, text(3, 10)])
    [alone] = stored_repeats(store, SCOPE, prompt, 0, 32)
    assert (alone.start, alone.stop) == (210, 430)
    runs = stored_repeats(store, SCOPE, prompt, 0, 32, ("exact", "int8"))
    assert [(run.start, run.stop, run.entries[0].scope.precision) for run in runs] == [
        (10, 210, "int8"), (210, 430, "exact"), (430, 710, "int8"),
    ]  # fmt: skip
    for run in runs:
        assert np.array_equal(kept_ids(run), prompt[run.start : run.stop])
        assert len(run.pages) == len(run.entries)
    assert [run.source for run in runs] == [0, 0, 420]
    assert [entry.place for entry in runs[2].entries] == [0, 1]
    assert [run.start for run in stored_repeats(store, SCOPE, prompt, 0, 210, ("exact", "int8"))] == [210, 430], (
        "short pieces are left alone"
    )


SPANS = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 30)), max_size=6)


@given(SPANS, SPANS)
def test_runs_beside_better_ones_never_overlap_them(one: list[tuple[int, int]], other: list[tuple[int, int]]) -> None:
    def runs(pairs: list[tuple[int, int]]) -> list[Run]:
        out: list[Run] = []
        for gap, size in pairs:
            start = (out[-1].stop if out else 0) + gap
            out.append(Run(start, start + size, (), 0))
        return out

    better, others = runs(one), runs(other)
    found = merge_runs(better, others, 0, 1000, 5)
    assert all(a.stop <= b.start for a, b in zip(found, found[1:], strict=False))
    assert all(run in found for run in better)
    covered = {at for run in found for at in range(run.start, run.stop)}
    taken = {at for run in better for at in range(run.start, run.stop)}
    for run in others:
        for start in range(run.start, run.stop - 4):
            piece = set(range(start, start + 5))
            assert piece & taken or piece <= covered, "what is long enough and free is there"
    assert covered - taken <= {at for run in others for at in range(run.start, run.stop)}


def test_what_was_dropped_is_not_found_and_leaves_nothing_behind() -> None:
    tree, kept = PrefixTree(2 * SPEC.page_bytes), text(1, 1000)
    found(tree, kept)  # from now on everything is indexed as it comes
    keep(tree, kept)
    assert tree.audit()["indexed"] > 0
    keep(tree, text(2, 1000))
    assert found(tree, np.concatenate([text(3, 9), kept])) == []
    tree.clear()
    assert tree.audit()["indexed"] == 0


def test_a_page_too_short_for_the_index_goes_without_trouble() -> None:
    tree = PrefixTree(1 << 30)
    found(tree, text(1, 50))
    keep(tree, text(1, 200))
    keep(tree, text(2, GRAM - 1))
    tree.clear()
    assert len(tree) == 0


def test_a_page_that_grows_is_found_in_its_new_length() -> None:
    tree, kept = PrefixTree(1 << 30), text(1, 500)
    prompt = np.concatenate([text(2, 20), kept, text(3, 20)])
    for length in (100, 130, 500):
        keep(tree, kept[:length])
        assert [(run.start, run.stop) for run in found(tree, prompt)] == [(20, 20 + length)]


def test_a_page_that_shrank_is_found_as_it_grows_again() -> None:
    tree, kept, page = PrefixTree(1 << 30), text(1, 400), Page(SPEC)
    found(tree, kept)
    tree.admit(SCOPE, kept, [page], "here")
    tree.retract(SCOPE, kept, 100, [page])
    other = np.concatenate([kept[:100], text(4, 300)])
    keep(tree, other)
    [run] = found(tree, np.concatenate([text(2, 20), other, text(3, 20)]))
    assert (run.start, run.stop) == (20, 420)
    [run] = found(tree, np.concatenate([text(2, 20), other[120:], text(3, 20)]))
    assert (run.start, run.stop) == (20, 300), "by what came last"
    tree.retract(SCOPE, other, 50, [entry.page for entry in tree.entries()])
    tree.clear()
    assert tree.audit()["indexed"] == 0


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 900), st.integers(1, 300)), min_size=1, max_size=8), st.integers(0, 1 << 20))
def test_whatever_is_found_is_equal_and_long_repeats_are_found(parts: list[tuple[int, int, int]], seed: int) -> None:
    tree = PrefixTree(1 << 30)
    texts = [text(seed + n, 1200) for n in range(4)]
    for one in texts[:3]:
        keep(tree, one)
    prompt = np.concatenate([texts[which][start : start + count] for which, start, count in parts] + [text(seed + 9, 1)])
    runs = found(tree, prompt)
    covered = {at for run in runs for at in range(run.start, run.stop)}
    place = 0
    for which, start, count in parts:
        real = min(count, 1200 - start)
        if which < 3 and real >= 100:
            assert set(range(place, place + real)) <= covered
        place += real


def test_places_in_the_index_are_chosen_by_content_alone() -> None:
    ids = text(7, 3000)
    at, hashes = grams(ids)
    again, moved = grams(ids[1000:])
    known = set(zip(at.tolist(), hashes.tolist(), strict=True))
    assert set(zip((again + 1000).tolist(), moved.tolist(), strict=True)) <= known
    assert 0.2 < len(at) / (len(ids) - GRAM + 1) < 0.3
    assert grams(as_ids([1] * (GRAM - 1)))[0].size == 0
