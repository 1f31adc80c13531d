"""Warnings at the line of the caller's program, also from another thread. Knows no settings."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from agentcache import CallerWarnings, Completion

T = TypeVar("T")

BETWEEN = ("langchain_agentcache", "langchain_core", "langchain", "langchain_classic", "langgraph", "langsmith", "pydantic")
caller_warnings = CallerWarnings(BETWEEN)


def tell_once(kind: str, name: str, text: str) -> None:
    """Warn, the first time in this process that something of this kind and name is to be told."""
    caller_warnings.warn_once((kind, name), f"{text} (said once)")


def tell_shortened(done: Completion) -> None:
    """Warn of an answer in which a text or a list ended early: it is valid, but the model would have written more."""
    if done.shortened:
        caller_warnings.warn(
            "a text or a list of the answer ended early, to fit into max_tokens: raise it. "
            "response_metadata['agentcache']['shortened'] tells it of every answer"
        )


def tell_empty(done: Completion) -> None:
    """Warn of an answer that is a thought alone."""
    if done.cut and not (done.message.content or done.message.tool_calls):
        caller_warnings.warn(
            "the answer is empty, as max_tokens or a stop string ended its thought: raise it. "
            "response_metadata['agentcache']['cut'] tells it of every answer"
        )


async def in_thread(call: Callable[..., T], *args: Any) -> T:
    """The result of a call in another thread."""
    with caller_warnings.from_here():
        return await asyncio.to_thread(call, *args)
