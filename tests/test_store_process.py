"""Tokens of processes: who runs, and who did."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from agentcache.store import process
from tests.rows import forks, run


def sleeper() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])


def test_a_token_lives_as_long_as_its_process() -> None:
    own = process.token()
    assert process.TOKEN.fullmatch(own)
    assert process.alive(own)
    assert own == process.token()
    child = sleeper()
    try:
        token = f"{child.pid}.{process._start(child.pid)}.{own.rpartition('.')[2]}"
        assert process.alive(token)
        child.send_signal(signal.SIGKILL)
        for _ in range(200):  # dead, but nobody has waited for it yet: a zombie
            if not process.alive(token):
                break
            time.sleep(0.02)
        assert child.returncode is None
        assert not process.alive(token)
    finally:
        child.kill()
        child.wait()
    assert not process.alive(token)


def test_a_reused_pid_is_another_process() -> None:
    pid, start, identity = process.token().split(".")
    assert not process.alive(f"{pid}.{int(start) + 1}.{identity}")
    parent = process._start(os.getppid())  # may have started in the same tick as this process
    assert parent is not None
    assert not process.alive(f"{os.getppid()}.{int(parent) + 1}.{identity}")


@pytest.mark.parametrize("text", ["", "x", "1.2", "0.5.0123456789ab", "1.2.0123456789aB", "../../etc/passwd", "1.2.0123456789ab\n"])
def test_what_is_no_token_is_dead(text: str) -> None:
    assert not process.alive(text)


def test_another_boot_or_container_counts_for_a_day() -> None:
    foreign = "1.2.0123456789ab"
    assert process.alive(foreign)
    assert process.alive(foreign, time.time() - 3600)
    assert process.alive(foreign, time.time() + 3600)
    assert not process.alive(foreign, time.time() - 25 * 3600)
    assert not process.alive(foreign, time.time() + 25 * 3600)


@forks
def test_a_fork_has_a_token_of_its_own(tmp_path: Path) -> None:
    own = process.token()

    def child() -> None:
        assert process.alive(own)
        (tmp_path / "token").write_text(process.token())

    run(child)
    said = (tmp_path / "token").read_text()
    assert said != own
    assert not process.alive(said)


def test_the_machine_has_one_name() -> None:
    said = subprocess.run(
        [sys.executable, "-c", "from agentcache.store import process; print(process.machine())"], capture_output=True, check=True
    )
    assert said.stdout.decode().strip() == process.machine()
