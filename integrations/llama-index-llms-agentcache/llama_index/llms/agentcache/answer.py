"""A completion's text, chunk by chunk, into LlamaIndex responses. Knows nothing of engines, threads or prompts.

What a response shows grows only by what is certain: text that may turn out to be a tool call is held back, and so is white space that may
turn out to stand at an end. So the deltas of a stream, joined, are the content of its last response.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

from llama_index.core.base.llms.types import ChatMessage, ChatResponse, ContentBlock, MessageRole, TextBlock, ThinkingBlock, ToolCallBlock

from agentcache import Completion, Message, Receipt

_THINK, _THOUGHT = "<think>", "</think>"
_CALLS = ("<tool_call>", "[TOOL_CALLS]")  # where a call starts inside a text
_BARE_CALL = '{"name"'  # a whole text that starts so is a call
_FIGURES = ("prompt_tokens", "cached_tokens", "computed_tokens", "spliced_tokens", "disk_tokens", "exact_until", "bitwise", "precision")
_TIMES = ("ttft_ms", "prefill_ms", "decode_ms", "saved_ms")


def _begins(text: str, word: str) -> bool:
    return text.startswith(word) or word.startswith(text)


@dataclass(slots=True)
class Answer:
    """One completion on its way to the caller. calls: whether tools are offered, so that calls in the text are calls.

    parallel: whether more than the first call is kept. notes: said in `raw`.
    """

    calls: bool = False
    parallel: bool = True
    notes: tuple[str, ...] = ()
    _text: str = field(default="", init=False)
    _thought: str = field(default="", init=False)
    _shown: str = field(default="", init=False)

    def feed(self, text: str) -> ChatResponse | None:
        """The response so far, if `text` adds something to it."""
        self._text += text
        thinking, rest = _split(self._text)
        ready = self._certain(rest)
        thought, said = thinking[len(self._thought) :], ready[len(self._shown) :]
        if not thought and not said:
            return None
        self._thought, self._shown = thinking, ready
        return _response(_blocks(thinking or None, ready), said, thought)

    def _certain(self, text: str) -> str:
        """The start of `text` that is content whatever comes."""
        text = text.lstrip()
        if self.calls:
            if text and _begins(text, _BARE_CALL):
                return ""
            starts = [at for word in _CALLS if (at := text.find(word)) >= 0]
            text = text[: min(starts)] if starts else text[: len(text) - max(_overlap(text, word) for word in _CALLS)]
        return text.rstrip()

    def finish(self, completion: Completion) -> ChatResponse:
        """The whole response: blocks, usage, receipt, and as delta what was not shown yet."""
        message = self._message(completion)
        calls = message.tool_calls if self.parallel else message.tool_calls[:1]
        content = message.content
        said = content[len(self._shown) :] if content.startswith(self._shown) else ""
        thought = (message.reasoning or "").removeprefix(self._thought)
        blocks = _blocks(message.reasoning, content, always=not calls)
        for number, call in enumerate(calls):
            blocks.append(ToolCallBlock(tool_call_id=_call_id(completion, number), tool_name=call.name, tool_kwargs=dict(call.arguments)))
        response = _response(blocks, said, thought)
        response.raw = raw(completion.receipt, self.notes)
        return response

    def _message(self, completion: Completion) -> Message:
        if self.calls and completion.message.tool_calls:
            return completion.message
        if not completion.text.lstrip().startswith(_THINK):
            return Message("assistant", completion.text.strip())
        thinking, text = _split(completion.text)
        return Message("assistant", text.strip(), reasoning=thinking)


def _split(text: str) -> tuple[str, str]:
    """(reasoning, text behind it); what may still become the start of reasoning is neither."""
    start = text.lstrip()
    if not start.startswith(_THINK):
        return "", "" if start and _THINK.startswith(start) else text
    thought, closed, rest = start[len(_THINK) :].partition(_THOUGHT)
    thought = thought.removeprefix("\n")
    if closed:
        return thought.removesuffix("\n"), rest
    thought = thought[: len(thought) - _overlap(thought, _THOUGHT)]
    return thought.removesuffix("\n"), ""


def _overlap(text: str, word: str) -> int:
    """Length of the longest end of `text` that starts `word`."""
    return next((size for size in range(min(len(word) - 1, len(text)), 0, -1) if text.endswith(word[:size])), 0)


def _blocks(thinking: str | None, content: str, always: bool = False) -> list[ContentBlock]:
    blocks: list[ContentBlock] = [] if thinking is None else [ThinkingBlock(content=thinking)]
    if content or always:
        blocks.append(TextBlock(text=content))
    return blocks


def _response(blocks: list[ContentBlock], said: str, thought: str) -> ChatResponse:
    extra = {"thinking_delta": thought} if thought else {}
    return ChatResponse(message=ChatMessage(role=MessageRole.ASSISTANT, blocks=blocks), delta=said, additional_kwargs=extra)


def _call_id(completion: Completion, number: int) -> str:
    """An id that a replay gives again and that no other call of the conversation has."""
    receipt = completion.receipt
    said = f"{receipt.prompt_tokens} {completion.ids} {number}"
    return f"call_{hashlib.blake2b(said.encode(), digest_size=8).hexdigest()}"


def raw(receipt: Receipt, notes: tuple[str, ...] = ()) -> dict[str, Any]:
    """What a response tells beside its text, small and plain JSON: agents copy it into every event.

    usage has OpenAI's shape, in which tracers and token counters look for cached tokens.
    """
    figures: dict[str, Any] = {name: getattr(receipt, name) for name in _FIGURES}
    figures |= {name: round(getattr(receipt, name), 1) for name in _TIMES}
    whole = receipt.as_dict()
    figures["refusals"] = whole["refusals"][:4]
    told = [*whole["notes"][:4], *notes]
    return {
        "model": receipt.model,
        "finish_reason": receipt.finish_reason,
        "usage": receipt.usage,
        "receipt": {**figures, "notes": told} if told else figures,
    }
