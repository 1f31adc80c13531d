"""agentcache's answers as LangChain's messages and chunks. Knows nothing of requests."""

from __future__ import annotations

from typing import Any

from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.messages.ai import InputTokenDetails, OutputTokenDetails, UsageMetadata
from langchain_core.messages.tool import invalid_tool_call, tool_call, tool_call_chunk

from agentcache import Completion, Delta, Receipt

from ._miss_hints import hinted

PROVIDER = "agentcache"
_BEHIND = 1 << 16  # under output_version="v1", core numbers blocks of text and thought 0, 1, ..., and joins what has one number
_LONG = ("spans", "namespace", "model", "finish_reason")  # grows with the conversation, or is said elsewhere


def usage_of(receipt: Receipt, draft: Receipt | None = None) -> UsageMetadata:
    """input_tokens is the whole prompt; cache_read was reused, cache_creation was computed, and is kept for the next request.

    draft: of the words from which an object was made; what it wrote is output, too.
    """
    details = InputTokenDetails(cache_read=receipt.cached_tokens, cache_creation=receipt.computed_tokens)
    reasoning = receipt.reasoning_tokens + (draft.reasoning_tokens if draft else 0)
    thought = {"output_token_details": OutputTokenDetails(reasoning=reasoning)} if reasoning else {}
    written = receipt.completion_tokens + (draft.completion_tokens if draft else 0)
    return UsageMetadata(
        input_tokens=receipt.prompt_tokens,
        output_tokens=written,
        total_tokens=receipt.prompt_tokens + written,
        input_token_details=details,
        **thought,
    )


def openai_usage(message: AIMessage) -> dict[str, int]:
    """The same under the names that `response_metadata["token_usage"]` has in other chat models."""
    used = message.usage_metadata
    assert used is not None, "message_of tells it of every answer"
    return {"prompt_tokens": used["input_tokens"], "completion_tokens": used["output_tokens"], "total_tokens": used["total_tokens"]}


def metadata_of(done: Completion, label: str | None, draft: Receipt | None = None) -> dict[str, Any]:
    """What LangChain's callbacks and middleware look for, and the receipt, with that of the draft if there is one."""
    receipt = done.receipt
    account = _account(receipt) | ({"draft": _account(draft)} if draft else {})
    account |= {name: True for name in ("cut", "shortened") if getattr(done, name)}
    said: dict[str, Any] = {"model_name": receipt.model, "model_provider": PROVIDER, "finish_reason": receipt.finish_reason}
    if label:
        said["prompt_cache_key"] = label
    return {**said, "agentcache": account}


def told_account(message: BaseMessage) -> dict[str, Any] | None:
    """The receipt in an answer; None in one of LangChain's own cache, for which the engine was not asked."""
    out_of_cache = "total_cost" in (getattr(message, "usage_metadata", None) or {})  # LangChain's mark
    return None if out_of_cache else message.response_metadata.get("agentcache")


def _account(receipt: Receipt) -> dict[str, Any]:
    account = {key: value for key, value in receipt.as_dict().items() if key not in _LONG}
    return account if account["missed"] is None else {**account, "missed": hinted(account["missed"])}


def message_of(done: Completion, label: str | None = None, draft: Receipt | None = None) -> AIMessage:
    """The whole answer as one message."""
    said = done.message
    return AIMessage(
        content=said.content,
        additional_kwargs={"reasoning_content": said.reasoning} if said.reasoning else {},
        tool_calls=[tool_call(name=call.name, args=dict(call.arguments), id=call.id) for call in said.tool_calls],
        invalid_tool_calls=[
            invalid_tool_call(name=call.name, args=call.arguments, id=call.id, error=call.error) for call in done.invalid_calls
        ],
        usage_metadata=usage_of(done.receipt, draft),
        response_metadata=metadata_of(done, label, draft),
    )


def chunk_of(delta: Delta, output_version: str | None = None) -> AIMessageChunk:
    """One piece of the answer. Under output_version="v1" calls are numbered where core's own count of blocks does not come."""
    if delta.kind == "text":
        return AIMessageChunk(content=delta.text)
    if delta.kind == "reasoning":
        return AIMessageChunk(content="", additional_kwargs={"reasoning_content": delta.text})
    name, call_id, args = (delta.text, delta.id, "") if delta.kind == "call" else (None, None, delta.text)
    index = delta.index + _BEHIND if output_version == "v1" else delta.index
    return AIMessageChunk(content="", tool_call_chunks=[tool_call_chunk(name=name, args=args, id=call_id, index=index)])


def last_chunk(done: Completion, label: str | None = None, draft: Receipt | None = None) -> AIMessageChunk:
    """The end of a stream, with its account."""
    return AIMessageChunk(
        content="",
        usage_metadata=usage_of(done.receipt, draft),
        response_metadata=metadata_of(done, label, draft),
        chunk_position="last",
    )
