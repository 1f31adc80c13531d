"""Tokens that name one process among all that ever ran here, and tell whether it still runs. Knows nothing of stores.

token = pid . start . identity          identity: of the boot and the pid namespace in which that pid means something
"""

from __future__ import annotations

import functools
import os
import platform
import re
import sys
import time
from pathlib import Path

import psutil
from blake3 import blake3

FOREIGN_S = 24 * 3600.0  # what another boot or container left counts as in use for so long: nothing here can ask whether it runs
TOKEN = re.compile(r"(?a:([1-9]\d{0,9})\.(\d{1,19})\.([0-9a-f]{12}))")  # also part of file names


def _digest(text: str) -> str:
    return blake3(text.encode("utf-8", "surrogateescape")).hexdigest(length=6)


@functools.lru_cache(maxsize=2)
def _identity(pid: int) -> str:
    """Digest of the pid namespace and boot in which process `pid`, the asking one, runs."""
    if sys.platform != "linux":  # start times are points in time there, so they tell boots apart as well
        return _digest(f"{platform.system()} {platform.node()}")
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return _digest(f"{boot} {os.readlink('/proc/self/ns/pid')}")


def _start(pid: int) -> int | None:
    """When a process started, on a clock that cannot be set; None if it does not run (a zombie does not)."""
    if sys.platform == "linux":  # psutil adds the wall clock's idea of the boot, which moves when the clock is set
        try:
            fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            return None
        return None if fields[0] in (b"Z", b"X") else int(fields[19])
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else int(process.create_time() * 1000)
    except psutil.NoSuchProcess:
        return None


@functools.lru_cache(maxsize=2)
def _token(pid: int) -> str:
    return f"{pid}.{_start(pid) or 0}.{_identity(pid)}"


def token() -> str:
    """The token of this process; a forked child has its own."""
    return _token(os.getpid())


def alive(token: object, since: object = None) -> bool:
    """Tell whether the process of this token runs. A text that is no token is dead, and so is a foreign token without a time.

    since: time of its trace (time.time()). A process of another boot or container counts as running for a day after that;
    without `since`, always.
    """
    own = _token(os.getpid())
    if token == own:
        return True
    if not isinstance(token, str) or (parts := TOKEN.fullmatch(token)) is None:
        return False
    pid, start, identity = int(parts[1]), int(parts[2]), parts[3]
    if identity != _identity(os.getpid()):
        return since is None or (isinstance(since, (int, float)) and abs(time.time() - since) < FOREIGN_S)
    return _start(pid) == start


@functools.cache
def machine() -> str:
    """A name for what decides how fast this computer computes; equal computers share it."""
    model, cores = platform.processor(), os.cpu_count()
    if sys.platform == "linux":
        found = re.search(r"(?m)^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text())
        model, cores = found[1] if found else model, len(os.sched_getaffinity(0))
    return _digest(f"{platform.machine()} {model} {cores}")
