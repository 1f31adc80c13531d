"""Servers in processes of their own, for load. Asks them nothing but whether they are ready."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import IO

import httpx

from ..errors import ConfigError

START_S = 300.0


@dataclass(frozen=True)
class Served:
    """A running server."""

    url: str  # where it listens
    pid: int


def agentcache(model: str, store: str = "") -> AbstractContextManager[Served]:
    """Run `agentcache serve MODEL` until the block ends. store: a folder for its pages; none by default."""
    return _running([sys.executable, "-m", "agentcache", "serve", model], "/ready", {"AGENTCACHE_DIR": store})


def transformers(model: str, dtype: str) -> AbstractContextManager[Served]:
    """Run `transformers serve MODEL` until the block ends."""
    program = "from transformers.cli.transformers import main; main()"
    return _running([sys.executable, "-c", program, "serve", model, "--dtype", dtype, "--device", "cpu"], "/health", {})


@contextmanager
def _running(command: Sequence[str], ready: str, environment: dict[str, str]) -> Iterator[Served]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = [*command, "--host", "127.0.0.1", "--port", str(port)]
    with ExitStack() as stack:
        said = stack.enter_context(tempfile.TemporaryFile())
        process = stack.enter_context(subprocess.Popen(command, stdout=said, stderr=said, env={**os.environ, **environment}))
        stack.callback(process.terminate)
        _wait(process, url + ready, said)
        yield Served(url, process.pid)


def _wait(process: subprocess.Popen[bytes], url: str, said: IO[bytes]) -> None:
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        if process.poll() is not None:
            said.seek(0)
            raise ConfigError(f"{process.args!r} ended: {said.read().decode(errors='replace')[-1000:]}")
        with suppress(httpx.TransportError):
            if httpx.get(url, trust_env=False).status_code == 200:
                return
        time.sleep(0.1)
    raise ConfigError(f"{url!r} was not ready within {START_S:.0f} s")
