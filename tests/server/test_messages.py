"""Anthropic's API: blocks in, blocks out; the same tokens as a chat of OpenAI's API, and the same reuse."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from agentcache import Engine
from agentcache.answer.parser import Delta
from agentcache.layout.tokenise import Encoder
from agentcache.server.errors import ServerError
from agentcache.server.messages import SIGNATURE, BlockWriter, messages_of
from agentcache.server.schemas import MessagesBody, thinking_of
from tests.serving import ASKED, BOB, SYSTEM, TIDE, Served, keyed

FUNCTION: dict[str, Any] = TIDE["function"]  # type: ignore[assignment]
TOOL = {"name": "tide", "description": FUNCTION["description"], "input_schema": FUNCTION["parameters"]}
QUESTION = {"role": "user", "content": "When is high water in Port Averil?"}
BODY: dict[str, Any] = {"model": "embedded", "max_tokens": 120, "system": SYSTEM, "messages": [QUESTION], "tools": [TOOL]}
EPHEMERAL = {"cache_control": {"type": "ephemeral"}}
CANCEL = {
    "name": "cancel_order",
    "description": "Cancel an order.",
    "input_schema": {"type": "object", "properties": {"order_id": {"type": "string"}}, "required": ["order_id"]},
}


def plain(message: Any) -> dict[str, Any]:
    """A message without what is its own: id, tokens and receipt."""
    said = message.model_dump(exclude={"content": {"__all__": {"parsed_output"}}})
    return {key: said[key] for key in ("role", "content", "stop_reason", "stop_sequence", "model", "type")}


def sums(usage: Any) -> int:
    return int(usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens)


def test_a_call_and_its_result_go_on_from_the_cache(served: Served) -> None:
    client = served.anthropic()
    first = client.messages.create(**BODY, tool_choice={"type": "any"})
    call = first.content[-1]
    assert (first.stop_reason, call.type, call.name, call.input) == ("tool_use", "tool_use", "tide", {"port": "Port Averil"})
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "High water in Port Averil at 11."}]}
    turns = [QUESTION, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    second = client.messages.create(**{**BODY, "messages": turns})
    assert second.stop_reason == "end_turn"
    assert "11" in second.content[0].text
    assert second.usage.cache_read_input_tokens >= sums(first.usage) + first.usage.output_tokens - 2
    assert second.x_agentcache["receipt"]["spliced_tokens"] > 0, "the model's own ids of its call"


@pytest.mark.parametrize(
    "turns", [[QUESTION], [QUESTION, {"role": "assistant", "content": "At 9."}, {"role": "user", "content": "And then?"}]]
)
def test_prompt_and_answer_are_those_of_a_chat(served: Served, turns: list[dict[str, Any]]) -> None:
    chat = {"messages": [ASKED[0], *turns], "tools": [TIDE], "max_tokens": 20}
    said = served.post("/v1/chat/completions", chat)
    asked = {**BODY, "messages": turns, "max_tokens": 20}
    message = served.anthropic().messages.create(**asked)
    assert message.content[0].text == said["choices"][0]["message"]["content"]
    assert sums(message.usage) == said["usage"]["prompt_tokens"]
    del asked["max_tokens"]
    assert served.anthropic().messages.count_tokens(**asked).input_tokens == said["usage"]["prompt_tokens"]


@pytest.mark.parametrize("choice", ["auto", "any"])
def test_a_streamed_message_is_the_whole_one(served: Served, choice: str) -> None:
    client, asked = served.anthropic(), {**BODY, "tool_choice": {"type": choice}}
    whole = client.messages.create(**asked)
    told = list(client.messages.create(**asked, stream=True))
    assert [told[0].type, *(event.type for event in told[-2:])] == ["message_start", "message_delta", "message_stop"]
    assert told[-1].x_agentcache["receipt"]["prompt_tokens"] == sums(whole.usage)
    with client.messages.stream(**asked) as stream:
        final = stream.get_final_message()
    assert plain(final) == plain(whole)
    assert sums(final.usage) == sums(whole.usage)
    assert final.usage.cache_read_input_tokens == sums(whole.usage) - 1


def test_a_thought_comes_back_as_its_block(served: Served) -> None:
    asked = {"system": "You are a helpful assistant. No thoughts, only calls.", "tools": [CANCEL], "max_tokens": 120}
    question = {"role": "user", "content": "Cancel the order 77812."}
    with served.client() as http:
        first = http.post("/v1/messages", json={**asked, "messages": [question]}).json()
        thought, *_, call = first["content"]
        result = {"type": "tool_result", "tool_use_id": call["id"], "content": '{"status": "accepted"}'}
        turns = [question, {"role": "assistant", "content": first["content"]}, {"role": "user", "content": [result]}]
        second = http.post("/v1/messages", json={**asked, "messages": turns}).json()
    assert thought == {"type": "thinking", "thinking": thought["thinking"], "signature": SIGNATURE}
    assert thought["thinking"]
    assert second["usage"]["cache_read_input_tokens"] > sum(first["usage"].values()) - 5


def test_blocks_begin_grow_and_end_in_order() -> None:
    writer = BlockWriter()
    deltas = [Delta("reasoning", "Which "), Delta("reasoning", "port?"), Delta("text", "I look."), Delta("call", "tide", 0, "a")]
    deltas += [Delta("arguments", '{"port": '), Delta("arguments", '"X"}'), Delta("call", "tide", 1, "b"), Delta("arguments", "{}")]
    told = [json.loads(event.partition("data: ")[2]) for delta in deltas for event in writer.take(delta)]
    told += [json.loads(event.partition("data: ")[2]) for event in writer.end()]
    blocks: list[dict[str, Any]] = []
    for number, event in enumerate(told):
        assert event["index"] == len(blocks) - (event["type"] != "content_block_start")
        if event["type"] == "content_block_start":
            assert not number or told[number - 1]["type"] == "content_block_stop"
            blocks.append(event["content_block"] | {"json": ""})
        elif event["type"] == "content_block_delta":
            kind, value = (event["delta"][key] for key in ("type", *(event["delta"].keys() - {"type"})))
            blocks[-1][{"input_json_delta": "json"}.get(kind, kind.removesuffix("_delta"))] += value
    assert blocks == [
        {"type": "thinking", "thinking": "Which port?", "signature": SIGNATURE, "json": ""},
        {"type": "text", "text": "I look.", "json": ""},
        {"type": "tool_use", "id": "a", "name": "tide", "input": {}, "json": '{"port": "X"}'},
        {"type": "tool_use", "id": "b", "name": "tide", "input": {}, "json": "{}"},
    ]
    assert [event.count("text") for event in BlockWriter().end()] == [2, 0], "an answer of nothing is an empty text"


def test_stop_sequences_are_named(served: Served) -> None:
    message = served.anthropic().messages.create(**BODY, stop_sequences=["zzz", "e"])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "e")
    assert "e" not in message.content[0].text
    short = served.anthropic().messages.create(**{**BODY, "max_tokens": 2})
    assert (short.stop_reason, short.stop_sequence) == ("max_tokens", None)


def test_text_is_held_to_a_schema(served: Served) -> None:
    schema = {
        "type": "object",
        "properties": {"port": {"type": "string", "maxLength": 12}},
        "required": ["port"],
        "additionalProperties": False,
    }
    asked = {"messages": [QUESTION], "output_config": {"format": {"type": "json_schema", "schema": schema}}}
    message = served.anthropic().messages.create(model="embedded", max_tokens=60, **asked)
    assert list(json.loads(message.content[0].text)) == ["port"]


def test_what_claude_code_sends_is_answered_and_cached(served: Served) -> None:
    asked = {"role": "user", "content": [{"type": "text", "text": QUESTION["content"], **EPHEMERAL}]}
    reminder = {"role": "system", "content": "Available agent types: none."}
    call = {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "tide", "input": {"port": "X"}}]}
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "at 9", "is_error": False, **EPHEMERAL}]}

    def tokens(number: int, *turns: dict[str, Any]) -> tuple[int, int]:
        billing = {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1.{number}; cch={number:05};"}
        body = {
            "model": "embedded",
            "system": [billing, {"type": "text", "text": SYSTEM, **EPHEMERAL}],
            "messages": [asked, reminder, *turns],
            "tools": [{**TOOL, "eager_input_streaming": True}],
            "metadata": {"user_id": '{"device_id": "a"}'},
            "max_tokens": 8,
            "thinking": {"type": "disabled"},
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            "output_config": {"effort": "high"},
        }
        usage = served.post("/v1/messages?beta=true", body)["usage"]
        return usage["cache_read_input_tokens"], usage["input_tokens"]

    first = sum(tokens(1))
    cached, computed = tokens(2, call, result)
    assert cached >= first - 6, "all but the opening of an answer: the billing header is not for the model"
    assert computed < 60


def test_blocks_become_the_messages_of_a_chat() -> None:
    document = {"type": "document", "title": "Log", "source": {"type": "text", "media_type": "text/plain", "data": "Fog."}}
    document["citations"] = {"enabled": False}
    found = {"type": "search_result", "title": "Tides", "source": "a.txt", "content": [{"type": "text", "text": "At 9."}]}
    failed = {"type": "tool_result", "tool_use_id": "a", "content": "no such port", "is_error": True}
    call = {"type": "tool_use", "id": "a", "name": "tide", "input": {"port": "X"}}
    cut = {"type": "tool_use", "id": "c", "name": "tide", "input": '{"port": "X'}
    thought = {"type": "thinking", "thinking": "Look.", "signature": "s"}
    hidden = {"type": "redacted_thinking", "data": "s"}
    pieces = [{"type": "text", "text": "I "}, {"type": "text", "text": "look."}]
    assert messages_of(
        [
            {"role": "user", "content": [{"type": "text", "text": "One"}, document]},
            {"role": "assistant", "content": [thought, *pieces, hidden, call, cut]},
            {"role": "user", "content": [{"type": "text", "text": "Well?"}, failed]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "b", "content": [found]}]},
        ],
        "Help.",
    ) == [
        {"role": "system", "content": "Help."},
        {"role": "user", "content": "One\nLog\nFog."},
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "Look.",
            "tool_calls": [
                {"id": "a", "type": "function", "function": {"name": "tide", "arguments": {"port": "X"}}},
                {"id": "c", "type": "function", "function": {"name": "tide", "arguments": {"invalid_arguments": '{"port": "X'}}},
            ],
        },
        {"role": "tool", "tool_call_id": "a", "content": "Error: no such port"},
        {"role": "user", "content": "Well?"},
        {"role": "tool", "tool_call_id": "b", "content": "Tides (a.txt)\nAt 9."},
    ]


IMAGE = {"type": "image", "source": {"type": "url", "url": "http://x/y.png"}}
CITED = {"type": "document", "source": {"type": "text", "data": "Fog."}, "citations": {"enabled": True}}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [CITED]}]}, "messages[0].content.citations={'enabled': True}"),
        ({"messages": [QUESTION, {"role": "assistant", "content": "At"}]}, "messages[1].role"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a"}]}]}, "messages[1]"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": 5}]}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": {"text": "a"}}]}, "messages[0].content"),
        ({"system": [IMAGE]}, "system"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [{**TOOL, "defer_loading": True}]}, "tools[0].defer_loading"),
        ({"tool_choice": {"type": "tool", "name": "none"}}, "tool_choice={'type': 'tool', 'name': 'none'}"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice={'type': 'tool'}"),
        ({"tool_choice": {"type": "required"}}, "tool_choice.type"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management.edits[0]"),
        ({"context_management": {"edits": 5}}, "context_management.edits"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024, "display": "omitted"}}, "thinking.display"),
        ({"speed": "fast"}, "speed"),
        ({"mcp_servers": []}, "mcp_servers"),
        ({"thread": {"type": "create"}}, "thread"),
        ({"stop_sequences": [""]}, "stop"),
    ],
    ids=lambda said: said if isinstance(said, str) else next(iter(said)),
)
def test_what_a_message_cannot_honour_is_refused(served: Served, change: dict[str, Any], named: str) -> None:
    told = served.post("/v1/messages", {**BODY, **change}, 400)
    assert (told["type"], told["error"]["type"]) == ("error", "invalid_request_error")
    assert told["error"]["message"].startswith(named)


def test_a_prompt_without_room_is_told_as_clients_read_it(served: Served) -> None:
    said = served.post("/v1/messages", {**BODY, "messages": [{"role": "user", "content": "x " * 20000}]}, 400)["error"]["message"]
    found = re.match(r"prompt is too long: (\d+) tokens > (\d+) maximum", said)
    assert found, said
    assert int(found[1]) > int(found[2]) == 8192


def test_errors_have_the_shape_of_the_api(tmp_path: Path) -> None:
    with keyed(tmp_path) as served, served.client() as http:
        nobody = http.post("/v1/messages", json=BODY)
        unknown = http.post("/v1/messages", json={**BODY, "model": "x"}, headers={"x-api-key": BOB})
        lost = http.get("/v1/messages/batches", headers={"x-api-key": BOB})
        wrong = http.put("/v1/messages", headers={"x-api-key": BOB})
        chat = http.post("/v1/chat/completions", json=BODY)
    assert [(one.status_code, one.json()["error"]["type"]) for one in (nobody, unknown, lost, wrong)] == [
        (401, "authentication_error"),
        (404, "not_found_error"),
        (404, "not_found_error"),
        (405, "invalid_request_error"),
    ]
    assert "type" not in chat.json(), "OpenAI's own"
    assert ServerError(500, "a fault").anthropic == {"type": "error", "error": {"type": "api_error", "message": "a fault"}}


@pytest.mark.parametrize(
    ("asked", "effort"),
    [
        ({}, None),
        ({"output_config": {"effort": "low"}}, "low"),
        ({"thinking": {"type": "adaptive"}}, "medium"),
        ({"thinking": {"type": "enabled", "budget_tokens": 2048}, "output_config": {"effort": "high"}}, "high"),
        ({"thinking": {"type": "disabled"}, "output_config": {"effort": "high"}}, "none"),
    ],
)
def test_thinking_is_asked_of_the_template(asked: dict[str, Any], effort: str | None) -> None:
    body = MessagesBody(messages=[QUESTION], **asked)
    assert body.effort == effort
    assert thinking_of(body.effort).get("enable_thinking") == (None if effort is None else effort != "none")


def test_a_count_takes_the_arguments_of_the_template(served: Served) -> None:
    asked = {key: value for key, value in BODY.items() if key != "max_tokens"} | {"thinking": {"type": "disabled"}}
    with mock.patch.object(Engine, "probe", autospec=True, side_effect=Engine.probe) as probe:
        assert served.post("/v1/messages/count_tokens", asked)["input_tokens"]
    assert probe.call_args.kwargs["template_kwargs"] == thinking_of("none")


def test_the_count_of_many_contexts_is_an_estimate(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    read, encode = list[int](), Encoder._encode
    monkeypatch.setattr(Encoder, "_encode", lambda self, text: (read.append(len(text)), encode(self, text))[1])
    counted = served.anthropic().messages.count_tokens(model="embedded", messages=[{"role": "user", "content": "water " * 200_000}])
    assert 380_000 < counted.input_tokens < 420_000
    assert max(read) < 600_000, "31 MiB of text took 10 GB of memory, and minutes"
