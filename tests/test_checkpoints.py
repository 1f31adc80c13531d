"""Models with recurrent layers: where a prompt has checkpoints, and that a hit from one has the bits of everything computed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentcache import Reason, Sampling, StoreOptions, checkpoints, hit_audit
from agentcache.checkpoints import CHECKPOINT_TOKENS, STRIDE_TOKENS, Checkpoint, cuts_of, marks_of
from agentcache.errors import ConfigError, NonFiniteLogitsError, OutOfMemoryError, StoreWarning
from agentcache.kv import PAGE_TOKENS, Page, Sequence, last_checkpoint
from agentcache.kv_spec import KVSpec
from agentcache.lifecycle import Lifecycle
from agentcache.model.hf import HFModel
from agentcache.model.recurrent import RecurrentState
from agentcache.request import Running
from agentcache.store.disk import blob_io, writer
from agentcache.store.disk.checkpoint_bytes import pack, unpack
from agentcache.store.keys import as_ids
from agentcache.store.store import Store
from agentcache.store.tool_group import ToolGroup
from agentcache.types import Layout, Span
from tests.asking import SYSTEM, TOOLS, Asking, talk, user
from tests.engines import wait_until
from tests.store.stored_pages import read_page

RECURRENT = ["qwen3_5_text", "lfm2", "falcon_h1", "bamba", "mamba2"]


pytestmark = pytest.mark.usefixtures("one_thread")


# -- where ---------------------------------------------------------------------------------------------------------------


def layout(*stops: int, prefix: int) -> Layout:
    starts = (0, *stops)
    spans = tuple(Span("turn", start, stop) for start, stop in zip(starts, stops, strict=False))
    return Layout(range(stops[-1]), spans, "", prefix)


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=12), st.integers(1, 12))
def test_a_continued_prompt_has_the_marks_of_its_start(lengths: list[int], turns: int) -> None:
    stops = [sum(lengths[: at + 1]) for at in range(len(lengths))]
    whole, start = layout(*stops, prefix=stops[0]), layout(*stops[:turns], prefix=stops[0])
    marks, before = marks_of(whole, CHECKPOINT_TOKENS), marks_of(start, CHECKPOINT_TOKENS)
    assert marks[: len(before)] == before
    assert all(mark % CHECKPOINT_TOKENS == 0 for mark in marks)
    assert all(b - a >= CHECKPOINT_TOKENS for a, b in zip(marks, marks[1:], strict=False))
    assert all(b - a <= STRIDE_TOKENS for a, b in zip((0, *marks), marks, strict=False))
    ends = cuts_of(marks, stops[-1], CHECKPOINT_TOKENS)
    assert set(marks) <= set(ends)
    assert all(b - a <= 512 for a, b in zip((0, *ends), ends, strict=False))
    exact = marks_of(whole, 1)
    assert {stops[0], *stops[:-1]} <= set(exact) | {stops[-1]}
    assert exact[: len(marks_of(start, 1))] == marks_of(start, 1)
    assert all(b - a <= STRIDE_TOKENS for a, b in zip((0, *exact), exact, strict=False))
    assert cuts_of(exact, stops[-1], 1) == exact


# -- bits ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seamless", [True, False])
@pytest.mark.parametrize("family", RECURRENT)
def test_a_hit_has_the_bits_of_everything_computed(
    family: str, seamless: bool, asking: Callable[..., Asking], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if not seamless:
        request.getfixturevalue("pieces_matter")
    first = asking(family, tmp_path / "store")
    group = first.engine.warm(SYSTEM["content"], TOOLS, name="tides")
    assert (group.prefix_tokens % CHECKPOINT_TOKENS == 0) is not seamless
    asked = [SYSTEM, user("What is the tide at Port Averil? " * 6)]
    said, logits = first(asked)
    assert said.receipt.cached_tokens >= group.prefix_tokens
    assert torch.equal(first(asked, reuse="off")[1], logits)
    later = [*asked, {"role": "assistant", "content": said.text}, user("And the wind, tomorrow? " * 5)]
    again, step = first(later)
    assert again.receipt.cached_tokens > said.receipt.cached_tokens
    assert again.receipt.bitwise
    expected = first(later, reuse="off")[1]
    assert torch.equal(expected, step)
    first.engine.flush()
    first.engine.close()

    other = asking(family, tmp_path / "store")
    found, from_disk = other(later)
    assert found.receipt.cached_tokens >= again.receipt.cached_tokens
    assert torch.equal(from_disk, expected)


@pytest.mark.parametrize("family", [*RECURRENT, "kimi_linear", "jamba"])
def test_a_hit_goes_on_from_the_end_of_a_message(
    family: str, asking: Callable[..., Asking], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, tide = asking(family, tmp_path / "store"), user("What is the tide at Port Averil? " * 3)
    assert one.engine.model.support.alignment == 1
    one([SYSTEM, tide])
    asked = [SYSTEM, tide, {"role": "assistant", "content": "High."}, user("Why is it? " * 9)]
    said, logits = one(asked)
    assert said.receipt.bitwise
    assert not [refusal for refusal in said.receipt.refusals if refusal.reason is Reason.NUMERICS]
    end = next(span.stop for span in one.engine.renderer.render(asked[:2], TOOLS).spans if span.kind == "turn")
    assert said.receipt.cached_tokens == end
    assert end % CHECKPOINT_TOKENS
    assert torch.equal(one(asked, reuse="off")[1], logits)
    one.engine.flush()
    one.engine.close()
    options = StoreOptions(tmp_path / "store", check_one_in=1, refuse_slow=False)
    other, ran = asking(family, options), list[tuple[int, int]]()
    forward = other.engine.model.forward

    def noted(ids: torch.Tensor, parts: Any, *given: Any) -> torch.Tensor:
        ran.extend((part.start, part.count) for part in parts)
        return forward(ids, parts, *given)

    monkeypatch.setattr(other.engine.model, "forward", noted)
    again, from_disk = other(asked)
    assert again.receipt.disk_tokens == again.receipt.cached_tokens >= said.receipt.cached_tokens
    assert torch.equal(from_disk, logits)
    assert wait_until(lambda: other.engine.stats()["audits"]["run"] > 0)
    assert other.engine.stats()["audits"]["failed"] == 0
    audited = [count for start, count in ran if start < again.receipt.cached_tokens]
    assert 0 < max(audited) <= hit_audit.CHUNK  # a request that arrives meanwhile does not wait for long


@pytest.mark.parametrize("family", [*RECURRENT, "kimi_linear", "jamba"])
def test_a_long_answer_is_not_computed_again(family: str, asking: Callable[..., Asking], tmp_path: Path) -> None:
    one, asked = asking(family, tmp_path / "store"), [SYSTEM, user("What is the tide at Port Averil? " * 3)]
    for tokens, again in ((CHECKPOINT_TOKENS // 2, CHECKPOINT_TOKENS), (2 * CHECKPOINT_TOKENS, 1)):
        options: Any = {"namespace": str(tokens)}
        said, _ = one(asked, tokens=tokens, says="The tide is high, and the wind turns. " * 40, **options)
        known = said.receipt.prompt_tokens + tokens
        later = [*asked, said.message, user("Why is it? " * 9)]
        found, logits = one(later, **options)
        assert known - again <= found.receipt.cached_tokens < known
        assert found.receipt.bitwise
        assert torch.equal(one(later, reuse="off", **options)[1], logits)
    one.engine.flush()
    one.engine.close()
    from_disk, same = asking(family, tmp_path / "store")(later, **options)
    assert from_disk.receipt.disk_tokens >= known - 1
    assert torch.equal(same, logits)


def test_an_answer_that_failed_has_no_checkpoint_at_its_end(asking: Callable[..., Asking], monkeypatch: pytest.MonkeyPatch) -> None:
    one, text, says = asking("lfm2", None), "What is the tide? " * 20, "The sea rose, and the wind turned. " * 20
    forward = HFModel.forward

    def fails_late(model: HFModel, ids: torch.Tensor, parts: list[Any], *rest: Any) -> torch.Tensor:
        logits = forward(model, ids, parts, *rest)
        if parts[0].start > short.receipt.prompt_tokens + CHECKPOINT_TOKENS:
            raise MemoryError
        return logits

    _, wanted = one(text + says, (), reuse="off")
    short, _ = one(text, (), reuse="off")
    monkeypatch.setattr(HFModel, "forward", fails_late)
    with pytest.raises(OutOfMemoryError):
        one(text, (), tokens=200, says=says)
    monkeypatch.setattr(HFModel, "forward", forward)
    found, logits = one(text + says, ())
    assert found.receipt.cached_tokens > 0
    assert torch.equal(wanted, logits)


@pytest.mark.parametrize("answer", [4, 90])
def test_prompts_behind_one_history_go_on_from_it(answer: int, asking: Callable[..., Asking], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "SHARE", 0.0)
    one, history = asking("qwen3_5_text", None), [SYSTEM]
    for question in ("What is the tide? ", "And the wind? ", "And the moon? "):
        history = [*history, user(question * 20)]
        said, _ = one(history, tokens=answer)
        history = [*history, said.message]
    for number in range(3):
        later, _ = one([*history, user(f"Of these, which is number {number}? " * 5)], tokens=answer)
        assert later.receipt.cached_tokens >= said.receipt.cached_tokens
        assert later.receipt.cached_tokens > said.receipt.prompt_tokens - 20


def test_a_later_process_may_show_a_long_answer_otherwise(
    asking: Callable[..., Asking], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Templates leave out thoughts."""
    monkeypatch.setattr(checkpoints, "SHARE", 0.0)
    one, asked = asking("qwen3_5_text", tmp_path / "store"), [SYSTEM, user("What is the tide? " * 40)]
    one(asked, tokens=2 * CHECKPOINT_TOKENS, says="The tide is high. " * 80)
    end = max(span.stop for span in one.engine.renderer.render(asked, TOOLS).spans if span.kind == "turn")
    assert one.engine.flush()
    one.engine.close()
    later = [*asked, {"role": "assistant", "content": "High."}, user("Why?")]
    assert asking("qwen3_5_text", tmp_path / "store")(later)[0].receipt.disk_tokens == end


def test_the_disk_has_the_last_checkpoint_and_a_pinned_one(
    asking: Callable[..., Asking], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "SHARE", 0.0)
    one, history = asking("qwen3_5_text", tmp_path / "store"), [SYSTEM]
    for question in ("What is the tide? ", "And the wind? ", "And the moon? ", "And the sun? "):
        history = [*history, user(question * 20)]
        one(history)
        ends = [span.stop for span in one.engine.renderer.render(history, TOOLS).spans if span.kind == "turn"]
        history = [*history, {"role": "assistant", "content": "Yes."}]
        assert one.engine.flush()
    disk, tree = one.engine.store.disk, one.engine.store.tree
    assert disk is not None

    def stored() -> list[int]:
        read = [(512 * row.place, read_page(disk.folder, row).checkpoints) for row in disk.index.rows()]
        return sorted({first + slots for first, known in read for slots in known})

    held = sorted(entry.first + slots for entry in tree.entries() if entry.page for slots in entry.page.checkpoints)
    assert held[-3:] == ends[-3:]
    assert stored() == [held[0], ends[-1]]
    assert one.engine.pin(history[:6], TOOLS).prefix_tokens == ends[-3]
    assert one.engine.flush()
    assert stored() == [held[0], ends[-3], ends[-1]]


@pytest.mark.parametrize("seamless", [True, False])
def test_what_is_pinned_is_not_computed_again(
    seamless: bool, asking: Callable[..., Asking], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if not seamless:
        request.getfixturevalue("pieces_matter")
    talk = [SYSTEM, user("What is the tide? " * 9), {"role": "assistant", "content": "High. " * 9}]

    def computed(one: Asking) -> list[int]:
        pinned = [one.engine.warm(SYSTEM["content"], TOOLS), one.engine.warm(SYSTEM["content"] * 9), one.engine.pin(talk, TOOLS)]
        return [group.computed_tokens for group in pinned]

    first = asking("qwen3_5_text", tmp_path / "store")
    assert min(computed(first)) > 64
    assert max(computed(first)) <= 1
    first.engine.flush()
    first.engine.close()
    assert max(computed(asking("qwen3_5_text", tmp_path / "store"))) <= 1


def test_what_ends_in_a_stored_page_is_pinned_on_disk(
    asking: Callable[..., Asking], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page came there with a longer prompt, without the checkpoints at which the pinned starts end."""
    monkeypatch.setattr(checkpoints, "SHARE", 0.0)
    one, folder, history = asking("mamba2", tmp_path / "store"), tmp_path / "store", talk(6)
    one(history, ())
    for messages in (3, 5, 7):  # the next one takes the room of the one before
        assert one.engine.flush()
        one.engine.pin(history[:messages])
    assert one.engine.flush()
    one.engine.close()
    other = asking("mamba2", folder)
    assert [other.engine.pin(history[:messages]).computed_tokens for messages in (3, 5, 7)] == [1, 1, 1]


def test_a_page_written_again_leaves_those_after_it_waiting(
    asking: Callable[..., Asking], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "SHARE", 0.0)
    monkeypatch.setattr(writer, "SETTLE_S", 600.0)
    one, history = asking("mamba2", tmp_path / "store"), talk(6)
    one(history, ())
    disk = one.engine.store.disk
    assert disk is not None
    assert wait_until(lambda: len(list(disk.index.rows())) == 2)  # whole pages: the last one waits until it has settled
    monkeypatch.setattr(one.engine.store, "defer_writes", lambda busy: None)
    disk.writer.quiet.clear()  # nothing is written until the flush
    one(history[:8], ())  # ends in the second page, at a checkpoint that the disk does not have
    assert one.engine.flush()
    one.engine.close()
    later = [*history, {"role": "assistant", "content": "Yes."}, user("Why?")]
    said, _ = asking("mamba2", tmp_path / "store")(later, ())
    assert said.receipt.disk_tokens > 2 * PAGE_TOKENS


def test_only_a_checkpoint_of_the_same_pieces_serves() -> None:
    page = Page(KVSpec(1, 1, 8, torch.float32))
    page.checkpoints = {64: Checkpoint((), (64,)), 128: Checkpoint((), (32, 128))}
    assert [last_checkpoint([page], 200, cuts) for cuts in ((64, 128), (32, 128), (), None)] == [64, 128, 0, 128]
    page.checkpoints = {64: Checkpoint((), (64,)), 101: Checkpoint((), ())}
    assert [last_checkpoint([page], 200, cuts) for cuts in ((64, 128), ())] == [101, 101]
    assert last_checkpoint([page], 100, (64,)) == 64


def test_a_longer_text_goes_on_from_a_shorter_one(asking: Callable[..., Asking], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[int] = []
    alike = hit_audit.alike

    def noted(own: Page, kept: Page, *given: Any) -> bool:
        compared.extend(own.checkpoints.keys() & kept.checkpoints.keys())
        return alike(own, kept, *given)

    monkeypatch.setattr(hit_audit, "alike", noted)
    one = asking("qwen3_5_text", tmp_path / "store")
    one("The tide is high at noon. " * 60, ())
    one.engine.close()
    other = asking("qwen3_5_text", StoreOptions(tmp_path / "store", check_one_in=1, refuse_slow=False))
    again, logits = other("The tide is high at noon. " * 70, ())
    assert again.receipt.disk_tokens > 128
    assert wait_until(lambda: other.engine.stats()["audits"]["run"] > 0)
    assert other.engine.stats()["audits"]["failed"] == 0
    assert again.receipt.cached_tokens % PAGE_TOKENS in compared
    assert torch.equal(other("The tide is high at noon. " * 70, (), reuse="off")[1], logits)


def test_two_conversations_branch_from_one_group(asking: Callable[..., Asking]) -> None:
    one = asking("qwen3_5_text", None)
    group = one.engine.warm(SYSTEM["content"], TOOLS)
    for text in ("What is the tide? " * 9, "Where does the wind come from? " * 9, "What is the tide? " * 9):
        said, logits = one([SYSTEM, user(text)])
        assert said.receipt.cached_tokens >= group.prefix_tokens
        assert torch.equal(one([SYSTEM, user(text)], reuse="off")[1], logits)


def test_requests_at_once_do_not_share_a_state(asking: Callable[..., Asking]) -> None:
    one = asking("qwen3_5_text", None)
    asked = [[SYSTEM, user(f"What is the tide at place {number}? " * 4)] for number in range(3)]
    alone = [one(messages, reuse="off")[0].text for messages in asked]
    sampling = Sampling(max_tokens=6, temperature=0.0, ignore_eos=True)
    streams = [one.engine.stream(messages, TOOLS, sampling=sampling) for messages in asked]
    assert [stream.completion.text for stream in streams] == alone


def test_what_follows_the_last_checkpoint_is_named(asking: Callable[..., Asking]) -> None:
    one = asking("lfm2", None)
    said, _ = one([SYSTEM, user("Hello. " * 60)])
    assert said.receipt.cached_tokens == 0
    page = one.engine.store.tree.entries()[0].page
    assert page is not None
    assert page.checkpoints
    for entry in one.engine.store.tree.entries():
        assert entry.page is not None
        entry.page.checkpoints = {}
    again, _ = one([SYSTEM, user("Hello. " * 60)])
    assert again.receipt.cached_tokens == 0
    assert Reason.CHECKPOINT in [refusal.reason for refusal in again.receipt.refusals]


def test_keys_after_a_state_are_not_moved(asking: Callable[..., Asking]) -> None:
    with pytest.raises(ConfigError, match="cannot be re-indexed"):
        asking("qwen3_5_text", None, reuse="approximate")


# -- memory and disk -----------------------------------------------------------------------------------------------------


def test_checkpoints_count_in_the_budget(asking: Callable[..., Asking]) -> None:
    one = asking("qwen3_5_text", None)
    one([SYSTEM, user("What is the tide? " * 9)])
    pages = [entry.page for entry in one.engine.store.tree.entries()]
    own = sum(known.bytes for page in pages if page for known in page.checkpoints.values())
    assert own > 0
    assert one.engine.store.bytes == own + sum(page.spec.page_bytes for page in pages if page)
    one.engine.forget(older_than=0)
    assert one.engine.store.bytes == 0


def test_a_long_conversation_keeps_few_checkpoints(asking: Callable[..., Asking]) -> None:
    one = asking("qwen3_5_text", None)
    messages = [SYSTEM]
    for turn in range(12):
        messages = [*messages, user(f"What is the tide at place {turn}? " * 6)]
        said, logits = one(messages, tokens=2)
        messages = [*messages, {"role": "assistant", "content": "It is high. " * 4}]
    assert torch.equal(one(messages[:-1], reuse="off", tokens=2)[1], logits)
    pages = [entry.page for entry in one.engine.store.tree.entries() if entry.page]
    size = sum(known.bytes for page in pages for known in page.checkpoints.values())
    assert 0 < size <= 0.15 * one.engine.store.bytes
    assert said.receipt.cached_tokens > said.receipt.prompt_tokens - 300


WORDS = "The wind turns to the north and ships pass. "
START = [SYSTEM, user(WORDS * 10)]


def test_a_pinned_start_keeps_its_checkpoint(asking: Callable[..., Asking], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "SHARE", 0.0)
    ask = asking("lfm2", None)
    ask([*START, {"role": "assistant", "content": "Yes. " * 40}, user(WORDS * 6)], tools=())
    pinned = ask.engine.pin(START)
    said, _ = ask([*START, {"role": "assistant", "content": "No. " * 40}, user("Why?")], tools=())
    assert said.receipt.cached_tokens == pinned.prefix_tokens


@pytest.mark.usefixtures("pieces_matter")
def test_a_checkpoint_may_go_before_it_is_pinned(asking: Callable[..., Asking], monkeypatch: pytest.MonkeyPatch) -> None:
    """The start is attached to a whole page of another prompt, which drops the checkpoint at which the start ends."""
    ask, inner = asking("lfm2", None), Lifecycle.start
    start = [SYSTEM, user(WORDS * 25)]
    ask([*start, {"role": "assistant", "content": "Yes. " * 40}, user(WORDS * 6)], tools=())

    def drop(self: Lifecycle, running: Running) -> None:
        inner(self, running)
        monkeypatch.setattr(Lifecycle, "start", inner)
        for page in running.sequence.pages if isinstance(running.sequence, Sequence) else ():
            page.checkpoints = {}

    monkeypatch.setattr(Lifecycle, "start", drop)
    pinned = ask.engine.pin(start)
    assert pinned.prefix_tokens == PAGE_TOKENS
    said, _ = ask([*start, {"role": "assistant", "content": "No. " * 40}, user("Why?")], tools=())
    assert said.receipt.cached_tokens == pinned.prefix_tokens


@given(st.integers(1, 512))
def test_checkpoints_survive_being_bytes(tokens: int) -> None:
    page = Page(KVSpec(1, 1, 8, torch.float32))
    for slots in (64, 128, 320):
        states = (torch.randn(1, 2, 3), None, torch.randn(1, 4).bfloat16() * slots)
        page.checkpoints[slots] = Checkpoint(states, (64, slots))
    found = unpack(pack(page.checkpoints, tokens).ljust(4096, b"\0"), tokens) if tokens >= 64 else {}
    within = [slots for slots in (64, 128, 320) if slots <= tokens]
    assert sorted(found) == within
    for slots, known in found.items():
        assert known.cuts == (64, slots)
        for mine, theirs in zip(known.states, page.checkpoints[slots].states, strict=True):
            assert (mine is None) is (theirs is None)
            assert mine is None or theirs is None or (torch.equal(mine, theirs) and mine.dtype == theirs.dtype)
    assert tokens >= 64 or pack(page.checkpoints, tokens) == b""


@pytest.mark.usefixtures("pieces_matter")
def test_a_lossy_store_keeps_states_exactly(asking: Callable[..., Asking], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    restored: list[tuple[int, Any]] = []
    restore = RecurrentState.restore

    def note(self: RecurrentState, states: Any, length: int) -> None:
        restored.append((length, states))
        restore(self, states, length)

    def continued(one: Asking) -> tuple[str, int, Any]:
        restored.clear()
        said, _ = one([SYSTEM, user("What is the tide?")])
        one.engine.flush()
        one.engine.close()
        return said.receipt.precision, *restored[0]

    monkeypatch.setattr(RecurrentState, "restore", note)
    store = StoreOptions(tmp_path / "store", precision="int8")
    first = asking("qwen3_5_text", store, reuse="lossy")
    first.engine.warm(SYSTEM["content"], TOOLS)
    in_memory, from_disk = continued(first), continued(asking("qwen3_5_text", store, reuse="lossy"))
    assert [in_memory[0], from_disk[0]] == ["exact", "int8"]
    assert in_memory[1] == from_disk[1] > 0
    assert all(a is b or torch.equal(a, b) for a, b in zip(in_memory[2], from_disk[2], strict=True))


def test_a_hit_from_disk_passes_its_audit(asking: Callable[..., Asking], tmp_path: Path) -> None:
    store = StoreOptions(tmp_path / "store", check_one_in=1)
    first = asking("qwen3_5_text", store)
    first.engine.warm(SYSTEM["content"], TOOLS)
    first.engine.flush()
    first.engine.close()
    other = asking("qwen3_5_text", store)
    said, _ = other([SYSTEM, user("What is the tide? " * 9)])
    assert said.receipt.disk_tokens
    audit = other.engine.scheduler.hit_audit
    assert wait_until(lambda: audit.checked_tokens >= said.receipt.disk_tokens and not audit.pending)
    assert audit.wrong_pages == 0


def test_a_wrong_state_on_disk_is_found_by_an_audit(asking: Callable[..., Asking], tmp_path: Path) -> None:
    store = StoreOptions(tmp_path / "store", check_one_in=1)
    first = asking("qwen3_5_text", store)
    group = first.engine.warm(SYSTEM["content"], TOOLS)
    first.engine.flush()
    (*_, entry), disk = first.engine.store.tree.path(group.scope, as_ids(group_ids(first, group))), first.engine.store.disk
    assert entry.page is not None
    assert disk is not None
    page = entry.page.copy(len(entry.ids))
    for slots, known in page.checkpoints.items():
        page.checkpoints[slots] = Checkpoint(tuple(state if state is None else state * 1.5 for state in known.states), known.cuts)
    (row,) = [row for row in disk.index.rows() if row.id == entry.row]
    disk.index.remove([row.id], force=True)
    disk.index.add([blob_io.write(disk.folder, row, page)])
    first.engine.close()

    other = asking("qwen3_5_text", store)
    said, _ = other([SYSTEM, user("What is the tide? " * 9)])
    assert said.receipt.disk_tokens == group.prefix_tokens
    audit = other.engine.scheduler.hit_audit
    with pytest.warns(StoreWarning, match="is not what computing it gives"):
        assert wait_until(lambda: audit.wrong_pages)
    assert other([SYSTEM, user("Where is the wind? " * 9)])[0].receipt.cached_tokens < group.prefix_tokens


def group_ids(one: Asking, group: ToolGroup) -> list[int]:
    return list(one.engine.renderer.opening([SYSTEM], TOOLS).ids)[: group.prefix_tokens]


def test_a_state_that_is_not_finite_is_computed_again(asking: Callable[..., Asking]) -> None:
    one, asked = asking("qwen3_5_text", None), [SYSTEM, user("What is the tide? " * 9)]
    group = one.engine.warm(SYSTEM["content"], TOOLS)
    expected = one(asked, reuse="off")[1]
    known = one.engine.store.tree.checkpoints(group.scope, as_ids(group_ids(one, group)))
    for state in known[group.prefix_tokens].states:
        assert state is not None
        state.fill_(float("nan"))
    said, logits = one(asked)
    assert torch.equal(logits[-6:], expected)
    assert said.receipt.cached_tokens == 0
    assert "of the kept prompt was wrong" in " ".join(said.receipt.notes)
    again, logits = one(asked)
    assert torch.equal(logits, expected)
    assert again.receipt.cached_tokens > 0


def test_a_state_that_is_not_finite_is_not_admitted(asking: Callable[..., Asking], monkeypatch: pytest.MonkeyPatch) -> None:
    one, copy = asking("qwen3_5_text", None), RecurrentState.copy
    for name in ("copy", "copy_at"):
        monkeypatch.setattr(RecurrentState, name, lambda self, *_: tuple(state if state is None else state / 0 for state in copy(self)))
    with pytest.raises(NonFiniteLogitsError):
        one.engine.warm(SYSTEM["content"], TOOLS)
    assert len(one.engine.store) == 0


@pytest.mark.usefixtures("pieces_matter")
@pytest.mark.parametrize("store", [None, "store"])
def test_keys_of_other_pieces_are_not_promised_bit_by_bit(
    store: str | None, tmp_path: Path, asking: Callable[..., Asking], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shorter prompt's checkpoint goes into the page of a longer one, which was not cut there, while that waits to be written."""
    monkeypatch.setattr(Store, "defer_writes", lambda self, busy: self.disk and self.disk.writer.quiet.clear())
    ask = asking("qwen3_5_text", store and tmp_path / store)
    ask([SYSTEM, user(WORDS * 100)], tools=())
    shorter = [SYSTEM, user(WORDS * 84)]
    ask(shorter, tools=())
    if store:
        ask.engine.close()
        ask = asking("qwen3_5_text", tmp_path / store)
    said, logits = ask(shorter, tools=())
    assert said.receipt.cached_tokens % PAGE_TOKENS
    assert said.receipt.bitwise <= torch.equal(ask(shorter, tools=(), reuse="off")[1], logits)
    assert Reason.NUMERICS in [refusal.reason for refusal in said.receipt.refusals]


def test_keys_from_disk_beside_other_checkpoints_promise_no_bits(tmp_path: Path, asking: Callable[..., Asking]) -> None:
    """A longer page that another process wrote takes the place of one in memory, and gets its checkpoint."""
    one, other = asking("qwen3_5_text", tmp_path / "store"), asking("qwen3_5_text", tmp_path / "store")
    shorter, longer = ([SYSTEM, user(WORDS * count)] for count in (84, 100))
    one(shorter, tools=())
    other(longer, tools=())
    assert other.engine.flush()
    assert one(longer, tools=())[0].receipt.disk_tokens
    said, logits = one(shorter, tools=())
    assert said.receipt.cached_tokens % PAGE_TOKENS
    assert said.receipt.bitwise <= torch.equal(one(shorter, tools=(), reuse="off")[1], logits)


@pytest.mark.usefixtures("pieces_matter")
def test_fewer_bits_without_a_checkpoint_leave_a_request_exact(tmp_path: Path, asking: Callable[..., Asking]) -> None:
    options = StoreOptions(tmp_path / "store", precision="int8")
    one = asking("qwen3_5_text", options)
    one([SYSTEM, user(WORDS * 30)], tools=())
    one.engine.close()
    one, prompt = asking("qwen3_5_text", options), [SYSTEM, user(WORDS * 26)]
    said, _ = one(prompt, tools=(), reuse="lossy")
    assert (said.receipt.cached_tokens, said.receipt.precision, said.receipt.bitwise) == (0, "exact", True)
    assert Reason.LOSSY not in [refusal.reason for refusal in said.receipt.refusals]
    assert one(prompt, tools=())[0].receipt.cached_tokens, "an exact request goes on from what was computed"


def test_a_probe_counts_no_pages_in_memory_as_disk(asking: Callable[..., Asking]) -> None:
    """Those after the last checkpoint are computed again."""
    one, prompt = asking("qwen3_5_text", None), [SYSTEM, user(WORDS * 26)]
    one([SYSTEM, user(WORDS * 30)], tools=())
    told = one.engine.probe(prompt)
    assert (told.memory_tokens, told.disk_tokens) == (one(prompt, tools=())[0].receipt.cached_tokens, 0)


@pytest.mark.parametrize("words", [76, 107])
def test_a_start_is_pinned_where_its_continuations_are_cut(words: int, asking: Callable[..., Asking]) -> None:
    """A multiple of 64 lies between the end of the last message and that of what its answer begins with."""
    ask = asking("lfm2", None)
    start = [SYSTEM, user("tide " * words + "x" * (words % 3))]
    pinned = ask.engine.pin(start)
    assert ask(start, tools=())[0].receipt.cached_tokens == pinned.prefix_tokens
    assert ask.engine.store.audit()["pins"] == 1
    ask.engine.release(pinned.name)
    assert ask.engine.store.audit()["pins"] == 0
