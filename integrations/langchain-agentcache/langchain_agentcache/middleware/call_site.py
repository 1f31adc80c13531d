"""The middleware that changed a prompt between two steps of a conversation, found on the call stack. Knows nothing of models.

Middleware that wraps the model call stands above ours on the call stack, or in the tasks that wait for ours, each with the request it was
given: who gave on another one than it got has changed it.
"""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

from langchain.agents.middleware import LLMToolSelectorMiddleware
from langchain.agents.middleware.types import AgentMiddleware, ModelRequest
from langchain_core.messages import BaseMessage

SHOWN = 40  # characters around a difference


@dataclass(frozen=True, slots=True)
class PromptState:
    """What one request put before its newest messages."""

    system_message: str
    tools: tuple[str, ...]
    messages: tuple[tuple[str, str], ...]


def prompt_state(request: ModelRequest[Any]) -> PromptState:
    """A request as far as a change of it costs something."""
    system = _text(request.system_message) if request.system_message else ""
    return PromptState(system, tuple(map(tool_name, request.tools)), tuple((each.type, _text(each)) for each in request.messages))


def change(before: PromptState, now: PromptState) -> tuple[str, str] | None:
    """(field, what changed in words), None if this request only adds to the one before."""
    if before.system_message != now.system_message:
        return "system_message", f"the system prompt: {_difference(before.system_message, now.system_message)}"
    if before.tools != now.tools:
        return "tools", f"the tools: {_names(before.tools, now.tools)}"
    for number, (old, new) in enumerate(zip(before.messages, now.messages, strict=False)):
        if old != new:
            return "messages", f"message {number} ({new[0]}): {_difference(old[1], new[1])}"
    if len(now.messages) < len(before.messages):
        return "messages", f"{len(before.messages) - len(now.messages)} messages are gone"
    return None


def changed_by(request: ModelRequest[Any], field: str, own: object) -> list[str]:
    """Names of the middleware above `own` that changed this field of the request on its way."""
    states = [(name, prompt_state(incoming), prompt_state(outgoing)) for (name, _), incoming, outgoing in _changes(request, own)]
    return [name for name, before, after in states if getattr(before, field) != getattr(after, field)]


def selected_from(request: ModelRequest[Any], own: object) -> dict[str, Any]:
    """The tools, by name, among which an LLMToolSelectorMiddleware above `own` chose; those that others took away are left out."""
    wanted = {tool_name(tool) for tool in request.tools}
    for (_, each), incoming, outgoing in _changes(request, own):
        if isinstance(each, LLMToolSelectorMiddleware):
            refused = {tool_name(tool) for tool in outgoing.tools} - wanted
            return {name: tool for tool in incoming.tools if (name := tool_name(tool)) not in refused}
    return {}


_Named = tuple[str, AgentMiddleware[Any, Any, Any]]


def _changes(request: ModelRequest[Any], own: object) -> list[tuple[_Named, ModelRequest[Any], ModelRequest[Any]]]:
    """(middleware, the request it was given, the request it gave on) of all that is wrapped around us, the outermost first."""
    given = _above(own)
    after = [*(incoming for _, incoming in given[1:]), request]
    return [(named, incoming, outgoing) for (named, incoming), outgoing in zip(given, after, strict=False)]


def _above(own: object) -> list[tuple[_Named, ModelRequest[Any]]]:
    """(middleware, the request it was given) of each middleware that is wrapped around us, the outermost first.

    Middleware may bind its parameter anew, so what it was given is read where it was called: in the next frame above that has a request.
    """
    found: list[tuple[_Named, ModelRequest[Any]]] = []
    waiting: _Named | None = None
    for frame in _frames():
        first = frame.f_locals.get(frame.f_code.co_varnames[0]) if frame.f_code.co_argcount else None
        if isinstance(first, AgentMiddleware):
            waiting = (first.name, first) if first is not own else None
        elif waiting is not None:
            given = next((value for value in frame.f_locals.values() if isinstance(value, ModelRequest)), None)
            if given is not None:
                found.append((waiting, given))
                waiting = None
    return found[::-1]


def _frames() -> Iterator[FrameType]:
    """The frames above us, the nearest first: of this stack, then of the tasks that wait for this one, in which async middleware runs."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back
    try:
        task = asyncio.current_task()
    except RuntimeError:  # no event loop runs here
        return
    while task is not None:
        task, frames = _awaiting(task)
        yield from frames


def _awaiting(task: asyncio.Task[Any]) -> tuple[asyncio.Task[Any] | None, list[FrameType]]:
    """The task that waits for this one, and its frames, the nearest first; None if there is none."""
    for other in asyncio.all_tasks() - {task}:
        frames: list[FrameType] = []
        inner: Any = other.get_coro()
        while (frame := getattr(inner, "cr_frame", None) or getattr(inner, "gi_frame", None)) is not None:
            frames.append(frame)
            inner = getattr(inner, "cr_await", None) or getattr(inner, "gi_yieldfrom", None)
        if inner is not None and any(each is task for each in gc.get_referents(inner)):  # an iterator over the awaited task
            return other, frames[::-1]
    return None, []


def tool_name(tool: Any) -> str:
    """Of a BaseTool or a schema."""
    if isinstance(tool, dict):
        return str(tool.get("function", tool).get("name") or tool.get("type") or "")
    return str(tool.name)


def _text(message: BaseMessage) -> str:
    calls = [(call["name"], call["args"]) for call in getattr(message, "tool_calls", ())]
    return f"{message.text}{calls or ''}"


def _difference(old: str, new: str) -> str:
    at = next((n for n, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
    start = max(0, at - SHOWN // 2)
    return f"from character {at} on, {old[start : at + SHOWN // 2]!r} became {new[start : at + SHOWN // 2]!r}"


def _names(old: Sequence[str], new: Sequence[str]) -> str:
    gone, come = [name for name in old if name not in new], [name for name in new if name not in old]
    parts = [f"{', '.join(gone)} left" if gone else "", f"{', '.join(come)} came" if come else ""]
    return "; ".join(part for part in parts if part) or "their order"
