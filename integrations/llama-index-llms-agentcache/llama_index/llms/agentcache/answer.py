"""A completion, piece by piece, as LlamaIndex responses. Knows nothing of engines, threads or prompts, and finds no calls itself.

What a response shows only grows: the deltas of a stream, joined, are the content of its last response. Calls come with the last one.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    CompletionResponse,
    ContentBlock,
    LogProb,
    MessageRole,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
)

from agentcache import Completion, Message, Receipt, ToolCall

from .errors import NoToolCallError

_FIGURES = ("prompt_tokens", "cached_tokens", "computed_tokens", "segment_tokens", "halo_tokens", "spliced_tokens", "disk_tokens")
_GRADES = ("exact_until", "bitwise", "precision")
SHOWN = 400  # characters of a call that is none
_TIMES = ("ttft_ms", "prefill_ms", "decode_ms", "saved_ms")


@dataclass(slots=True)
class Answer:
    """One completion on its way to the caller. calls: whether tools are offered; if not, what looks like a call is text.

    parallel: whether more than the first call is kept. notes: said in `raw`.
    """

    calls: bool = False
    parallel: bool = True
    notes: tuple[str, ...] = ()
    _thought: str = field(default="", init=False)
    _shown: str = field(default="", init=False)
    _called: bool = field(default=False, init=False)

    def feed(self, kind: str, text: str) -> ChatResponse | None:
        """The response so far, if this piece adds to what it shows. Kinds are those of the engine's deltas."""
        if kind == "reasoning":
            self._thought += text
            return self._response(self._thought or None, self._shown, "", text)
        if kind == "text" and (self.calls or not self._called):
            self._shown += text
            return self._response(self._thought or None, self._shown, text, "")
        self._called = self._called or kind == "call"
        return None

    def finish(self, completion: Completion) -> ChatResponse:
        """The whole response: blocks, usage, receipt, and as delta what was not shown yet."""
        message = self._message(completion)
        content, reasoning = message.content, message.reasoning
        said = content[len(self._shown) :] if content.startswith(self._shown) else ""
        thought = (reasoning or "").removeprefix(self._thought)
        calls = message.tool_calls if self.parallel else message.tool_calls[:1]
        response = self._response(reasoning, content, said, thought, always=not calls)
        for call in calls:
            block = ToolCallBlock(tool_call_id=call.id, tool_name=call.name, tool_kwargs=dict(call.arguments))
            response.message.blocks.append(block)
        if calls:  # where LlamaIndex's streams of objects look for calls; a message that comes back is read by its blocks
            response.message.additional_kwargs["tool_calls"] = [_openai(call) for call in calls]
        response.raw = raw(completion.receipt, self.notes)
        response.raw.update({name: True for name in ("cut", "shortened") if getattr(completion, name)})
        if self.calls and completion.invalid_calls:
            told = [{"name": one.name, "arguments": one.arguments[:SHOWN], "error": one.error} for one in completion.invalid_calls]
            response.raw["invalid_calls"] = told
        return response

    def _message(self, completion: Completion) -> Message:
        message = completion.message
        if self.calls or not message.tool_calls:
            return message
        _, ended, after = completion.text.partition("</think>")  # families that end a thought otherwise keep it in their text
        text = after if message.reasoning is not None and ended else completion.text
        return Message("assistant", text.strip(), reasoning=message.reasoning)

    @staticmethod
    def _response(thinking: str | None, content: str, said: str, thought: str, always: bool = False) -> ChatResponse:
        blocks: list[ContentBlock] = [] if thinking is None else [ThinkingBlock(content=thinking)]
        if content or always:
            blocks.append(TextBlock(text=content))
        extra = {"thinking_delta": thought} if thought else {}
        return ChatResponse(message=ChatMessage(role=MessageRole.ASSISTANT, blocks=blocks), delta=said, additional_kwargs=extra)


def _openai(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": json.dumps(dict(call.arguments), ensure_ascii=False)}
    return {"id": call.id, "type": "function", "function": function}


def raw(receipt: Receipt, notes: tuple[str, ...] = ()) -> dict[str, Any]:
    """What a response tells beside its text, small and plain JSON: agents copy it into every event.

    usage has OpenAI's shape, in which tracers and token counters look for cached tokens.
    """
    figures: dict[str, Any] = {name: getattr(receipt, name) for name in (*_FIGURES, *_GRADES, *_TIMES)}
    whole = receipt.as_dict()
    figures["refusals"] = whole["refusals"][:4]
    told = list(dict.fromkeys((*whole["notes"][:4], *notes)))
    if whole["missed"] is not None:
        figures["missed"] = whole["missed"]
    return {
        "model": receipt.model,
        "finish_reason": receipt.finish_reason,
        "usage": receipt.usage,
        "receipt": {**figures, **{name: value for name, value in (("resumed", receipt.resumed), ("notes", told)) if value}},
    }


def likeliest(completion: Completion, text_of: Callable[[list[int]], str]) -> list[list[LogProb]] | None:
    """Of each token its log-probability, and those of the other likeliest ones after it; None where none were asked for."""
    told = [((one.token, one.logprob), *(other for other in one.top if other[0] != one.token)) for one in completion.logprobs]
    return [[LogProb(token=text_of([token]), logprob=value) for token, value in each] for each in told] or None


def as_completion(response: ChatResponse) -> CompletionResponse:
    """A response to a text."""
    return CompletionResponse(
        text=response.message.content or "",
        additional_kwargs={**response.message.additional_kwargs, **response.additional_kwargs},
        raw=response.raw,
        logprobs=response.logprobs,
        delta=response.delta,
    )


def last(responses: Iterator[ChatResponse]) -> ChatResponse:
    """The whole answer, of a stream of what there was so far."""
    whole = deque(responses, maxlen=1).pop()  # only the last: each holds all of the answer so far
    whole.delta = None
    return whole


async def alast(responses: AsyncIterator[ChatResponse]) -> ChatResponse:
    """The same of an asynchronous stream."""
    whole = None
    async for response in responses:
        whole = response
    assert whole is not None, "a request ends with its completion, or raises"
    whole.delta = None
    return whole


def check_called(response: ChatResponse, demanded: bool) -> None:
    """Raise NoToolCallError for a response without calls, if one was demanded or begun."""
    told = response.raw if isinstance(response.raw, dict) else {}
    begun, cut = told.get("invalid_calls") or (), told.get("cut", False)
    if begun and (cut or demanded):
        raise NoToolCallError("; ".join(f"the call {one['name']!r} with arguments {one['arguments']!r} is {one['error']}" for one in begun))
    if demanded and cut:
        raise NoToolCallError(f"no call was made in {length_of(told)} tokens, and there were no more: raise max_tokens")
    if demanded:
        cure = "raise max_tokens, which ended it, or " if told.get("finish_reason") == "length" else ""
        said = f"the model called no tool but said {response.message.content!r:.200}"
        raise NoToolCallError(f"{said}; {cure}demand a call with tool_required=True")


def length_of(told: Mapping[str, Any]) -> int:
    """The tokens of an answer, from its `raw`."""
    return int(told["usage"]["completion_tokens"])
