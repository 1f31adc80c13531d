"""Chat and text completions over HTTP: streamed and whole say the same, and what cannot be honoured is refused by name."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from typing import Any

import httpx
import pytest

from agentcache import Sampling
from agentcache.errors import ContextOverflowError
from agentcache.server.chat import with_role
from agentcache.server.schemas import MOST_IDS, ChatBody
from tests.engines import wait_until
from tests.serving import ASKED, ENDLESS, SYSTEM, TIDE, Served

openai = pytest.importorskip("openai")

PORT = {"type": "object", "properties": {"port": {"type": "string"}}, "required": ["port"]}


def events(text: str) -> list[tuple[str, Any]]:
    """(event, data) of a stream of server-sent events."""
    found = []
    for block in filter(None, text.split("\n\n")):
        lines = dict(line.split(": ", 1) for line in block.split("\n"))
        if "data" in lines:
            found.append((lines.get("event", ""), lines["data"] if lines["data"] == "[DONE]" else json.loads(lines["data"])))
    return found


def test_an_answer_that_names_no_bound_has_all_the_room(served: Served) -> None:
    assert ChatBody(messages=ASKED).sampling(None, None, None).max_tokens > 1 << 30
    answer = served.post("/v1/chat/completions", {"messages": [*ASKED[:1], {"role": "user", "content": "Hi"}]})
    assert answer["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("asked", "effort"),
    [
        ({}, None),
        ({"reasoning_effort": "low"}, "low"),
        ({"reasoning": {"effort": "high", "enabled": False}}, "none"),  # as claude-code-router, where nobody is to think
        ({"reasoning": {"effort": "high", "enabled": True}}, "high"),
        ({"reasoning": {"enabled": True}}, "medium"),
    ],
)
def test_thinking_is_asked_for_in_two_forms(served: Served, asked: dict[str, Any], effort: str | None) -> None:
    assert ChatBody(messages=ASKED, **asked).effort == effort
    assert served.post("/v1/chat/completions", {"messages": ASKED, "max_tokens": 1, **asked})


@pytest.mark.parametrize("choice", [None, "required", {"type": "function", "function": {"name": "tide"}}])
def test_a_stream_says_what_a_whole_answer_says(served: Served, choice: Any) -> None:
    asked = {"model": "embedded", "messages": ASKED, "tools": [TIDE], "max_tokens": 64, **({"tool_choice": choice} if choice else {})}
    whole = served.openai(strict=True).chat.completions.create(**asked)
    message, text, calls, finish = whole.choices[0].message, "", dict[int, list[str]](), None
    for chunk in served.openai(strict=True).chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
        for choice_ in chunk.choices:
            text += choice_.delta.content or ""
            finish = choice_.finish_reason or finish
            for call in choice_.delta.tool_calls or []:
                known = calls.setdefault(call.index, ["", "", ""])
                known[0] += call.id or ""
                known[1] += call.function.name or ""
                known[2] += call.function.arguments or ""
    assert text == (message.content or "")
    assert finish == whole.choices[0].finish_reason
    assert list(calls.values()) == [[one.id, one.function.name, one.function.arguments] for one in message.tool_calls or []]
    assert bool(calls) is (choice is not None)
    assert chunk.usage.prompt_tokens == whole.usage.prompt_tokens
    assert chunk.usage.prompt_tokens_details.cached_tokens == whole.usage.prompt_tokens - 1
    if choice:
        assert json.loads(message.tool_calls[0].function.arguments).keys() == {"port"}
        assert finish == "tool_calls"


def test_usage_and_receipt_tell_of_cached_tokens(served: Served) -> None:
    with served.client() as http:
        http.post("/v1/chat/completions", json={"messages": ASKED, "max_tokens": 1})
        answer = http.post("/v1/chat/completions", json={"messages": ASKED, "max_tokens": 1}).json()
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached == answer["usage"]["prompt_tokens"] - 1 == answer["x_agentcache"]["receipt"]["cached_tokens"]
        assert http.get(f"/v1/receipts/{answer['id']}").json() == answer["x_agentcache"]
        asked = {"messages": ASKED, "max_tokens": 1, "stream": True, "stream_options": {"include_usage": True}}
        told = events(http.post("/v1/chat/completions", json=asked).text)
        *_, last = events(http.post("/v1/responses", json={"input": "hi", "max_output_tokens": 1, "stream": True}).text)[:-1]
        *_, text = events(http.post("/v1/completions", json={**ENDLESS, "max_tokens": 1}).text)[:-1]
    assert {(name, "choices" in data) for name, data in told[:-1]} == {("", True)}, "some clients take every event for a chunk"
    assert told[-1] == ("", "[DONE]")
    assert told[-3][1]["x_agentcache"]["receipt"]["cached_tokens"] == cached
    assert last[1]["response"]["x_agentcache"]["state"] == text[1]["x_agentcache"]["state"] == "done"


@pytest.mark.parametrize(
    "form",
    [
        {"type": "json_schema", "json_schema": {"name": "port", "schema": PORT}},
        {"type": "json_object", "schema": PORT},  # as llama.cpp's server and others have it
        {"type": "json_object", "value": PORT},  # as TGI has it: huggingface_hub makes it of json_schema
    ],
)
def test_an_answer_is_held_to_its_schema(served: Served, form: Any) -> None:
    answer = served.openai(strict=True).chat.completions.create(model="embedded", messages=ASKED, response_format=form, max_tokens=64)
    assert json.loads(answer.choices[0].message.content).keys() == {"port"}


def test_a_call_is_required_beside_a_schema(served: Served) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "port", "schema": {"type": "object"}}}
    asked = {"model": "embedded", "messages": ASKED, "tools": [TIDE], "tool_choice": "required", "max_tokens": 64}
    plain, formed = (served.openai(strict=True).chat.completions.create(**asked, **more) for more in ({}, {"response_format": form}))
    assert formed.choices[0].message == plain.choices[0].message
    assert formed.choices[0].finish_reason == "tool_calls"


def test_log_probabilities_come_with_each_token(served: Served) -> None:
    asked = {"model": "embedded", "messages": ASKED, "logprobs": True, "top_logprobs": 2, "max_completion_tokens": 4}
    told = served.openai(strict=True).chat.completions.create(**asked).choices[0].logprobs.content
    *_, last = served.openai(strict=True).chat.completions.create(**asked, stream=True)
    assert len(told) == 4
    assert [len(one.top_logprobs) for one in told] == [2] * 4
    assert [one.token for one in last.choices[0].logprobs.content] == [one.token for one in told]


def test_a_text_completion_goes_on(served: Served) -> None:
    asked = {"model": "embedded", "prompt": "The keeper of the", "max_tokens": 6, "logprobs": 1}
    whole = served.openai(strict=True).completions.create(**asked).choices[0]
    # as OpenAI's API, a stream says null until its end, which openai-python's own type of this older route does not know
    streamed = [chunk.choices[0] for chunk in served.openai().completions.create(**asked, stream=True)]
    assert "".join(choice.text for choice in streamed) == whole.text
    assert {choice.finish_reason for choice in streamed[:-1]} == {None}
    assert whole.finish_reason == streamed[-1].finish_reason == "length"
    assert len(whole.logprobs.tokens) == len(streamed[-1].logprobs.tokens) == 6


def test_texts_of_a_list_are_continued_together(served: Served) -> None:
    asked = {"max_tokens": 4, "logprobs": 1}
    with served.client() as http:
        alone = [http.post("/v1/completions", json={"prompt": prompt, **asked}).json() for prompt in ("The keeper", "A ship")]
        both = http.post("/v1/completions", json={"prompt": ["The keeper", "A ship"], **asked}).json()
        one = http.post("/v1/completions", json={"prompt": ["The keeper"], **asked}).json()
    assert one["choices"] == alone[0]["choices"]
    receipt = both["choices"][1].pop("x_agentcache")
    assert both["choices"] == [{**each["choices"][0], "index": index} for index, each in enumerate(alone)]
    assert both["usage"]["total_tokens"] == sum(each["usage"]["total_tokens"] for each in alone)
    assert (receipt["state"], both["x_agentcache"]["state"]) == ("done", "done")
    assert receipt["id"] != both["x_agentcache"]["id"] == both["id"]


def test_texts_of_a_list_are_streamed(served: Served) -> None:
    api, asked = served.openai(), {"model": "embedded", "prompt": ["The keeper", "A ship"], "max_tokens": 4}
    whole = api.completions.create(**asked)
    *chunks, last = api.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    said = [[chunk.choices[0] for chunk in chunks if chunk.choices[0].index == index] for index in range(2)]
    assert ["".join(choice.text for choice in each) for each in said] == [choice.text for choice in whole.choices]
    assert [each[-1].finish_reason for each in said] == ["length", "length"]
    assert last.usage.total_tokens == whole.usage.total_tokens


def test_an_echoed_prompt_has_log_probabilities(served: Served) -> None:
    engine, text = served.state.models.first.engine, "The keeper of the «light»"
    assert engine is not None
    ids = list(engine.renderer.render(text).ids)
    body = {"prompt": [ids, text], "echo": True, "logprobs": 1, "max_tokens": 3}
    with served.client() as http:
        plain = http.post("/v1/completions", json={"prompt": text, "logprobs": 1, "max_tokens": 3}).json()
        first, second = (told := http.post("/v1/completions", json=body).json())["choices"]
        none = http.post("/v1/completions", json={**body, "max_tokens": 0}).json()
    assert first["logprobs"] == second["logprobs"]
    assert first["text"] == second["text"] == text + plain["choices"][0]["text"]
    assert [len(each) for each in first["logprobs"].values()] == [len(ids) + 3] * 4
    assert first["logprobs"]["token_logprobs"][len(ids) :] == plain["choices"][0]["logprobs"]["token_logprobs"]
    for place in (1, len(ids) - 1):  # each as if the prompt ended before it
        one = engine.generate(ids[:place], sampling=Sampling(forced=(ids[place],), max_tokens=1, logprobs=0), reuse="off")
        assert first["logprobs"]["token_logprobs"][place] == one.logprobs[0].logprob
    assert told["usage"] == {**told["usage"], "prompt_tokens": 2 * len(ids), "completion_tokens": 6}
    assert none["choices"][0]["text"] == text
    assert none["choices"][0]["logprobs"]["token_logprobs"] == first["logprobs"]["token_logprobs"][: len(ids)]


def test_a_scored_prompt_may_fill_the_context(served: Served) -> None:
    engine = served.state.models.first.engine
    assert engine is not None
    size = engine.model.context_tokens
    ids = (list(engine.renderer.render("The keeper of the light").ids) * size)[:size]
    answer = served.post("/v1/completions", {"prompt": ids, "echo": True, "logprobs": 0, "max_tokens": 0})
    assert len(answer["choices"][0]["logprobs"]["tokens"]) == answer["usage"]["prompt_tokens"] == size
    assert answer["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize("ignored", [False, True])
@pytest.mark.parametrize("prompt", ["", "Here.<|im_end|>"])
def test_a_scored_echo_ends_where_a_plain_one_does(served: Served, prompt: str, ignored: bool) -> None:
    asked = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    body = {"prompt": asked + prompt, "echo": True, "max_tokens": 40, "ignore_eos": ignored}
    with served.client() as http:
        plain = http.post("/v1/completions", json=body).json()
        scored = http.post("/v1/completions", json={**body, "logprobs": 0}).json()
    assert plain["choices"][0]["finish_reason"] == ("length" if ignored else "stop")
    assert scored["choices"][0]["text"] == plain["choices"][0]["text"]
    assert scored["choices"][0]["finish_reason"] == plain["choices"][0]["finish_reason"]
    assert scored["usage"] == plain["usage"] | {"prompt_tokens_details": scored["usage"]["prompt_tokens_details"]}


@pytest.mark.parametrize("more", [{"stream": True, "echo": True}, {"stop": "a", "echo": True, "logprobs": 1}, {"max_tokens": 0}])
def test_what_cannot_be_echoed_is_refused(served: Served, more: dict[str, Any]) -> None:
    assert served.post("/v1/completions", {"prompt": "The keeper", **more}, 400)["error"]["param"] == next(iter(more))


def test_more_ids_than_any_context_are_refused_unread(served: Served) -> None:
    with served.client() as http:
        listed = http.post("/v1/completions", json={"prompt": [1] * (MOST_IDS + 1), "max_tokens": 1})
        engine = http.post("/v1/engine/decode", json={"ids": [1] * (MOST_IDS + 1)})
    assert (listed.status_code, engine.status_code) == (400, 400)
    assert "at most 1048576 token ids" in listed.json()["error"]["message"]
    running = served.state.models.first.engine
    assert running is not None
    with pytest.raises(ContextOverflowError):
        running.renderer.render([1] * 300, most_tokens=299)


def test_ids_that_the_model_has_not_are_refused(served: Served) -> None:
    error = served.post("/v1/completions", {"prompt": [1 << 20], "max_tokens": 1}, 400)["error"]
    assert "the prompt has id 1048576, the model has 4096 ids" in error["message"]


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ([], "must be a text or at most 1048576 token ids, or a list of them"),
        ([[464, "a"]], "must be a text or at most 1048576 token ids, or a list of them"),
        (["The keeper"] * 17, "prompt='17 texts': at most 16 are computed at once: send fewer"),
    ],
    ids=["none", "mixed", "many"],
)
def test_prompts_that_are_none_are_refused(served: Served, prompt: list[Any], said: str) -> None:
    error = served.post("/v1/completions", {"prompt": prompt}, 400)["error"]
    assert error["param"] == "prompt"
    assert said in error["message"]


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_all_texts(served: Served, stream: bool) -> None:
    engine, body = served.state.models.first.engine, {**ENDLESS, "prompt": ["The keeper of the", "A ship in the"], "stream": stream}
    assert engine is not None
    with served.client() as http, suppress(httpx.ReadTimeout), http.stream("POST", "/v1/completions", json=body, timeout=0.3) as answer:
        next(answer.iter_lines())
    assert wait_until(lambda: not (engine.scheduler.live or served.state.tenants.running))
    assert [record.state for record in served.state.records.last(None, 2)] == ["cancelled", "cancelled"]


REFUSED: list[tuple[dict[str, Any], str | None, int]] = [
    ({"n": 2}, "n", 400),
    ({"logit_bias": {"5": 1}}, "logit_bias", 400),
    ({"presence_penalty": 0.5}, "presence_penalty", 400),
    ({"service_tier": "flex"}, "service_tier", 400),
    ({"functions": []}, "functions", 400),
    ({"reasoning": {"max_tokens": 5}}, "reasoning.max_tokens", 400),
    ({"audio": {}}, "audio", 400),
    ({"temperature": -1}, None, 400),
    ({"max_tokens": 0}, "max_tokens", 400),
    ({"max_completion_tokens": -1}, "max_completion_tokens", 400),
    ({"stop": [""]}, None, 400),
    ({"messages": []}, None, 400),
    ({"messages": "hello"}, "messages", 400),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]}, None, 400),
    ({"tool_choice": "required"}, "tool_choice", 400),
    ({"tool_choice": {"type": "function", "function": {"name": "none"}}, "tools": [TIDE]}, "tool_choice", 400),
    ({"response_format": {"type": "xml"}}, "response_format", 400),
    ({"response_format": {"type": "json_object", "schema": "port"}}, "response_format", 400),
    ({"tools": [{"type": "function", "function": {"name": 5}}]}, None, 400),
    ({"model": "another"}, "model", 404),
    ({"messages": [{"role": "user", "content": "word " * 20_000}]}, None, 400),
]


@pytest.mark.parametrize(("change", "param", "status"), REFUSED, ids=[str(change)[:40] for change, *_ in REFUSED])
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_honoured_is_refused(served: Served, change: dict[str, Any], param: str | None, status: int, stream: bool) -> None:
    error = served.post("/v1/chat/completions", {"messages": ASKED, "stream": stream, **change}, status)["error"]
    assert error["param"] == param, error
    assert error["message"]


@pytest.mark.parametrize("body", [{"messages": ASKED}, {"prompt": ["The keeper", "A ship"]}])
def test_what_load_tools_ask_is_honoured(served: Served, body: dict[str, Any]) -> None:
    """GuideLLM asks for both, SGLang's and vLLM's tools for a fixed number of tokens: all were refused."""
    path = "/v1/completions" if "prompt" in body else "/v1/chat/completions"
    counted = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    with served.client() as http:
        said = http.post(path, json={**body, **counted, "max_tokens": 200, "ignore_eos": True}).text
    told = [json.loads(event[6:]) for event in said.split("\n\n") if event.startswith("data: {")]
    counts = [chunk["usage"]["completion_tokens"] for chunk in told]
    assert counts == sorted(counts)
    assert len(set(counts)) > 9
    assert counts[-1] == 200 * len({chunk["choices"][0]["index"] for chunk in told[:-1]})


def test_labels_change_nothing(served: Served) -> None:
    labels = {"user": "u", "metadata": {"a": "b"}, "prompt_cache_key": "k", "store": True, "n": 1, "service_tier": "auto", "stop": None}
    plain, labelled = (served.post("/v1/chat/completions", {"messages": ASKED, "max_tokens": 8, **more}) for more in ({}, labels))
    assert plain["choices"] == labelled["choices"]


def test_a_seed_draws_the_same_answer(served: Served) -> None:
    asked = {"messages": ASKED, "temperature": 1.5, "max_tokens": 12}
    with served.client() as http:
        said = [http.post("/v1/chat/completions", json={**asked, "seed": seed}).json()["choices"][0] for seed in (7, 7, -3)]
        greedy = http.post("/v1/chat/completions", json={**asked, "temperature": 0}).json()["choices"][0]
        assert http.post("/v1/chat/completions", json={**asked, "top_p": 0, "top_k": -1}).json()["choices"][0] == greedy
    assert said[0] == said[1] != said[2]


def test_a_client_that_leaves_frees_the_device(served: Served) -> None:
    with served.client() as http, http.stream("POST", "/v1/completions", json=ENDLESS) as answer:
        next(answer.iter_lines())
    engine = served.state.models.first.engine
    assert engine is not None
    assert wait_until(lambda: not (engine.scheduler.live or served.state.tenants.running))
    assert served.state.records.last(None, 1)[0].state == "cancelled"


def test_developer_messages_are_system_messages(served: Served) -> None:
    said = [{"role": "developer", "content": SYSTEM}, ASKED[1]]
    plain, developer = (served.post("/v1/chat/completions", {"messages": one, "max_tokens": 4}) for one in (ASKED, said))
    assert plain["choices"] == developer["choices"]
    assert plain["usage"]["prompt_tokens"] == developer["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    ("older", "newer"),
    [
        ({"content": None, "refusal": "I may not say that."}, {"content": "I may not say that."}),
        ({"content": [{"type": "refusal", "refusal": "I may not say that."}]}, {"content": "I may not say that."}),
        ({"content": [{"type": "text", "text": "I look.", "refusal": None}]}, {"content": "I look."}),  # as OpenAI's agents in JavaScript
        (
            {"content": None, "function_call": {"name": "tide", "arguments": '{"port": "Averil"}'}},
            {"tool_calls": [{"type": "function", "function": {"name": "tide", "arguments": '{"port": "Averil"}'}}]},
        ),
    ],
)
def test_what_an_assistant_said_in_older_fields_is_shown(served: Served, older: dict[str, Any], newer: dict[str, Any]) -> None:
    called = "tool_calls" in newer
    results = [{"role": role, "name": "tide", "content": "At 11."} for role in (("function", "tool") if called else ("user", "user"))]
    said = [[*ASKED, {"role": "assistant", **one}, result] for one, result in zip((older, newer), results)]
    shown = [served.post("/v1/chat/completions", {"messages": one, "tools": [TIDE], "max_tokens": 4}) for one in said]
    assert shown[0]["choices"] == shown[1]["choices"]
    assert shown[0]["usage"]["prompt_tokens"] == shown[1]["usage"]["prompt_tokens"]


@pytest.mark.parametrize("arguments", ['{"port": "Av', '["Averil"]', '"Averil"'])
def test_a_call_with_wrong_arguments_is_shown(served: Served, arguments: str) -> None:
    function = {"name": "tide", "arguments": arguments}
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "a", "type": "function", "function": function}]}
    said = [*ASKED, call, {"role": "tool", "tool_call_id": "a", "content": "The arguments are no JSON object: call again."}]
    # agents ask on so, and each later request has that call, too
    assert served.post("/v1/chat/completions", {"messages": said, "tools": [TIDE], "max_tokens": 64})
    assert with_role(call)["tool_calls"][0]["function"]["arguments"] == {"invalid_arguments": arguments}


def test_an_earlier_answer_in_sound_is_refused(served: Served) -> None:
    said = [*ASKED, {"role": "assistant", "audio": {"id": "audio_1"}}, ASKED[1]]
    assert "this server reads no sound" in served.post("/v1/chat/completions", {"messages": said}, 400)["error"]["message"]


def test_a_client_that_leaves_a_whole_answer_frees_the_device(served: Served) -> None:
    before = served.state.records.last(None, 1)

    def left() -> bool:  # a server that is slow begins after its client has left
        record = served.state.records.last(None, 1)
        return record != before and record[0].state != "running" and not served.state.tenants.running

    with served.client() as http, pytest.raises(httpx.ReadTimeout):
        http.post("/v1/completions", json={**ENDLESS, "stream": False}, timeout=0.3)
    assert wait_until(left)
    assert served.state.records.last(None, 1)[0].state == "cancelled"


def test_a_prompt_too_long_is_told_in_openais_words(served: Served) -> None:
    error = served.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "water " * 9000}]}, 400)["error"]
    assert error["code"] == "context_length_exceeded"
    assert error["message"].startswith("This model's maximum context length is 8192 tokens: "), "litellm reads it"


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/v1/chat/completions", {"messages": ASKED, "max_tokens": 2, "logprobs": True}),
        ("/v1/completions", {"prompt": "The keeper", "max_tokens": 2, "logprobs": 1}),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 2, "include": ["message.output_text.logprobs"]}),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_tokens_become_texts_off_the_loop(
    served: Served, monkeypatch: pytest.MonkeyPatch, path: str, asked: dict[str, Any], stream: bool
) -> None:
    loops: list[object] = []
    monkeypatch.setattr("agentcache.server.chat.token_bytes", lambda *given: (loops.append(asyncio._get_running_loop()), b"x")[1])
    with served.client() as http:
        assert '"logprob' in http.post(path, json={**asked, "stream": stream}).text
    assert set(loops) == {None}, "1,500 tokens with 20 others each stopped all answers for 0.4 s"
