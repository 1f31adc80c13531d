"""A recorded request in any provider's shape as a `Request`: chat, responses, blocks, raw text. Opens no file.

What cannot be used is told to `note` and left out or kept as text: one odd message never loses the others.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from .server_history import ServerHistories, conversation_id
from .values import Call, Note, NoteAt, Request, Said, Shown

_WRAPPERS = ("request", "body", "req", "payload", "kwargs", "params", "data", "json", "attributes", "input", "inputs")
_TRACKS = ("conversation_id", "conversation", "session_id", "session", "thread_id", "thread", "chat_id", "episode_id", "episode")
_ASSISTANTS = dict.fromkeys(("ai", "AIMessageChunk", "model"), "assistant")
_ROLES = {"human": "user", "function": "tool", "developer": "system", **_ASSISTANTS}
_KNOWN = ("system", "user", "assistant", "tool")
_PLAIN = {"role", "type", "content", "name", "tool_call_id"}
_MOST_WRAPPED = 4
_THOUGHTS = ("thinking", "redacted_thinking", "reasoning")


@dataclass(frozen=True, slots=True)
class ProviderFormats:
    """Turns JSON values into requests. transcripts: each list of messages is a whole conversation."""

    transcripts: bool = False
    _histories: ServerHistories = field(default_factory=ServerHistories, repr=False)

    def read(self, values: Iterable[tuple[int, Any]], note: NoteAt) -> Iterator[Request]:
        """The requests in all (line, value) of a source, numbered from 1; note(line, said, *values) hears what cannot be used."""
        number = 1
        for line, value in values:
            try:
                for request in self.requests(value, line, number, partial(note, line)):
                    yield request
                    number += 1
            except RecursionError:
                note(line, "nested too deeply: left out")

    def requests(self, value: Any, line: int, first: int, note: Note) -> Iterator[Request]:
        """The requests in one value of the source, numbered from `first`."""
        outer = value if isinstance(value, Mapping) else {}
        body = _unwrapped(value)
        if body is None:
            found = f"{type(value).__name__} %s" if not isinstance(value, Mapping) else "keys %s"
            shown = value if not isinstance(value, Mapping) else sorted(map(str, value))[:12]
            note(f"no request: {found}; one has 'messages', 'prompt' or 'input', alone or under 'request' or 'body'", shown)
            return
        track = _track(outer) or _track(body)
        if self.transcripts and isinstance(body.get("messages"), list):
            name = track or str(body.get("id") or f"line {line}")
            for number, prompt in enumerate(_prompts(body), first):
                yield _request(prompt, name, line, number, None, note)
            return
        answer = _answer(outer, note) or (_answer(body, note) if body is not outer else None)
        whole, alone = self._histories.whole(body, outer, note)
        request = _request(whole, track, line, first, answer, note)
        yield replace(request, alone=True) if alone else request


def _prompts(body: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The prompt of each assistant message: everything before it."""
    for at, message in enumerate(body["messages"]):
        if isinstance(message, Mapping) and _role(_dumped(message)) == "assistant" and (at or body.get("system")):
            yield {**body, "messages": body["messages"][:at]}


def _unwrapped(value: Any, levels: int = _MOST_WRAPPED) -> Mapping[str, Any] | None:
    """The object with the prompt in it, looked for under the names that logs give it."""
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return None
    if isinstance(value, list):
        return {"messages": value} if any(isinstance(item, Mapping) and ("role" in item or "type" in item) for item in value) else None
    if not isinstance(value, Mapping):
        return None
    listed = value.get("messages")
    if isinstance(listed, list) and len(listed) == 1 and isinstance(listed[0], list):  # a batch of one, as LangChain's callbacks write it
        return {**value, "messages": listed[0]}
    if isinstance(listed, (list, str)) or isinstance(value.get("input"), list):
        return value
    inner = (_unwrapped(value.get(key), levels - 1) for key in _WRAPPERS if levels > 1)
    found = next((body for body in inner if body is not None), None)  # beside it, `input` is a log's own word for the question
    return value if found is None and any(isinstance(value.get(key), (list, str)) for key in ("prompt", "input")) else found


def _track(raw: Mapping[str, Any]) -> str | None:
    for place in (raw, raw.get("metadata"), raw.get("extra_body")):
        if isinstance(place, Mapping):
            for key in _TRACKS:
                if isinstance(place.get(key), (str, int)) and not isinstance(place.get(key), bool):
                    return str(place[key])
                if (found := conversation_id(place.get(key))) is not None:
                    return found
    return None


def _answer(outer: Mapping[str, Any], note: Note) -> Said | None:
    """The model's answer, if the log has it beside the request."""
    for key in ("response", "completion", "output"):
        found = outer.get(key)
        if not isinstance(found, Mapping):
            continue
        found = found["body"] if isinstance(found.get("body"), Mapping) else found
        choices = found.get("choices")
        if isinstance(choices, list) and choices and isinstance(choices[0], Mapping):
            found = choices[0].get("message")
        if isinstance(found, Mapping) and found.get("role", "assistant") == "assistant" and ("content" in found or "tool_calls" in found):
            return _said({"role": "assistant", **found}, 0, note)[0]
    return None


def _request(body: Mapping[str, Any], track: str | None, line: int, number: int, answer: Said | None, note: Note) -> Request:
    listed = body.get("tools") or body.get("functions") or []
    if not isinstance(listed, (list, tuple)):
        note("tools=%s is not a list: left out", listed)
        listed = []
    shown = tuple(_shown(tool, at, note) for at, tool in enumerate(listed))
    messages = body.get("messages", body.get("input") if isinstance(body.get("input"), list) else None)
    if messages is None:
        prompt = body.get("prompt", body.get("input"))
        text = prompt if isinstance(prompt, str) else "\n".join(map(str, prompt)) if isinstance(prompt, list) else ""
        return Request(number, line, track, tools=shown, prompt=text, answer=answer)
    if not isinstance(messages, list):
        note("messages=%s is not a list: left out", messages)
        messages = []
    said = [one for at, message in enumerate(messages) for one in _said(message, at, note)]
    leading = next((at for at, one in enumerate(said) if one.role != "system"), len(said))
    top = body.get("system") or body.get("instructions")
    system = [Said("system", _text(top))] if top else []
    first_tools = any(isinstance(tool, Mapping) and "input_schema" in tool for tool in listed)
    front, history = (*system, *said[:leading]), tuple(said[leading:])
    return Request(number, line, track, front, shown, history, None, answer, tools_first=first_tools)


def _shown(tool: Any, at: int, note: Note) -> Shown:
    name = ""
    if isinstance(tool, Mapping):
        function = tool.get("function", tool)
        name = str(function.get("name", "")) if isinstance(function, Mapping) else ""
        name = name or str(tool.get("type", ""))
    if not name:
        note(f"tools[{at}]=%s has no name", tool)
    if isinstance(tool, Mapping) and "cache_control" in tool:
        tool = {key: value for key, value in tool.items() if key != "cache_control"}
    return Shown(name, json.dumps(tool, ensure_ascii=False, default=repr))


def _said(message: Any, at: int, note: Note) -> list[Said]:
    """One message of the source: several, if it carries tool results as blocks."""
    if not isinstance(message, Mapping):
        note(f"messages[{at}]=%s is not an object: kept as text", message)
        return [Said("user", str(message), source=at)]
    if "role" not in message and (item := _item(message, at)) is not None:
        return [item]
    message = _dumped(message)
    role = _role(message)
    if role not in _KNOWN:
        note(f"messages[{at}]: role=%s is unknown: compared as it is", message.get("role", message.get("type")))
    content, call_id = message.get("content"), _maybe(message.get("tool_call_id"))
    name = _maybe(message.get("name")) if role == "tool" else None
    if isinstance(content, str) and message.keys() <= _PLAIN:  # most messages
        return [Said(role, content, call_id=call_id, name=name, source=at)]
    blocks = [block for block in content if isinstance(block, Mapping)] if isinstance(content, list) else []
    results = [block for block in blocks if block.get("type") == "tool_result"]
    rest = [block for block in content if block not in results] if results and isinstance(content, list) else content
    out = [Said("tool", _text(block.get("content")), call_id=_maybe(block.get("tool_use_id")), source=at) for block in results]
    if results and not rest:
        return out
    calls = [_call(call, at, note) for call in _list(message.get("tool_calls"), f"messages[{at}]: tool_calls", note)]
    if isinstance(message.get("function_call"), Mapping):
        calls.append(_call(message["function_call"], at, note))
    calls += [_call(block, at, note) for block in blocks if block.get("type") == "tool_use"]
    thoughts = [_thought(block) for block in blocks if block.get("type") in _THOUGHTS]
    for key in ("reasoning_details", "thinking_blocks"):
        details = _list(message.get(key), f"messages[{at}]: {key}", note)
        thoughts += [_thought(part) for part in details if isinstance(part, Mapping)]
    reasoning = next((message[key] for key in ("reasoning_content", "reasoning", "thinking") if isinstance(message.get(key), str)), "")
    if not ("content" in message or calls or thoughts or reasoning):  # a shape that is not known: no change in it is lost
        rest = {key: value for key, value in message.items() if value is not None and key not in _PLAIN} or None
    return [*out, Said(role, _text(rest), reasoning or "\n".join(thoughts), tuple(calls), call_id, name, at)]


def _role(message: Mapping[str, Any]) -> str:
    given = message.get("role", message.get("type"))
    role = str.__str__(given) if isinstance(given, str) else str(given)  # LlamaIndex's is a member of an Enum
    return _ROLES.get(role, role)


def _dumped(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """A message as LangChain or LlamaIndex writes it, in the shape of chat completions; any other as it is."""
    inner = next((message[key] for key in ("data", "kwargs") if isinstance(message.get(key), Mapping)), None)
    if "content" in message or (inner is None and not isinstance(message.get("blocks"), list)):
        return message
    if inner is not None:
        return {"type": message.get("type"), **inner}
    more = message.get("additional_kwargs")
    blocks = [_block(block) if isinstance(block, Mapping) else block for block in message["blocks"]]
    return {**(more if isinstance(more, Mapping) else {}), **message, "content": blocks}


def _block(block: Mapping[str, Any]) -> Mapping[str, Any]:
    if block.get("block_type") == "tool_call":
        return {"type": "tool_use", "id": block.get("tool_call_id"), "name": block.get("tool_name"), "input": block.get("tool_kwargs")}
    return {**block, "type": block.get("block_type")}


def _thought(part: Mapping[str, Any]) -> str:
    return str(next((part[key] for key in ("text", "thinking", "summary", "data", "content") if part.get(key)), ""))


def _item(item: Mapping[str, Any], at: int) -> Said | None:
    """An item of a responses request that is no message."""
    kind = str(item.get("type"))
    if kind.endswith("_call"):  # of a function, a custom tool, a shell, a search
        given = next((item[key] for key in ("arguments", "input", "action") if key in item), None)
        return Said("assistant", calls=(Call(str(item.get("name") or kind), _arguments(given), _maybe(item.get("call_id"))),), source=at)
    if kind.endswith("_call_output"):
        return Said("tool", _text(item.get("output")), call_id=_maybe(item.get("call_id")), source=at)
    if kind == "reasoning":
        return Said("assistant", reasoning=json.dumps(item.get("summary", item.get("content", "")), default=repr), source=at)
    return None


def _maybe(value: Any) -> str | None:
    return None if value is None else str(value)


def _list(value: Any, what: str, note: Note) -> list[Any]:
    if value is None or isinstance(value, list):
        return value or []
    note(f"{what}=%s is not a list: left out", value)
    return []


def _call(call: Any, at: int, note: Note) -> Call:
    if not isinstance(call, Mapping):
        note(f"messages[{at}]: tool call %s is not an object: kept as text", call)
        return Call("", str(call))
    function = call.get("function") if isinstance(call.get("function"), Mapping) else call
    assert function is not None
    arguments = next((function[key] for key in ("arguments", "args", "input") if key in function), None)
    return Call(str(function.get("name", "")), _arguments(arguments), _maybe(call.get("id")))


def _arguments(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps({} if arguments is None else arguments, ensure_ascii=False, default=repr)


def _text(content: Any) -> str:
    """The text of a content; parts that are no text stand as their JSON."""
    if isinstance(content, str) or content is None:
        return content or ""
    if not isinstance(content, list):
        return json.dumps(content, ensure_ascii=False, default=repr)
    out = []
    for part in content:
        if isinstance(part, Mapping) and part.get("type") in ("tool_use", *_THOUGHTS):
            continue
        text = part if isinstance(part, str) else part.get("text", part.get("content")) if isinstance(part, Mapping) else None
        if not isinstance(text, str):
            shown = {key: value for key, value in part.items() if key != "cache_control"} if isinstance(part, Mapping) else part
            text = json.dumps(shown, ensure_ascii=False, default=repr)
        out.append(text)
    return "".join(out)
