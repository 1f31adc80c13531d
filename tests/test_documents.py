"""Documents: retrieved passages in the order in which they are cached, and texts that are computed once, for later processes too."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from agentcache import PASSAGES, Engine, Message, Sampling, StoreOptions, ToolCall
from agentcache.errors import ConfigError, StoreFullError
from agentcache.store.tool_group import ToolGroup
from agentcache.tool_groups import ToolGroups
from tests.engines import MB, engine, long_text
from tests.processes import Child

TEXTS = {f"text-{number}": f"Text {number}. {long_text(24, number)}." for number in range(8)}
SHORT = Sampling(max_tokens=2, ignore_eos=True)


def prompt(passages: str, question: str = "What is it?") -> list[dict[str, Any]]:
    """A prompt with passages before the question."""
    return [{"role": "system", "content": "Answer from the texts."}, {"role": "user", "content": f"Texts:\n{passages}\n\n{question}"}]


def joined(texts: list[str], order: tuple[int, ...]) -> str:
    """The passages as a prompt shows them."""
    return "\n\n".join(texts[number] for number in order)


def test_an_order_finds_what_the_probe_then_finds() -> None:
    texts = list(TEXTS.values())
    with engine(store=None) as running:
        running.generate(prompt(joined(texts, (2, 0, 4, 1))), sampling=SHORT)
        asked = [texts[number] for number in (0, 1, 2, 3)]
        found = running.arrange(asked, prompt(PASSAGES))
        assert found.order == (2, 0, 1, 3)
        assert found.ranks == "Best passages first: 2, 3, 1, 4."
        arranged = running.probe(prompt(joined(asked, found.order)))
        given = running.probe(prompt(joined(asked, (0, 1, 2, 3))))
        assert arranged.memory_tokens - given.memory_tokens >= found.cached_tokens - found.given_tokens - 2 > 200
        receipt = running.generate(prompt(joined(asked, found.order)), sampling=SHORT).receipt
        assert receipt.cached_tokens == arranged.memory_tokens


def test_an_order_that_gains_nothing_stays_as_it_came() -> None:
    texts = list(TEXTS.values())
    with engine(store=None) as running:
        assert running.arrange(texts, prompt(PASSAGES)).order == tuple(range(8))
        brief = ["The lamp is lit at dusk.", "The mole is closed."]  # together fewer tokens than another order must gain
        for shown in (joined(texts, (1, 0)), joined(texts, (0, 1)), joined(brief, (1, 0)), joined(texts, (3, 2))):
            running.generate(prompt(shown), sampling=SHORT)
        for passages in (texts[:2], texts[1::-1], brief):
            found = running.arrange(passages, prompt(PASSAGES))
            assert (found.order, found.ranks) == ((0, 1), "")
            assert found.cached_tokens == found.given_tokens
        other = [{"role": "system", "content": "Answer from the tests."}, *prompt(PASSAGES)[1:]]
        assert running.arrange(texts[2:4], other).order == (0, 1), "of a prompt that begins otherwise"


def test_a_short_cached_prompt_in_the_given_order_counts() -> None:
    asked = [*list(TEXTS.values())[:2], "The lamp on the mole is lit at dusk, I hear."]
    with engine(store=None) as running:
        running.generate(prompt(joined(asked, (1, 0, 2)), "What is it that the pilot sees from the mole?"), sampling=SHORT)
        running.generate(prompt(joined(asked, (0, 1)), "Why?"), sampling=SHORT)
        found = running.arrange(asked, prompt(PASSAGES))
    assert found.order == (0, 1, 2), "a few tokens are no reason for another order"
    assert found.cached_tokens > 100


def test_equal_passages_are_shown_once() -> None:
    texts = list(TEXTS.values())
    with engine(store=None) as running:
        running.generate(prompt(joined(texts, (3, 2))), sampling=SHORT)
        found = running.arrange([texts[1], texts[2], texts[1], texts[3], texts[2]], prompt(PASSAGES))
        assert (found.order, found.passages) == ((3, 1, 0), 5)


@pytest.mark.parametrize("odd", ["<|im_end|>", "\ud83d"], ids=["control token", "surrogate"])
def test_texts_that_a_message_shows_otherwise_are_found(odd: str) -> None:
    texts = [f"{odd} {text} {odd} {text}" for text in list(TEXTS.values())[:3]]
    with engine(store=None) as running:
        running.learn(texts[2::-1], messages=prompt(PASSAGES))
        found = running.arrange(texts, prompt(PASSAGES))
        assert found.order == (2, 1, 0)
        assert running.generate(prompt(joined(texts, found.order)), sampling=SHORT).receipt.cached_tokens > found.cached_tokens


def test_the_same_head_is_rendered_once_for_all_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    texts, rendered = list(TEXTS.values()), []
    with engine(store=None) as running:
        running.generate(prompt(joined(texts, (1, 0))), sampling=SHORT)
        first, render = prompt(PASSAGES, "Why?"), running.renderer.render
        monkeypatch.setattr(running.renderer, "render", lambda *args, **options: (rendered.append(args), render(*args, **options))[1])
        asked = [first, prompt(PASSAGES, "When?"), [Message(**each) for each in first], first]
        assert [running.arrange(texts[:2], each).order for each in asked] == [(1, 0)] * 4
        assert len(rendered) == 2, "of dicts and of messages"
        assert running.arrange(texts[:2], prompt(f"More.\n{PASSAGES}")).order == (0, 1)
        running.forget(namespace="default")
        assert running.arrange(texts[:2], first).order == (0, 1)
        assert len(rendered) == 4


def test_another_namespace_orders_by_its_own_pages() -> None:
    texts = list(TEXTS.values())
    with engine(store=None) as running:
        running.generate(prompt(joined(texts, (1, 0))), sampling=SHORT, namespace="a")
        assert running.arrange(texts[:2], prompt(PASSAGES), namespace="b").order == (0, 1)
        assert running.arrange(texts[:2], prompt(PASSAGES), namespace="a").order == (1, 0)


@pytest.mark.parametrize(("reuse", "order"), [("lossy", (2, 1, 0)), ("exact", (0, 1, 2))])
def test_pages_of_fewer_bits_order_for_those_who_take_them(tmp_path: Path, reuse: Any, order: tuple[int, ...]) -> None:
    texts = list(TEXTS.values())[:3]
    for _ in range(2):
        with engine(store=StoreOptions(tmp_path, precision="int8"), reuse=reuse) as running:
            running.learn(texts, messages=prompt(PASSAGES))
            found = running.arrange(texts[::-1], prompt(PASSAGES))
    assert found.order == order
    assert (found.cached_tokens > 200) == (reuse == "lossy")


def test_passages_longer_than_a_page_are_followed() -> None:
    texts = [f"Text {number}. {long_text(180, number)}." for number in range(4)]
    with engine(store=None) as running:
        running.generate(prompt(joined(texts, (3, 1, 2))), sampling=SHORT)
        found = running.arrange(texts, prompt(PASSAGES))
        assert found.order == (3, 1, 2, 0)
        assert found.cached_tokens > 1536


def test_a_prompt_without_a_place_for_passages_is_refused() -> None:
    with engine(store=None) as running, pytest.raises(ConfigError, match="in their place"):
        running.arrange(["a"], prompt("nothing"))


def test_learnt_texts_are_computed_once_by_all_processes(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    options: dict[str, Any] = {"messages": prompt(PASSAGES), "name": "log"}
    with engine(store=tmp_path) as running:
        made = running.learn(TEXTS, pack_tokens=300, progress=lambda *done: told.append(done), **options)
        assert [one.source for one in made.documents] == list(TEXTS)
        assert made.known == 0
        assert made.computed_tokens > 800
        assert told[-1][0] == told[-1][1] == sum(one.tokens for one in made.documents)
        assert len({one.group for one in made.documents}) > 2
    with engine(store=tmp_path) as running:
        again = running.learn(TEXTS, pack_tokens=300, **options)
        assert (again.computed_tokens, again.known) == (0, len(TEXTS))
        assert running.documents() == again.documents == made.documents
        last = again.documents[-1].group
        inside = [TEXTS[one.source] for one in again.documents if one.group == last]
        found = running.arrange([TEXTS["text-0"], *reversed(inside)], prompt(PASSAGES))
        assert len(inside) < 2 or found.order[:2] == (len(inside), len(inside) - 1)
        receipt = running.generate(prompt(joined(inside, tuple(range(len(inside))))), sampling=SHORT).receipt
        assert receipt.cached_tokens > 0.8 * sum(one.tokens for one in again.documents if one.group == last)


def test_learnt_texts_need_no_memory_once_they_are_written(tmp_path: Path) -> None:
    with engine(store=tmp_path) as running:
        running.learn(TEXTS, pack_tokens=300)
        assert running.store.audit()["pins"] == 0
        assert running.store.audit()["disk_pins"] > 0
        assert all(running.release(group.name) for group in running.groups)
        assert running.flush()
        assert running.store.audit()["disk_pins"] == 0
    with engine(store=None) as running:
        running.learn(TEXTS, pack_tokens=300)
        assert running.store.audit()["pins"] > 1
        assert len(running.documents()) == len(TEXTS)


def test_a_corpus_larger_than_memory_leaves_agents_their_pages(tmp_path: Path) -> None:
    with engine(store=tmp_path) as running:
        assert running.model.spec is not None
        running.store.tree.eviction.budget_bytes = 6 * running.model.spec.page_bytes
        asked = [{"role": "system", "content": "You are an agent."}, {"role": "user", "content": "Where is the lamp?"}]
        running.generate(asked, sampling=SHORT)
        kept = running.probe(asked).memory_tokens
        running.learn(TEXTS, pack_tokens=1)
        assert running.probe(asked).memory_tokens == kept > 0
        assert len(running.store) > 3, "what has room stays"


@pytest.mark.parametrize(("room", "ahead"), [(8, 2), (4, 1), (3, 0)])
def test_packs_are_written_while_others_are_computed(tmp_path: Path, room: int, ahead: int) -> None:
    with engine(store=tmp_path) as running:
        sizes = {name: len(running.renderer.ids(text, "default")) for name, text in TEXTS.items()}
        assert running.model.spec is not None
        running.store.tree.eviction.budget_bytes = room * 2 * running.model.spec.page_bytes
        told: list[int] = []
        computed: list[int] = []
        settle, pin = running._groups.leave_to_disk, running.pin

        def settled(group: ToolGroup) -> None:
            deadline = time.monotonic() + 10
            while len(computed) < min(len(told) + 1 + ahead, len(TEXTS)) and time.monotonic() < deadline:
                time.sleep(0.001)  # as a slow disk
            settle(group)

        def pinned(*given: Any, **options: Any) -> ToolGroup:
            computed.append(len(told))
            return pin(*given, **options)

        running._groups.leave_to_disk, running.pin = settled, pinned  # type: ignore[method-assign]
        made = running.learn(TEXTS, pack_tokens=1, progress=lambda done, total: told.append(done))
        assert computed == [max(0, number - ahead) for number in range(len(TEXTS))]
        assert told[-1] == sum(one.tokens for one in made.documents) == sum(sizes.values())


@pytest.mark.filterwarnings("ignore::agentcache.errors.StoreWarning")
def test_a_disk_that_refuses_ends_learning(tmp_path: Path) -> None:
    with engine(store=StoreOptions(tmp_path, disk_bytes=MB)) as running:
        for _ in range(2):
            with pytest.raises(StoreFullError, match="was not written.*disk_bytes"):
                running.learn(TEXTS, pack_tokens=1)
            assert running.store.disk
            assert 0 < len(running.documents()) == len(running.groups) == len(running.store.disk.index.groups()) < len(TEXTS)
            assert running.store.audit()["pins"] == 0, "what was not written is not kept"
        running.unlearn([*TEXTS])
        assert len(running.learn({"text-7": TEXTS["text-7"]}).documents) == 1


def test_a_pack_that_another_process_deletes_is_no_error(tmp_path: Path) -> None:
    with engine(store=tmp_path) as running, engine(store=tmp_path) as other:
        flush = running.store.flush

        def late(timeout_s: float | None = None) -> bool:
            flush(timeout_s)
            other.forget(group="documents")
            return flush(timeout_s)

        running.store.flush = late  # type: ignore[method-assign]
        assert running.learn(TEXTS, pack_tokens=1).documents == ()
        assert running.store.audit()["pins"] == 0


def test_a_changed_text_takes_the_place_of_the_old_one(tmp_path: Path) -> None:
    with engine(store=tmp_path) as running:
        running.learn(TEXTS, pack_tokens=150)
        changed = running.learn({**TEXTS, "text-3": "Another text."}, pack_tokens=150)
        assert changed.known == len(TEXTS) - 1
        known = running.documents()
        assert sorted(one.source for one in known) == sorted(TEXTS)
        assert running.unlearn(["text-3", "text-4"]) == 2
        assert {one.source for one in running.documents()} == TEXTS.keys() - {"text-3", "text-4"}
        pages = running.store.audit()["disk_pages"]
        assert running.forget(group="documents").pages == pages
        assert running.documents() == ()
        assert running.store.audit()["disk_pages"] == 0


@pytest.mark.parametrize("disk", [True, False])
def test_a_known_text_has_its_new_name_too(tmp_path: Path, disk: bool) -> None:
    one, other = TEXTS["text-1"], TEXTS["text-2"]
    with engine(store=tmp_path if disk else None) as running:
        first = {document.source: document.digest for document in running.learn({"a": one, "b": other, "same": one}).documents}
        assert first["a"] == first["same"]
        again = running.learn({"c": one})  # as a splitter names it that draws ids
        assert ([(document.source, document.digest) for document in again.documents], again.known) == ([("c", first["a"])], 1)
        swapped = running.learn({"a": other, "b": one})
        assert [(document.source, document.digest) for document in swapped.documents] == [("a", first["b"]), ("b", first["a"])]
        assert (again.computed_tokens, swapped.computed_tokens, sources(running)) == (0, 0, {"a", "b", "c", "same"})
        assert running.unlearn(["b", "c", "same"]) == 3
        assert sources(running) == {"a"}


def test_another_system_prompt_learns_texts_anew(tmp_path: Path) -> None:
    with engine(store=tmp_path) as running:
        running.learn(TEXTS, system="One.")
        assert running.learn(TEXTS, system="Two.").known == 0
        assert len(running.documents()) == len(TEXTS)


def test_texts_may_come_one_by_one(tmp_path: Path) -> None:
    with engine(store=None) as running:
        assert len(running.learn(iter(TEXTS.values()), messages=prompt(PASSAGES)).documents) == len(TEXTS)  # type: ignore[arg-type]
        shown = running.arrange(iter([*TEXTS.values()][1::-1]), prompt(PASSAGES))  # type: ignore[arg-type]
        assert (shown.order, shown.passages) == ((1, 0), 2)


def test_texts_are_learnt_in_a_tools_result_and_in_parts() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "search", "arguments": "{}"}}
    asked = [{"role": "user", "content": "Search."}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    found = {"role": "tool", "tool_call_id": "1", "content": f"Found: {PASSAGES}"}
    parts = {**found, "content": [{"type": "text", "text": "Found: "}, {"type": "text", "text": PASSAGES}]}
    typed = [Message("user", "Search."), Message("assistant", tool_calls=(ToolCall("search", {}, "1"),))]
    with engine(store=None) as running:
        running.learn(TEXTS, messages=[*asked, found])
        for messages in ([*asked, parts], [*typed, Message("tool", found["content"], tool_call_id="1")]):
            assert running.learn(TEXTS, messages=messages).known == len(TEXTS)
        receipt = running.generate([*asked, {**found, "content": f"Found: {joined([*TEXTS.values()], (0, 1))}"}], sampling=SHORT).receipt
        assert receipt.cached_tokens > 0.9 * receipt.prompt_tokens
        with pytest.raises(ConfigError, match="system='Be brief.': `messages` are given, too"):
            running.learn(TEXTS, system="Be brief.", messages=[*asked, found])


@pytest.mark.parametrize("texts", ["one text", {"a": ""}, {1: "text"}, [3], None, b"text"])
def test_texts_that_cannot_be_learnt_are_refused(texts: Any) -> None:
    with engine(store=None) as running, pytest.raises(ConfigError, match="text"):
        running.learn(texts)


def test_a_text_longer_than_the_context_is_named(tmp_path: Path) -> None:
    with engine(store=None) as running:
        with pytest.raises(ConfigError, match=r"texts\['long'\].*split it"):
            running.learn({**TEXTS, "long": long_text(running.model.context_tokens)})
        assert running.documents() == (), "it is told before others are computed"


def learn(parent: Connection, folder: Path) -> None:
    """In a process of its own: learn the texts, and tell of each."""
    with engine(store=folder) as running:
        running.learn(TEXTS, pack_tokens=1, progress=lambda done, total: parent.send(done))


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no SIGKILL on this system")
@pytest.mark.parametrize(("learnt", "pause"), [(1, 0.0), (3, 0.008), (5, 0.02)])
def test_a_kill_costs_the_passages_that_were_cut(tmp_path: Path, learnt: int, pause: float) -> None:
    child = Child(learn, tmp_path)
    told = [child.hear() for _ in range(learnt)]
    time.sleep(pause)  # the kill meets computing, writing or recording; the promise is the same
    told += child.kill()
    with engine(store=tmp_path) as running:
        kept = {one.source for one in running.documents()}
        assert len(told) <= len(kept) <= len(TEXTS)
        finished = running.learn(TEXTS, pack_tokens=1)
        left = sum(one.tokens for one in finished.documents if one.source not in kept)
        assert (finished.known, len(finished.documents)) == (len(kept), len(TEXTS))
        assert finished.computed_tokens <= left + 8 * (len(TEXTS) - len(kept)), "what was told is not computed again"
        assert running.learn(TEXTS, pack_tokens=1).computed_tokens == 0


def test_a_pack_names_its_texts_from_its_first_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ToolGroups, "leave_to_disk", lambda self, group: None)  # as where its process was killed before
    with engine(store=tmp_path) as running:
        running.learn(TEXTS, pack_tokens=300)
        assert running.flush()
    with engine(store=tmp_path) as running:
        assert len(running.documents()) == len(TEXTS)
        assert running.forget(group="documents").pages >= 3


def test_texts_forgotten_while_they_are_learnt_leave_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settle = ToolGroups.leave_to_disk

    def forgotten(self: ToolGroups, group: ToolGroup) -> None:
        running.forget(namespace="default")
        settle(self, group)

    monkeypatch.setattr(ToolGroups, "leave_to_disk", forgotten)
    with engine(store=tmp_path) as running:
        assert running.learn({"a": TEXTS["text-1"]}).documents == ()
        assert running.flush()
        assert running.store.disk
        assert running.store.disk.index.groups() == []


def sources(running: Engine) -> set[str]:
    return {one.source for one in running.documents()}


def test_texts_released_one_after_the_other_stay_released(tmp_path: Path) -> None:
    with engine(store=tmp_path) as running:
        running.learn(TEXTS)
    with engine(store=tmp_path) as running:
        assert running.store.disk
        written = threading.Event()
        running.store.disk.writer.after(lambda: written.wait(30))  # nothing that waits for the disk's thread is done
        assert [running.unlearn([name]) for name in ("text-1", "text-2")] == [1, 1]
        assert sources(running) == TEXTS.keys() - {"text-1", "text-2"}
        written.set()
        assert running.flush()
        assert sources(running) == TEXTS.keys() - {"text-1", "text-2"}


@contextmanager
def looking_at_once(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two callers that look at packs wait for each other before they release texts of them."""
    both, packs = threading.Barrier(2), ToolGroups.packs

    def looked(self: ToolGroups) -> list[ToolGroup]:
        found = packs(self)
        with suppress(threading.BrokenBarrierError):
            both.wait(1)  # in vain where one looks after the other
        return found

    with monkeypatch.context() as looking:
        looking.setattr(ToolGroups, "packs", looked)
        yield


def test_texts_released_at_once_are_all_released(monkeypatch: pytest.MonkeyPatch) -> None:
    with engine(store=None) as running, ThreadPoolExecutor(2) as callers:
        running.learn(TEXTS)
        with looking_at_once(monkeypatch):
            assert list(callers.map(running.unlearn, ["text-1", "text-2"])) == [1, 1]
        assert sources(running) == TEXTS.keys() - {"text-1", "text-2"}


def test_processes_release_texts_of_one_pack(tmp_path: Path) -> None:
    with engine(store=tmp_path) as learnt, engine(store=tmp_path) as other:
        learnt.learn(TEXTS)
        assert other.unlearn(["text-1"]) == 1
        assert sources(learnt) == TEXTS.keys() - {"text-1"}
        assert learnt.unlearn(["text-2", "text-1"]) == 1
        assert sources(learnt) == sources(other) == TEXTS.keys() - {"text-1", "text-2"}
        assert other.unlearn(list(TEXTS)) == 6
        assert sources(learnt) == sources(other) == set()
        assert learnt.flush()
        assert learnt.store.disk
        assert learnt.store.disk.index.groups() == []


def test_processes_release_texts_of_one_pack_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with engine(store=tmp_path) as learnt, engine(store=tmp_path) as other, ThreadPoolExecutor(2) as callers:
        learnt.learn(TEXTS)
        with looking_at_once(monkeypatch):
            done = [callers.submit(learnt.unlearn, ["text-1"]), callers.submit(other.unlearn, ["text-2"])]
            assert [each.result() for each in done] == [1, 1]
        assert sources(learnt) == sources(other) == TEXTS.keys() - {"text-1", "text-2"}


@pytest.mark.parametrize("earlier", [True, False], ids=["of an earlier process", "of this process"])
def test_a_pack_forgotten_during_a_release_leaves_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, earlier: bool) -> None:
    packs = ToolGroups.packs

    def forgotten(self: ToolGroups) -> list[ToolGroup]:
        found = packs(self)
        monkeypatch.undo()
        running.forget(namespace="default")
        return found

    with ExitStack() as engines:
        running = engines.enter_context(engine(store=tmp_path))
        running.learn(TEXTS)
        if earlier:
            engines.close()
            running = engines.enter_context(engine(store=tmp_path))
        monkeypatch.setattr(ToolGroups, "packs", forgotten)
        running.unlearn(["text-1"])
        assert running.flush()
        assert running.store.disk
        assert running.store.disk.index.groups() == []
