"""Processes of tests, forked from a server that has imported an engine once: importing takes longer than what most of them do.

The server is a process of its own, started before any model ran in it. What is proven about imports, starts and ends needs fresh ones.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.process import BaseProcess
from typing import Any

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["tests.engines", "agentcache.model.loading"])


class Child:
    """A process that runs a function of a module, whose first argument is its end of a pipe."""

    def __init__(self, function: Callable[..., None], *given: object) -> None:
        self.pipe, pipe = SERVER.Pipe()
        self.process: BaseProcess = SERVER.Process(target=function, args=(pipe, *given))
        self.process.start()
        pipe.close()

    def hear(self) -> Any:
        """Wait for its next object; EOFError where it ended without one."""
        assert self.pipe.poll(260.0), "it hangs"
        return self.pipe.recv()

    def end(self) -> Any:
        """Wait for one object and for the end."""
        found = self.hear()
        self.process.join(260.0)
        assert self.process.exitcode == 0
        return found

    def kill(self) -> list[Any]:
        """End it by SIGKILL; the objects that nobody has heard yet."""
        self.process.kill()
        self.process.join()
        rest: list[Any] = []
        with suppress(EOFError, ConnectionResetError), self.pipe:
            while True:
                rest.append(self.pipe.recv())
        return rest
