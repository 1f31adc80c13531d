"""POST /v1/messages, Anthropic's API, whole and streamed: its blocks become messages of a chat, and the answer becomes blocks."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

import anyio.to_thread
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from ..errors import ContextOverflowError
from .answers import EVENTS, Answer, EventStream, opened, running, sse, whole
from .chat import arguments_of, asking
from .errors import NO_THREADS, AnthropicProblem, ServerError, problems, refused
from .schemas import MessagesBody, constraint_of, schema_of, thinking_of
from .served_models import adapter_of
from .state import Caller, Serving

if TYPE_CHECKING:
    from ..answer.parser import Delta
    from ..receipt import Receipt
    from ..stream import Completion

ROUTE = "/v1/messages"
BILLING = "x-anthropic-billing-header:"  # begins a block of Claude Code's system text for its provider: it may change at every request
READ = ("tool_result", "thinking", "redacted_thinking", "tool_use")  # blocks that are no text; a redacted thought has nothing to read
SIGNATURE = "agentcache"  # of thoughts: some clients send back only those that have one
NEUTRAL: dict[str, Any] = {"type": "custom", "defer_loading": False, "allowed_callers": ["direct"], "input_examples": []}  # of a tool
KEPT = {"type": "clear_thinking_20251015", "keep": "all"}  # the edit of a context that changes nothing

router = APIRouter(prefix=ROUTE, tags=["anthropic"], responses=problems(AnthropicProblem))


@router.post("", responses=EVENTS)
async def create(body: MessagesBody, request: Request, state: Serving, tenant: Caller) -> Response:
    """Answer a conversation in blocks: thinking, text, calls of tools."""
    said, tools, kwargs = _prompt(body)
    choice, parallel = _choice(body)
    form = body.output_config.format if body.output_config else None
    constraint = constraint_of(tools, choice, parallel, schema_of(form, "output_config.format"))
    sampling = body.sampling(body.max_tokens, body.stop_sequences, None)
    ask = asking(body, said, tools, sampling=sampling, constraint=constraint, template_kwargs=kwargs)
    async with AsyncExitStack() as stack:
        answer = await opened(state, request, stack, body.model, "msg", ask, state.tools.shown(tenant.namespace, said, tools))
        if not body.stream:
            return await whole(state, request, answer, _whole(answer))
        return EventStream(state, stack.pop_all(), answer, _events(answer), failed=_failed, end="")


@router.post("/count_tokens")
async def count(body: MessagesBody, request: Request, state: Serving, tenant: Caller) -> Response:
    """Count the tokens of a prompt, computing none; of one far beyond the context, estimate them."""
    said, tools, kwargs = _prompt(body)
    async with running(state, request, body.model) as engine:

        def counted() -> int:
            adapter, volatile = adapter_of(engine, body.model), tuple(body.volatile or ())
            asked: dict[str, Any] = {"volatile": volatile, "namespace": tenant.namespace, "adapter": adapter, "template_kwargs": kwargs}
            try:
                return engine.probe(said, tools, **asked, most_tokens=engine.model.context_tokens).prompt_tokens
            except ContextOverflowError as error:
                return error.prompt_tokens

        return JSONResponse({"input_tokens": await anyio.to_thread.run_sync(counted)})


# -- what is asked -------------------------------------------------------------------------------------------------


def _prompt(body: MessagesBody) -> tuple[list[dict[str, Any]], list[dict[str, Any]], dict[str, Any] | None]:
    """Messages and tools in chat's shape, and keywords of the chat template."""
    body.check_neutral()
    if body.thread is not None:
        rule = "no conversation is held here: send all of its messages"
        raise ServerError(400, f"thread={body.thread!r:.200}: {rule}", param="thread", code=NO_THREADS)
    for number, edit in enumerate(body.context_management.edits if body.context_management else []):
        if edit != KEPT:
            raise refused(f"context_management.edits[{number}]", edit, f"only {KEPT!r} can be honoured: nothing is cleared here")
    tools = [_tool(number, tool) for number, tool in enumerate(body.tools or [])]
    return messages_of(body.messages, body.system), tools, thinking_of(body.effort) or None


def messages_of(messages: Sequence[Mapping[str, Any]], system: str | list[dict[str, Any]] | None = None) -> list[dict[str, Any]]:
    """A conversation in chat's shape: each result of a tool is a message of its own, before what else its turn says."""
    blocks = [{"type": "text", "text": system}] if isinstance(system, str) else system or []
    told = [one for one in blocks if not str(one.get("text", "")).startswith(BILLING)]
    out: list[dict[str, Any]] = [{"role": "system", "content": _text_of("system", told)}] if told else []
    for number, message in enumerate(messages):
        role, place = message.get("role"), f"messages[{number}].content"
        content = message.get("content") or ""
        blocks = content if isinstance(content, list) else [{"type": "text", "text": content}]
        results = [_result(place, block) for block in blocks if _kind(block) == "tool_result"]
        thoughts = [str(block.get("thinking", "")) for block in blocks if _kind(block) == "thinking"]
        calls = [_call(block) for block in blocks if _kind(block) == "tool_use"]
        rest = [block for block in blocks if _kind(block) not in READ]
        between = "" if role == "assistant" else "\n"  # an answer's blocks are pieces of one text, as the model wrote it
        turn: dict[str, Any] = {"role": role, "content": _text_of(place, rest, between)}
        if thoughts:
            turn["reasoning_content"] = "".join(thoughts)
        if calls:
            turn["tool_calls"] = calls
        out += results if results and turn["content"] == "" else [*results, turn]
    if messages and messages[-1].get("role") == "assistant":
        raise refused(f"messages[{len(messages) - 1}].role", "assistant", "a started answer cannot be continued: end with a user's message")
    return out


def _kind(block: Any) -> Any:
    return block.get("type") if isinstance(block, Mapping) else None


def _text_of(place: str, content: Any, between: str = "\n") -> str:
    """The text of blocks, with titles of documents and search results."""
    if isinstance(content, str):
        return content
    texts: list[str] = []
    for block in content if isinstance(content, list) else [content] if content else []:
        kind = _kind(block)
        source = block.get("source") if kind == "document" else None
        cites = block.get("citations") if kind in ("document", "search_result") else None
        if isinstance(cites, Mapping) and cites.get("enabled"):
            raise refused(f"{place}.citations", cites, "answers cite nothing here: leave it out")
        if kind == "text" and isinstance(block.get("text"), str):
            texts.append(block["text"])
        elif kind == "search_result":
            texts += [f"{block.get('title')} ({block.get('source')})", _text_of(place, block.get("content"))]
        elif isinstance(source, Mapping) and source.get("type") in ("text", "content"):
            texts += [str(block[name]) for name in ("title", "context") if block.get(name)]
            texts.append(_text_of(place, source.get("data", source.get("content"))))
        else:
            raise refused(place, block, "only text can be given: this server reads no images or files, and runs no tools of its own")
    return between.join(texts)


def _result(place: str, block: Mapping[str, Any]) -> dict[str, Any]:
    """The result of a call. Chat templates have no mark of errors: the text says it."""
    text = _text_of(place, block.get("content"))
    return {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": f"Error: {text}" if block.get("is_error") else text}


def _call(block: Mapping[str, Any]) -> dict[str, Any]:
    function = {"name": block.get("name"), "arguments": arguments_of(block.get("input"))}
    return {"id": block.get("id"), "type": "function", "function": function}


def _tool(number: int, tool: Mapping[str, Any]) -> dict[str, Any]:
    """A tool in chat's shape. Tools that a provider runs itself are refused."""
    for name, value in NEUTRAL.items():
        if tool.get(name) not in (None, value):
            rule = f"only {value!r} can be honoured: this server shows all tools, and runs none of its own"
            raise refused(f"tools[{number}].{name}", tool[name], rule)
    known = {"name": "name", "description": "description", "input_schema": "parameters", "strict": "strict"}
    return {"type": "function", "function": {ours: tool[name] for name, ours in known.items() if tool.get(name) is not None}}


def _choice(body: MessagesBody) -> tuple[str | dict[str, Any] | None, bool | None]:
    """`tool_choice` as chat has it, and whether several calls are allowed; None: as the model likes."""
    if (chosen := body.tool_choice) is None:
        return None, None
    names = [tool.get("name") for tool in body.tools or []]
    if (chosen.type == "any" and not names) or (chosen.type == "tool" and chosen.name not in names):
        raise refused("tool_choice", chosen.model_dump(exclude_none=True), f"there is no such tool: tools has {names!r:.200}")
    named = {"type": "function", "function": {"name": chosen.name}}
    return named if chosen.type == "tool" else "required" if chosen.type == "any" else chosen.type, not chosen.disable_parallel_tool_use


# -- what is answered ----------------------------------------------------------------------------------------------


async def _whole(answer: Answer) -> Mapping[str, Any]:
    completion = await answer.completion()
    message = completion.message
    content: list[dict[str, Any]] = []
    if message.reasoning:
        content.append({"type": "thinking", "thinking": message.reasoning, "signature": SIGNATURE})
    if message.content or not message.tool_calls:
        content.append({"type": "text", "text": message.content})
    content += [{"type": "tool_use", "id": call.id, "name": call.name, "input": call.arguments} for call in message.tool_calls]
    return {**_head(answer), "content": content, **_end(completion), "usage": usage_of(completion.receipt)}


def _head(answer: Answer) -> dict[str, Any]:
    return {"id": answer.id, "type": "message", "role": "assistant", "model": answer.record.model}


def _end(completion: Completion) -> dict[str, Any]:
    """The reason of the answer's end."""
    reason = {"length": "max_tokens", "tool_calls": "tool_use"}.get(completion.finish_reason or "", "end_turn")
    if reason == "end_turn" and completion.stop:
        reason = "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": completion.stop or None}


def usage_of(receipt: Receipt) -> dict[str, Any]:
    """Token counts in Anthropic's shape, where `input_tokens` are those that were not cached."""
    return {
        "input_tokens": receipt.prompt_tokens - receipt.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": receipt.cached_tokens,
        "output_tokens": receipt.completion_tokens,
    }


async def _events(answer: Answer) -> AsyncIterator[str]:
    """All events, in order. What is cached of the prompt is known once the answer is there: the last ones tell it, and the receipt."""
    writer = BlockWriter()
    start = {**_head(answer), "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage_of(answer.stream.receipt)}
    yield _event("message_start", message=start)
    async for delta in answer.stream.adeltas():
        for event in writer.take(delta):
            yield event
    completion = answer.stream.completion
    for event in writer.end():
        yield event
    yield _event("message_delta", delta=_end(completion), usage=usage_of(completion.receipt))
    yield _event("message_stop", **answer.told())


def _failed(error: ServerError) -> str:
    """The event that tells of an error in a stream that has begun."""
    return sse(error.anthropic, "error")


def _event(kind: str, **said: Any) -> str:
    return sse({"type": kind, **said}, kind)


class BlockWriter:
    """Writes the events of an answer's blocks, one after the other."""

    def __init__(self) -> None:
        self._index, self._kind = -1, ""

    def take(self, delta: Delta) -> Iterator[str]:
        """Events of one delta."""
        if delta.kind == "text":
            if self._kind != "text":
                yield from self._begin({"type": "text", "text": ""})
            yield self._grow("text_delta", text=delta.text)
        elif delta.kind == "reasoning":
            if self._kind != "thinking":
                yield from self._begin({"type": "thinking", "thinking": "", "signature": ""})
            yield self._grow("thinking_delta", thinking=delta.text)
        elif delta.kind == "call":
            yield from self._begin({"type": "tool_use", "id": delta.id, "name": delta.text, "input": {}})
        elif delta.kind == "arguments" and delta.text:
            yield self._grow("input_json_delta", partial_json=delta.text)

    def end(self) -> Iterator[str]:
        """End the last block; an answer of nothing is an empty text."""
        if not self._kind:
            yield from self._begin({"type": "text", "text": ""})
        yield from self._close()

    def _begin(self, block: dict[str, Any]) -> Iterator[str]:
        if self._kind:
            yield from self._close()
        self._index, self._kind = self._index + 1, block["type"]
        yield _event("content_block_start", index=self._index, content_block=block)

    def _close(self) -> Iterator[str]:
        if self._kind == "thinking":
            yield self._grow("signature_delta", signature=SIGNATURE)
        yield _event("content_block_stop", index=self._index)

    def _grow(self, kind: str, **said: str) -> str:
        return _event("content_block_delta", index=self._index, delta={"type": kind, **said})
