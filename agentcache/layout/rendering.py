"""Renderings of a chat template, with an end: on a thread of their own, left and stopped when they take too long. Knows no templates.

Templates are compiled to Python, so an exception from outside ends their loops between two instructions. A single instruction, as the
product of a text and a number, is not ended, only not waited for; what memory it takes is not bounded.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, TypeVar

from ..errors import FAULTS, TemplateError

Made = TypeVar("Made")

LIMIT_S = 10.0  # a thousand messages and three hundred tools take a tenth of it


class EndlessError(TemplateError):
    """A rendering took too long."""


class _Stop(BaseException):
    """Ends a rendering whose caller has left."""


def bounded(render: Callable[[], Made]) -> Made:
    """render(), on a thread of its own, or on this one where it is a rendering's already. Raises its error, or EndlessError."""
    return render() if isinstance(threading.current_thread(), Rendering) else Rendering(render).made()


class Rendering(threading.Thread, Generic[Made]):
    """render() on its own thread."""

    def __init__(self, render: Callable[[], Made]) -> None:
        super().__init__(name="agentcache-template", daemon=True)
        self._render = render
        self._made: list[Made] = []
        self._error: BaseException | None = None

    def run(self) -> None:
        with suppress(_Stop):
            try:
                self._made.append(self._render())
            except FAULTS as error:
                self._error = error

    def made(self) -> Made:
        """The result, to be asked once. Raises the error of rendering, or EndlessError; leaving early, by Ctrl-C too, ends it."""
        self.start()
        try:
            self.join(LIMIT_S)
            late = self.is_alive()
        finally:
            if self.is_alive() and self.ident is not None:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self.ident), ctypes.py_object(_Stop))
        if late:
            raise EndlessError(f"the chat template was not done after {LIMIT_S!r} s: shorten the messages, or pass another chat_template=")
        if self._error is not None:
            raise self._error
        return self._made[0]
