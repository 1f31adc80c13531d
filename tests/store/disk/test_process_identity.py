"""Tokens of processes: who runs, and who did."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from agentcache.store.disk import process_identity
from tests.store.index_rows import forks, run_in_forks


def sleeper() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])


def test_a_token_lives_as_long_as_its_process() -> None:
    own = process_identity.token()
    assert process_identity.TOKEN.fullmatch(own)
    assert process_identity.alive(own)
    assert own == process_identity.token()
    child = sleeper()
    try:
        token = f"{child.pid}.{process_identity._start(child.pid)}.{own.rpartition('.')[2]}"
        assert process_identity.alive(token)
        child.send_signal(signal.SIGKILL)
        for _ in range(200):  # dead, but nobody has waited for it yet: a zombie
            if not process_identity.alive(token):
                break
            time.sleep(0.02)
        assert child.returncode is None
        assert not process_identity.alive(token)
    finally:
        child.kill()
        child.wait()
    assert not process_identity.alive(token)


def test_a_reused_pid_is_another_process() -> None:
    pid, start, identity = process_identity.token().split(".")
    assert not process_identity.alive(f"{pid}.{int(start) + 1}.{identity}")
    parent = process_identity._start(os.getppid())  # may have started in the same tick as this process
    assert parent is not None
    assert not process_identity.alive(f"{os.getppid()}.{int(parent) + 1}.{identity}")


@pytest.mark.parametrize("text", ["", "x", "1.2", "0.5.0123456789ab", "1.2.0123456789aB", "../../etc/passwd", "1.2.0123456789ab\n"])
def test_what_is_no_token_is_dead(text: str) -> None:
    assert not process_identity.alive(text)


def test_another_boot_or_container_counts_for_a_day() -> None:
    foreign = "1.2.0123456789ab"
    assert process_identity.alive(foreign)
    assert process_identity.alive(foreign, time.time() - 3600)
    assert process_identity.alive(foreign, time.time() + 3600)
    assert not process_identity.alive(foreign, time.time() - 25 * 3600)
    assert not process_identity.alive(foreign, time.time() + 25 * 3600)


@forks
def test_a_fork_has_a_token_of_its_own(tmp_path: Path) -> None:
    own = process_identity.token()

    def child() -> None:
        assert process_identity.alive(own)
        (tmp_path / "token").write_text(process_identity.token())

    run_in_forks(child)
    said = (tmp_path / "token").read_text()
    assert said != own
    assert not process_identity.alive(said)


def test_the_machine_has_one_name() -> None:
    said = subprocess.run(
        [sys.executable, "-c", "from agentcache.store.disk import process_identity; print(process_identity.machine())"],
        capture_output=True,
        check=True,
    )
    assert said.stdout.decode().strip() == process_identity.machine()
