"""What of a prompt changed between two steps of a conversation, and which middleware did it. Knows nothing of models.

Middleware that wraps the model call stands above ours on the call stack, each with the request it was given: who gave on another one than
it got has changed it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

from langchain.agents.middleware.types import AgentMiddleware, ModelRequest
from langchain_core.messages import BaseMessage

SHOWN = 40  # characters around a difference


@dataclass(frozen=True, slots=True)
class Seen:
    """What one request put before its newest messages."""

    system: str
    tools: tuple[str, ...]
    messages: tuple[tuple[str, str], ...]


def seen(request: ModelRequest[Any], tools: Sequence[str]) -> Seen:
    """A request as far as a change of it costs something."""
    return Seen(_system(request), tuple(tools), tuple((message.type, _text(message)) for message in request.messages))


def change(before: Seen, now: Seen) -> tuple[str, str] | None:
    """(field, what changed in words), None if this request only adds to the one before."""
    if before.system != now.system:
        return "system_message", f"the system prompt: {_difference(before.system, now.system)}"
    if before.tools != now.tools:
        return "tools", f"the tools: {_names(before.tools, now.tools)}"
    for number, (old, new) in enumerate(zip(before.messages, now.messages, strict=False)):
        if old != new:
            return "messages", f"message {number} ({new[0]}): {_difference(old[1], new[1])}"
    if len(now.messages) < len(before.messages):
        return "messages", f"{len(before.messages) - len(now.messages)} messages are gone"
    return None


def culprits(request: ModelRequest[Any], field: str, own: object) -> list[str]:
    """Names of the middleware above `own` that changed this field of the request on its way."""
    given = _above(own)
    names = []
    for number, (name, incoming) in enumerate(given):
        outgoing = given[number + 1][1] if number + 1 < len(given) else request
        if _field(incoming, field) != _field(outgoing, field):
            names.append(name)
    return names


def _above(own: object) -> list[tuple[str, ModelRequest[Any]]]:
    """(name, the request it was given) of each middleware that is wrapped around us, the outermost first.

    Middleware may bind its parameter anew, so what it was given is read where it was called: in the next frame above that has a request.
    """
    found: list[tuple[str, ModelRequest[Any]]] = []
    waiting = ""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        first = frame.f_locals.get(frame.f_code.co_varnames[0]) if frame.f_code.co_argcount else None
        if isinstance(first, AgentMiddleware):
            waiting = first.name if first is not own and first.name != waiting else ""
        else:
            given = next((value for value in frame.f_locals.values() if isinstance(value, ModelRequest)), None)
            if given is not None and waiting:
                found.append((waiting, given))
                waiting = ""
        frame = frame.f_back
    return found[::-1]


def _field(request: ModelRequest[Any], field: str) -> Any:
    if field == "system_message":
        return _system(request)
    if field == "tools":
        return [tool_name(tool) for tool in request.tools]
    return [(message.type, _text(message)) for message in request.messages]


def tool_name(tool: Any) -> str:
    """Of a BaseTool or a schema."""
    if isinstance(tool, dict):
        return str(tool.get("function", tool).get("name") or tool.get("type") or "")
    return str(tool.name)


def _system(request: ModelRequest[Any]) -> str:
    return _text(request.system_message) if request.system_message else ""


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
