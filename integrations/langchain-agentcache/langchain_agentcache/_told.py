"""Warnings that name the line of the caller's program, through LangChain's frames, ours and a thread. Knows no settings."""

from __future__ import annotations

import asyncio
import sys
import warnings
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, TypeVar

T = TypeVar("T")

# Packages whose frames lie between a program's line and a warning about it.
_BETWEEN = {"langchain_agentcache", "langchain_core", "langchain", "langchain_classic", "langgraph", "langsmith", "pydantic", "agentcache"}
_BETWEEN |= {"asyncio", "concurrent", "contextlib", "contextvars", "functools", "threading", "typing"}

_caller: ContextVar[dict[str, Any] | None] = ContextVar("agentcache_caller", default=None)
_said: set[tuple[str, str]] = set()


def _place() -> dict[str, Any] | None:
    """Where the nearest frame of a program is, as `warnings.warn_explicit` wants it; None in a thread that none of them began."""
    frame = sys._getframe(1)
    while frame is not None:
        module = str(frame.f_globals.get("__name__") or "")
        if module.partition(".")[0] not in _BETWEEN:
            registry = frame.f_globals.setdefault("__warningregistry__", {})
            return {"filename": frame.f_code.co_filename, "lineno": frame.f_lineno, "module": module, "registry": registry}
        frame = frame.f_back  # type: ignore[assignment]
    return None


def tell(text: str) -> None:
    """Warn of something at the caller's line."""
    place = _place() or _caller.get()
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
    """The result of a call in another thread, whose warnings name this caller's line."""
    token = _caller.set(_place())
    try:
        return await asyncio.to_thread(call, *args)
    finally:
        _caller.reset(token)
