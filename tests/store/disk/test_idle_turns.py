"""Turns of idle sessions in fewer bits: rewritten on disk, told in the receipt, and never a way back into what is exact."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from agentcache import Completion, Engine, Reason, sessions
from agentcache.errors import CalibrationError, StoreBusyError
from agentcache.store.disk import blob_files, blob_io, idle_turns
from agentcache.store.disk.folder import Folder
from agentcache.store.disk.index import Index
from agentcache.store.keys import Scope
from agentcache.turn_precision import TurnsFound, path_of, save
from agentcache.types import StoreOptions
from tests.asking import user
from tests.engines import SYSTEM, TOOLS, Spy, chat, check_store, decode, engine, long_text
from tests.store.index_rows import random_ids
from tests.store.stocked_store import page_of_row, rows_of_group, store_group

STABLE = SYSTEM + long_text(80)  # system prompt and tools: more than a page
FIRST, SECOND = "What was the wind? " + long_text(150, 1), "And the tide?"


@pytest.fixture
def idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sessions are idle at once."""
    monkeypatch.setattr(sessions, "IDLE_S", 0.0)
    monkeypatch.setattr(sessions, "LOOK_S", 0.0)


def options(folder: Path, **more: Any) -> StoreOptions:
    return StoreOptions(folder / "store", **{"turns": "int8", "check_one_in": 0, **more})


def answered(running: Engine, said: list[Any], **more: Any) -> tuple[list[Any], Completion]:
    """The conversation after the session's answer, with the next question, and that answer."""
    done = running.generate(said, TOOLS, session="alice", sampling=decode(4), **more)
    return [*said, done.message, user(SECOND)], done


def precisions(running: Engine) -> list[str]:
    """Of the pages on disk by place, once turns of idle sessions are rewritten."""
    assert running.flush()
    running._groups.sessions.lapse()
    assert running.flush()
    rows = running.store.disk.index.rows()
    return [row.precision for row in sorted(rows, key=lambda row: (row.place, row.precision))]


def stable_tokens(running: Engine) -> int:
    """Of system prompt and tools, as the session remembers them."""
    found = running._groups.sessions.last("default", "alice")
    assert found is not None
    return found.stable_tokens


@pytest.fixture
def said(tmp_path: Path, idle: None, model: Any) -> list[Any]:
    """A conversation whose session an earlier process left idle."""
    with engine(model=model, store=options(tmp_path)) as running:
        running.warm(STABLE, TOOLS, name="tools")
        after, _ = answered(running, chat(FIRST, system=STABLE))
        stable = stable_tokens(running)
        found = precisions(running)
    assert found == [*["exact"] * -(-stable // 512), *["int8"] * (len(found) - -(-stable // 512))]
    assert found.count("int8") >= 2
    return after


def test_turns_of_idle_sessions_take_half_the_bytes(tmp_path: Path, idle: None, model: Any) -> None:
    with engine(model=model, store=options(tmp_path)) as running:
        answered(running, chat(FIRST, system=STABLE))
        assert running.flush()
        before = {row.page_key: row for row in running.store.disk.index.rows()}
        assert "int8" in precisions(running)
        after = [row for row in running.store.disk.index.rows() if row.precision == "int8"]
        item = {"float32": 4, "bfloat16": 2}[after[0].dtype]
        for row in after:
            old = before[row.page_key]
            assert (row.id, row.tokens, row.created, row.role) == (old.id, old.tokens, old.created, old.role)
            assert row.bytes - 8192 < (old.bytes - 8192) * 1.4 / item
        check_store(running.store)


@pytest.mark.parametrize("known", [False, True])
def test_a_busy_index_leaves_no_file_of_a_rewriting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, known: bool) -> None:
    def busy(*_: object) -> Any:
        raise StoreBusyError("another process writes")

    prompt = random_ids(512)
    with Index(Folder.open(tmp_path)) as index:
        [row] = store_group(index, prompt)
        if known:
            lossy = rows_of_group(prompt, Scope("tests", "weights", precision="int8"))[0]
            index.restore([blob_io.write(index.folder, lossy, page_of_row(lossy))])
        monkeypatch.setattr(index, "exchange", busy)
        with pytest.raises(StoreBusyError):
            idle_turns.rewrite(index, row.page_key, row.fingerprint, "int8")
        assert [file.name for file in blob_files.files(index.folder)] == [one.blob for one in index.rows()] == [row.blob]


def test_an_exact_request_never_gets_pages_of_fewer_bits(tmp_path: Path, model: Any, said: list[Any]) -> None:
    with engine(model=model, store=options(tmp_path)) as running:
        spy = Spy(running)
        off = running.generate(said, TOOLS, sampling=decode(4), reuse="off")
        wanted, spy.logits = list(spy.logits), []
        _, done = answered(running, said)
        assert done.ids == off.ids
        assert all(torch.equal(a, b) for a, b in zip(wanted, spy.logits, strict=True))
        assert (done.receipt.precision, done.receipt.resumed, done.receipt.bitwise) == ("exact", "extend", True)
        stable = stable_tokens(running)
        assert stable <= done.receipt.cached_tokens < stable + 512
        assert running.flush()
        assert {row.precision for row in running.store.disk.index.rows()} == {"exact"}, "written back, in place of the others"
        check_store(running.store)


def test_a_lossy_answer_is_told_and_moves_the_session(tmp_path: Path, model: Any, said: list[Any]) -> None:
    with engine(model=model, store=options(tmp_path)) as running:
        after, done = answered(running, said, reuse="lossy")
        near = done.receipt
        assert (near.resumed, near.precision, near.bitwise, near.exact_until) == ("extend", "int8", False, 0)
        assert near.cached_tokens == near.disk_tokens > stable_tokens(running) + 512
        assert [one.reason for one in near.refusals if one.reason == Reason.LOSSY] == [Reason.LOSSY]
        assert running.flush()
    with engine(model=model, store=options(tmp_path)) as running:
        further = answered(running, after, reuse="lossy")[1].receipt
        assert (further.resumed, further.precision) == ("extend", "int8")
        assert further.cached_tokens >= near.prompt_tokens, "the lossy turn was stored, too"
        exact = running.generate(after, TOOLS, sampling=decode(4)).receipt
        assert exact.cached_tokens < stable_tokens(running) + 512


def test_exact_pages_in_memory_are_lent_to_lossy_requests(tmp_path: Path, model: Any, said: list[Any]) -> None:
    with engine(model=model, store=options(tmp_path)) as running:
        running.warm(STABLE, TOOLS, name="tools")
        before = running.store.bytes
        near = running.generate(said, TOOLS, sampling=decode(4), reuse="lossy").receipt
        assert near.precision == "int8"
        assert near.cached_tokens > stable_tokens(running) + 512
        assert near.disk_tokens <= near.cached_tokens - stable_tokens(running) // 512 * 512, "the tool group was not read again"
        pages = len(precisions(running))
        assert running.store.bytes <= before + pages * running.model.spec.page_bytes
        check_store(running.store)


def test_sessions_in_use_stay_exact_on_disk(tmp_path: Path, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "LOOK_S", 0.0)
    with engine(model=model, store=options(tmp_path)) as running:
        answered(running, chat(FIRST, system=STABLE))
        assert set(precisions(running)) == {"exact"}
        [alice] = running.store.disk.index.groups()
        running.session("alice").fork("bob")
        assert running.flush()
        running.store.disk.index.put_group(replace(alice, created=alice.created - 3600))
        assert set(precisions(running)) == {"exact"}, "bob goes on from there"


def test_a_damaged_turn_is_quarantined_when_rewritten(tmp_path: Path, model: Any, idle: None) -> None:
    with engine(model=model, store=options(tmp_path, turns="exact")) as running:
        answered(running, chat(FIRST, system=STABLE))
        assert running.flush()
        disk = running.store.disk
        row = max(disk.index.rows(), key=lambda row: row.place)
        file = disk.folder.blobs / row.blob[:2] / f"{row.blob}.safetensors"
        file.write_bytes(file.read_bytes()[:-40] + bytes(40))
        assert idle_turns.rewrite(disk.index, row.page_key, row.fingerprint, "int8") == (0, ())
        assert disk.index.row(row.page_key, row.fingerprint).bad


def test_int4_turns_need_a_calibration_that_passed(tmp_path: Path, model: Any) -> None:
    with engine(model=model, store=options(tmp_path, turns="int4")) as running:
        weights = running.fingerprint.whole
        with pytest.raises(CalibrationError, match=r"turns='int4'.*no calibration.*calibrate --turns int4"):
            running.session("alice")
        for changed, calls, tail, said in ((0, 40, 0.5, "KL of the 99th"), (1, 40, 0.001, "1 of 40"), (0, 3, 0.001, "0 of 3")):
            found = TurnsFound(50, calls, changed, 500, 1.0, 0.0, tail, tail)
            save(path_of(tmp_path / "store", weights), weights, 0.02, {"int4": found})
            with pytest.raises(CalibrationError, match=f"did not pass.*{said}"):
                running.session("alice")
        save(path_of(tmp_path / "store", weights), weights, 0.02, {"int4": TurnsFound(50, 40, 0, 500, 1.0, 0.0, 0.001, 0.01)})
        assert running.session("alice").tokens == 0
