"""Forgetting among processes that are killed: whatever is forgotten is served to nobody, and none of its bytes is in the folder."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentcache.store.disk.folder import Folder
from agentcache.store.disk.index import Index
from tests.engines import long_text
from tests.processes import Child
from tests.store.forgetting_worker import obey

WORKERS = 3
RUN = 8  # ids in a row that tell a prompt from others


class Worker(Child):
    """A process with an engine on the store, which answers each thing that it is told."""

    def __init__(self, model: Path, store: Path) -> None:
        super().__init__(obey, model, store)
        self.hear()

    def tell(self, what: str, **told: Any) -> None:
        self.pipe.send({"do": what, **told})

    def __call__(self, what: str, **told: Any) -> Any:
        self.tell(what, **told)
        return self.hear()


class History:
    """One namespace with a session, asked, forked and forgotten by any worker; its prompts stand in no other."""

    def __init__(self, number: int, workers: list[Worker], chance: random.Random) -> None:
        self.number, self.workers, self.chance = number, workers, chance
        self.namespace, self.word = f"history {number}", f"zqxj{number:04d}quoho"
        self.said: list[dict[str, str]] = [{"role": "system", "content": f"{self.word} {long_text(20, number)}"}]
        self.ids: list[int] = []

    @property
    def worker(self) -> Worker:
        return self.chance.choice(self.workers)

    def turn(self, session: str) -> None:
        self.said.append({"role": "user", "content": f"{self.word} {long_text(self.chance.choice((3, 40)), self.chance.randrange(999))}"})
        found = self.worker("ask", messages=self.said, namespace=self.namespace, session=session)
        self.said.append({"role": "assistant", "content": found["text"]})
        self.ids = found["ids"]

    def grow(self) -> None:
        for _ in range(self.chance.randrange(1, 4)):
            self.turn("alice")
            if self.chance.random() < 0.4:
                self.worker("flush")

    def forgotten(self) -> dict[str, Any]:
        """What is forgotten: the session, the namespace, or all of it that is old."""
        return {**self.chance.choice(({"session": "alice"}, {}, {"older_than": 0})), "namespace": self.namespace}


def bytes_of(ids: list[int], step: int = 1) -> list[bytes]:
    """Runs of ids as they would lie in a file."""
    packed = np.asarray(ids, dtype="<u4")
    return [packed[at : at + RUN].tobytes() for at in range(0, len(packed) - RUN, step)]


def found_bytes(store: Path, history: History, others: set[bytes]) -> list[str]:
    """Files of the folder that hold something of a history: its ids, in runs that no other prompt has, or its text."""
    own = [run for run in bytes_of(history.ids, RUN) if run not in others]
    assert own
    found = []
    for file in (one for one in store.rglob("*") if one.is_file()):
        whole = file.read_bytes()
        if history.word.encode() in whole or any(run in whole for run in own):
            found.append(file.name)
    return found


def play(store: Path, model: Path, count: int, seed: int) -> tuple[int, int, int]:
    """Play histories; kills, tokens that were served after they were forgotten, and files with bytes of them."""
    chance = random.Random(seed)
    workers = [Worker(model, store) for _ in range(WORKERS)]
    kills = served = left = 0
    others: set[bytes] = set()
    try:
        keeper = History(9999, workers, chance)  # is never forgotten
        keeper.turn("alice")
        others.update(bytes_of(keeper.ids))
        for number in range(count):
            history = History(number, workers, chance)
            history.grow()
            what, at = history.forgotten(), chance.randrange(WORKERS)
            if "session" in what:  # its name follows its pages to disk, after the answers
                for worker in workers:
                    worker("flush")
            if chance.random() < 0.3:  # one that may be writing, or be the one that forgets
                victim = chance.randrange(WORKERS)
                workers[at].tell("forget", **what)
                time.sleep(chance.uniform(0.0, 0.03))
                workers[victim].kill()
                kills += 1
                if victim != at:
                    workers[at].hear()
                workers[victim] = Worker(model, store)
                if victim == at:  # nobody was told that it is done: it is asked for again
                    workers[at]("forget", **what)
            else:
                workers[at]("forget", **what)
            if chance.random() < 0.5:
                for worker in workers:
                    worker("flush")
            files = found_bytes(store, history, others)
            left += len(files)
            for worker in workers:
                found = worker("ask", messages=history.said[:-1], namespace=history.namespace, reuse="lossy")
                served += found["cached"]
                if found["cached"] or files:
                    print(number, what, kills, found["cached"], files)
                    files = []
                worker("forget", namespace=history.namespace)
        assert workers[0]("ask", messages=keeper.said[:-1], namespace=keeper.namespace)["cached"] > 0, "others' pages stay"
    finally:
        for worker in workers:
            worker.kill()
    with Index(Folder.open(store)) as index:
        assert index.check() == []
    return kills, served, left


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no SIGKILL on this system")
@pytest.mark.parametrize("count", [8, pytest.param(300, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])])
def test_no_byte_of_forgotten_histories_is_served_or_found(tmp_path: Path, model_folder: Path, count: int) -> None:
    kills, served, left = play(tmp_path / "store", model_folder, count, seed=count)
    print(f"{count} histories, {kills} kills: {served} tokens served, {left} files with bytes of them")
    assert kills
    assert (served, left) == (0, 0)
