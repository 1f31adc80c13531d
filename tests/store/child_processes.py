"""Processes of their own that run the functions of this module: whole engines on one store. Holds no tests."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from agentcache import Engine
from agentcache.types import StoreOptions
from tests.checkout import ROOT
from tests.engines import MB, chat, decode, long_text

PREFIX = chat("What was the wind?", system=long_text(400))
PROMPTS = [chat(f"Ship {number}?", system=long_text(150 + 60 * (number % 4), number // 2)) for number in range(16)]


def start_process(what: str, *given: object) -> subprocess.Popen[str]:
    """A process that runs one of this file's functions; it prints one line of JSON."""
    program = f"from tests.store import child_processes as own; own.{what}(*{json.dumps([str(one) for one in given])})"
    return subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def end_process(process: subprocess.Popen[str], seconds: float) -> dict[str, Any]:
    """The object that it printed."""
    out, said = process.communicate(timeout=seconds)
    assert process.returncode == 0, said[-3000:]
    found: dict[str, Any] = json.loads(out.strip().splitlines()[-1])
    return found


def wait_for_files(paths: list[Path], processes: list[subprocess.Popen[str]]) -> None:
    while not all(path.exists() for path in paths):
        assert all(process.poll() is None for process in processes), [process.stderr.read() for process in processes if process.stderr]
        time.sleep(0.01)


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


def ask_for_a_while(model: str, store: str, seed: str, seconds: str, expected: str, go: str) -> None:
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


def answer_in_session(store: str, talk: str, turns: str) -> None:
    """In a process of its own: go on with the session "alice" of the embedded model, so many turns; 0: until it is killed."""
    said = json.loads(Path(talk).read_text())
    with Engine("embedded", store=StoreOptions(store, check_one_in=0)) as running:
        session = running.session("alice")
        for number in itertools.count(1):
            own, off = list[torch.Tensor](), list[torch.Tensor]()
            done = session.generate(said, sampling=decode(8), on_logits=own.append)
            known = {name: getattr(done.receipt, name) for name in ("resumed", "prompt_tokens", "cached_tokens", "disk_tokens", "bitwise")}
            if number == int(turns):
                running.generate(said, sampling=decode(8), reuse="off", on_logits=off.append)
            said += [asdict(done.message), {"role": "user", "content": f"And at noon of day {number}?"}]
            Path(talk).write_text(json.dumps(said))
            running.flush()
            same = len(own) == len(off) and all(map(torch.equal, own, off))
            print(json.dumps({**known, "tokens": session.tokens, "same": same}), flush=True)
            if number == int(turns):
                return
