"""Processes of tests, forked from a server that has imported PyTorch and transformers: importing takes longer than what most of them do.

The server is a process of its own, in which nothing of ours is imported and nothing was computed: variables of the environment that limit
instructions take effect in its children. What is proven about starts, ends and teams of threads needs fresh processes.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout, suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest import mock

from tests import compiled

SERVER = multiprocessing.get_context("forkserver")
IMPORTED = ["transformers.models.qwen3.modeling_qwen3", "transformers.models.auto.tokenization_auto", "llvmlite.binding"]
SERVER.set_forkserver_preload(IMPORTED)


class Child:
    """A process that runs a function of a module, whose first argument is its end of a pipe."""

    def __init__(self, function: Callable[..., None], *given: object) -> None:
        self.pipe, pipe = SERVER.Pipe()
        self.process: BaseProcess = SERVER.Process(target=_begin, args=(function, compiled.shared, pipe, *given))
        # The server starts with the first one. Python reads the first of these as it starts; a test may have set the other.
        with mock.patch.dict(os.environ, PYTHONWARNDEFAULTENCODING="1", AGENTCACHE_DIR=""):
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


def program(source: str, *arguments: object, **environment: str) -> tuple[str, str]:
    """Run a program with these arguments and variables, in a process that has imported none of our modules; what it printed and warned."""
    child = Child(_run, source, list(map(str, arguments)), environment)
    printed, warned = child.hear()
    child.process.join(260.0)
    assert child.process.exitcode == 0, warned
    return printed, warned


def _begin(function: Callable[..., None], shared: Path | None, *given: object) -> None:
    if function is not _run:  # a program imports what it likes
        compiled.share(shared)
    function(*given)


def _run(parent: Connection, source: str, arguments: list[str], environment: dict[str, str]) -> None:
    os.environ.update(environment)
    sys.argv[1:] = arguments
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as warned:
        try:
            exec(compile(source, "<program>", "exec"), {"__name__": "__main__"})
        except BaseException:
            traceback.print_exc()
            raise
        finally:
            parent.send((out.getvalue(), warned.getvalue()))
