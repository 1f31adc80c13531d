"""Functions for processes of their own: whole engines on one store. Holds no tests."""

from __future__ import annotations

import itertools
import json
import time
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from agentcache import Engine
from agentcache.types import StoreOptions
from tests.engines import MB, chat, decode, long_text
from tests.processes import Child

PREFIX = chat("What was the wind?", system=long_text(400))
PROMPTS = [chat(f"Ship {number}?", system=long_text(150 + 60 * (number % 4), number // 2)) for number in range(16)]


def wait_for_files(paths: list[Path], children: list[Child]) -> None:
    while not all(path.exists() for path in paths):
        assert all(child.process.is_alive() for child in children)
        time.sleep(0.01)


def compute_once(parent: Connection, model: Path, store: Path, ready: Path, go: Path) -> None:
    """In a process of its own: ask for a long prefix when told."""
    with Engine(str(model), store=StoreOptions(store, check_one_in=0), memory_bytes=64 * MB, chunk_tokens=16) as running:
        running.generate(chat("Warming up."), sampling=decode(2), reuse="off")
        running.scheduler.ms_per_token = 30.0  # as if it took a minute: waiting is worth it however busy this machine is
        ready.touch()
        while not go.exists():
            time.sleep(0.002)
        done = running.generate(PREFIX, sampling=decode(4))
        parent.send({"ids": done.ids, "computed": done.receipt.computed_tokens, "disk": done.receipt.disk_tokens})


def ask_for_a_while(parent: Connection, model: Path, store: Path, seed: int, seconds: int, right: list[list[int]], go: Path) -> None:
    """In a process of its own: ask in another order than the others, with a memory for few pages and a disk that is too small."""
    asked = wrong = disk_tokens = 0
    options = StoreOptions(store, disk_bytes=2 * MB, check_one_in=4)
    with Engine(str(model), store=options, memory_bytes=1 * MB, chunk_tokens=128) as running:
        Path(f"{go}{seed}").touch()
        while not go.exists():
            time.sleep(0.002)
        until = time.monotonic() + seconds
        while time.monotonic() < until or asked < 2 * len(PROMPTS):
            number = (seed * 5 + asked * (1 + 2 * (seed % 3))) % len(PROMPTS)
            done = running.generate(PROMPTS[number], sampling=decode(3))
            asked, wrong, disk_tokens = asked + 1, wrong + (list(done.ids) != right[number]), disk_tokens + done.receipt.disk_tokens
            if asked % 7 == 0:
                running.store.clear()  # so that the next ones ask the disk
    parent.send({"asked": asked, "wrong": wrong, "disk_tokens": disk_tokens})


def answer_in_session(parent: Connection, store: Path, talk: Path, turns: int) -> None:
    """Go on with the session "alice" of the embedded model, so many turns; 0: until it is killed."""
    said = json.loads(talk.read_text())
    with Engine("embedded", store=StoreOptions(store, check_one_in=0, refuse_slow=False)) as running:
        session = running.session("alice")
        for number in itertools.count(1):
            own, off = list[torch.Tensor](), list[torch.Tensor]()
            done = session.generate(said, sampling=decode(8), on_logits=own.append)
            known = {name: getattr(done.receipt, name) for name in ("resumed", "prompt_tokens", "cached_tokens", "disk_tokens", "bitwise")}
            if number == turns:
                running.generate(said, sampling=decode(8), reuse="off", on_logits=off.append)
            said += [asdict(done.message), {"role": "user", "content": f"And at noon of day {number}?"}]
            talk.write_text(json.dumps(said))
            running.flush()
            same = len(own) == len(off) and all(map(torch.equal, own, off))
            parent.send({**known, "tokens": session.tokens, "same": same})
            if number == turns:
                return
