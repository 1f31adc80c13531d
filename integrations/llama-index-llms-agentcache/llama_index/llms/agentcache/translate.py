"""LlamaIndex messages to agentcache messages. Decides nothing about tokens and knows no engine.

Text of several blocks is joined as `ChatMessage.content` joins it. A CachePoint is no text: it only says that what stands before it is to
be kept. Pictures, sound, films and documents are refused by name, because a text model would silently not see them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, get_args

from llama_index.core.base.llms.types import CachePoint, ChatMessage, CitableBlock, CitationBlock, TextBlock, ThinkingBlock, ToolCallBlock

from agentcache import Message, ToolCall
from agentcache.errors import ConfigError, MessageError

LateSystem = Literal["user", "system"]
KEEP_IN_MESSAGE = "agentcache"  # where a formatter puts stop strings into a message's additional_kwargs

_ROLES: dict[str, Literal["system", "user", "assistant", "tool"]] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "chatbot": "assistant",
    "model": "assistant",
    "tool": "tool",
    "function": "tool",
}


def to_messages(messages: Sequence[ChatMessage], late_system: LateSystem = "user") -> list[Message]:
    """The same conversation for the engine. late_system: the role of system text after the first turn, which many templates drop.

    A result after an answer without calls is told by the user, as results of code are: a CodeActAgent leaves out its call of `handoff`.
    """
    if late_system not in get_args(LateSystem):
        raise ConfigError(f"late_system={late_system!r:.200}: must be 'user' or 'system'")
    if isinstance(messages, (str, Mapping)) or not isinstance(messages, Sequence):
        raise MessageError(f"messages={messages!r:.200}: give a list of ChatMessage; for a plain text use complete()")
    out: list[Message] = []
    uncalled = False  # whether there was an answer, and the last one calls nothing
    for index, message in enumerate(messages):
        if not isinstance(message, ChatMessage):
            raise MessageError(f"messages[{index}]={message!r:.200}: give a llama_index ChatMessage")
        made = _to_message(index, message)
        late = made.role == "system" and any(before.role != "system" for before in out)
        if (late and late_system == "user") or (made.role == "tool" and uncalled):
            _append_user(out, made.content)
        else:
            out.append(made)
        if made.role == "assistant":
            uncalled = not made.tool_calls
    return out


def _append_user(out: list[Message], text: str) -> None:
    """`text` as a turn of the user's: joined to the user's last turn where two in a row would be refused."""
    if out and out[-1].role == "user":
        text = f"{out.pop().content}\n\n{text}"
    out.append(Message("user", text))


def _to_message(index: int, message: ChatMessage) -> Message:
    role = _ROLES[message.role.value]
    texts: list[str] = []
    thoughts: list[str] = []
    calls = [_call(index, one.tool_name, one.tool_kwargs, one.tool_call_id) for one in message.blocks if isinstance(one, ToolCallBlock)]
    if not calls and role == "assistant":
        calls = list(_legacy_calls(index, message.additional_kwargs.get("tool_calls")))
    if calls and role != "assistant":
        raise MessageError(
            f"messages[{index}]: a ToolCallBlock on a {message.role.value!r} message; only an assistant message may call tools"
        )
    for block in message.blocks:
        if isinstance(block, ThinkingBlock):
            thoughts.append(block.content or "")
        elif not isinstance(block, (ToolCallBlock, CachePoint)):
            texts.append(_text(index, block))
    kwargs = message.additional_kwargs
    return Message(
        role,
        "\n".join(texts),
        tuple(calls),
        tool_call_id=_string(kwargs.get("tool_call_id")) if role == "tool" else None,
        name=_string(kwargs.get("name")) if role == "tool" else None,
        reasoning="\n".join(thoughts) if thoughts and role == "assistant" else None,
    )


def _text(index: int, block: Any) -> str:
    if isinstance(block, TextBlock):
        return block.text
    if isinstance(block, CitableBlock):
        return "\n".join(_text(index, part) for part in block.content)
    if isinstance(block, CitationBlock):
        return _text(index, block.cited_content)
    raise MessageError(f"messages[{index}]: a {type(block).__name__} is not text, and this model reads text only; send its text instead")


def _string(value: Any) -> str | None:
    return None if value is None else str(value)


def arguments_of(call: ToolCallBlock) -> dict[str, Any]:
    """The arguments of a call, which a block may hold as JSON text."""
    return dict(_call(0, call.tool_name, call.tool_kwargs, None).arguments)


def _call(index: int, name: Any, arguments: Any, call_id: Any) -> ToolCall:
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except ValueError as error:
            raise MessageError(f"messages[{index}]: tool_kwargs={arguments!r:.200} of {name!r} is not JSON ({error})") from error
    if not isinstance(arguments, Mapping):
        raise MessageError(f"messages[{index}]: tool_kwargs={arguments!r:.200} of {name!r} is not a JSON object")
    return ToolCall(str(name), dict(arguments), _string(call_id))


def _legacy_calls(index: int, calls: Any) -> Iterable[ToolCall]:
    """Calls as older integrations kept them: dicts or objects of OpenAI's shape in additional_kwargs."""
    for call in calls or ():
        plain = call.model_dump() if hasattr(call, "model_dump") else call
        function = plain.get("function", plain) if isinstance(plain, Mapping) else None
        if not isinstance(function, Mapping) or not function.get("name"):
            raise MessageError(f"messages[{index}]: tool call {call!r:.200} in additional_kwargs has no function name; use a ToolCallBlock")
        yield _call(index, function["name"], function.get("arguments", {}), plain.get("id"))


def cache_points(messages: Sequence[ChatMessage]) -> list[tuple[int, CachePoint]]:
    """(index of the message, the point) of every CachePoint, in order."""
    return [(index, block) for index, message in enumerate(messages) for block in message.blocks if isinstance(block, CachePoint)]


def kept_stops(messages: Any) -> Any:
    """Stop strings that a formatter put into a message, because agents pass them no other way. Nothing else is taken from there."""
    for message in messages if isinstance(messages, Sequence) else ():
        kept = message.additional_kwargs.get(KEEP_IN_MESSAGE) if isinstance(message, ChatMessage) else None
        if isinstance(kept, Mapping) and "stop" in kept:
            return kept["stop"]
    return ()
