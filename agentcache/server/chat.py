"""POST /v1/chat/completions and /v1/completions, whole and streamed: both are made of the same completion."""

from __future__ import annotations

import codecs
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import anyio.to_thread
from fastapi import APIRouter, Request
from fastapi.responses import Response

from ..answer.call_forms import load
from ..errors import ContextOverflowError
from ..types import Logprob, Message, Sampling
from .answers import EVENTS, Answer, EventStream, opened, sse, whole
from .errors import ServerError, refused
from .schemas import Body, ChatBody, CompletionBody, StreamOptions, constraint_of, schema_of, thinking_of
from .served_models import adapter_of
from .state import Caller, Serving
from .token_bytes import shown, token_bytes

if TYPE_CHECKING:
    from ..answer.parser import Delta
    from ..engine import Engine
    from ..stream import Completion, Stream

router = APIRouter(prefix="/v1")
DONE = "data: [DONE]\n\n"


@router.post("/chat/completions", tags=["openai"], responses=EVENTS)
async def chat(body: ChatBody, request: Request, state: Serving, tenant: Caller) -> Response:
    """Answer a conversation, with tools, a schema, or in words."""
    body.check_neutral()
    tools = body.tools or []
    constraint = constraint_of(tools, body.tool_choice, body.parallel_tool_calls, schema_of(body.response_format, "response_format"))
    limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    kwargs = {**thinking_of(body.effort), **(body.chat_template_kwargs or {})}

    said = [with_role(message) for message in body.messages]
    sampling = body.sampling(limit, body.stop, logprobs)
    ask = asking(body, said, tools, sampling=sampling, constraint=constraint, template_kwargs=kwargs or None)
    async with AsyncExitStack() as stack:
        asked = getattr(request.state, "group", None)  # by POST /query
        group = asked or state.tools.shown(tenant.namespace, body.messages, tools)
        answer = await opened(state, request, stack, body.model, "chatcmpl", ask, group)
        if not body.stream:
            return await whole(state, request, answer, _chat_whole(answer))
        events = _chat_events(answer, body.stream_options or StreamOptions(), logprobs is not None)
        return EventStream(state, stack.pop_all(), answer, events, failed=failed_event, end=DONE)


def asking(body: Body, prompt: Any, tools: Sequence[Any] = (), **options: Any) -> Callable[[Engine, str], Stream]:
    """The call of an engine that answers a body, under a namespace. prompt: messages, a text or token ids."""

    def ask(engine: Engine, namespace: str) -> Stream:
        volatile = tuple(body.volatile or ())
        adapter = adapter_of(engine, body.model)
        return engine.stream(prompt, tools, volatile=volatile, namespace=namespace, reuse=body.reuse, adapter=adapter, **options)

    return ask


def with_role(message: dict[str, Any]) -> dict[str, Any]:
    """A message in the roles that chat templates know, without the fields of OpenAI that say nothing: a refusal is its text."""
    said = {key: value for key, value in message.items() if value is not None and key not in ("refusal", "annotations", "function_call")}
    if said.get("role") in ("developer", "function"):
        said["role"] = "system" if said["role"] == "developer" else "tool"
    if isinstance(content := said.get("content"), list):
        said["content"] = [
            {"type": "text", "text": part["refusal"]} if isinstance(part, dict) and part.get("refusal") is not None else part
            for part in content
        ]
    if not said.get("content") and message.get("refusal"):
        said["content"] = message["refusal"]
    if "tool_calls" not in said and message.get("function_call"):  # as they were before there were several
        said["tool_calls"] = [{"type": "function", "function": message["function_call"]}]
    if isinstance(calls := said.get("tool_calls"), list):
        said["tool_calls"] = [_readable(call) for call in calls]
    if "audio" in said:
        raise refused("messages", {"audio": said["audio"]}, "this server reads no sound: send what it says as content")
    return said


def arguments_of(said: Any) -> Any:
    """Arguments of an earlier call. Agents send back a call that was cut or malformed, with an error as its result: shown as what it is."""
    wrong = isinstance(said, str) and said.strip() not in ("", "null") and not isinstance(load(said), Mapping)
    return {"invalid_arguments": said} if wrong else said


def _readable(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return call
    return {**call, "function": {**function, "arguments": arguments_of(function.get("arguments"))}}


def failed_event(error: ServerError) -> str:
    """The event that tells of an error in a stream that has begun."""
    return sse(error.body)


def message_of(message: Message) -> dict[str, Any]:
    """The assistant's message in OpenAI's shape."""
    out: dict[str, Any] = {"role": "assistant", "content": message.content or (None if message.tool_calls else ""), "refusal": None}
    if message.reasoning:
        out["reasoning_content"] = message.reasoning
    if message.tool_calls:
        out["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
            }
            for call in message.tool_calls
        ]
    return out


async def _chat_whole(answer: Answer) -> Mapping[str, Any]:
    completion = await answer.completion()
    logprobs = await _logprobs(answer.engine, completion.logprobs) if completion.logprobs else None
    choice = {"index": 0, "message": message_of(completion.message), "logprobs": logprobs, "finish_reason": completion.finish_reason}
    return {**_head(answer, "chat.completion"), "choices": [choice], "usage": completion.usage}


async def _chat_events(answer: Answer, options: StreamOptions, logprobs: bool) -> AsyncIterator[str]:
    head = _head(answer, "chat.completion.chunk")

    def chunk(delta: Mapping[str, Any], finish: str | None = None, told: Any = None, **more: Any) -> str:
        choice = {"index": 0, "delta": delta, "logprobs": told, "finish_reason": finish}
        usage = answer.stream.receipt.usage if options.continuous_usage_stats else None
        return sse({**head, "choices": [choice], **({"usage": usage} if options.include_usage else {}), **more})

    yield chunk({"role": "assistant", "content": ""})
    async for delta in answer.stream.adeltas():
        if (said := _delta(delta)) is not None:
            yield chunk(said)
    completion = answer.stream.completion
    told = await _logprobs(answer.engine, completion.logprobs) if logprobs else None
    yield chunk({}, completion.finish_reason, told, **answer.told())
    if options.include_usage:
        yield sse({**head, "choices": [], "usage": completion.usage})


def _delta(delta: Delta) -> dict[str, Any] | None:
    if delta.kind == "text":
        return {"content": delta.text}
    if delta.kind == "reasoning":
        return {"reasoning_content": delta.text}
    if delta.kind == "call":
        call = {"index": delta.index, "id": delta.id, "type": "function", "function": {"name": delta.text, "arguments": ""}}
        return {"tool_calls": [call]}
    return {"tool_calls": [{"index": delta.index, "function": {"arguments": delta.text}}]} if delta.text else None


def _head(answer: Answer, kind: str) -> dict[str, Any]:
    return {
        "id": answer.id,
        "object": kind,
        "created": answer.created,
        "model": answer.record.model,
        "system_fingerprint": answer.fingerprint,
    }


async def _logprobs(engine: Engine, logprobs: Sequence[Logprob]) -> dict[str, Any]:
    return {"content": await logprobs_of(engine, logprobs), "refusal": None}


async def logprobs_of(engine: Engine, logprobs: Sequence[Logprob]) -> list[dict[str, Any]]:
    """Tokens' log-probabilities in OpenAI's shape. Made on a thread: 20 alternatives of each token take a while."""

    def told(token: int, value: float) -> dict[str, Any]:
        said = token_bytes(engine.tokenizer, token)
        return {"token": shown(said), "bytes": list(said), "logprob": value}

    def each() -> list[dict[str, Any]]:
        return [{**told(one.token, one.logprob), "top_logprobs": [told(*other) for other in one.top]} for one in logprobs]

    return await anyio.to_thread.run_sync(each)


@router.post("/completions", tags=["openai"], responses=EVENTS)
async def complete(body: CompletionBody, request: Request, state: Serving, tenant: Caller) -> Response:
    """Continue a text, or each of several: the answers are computed together. `echo` tells the prompts, too."""
    body.check_neutral()
    prompts: list[str | list[int]] = list(body.prompt)  # type: ignore[arg-type]
    if body.echo and body.stream:
        raise refused("stream", True, "an answer with echo is told whole")
    if body.echo and body.logprobs is not None and body.stop:
        raise refused("stop", body.stop, "cannot be honoured beside echo and logprobs: leave it out")
    if body.max_tokens == 0 and not body.echo:
        raise refused("max_tokens", 0, "must be at least 1 without echo")
    if len(prompts) > (most := state.tenants.most(tenant)):
        raise refused("prompt", f"{len(prompts)} texts", f"at most {most} are computed at once: send fewer")

    sampling = body.sampling(16 if body.max_tokens is None else body.max_tokens or 1, body.stop, body.logprobs)
    async with AsyncExitStack() as stack:
        answers: list[Answer] = []
        for prompt in prompts:
            answers.append(await opened(state, request, stack, body.model, "cmpl", _continuing(body, prompt, sampling)))
        answers[0].others = answers[1:]
        if not body.stream:
            return await whole(state, request, answers[0], _text_whole(answers, body, prompts))
        events = _text_events(answers, body.stream_options or StreamOptions())
        return EventStream(state, stack.pop_all(), answers[0], events, failed=failed_event, end=DONE)


def _ids(engine: Engine, prompt: str | list[int], namespace: str) -> list[int]:
    """Token ids of a prompt."""
    return list(engine.renderer.render(prompt, namespace=namespace, most_tokens=engine.model.context_tokens).ids)  # type: ignore[arg-type]


def _continuing(body: CompletionBody, prompt: str | list[int], sampling: Sampling) -> Callable[[Engine, str], Stream]:
    """The call of an engine that continues a prompt. To be told of its tokens, it is decoded as a forced answer to the first of them."""

    def ask(engine: Engine, namespace: str) -> Stream:
        given, settings = prompt, sampling
        if body.echo and body.logprobs is not None:
            ids, context = _ids(engine, prompt, namespace), engine.model.context_tokens
            most = 0 if body.max_tokens == 0 and len(ids) > 1 else sampling.max_tokens  # a scored prompt may fill the context
            if len(ids) + most > context:
                raise ContextOverflowError(len(ids), context, most)
            forced, end = tuple(ids[1:]), len(ids) - 1 + most
            open_ended = sampling.ignore_eos or most <= 1 or ids[-1] in engine.model.stop_ids  # what follows an end is cut in `_told`
            given, settings = ids[:1], replace(sampling, forced=forced, max_tokens=end, ignore_eos=open_ended)
        return asking(body, given, sampling=settings)(engine, namespace)

    return ask


async def _text_whole(answers: Sequence[Answer], body: CompletionBody, prompts: Sequence[str | list[int]]) -> Mapping[str, Any]:
    """Receipts of all but the first one stand in their choices."""
    done = [await answer.completion() for answer in answers]
    told = [await anyio.to_thread.run_sync(_told, *each) for each in zip([body] * len(done), answers, prompts, done)]
    choices = [choice | {"index": index} | (answers[index].told() if index else {}) for index, (choice, _) in enumerate(told)]
    return {**_head(answers[0], "text_completion"), "choices": choices, "usage": _sum([usage for _, usage in told])}


def _told(body: CompletionBody, answer: Answer, prompt: str | list[int], done: Completion) -> tuple[dict[str, Any], dict[str, Any]]:
    """The choice of one prompt, with the prompt before it if it is to be echoed; and its usage."""
    choice, engine = _text_choice(0, answer, done.text, done), answer.engine
    if not body.echo:
        return choice, done.usage
    ids, scored, text = _ids(engine, prompt, answer.record.namespace), body.logprobs is not None, done.text
    start = len(ids) - 1 if scored else 0  # of the answer among the decoded tokens
    new = done.ids[start:][: body.max_tokens]
    if scored:
        if end := 0 if body.ignore_eos else next((at for at, token in enumerate(new, 1) if token in engine.model.stop_ids), 0):
            new, choice["finish_reason"] = new[:end], "stop"
        choice["logprobs"] = _text_logprobs(engine, done.logprobs[: start + len(new)], ids[:1])
        said = [token_bytes(engine.tokenizer, token) for token in new if token not in engine.tokenizer.all_special_ids]
        text = b"".join(said).decode("utf-8", "replace")
    before = prompt if isinstance(prompt, str) else str(engine.tokenizer.decode(ids))
    usage = {**done.usage, "prompt_tokens": len(ids), "completion_tokens": len(new), "total_tokens": len(ids) + len(new)}
    return {**choice, "text": before + text if new else before}, usage


async def _text_events(answers: Sequence[Answer], options: StreamOptions) -> AsyncIterator[str]:
    head = _head(answers[0], "text_completion")

    def usage(told: bool | None) -> dict[str, Any]:
        return {"usage": _sum([answer.stream.receipt.usage for answer in answers])} if told and options.include_usage else {}

    for index, answer in enumerate(answers):
        async for piece in answer.stream:
            if piece.text:
                yield sse({**head, "choices": [_text_choice(index, answer, piece.text)], **usage(options.continuous_usage_stats)})
        last = await anyio.to_thread.run_sync(_text_choice, index, answer, "", answer.stream.completion)
        yield sse({**head, "choices": [last], **usage(options.continuous_usage_stats), **answer.told()})
    if options.include_usage:
        yield sse({**head, "choices": [], **usage(True)})


def _text_choice(index: int, answer: Answer, text: str, done: Completion | None = None) -> dict[str, Any]:
    """done: of the last piece."""
    finish = None if done is None else "length" if done.finish_reason == "length" else "stop"
    logprobs = None if done is None else _text_logprobs(answer.engine, done.logprobs)
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}


def _sum(counts: Sequence[Any]) -> Any:
    if isinstance(counts[0], Mapping):
        return {name: _sum([one[name] for one in counts]) for name in counts[0]}
    return sum(counts)


def _text_logprobs(engine: Engine, logprobs: Sequence[Logprob], first: Sequence[int] = ()) -> dict[str, Any] | None:
    """The older shape of log-probabilities, in four lists; None if none were asked for. first: a token before them that has none."""
    if not logprobs and not first:
        return None
    said = [token_bytes(engine.tokenizer, token) for token in (*first, *(one.token for one in logprobs))]
    whole = codecs.getincrementaldecoder("utf-8")("replace")  # a character stands where its last byte comes
    ends = accumulate(len(whole.decode(each)) for each in said)
    none = [None] * len(first)
    top = [{shown(token_bytes(engine.tokenizer, token)): value for token, value in one.top} for one in logprobs]
    return {
        "tokens": [shown(each) for each in said],
        "token_logprobs": [*none, *(one.logprob for one in logprobs)],
        "top_logprobs": [*none, *top],
        "text_offset": [0, *ends][:-1],
    }
