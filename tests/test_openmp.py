"""Teams of OpenMP threads: who has one, and that they end. More threads than cores would make each product wait for its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from agentcache import openmp
from tests.checkout import ROOT
from tests.engines import wait_until
from tests.processes import Child

TASKS = Path("/proc/self/task")
PROGRAM = """
import os, threading
from agentcache import openmp
from agentcache.types import Sampling
from tests.engines import engine, wait_until
from tests.test_openmp import compute, tasks

def foreign():
    return tasks() - threading.active_count()

def ask(running):
    running.generate([{"role": "user", "content": "Hello"}], sampling=Sampling(max_tokens=1))

openmp.use_threads(2)
with engine() as running:
    ask(running)
openmp.release_team()
before = foreign()
with engine() as running:
    compute()
    ask(running)
    assert wait_until(lambda: foreign() <= before), (foreign(), before)
print("done")
"""
pytestmark = pytest.mark.skipif(openmp.runtime() is None or not TASKS.exists(), reason="needs GNU's OpenMP and Linux")


@pytest.fixture(autouse=True)
def two_threads(threads: Callable[[int], None]) -> None:
    threads(2)


def tasks() -> int:
    return len(os.listdir(TASKS))


def compute() -> int:
    """A product of two threads; returns how many this process has then."""
    torch.ones(512, 512) @ torch.ones(512, 512)
    return tasks()


def teams(parent: Connection) -> None:
    """In a process of its own, as threads of other tests end when they like: threads that a team adds, after each step."""
    torch.set_num_threads(2)
    with ThreadPoolExecutor(1) as pool:
        alone = pool.submit(tasks).result()
        parent.send(pool.submit(compute).result() - alone)
        pool.submit(openmp.release_team).result()
        parent.send(wait_until(lambda: tasks() == alone))
        parent.send(pool.submit(compute).result() - alone)
        pool.submit(openmp.release_team).result()
    with ThreadPoolExecutor(1, initializer=openmp.use_one_thread) as pool:
        parent.send(pool.submit(compute).result() - pool.submit(tasks).result())
        parent.send((pool.submit(torch.get_num_threads).result(), torch.get_num_threads()))


def test_a_released_team_is_gone_and_comes_again() -> None:
    child = Child(teams)
    assert [child.hear() for _ in range(3)] == [1, True, 1]
    assert child.hear() == 0, "a thread that computes alone has none"
    assert child.end() == (1, 2), "others compute with as many as before"


def test_callers_and_an_idle_device_have_none() -> None:
    """In a process of its own: threads of other tests end when they like."""
    ran = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert (ran.returncode, ran.stdout) == (0, "done\n"), ran.stderr


def test_a_thread_that_forked_releases_none() -> None:
    compute()
    child = os.fork()
    if child == 0:  # waiting for threads that did not come along would never end
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(20)
        openmp.release_team()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
