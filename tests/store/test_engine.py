"""The store on disk through the engine: the same bits from every tier, and nothing computed, written or served that should not be."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from agentcache import Engine, Message, Reason
from agentcache.errors import EngineClosedError
from agentcache.kv import Page
from agentcache.kv_spec import KVSpec
from agentcache.model.hf import HFModel
from agentcache.store import page_prefetch
from agentcache.store.disk import blob_io
from agentcache.store.disk.index import Index
from agentcache.store.keys import Role, Scope, as_ids
from agentcache.store.memory.prefix_tree import PrefixTree
from agentcache.types import StoreOptions
from tests import models
from tests.engines import SYSTEM, TOOLS, Spy, chat, check_store, decode, engine, long_text, tool, wait_until
from tests.store import stored_pages

TURNS = chat(long_text(150), "North, four.", "And the tide? " + long_text(60, 1))


@pytest.fixture(scope="module")
def model() -> Any:
    """One for all tests that do not change its weights."""
    return models.build("qwen3", num_hidden_layers=2)


def rows(running: Engine) -> list[Any]:
    """What lies on disk, once all is written."""
    assert running.flush()
    assert running.store.disk
    return list(running.store.disk.index.rows())


def state(running: Engine, messages: Any, spy: Spy) -> tuple[tuple[int, ...], list[torch.Tensor]]:
    """What memory holds of a prompt, as one tensor of keys and one of values per layer, and the ids."""
    ids = running.renderer.render(messages).ids
    assert running.fingerprint
    found = running.store.tree.match(Scope("default", running.fingerprint.whole), as_ids(ids), peek=True)
    assert found.tokens == len(ids) - 1
    kept = []
    for layer in range(found.pages[0].spec.layers):
        kept.append(torch.cat([page.layer_keys[layer] for page in found.pages], -1)[..., : found.tokens].clone())
        kept.append(torch.cat([page.layer_values[layer] for page in found.pages], 1)[:, : found.tokens].clone())
    return tuple(ids), kept


def equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) > 0 and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


# -- the same bits -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_every_tier_gives_the_same_bits(dtype: torch.dtype, tmp_path: Path) -> None:
    model = models.build("qwen3", dtype, num_hidden_layers=2)
    longer = [*TURNS, {"role": "assistant", "content": "x"}, {"role": "user", "content": "Go on. " + long_text(20, 2)}]
    strangers = [chat(long_text(20 + 10 * i, 7 + i)) for i in range(3)]
    with engine(model=model, store=tmp_path / "store") as first:
        spy = Spy(first)
        off = first.generate(TURNS, sampling=decode(), reuse="off")
        wanted = list(spy.logits)
        off_longer = first.generate(longer, sampling=decode(), reuse="off")
        wanted_longer = spy.logits[len(wanted) :]
        assert not rows(first), "reuse off wrote something"

        def check(running: Engine, spy: Spy, messages: Any = TURNS) -> Any:
            spy.logits.clear()
            done = running.generate(messages, sampling=decode())
            assert equal(wanted if messages is TURNS else wanted_longer, spy.logits)
            assert done.ids == (off if messages is TURNS else off_longer).ids
            assert done.receipt.bitwise
            assert not {r.reason for r in done.receipt.refusals} - {Reason.LAST_TOKEN, Reason.DIVERGED, Reason.COLD}
            return done.receipt

        assert check(first, spy).cached_tokens == 0
        _, kept = state(first, TURNS, spy)
        hit = check(first, spy)
        assert (hit.computed_tokens, hit.disk_tokens) == (1, 0)
        assert rows(first)
        first.store.clear()
        again = check(first, spy)
        assert again.disk_tokens == again.cached_tokens == hit.cached_tokens
        assert again.disk_bytes > 0
        assert again.load_ms > 0
        assert equal(state(first, TURNS, spy)[1], kept)
    with engine(model=model, store=tmp_path / "store") as second:
        spy = Spy(second)
        streams = [second.stream(prompt, sampling=decode(12)) for prompt in strangers]
        for stream in streams:
            next(stream)
        packed = second.generate(TURNS, sampling=decode())
        assert packed.ids == off.ids
        assert packed.receipt.cached_tokens == hit.cached_tokens, "packed with others"
        assert packed.receipt.disk_tokens > 700, "all but the page that the others read before"
        assert packed.receipt.bitwise
        assert equal(state(second, TURNS, spy)[1], kept)
        for stream in streams:
            assert len(stream.completion.ids) == 12
        second.store.clear()
        branched = check(second, spy, longer)
        assert 0 < branched.disk_tokens < branched.prompt_tokens - 1
        assert check(second, spy).disk_tokens == 0, "memory has it now"
        check_store(second.store)


def test_a_page_of_other_kernels_is_exact_and_not_bitwise(model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    numerics = HFModel.numerics.fget  # type: ignore[attr-defined]

    def other(self: HFModel) -> Any:
        return replace(numerics(self), digest="of another machine")

    first_turn = [*TURNS[:1], {"role": "user", "content": long_text(150)}]
    with engine(model=model, store=tmp_path / "store") as first:
        first.generate(first_turn, sampling=decode())
    with engine(model=model, store=tmp_path / "store") as second, monkeypatch.context() as patch:
        patch.setattr(HFModel, "numerics", property(other))
        receipt = second.generate([*first_turn, *TURNS[2:], {"role": "user", "content": long_text(200, 4)}], sampling=decode()).receipt
        assert receipt.disk_tokens > 500
        assert not receipt.bitwise
        assert Reason.NUMERICS in {refusal.reason for refusal in receipt.refusals}
        assert second.flush()
    with engine(model=model, store=tmp_path / "store") as third:
        both = third.generate([*first_turn, *TURNS[2:], {"role": "user", "content": long_text(200, 4)}], sampling=decode(1)).receipt
        assert both.disk_tokens > 1000
        assert not both.bitwise
        receipt = third.generate([*first_turn[:1], {"role": "user", "content": long_text(60)}], sampling=decode(1)).receipt
        assert 300 < receipt.cached_tokens < 512
        assert receipt.bitwise, "the first page was computed here, whatever came behind it"


# -- tool groups and the model's own words -------------------------------------------------------------------------------


def test_the_next_engine_finds_a_group_and_its_order(model: Any, tmp_path: Path) -> None:
    system = SYSTEM + long_text(150)
    with engine(model=model, store=tmp_path / "store") as first:
        first.warm(system, TOOLS, name="agents")
        found = rows(first)
        assert {row.role for row in found} == {Role.GROUP}
        assert first.store.disk.index.pinned() == {row.id for row in found}
        assert first.release("agents")
        assert first.flush()
        assert first.store.disk.index.pinned() == set()
    grown = [tool("added", "thing"), *reversed(TOOLS)]
    with engine(model=model, store=tmp_path / "store") as second:
        sticky = second.generate(chat("hi", system=system), grown, sampling=decode(1), tools_order="sticky", group="agents").receipt
        given = second.renderer.render(chat("hi", system=system), grown).ids
        in_order = second.renderer.render(chat("hi", system=system), TOOLS).ids
        shared = next(i for i, (a, b) in enumerate(zip(given, in_order, strict=False)) if a != b)
        assert sticky.disk_tokens > shared + 20, "what the tools' own order would have shared"
        again = second.warm(system, TOOLS, name="agents")
        assert again.computed_tokens == 1
        assert second.flush()
        assert len(second.store.disk.index.pinned()) == again.pages


def test_a_prefix_made_a_group_is_one_on_disk(model: Any, tmp_path: Path) -> None:
    system = SYSTEM + long_text(300)
    with engine(model=model, store=tmp_path / "store") as first:
        first.generate(chat("hi", system=system), TOOLS, sampling=decode(1))
    with engine(model=model, store=tmp_path / "store") as second:
        assert Role.GROUP not in {row.role for row in rows(second)}
        group = second.warm(system, TOOLS, name="agents")
        assert group.computed_tokens < 512
        assert sum(row.role == Role.GROUP for row in rows(second)) == group.pages
        written = second.store.disk.writer.counts["written"]
        assert written <= 1, "only the group's last page is new"


def test_an_audit_counts_pages_in_memory_and_on_disk(model: Any, tmp_path: Path) -> None:
    with engine(model=model, store=tmp_path / "store") as running:
        assert not any(running.store.audit().values())
        group = running.warm(SYSTEM + long_text(200), TOOLS, name="tools")
        assert running.flush()
        audit = running.store.audit()
        assert audit["pages"] == audit["pinned_pages"] == audit["disk_pages"] == audit["disk_pins"] == group.pages
        assert (audit["pins"], audit["groups"], audit["quarantined"], audit["leases"], audit["waiting_pages"]) == (1, 1, 0, 0, 0)
        assert audit["disk_bytes"] == sum(row.bytes for row in rows(running))
        running.release("tools")
        assert running.flush()
        audit = running.store.audit()
        assert (audit["pins"], audit["pinned_pages"], audit["disk_pins"], audit["disk_pages"]) == (0, 0, 0, group.pages)


def test_two_engines_of_one_process_keep_their_own_pins(tmp_path: Path) -> None:
    with engine(store=tmp_path / "store") as first, engine(store=tmp_path / "store") as second:
        group = first.warm(SYSTEM + long_text(150), TOOLS, name="a")
        assert first.flush()
        second.warm(SYSTEM, TOOLS, name="b")
        second.close()
        assert len(first.store.disk.index.pinned()) == group.pages


def test_a_conversation_resumed_in_another_engine_costs_its_new_tokens(model: Any, tmp_path: Path) -> None:
    turns: list[Any] = list(TURNS)
    with engine(model=model, store=tmp_path / "store") as first:
        for number in range(3):
            done = first.generate(turns, sampling=decode(20, temperature=1.5, seed=number))
            turns += [done.message, {"role": "user", "content": f"Go on, {number}."}]
        known = done.receipt.prompt_tokens + len(done.ids) - 1
        expected = first.renderer.render(turns).ids
    with engine(model=model, store=tmp_path / "store") as second:
        receipt = second.generate(turns, sampling=decode(4)).receipt
        assert second.renderer.render(turns).ids == expected
        assert receipt.spliced_tokens == 60
        assert receipt.disk_tokens == known
        assert receipt.computed_tokens == receipt.prompt_tokens - known
    with engine(model=model, store=tmp_path / "store") as third:
        other = third.generate(turns, sampling=decode(1), namespace="other").receipt
        assert (other.spliced_tokens, other.cached_tokens, other.disk_tokens) == (0, 0, 0)


def test_a_very_long_conversation_is_resumed(model: Any, tmp_path: Path) -> None:
    """Turn behind turn: no recursion, whatever the number of turns."""
    turns: list[Any] = chat("0")
    with engine(model=model, store=tmp_path / "store") as first:
        renderer = first.renderer
        for number in range(180):
            layout = renderer.render(turns)
            ids = first.tokenizer(f"a{number}<|im_end|>", add_special_tokens=False)["input_ids"]
            renderer.remember(layout, ids, Message("assistant", f"a{number}"))
            turns += [{"role": "assistant", "content": f"a{number}"}, {"role": "user", "content": "go"}]
        expected = renderer.render(turns)
    with engine(model=model, store=tmp_path / "store") as second:
        found = second.renderer.render(turns)
        assert found.ids == expected.ids
        assert found.spliced_tokens == expected.spliced_tokens > 180


# -- what must not match ---------------------------------------------------------------------------------------------------


def test_namespaces_and_weights_never_meet_on_disk(model: Any, tmp_path: Path) -> None:
    with engine(model=model, store=tmp_path / "store") as first:
        first.generate(TURNS, sampling=decode(1), namespace="mine")
    with engine(model=model, store=tmp_path / "store") as second:
        for namespace in ("default", "other", "mine "):
            assert second.generate(TURNS, sampling=decode(1), namespace=namespace).receipt.cached_tokens == 0
        assert second.generate(TURNS, sampling=decode(1), namespace="mine").receipt.disk_tokens > 1000
    with engine(model=models.build("qwen3", num_hidden_layers=2, seed=1), store=tmp_path / "store") as other:
        assert other.generate(TURNS, sampling=decode(1), namespace="mine").receipt.cached_tokens == 0


def test_invalidated_weights_find_only_their_own_pages(tmp_path: Path) -> None:
    model = models.build("qwen3", num_hidden_layers=2)
    with engine(model=model, store=tmp_path / "store") as running:
        before = running.generate(TURNS, sampling=decode()).ids
        assert running.flush()
        weight = model.model.layers[0].mlp.up_proj.weight
        was = weight.data.clone()
        weight.data *= 1.5
        running.invalidate()
        changed = running.generate(TURNS, sampling=decode()).receipt
        assert changed.cached_tokens == changed.disk_tokens == 0
        weight.data.copy_(was)
        running.invalidate()
        running.store.clear()
        back = running.generate(TURNS, sampling=decode())
        assert back.ids == before
        assert back.receipt.disk_tokens > 1000


# -- budgets -----------------------------------------------------------------------------------------------------------------


def test_what_is_on_disk_is_not_written_again(model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writes: list[int] = []
    write = blob_io.write
    monkeypatch.setattr(blob_io, "write", lambda folder, row, *page: (writes.append(row.place), write(folder, row, *page))[1])
    with engine(model=model, store=tmp_path / "store") as first:
        for _ in range(3):
            first.generate(TURNS, sampling=decode(3))
            assert first.flush()
        count = len(writes)
        assert count == len(rows(first))
        budget = first.store.disk.writer.budget.left_bytes
        first.store.clear()
        first.generate(TURNS, sampling=decode(3))
        assert first.flush()
    with engine(model=model, store=tmp_path / "store") as second:
        second.generate(TURNS, sampling=decode(3), reuse="off")
        second.generate(TURNS, sampling=decode(3))
        assert second.flush()
        assert second.store.disk.writer.counts["written"] == 0
        assert second.store.disk.writer.budget.left_bytes >= budget
    with engine(model=model, store=tmp_path / "store") as third, monkeypatch.context() as patch:
        patch.setattr(page_prefetch.PagePrefetch, "_look", lambda self: setattr(self, "state", page_prefetch.State.DONE))
        assert third.generate(TURNS, sampling=decode(3)).receipt.cached_tokens == 0
        assert third.flush()
        assert third.store.disk.writer.counts["known"] == count, "computed again, found on disk, not written"
    assert len(writes) == count


def test_turns_go_before_groups_and_pinned_pages_never(model: Any, tmp_path: Path) -> None:
    with engine(model=model, store=tmp_path / "probe") as probe:
        probe.generate(TURNS, sampling=decode(1))
        page = max(row.bytes for row in rows(probe))
    options = StoreOptions(tmp_path / "store", disk_bytes=12 * page)
    with engine(model=model, store=options) as running:
        pinned = running.warm(SYSTEM + long_text(200), name="pinned")
        free = running.warm(SYSTEM + long_text(200, 1), name="free")
        running.release("free")
        for i in range(12):
            running.generate(chat(long_text(120, 20 + i)), sampling=decode(1))
            assert sum(row.bytes for row in rows(running)) <= 12 * page
        left = rows(running)
        assert sum(row.role == Role.GROUP for row in left) == pinned.pages + free.pages
        assert running.store.disk.writer.counts["written"] > 20
        assert not running.store.disk.writer.counts["no room"]
        on_disk = {file.stem for file in (tmp_path / "store" / "blobs").rglob("*.safetensors")}
        assert on_disk == {row.blob for row in left}
        for i in range(6):
            running.warm(SYSTEM + long_text(200, 50 + i), name=f"more {i}")
            running.flush()
        assert len(running.store.disk.index.pinned()) >= pinned.pages
        kept = {row.id for row in rows_unflushed(running)}
        assert running.store.disk.index.pinned() <= kept
        assert sum(row.bytes for row in rows_unflushed(running)) <= 12 * page
    with engine(model=model, store=options) as second:
        assert second.warm(SYSTEM + long_text(200), name="pinned").computed_tokens == 1


def rows_unflushed(running: Engine) -> list[Any]:
    assert running.store.disk
    return list(running.store.disk.index.rows())


def test_a_smaller_budget_than_what_lies_there_is_reached(model: Any, tmp_path: Path) -> None:
    with engine(model=model, store=tmp_path / "store") as first:
        for i in range(6):
            first.generate(chat(long_text(120, i)), sampling=decode(1))
        size = sum(row.bytes for row in rows(first))
    with engine(model=model, store=StoreOptions(tmp_path / "store", disk_bytes=size // 3)) as second:
        second.generate(chat(long_text(120, 9)), sampling=decode(1))
        assert sum(row.bytes for row in rows(second)) <= size // 3
        assert second.store.disk.writer.counts["written"] >= 1


def test_the_write_budget_bounds_what_is_written(model: Any, tmp_path: Path) -> None:
    with engine(model=model, store=StoreOptions(tmp_path / "store", write_bytes_per_hour=600_000)) as running:
        for i in range(4):
            running.generate(chat(long_text(200, i)), sampling=decode(1))
        assert 0 < sum(row.bytes for row in rows(running)) <= 600_000
        assert running.store.disk.writer.counts["over budget"]
        assert all(row.place == 0 or any(row.parent == other.page_key for other in rows(running)) for row in rows(running))


def test_without_memory_or_reuse_nothing_is_written(model: Any, tmp_path: Path) -> None:
    with engine(model=model, store=tmp_path / "store", memory_bytes=0) as running:
        for _ in range(2):
            assert running.generate(TURNS, sampling=decode(2)).receipt.cached_tokens == 0
        assert rows(running) == []
    with engine(model=model, store=tmp_path / "off", reuse="off") as running:
        running.generate(TURNS, sampling=decode(2))
        assert running.store.disk is None
    assert not (tmp_path / "off").exists()


def test_a_memory_too_small_for_the_prompt_names_use(model: Any, tmp_path: Path) -> None:
    with engine(model=model, store=tmp_path / "store") as first:
        first.generate(TURNS, sampling=decode(2))
        assert first.model.spec
        page = first.model.spec.page_bytes
    with engine(model=model, store=tmp_path / "store", memory_bytes=page) as second:
        for _ in range(2):
            receipt = second.generate(TURNS, sampling=decode(2)).receipt
            assert receipt.disk_tokens <= receipt.cached_tokens <= 512
            assert receipt.cached_tokens + receipt.computed_tokens == receipt.prompt_tokens


# -- while it loads ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[threading.Event, threading.Event]]:
    """Reading waits for the second event (or to be stopped) once it has set the first."""
    began, go = threading.Event(), threading.Event()
    read_many = blob_io.read_many

    def slow(folder: Any, jobs: Any, *, stop: threading.Event, progress: Any) -> Any:
        began.set()
        while not (go.wait(0.005) or stop.is_set()):
            pass
        return read_many(folder, jobs, stop=stop, progress=progress)

    monkeypatch.setattr(blob_io, "read_many", slow)
    yield began, go
    go.set()


def test_cancelling_while_pages_are_read(model: Any, tmp_path: Path, held: Any) -> None:
    began, go = held
    with engine(model=model, store=tmp_path / "store") as running:
        expected = running.generate(TURNS, sampling=decode(3)).ids
        assert running.flush()
        running.store.clear()
        stream = running.stream(TURNS, sampling=decode(3))
        assert began.wait(10)
        other = running.generate(chat("someone else"), sampling=decode(2), reuse="off")
        assert len(other.ids) == 2, "others go on meanwhile"
        stream.close()
        assert wait_until(lambda: not running.scheduler._waiting)
        go.set()
        done = running.generate(TURNS, sampling=decode(3))
        assert done.ids == expected
        assert done.receipt.disk_tokens > 1000
        check_store(running.store)


def test_closing_while_pages_are_read(model: Any, tmp_path: Path, held: Any) -> None:
    began, _ = held
    with engine(model=model, store=tmp_path / "store") as running:
        running.generate(TURNS, sampling=decode(3))
        assert running.flush()
        running.store.clear()
        stream = running.stream(TURNS, sampling=decode(3))
        assert began.wait(10)
        running.close()
        with pytest.raises(EngineClosedError):
            stream.completion  # noqa: B018
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("agentcache-writer")]


def test_twenty_threads_share_what_is_on_disk(model: Any, tmp_path: Path) -> None:
    prompts = [chat(long_text(20 + 7 * i, i), system=SYSTEM + long_text(200)) for i in range(10)]
    with engine(model=model, store=tmp_path / "store") as first:
        expected = [first.generate(p, sampling=decode(4, temperature=1.0, seed=1)).ids for p in prompts]
    wrong: list[Any] = []
    with engine(model=model, store=tmp_path / "store") as second:

        def one(number: int) -> None:
            done = second.generate(prompts[number % 10], sampling=decode(4, temperature=1.0, seed=1))
            receipt = done.receipt
            if done.ids != expected[number % 10] or receipt.cached_tokens < receipt.prompt_tokens - 1 or not receipt.bitwise:
                wrong.append(str(receipt))

        threads = [threading.Thread(target=one, args=(number,)) for number in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        assert not wrong
        check_store(second.store)
        assert rows(second)
        assert second.store.disk.writer.counts["written"] <= 10, "nothing but what the answers added"


def test_a_short_request_is_written_without_being_waited_for(model: Any, tmp_path: Path) -> None:
    """The last round of a request that asks for one token is one that fills: the writer must not think it goes on."""
    with engine(model=model, store=tmp_path / "store") as running:
        running.generate(TURNS, sampling=decode(1))
        assert running.store.disk
        assert wait_until(lambda: running.store.disk.index.total()[0] >= 2, 5)


# -- the host tier ---------------------------------------------------------------------------------------------------------------


def test_the_host_tier_gives_back_what_it_took() -> None:
    spec = KVSpec(2, 2, 16, torch.bfloat16)
    tree = PrefixTree(2 * spec.page_bytes, 3 * spec.page_bytes)
    scope = Scope("a", "weights")
    prompts: list[tuple[Any, Page]] = []
    for i in range(5):
        ids = as_ids(list(range(1000 * i, 1000 * i + 300)))
        prompts.append((ids, stored_pages.noise_page(spec, 300, seed=i)))
        tree.admit(scope, ids, [prompts[-1][1]], "n")
    assert (tree.bytes, tree.eviction.host_bytes) == (2 * spec.page_bytes, 3 * spec.page_bytes)
    for _ in range(2):
        for ids, page in prompts:
            found = tree.match(scope, as_ids([*ids.tolist(), 9]))
            assert found.tokens == 300
            assert found.pages[0].tier == "device"
            assert stored_pages.same_numbers(found.pages[0], page, 300)
            assert tree.bytes <= 2 * spec.page_bytes
            assert tree.eviction.host_bytes <= 3 * spec.page_bytes
    tree.admit(scope, as_ids(list(range(9000, 9100))), [stored_pages.noise_page(spec, 100, seed=9)], "n")
    assert len(tree) == 5, "both tiers are full: the oldest went"


def test_a_match_ends_where_the_device_memory_does() -> None:
    spec = KVSpec(1, 1, 16, torch.bfloat16)
    tree = PrefixTree(2 * spec.page_bytes, 4 * spec.page_bytes)
    scope = Scope("a", "weights")
    ids = as_ids(list(range(4 * 512)))
    tree.admit(scope, ids, [stored_pages.noise_page(spec, 512, seed=i) for i in range(4)], "n")
    for _ in range(3):
        found = tree.match(scope, as_ids([*ids.tolist(), 1]))
        assert found.tokens == 512 * len(found.pages)
        assert {page.tier for page in found.pages} <= {"device"}
        assert found.tokens >= 512


@pytest.mark.parametrize("thread", ["writing", "reading"])
def test_an_engine_collected_by_its_own_thread_is_closed(model: Any, tmp_path: Path, thread: str) -> None:
    """Garbage is collected on any thread."""
    with engine(model=model, store=tmp_path) as running:
        running.generate(TURNS, sampling=decode(4))
        disk = running.store.disk
        assert disk
        (disk.writer.after if thread == "writing" else disk.submit)(running.close)
        assert wait_until(lambda: disk.index.database._closed)
        for ending in threading.enumerate():
            if ending.name == "agentcache-end":
                ending.join(20)
    with Index(disk.folder) as index:
        assert index.total()[0] > 2, "what waited was written"
        assert index.pinned() == set()


def test_an_index_in_use_is_closed_with_its_engine(model: Any, tmp_path: Path) -> None:
    with engine(model=model, store=tmp_path / "store") as running:
        index: Index = running.store.disk.index
        running.generate(TURNS, sampling=decode(1))
    with pytest.raises(OSError, match="closed"):
        index.total()


def test_reuse_off_leaves_nothing_and_sorted_groups_their_order(tmp_path: Path) -> None:
    with engine(store=tmp_path / "store") as running:
        assert running.store.disk is not None
        running.generate(chat("x"), TOOLS, sampling=decode(3), reuse="off")
        running.flush()
        stats = running.store.disk.index.stats()
        assert (stats["rows"], stats["splices"]) == (0, 0)
        running.warm(SYSTEM, [tool("zinc", "grade"), tool("alum", "grade")], name="sorted", tools_order="sorted")
        running.flush()
        (group,) = running.store.disk.index.groups()
        assert group.tools == ("alum", "zinc")


def test_another_prompts_last_page_is_read_up_to_ours(model: Any, tmp_path: Path) -> None:
    """The last page of a stored prompt holds its own tail too: ours begins where that begins, in the page that was read, without a copy."""
    mine = [*TURNS[:-1], {"role": "user", "content": "Another question. " + long_text(10, 5)}]
    with engine(model=model, store=tmp_path / "store") as first:
        first.generate(TURNS, sampling=decode())
        assert first.flush()
        spy = Spy(first)
        first.generate(mine, sampling=decode(), reuse="off")
        wanted = list(spy.logits)
    with engine(model=model, store=tmp_path / "store") as second:
        spy = Spy(second)
        receipt = second.generate(mine, sampling=decode()).receipt
        assert receipt.disk_tokens == receipt.cached_tokens > 512
        assert receipt.cached_tokens % 512
        assert receipt.copied_tokens == 0
        assert equal(wanted, spy.logits)
        spy.logits.clear()
        again = second.generate(TURNS, sampling=decode()).receipt  # the other one's tail is still on disk
        assert again.cached_tokens == again.prompt_tokens - 1
        assert again.bitwise


@pytest.mark.parametrize("words", [2, 150])  # a page partly filled, and whole ones
def test_an_exchanged_model_is_told_from_a_cold_store(model: Any, tmp_path: Path, words: int) -> None:
    asked = chat(long_text(words))
    with engine(model=model, store=tmp_path / "store") as before:
        before.generate(asked, sampling=decode())
        assert before.flush()
    with engine(model=models.build("qwen3", num_hidden_layers=2, seed=1), store=tmp_path / "store") as after:
        (refusal,) = after.generate(asked, sampling=decode()).receipt.refusals
        assert (refusal.reason, refusal.start) == (Reason.FINGERPRINT, 0)
        assert refusal.detail == "cached under other weights, config or versions"
        assert [one.reason for one in after.generate(asked, sampling=decode()).receipt.refusals] == [Reason.LAST_TOKEN]
        for other in ({"namespace": "other"}, {"messages": chat("x", system="Another system text.")}):
            cold = after.generate(**{"messages": asked, "sampling": decode(), **other}).receipt.refusals[0]
            assert "weights" not in cold.detail, other
