"""Sessions: a conversation's name finds its last turn in any process, shares pages with its forks, and leaves nothing once it ends."""

from __future__ import annotations

import json
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agentcache import Completion, Engine, Session, StoreOptions, sessions
from agentcache.errors import ConfigError, EngineClosedError, StoreError
from agentcache.private import lock
from agentcache.store.disk import blob_files, session_rows
from agentcache.store.disk.folder import Folder
from agentcache.store.disk.index import Index
from agentcache.store.keys import Role
from agentcache.store.page_prefetch import lend
from tests import models
from tests.asking import Asking, user
from tests.engines import SYSTEM, TOOLS, chat, check_store, decode, engine, long_text
from tests.processes import Child
from tests.saved_adapters import save
from tests.store.child_processes import answer_in_session
from tests.store.index_rows import random_ids
from tests.store.stocked_store import store_group

LONG = SYSTEM + long_text(150)  # two pages
FIRST, SECOND = "What was the wind? " + long_text(80, 1), "And the tide? " + long_text(80, 2)


def talk(session: Session, *asked: str, system: str = LONG, **options: Any) -> tuple[list[Any], Completion]:
    """Ask one question after the other; the conversation with its last answer, and that."""
    said = chat(*asked[:1], system=system)
    for text in asked[1:]:
        said += [session.generate(said, sampling=decode(4), **options).message, user(text)]
    done = session.generate(said, sampling=decode(4), **options)
    return [*said, done.message], done


def pinned(running: Engine) -> tuple[int, int]:
    found = running.store.audit()
    return found["pins"], found["pinned_pages"]


# -- resuming ----------------------------------------------------------------------------------------------------------


def test_the_receipt_says_what_a_prompt_is_to_its_session(running: Engine) -> None:
    said = talk(running.session("alice"), FIRST)[0]
    asked = {"exact": said[:-1], "extend": [*said, user(SECOND)], "diverge": chat(SECOND, system=LONG)}
    for word, messages in asked.items():
        session = running.session(word)
        assert talk(session, FIRST)[1].receipt.resumed == ""
        assert session.generate(messages, sampling=decode(4)).receipt.resumed == word
        assert running.generate(messages, sampling=decode(4)).receipt.resumed == ""


def test_a_request_names_the_session_of_its_namespace(running: Engine) -> None:
    said, first = talk(running.session("alice", namespace="a"), FIRST)
    for namespace, word in (("b", ""), ("a", "extend")):
        done = running.generate([*said, user(SECOND)], session="alice", namespace=namespace, sampling=decode(4))
        assert done.receipt.resumed == word
    assert running.session("alice", namespace="a").tokens > first.receipt.prompt_tokens + 4


def test_an_empty_name_is_no_session(running: Engine) -> None:
    for _ in range(2):
        assert running.generate(chat(FIRST), session="", sampling=decode(4)).receipt.resumed == ""
    with pytest.raises(ConfigError, match="name=''"):
        running.session("")


def test_a_second_process_computes_only_the_new_turn(tmp_path: Path) -> None:
    conversation = tmp_path / "talk.json"
    conversation.write_text(json.dumps(chat(FIRST, system=SYSTEM)))
    found = [Child(answer_in_session, tmp_path / "store", conversation, 1).end() for _ in range(2)]
    assert [one["resumed"] for one in found] == ["", "extend"]
    assert found[1]["cached_tokens"] >= found[0]["tokens"] - 1
    assert found[1]["disk_tokens"] == found[1]["cached_tokens"]
    assert [one["same"] for one in found if one["bitwise"]] == [True, True]


def test_a_killed_process_leaves_the_last_turn_that_was_written(tmp_path: Path) -> None:
    conversation = tmp_path / "talk.json"
    conversation.write_text(json.dumps(chat(FIRST, system=SYSTEM)))
    child = Child(answer_in_session, tmp_path / "store", conversation, 0)
    written = [child.hear() for _ in range(2)][-1]
    child.kill()
    found = Child(answer_in_session, tmp_path / "store", conversation, 1).end()
    assert found["resumed"] in ("exact", "extend")
    assert found["cached_tokens"] >= written["tokens"] - 1
    assert found["same"] or not found["bitwise"]


def test_other_weights_begin_a_session_anew(tmp_path: Path) -> None:
    for seed in range(2):
        with engine(model=models.build("qwen3", seed=seed), store=tmp_path / "store") as running:
            receipt = talk(running.session("alice"), FIRST)[1].receipt
            assert (receipt.resumed, receipt.cached_tokens) == ("", 0)
            assert any("other weights" in note for note in receipt.notes) == bool(seed)


def test_an_answer_without_reuse_moves_no_session(running: Engine) -> None:
    session = running.session("alice")
    said, _ = talk(session, FIRST)
    before = session.tokens
    done = session.generate([*said, user(SECOND)], sampling=decode(4), reuse="off")
    assert (done.receipt.resumed, session.tokens) == ("", before)


def test_a_stream_that_is_left_moves_no_session(running: Engine) -> None:
    session = running.session("alice")
    said, _ = talk(session, FIRST)
    before = session.tokens
    with session.stream([*said, user(SECOND)], sampling=decode(64)) as stream:
        next(stream)
    assert session.tokens == before


def test_checkpoints_of_recurrent_layers_resume_a_session(tmp_path: Path) -> None:
    said = [user(FIRST)]
    for word in ("", "extend"):
        asking = Asking("lfm2", tmp_path / "store")
        with asking.engine as running:
            done, logits = asking(said, session="alice")
            assert done.receipt.resumed == word
            assert bool(done.receipt.cached_tokens) == bool(word)
            assert torch.equal(logits, asking(said, reuse="off")[1])
            assert pinned(running)[0] == 1
            said = [*said, done.message, user(SECOND)]  # type: ignore[list-item]


def test_two_threads_leave_a_session_at_one_of_their_answers(running: Engine) -> None:
    session = running.session("alice")
    found: dict[str, Completion] = {}

    def ask(text: str) -> None:
        found[text] = talk(session, text)[1]

    threads = [threading.Thread(target=ask, args=(text,)) for text in (FIRST, SECOND)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lengths = {one.receipt.prompt_tokens + len(one.ids) - 1 for one in found.values()}
    assert session.tokens in lengths
    assert pinned(running)[0] == 1
    running.flush()
    check_store(running.store)


@pytest.mark.parametrize("when", ["before, and its lease ended", "meanwhile"])
def test_a_fork_over_an_answer_leaves_no_pin(running: Engine, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    alice, sessions, moved = running.session("alice"), running._groups.sessions, threading.Event()
    talk(alice, FIRST)
    records, lock = sessions._records, sessions._lock
    answering = threading.Thread(target=lambda: (talk(running.session("bob"), SECOND), moved.set()))

    class Contended:
        def __enter__(self) -> None:
            if not lock.acquire(blocking=False):
                moved.set()  # it has to wait
                lock.acquire()

        def __exit__(self, *exc: object) -> None:
            lock.release()

    def then_answered(namespace: str, name: str) -> Any:
        found = records(namespace, name)
        if threading.current_thread() is not answering:
            monkeypatch.setattr(sessions, "_records", records)
            answering.start()
            assert moved.wait(30)
        return found

    if when == "meanwhile":
        monkeypatch.setattr(sessions, "_lock", Contended())
        known = alice._last()
        monkeypatch.setattr(sessions, "_records", then_answered)
        sessions.copy([known], "bob", 60.0)
        answering.join(30)
    else:
        said = chat(SECOND, system=LONG)
        known = alice._last()
        running.session("bob", lease_s=1e-9).generate(said, sampling=decode(4))
        sessions.copy([known], "bob", 60.0)
    for name in ("alice", "bob"):
        running.session(name).close()
    assert pinned(running) == (0, 0)


class LookedAt:
    """A session of an engine; another thread's answer begins one of its own while this one is looked at."""

    def __init__(self, held: Any, others: dict[Any, Any]) -> None:
        self._held, self._others = held, others

    def __getattr__(self, name: str) -> Any:
        self._others.setdefault(len(self._others), self)
        return getattr(self._held, name)


def test_sessions_are_listed_while_others_begin(running: Engine) -> None:
    for name in ("alice", "bob"):
        talk(running.session(name), FIRST)
    sessions = running._groups.sessions
    key, held = next(iter(sessions._held.items()))
    sessions._held[key] = LookedAt(held, sessions._held)  # type: ignore[assignment]
    assert [group.name for group in sessions.all] == ["session:alice", "session:bob"]


# -- names -------------------------------------------------------------------------------------------------------------


def test_a_fork_shares_the_pages(running: Engine) -> None:
    alice = running.session("alice")
    said, _ = talk(alice, FIRST)
    running.flush()
    before = running.store.audit()
    bob = alice.fork("bob")
    running.flush()
    assert running.store.audit() | {"groups": before.get("groups")} == before | {"groups": before.get("groups")}
    assert bob.tokens == (shared := alice.tokens)
    for session, text in ((alice, "And the oars?"), (bob, "And the sails?")):
        done = session.generate([*said, user(text)], sampling=decode(4))
        assert done.receipt.resumed == "extend"
        assert done.receipt.cached_tokens >= shared
    after = running.store.audit()
    assert after["pages"] <= before["pages"] + 3, "only the growing page is there twice, or one more"


def test_a_renamed_session_is_found_by_its_new_name_only(running: Engine) -> None:
    session = running.session("alice")
    said, _ = talk(session, FIRST)
    session.rename("bob")
    running.flush()
    assert (session.name, running.session("alice").tokens) == ("bob", 0)
    assert running.generate([*said, user(SECOND)], session="bob", sampling=decode(4)).receipt.resumed == "extend"


def test_a_rename_that_is_refused_copies_nothing(running: Engine, tmp_path: Path) -> None:
    running.add_adapter("judge", save(tmp_path / "judge", layers_to_transform=[1]))
    for name, adapter in (("alice", None), ("alice", "judge"), ("bob", "judge")):
        running.generate(chat(f"{name} asks {adapter}"), sampling=decode(2), session=name, adapter=adapter)
    with pytest.raises(ConfigError, match="close it, or take another name"):
        running.session("alice").rename("bob")
    said = running.generate(chat("Fog?"), sampling=decode(2), session="bob")
    assert said.receipt.resumed == "", "the base has not answered bob before"


@pytest.mark.parametrize("call", ["fork", "rename"])
def test_a_name_that_is_taken_is_refused(running: Engine, call: str) -> None:
    for name in ("alice", "bob"):
        talk(running.session(name), FIRST)
    with pytest.raises(ConfigError, match="'bob'.*close it"):
        getattr(running.session("alice"), call)("bob")
    with pytest.raises(ConfigError, match="no answer"):
        getattr(running.session("carl"), call)("dora")


def test_an_archive_carries_a_session_to_another_store(model: Any, tmp_path: Path) -> None:
    with engine(model=model, store=tmp_path / "here") as running:
        session = running.session("alice")
        said, done = talk(session, FIRST)
        tokens = session.tokens
        assert session.export(tmp_path / "alice.session") > 0
        with pytest.raises(ConfigError, match="without answers"):
            session.import_archive(tmp_path / "alice.session")
    with engine(model=model, store=tmp_path / "there") as running:
        session = running.session("bob", namespace="other")
        assert session.import_archive(tmp_path / "alice.session") == tokens == session.tokens
        done = session.generate([*said, user(SECOND)], sampling=decode(4))
        assert done.receipt.disk_tokens >= tokens - len(done.ids)


def test_only_a_store_on_disk_exports_and_imports(model: Any, tmp_path: Path) -> None:
    with engine(model=model, store=None) as running:
        session = running.session("alice")
        talk(session, FIRST)
        with pytest.raises(ConfigError, match="store on disk"):
            session.export(tmp_path / "alice.session")
        with pytest.raises(ConfigError, match="store on disk"):
            running.session("bob").import_archive(tmp_path / "alice.session")


def test_tool_groups_and_sessions_do_not_take_each_others_names(model: Any, tmp_path: Path) -> None:
    with engine(model=model, store=tmp_path / "store") as running:
        with pytest.raises(ConfigError, match="those of sessions"):
            running.warm(SYSTEM, TOOLS, name="session:alice")
        running.warm(SYSTEM, TOOLS, name="alice")
        session = running.session("alice")
        talk(session, FIRST)
        running.flush()
        assert [group.name for group in running.groups] == ["alice"]
        assert running.store.disk
        assert {group.name for group in running.store.disk.index.groups()} == {"alice", "session:alice"}


@pytest.mark.parametrize("lease_s", [0, -1, True, "1", float("inf"), float("nan"), None])
def test_an_impossible_lease_is_refused(model: Any, lease_s: Any) -> None:
    with engine(model=model, store=None) as running, pytest.raises(ConfigError, match="lease_s="):
        running.session("alice", lease_s=lease_s)


def test_a_session_of_another_namespace_is_refused(running: Engine) -> None:
    with pytest.raises(ConfigError, match="namespace 'a'.*'default'"):
        running.generate(chat(FIRST), session=running.session("alice", namespace="a"))


def test_a_session_ends_with_its_engine(model: Any) -> None:
    with engine(model=model, store=None) as running:
        session = running.session("alice")
    for use in (lambda: session.tokens, session.close, lambda: session.generate(chat(FIRST))):
        with pytest.raises(EngineClosedError):
            use()


# -- the end -----------------------------------------------------------------------------------------------------------


def test_a_closed_session_holds_nothing(running: Engine) -> None:
    session = running.session("alice")
    talk(session, FIRST, SECOND)
    running.flush()
    assert pinned(running)[0] == 1
    session.close()
    running.flush()
    assert (session.tokens, *pinned(running)) == (0, 0, 0)
    if running.store.disk:
        assert running.store.audit()["groups"] == 0
        assert {(row.role, row.used) for row in running.store.disk.index.rows()} == {(Role.TURN, 0)}
    check_store(running.store)


def test_a_session_whose_lease_is_over_holds_nothing(running: Engine) -> None:
    session = running.session("alice", lease_s=1e-6)
    said, _ = talk(session, FIRST)
    assert session.tokens == 0
    assert session.generate([*said, user(SECOND)], sampling=decode(4)).receipt.resumed == ""
    running.generate(chat("Hi"), sampling=decode(1))
    running.flush()
    assert pinned(running) == (0, 0)
    assert running.store.audit().get("groups", 0) == 0


def test_a_lease_that_ends_without_its_process_leaves_no_manifest(model: Any, tmp_path: Path) -> None:
    with engine(model=model, store=tmp_path / "store") as running:
        talk(running.session("alice", lease_s=1e-6), FIRST)
    with engine(model=model, store=tmp_path / "store") as running:
        assert running.store.audit()["groups"] == 1
        running.session("bob")
        running.flush()
        assert running.store.audit()["groups"] == 0


def test_a_clock_set_back_holds_no_session(model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time
    with monkeypatch.context() as ahead, engine(model=model, store=tmp_path / "store") as running:
        ahead.setattr(time, "time", lambda: now() + 3600)
        talk(running.session("alice"), FIRST)
    with engine(model=model, store=tmp_path / "store") as running:
        alice = running.session("alice")
        before = alice.tokens
        talk(alice, SECOND)
        assert 0 < before != alice.tokens, "it goes on, though the clock says that it was asked later"
    with engine(model=model, store=tmp_path / "store") as running:
        assert 0 < running.session("alice").tokens != before
    monkeypatch.setattr(time, "time", lambda: now() - 2 * 86_400)
    with engine(model=model, store=tmp_path / "store") as running:
        assert running.session("alice").tokens == 0
        running.flush()
        assert running.store.audit()["groups"] == 0


def test_a_lease_renewed_meanwhile_is_not_ended(model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with engine(model=model, store=tmp_path / "store") as running:
        talk(running.session("alice", lease_s=1e-6), FIRST)
        running.flush()
        assert running.store.disk
        index = running.store.disk.index
        known = index.groups()
        talk(running.session("alice"), FIRST)
        running.flush()
        monkeypatch.setattr(index, "groups", lambda: known)
        session_rows.end_leases(index)
        monkeypatch.undo()
        assert len(index.groups()) == 1


def test_forgetting_a_session_leaves_what_others_name(running: Engine) -> None:
    alice, bob = running.session("alice"), running.session("bob")
    talk(alice, FIRST)
    talk(alice, SECOND)  # another branch
    talk(bob, "Hi")
    running.flush()
    kept = bob.tokens
    gone = running.forget(session="alice")
    assert gone.groups == ("session:alice",)
    assert (alice.tokens, bob.tokens) == (0, kept)
    assert pinned(running)[0] == 1
    ids = {len(entry.ids) + entry.first for entry in running.store.tree.entries()}
    assert max(ids) == kept, "the branch that was left is forgotten, too"
    if running.store.disk:
        assert running.store.audit()["groups"] == 1
        assert sum(row.tokens for row in running.store.disk.index.rows()) == kept
    for text in (FIRST, SECOND):
        assert running.generate(chat(text, system=LONG), sampling=decode(1)).receipt.cached_tokens < kept
    with pytest.raises(ConfigError, match="give one of them"):
        running.forget(session="alice", group="alice")


def test_a_tool_group_is_forgotten_with_sessions_on_it(running: Engine) -> None:
    running.warm(LONG, name="tools")
    session = running.session("alice")
    said, _ = talk(session, FIRST)
    assert session.generate(said[:-1], sampling=decode(4)).receipt.cached_tokens > 0
    running.flush()
    assert running.forget(group="tools").memory_pages >= 3
    assert (len(running.store), running.store.audit().get("disk_pages", 0)) == (0, 0)
    assert session.generate(said[:-1], sampling=decode(4)).receipt.cached_tokens == 0


def test_a_session_with_pages_older_than_itself_is_pinned_again(running: Engine) -> None:
    session = running.session("alice")
    said, _ = talk(session, FIRST)
    for entry in running.store.tree.entries():
        entry.made -= 3600
    running.forget(older_than=1800)
    assert pinned(running) == (0, 0)
    session.generate(said[:-1], sampling=decode(4))
    assert pinned(running)[0] == 1


def test_an_answer_forgotten_while_it_ran_moves_no_session(running: Engine) -> None:
    session = running.session("alice")
    talk(session, FIRST)
    stream = session.stream(chat(SECOND, system=LONG), sampling=decode(16))
    next(stream)
    running.forget(namespace="default")
    assert len(stream.completion.ids) == 16
    running.flush()
    assert (session.tokens, *pinned(running)) == (0, 0, 0)
    assert running.store.audit().get("groups", 0) == 0


def test_a_session_is_forgotten_while_its_answer_waits_for_disk(model: Any, tmp_path: Path) -> None:
    with engine(model=model, store=tmp_path / "store") as running:
        session = running.session("alice")
        said, _ = talk(session, FIRST)
        assert running.flush()
        assert running.store.disk
        written = threading.Event()
        running.store.disk.writer.after(lambda: written.wait(60))
        talk(session, FIRST, SECOND)
        assert running.forget(session="alice").groups == ("session:alice",)
        written.set()
        assert running.flush()
        assert (session.tokens, running.store.audit()["groups"]) == (0, 0)
        assert running.generate(said, sampling=decode(1), session="alice").receipt.resumed == ""


def test_a_forgotten_session_leaves_no_ids_of_its_answers(model: Any, tmp_path: Path) -> None:
    with engine(model=model, store=tmp_path / "store") as running:
        talk(running.session("alice"), FIRST, SECOND)
        talk(running.session("bob"), SECOND, system="Other. " + LONG)
        assert running.flush()
        assert running.store.disk
        kept = running.store.disk.index.stats()["splices"]
        assert running.forget(session="alice").splices == 2
        assert running.flush()
        assert running.store.disk.index.stats()["splices"] == kept - 2 == 1


def test_a_session_forgotten_elsewhere_is_not_held_any_more(model: Any, tmp_path: Path) -> None:
    with engine(model=model, store=tmp_path / "store") as one, engine(model=models.build("qwen3", num_hidden_layers=2),
        store=tmp_path / "store") as other:  # fmt: skip
        session = one.session("alice")
        said, _ = talk(session, FIRST)
        one.flush()
        assert other.forget(session="alice").pages > 0
        assert session.tokens == 0
        done = session.generate([*said, user(SECOND)], sampling=decode(4))
        assert (done.receipt.resumed, done.receipt.cached_tokens) == ("", 0)


# -- room --------------------------------------------------------------------------------------------------------------


def test_a_branch_that_was_left_goes_first(model: Any, tmp_path: Path) -> None:
    with engine(model=model, store=tmp_path / "store") as running:
        session = running.session("alice")
        talk(session, FIRST)
        left = {entry.key for entry in running.store.tree.entries()}
        talk(running.session("bob"), FIRST, system="Other." + LONG)
        talk(session, SECOND)
        now = {entry.key for entry in running.store.tree.path(next(iter(running.store.tree.entries())).scope, _ids(running))}
        running.flush()
        assert running.store.disk
        left -= now
        assert left
        assert {entry.key for entry in running.store.tree.entries()[: len(left)]} == left
        assert {row.page_key for row in running.store.disk.index.victims(1)} <= left
        check_store(running.store)


def test_a_branch_that_was_left_goes_first_in_all_grades(model: Any, tmp_path: Path) -> None:
    with engine(model=model, store=StoreOptions(tmp_path / "store", turns="int8")) as running:
        tree, session = running.store.tree, running.session("alice")
        talk(running.session("bob"), FIRST, system="Other." + LONG)
        others = {entry.key for entry in tree.entries()}
        talk(session, FIRST)
        path = [entry for entry in tree.entries() if entry.key not in others][::-1]
        lend(tree, replace(path[0].scope, precision="int8"), np.concatenate([*(entry.ids for entry in path), path[0].ids]))
        talk(session, SECOND)
        assert {entry.key for entry in tree.entries()[:4]} == {entry.key for entry in path[-2:]}
        check_store(running.store)


def _ids(running: Engine) -> Any:
    layout = running.renderer.render(chat(SECOND, system=LONG))
    from agentcache.store.keys import as_ids

    return as_ids(layout.ids)


def test_pages_that_were_there_serve_a_session_as_prefixes(model: Any, tmp_path: Path) -> None:
    with engine(model=model, store=tmp_path / "store") as running:
        asked = chat(FIRST, "Noted.", SECOND, system="Hi.")
        running.generate(asked, sampling=decode(4))
        running.flush()
        assert running.store.disk
        assert Role.TURN in {row.role for row in running.store.disk.index.rows()}
        running.session("alice").generate(asked, sampling=decode(4))
        running.flush()
        assert {row.role for row in running.store.disk.index.rows()} == {Role.PREFIX}


def test_a_shorter_page_that_is_mapped_stops_no_writing(tmp_path: Path) -> None:
    prompt = random_ids(200)
    with Index(Folder.open(tmp_path, overwrite=True)) as index:
        [shorter] = store_group(index, prompt[:100], role=Role.PREFIX)
        [longer] = store_group(index, prompt, role=Role.TURN)
        fd, _ = blob_files.open_file(index.folder, shorter.blob)
        lock(fd, shared=True)  # as who maps it
        session_rows.keep(index, [longer.page_key.hex()], longer.fingerprint)
        os.close(fd)
        assert [row.id for row in index.rows()] == [longer.id]


def test_a_shorter_answer_retires_no_page_that_holds_it(model: Any, tmp_path: Path) -> None:
    with engine(model=model, store=tmp_path / "store") as running:
        session = running.session("alice")
        for tokens in (8, 4):
            session.generate(chat(FIRST, system=LONG), sampling=decode(tokens))
        running.flush()
        assert running.store.disk
        assert {row.role for row in running.store.disk.index.rows()} == {Role.PREFIX}
        running.forget(session="alice")
        assert not list(running.store.disk.index.rows())


def test_a_memory_too_small_for_a_session_still_answers(model: Any, tmp_path: Path) -> None:
    size = page_bytes(model)
    for pages, store in ((0, None), (1, None), (3, tmp_path / "store")):
        with engine(model=model, store=store, memory_bytes=pages * size) as running:
            session = running.session("alice")
            said, first = talk(session, FIRST)
            done = session.generate([*said, user(SECOND)], sampling=decode(4))
            assert len(done.ids) == 4
            assert pinned(running) == (0, 0)
            assert done.receipt.resumed == "extend"
            assert running.store.bytes <= pages * size


def test_sessions_pin_at_most_half_of_the_memory(model: Any) -> None:
    with engine(model=model, store=None, memory_bytes=16 * page_bytes(model)) as running:
        for name in "abcdef":
            talk(running.session(name), FIRST, system=name + LONG)
            assert 0 < pinned(running)[1] <= 8


def test_sessions_give_way_to_tool_groups(model: Any) -> None:
    with engine(model=model, store=None, memory_bytes=8 * page_bytes(model)) as running:
        for name in "ab":
            talk(running.session(name), "Wind?", system=name + LONG)
        assert pinned(running) == (2, 4)
        groups = [running.warm(f"{number} {LONG}", name=str(number)) for number in range(4)]
        assert [group.pages for group in groups] == [2] * 4
        assert pinned(running) == (4, 8)
        with pytest.raises(ConfigError, match=r"it needs \d+ bytes, and others have pinned \d+ bytes: release one of them"):
            running.warm(f"4 {LONG}")
        running.release("0")
        assert running.warm(f"4 {LONG}").pages == 2


def test_an_interrupted_answer_leaves_no_pin_alone(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*given: Any, **also: Any) -> None:
        raise KeyboardInterrupt

    with engine(model=model, store=None) as running:
        session = running.session("alice")
        talk(session, FIRST)
        with monkeypatch.context() as patch:
            patch.setattr(sessions, "replace", interrupt)  # as it moves to its second answer
            with pytest.raises(KeyboardInterrupt):
                talk(session, SECOND)
        session.close()
        assert pinned(running) == (0, 0)


def test_an_idle_session_is_evictable(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with engine(model=model, store=None) as running:
        session = running.session("alice")
        talk(session, FIRST)
        assert pinned(running)[0] == 1
        monkeypatch.setattr(sessions, "IDLE_S", 0.0)
        running.generate(chat("Hi"), sampling=decode(1))
        assert pinned(running) == (0, 0)
        assert session.tokens > 0


def test_the_oldest_of_too_many_branches_are_deleted(model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "SUPERSEDED", 1)
    with engine(model=model, store=tmp_path / "store") as running:
        session = running.session("alice")
        for salt in range(4):
            talk(session, long_text(20, salt), system="Hi.")
            running.flush()
        assert running.store.disk
        assert len(list(running.store.disk.index.rows())) == 2
        [known] = running.store.disk.index.groups()
        assert len(known.superseded) == 1


def test_old_branches_are_deleted_while_no_page_is_admitted(model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "SUPERSEDED", 1)
    with engine(model=model, store=tmp_path / "store") as running, ThreadPoolExecutor(1) as other:
        lock, remove, admissible = running.store.deletions.lock, running.store.tree.remove, list[bool]()

        def admits() -> bool:
            if free := lock.acquire(blocking=False):
                lock.release()
            return free

        def removes(deletion: Any) -> tuple[int, int]:
            admissible.append(other.submit(admits).result())
            return remove(deletion)

        monkeypatch.setattr(running.store.tree, "remove", removes)
        for salt in range(3):
            talk(running.session("alice"), long_text(20, salt), system="Hi.")
        assert running.flush()
        assert admissible == [False]


def test_a_disk_without_room_for_all_keeps_sessions_before_turns(model: Any, tmp_path: Path) -> None:
    size = page_bytes(model)
    with engine(model=model, store=StoreOptions(tmp_path / "store", disk_bytes=8 * size)) as running:
        session = running.session("alice")
        said, _ = talk(session, FIRST)
        for salt in range(4):
            running.generate([user(long_text(150, salt + 3))], sampling=decode(1))
            running.flush()
        running.store.clear()
        done = session.generate([*said, user(SECOND)], sampling=decode(4))
        assert done.receipt.disk_tokens == done.receipt.cached_tokens >= session.tokens - 700


def test_a_store_that_fails_leaves_the_answer(model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with engine(model=model, store=tmp_path / "store") as running:
        session = running.session("alice")

        def fail(*_: object) -> None:
            raise StoreError("no disk")

        monkeypatch.setattr(running.store, "record", fail)
        assert len(talk(session, FIRST)[1].ids) == 4


def page_bytes(model: Any) -> int:
    with engine(model=model, store=None) as running:
        assert running.model.spec
        return running.model.spec.page_bytes
