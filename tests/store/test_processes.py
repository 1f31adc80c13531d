"""Whole engines in processes of their own on one store: they share it, wait for one another, evict pages, and never answer wrongly."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from agentcache import Engine
from agentcache.store.admin import check
from agentcache.store.disk.folder import Folder
from agentcache.types import StoreOptions
from tests.checkout import ROOT
from tests.engines import MB, chat, decode, long_text


def start(what: str, *given: object) -> subprocess.Popen[str]:
    """A process that runs one of this file's functions; it prints one line of JSON."""
    program = f"from tests.store import test_processes as own; own.{what}(*{json.dumps([str(one) for one in given])})"
    return subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def end(process: subprocess.Popen[str], seconds: float) -> dict[str, Any]:
    """What it printed."""
    out, said = process.communicate(timeout=seconds)
    assert process.returncode == 0, said[-3000:]
    found: dict[str, Any] = json.loads(out.strip().splitlines()[-1])
    return found


def wait_for(paths: list[Path], processes: list[subprocess.Popen[str]]) -> None:
    while not all(path.exists() for path in paths):
        assert all(process.poll() is None for process in processes), [process.stderr.read() for process in processes if process.stderr]
        time.sleep(0.01)


# -- two start together ------------------------------------------------------------------------------------------------

PREFIX = chat("What was the wind?", system=long_text(400))


def compute_once(model: str, store: str, ready: str, go: str) -> None:
    """In a process of its own: ask for a long prefix when told."""
    with Engine(model, store=StoreOptions(store, check_one_in=0), memory_bytes=64 * MB, chunk_tokens=16) as running:
        running.generate(chat("Warming up."), sampling=decode(2), reuse="off")
        running.scheduler.ms_per_token = 30.0  # as if it took a minute: waiting is worth it however busy this machine is
        Path(ready).touch()
        while not Path(go).exists():
            time.sleep(0.002)
        done = running.generate(PREFIX, sampling=decode(4))
        print(json.dumps({"ids": done.ids, "computed": done.receipt.computed_tokens, "disk": done.receipt.disk_tokens}))


def test_of_two_that_start_together_one_computes(model_folder: Path, tmp_path: Path) -> None:
    ready, go = [tmp_path / "ready-0", tmp_path / "ready-1"], tmp_path / "go"
    processes = [start("compute_once", model_folder, tmp_path / "store", path, go) for path in ready]
    wait_for(ready, processes)
    go.touch()
    first, second = sorted((end(process, 120) for process in processes), key=lambda found: int(found["computed"]))
    assert first["ids"] == second["ids"]
    assert second["computed"] > 1500, "one of them computes it"
    assert first["computed"] < 600, "and the other one does not, but for what was no whole page yet"
    assert first["disk"] > 1000


# -- many, for a while -------------------------------------------------------------------------------------------------

PROMPTS = [chat(f"Ship {number}?", system=long_text(150 + 60 * (number % 4), number // 2)) for number in range(16)]


def play(model: str, store: str, seed: str, seconds: str, expected: str, go: str) -> None:
    """In a process of its own: ask in another order than the others, with a memory for few pages and a disk that is too small."""
    right = json.loads(Path(expected).read_text())
    asked = wrong = disk_tokens = 0
    options = StoreOptions(store, disk_bytes=2 * MB, check_one_in=4)
    with Engine(model, store=options, memory_bytes=1 * MB, chunk_tokens=128) as running:
        Path(go + seed).touch()
        while not Path(go).exists():
            time.sleep(0.002)
        until = time.monotonic() + float(seconds)
        while time.monotonic() < until or asked < 2 * len(PROMPTS):
            number = (int(seed) * 5 + asked * (1 + 2 * (int(seed) % 3))) % len(PROMPTS)
            done = running.generate(PROMPTS[number], sampling=decode(3))
            asked, wrong, disk_tokens = asked + 1, wrong + (list(done.ids) != right[number]), disk_tokens + done.receipt.disk_tokens
            if asked % 7 == 0:
                running.store.clear()  # so that the next ones ask the disk
    print(json.dumps({"asked": asked, "wrong": wrong, "disk_tokens": disk_tokens}))


@pytest.mark.parametrize(("count", "seconds"), [(2, 2), pytest.param(8, 60, marks=pytest.mark.slow)])
def test_many_processes_admit_evict_and_match(model_folder: Path, tmp_path: Path, count: int, seconds: int) -> None:
    expected, go, store = tmp_path / "expected", tmp_path / "go", tmp_path / "store"
    with Engine(str(model_folder), store=None, reuse="off") as running:
        expected.write_text(json.dumps([list(running.generate(prompt, sampling=decode(3)).ids) for prompt in PROMPTS]))
    processes = [start("play", model_folder, store, number, seconds, expected, go) for number in range(count)]
    wait_for([Path(f"{go}{number}") for number in range(count)], processes)
    go.touch()
    found = [end(process, seconds + 200) for process in processes]
    assert all(each["wrong"] == 0 and each["asked"] > 0 for each in found), found
    assert sum(each["disk_tokens"] for each in found) > 0
    folder = Folder.open(store)
    report = check.verify(folder)
    assert not report.problems, report.problems
    with Engine(str(model_folder), store=str(store)) as running:
        assert running.store.disk is not None
        stats = running.store.disk.index.stats()
        assert running.model.spec is not None
        page = running.model.spec.page_bytes + 65536
    assert stats["pins"] == stats["leases"] == 0
    assert 0 < stats["bytes"] <= 2 * MB + count * page, "each may have found room for one page at the same time"
