"""Messages in one canonical form: validated, ordered, ids by position. Knows nothing of templates or tokens.

Two stages. `plain_messages` checks the caller's values and hands back plain dicts that say the same thing (what the stock
rendering gets); `canonical_messages` then removes what may differ between two equal requests, and names what it changed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .errors import MessageError
from .types import Message, ToolCall

ROLES = ("system", "user", "assistant", "tool")
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")  # the names transformers itself treats as one
Plain = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Turn:
    """One message as the template gets it. `source` is its index in the caller's list, `data` must not be modified."""

    source: int
    data: Plain

    @property
    def kind(self) -> str:
        """The role, or "call" for an assistant turn that calls tools."""
        return "call" if self.data.get("tool_calls") else str(self.data["role"])


# --- messages, stage 1: checked ------------------------------------------------------------------------------------------


def plain_messages(messages: Sequence[Message | Mapping[str, Any]]) -> list[Plain]:
    """Plain dicts, arguments parsed; raises MessageError with the index of the first message that cannot be used."""
    if isinstance(messages, Mapping) or not isinstance(messages, Sequence):
        raise MessageError(f"messages must be a list of messages or a string prompt, got {type(messages).__name__}")
    if not messages:
        raise MessageError("messages=[] is empty: give at least one message, or a string as a raw prompt")
    plain = [_plain_message(index, message) for index, message in enumerate(messages)]
    _pair_results(plain)
    return plain


def _plain_message(index: int, message: Message | Mapping[str, Any]) -> Plain:
    if isinstance(message, Message):
        out = _from_message(message)
    elif isinstance(message, Mapping):
        out = dict(message)
    else:
        raise MessageError(f"messages[{index}]={message!r:.200}: give a Message or a dict with 'role' and 'content'")
    role = out.get("role")
    if role not in ROLES:
        hint = " (use 'system')" if role == "developer" else ""
        raise MessageError(f"messages[{index}]: role={role!r} is unknown, use one of {ROLES!r}{hint}")
    _check_content(index, out.get("content"))
    calls = out.get("tool_calls")
    if calls:
        if role != "assistant":
            raise MessageError(f"messages[{index}]: tool_calls on a {role!r} message; only an assistant message may call tools")
        if isinstance(calls, (str, Mapping)) or not isinstance(calls, Sequence):
            raise MessageError(f"messages[{index}]: tool_calls={calls!r:.200} is not a list of calls")
        out["tool_calls"] = [_plain_call(index, number, call) for number, call in enumerate(calls)]
    return out


def _from_message(message: Message) -> Plain:
    out: Plain = {"role": message.role, "content": message.content}
    if message.reasoning is not None:
        out["reasoning_content"] = message.reasoning
    if message.tool_calls:
        out["tool_calls"] = list(message.tool_calls)
    if message.tool_call_id is not None:
        out["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        out["name"] = message.name
    return out


def _check_content(index: int, content: Any) -> None:
    if content is None or isinstance(content, str):
        return
    if not isinstance(content, (list, tuple)):
        raise MessageError(f"messages[{index}]: content={content!r:.200} is not text; give a string or a list of text parts")
    for part in content:
        if isinstance(part, str):
            continue
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise MessageError(
                f"messages[{index}]: content part {part!r:.200} is not text; only {{'type': 'text', 'text': ...}} parts can be rendered"
            )


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
            raise MessageError(f"{where}={call!r:.200}: needs 'function': {{'name': ..., 'arguments': ...}}")
        function = dict(out["function"])
        out["function"] = function
    else:
        raise MessageError(f"{where}={call!r:.200}: give a ToolCall or a dict with 'function'")
    if not isinstance(function.get("name"), str) or not function["name"]:
        raise MessageError(f"{where}: name={function.get('name')!r} is not a function name")
    function["arguments"] = _plain_arguments(where, function.get("arguments"))
    return out


def _plain_arguments(where: str, arguments: Any) -> Plain:
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}  # some clients send "" for a call without arguments
        except ValueError as error:
            raise MessageError(f"{where}: arguments={arguments!r:.200} is not JSON ({error}); give a JSON object or a dict") from error
    if arguments is None:
        return {}
    if not isinstance(arguments, Mapping):
        raise MessageError(f"{where}: arguments={arguments!r:.200} is not a JSON object")
    return dict(arguments)


def _pair_results(plain: list[Plain]) -> None:
    """Checks that each tool result answers a call of the last assistant message that called tools, and each only once."""
    waiting: list[tuple[str | None, str]] = []
    for index, message in enumerate(plain):
        if message.get("tool_calls"):
            waiting = [(call.get("id"), call["function"]["name"]) for call in message["tool_calls"]]
        elif message["role"] == "tool":
            position = _answered(waiting, message)
            if position is None:
                raise MessageError(
                    f"messages[{index}]: tool result with tool_call_id={message.get('tool_call_id')!r} answers no open call "
                    f"(open: {[call_id for call_id, _ in waiting]!r}); put the assistant message with its tool_calls before it"
                )
            waiting.pop(position)


def _answered(waiting: Sequence[tuple[str | None, str]], message: Plain) -> int | None:
    """Position of the open call that a result answers: by id, else by order where either side has no id."""
    wanted = message.get("tool_call_id")
    for position, (call_id, _) in enumerate(waiting):
        if call_id == wanted or call_id is None or wanted is None:
            return position
    return None


# --- messages, stage 2: canonical ----------------------------------------------------------------------------------------


def canonical_messages(plain: Sequence[Plain], clean: Callable[[str], str]) -> tuple[list[Turn], list[str], bool]:
    """(turns, differences in words, whether call ids were changed). `clean` neutralises special-token text."""
    notes: dict[str, None] = {}  # ordered and without repeats
    turns = [Turn(index, _canonical_message(index, message, clean, notes)) for index, message in enumerate(plain)]
    turns = _order_results(_merge_system(turns, notes), notes)
    turns, renamed = _number_calls(turns)
    return turns, list(notes), renamed


def text_of(content: Any) -> str:
    """The text of a content field: None, a string, or text parts."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    return "".join(part if isinstance(part, str) else part["text"] for part in content)


def _canonical_message(index: int, message: Plain, clean: Callable[[str], str], notes: dict[str, None]) -> Plain:
    def cleaned(text: str) -> str:
        safe = clean(text)
        if safe != text:
            notes[f"message {index}: text that spells a special token was neutralised"] = None
        return safe

    out: Plain = {"role": message["role"]}
    content = message.get("content")
    if content is not None and not isinstance(content, str):
        notes[f"message {index}: content parts joined into one text"] = None
    if content is not None:  # transformers drops None before rendering: an absent key is what stock shows the template
        out["content"] = cleaned(text_of(content))
    reasoning = next((message[key] for key in REASONING_KEYS if isinstance(message.get(key), str)), None)
    if reasoning is not None:
        out["reasoning_content"] = cleaned(reasoning)
    if message.get("tool_calls"):
        out["tool_calls"] = [_canonical_call(call, cleaned) for call in message["tool_calls"]]
        if any(list(call["function"]) != ["name", "arguments"] for call in message["tool_calls"]):
            notes["tool calls rewritten as function{name, arguments}"] = None
    for key in ("tool_call_id", "name"):
        if isinstance(message.get(key), str):
            out[key] = cleaned(message[key])
    return out


def _canonical_call(call: Plain, clean: Callable[[str], str]) -> Plain:
    function = call["function"]
    body = {"name": clean(function["name"]), "arguments": mapped(function["arguments"], clean)}
    return {"id": call.get("id"), "type": "function", "function": body}


def mapped(value: Any, clean: Callable[[str], str]) -> Any:
    """`value` with `clean` applied to every string in it, keys included."""
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, Mapping):
        return {clean(key) if isinstance(key, str) else key: mapped(item, clean) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [mapped(item, clean) for item in value]
    return value


def _merge_system(turns: list[Turn], notes: dict[str, None]) -> list[Turn]:
    """Several leading system messages as one: 15 of 67 known templates drop or refuse the second."""
    count = next((n for n, turn in enumerate(turns) if turn.data["role"] != "system"), len(turns))
    if count < 2:
        return turns
    notes[f"{count} leading system messages merged into one"] = None
    text = "\n\n".join(turn.data.get("content", "") for turn in turns[:count])
    return [Turn(turns[0].source, {"role": "system", "content": text}), *turns[count:]]


def _order_results(turns: list[Turn], notes: dict[str, None]) -> list[Turn]:
    """Tool results in the order of their calls: templates without ids pair them by position."""
    out: list[Turn] = []
    at = 0
    calls: list[str | None] = []
    while at < len(turns):
        if turns[at].data["role"] != "tool":
            calls = [call["id"] for call in turns[at].data.get("tool_calls", ())] or calls
            out.append(turns[at])
            at += 1
            continue
        stop = at
        while stop < len(turns) and turns[stop].data["role"] == "tool":
            stop += 1
        run = turns[at:stop]
        rank = {call_id: position for position, call_id in enumerate(calls) if call_id is not None}
        if all(turn.data.get("tool_call_id") in rank for turn in run):
            ordered = sorted(run, key=lambda turn: rank[turn.data["tool_call_id"]])
            if ordered != run:
                notes[f"messages {run[0].source} to {run[-1].source}: tool results put in the order of their calls"] = None
            run = ordered
        out.extend(run)
        at = stop
    return out


def _number_calls(turns: list[Turn]) -> tuple[list[Turn], bool]:
    """Call ids as a function of position: "call00001", nine alphanumerics (Mistral refuses any other length)."""
    out: list[Turn] = []
    waiting: list[tuple[str | None, str]] = []
    count, changed = 0, False
    for turn in turns:
        data = turn.data
        if data.get("tool_calls"):
            waiting = []
            calls = []
            for call in data["tool_calls"]:
                count += 1
                new = f"call{count:05d}"
                changed |= call["id"] != new
                waiting.append((call["id"], new))
                calls.append({**call, "id": new})
            data = {**data, "tool_calls": calls}
        elif data["role"] == "tool":
            position = _answered(waiting, data)
            assert position is not None, "checked by plain_messages"
            data = {**data, "tool_call_id": waiting.pop(position)[1]}
        out.append(Turn(turn.source, data))
    return out, changed
