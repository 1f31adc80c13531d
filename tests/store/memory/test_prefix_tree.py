"""The store against brute force: longest exact prefix, bytes, budget, pins, order of eviction, and the reason for every miss."""

from __future__ import annotations

import random
import time
from dataclasses import replace

import pytest
import torch
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from agentcache.errors import ConfigError
from agentcache.kv import PAGE_TOKENS, Page
from agentcache.kv_spec import KVSpec
from agentcache.store.deletion import Deletion
from agentcache.store.entry import Entry, Match
from agentcache.store.keys import Ids, Scope, as_ids, page_key
from agentcache.store.memory import eviction_log
from agentcache.store.memory.eviction_log import EvictionLog
from agentcache.store.memory.prefix_tree import CHILDREN, LONGER, PrefixTree
from agentcache.store.page_prefetch import lend
from agentcache.store.store import Store
from agentcache.types import Reason
from tests.engines import check_store

SPEC = KVSpec(1, 1, 1, torch.bfloat16)
HERE = Scope("ns", "weights")


def keep(store: PrefixTree, ids: list[int], scope: Scope = HERE, numerics: str = "n") -> list[Page]:
    """Admit a prompt as the scheduler does: known pages are shared, the others are new."""
    found = store.match(scope, as_ids([*ids, 0]))
    whole = found.tokens // PAGE_TOKENS
    pages = list(found.pages[:whole])
    while len(pages) * PAGE_TOKENS < len(ids):
        pages.append(Page(SPEC))
        pages[-1].filled = min(PAGE_TOKENS, len(ids) - (len(pages) - 1) * PAGE_TOKENS)
    store.admit(scope, as_ids(ids), pages, frozenset([numerics]))
    return pages


def common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def kept_prompts(store: PrefixTree) -> list[list[int]]:
    """Every path of the tree, as the tokens it holds."""

    def ids(entry: Entry) -> list[int]:
        return [*ids(entry.parent), *entry.ids.tolist()] if entry.parent else []

    return [ids(entry) for entry in store.entries()]


def prompts(chance: random.Random) -> list[int]:
    """Shared prefixes whose lengths lie at, before and behind page boundaries."""
    base = random.Random(chance.randint(0, 2))
    ids = [base.randint(0, 3) for _ in range(chance.choice([1, 3, 511, 512, 513, 1023, 1024, 1500]))]
    return ids + [chance.randint(0, 3) for _ in range(chance.choice([0, 1, 2, 40, 511, 600]))]


@settings(derandomize=True, deadline=None, max_examples=25)
@given(st.integers(0, 2**32), st.integers(1, 12))
def test_the_longest_exact_prefix_under_eviction_and_pins(seed: int, room: int) -> None:
    chance = random.Random(seed)
    store = PrefixTree(room * SPEC.page_bytes)
    pinned: list[list[int]] = []
    for _ in range(30):
        ids = prompts(chance)
        action = chance.random()
        if action < 0.55:
            keep(store, ids)
        elif action < 0.65 and store.pin(HERE, as_ids(ids)):
            pinned.append(ids)
        elif action < 0.7 and pinned:
            assert store.release_pin(HERE.pin_name(as_ids(pinned.pop(chance.randrange(len(pinned))))))
        found = store.match(HERE, as_ids(ids))
        best = max((common(p, ids[:-1]) for p in kept_prompts(store)), default=0)
        assert found.tokens == best
        assert len(found.pages) == -(-best // PAGE_TOKENS)
        assert (found.missed == Reason.LAST_TOKEN) == (best == len(ids) - 1)
        check_store(store)
        audit = store.audit()
        assert audit["bytes"] <= store.eviction.budget_bytes or audit["pages"] == audit["pinned_pages"]
        for group in pinned:
            assert store.match(HERE, as_ids([*group, 9]), peek=True).tokens == len(group), "a pinned page was evicted"
    for group in pinned:
        store.release_pin(HERE.pin_name(as_ids(group)))
    assert store.audit()["pinned_pages"] == 0
    assert store.bytes <= store.eviction.budget_bytes
    store.clear()
    assert {name: count for name, count in store.audit().items() if count and name != "evictions"} == {}


def page_of(number: int, tokens: int = PAGE_TOKENS) -> list[int]:
    return [number] * tokens


def test_least_recently_used_goes_first_and_leaves_before_their_parents() -> None:
    store = PrefixTree(4 * SPEC.page_bytes)
    a, b = page_of(1) + page_of(2), page_of(3) + page_of(4)
    keep(store, a)
    keep(store, b)
    store.match(HERE, as_ids([*a, 0]))  # now b is older
    store.match(HERE, as_ids([*b, 0]), peek=True)  # peeking is no use
    keep(store, page_of(5))
    assert [store.match(HERE, as_ids([*p, 0]), peek=True).tokens for p in (a, b)] == [1024, 512]
    keep(store, page_of(6))
    assert [store.match(HERE, as_ids([*p, 0]), peek=True).tokens for p in (a, b)] == [1024, 0]


def test_a_released_prefix_goes_first_but_for_what_others_continue() -> None:
    store = PrefixTree(1 << 30)
    older, shared, own, other = (page_of(number) for number in range(4))
    for ids in (older, shared + own, shared + other):
        keep(store, ids)
    assert store.pin(HERE, as_ids(shared + own)) == 2
    assert store.release_pin(HERE.pin_name(as_ids(shared + own)), first=True)
    assert [entry.ids.tolist() for entry in store.entries()] == [own, older, other, shared]


def test_partial_pages_are_found_by_longest_common_run() -> None:
    store = PrefixTree(100 * SPEC.page_bytes)
    keep(store, page_of(1) + [2] * 100 + [3] * 50)
    keep(store, page_of(1) + [2] * 100 + [4] * 80)
    assert len(store) == 3
    assert store.match(HERE, as_ids(page_of(1) + [2] * 100 + [4] * 30 + [5])).tokens == 642
    longer = keep(store, page_of(1) + [2] * 100 + [3] * 60)
    assert len(store) == 3, "the longer one replaces the shorter"
    assert store.match(HERE, as_ids(page_of(1) + [2] * 100 + [3] * 99)).pages[1] is longer[1]
    keep(store, page_of(1) + [2] * 100 + [3] * 20)
    assert len(store) == 3, "a shorter one is known already"
    assert store.bytes == 3 * SPEC.page_bytes


def test_twenty_prompts_on_one_prefix_keep_its_sealed_pages_once() -> None:
    store = PrefixTree(1000 * SPEC.page_bytes)
    prefix = page_of(1) + page_of(2) + page_of(3)
    for agent in range(20):
        keep(store, prefix + [10 + agent] * 30)
    assert len(store) == 3 + 20
    assert store.bytes == 23 * SPEC.page_bytes
    first = store.match(HERE, as_ids([*prefix, 10, 0])).pages[:3]
    assert store.match(HERE, as_ids([*prefix, 29, 0])).pages[:3] == first


def test_continuations_of_one_page_are_capped() -> None:
    store = PrefixTree(10**9)
    for number in range(CHILDREN + 20):
        keep(store, [7, number, number])
    assert len(store) == CHILDREN
    newest = CHILDREN + 19
    assert store.match(HERE, as_ids([7, newest, newest, 0])).tokens == 3
    assert store.match(HERE, as_ids([7, 1, 1, 0])).tokens == 1  # [7, 0, 0] was matched again and again
    check_store(store)


def test_pins_hold_exactly_what_was_pinned() -> None:
    store = PrefixTree(2 * SPEC.page_bytes)
    group = page_of(1, 700)
    keep(store, group)
    assert store.pin(HERE, as_ids(group)) == 2
    assert store.pin(HERE, as_ids(group)) == 2
    for number in range(5):
        keep(store, page_of(10 + number))
    assert store.bytes == 2 * SPEC.page_bytes
    assert store.release_pin(HERE.pin_name(as_ids(group)))
    keep(store, page_of(20))
    assert store.match(HERE, as_ids([*group, 0])).tokens == 700, "pinned twice, released once"
    assert store.release_pin(HERE.pin_name(as_ids(group)))
    assert not store.release_pin(HERE.pin_name(as_ids(group)))
    keep(store, page_of(21) + page_of(22))
    assert store.match(HERE, as_ids([*group, 0])).tokens == 0


def test_a_pin_of_what_is_not_kept_pins_nothing() -> None:
    store = PrefixTree(10 * SPEC.page_bytes)
    keep(store, page_of(1))
    assert store.pin(HERE, as_ids(page_of(1) + [2])) == 0
    assert store.audit()["pinned_pages"] == 0


def reason(store: PrefixTree, ids: list[int], scope: Scope = HERE) -> Reason:
    return store.match(scope, as_ids(ids)).missed


def test_every_miss_has_its_reason() -> None:
    store = PrefixTree(2 * SPEC.page_bytes)
    prompt = page_of(1) + [2] * 100
    assert reason(store, prompt) == Reason.COLD
    keep(store, prompt)
    assert reason(store, prompt) == Reason.LAST_TOKEN
    longer, other = store.match(HERE, as_ids([*prompt, 3, 3])), store.match(HERE, as_ids([*prompt[:600], 3, 3]))
    assert (longer.missed, longer.detail) == (Reason.DIVERGED, LONGER)
    assert (other.missed, other.detail) == (Reason.DIVERGED, "cached prompts go on differently from here")
    for weights, missed, owner in (
        ("other weights", Reason.FINGERPRINT, "weights, config or versions"),
        ("weights+a", Reason.ADAPTER, "adapter"),
    ):
        found = store.match(Scope("ns", weights), as_ids(prompt))
        assert found.missed == missed
        assert found.detail.startswith("cached under ")
        assert found.detail.endswith(owner)
    assert reason(store, prompt, Scope("other", "weights")) == Reason.COLD
    keep(store, page_of(8))  # evicts the partial page
    assert reason(store, prompt) == Reason.EVICTED
    assert reason(store, [*prompt, 5, 6, 7]) == Reason.EVICTED, "a prompt that has grown since"
    assert reason(store, page_of(1) + [9] * 100) == Reason.DIVERGED
    keep(store, page_of(8) + page_of(9))
    assert reason(store, prompt) == Reason.EVICTED
    assert reason(store, prompt[:300]) == Reason.EVICTED, "a prompt that ends inside the evicted page"
    assert reason(store, prompt, Scope("ns", "other weights")) == Reason.FINGERPRINT
    keep(store, prompt)
    assert reason(store, prompt) == Reason.LAST_TOKEN


def test_numerics_of_all_pages_are_told() -> None:
    store = PrefixTree(100 * SPEC.page_bytes)
    keep(store, page_of(1), numerics="a")
    keep(store, page_of(1) + [2] * 9, numerics="b")
    assert store.match(HERE, as_ids(page_of(1) + [2, 3])).numerics == {"a", "b"}
    assert store.match(HERE, as_ids(page_of(1))).numerics == {"a"}


def test_forget_takes_back_own_pages_and_nothing_else() -> None:
    store = PrefixTree(100 * SPEC.page_bytes)
    shared = page_of(1) + [2] * 100
    pages = keep(store, shared)
    full = shared + [3] * 412 + page_of(4)
    own = [pages[1], Page(SPEC)]
    for page in own:
        page.filled = PAGE_TOKENS
    store.admit(HERE, as_ids(full), [pages[0], *own], frozenset("n"))
    assert store.match(HERE, as_ids([*full, 0])).tokens == len(full)
    store.retract(HERE, as_ids(full), len(shared), own)
    assert store.match(HERE, as_ids([*full, 0])).tokens == len(shared)
    assert store.match(HERE, as_ids([*shared, 0])).pages == tuple(pages)
    assert len(store) == 2
    store.retract(HERE, as_ids(full), 0, [Page(SPEC)])
    assert len(store) == 2, "somebody else's pages"
    check_store(store)


def test_clear_of_one_namespace_leaves_the_others() -> None:
    store = PrefixTree(100 * SPEC.page_bytes)
    keep(store, page_of(1))
    keep(store, page_of(1), Scope("b", "weights"))
    store.pin(HERE, as_ids(page_of(1)))
    store.clear("ns")
    assert reason(store, page_of(1)) == Reason.EVICTED
    assert reason(store, page_of(1), Scope("b", "weights")) == Reason.LAST_TOKEN
    assert len(store) == 1
    assert not store.release_pin(HERE.pin_name(as_ids(page_of(1))))


def test_lent_pages_are_forgotten_with_those_they_share() -> None:
    store, lossy, ids = PrefixTree(1 << 20), replace(HERE, precision="int8"), page_of(1, 200)
    keep(store, ids)
    for entry in store.entries():
        entry.made -= 3600
    lend(store, lossy, as_ids([*ids, 0]))
    assert store.match(lossy, as_ids([*ids, 0])).tokens == 200
    store.remove(Deletion(before=time.time() - 1800))
    assert store.entries() == []


def test_lent_pages_are_evicted_as_others_are() -> None:
    store, ids = PrefixTree(2 * SPEC.page_bytes), page_of(1, 200)
    keep(store, ids)
    lend(store, replace(HERE, precision="int8"), as_ids([*ids, 0]))
    for first in (2, 3):
        keep(store, page_of(first, 200))
    assert [entry.ids[0] for entry in store.entries()] == [2, 3]
    assert store.bytes == 2 * SPEC.page_bytes


def test_pages_amid_a_prompt_are_used_with_those_before_them() -> None:
    store = PrefixTree(4 * SPEC.page_bytes)
    ids = [*page_of(1), *page_of(2)]
    keep(store, ids)
    keep(store, page_of(3))
    assert store.use(store.path(HERE, as_ids(ids))[1:])
    check_store(store)
    assert [entry.ids[0] for entry in store.entries()] == [3, 2, 1]


def test_changes_tells_whether_a_match_may_differ() -> None:
    store = PrefixTree(100 * SPEC.page_bytes)
    keep(store, page_of(1))
    before = store.changes
    store.match(HERE, as_ids(page_of(1)))
    keep(store, page_of(1))
    assert store.changes == before, "known pages are no news"
    keep(store, page_of(1) + [2])
    assert store.changes > before


@pytest.mark.parametrize("budget", [-1, 1.5, "1GB", True])
def test_a_budget_that_cannot_work_is_refused(budget: object) -> None:
    with pytest.raises(ConfigError, match=f"memory_bytes={budget!r}"):
        Store.checked(None, budget)  # type: ignore[arg-type]


def test_a_budget_of_nothing_or_too_little_keeps_nothing() -> None:
    for budget in (0, SPEC.page_bytes - 1):
        store = PrefixTree(budget)
        keep(store, page_of(1) + page_of(2))
        assert (store.bytes, len(store)) == (0, 0)


def test_what_was_dropped_is_remembered_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eviction_log, "REMEMBERED", 10)
    dropped = EvictionLog()
    parent = b"p"
    many: list[Ids] = [as_ids([number, 1]) for number in range(30)]
    for ids in many:
        dropped.add(parent, page_key(parent, ids), ids, "f", Reason.EVICTED)
    assert len(dropped) == 10
    assert dropped.why(parent, many[-1], 0, "f") == Reason.EVICTED
    assert dropped.why(parent, many[0], 0, "f") is None
    for ids in many:
        dropped.discard(page_key(parent, ids))
    assert (len(dropped), dropped._under) == (0, {})


def best_ms(run: object) -> float:
    times = []
    for _ in range(7):
        began = time.thread_time()  # of this thread alone: others may be busy
        run()  # type: ignore[operator]
        times.append((time.thread_time() - began) * 1e3)
    return min(times)


@pytest.mark.parametrize("tokens", [3_000, 37_000])
def test_a_lookup_costs_about_what_hashing_its_ids_costs(tokens: int) -> None:
    """Whatever the tree holds beside them."""
    store = PrefixTree(10**9)
    ids = [number * 31 % 150_000 for number in range(tokens)]
    keep(store, ids)
    for agent in range(100):
        keep(store, [*ids[: tokens - 40], agent, agent])
    found: list[Match] = []
    hashing = best_ms(lambda: blake3(as_ids([*ids, 1]).tobytes()).digest())
    assert best_ms(lambda: found.append(store.match(HERE, as_ids([*ids, 1])))) < 12 * hashing
    assert found[-1].tokens == tokens


def test_an_audit_counts_pages_and_pins() -> None:
    store = PrefixTree(3 * SPEC.page_bytes)
    keep(store, page_of(1, 700))
    keep(store, page_of(2), Scope("other", "weights"))
    assert store.pin(HERE, as_ids(page_of(1, 700))) == store.pin(HERE, as_ids(page_of(1, 700))) == 2
    keep(store, page_of(3))
    held = {"pages": 3, "bytes": 3 * SPEC.page_bytes, "host_bytes": 0, "scopes": 1, "pins": 2, "pinned_pages": 2}
    assert store.audit() == {**held, "indexed": 0, "evictions": 1}
