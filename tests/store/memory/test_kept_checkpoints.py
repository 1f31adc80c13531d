"""Checkpoints of pages in memory: which stay, which pages lend them to others, and under which kernels."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from agentcache.checkpoints import SHARE, Checkpoint
from agentcache.kv import PAGE_TOKENS, Page
from agentcache.kv_spec import KVSpec
from agentcache.store.keys import Ids, Scope, as_ids
from agentcache.store.memory.checkpoint_room import thin
from agentcache.store.memory.prefix_tree import PIECES, PrefixTree
from agentcache.store.page_prefetch import lend

SPEC = KVSpec(1, 1, 8, torch.float32)
HERE = Scope("ns", "weights")


def checkpoint(size: int = 4096, cuts: tuple[int, ...] = ()) -> Checkpoint:
    return Checkpoint((torch.zeros(size // 4), None), cuts)


def prompt(tokens: int, marks: dict[int, Checkpoint]) -> tuple[Ids, list[Page]]:
    """So many tokens, 0, 1, 2 and on, and pages with checkpoints at these positions."""
    pages = [Page(SPEC) for _ in range(0, tokens, PAGE_TOKENS)]
    for at, page in enumerate(pages):
        page.filled = min(PAGE_TOKENS, tokens - at * PAGE_TOKENS)
        page.checkpoints = {mark - at * PAGE_TOKENS: known for mark, known in marks.items() if 0 < mark - at * PAGE_TOKENS <= PAGE_TOKENS}
    return as_ids(range(tokens)), pages


def kept(tree: PrefixTree) -> list[int]:
    """Positions of the checkpoints in memory."""
    return sorted(entry.first + slots for entry in tree.entries() if entry.page for slots in entry.page.checkpoints)


def test_the_needed_ones_stay_and_others_up_to_their_share() -> None:
    marks = [64 * at for at in range(1, 31)]
    for size in (4, 2048, 1 << 20):
        tree = PrefixTree(1 << 30)
        ids, pages = prompt(1920, {mark: checkpoint(size) for mark in marks})
        tree.admit(HERE, ids, pages, "n")
        tree.pin(HERE, ids[:1152])
        thin(tree, tree.path(HERE, ids), 700)
        vital, found = {640, 1152, 1792, 1856, 1920}, kept(tree)
        assert vital <= set(found)
        assert tree.bytes == 4 * SPEC.page_bytes + len(found) * size
        others = sorted({*found} - vital)
        assert others == [mark for mark in marks if mark not in vital][-len(others) :] or not others  # the newest
        if size == 4:
            assert found == marks
        elif size == 2048:
            assert others
            assert len(found) * size <= SHARE * tree.bytes < (len(found) + 1) * size
        else:
            assert not others


def test_checkpoints_after_the_kept_tokens_stay_with_their_sequence() -> None:
    tree = PrefixTree(1 << 30)
    ids, pages = prompt(512, {mark: checkpoint(1 << 20) for mark in (64, 128, 192, 256, 448)})
    tree.admit(HERE, ids[:320], pages, "n")  # a request goes on in that page
    thin(tree, tree.path(HERE, ids[:320]), 0)
    assert sorted(pages[0].checkpoints) == [128, 192, 256, 448]


def test_a_longer_page_takes_over_the_checkpoints_of_the_shorter() -> None:
    tree = PrefixTree(1 << 30)
    first, second = prompt(320, {320: checkpoint()}), prompt(448, {448: checkpoint()})  # as another process wrote it
    tree.admit(HERE, *first, "one")
    tree.admit(HERE, *second, "two")
    assert kept(tree) == [320, 448]
    assert tree.match(HERE, as_ids(range(449))).numerics == {"one", "two"}
    assert tree.bytes == second[1][0].bytes


def test_what_kernels_made_a_checkpoint_counts_for_its_page() -> None:
    tree = PrefixTree(1 << 30)
    tree.admit(HERE, *prompt(512, {}), "one")
    tree.admit(HERE, *prompt(512, {}), "two")
    assert tree.match(HERE, as_ids(range(513))).numerics == {"one"}
    before = tree.bytes
    tree.admit(HERE, *prompt(448, {448: checkpoint()}), "two")
    assert tree.match(HERE, as_ids(range(513))).numerics == {"one", "two"}
    assert tree.bytes == before + 4096


def test_other_pieces_replace_a_checkpoint() -> None:
    tree = PrefixTree(1 << 30)
    tree.admit(HERE, *prompt(512, {448: checkpoint(cuts=(448,))}), "n")
    for cuts in ((64, 448), (64, 448)):
        tree.admit(HERE, *prompt(448, {448: checkpoint(cuts=cuts)}), "n")
    (entry,) = tree.entries()
    assert entry.page is not None
    assert entry.page.checkpoints[448].cuts == (64, 448)


@pytest.mark.parametrize(("first", "second"), [((448, (64, 448)), (384, (64, 384))), ((384, (64, 384)), (448, (64, 448)))])
def test_checkpoints_of_other_pieces_promise_no_bits(first: tuple[int, tuple[int, ...]], second: tuple[int, tuple[int, ...]]) -> None:
    """Keys of a page are those of the pieces that it was computed in."""
    tree = PrefixTree(1 << 30)
    for tokens, cuts in (first, second):
        tree.admit(HERE, *prompt(tokens, {tokens: checkpoint(cuts=cuts)}), "n")
    assert kept(tree) == [384, 448]
    assert tree.match(HERE, as_ids(range(449))).numerics == {"n", PIECES}


def test_checkpoints_of_the_same_pieces_promise_bits() -> None:
    tree = PrefixTree(1 << 30)
    for tokens, cuts in ((384, (64, 384)), (512, (64, 384, 512)), (64, (64,))):
        tree.admit(HERE, *prompt(tokens, {tokens: checkpoint(cuts=cuts)}), "n")
    assert kept(tree) == [64, 384, 512]
    assert tree.match(HERE, as_ids(range(513))).numerics == {"n"}


def test_a_page_that_grows_promises_no_more_than_before() -> None:
    """Its owner appends to it while a shorter prompt's checkpoint comes."""
    tree = PrefixTree(1 << 30)
    _, (page,) = prompt(448, {448: checkpoint(cuts=(64, 448))})
    tree.admit(HERE, as_ids(range(448)), [page], "n")
    tree.admit(HERE, *prompt(384, {384: checkpoint(cuts=(64, 384))}), "n")
    page.filled = 512
    tree.admit(HERE, as_ids(range(512)), [page], "n")
    assert kept(tree) == [384, 448]
    assert tree.match(HERE, as_ids(range(513))).numerics == {"n", PIECES}


def test_a_lent_page_takes_no_checkpoints_of_fewer_bits() -> None:
    tree, lossy = PrefixTree(1 << 30), replace(HERE, precision="int8")
    tree.admit(HERE, *prompt(512, {}), "n")
    lend(tree, lossy, as_ids(range(513)))
    tree.admit(lossy, *prompt(448, {448: checkpoint()}), "n")
    assert tree.checkpoints(HERE, as_ids(range(512))) == {}


def test_a_lent_page_takes_none_of_the_lossy_one_before() -> None:
    tree, lossy = PrefixTree(1 << 30), replace(HERE, precision="int8")
    tree.admit(lossy, *prompt(448, {448: checkpoint()}), "n")
    tree.admit(HERE, *prompt(512, {64: checkpoint()}), "n")
    lend(tree, lossy, as_ids(range(513)))
    assert [*tree.checkpoints(HERE, as_ids(range(512)))] == [*tree.checkpoints(lossy, as_ids(range(512)))] == [64]


def test_a_lent_page_keeps_its_pinned_checkpoint() -> None:
    tree, lossy = PrefixTree(1 << 30), replace(HERE, precision="int8")
    ids, pages = prompt(512, {at: checkpoint(1 << 20) for at in (64, 128, 448)})
    tree.admit(HERE, ids, pages, "n")
    tree.pin(HERE, ids[:128])
    lend(tree, lossy, as_ids(range(513)))
    thin(tree, tree.path(lossy, ids), 0)
    assert 128 in tree.checkpoints(HERE, ids)


def test_a_lent_page_counts_the_checkpoints_it_takes() -> None:
    tree, lossy = PrefixTree(1 << 30), replace(HERE, precision="int8")
    tree.admit(HERE, *prompt(512, {}), "n")
    lend(tree, lossy, as_ids(range(513)))
    tree.admit(HERE, *prompt(512, {64: checkpoint(1 << 20)}), "n")
    assert tree.bytes == SPEC.page_bytes + (1 << 20)
    tree.clear(grade="exact")
    assert tree.bytes == SPEC.page_bytes + (1 << 20)
    tree.clear()
    assert tree.bytes == 0


def test_a_copy_has_the_checkpoints_of_its_tokens() -> None:
    _, (page,) = prompt(512, {64: checkpoint(), 448: checkpoint()})
    before = page.checkpoints
    assert list(page.copy(100).checkpoints) == [64]
    page.copy(512).checkpoints[64] = checkpoint(8)
    assert page.checkpoints is before
    assert before[64].bytes == 4096
