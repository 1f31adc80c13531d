"""POST /v1/responses and the stored responses. A streamed response is built by the events that it tells: whole, it is built by the same."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack
from copy import deepcopy
from typing import TYPE_CHECKING, Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse, Response

from .answers import EVENTS, Answer, EventStream, Json, opened, sse, whole
from .chat import DONE, arguments_of, asking, logprobs_of, with_role
from .errors import ServerError, refused
from .schemas import ResponseBody, constraint_of, schema_of, thinking_of
from .state import Caller, Serving
from .stored_responses import Items, StoredResponse

if TYPE_CHECKING:
    from ..answer.parser import Delta
    from ..stream import Completion

INCLUDED = ("message.output_text.logprobs", "reasoning.encrypted_content")
OWN = "agentcache:"  # before a thought in the field that clients without stored responses send back; others' fields hold what nobody reads

router = APIRouter(prefix="/v1")


@router.post("/responses", tags=["openai"], responses=EVENTS)
async def respond(body: ResponseBody, request: Request, state: Serving, tenant: Caller) -> Response:
    """Answer in items: messages, function calls, reasoning."""
    body.check_neutral()
    for name in body.include or ():
        if name not in INCLUDED:
            raise refused("include", name, f"only {' or '.join(map(repr, INCLUDED))} can be honoured")
    namespace = tenant.namespace
    before, chars = Items(), 0
    if body.previous_response_id is not None:
        earlier = state.responses.find(namespace, body.previous_response_id)
        before, chars = [*earlier.before, *earlier.input, *earlier.response["output"]], earlier.conversation_chars
    given = [{"role": "user", "content": body.input}] if isinstance(body.input, str) else body.input
    given = state.responses.resolved(namespace, given)
    messages = messages_of([*before, *given], body.instructions)
    tools = [_tool(number, tool) for number, tool in enumerate(body.tools or [])]
    form = body.text.format if body.text else None
    constraint = constraint_of(tools, body.tool_choice, body.parallel_tool_calls, schema_of(form, "text.format"))
    logprobs = (body.top_logprobs or 0) if INCLUDED[0] in (body.include or ()) else None
    kwargs = thinking_of(body.reasoning.effort if body.reasoning else None)

    sampling = body.sampling(body.max_output_tokens, None, logprobs)
    ask = asking(body, messages, tools, sampling=sampling, constraint=constraint, template_kwargs=kwargs or None)
    async with AsyncExitStack() as stack:
        answer = await opened(state, request, stack, body.model, "resp", ask, state.tools.shown(namespace, messages, tools))

        def keep(response: dict[str, Any]) -> None:
            if body.store is not False:
                kept = [item if item.get("id") else {"type": "message", **item, "id": f"msg_{secrets.token_hex(12)}"} for item in given]
                state.responses.put(namespace, answer.id, StoredResponse(response, kept, before, chars))

        writer = ResponseWriter(answer, body, keep)
        if body.stream:
            events = (sse(event, event["type"]) async for event in writer.events())
            return EventStream(state, stack.pop_all(), answer, events, failed=writer.failed, end=DONE)
        return await whole(state, request, answer, _finished(writer))


async def _finished(writer: ResponseWriter) -> dict[str, Any]:
    async for _ in writer.events():
        pass
    return writer.response


class ResponseWriter:
    """Writes one response as deltas come, and tells the events of it. keep: takes it whole, before the last event is told."""

    def __init__(self, answer: Answer, body: ResponseBody, keep: Callable[[dict[str, Any]], None]) -> None:
        self._answer, self._keep, self._number = answer, keep, 0
        self._logprobs, self._carried = (name in (body.include or ()) for name in INCLUDED)
        self._item: dict[str, Any] | None = None  # the one being written
        self.output: Items = []  # those written so far
        reasoning = body.reasoning.effort if body.reasoning else None
        self.response: dict[str, Any] = {
            "id": answer.id,
            "object": "response",
            "created_at": answer.created,
            "status": "in_progress",
            "completed_at": None,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": None,
            "model": answer.record.model,
            "output": self.output,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "prompt_cache_key": body.prompt_cache_key,
            "reasoning": {"effort": reasoning, "summary": None},
            "safety_identifier": body.safety_identifier,
            "service_tier": "default",
            "store": body.store is not False,
            "temperature": 0.0 if body.temperature is None else body.temperature,
            "text": {"format": (body.text.format if body.text else None) or {"type": "text"}, "verbosity": "medium"},
            "tool_choice": body.tool_choice or "auto",
            "tools": [{"strict": None, "parameters": None, **tool} for tool in body.tools or []],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "truncation": "disabled",
            "usage": None,
            "user": body.user,
            "metadata": body.metadata or {},
        }

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        """All events, in order; the last one holds the whole response."""
        yield self._event("response.created", response=self._told())
        yield self._event("response.in_progress", response=self._told())
        async for delta in self._answer.stream.adeltas():
            for event in self._take(delta):
                yield event
        completion = self._answer.stream.completion
        told = await logprobs_of(self._answer.engine, completion.logprobs) if self._logprobs else []
        for event in self._close(completion, told):
            yield event
        cut = completion.finish_reason == "length" or completion.cut
        status = "incomplete" if cut else "completed"
        self.response |= {
            "status": status,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "completed_at": None if cut else self._answer.created,
            "usage": usage_of(completion),
        }
        last = self._event(f"response.{status}", response={**self._told(), **self._answer.told()})
        self._keep(self.response)
        yield last

    def failed(self, error: ServerError) -> str:
        """The event that tells of an error in a stream that has begun."""
        told = error.body["error"]
        self.response |= {"status": "failed", "error": {"code": "server_error", "message": told["message"]}}
        event = self._event("response.failed", response=self._told())
        return sse(event, event["type"])

    def _told(self) -> dict[str, Any]:
        """The response so far. What the request gave is told as it came, however deep it is nested."""
        return {**self.response, "output": deepcopy(self.output)}

    def _event(self, kind: str, **said: Any) -> dict[str, Any]:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **said}

    def _take(self, delta: Delta) -> list[dict[str, Any]]:
        """Events of one delta."""
        if delta.kind in ("text", "reasoning"):
            return self._text("message" if delta.kind == "text" else "reasoning", delta.text)
        if delta.kind == "call":
            item = {"type": "function_call", "status": "in_progress", "call_id": delta.id, "name": delta.text, "arguments": ""}
            return [*self._done(), *self._open("fc", item)]
        if delta.kind == "arguments" and self._item is not None:
            self._item["arguments"] += delta.text
            return [self._of_item("response.function_call_arguments.delta", delta=delta.text)] if delta.text else []
        if delta.kind == "cut" and self._item is not None:
            self._item["status"] = "incomplete"
        return []

    def _text(self, kind: str, text: str) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = []
        if self._item is None or self._item["type"] != kind:
            item: dict[str, Any] = {"type": "reasoning", "summary": [], "content": [], "status": "in_progress"}
            part: dict[str, Any] = {"type": "reasoning_text", "text": ""}
            if kind == "message":
                item = {"type": "message", "status": "in_progress", "role": "assistant", "content": []}
                part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            events = [*self._done(), *self._open("msg" if kind == "message" else "rs", item)]
            item["content"].append(part)
            events.append(self._of_item("response.content_part.added", content_index=0, part=dict(part)))
        assert self._item is not None
        part = self._item["content"][0]
        part["text"] += text
        return [*events, self._of_part("delta", part, delta=text)]

    def _open(self, prefix: str, item: dict[str, Any]) -> list[dict[str, Any]]:
        item["id"] = f"{prefix}_{secrets.token_hex(12)}"
        self.output.append(item)
        self._item = item
        return [self._event("response.output_item.added", output_index=len(self.output) - 1, item=deepcopy(item))]

    def _of_item(self, kind: str, **said: Any) -> dict[str, Any]:
        assert self._item is not None
        return self._event(kind, item_id=self._item["id"], output_index=len(self.output) - 1, **said)

    def _of_part(self, what: str, part: dict[str, Any], **said: Any) -> dict[str, Any]:
        more = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
        return self._of_item(f"response.{part['type']}.{what}", content_index=0, **said, **more)

    def _done(self) -> list[dict[str, Any]]:
        """Events that end the item being written."""
        item, events = self._item, list[dict[str, Any]]()
        if item is None:
            return events
        if item["status"] == "in_progress":
            item["status"] = "completed"
        if item["type"] == "function_call":
            events.append(self._of_item("response.function_call_arguments.done", name=item["name"], arguments=item["arguments"]))
        else:
            part = item["content"][0]
            if item["type"] == "reasoning" and self._carried:
                item["encrypted_content"] = OWN + part["text"]
            events.append(self._of_part("done", part, text=part["text"]))
            events.append(self._of_item("response.content_part.done", content_index=0, part=dict(part)))
        events.append(self._event("response.output_item.done", output_index=len(self.output) - 1, item=deepcopy(item)))
        self._item = None
        return events

    def _close(self, completion: Completion, logprobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Events that end the last item; an answer of nothing is an empty message."""
        events = [] if self.output else self._text("message", "")
        if self._item is not None and (completion.cut or completion.finish_reason == "length"):
            self._item["status"] = "incomplete"
        if self._logprobs and self._item is not None and self._item["type"] == "message":
            self._item["content"][0]["logprobs"] = logprobs
        return [*events, *self._done()]


def usage_of(completion: Completion) -> dict[str, Any]:
    """Token counts in the shape of responses. Every computed token of the prompt is kept."""
    receipt = completion.receipt
    return {
        "input_tokens": receipt.prompt_tokens,
        "input_tokens_details": {"cached_tokens": receipt.cached_tokens, "cache_write_tokens": receipt.computed_tokens},
        "output_tokens": receipt.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": receipt.reasoning_tokens},
        "total_tokens": receipt.prompt_tokens + receipt.completion_tokens,
    }


def messages_of(items: Items, instructions: str | None = None) -> list[dict[str, Any]]:
    """A conversation in chat's shape. Reasoning, calls and a text that follow each other are one assistant turn, in any order."""
    out: list[dict[str, Any]] = [{"role": "system", "content": instructions}] if instructions else []
    answered: dict[str, str] = {}  # the text of each result so far, by the call's id as it came
    for number, item in enumerate(items):
        kind = item.get("type", "message")
        if kind == "message":
            role, text = item.get("role"), _text_of(number, item.get("content"))
            last = out[-1] if out else {"role": None}
            if role == "assistant" == last["role"] and not last.get("content"):
                last["content"] = text
            else:
                out.append(with_role({"role": role, "content": text}))
        elif kind == "reasoning":
            carried = str(item.get("encrypted_content") or "")
            own = carried.removeprefix(OWN) if carried.startswith(OWN) else ""
            thought = _text_of(number, item.get("content") or item.get("summary") or own)
            out.append({"role": "assistant", "content": "", "reasoning_content": thought})
        elif kind == "function_call":
            if not out or out[-1]["role"] != "assistant":
                out.append({"role": "assistant", "content": ""})
            function = {"name": item.get("name"), "arguments": arguments_of(item.get("arguments"))}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            out[-1].setdefault("tool_calls", []).append(call)
            answered.pop(repr(call["id"]), None)
        elif kind == "function_call_output":
            text, known = _text_of(number, item.get("output")), repr(item.get("call_id"))
            if item.get("call_id") is None or answered.get(known) != text:  # Semantic Kernel sends earlier outputs again
                out.append(with_role({"role": "tool", "tool_call_id": item.get("call_id"), "content": text}))
            answered[known] = text
        else:
            raise refused(f"input[{number}].type", kind, "only messages, reasoning, function calls and their outputs can be given")
    return out


def _text_of(number: int, content: Any) -> Any:
    if not isinstance(content, list):
        return content
    texts = []
    for part in content:
        said = part.get("text", part.get("refusal")) if isinstance(part, Mapping) else part
        if not isinstance(said, str):
            raise refused(f"input[{number}].content", part, "only text can be given: this server reads no images, audio or files")
        texts.append(said)
    return "".join(texts)


def _tool(number: int, tool: Mapping[str, Any]) -> dict[str, Any]:
    """A function in chat's shape. Tools that a provider runs itself are refused."""
    if tool.get("type") != "function":
        raise refused(f"tools[{number}].type", tool.get("type"), "only functions can be called: this server runs no tools of its own")
    known = {name: tool[name] for name in ("name", "description", "parameters", "strict") if tool.get(name) is not None}
    return {"type": "function", "function": known}


@router.get("/responses/{identity}", tags=["openai"])
async def stored(identity: str, state: Serving, tenant: Caller, stream: bool = False) -> Response:
    """A stored response."""
    if stream:
        raise refused("stream", stream, "a stored response is answered whole")
    return Json(state.responses.find(tenant.namespace, identity).response)


@router.delete("/responses/{identity}", tags=["openai"])
async def delete(identity: str, state: Serving, tenant: Caller) -> Response:
    """Forget a stored response."""
    state.responses.drop(tenant.namespace, identity)
    return JSONResponse({"id": identity, "object": "response.deleted", "deleted": True})


@router.get("/responses/{identity}/input_items", tags=["openai"])
async def input_items(
    identity: str,
    state: Serving,
    tenant: Caller,
    order: Literal["asc", "desc"] = "desc",
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    after: str | None = None,
) -> Response:
    """The items that a stored response answered, `limit` of them, from the one behind `after` on."""
    all_items = state.responses.find(tenant.namespace, identity).input[:: 1 if order == "asc" else -1]
    start = next((number + 1 for number, item in enumerate(all_items) if item["id"] == after), 0)
    items = [_shown(item) for item in all_items[start : start + limit]]
    ends = {"first_id": items[0]["id"], "last_id": items[-1]["id"]} if items else {"first_id": None, "last_id": None}
    return Json({"object": "list", "data": items, "has_more": start + limit < len(all_items), **ends})


def _shown(item: dict[str, Any]) -> dict[str, Any]:
    """An item as it is listed: a message's text in parts."""
    if item.get("type") == "message" and isinstance(item.get("content"), str):
        kind = "output_text" if item.get("role") == "assistant" else "input_text"
        extra: dict[str, Any] = {"annotations": []} if kind == "output_text" else {}
        item = {**item, "content": [{"type": kind, "text": item["content"], **extra}]}
    return {"status": "completed", **item}
