"""One rendering of a chat template, with an end: on a thread of its own, left and stopped when it takes too long. Knows no templates.

Templates are compiled to Python, so an exception from outside ends their loops between two instructions. A single instruction, as the
product of a text and a number, is not ended, only not waited for; what memory it takes is not bounded.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from contextlib import suppress

from ..errors import FAULTS, TemplateError

LIMIT_S = 10.0  # a thousand messages and three hundred tools take a tenth of it


class EndlessError(TemplateError):
    """A rendering took too long."""


class _Stop(BaseException):
    """Ends a rendering whose caller has left."""


class Rendering(threading.Thread):
    """render() on its own thread."""

    def __init__(self, render: Callable[[], object]) -> None:
        super().__init__(name="agentcache-template", daemon=True)
        self._render = render
        self._text: object = None
        self._error: BaseException | None = None

    def run(self) -> None:
        with suppress(_Stop):
            try:
                self._text = self._render()
            except FAULTS as error:
                self._error = error

    def text(self) -> str:
        """The rendered text, to be asked once. Raises the error of rendering, or EndlessError; leaving early, by Ctrl-C too, ends it."""
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
        return str(self._text)
