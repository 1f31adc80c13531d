"""Warnings that name the line of a caller's program, through the frames of a framework, this package's and a thread. Knows no framework."""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Collection, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import FrameType
from typing import Any

OWN = frozenset("agentcache asyncio concurrent contextlib contextvars functools nest_asyncio threading typing weakref".split())

_caller: ContextVar[dict[str, Any] | None] = ContextVar("agentcache_caller", default=None)


class CallerWarnings:
    """Warnings of one category. Safe to use from many threads, and in a forked child.

    between: packages whose frames lie between a program's line and a warning about it; this one and asyncio are among them.
    """

    def __init__(self, between: Collection[str], category: type[Warning] = UserWarning) -> None:
        self._between = OWN | frozenset(between)
        self._category = category
        self._said: dict[Hashable, object] = {}

    def warn(self, text: str) -> None:
        """Warn at the caller's line."""
        place = self._place() or _caller.get() or self._place(of_task=False)
        if place is None:
            warnings.warn(text, self._category, stacklevel=2)
        else:
            warnings.warn_explicit(text, self._category, **place)

    def warn_once(self, cause: Hashable, text: str) -> None:
        """Warn, where this is the first of its cause."""
        first = object()
        if self._said.setdefault(cause, first) is first:  # no lock, which a forked child might find held
            self.warn(text)

    @contextmanager
    def from_here(self) -> Iterator[None]:
        """Warnings of tasks and threads that begin in this block name this caller's line."""
        token = _caller.set(self._place() or _caller.get())
        try:
            yield
        finally:
            _caller.reset(token)

    def _place(self, *, of_task: bool = True) -> dict[str, Any] | None:
        """The nearest frame of a program, as `warnings.warn_explicit` wants it; None in a thread that none of them began or waits for.

        of_task: the frames of this task alone; those that run its loop know nothing of who waits for it.
        """
        frame: FrameType | None = sys._getframe(1)
        pools: list[Any] = []
        while frame is not None:
            module = str(frame.f_globals.get("__name__") or "")
            package = module.partition(".")[0]
            if package == "asyncio" and of_task:
                return None
            if package not in self._between:
                registry = frame.f_globals.setdefault("__warningregistry__", {})
                return {"filename": frame.f_code.co_filename, "lineno": frame.f_lineno, "module": module, "registry": registry}
            frame = _of_pool(frame, pools) if module == "concurrent.futures.thread" and frame.f_code.co_name == "_worker" else frame.f_back
        return None


def _of_pool(worker: FrameType, passed: list[Any]) -> FrameType | None:
    """The frame of another thread that waits for what a worker does: it holds the pool, or the work among other work; None if none does.

    passed: pools whose frames were looked at already; adds this one.
    """
    reference = worker.f_locals.get("executor_reference")  # names in the standard library's own code
    pool = reference() if reference is not None else None
    if pool is None or pool in passed:
        return None
    passed.append(pool)
    work = getattr(worker.f_locals.get("work_item"), "future", None)
    for thread, running in sys._current_frames().items():
        frame: FrameType | None = running if thread != threading.get_ident() else None
        while frame is not None:
            held = list(frame.f_locals.values())
            waits = any(one is pool or (work is not None and isinstance(one, (set, dict)) and work in one) for one in held)
            if waits and frame.f_code is not worker.f_code:
                return frame
            frame = frame.f_back
    return None
