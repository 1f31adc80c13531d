"""Receipts as evidence: chains of lines, what their check finds, and what their sums say."""

from __future__ import annotations

import errno
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from agentcache import Engine, Sampling
from agentcache.cli.app import app
from agentcache.errors import ConfigError, StoreCorruptError
from agentcache.receipt import Receipt
from agentcache.receipt_log import ReceiptLog, read, totals, verify
from agentcache.store.keys import as_ids
from agentcache.types import Span

SYSTEM = "You keep a lighthouse. " * 60
TOOLS = [{"type": "function", "function": {"name": "light", "description": "Turn the light on.", "parameters": {"type": "object"}}}]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The receipts of an agent's three requests."""
    folder = tmp_path_factory.mktemp("evidence") / "receipts"
    with Engine("embedded", store=None, receipts=folder) as engine:
        for question in ("Is it lit?", "Is it lit?", "What of the fog?"):
            asked = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
            engine.generate(asked, TOOLS, sampling=Sampling(max_tokens=3))
    return folder


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    """A copy of them, to be spoiled."""
    for path in written.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
        (tmp_path / path.name).chmod(0o600)
    return tmp_path


def chain(folder: Path) -> Path:
    (path,) = folder.glob("*.jsonl")
    return path


def test_a_receipt_is_written_without_text(folder: Path) -> None:
    first, second, third = read(folder)
    assert verify(folder) == (3, [])
    assert second["cached_tokens"] > 300
    assert first["prompt"] == second["prompt"] != third["prompt"]
    assert first["spans"][0] == third["spans"][0], "the same tokens have the same digest"
    assert len({one["id"] for one in (first, second, third)}) == 3
    assert abs(first["time"] - time.time()) < 3600
    assert first["fingerprint"]
    assert first["precision"] == "exact"
    text = chain(folder).read_text()
    assert "light" not in text
    assert chain(folder).stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("place", ["id", '"n":2', "cached_tokens", "chain"])
def test_a_flipped_byte_is_found_by_line(folder: Path, place: str) -> None:
    lines = chain(folder).read_bytes().splitlines(keepends=True)
    at = lines[1].index(place.encode()) + len(place) + 3
    lines[1] = lines[1][:at] + bytes([lines[1][at] ^ 1]) + lines[1][at + 1 :]
    chain(folder).write_bytes(b"".join(lines))
    held, (fault,) = verify(folder)
    assert (held, fault.file, fault.line) == (1, chain(folder).name, 2)


def test_every_flipped_bit_of_a_line_is_found(folder: Path) -> None:
    whole = chain(folder).read_bytes()
    start = whole.index(b"\n") + 1
    for at in range(start, whole.index(b"\n", start), 7):
        chain(folder).write_bytes(whole[:at] + bytes([whole[at] ^ 2]) + whole[at + 1 :])
        assert verify(folder)[1], at


@pytest.mark.parametrize(
    ("change", "line", "why"),
    [
        (lambda lines: [lines[0], *lines[2:]], 2, "receipt 2 is missing: 3 stands here"),
        (lambda lines: [*lines[:2], *lines[1:]], 3, "receipt 2 stands here again"),
        (lambda lines: [lines[1], lines[0], *lines[2:]], 1, "receipt 1 is missing"),
        (lambda lines: lines[:-1], 3, "is not closed"),
        (lambda lines: [*lines[:2], lines[2][:50]], 3, "is no JSON"),
    ],
)
def test_a_line_that_is_missing_or_doubled_is_named(folder: Path, change: Callable[[Any], Any], line: int, why: str) -> None:
    chain(folder).write_bytes(b"".join(change(chain(folder).read_bytes().splitlines(keepends=True))))
    _, (fault,) = verify(folder)
    assert fault.line == line
    assert why in fault.why


def test_another_key_verifies_nothing(folder: Path) -> None:
    (folder / "key").write_bytes(bytes(32))
    held, (fault,) = verify(folder)
    assert (held, fault.line) == (0, 1)


def test_files_rotate_and_a_missing_one_is_named(tmp_path: Path) -> None:
    log = ReceiptLog(tmp_path, file_bytes=2000)
    for number in range(30):
        assert log.append(Receipt(id=str(number), spans=(Span("system", 0, 4),)), as_ids([1, 2, 3, 4]), "f", 0.0) == ""
    log.close()
    log.close()
    files = sorted(tmp_path.glob("*.jsonl"))
    assert len(files) > 5
    assert verify(tmp_path) == (30, [])
    assert [one["id"] for one in read(tmp_path)] == [str(number) for number in range(30)]
    files[2].unlink()
    _, (fault,) = verify(tmp_path)
    assert (fault.file, fault.why) == (files[3].name, "file 000003 of this chain is missing")


def test_threads_and_engines_share_a_folder(tmp_path: Path) -> None:
    def write(log: ReceiptLog) -> None:
        for number in range(100):
            log.append(Receipt(id=str(number)), as_ids([number]), "f", 0.0)

    logs = [ReceiptLog(tmp_path), ReceiptLog(tmp_path)]
    threads = [threading.Thread(target=write, args=(log,)) for log in logs * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for log in logs:
        log.close()
    assert verify(tmp_path) == (400, [])


def test_a_full_disk_fails_no_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Engine("embedded", store=None, receipts=tmp_path) as engine:
        ask = [{"role": "user", "content": "Hi"}]
        engine.generate(ask, sampling=Sampling(max_tokens=1))
        real = os.write
        monkeypatch.setattr(os, "write", lambda fd, content: real(fd, content[:20]))
        done = engine.generate(ask, sampling=Sampling(max_tokens=1))
        monkeypatch.undo()
        assert "its receipt is not in" in done.receipt.notes[-1]
        engine.generate(ask, sampling=Sampling(max_tokens=1))
    assert verify(tmp_path) == (2, []), "what was cut is taken back, and the chain goes on"


def test_a_disk_that_refuses_the_end_stops_no_closing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, failed = os.close, list[int]()

    def refuse(fd: int) -> None:  # as a network's disk does that has no room
        real(fd)
        failed.append(fd)
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    log = ReceiptLog(tmp_path, file_bytes=1)
    monkeypatch.setattr(os, "close", refuse)
    assert [log.append(Receipt(id=str(number)), as_ids([1]), "f", 0.0) for number in range(3)] == ["", "", ""]
    log.close()
    monkeypatch.undo()
    assert len(failed) >= 4
    assert verify(tmp_path) == (3, [])


def test_a_log_without_a_receipt_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, opened, real = ReceiptLog(tmp_path), list[int](), os.open
    monkeypatch.setattr(os, "open", lambda *given, **more: opened.append(real(*given, **more)) or opened[-1])
    monkeypatch.setattr(os, "write", lambda fd, content: 0)
    assert "its receipt is not in" in log.append(Receipt(id="0"), as_ids([1]), "f", 0.0)
    monkeypatch.undo()
    log.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(opened[-1])
    assert verify(tmp_path) == (0, [])


def test_receipts_stay_in_their_folder_wherever_the_process_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    log = ReceiptLog("r")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert log.append(Receipt(id="0"), as_ids([1]), "f", 0.0) == ""
    log.close()
    assert verify(tmp_path / "r") == (1, [])


def test_a_deleted_file_takes_no_more_receipts(tmp_path: Path) -> None:
    log = ReceiptLog(tmp_path / "r")
    assert log.append(Receipt(id="0"), as_ids([1]), "f", 0.0) == ""
    chain(tmp_path / "r").unlink()
    assert log.append(Receipt(id="1"), as_ids([1]), "f", 0.0) == ""
    assert [one["id"] for one in read(tmp_path / "r")] == ["1"]
    assert [fault.why for fault in verify(tmp_path / "r")[1]] == ["file 000001 of this chain is missing"]
    (tmp_path / "r").rename(tmp_path / "moved")  # where it is read on
    assert log.append(Receipt(id="2"), as_ids([1]), "f", 0.0) == ""
    for path in (tmp_path / "moved").iterdir():
        path.unlink()
    assert "No such file" in log.append(Receipt(id="3"), as_ids([1]), "f", 0.0)
    log.close()


def test_a_lost_key_is_told_and_not_made_anew(folder: Path) -> None:
    for damage in (lambda key: key.write_bytes(b"short"), Path.unlink):
        damage(folder / "key")
        for use in (ReceiptLog, verify):
            with pytest.raises(StoreCorruptError, match="no receipt here can be verified; put it back"):
                use(folder)
    assert len(list(read(folder))) == 3


def test_a_folder_that_cannot_be_says_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for place in ("file", "file/x", "a\0b"):
        with pytest.raises(ConfigError, match="name a folder of your own"):
            Engine("embedded", store=None, receipts=tmp_path / place)


def test_what_is_no_receipt_is_named(folder: Path) -> None:
    other = folder / "x.000001.jsonl"
    other.write_text('{"n":1,"id":"odd"}\n')
    with pytest.raises(StoreCorruptError, match="receipt 'odd' was changed, see"):
        totals(read(folder), "model")
    other.write_text("[" * 100_000)
    with pytest.raises(StoreCorruptError, match="is no receipt"):
        list(read(folder))
    assert "is no JSON" in verify(folder)[1][0].why + verify(folder)[1][-1].why
    other.unlink()
    other.mkdir()
    for look in (verify, lambda place: list(read(place))):
        with pytest.raises(StoreCorruptError, match="cannot be read: Is a directory"):
            look(folder)


@pytest.mark.parametrize("ended", [False, True])
def test_a_next_file_that_fails_closes_no_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended: bool) -> None:
    log, real, opened = ReceiptLog(tmp_path, file_bytes=1), os.open, list[int]()

    def full(path: Any, *given: Any) -> int:
        if ".000002." in str(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(path, *given)

    assert log.append(Receipt(id="0"), as_ids([1]), "f", 0.0) == ""
    monkeypatch.setattr(os, "open", full)
    assert "is not in" in log.append(Receipt(id="1"), as_ids([1]), "f", 0.0)
    opened += [os.dup(0) for _ in range(3)]  # another thread's, in the meantime
    monkeypatch.undo()
    if not ended:
        assert log.append(Receipt(id="2"), as_ids([1]), "f", 0.0) == ""
    log.close()
    for fd in opened:
        os.close(fd)  # OSError: it was closed already
    assert verify(tmp_path) == (1 if ended else 2, [])


def test_a_chain_that_cannot_end_leaves_no_file_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = ReceiptLog(tmp_path)
    log.append(Receipt(id="0"), as_ids([1]), "f", 0.0)
    real, files = os.write, list[int]()
    monkeypatch.setattr(os, "write", lambda fd, content: files.append(fd) or real(fd, content[:20]))
    log.close()
    monkeypatch.undo()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(files[0])
    held, (fault,) = verify(tmp_path)
    assert (held, "not closed" in fault.why) == (1, True)


def test_cancelled_and_refused_requests_leave_receipts(tmp_path: Path) -> None:
    ask = [{"role": "user", "content": "Count."}]
    endless = Sampling(max_tokens=4000, ignore_eos=True)
    with Engine("embedded", store=None, receipts=tmp_path) as engine, engine.stream(ask, sampling=endless) as stream:
        next(iter(stream))
    (one,) = read(tmp_path)
    assert one["finish_reason"] != "stop"
    assert one["completion_tokens"] < 4000


def test_sums_share_out_what_reuse_saved(folder: Path) -> None:
    receipts = list(read(folder))
    saved = sum(one["saved_ms"] for one in receipts)
    for by in ("namespace", "model", "adapter", "group", "role"):
        found = totals(iter(receipts), by)
        assert sum(one["cached_tokens"] for one in found.values()) == pytest.approx(sum(one["cached_tokens"] for one in receipts), abs=3)
        assert sum(one["saved_ms"] for one in found.values()) == pytest.approx(saved, rel=0.02)
    assert {"system", "tools", "turn"} <= totals(iter(receipts), "role").keys()
    with pytest.raises(ConfigError, match="by='tool'"):
        totals(iter(receipts), "tool")


def test_commands_verify_show_and_sum(folder: Path) -> None:
    run = CliRunner()
    done = run.invoke(app, ["receipts", "verify", str(folder)])
    assert (done.exit_code, done.output) == (0, "3 receipts: all hold\n")
    shown = [json.loads(line) for line in run.invoke(app, ["receipts", "show", str(folder)]).output.splitlines()]
    assert [one["n"] for one in shown] == [1, 2, 3]
    assert "system" in run.invoke(app, ["receipts", "sum", str(folder), "--by", "role"]).output
    assert json.loads(run.invoke(app, ["receipts", "sum", str(folder), "--json"]).output)["totals"]["default"]["requests"] == 3
    chain(folder).write_bytes(chain(folder).read_bytes().replace(b'"n":2', b'"n":9'))
    done = run.invoke(app, ["receipts", "verify", str(folder), "--json"])
    assert done.exit_code == 1
    assert json.loads(done.output)["faults"][0]["line"] == 2
    for verb in ("verify", "show", "sum"):
        refused = run.invoke(app, ["receipts", verb, str(folder / "nothing")])
        assert refused.exit_code == 1, verb
        assert "holds no receipts" in refused.output
