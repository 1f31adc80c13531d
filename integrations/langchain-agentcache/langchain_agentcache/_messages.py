"""LangChain's messages as agentcache's. Knows nothing of models; what a template cannot show is refused, never dropped in silence."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from langchain_core.messages import AIMessage, BaseMessage, ChatMessage, FunctionMessage, HumanMessage, SystemMessage, ToolMessage

from agentcache import Message, ToolCall, volatile

from .errors import ModelInvalidRequestError

# Blocks that say again what a message says elsewhere: its calls are in `tool_calls`.
_CALLS = {"tool_use", "tool_call", "tool_call_chunk", "invalid_tool_call", "function_call", "input_json_delta"}
# What another provider did for an answer, such as a fallback's: its text says what came of it.
_DONE = re.compile("non_standard|redacted_thinking|(server_tool|mcp)_.+|(?!image).+_call|.+_tool_result|executable_code|code_.+_result")
_THOUGHTS = ("thinking", "reasoning", "reasoning_content")  # of Anthropic and Mistral, of LangChain and OpenAI, of Bedrock
_ROLES = {"user": "user", "human": "user", "assistant": "assistant", "ai": "assistant", "system": "system", "developer": "system"}


def converted(messages: Sequence[BaseMessage]) -> list[Message]:
    """The messages in agentcache's form; ModelInvalidRequestError for what no text model can be shown."""
    answered = {message.tool_call_id for message in messages if isinstance(message, ToolMessage)}
    return [_converted(index, message, answered) for index, message in enumerate(messages)]


def turn(messages: Sequence[BaseMessage], task: str) -> str:
    """A name for this turn of its conversation: the ids of the messages, which LangGraph gives and a trimmed history keeps, and its task,
    which tells apart what is asked in parallel.
    """
    return json.dumps([*ids, task]) if any(ids := [message.id for message in messages]) or task else ""


def _converted(index: int, message: BaseMessage, answered: Collection[str] = ()) -> Message:
    text, reasoning = _parts(index, message)
    if isinstance(message, HumanMessage):
        return Message("user", text, name=message.name)
    if isinstance(message, SystemMessage):
        return Message("system", _with_mark(index, message) or text)
    if isinstance(message, AIMessage):
        said = text or str(message.additional_kwargs.get("refusal") or "")
        return Message("assistant", said, _calls(message, answered), reasoning=_thought(message) or reasoning or None)
    if isinstance(message, ToolMessage):
        return Message("tool", text, tool_call_id=message.tool_call_id, name=message.name)
    if isinstance(message, FunctionMessage):
        return Message("tool", text, name=message.name)
    role = _ROLES.get(message.role.lower()) if isinstance(message, ChatMessage) else None
    if role is None:
        shown = getattr(message, "role", message.type)
        raise ModelInvalidRequestError(f"messages[{index}]: role {shown!r} is unknown; use one of {sorted(_ROLES)!r}, or a ToolMessage")
    return Message(role, text)  # type: ignore[arg-type]


def _with_mark(index: int, message: SystemMessage) -> str:
    """The text, its blocks after the last one with `cache_control` marked as volatile; "" if there are none."""
    blocks = message.content if isinstance(message.content, list) else []
    tagged = [number for number, block in enumerate(blocks) if control(block)]
    if not tagged or tagged[-1] + 1 == len(blocks):
        return ""
    cut = tagged[-1] + 1
    stable, after = (_parts(index, message.model_copy(update={"content": some}))[0] for some in (blocks[:cut], blocks[cut:]))
    return stable + volatile(after)


def _calls(message: AIMessage, answered: Collection[str]) -> tuple[ToolCall, ...]:
    calls = [ToolCall(call["name"], call["args"], call.get("id")) for call in message.tool_calls]
    if not calls and (older := message.additional_kwargs.get("function_call")):  # as another class leaves a call of OpenAI's first form
        try:
            calls.append(ToolCall(older["name"], json.loads(older["arguments"])))
        except ValueError:
            calls.append(ToolCall(older["name"], {"invalid_arguments": older["arguments"]}))
    for bad in message.invalid_tool_calls:
        if message.response_metadata.get("agentcache") and bad.get("id") not in answered:
            continue  # the text of a call that is none is in the content of our own messages
        # agents answer it with a ToolMessage: it must be there, and say what the model had said
        calls.append(ToolCall(bad.get("name") or "unknown", {"invalid_arguments": bad.get("args") or ""}, bad.get("id")))
    return tuple(calls)


def _thought(message: AIMessage) -> str:
    thought = message.additional_kwargs.get("reasoning_content")
    return thought if isinstance(thought, str) else ""


def _parts(index: int, message: BaseMessage) -> tuple[str, str]:
    """(text, reasoning) of a message's content."""
    if isinstance(message.content, str):
        return message.content, ""
    texts, thoughts = [], []
    for block in message.content:
        if isinstance(block, str):
            texts.append(block)
            continue
        kind = block.get("type")
        if kind == "text" or (kind in (None, "text-plain") and "text" in block):
            texts.append(str(block.get("text") or ""))
        elif kind == "refusal":
            texts.append(str(block.get("refusal") or ""))
        elif kind in _THOUGHTS:
            thoughts.append(_thinking(block))
        elif kind == "json" and "json" in block:
            texts.append(json.dumps(block["json"], ensure_ascii=False))
        elif kind not in _CALLS and not _point(block) and not (isinstance(message, AIMessage) and _DONE.fullmatch(str(kind))):
            shown = f"of type {kind!r}" if kind else f"without a type, {block!r:.100}"
            raise ModelInvalidRequestError(
                f"messages[{index}]: a {message.type} message with a block {shown}: this model reads text only; "
                "describe it in words, or send it to a model that takes such input"
            )
    return "".join(texts), "".join(thoughts)


def _thinking(block: Mapping[str, Any]) -> str:
    """What a block thinks: a text, or parts with texts, such as OpenAI's summary."""
    said = next((found for name in (*_THOUGHTS, "summary") if (found := block.get(name))), "")
    parts = said if isinstance(said, list) else [said]
    return "".join(str(part.get("text") or "") if isinstance(part, Mapping) else str(part) for part in parts)


def control(block: Any) -> Any:
    """The `cache_control` of a block; that of Bedrock is a block of its own, after what is to be kept."""
    if not isinstance(block, Mapping):
        return None
    return {"ttl": point.get("ttl", "5m")} if (point := _point(block)) else block.get("cache_control")


def _point(block: Mapping[str, Any]) -> Mapping[str, Any] | None:
    point = block.get("cachePoint") or block.get("cache_point")
    return point if isinstance(point, Mapping) else None


def marked(messages: Sequence[BaseMessage], whole: Mapping[str, Any] | None = None) -> dict[int, Mapping[str, Any]]:
    """`cache_control` of blocks, by how many messages it holds: up to its own, and all leading system messages, which templates join.

    whole: that of the call, which holds the leading ones.
    """
    leading = next((n for n, message in enumerate(messages) if not isinstance(message, SystemMessage)), len(messages))
    found: dict[int, Mapping[str, Any]] = {}
    for index, message in enumerate(messages):
        for block in message.content if isinstance(message.content, list) else ():
            if said := control(block):
                found[max(index + 1, leading)] = said
    return found if whole is None else {leading: whole, **found}
