"""Requests as frameworks and providers write them: read like chat completions, with nothing of them lost and nothing made up."""

from __future__ import annotations

import json
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

from agentcache.lint import Options, Report, lint
from agentcache.lint.templated import Loaded
from tests import chat_templates as templates
from tests.lint.requests import conversation, with_system_line
from tests.models import toy_tokenizer

Body = dict[str, Any]
CLOCKED = with_system_line(conversation(2), [f"It is 09:{number}7:53." for number in range(3)])
KINDS = {"system": "system", "user": "human", "assistant": "AIMessageChunk", "tool": "tool"}


class Role(str, Enum):
    SYSTEM, USER, ASSISTANT, TOOL = "system", "user", "assistant", "tool"


def causes(found: Report) -> list[str]:
    return [str(finding.cause) for finding in found.findings]


def langchain(message: Body) -> Body:
    calls = [
        {"name": call["function"]["name"], "args": json.loads(call["function"]["arguments"]), "id": call["id"], "type": "tool_call"}
        for call in message.get("tool_calls", ())
    ]
    given = {"tool_calls": calls, "tool_call_id": message.get("tool_call_id")}
    return {"content": message["content"], "type": KINDS[message["role"]], "additional_kwargs": {}, **given}


def to_dict(message: Body) -> Body:
    return {"type": KINDS[message["role"]], "data": langchain(message)}


def dumped(message: Body) -> Body:
    return {"lc": 1, "type": "constructor", "id": ["langchain", "schema", "messages", "X"], "kwargs": langchain(message)}


def llama_index(message: Body) -> Body:
    calls = [
        {"block_type": "tool_call", "tool_call_id": call["id"], "tool_name": call["function"]["name"], "tool_kwargs": {"size": 3}}
        for call in message.get("tool_calls", ())
    ]
    more = {"tool_call_id": message["tool_call_id"]} if "tool_call_id" in message else {}
    return {
        "role": Role(message["role"]),
        "additional_kwargs": more,
        "blocks": [{"block_type": "text", "text": message["content"]}, *calls],
    }


def unknown(message: Body) -> Body:
    return {"role": message["role"], "says": message["content"]}


@pytest.mark.parametrize("write", [langchain, to_dict, dumped, llama_index, unknown])
def test_messages_of_frameworks_are_read(write: Callable[[Body], Body]) -> None:
    bodies = [{**body, "messages": [write(message) for message in body["messages"]]} for body in CLOCKED]
    found = lint(bodies)
    assert (causes(found), found.problems) == (["clock", "clock"], [])
    if write is not unknown:
        found = lint(bodies, Options(tokenizer=Loaded(toy_tokenizer(), templates.CHATML)))
        assert (causes(found), found.problems) == (["clock", "clock"], [])


@pytest.mark.parametrize("write", [to_dict, dumped])
def test_transcripts_of_langchain(write: Callable[[Body], Body]) -> None:
    whole = [*conversation(2)[-1]["messages"], {"role": "assistant", "content": "Yes."}]
    assert len(lint([{"messages": [*map(write, whole)]}], Options(transcripts=True)).steps) == 3


@pytest.mark.parametrize(
    "around",
    [
        lambda body: {"request": "POST /v1/chat/completions", "body": body},
        lambda body: {"input": "Is there room?", "request": body},
        lambda body: {"inputs": {**body, "messages": [[*map(dumped, body["messages"])]]}},
    ],
    ids=["a line of HTTP", "the question beside it", "a batch of one"],
)
def test_a_request_beside_other_text_is_found(around: Callable[[Body], Body]) -> None:
    assert causes(lint([around(body) for body in CLOCKED])) == ["clock", "clock"]


def test_a_cache_breakpoint_that_moves_is_no_change() -> None:
    def body(turns: int) -> Body:
        picture = {"type": "image", "source": {"type": "base64", "data": "iVBORw0KGgo"}}
        messages: list[Body] = []
        for turn in range(turns):
            messages += [{"role": "user", "content": [picture]}, {"role": "assistant", "content": f"Pier {turn}."}]
        messages.append({"role": "user", "content": [{**picture, "cache_control": {"type": "ephemeral"}}]})
        return {"messages": messages}

    assert causes(lint([body(1), body(2)])) == []


def test_calls_of_all_kinds_are_compared() -> None:
    patch = {"type": "custom_tool_call", "call_id": "c1", "name": "apply_patch", "input": "*** Begin"}
    done = {"type": "custom_tool_call_output", "call_id": "c1", "output": "Done"}
    shell = {"type": "local_shell_call", "call_id": "c2", "action": {"command": ["ls"]}}
    items = [
        {"role": "user", "content": "Mend it."},
        patch,
        done,
        shell,
        {"type": "local_shell_call_output", "call_id": "c2", "output": "a"},
    ]
    found = lint([{"input": items[:3]}, {"input": items}, {"input": [items[0], {**patch, "input": "*** End"}, *items[2:], items[0]]}])
    assert (causes(found), found.problems) == (["edited history"], [])


def test_objects_in_one_line_are_read(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text("".join(json.dumps({"conversation_id": "a", **body}) for body in CLOCKED) + "{oops", encoding="utf-8")
    found = lint(path)
    assert causes(found) == ["clock", "clock"]
    assert [(problem.line, "left out" in problem.message) for problem in found.problems] == [(1, True)]
