"""Warnings that name the line of the caller's program, through LangChain's frames, ours and a thread. Knows no settings."""

from __future__ import annotations

import asyncio
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")

# Packages whose frames lie between a program's line and a warning about it.
_BETWEEN = {"langchain_agentcache", "langchain_core", "langchain", "langchain_classic", "langgraph", "langsmith", "pydantic", "agentcache"}
_BETWEEN |= {"concurrent", "contextlib", "contextvars", "functools", "threading", "typing"}

_caller: ContextVar[dict[str, Any] | None] = ContextVar("agentcache_caller", default=None)
_said: set[tuple[str, str]] = set()


def _place(*, of_task: bool = True) -> dict[str, Any] | None:
    """Where the nearest frame of a program is, as `warnings.warn_explicit` wants it; None in a thread that none of them began.

    of_task: the frames of this task alone; those that run its loop know nothing of who waits for it.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = str(frame.f_globals.get("__name__") or "")
        package = module.partition(".")[0]
        if package == "asyncio" and of_task:
            return None
        if package not in _BETWEEN and package != "asyncio":
            registry = frame.f_globals.setdefault("__warningregistry__", {})
            return {"filename": frame.f_code.co_filename, "lineno": frame.f_lineno, "module": module, "registry": registry}
        frame = frame.f_back
    return None


@contextmanager
def from_here() -> Iterator[None]:
    """Warnings of tasks and threads that begin in this block name this caller's line."""
    token = _caller.set(_place() or _caller.get())
    try:
        yield
    finally:
        _caller.reset(token)


def tell(text: str) -> None:
    """Warn of something at the caller's line."""
    place = _place() or _caller.get() or _place(of_task=False)
    if place is None:
        warnings.warn(text, stacklevel=2)
    else:
        warnings.warn_explicit(text, UserWarning, **place)


def tell_once(kind: str, name: str, text: str) -> None:
    """Warn, the first time in this process that something of this kind and name is to be told."""
    if (kind, name) not in _said:
        _said.add((kind, name))
        tell(f"{text} (said once)")


async def in_thread(call: Callable[..., T], *args: Any) -> T:
    """The result of a call in another thread."""
    with from_here():
        return await asyncio.to_thread(call, *args)
