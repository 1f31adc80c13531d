"""The index of the store: what it finds, what it takes in, what it lets go first."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentcache.errors import StoreError
from agentcache.kv import PAGE_TOKENS
from agentcache.store.disk.database import lock_index
from agentcache.store.disk.folder import Folder
from agentcache.store.disk.index import CHILDREN, Index, Row
from agentcache.store.keys import Ids, Role, Scope, as_ids, chain
from tests.store.index_rows import DEAD, ME, SCOPE, added_rows, random_ids, rows_of_prompt, run_sql


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder.open(tmp_path / "store")


@pytest.fixture
def index(folder: Folder) -> Iterator[Index]:
    with Index(folder) as opened:
        yield opened


# -- the longest known prefix --------------------------------------------------------------------------------------


def oracle(rows: list[Row], ids: Ids, limit: int, start: int, parent: bytes) -> int:
    """How long a prefix these rows know: walk down, then try every child and every length."""
    at = start
    while limit - at >= PAGE_TOKENS:
        step = [row for row in rows if row.parent == parent and row.ids.tolist() == ids[at : at + PAGE_TOKENS].tolist()]
        if not step:
            break
        at, parent = at + PAGE_TOKENS, step[0].page_key
    best = 0
    for row in rows:
        for run in range(8, min(row.tokens, limit - at) + 1):
            if row.parent == parent and row.ids[:run].tolist() == ids[at : at + run].tolist():
                best = max(best, run)
    return at + best


@st.composite
def prompts(draw: st.DrawFn) -> list[int]:
    """Made of few different pieces, so that prompts share whole pages, beginnings of pages, and nothing."""
    pieces = draw(st.lists(st.tuples(st.integers(0, 2), st.sampled_from([3, 8, 9, 40, 512, 512, 512])), max_size=5))
    return [token for seed, length in pieces for token in random_ids(length, seed).tolist()]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(stored=st.lists(prompts(), max_size=4), asked=prompts(), cut=st.integers(0, 40), whole=st.integers(0, 1))
def test_longest_is_what_a_walk_over_all_rows_finds(
    tmp_path_factory: pytest.TempPathFactory, stored: list[list[int]], asked: list[int], cut: int, whole: int
) -> None:
    with Index(Folder.open(tmp_path_factory.mktemp("store"))) as index:
        for prompt in stored:
            index.add(rows_of_prompt(as_ids(prompt)))
        ids = as_ids(asked)
        limit = max(0, len(ids) - cut)
        start = min(whole, limit // PAGE_TOKENS) * PAGE_TOKENS
        parent = chain(SCOPE.root, ids[:start])[-1] if start else SCOPE.root
        found = index.longest(SCOPE, ids, limit, start=start, parent=parent)
        at = start
        for row, common in found:
            assert row.place == at // PAGE_TOKENS
            assert at % PAGE_TOKENS == 0
            assert 0 < common <= row.tokens
            assert row.ids[:common].tolist() == ids[at : at + common].tolist()
            at += common
        # a tail shorter than 8 ids is found only where a row ends with exactly it
        expected = oracle(list(index.rows()), ids, limit, start, parent)
        assert at == expected or (expected % PAGE_TOKENS == 0 and 0 < at - expected < 8)


def test_pages_beyond_one_statement(index: Index) -> None:
    ids = random_ids(PAGE_TOKENS * 70 + 100)
    index.restore(rows_of_prompt(ids))
    found = index.longest(SCOPE, ids, len(ids))
    assert [common for _, common in found] == [PAGE_TOKENS] * 70 + [100]
    assert [row.place for row, _ in found] == list(range(71))


def test_what_is_found_belongs_to_the_scope(index: Index) -> None:
    ids = random_ids(700)
    index.add(rows_of_prompt(ids))
    assert len(index.longest(SCOPE, ids, 700)) == 2
    for scope in (replace(SCOPE, namespace="other"), replace(SCOPE, fingerprint="other"), replace(SCOPE, regime="other")):
        assert index.longest(scope, ids, 700) == []
        assert index.longest(scope, ids, 700, parent=SCOPE.root) == []


def test_fewer_bits_are_never_found_for_exact(index: Index) -> None:
    ids = random_ids(700)
    index.add(rows_of_prompt(ids, precision="int8"))
    assert index.longest(SCOPE, ids, 700) == []
    assert [common for _, common in index.longest(SCOPE, ids, 700, "int8")] == [512, 188]
    index.add(rows_of_prompt(ids[:600]))
    assert [common for _, common in index.longest(SCOPE, ids, 700)] == [512, 88]
    found = index.longest(SCOPE, ids, 700, "int8")
    assert [(row.precision, common) for row, common in found] == [("exact", 512), ("int8", 188)]


def test_of_equal_runs_the_shortest_page_is_read(index: Index) -> None:
    short, long = random_ids(600), np.concatenate([random_ids(560), random_ids(300, 1)])
    index.add(rows_of_prompt(short) + rows_of_prompt(long))
    found = index.longest(SCOPE, short, 555)
    assert [(row.tokens, common) for row, common in found] == [(512, 512), (88, 43)]


def test_quarantined_pages_are_never_served(index: Index) -> None:
    ids = random_ids(1200)
    first, second, third = added_rows(index, ids)
    index.quarantine(third.id, "one byte")
    assert [common for _, common in index.longest(SCOPE, ids, 1200)] == [512, 512]
    index.quarantine(second.id, "")
    assert [common for _, common in index.longest(SCOPE, ids, 1200)] == [512]
    assert [common for _, common in index.longest(SCOPE, ids, 1000)] == [512]  # nor the beginning of a whole page
    assert {row.id: row.bad for row in index.rows(bad=True)} == {second.id: "quarantined", third.id: "one byte"}
    assert [row.id for row in index.rows(bad=False)] == [first.id]


@pytest.mark.parametrize(
    "change",
    ["ids = zeroblob(length(ids))", "ids = x'00'", "ids = 'text'", "tokens = 77", "tokens = -1", "place = 7", "parent = x'00'",
     "page_key = 5", "regime = 'other'", "namespace = x'ff'", "role = 'x'", "created = 'never'", "blob = x'00'", "numerics = x'00'",
     "namespace = 'other'"],
)  # fmt: skip
def test_a_damaged_row_is_not_served(folder: Folder, index: Index, change: str) -> None:
    ids = random_ids(700)
    index.add(rows_of_prompt(ids))
    run_sql(folder, f"UPDATE pages SET {change} WHERE place = 1")
    assert [common for _, common in index.longest(SCOPE, ids, 700)] == [512]
    assert {row.place for row in index.rows()} <= {0, 1, 7}
    assert [row.place for row, _ in index.longest(SCOPE, ids, 600)] == [0]


def test_the_ids_of_a_whole_page_are_compared(folder: Folder, index: Index) -> None:
    ids = random_ids(700)
    index.add(rows_of_prompt(ids))
    run_sql(folder, "UPDATE pages SET ids = zeroblob(2048) WHERE place = 0")
    assert index.longest(SCOPE, ids, 700) == []


def test_check_finds_what_does_not_fit(folder: Folder, index: Index) -> None:
    index.add(rows_of_prompt(random_ids(700)))
    assert index.check() == []
    for sql, word in (("ids = x'00'", "bytes of ids"), ("ids = zeroblob(752)", "ids its key"), ("bytes = 7", "totals")):
        before = run_sql(folder, "SELECT ids, bytes FROM pages WHERE place = 1")[0]
        run_sql(folder, f"UPDATE pages SET {sql} WHERE place = 1")
        assert any(word in said for said in index.check()), sql
        run_sql(folder, "UPDATE pages SET ids = ?, bytes = ? WHERE place = 1", *before)
    assert index.check() == []


def test_rows_come_back_as_they_went_in(index: Index) -> None:
    row = rows_of_prompt(random_ids(700), numerics=frozenset({"b", "a"}), role=Role.GROUP, hits=0)[1]
    index.add([row])
    found = index.row(row.page_key, "fp")
    assert found is not None
    assert replace(found, id=0, used=0) == row
    assert found.ids.tolist() == row.ids.tolist()
    assert found.ids.dtype == np.uint32
    assert index.row(row.page_key, "other") is None
    assert index.row(row.page_key, "fp", "int4") is None


def test_rows_are_filtered(index: Index) -> None:
    index.restore(rows_of_prompt(random_ids(512 * 300)))
    index.add(rows_of_prompt(random_ids(20, 1), role=2))
    index.add(rows_of_prompt(random_ids(20, 2), Scope("b", "other"), created=time.time() - 1000))
    assert len(list(index.rows())) == 302
    assert [row.role for row in index.rows()] == [0] * 300 + [2, 0]
    assert [row.namespace for row in index.rows(namespace="b")] == ["b"] == [row.namespace for row in index.rows(before=time.time() - 500)]
    assert [row.fingerprint for row in index.rows(fingerprint="other")] == ["other"]
    assert [row.place for row in index.rows(parent=chain(SCOPE.root, random_ids(512))[0])] == [1]
    assert len(list(index.rows(parent=SCOPE.root))) == 2
    assert index.total() == (302, 30200)
    names = [row.blob for row in index.rows(namespace="b")]
    assert index.has_blobs([*names, "nowhere"]) == set(names)


# -- adding --------------------------------------------------------------------------------------------------------


def test_what_is_known_comes_back_to_be_unlinked(index: Index) -> None:
    first, again = rows_of_prompt(random_ids(700), blob="first"), rows_of_prompt(random_ids(700), blob="again", role=1)
    assert index.add(first) == []
    assert index.add(again) == again
    assert index.add(first) == []  # its blob is the one that is kept
    assert {row.blob for row in index.rows()} == {"first"}
    assert {row.role for row in index.rows()} == {1}  # but what it is good for has been learnt
    index.promote([row.id for row in index.rows()], 2)
    index.promote([row.id for row in index.rows()], 0)
    assert {row.role for row in index.rows()} == {2}


def test_shorter_pages_give_way_once_a_longer_one_rises(index: Index) -> None:
    ids = random_ids(700)
    for count, role in ((520, 2), (600, 1), (700, 1)):
        index.add(rows_of_prompt(ids[:count], role=role))
    assert sorted(row.tokens for row in index.rows()) == [8, 188, 512]
    longest = max(row.id for row in index.rows())
    assert [row.tokens for row in index.promote([longest], 2)] == [8]
    assert sorted(row.tokens for row in index.rows()) == [188, 512]


def test_a_longer_page_replaces_shorter_ones(index: Index) -> None:
    ids = random_ids(900)
    for count in (520, 600, 700):
        index.add(rows_of_prompt(ids[:count]))
    assert [row.tokens for row in index.rows()] == [512, 188]
    other = rows_of_prompt(np.concatenate([ids[:600], random_ids(50, 3)]))
    assert index.add(other)[0].blob == other[0].blob  # the first page was known; the second is no continuation
    gone = index.add(rows_of_prompt(ids)[1:])
    assert [row.tokens for row in gone] == [188]
    assert sorted(row.tokens for row in index.rows()) == [138, 388, 512]
    assert index.total()[0] == 3


def test_what_is_pinned_or_worth_more_is_not_replaced(index: Index) -> None:
    ids = random_ids(900)
    held = added_rows(index, ids[:540])[1]
    index.pin([held.id], ME)
    group = added_rows(index, ids[:580], role=Role.GROUP)[1]
    pure = added_rows(index, ids[:620])[1]
    index.add(rows_of_prompt(ids, numerics=frozenset({"here", "there"}), role=1))
    assert {row.id for row in index.rows()} >= {held.id, group.id, pure.id}
    index.release_pins([held.id], ME)
    index.add(rows_of_prompt(ids[:899], role=1))
    assert {row.tokens for row in index.rows()} == {512, 580 - 512, 387, 388}


def test_partial_pages_under_one_parent_are_capped(index: Index) -> None:
    base = random_ids(512)
    index.add(rows_of_prompt(base))
    tails = [np.concatenate([base, random_ids(20, seed)]) for seed in range(1, CHILDREN + 4)]
    first, second = added_rows(index, tails[0])[1], added_rows(index, tails[1])[1]
    index.pin([first.id], ME)
    whole = added_rows(index, np.concatenate([base, random_ids(512, 1000)]))[1]
    assert index.add([rows_of_prompt(tail)[1] for tail in tails[2:CHILDREN]]) == []
    index.touch([second.id])
    gone = index.add([rows_of_prompt(tail)[1] for tail in tails[CHILDREN:]])
    left = {row.page_key for row in index.rows()}
    assert [row.page_key for row in gone] == [rows_of_prompt(tail)[1].page_key for tail in tails[2:5]]
    assert {first.page_key, second.page_key, whole.page_key} <= left
    assert len(left) == CHILDREN + 2


def test_an_id_is_never_given_twice(index: Index) -> None:
    row = added_rows(index, random_ids(20))[0]
    index.remove([row.id])
    assert added_rows(index, random_ids(20, 1))[0].id > row.id


# -- what goes -----------------------------------------------------------------------------------------------------


def test_victims_come_by_role_then_use_and_leaves_first(index: Index) -> None:
    group = added_rows(index, random_ids(600), role=Role.GROUP)
    old = added_rows(index, random_ids(1100, 1))
    new = added_rows(index, random_ids(600, 2))
    tail = added_rows(index, np.concatenate([random_ids(512), random_ids(60, 4)]), role=Role.TURN)[1]
    index.touch([row.id for row in old])
    order = [row.id for row in index.victims(1 << 40)]
    assert order == [new[1].id, new[0].id, tail.id, old[2].id, old[1].id, old[0].id, group[1].id, group[0].id]
    assert [row.id for row in index.victims(250)] == order[:3]
    assert index.victims(0) == []
    assert [row.id for row in index.remove(order)] == order
    assert index.total() == (0, 0)


def test_victims_are_never_pinned_by_who_runs(index: Index) -> None:
    rows = added_rows(index, random_ids(1100))
    index.pin([rows[1].id], ME)
    index.pin([rows[2].id], DEAD)
    assert [row.id for row in index.victims(1 << 40)] == [rows[2].id]
    index.release_pins([rows[1].id], ME)
    assert [row.id for row in index.victims(1 << 40)] == [row.id for row in reversed(rows)]


def test_quarantined_pages_go_first(index: Index) -> None:
    turn, group = added_rows(index, random_ids(600)), added_rows(index, random_ids(600, 1), role=2)
    index.quarantine(group[1].id, "x")
    assert [row.id for row in index.victims(150)] == [group[1].id, turn[1].id]


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_victims_are_what_a_slow_choice_takes(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Oracle: again and again the first by (quarantined, role, use) of those that nobody pins and no child needs."""
    with Index(Folder.open(tmp_path_factory.mktemp("store"))) as index:
        for seed in range(data.draw(st.integers(1, 4))):
            shared = data.draw(st.sampled_from([0, 512, 1024]))
            ids = np.concatenate([random_ids(1024)[:shared], random_ids(data.draw(st.integers(10, 1200)), seed + 1)])
            index.add(rows_of_prompt(ids, role=data.draw(st.integers(0, 2))))
        ids_ = [row.id for row in index.rows()]
        index.touch(data.draw(st.permutations(ids_)))
        held = set(data.draw(st.lists(st.sampled_from(ids_), max_size=2)))
        index.pin(held, ME)
        for bad in data.draw(st.lists(st.sampled_from(ids_), max_size=2)):
            index.quarantine(bad, "x")
        left, expected = list(index.rows()), []
        while free := [row for row in left if row.id not in held and not any(other.parent == row.page_key for other in left)]:
            expected.append(min(free, key=lambda row: (row.bad is None, row.role, row.used)))
            left.remove(expected[-1])
        assert [row.id for row in index.victims(1 << 40)] == [row.id for row in expected]


def test_remove_leaves_what_is_held_or_continued(index: Index) -> None:
    rows = added_rows(index, random_ids(1100))
    index.pin([rows[2].id], ME)
    assert index.remove([row.id for row in rows] + [999]) == []
    index.release_pins([rows[2].id], ME)
    assert index.remove([rows[0].id, rows[1].id]) == []
    assert [row.id for row in index.remove([rows[2].id, rows[1].id])] == [rows[2].id, rows[1].id]
    assert index.total() == (1, 100)
    rows = added_rows(index, random_ids(1100))
    index.pin([rows[1].id], ME)
    assert [row.id for row in index.remove([rows[1].id], force=True)] == [rows[1].id]
    assert index.stats()["pins"] == 0


def test_the_clock_may_jump_back(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = added_rows(index, random_ids(20))[0], added_rows(index, random_ids(20, 1))[0]
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now - 1e6)
    index.touch([first.id])
    third = added_rows(index, random_ids(20, 2))[0]
    assert [row.id for row in index.victims(1 << 40)] == [second.id, first.id, third.id]
    assert index.row(first.page_key, "fp").hits == 1  # type: ignore[union-attr]
    index.touch([second.id])
    assert [row.id for row in index.victims(1 << 40)] == [first.id, third.id, second.id]


def test_a_role_that_is_none_is_damage(folder: Folder, index: Index) -> None:
    index.add(rows_of_prompt(random_ids(600)))
    assert index.check() == []
    run_sql(folder, "UPDATE pages SET role = 87 WHERE place = 0")
    assert index.longest(SCOPE, random_ids(600), 600) == []
    assert "damaged" in index.check()[0]


def test_what_is_used_and_gone_is_told(index: Index) -> None:
    index.add(rows_of_prompt(random_ids(1100)))
    rows = list(index.rows())
    index.remove([rows[-1].id])
    assert index.touch([row.id for row in rows]) == {rows[-1].id}


def test_a_thread_that_comes_after_the_end_takes_no_lock(folder: Folder) -> None:
    index = Index(folder)
    index.close()
    with ThreadPoolExecutor(1) as pool, pytest.raises(StoreError, match="was closed"):
        pool.submit(lambda: index.total()).result()
    os.close(lock_index(folder))
