"""Messages checked: plain dicts that say the same as what the caller gave, or a MessageError with the index. No canonical form yet."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import MessageError, shown
from ..types import Message, ToolCall
from .json_values import fault

ROLES = ("system", "user", "assistant", "tool")
VOLATILE = "agentcache:volatile>"  # ends the marks before and after volatile text
Plain = dict[str, Any]


def plain_messages(messages: Sequence[Message | Mapping[str, Any]]) -> list[Plain]:
    """Plain dicts, arguments parsed; raises MessageError with the index of the first message that cannot be used."""
    check_list(messages)
    plain = [plain_message(index, message) for index, message in enumerate(messages)]
    pair_results(plain)
    return plain


def field(message: Any, name: str) -> Any:
    """A field of a message or call, as it was given."""
    return message.get(name) if isinstance(message, Mapping) else getattr(message, name)


def is_system(message: Any) -> bool:
    """Tell whether a message, which nobody has checked yet, speaks for the system."""
    return isinstance(message, (Message, Mapping)) and bool(field(message, "role") == "system")


def check_list(messages: Any) -> None:
    """MessageError unless `messages` is a list with something in it."""
    if isinstance(messages, Mapping) or not isinstance(messages, Sequence):
        raise MessageError(f"messages must be a list of messages or a string prompt, got {type(messages).__name__}")
    if not messages:
        raise MessageError("messages=[] is empty: give at least one message, or a string as a raw prompt")


def plain_message(index: int, message: Message | Mapping[str, Any]) -> Plain:
    """One message, checked, as the dict that a chat template reads. `index` is what an error names."""
    if isinstance(message, Message):
        out = _from_message(message)
    elif isinstance(message, Mapping):
        out = dict(message)
    else:
        raise MessageError(f"messages[{index}]={shown(message)}: give a Message or a dict with 'role' and 'content'")
    role = out.get("role")
    if role not in ROLES:
        hint = " (use 'system')" if role == "developer" else ""
        raise MessageError(f"messages[{index}]: role={shown(role)} is unknown, use one of {ROLES!r}{hint}")
    if "content" not in out and role != "assistant":  # one that calls tools may say nothing
        keys = shown(sorted(map(str, out)))
        raise MessageError(f"messages[{index}] has the keys {keys}: give a Message or a dict with 'role' and 'content'")
    _check_content(index, out.get("content"))
    _check_id(f"messages[{index}]: tool_call_id", out.get("tool_call_id"))
    calls = out.get("tool_calls")
    if calls:
        if role != "assistant":
            raise MessageError(f"messages[{index}]: tool_calls on a {role!r} message; only an assistant message may call tools")
        if isinstance(calls, (str, Mapping)) or not isinstance(calls, Sequence):
            raise MessageError(f"messages[{index}]: tool_calls={shown(calls)} is not a list of calls")
        out["tool_calls"] = [_plain_call(index, number, call) for number, call in enumerate(calls)]
    return out


def _from_message(message: Message) -> Plain:
    calls, given = message.tool_calls or None, {"tool_call_id": message.tool_call_id, "name": message.name}
    more = {"reasoning_content": message.reasoning, "tool_calls": calls, **given}
    return {"role": message.role, "content": message.content, **{key: value for key, value in more.items() if value is not None}}


def _check_content(index: int, content: Any) -> None:
    if content is None or isinstance(content, str):
        return
    if not isinstance(content, (list, tuple)):
        raise MessageError(f"messages[{index}]: content={shown(content)} is not text; give a string or a list of text parts")
    for part in content:
        if isinstance(part, str):
            continue
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise MessageError(
                f"messages[{index}]: content part {shown(part)} is not text; only {{'type': 'text', 'text': ...}} parts can be rendered"
            )


def _check_id(where: str, given: Any) -> None:
    if not isinstance(given, (str, int, type(None))) or fault(given, where):
        raise MessageError(f"{where}={shown(given)} is not a string")


def _plain_call(index: int, number: int, call: ToolCall | Mapping[str, Any]) -> Plain:
    where = f"messages[{index}].tool_calls[{number}]"
    if isinstance(call, ToolCall):
        out: Plain = {} if call.id is None else {"id": call.id}
        function: Plain = {"name": call.name, "arguments": call.arguments}
        out.update(type="function", function=function)
    elif isinstance(call, Mapping):
        out = dict(call)
        if "function" not in out and "name" in out:  # LangChain's own shape: {"name", "args", "id"}
            known_id = {} if out.get("id") is None else {"id": out["id"]}
            out = {**known_id, "type": "function", "function": {"name": out["name"], "arguments": out.get("arguments", out.get("args"))}}
        if not isinstance(out.get("function"), Mapping):
            raise MessageError(f"{where}={shown(call)}: needs 'function': {{'name': ..., 'arguments': ...}}")
        function = dict(out["function"])
        out["function"] = function
    else:
        raise MessageError(f"{where}={shown(call)}: give a ToolCall or a dict with 'function'")
    if not isinstance(function.get("name"), str) or not function["name"]:
        raise MessageError(f"{where}: name={shown(function.get('name'))} is not a function name")
    _check_id(f"{where}: id", out.get("id"))
    function["arguments"] = _plain_arguments(f"{where} {function['name'][:60]!r}", function.get("arguments"))
    return out


def _plain_arguments(where: str, arguments: Any) -> Plain:
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}  # some clients send "" for a call without arguments
        except (ValueError, RecursionError) as error:
            raise MessageError(f"{where}: arguments={shown(arguments)} is not JSON ({error}); give a JSON object or a dict") from error
    if arguments is None:
        return {}
    if not isinstance(arguments, Mapping):
        raise MessageError(f"{where}: arguments={shown(arguments)} is not a JSON object")
    if wrong := fault(arguments, "arguments"):
        raise MessageError(f"{where}: {wrong}")
    return dict(arguments)


def pair_results(plain: list[Plain]) -> None:
    """Checks that each tool result answers a call of the last assistant message that called tools, and each only once."""
    waiting: list[tuple[str | None, str]] = []
    for index, message in enumerate(plain):
        if message.get("tool_calls"):
            waiting = [(call.get("id"), call["function"]["name"]) for call in message["tool_calls"]]
        elif message["role"] == "tool":
            position = answered(waiting, message)
            if position is None:
                raise MessageError(
                    f"messages[{index}]: tool result with tool_call_id={shown(message.get('tool_call_id'))} answers no open call "
                    f"(open: {[call_id for call_id, _ in waiting]!r}); put the assistant message with its tool_calls before it"
                )
            waiting.pop(position)


def answered(waiting: Sequence[tuple[str | None, str]], message: Plain) -> int | None:
    """Position of the open call that a result answers: by id, else by order where either side has no id."""
    wanted = message.get("tool_call_id")
    for position, (call_id, _) in enumerate(waiting):
        if call_id == wanted or call_id is None or wanted is None:
            return position
    return None
