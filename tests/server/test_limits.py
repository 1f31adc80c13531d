"""Bounds of requests: bodies, depths, times; and bodies that are none."""

from __future__ import annotations

import gzip
import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from agentcache.server.cache_api import ToolsBody
from agentcache.server.engine_api import DecodeBody, StreamBody
from agentcache.server.schemas import ChatBody
from tests.serving import ENDLESS, Served, ready, serving

CHAT = "/v1/chat/completions"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[]",
        b'"x"',
        b"null",
        b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"messages": [{"role": "user", "content": "x"}], "tools": ' + b'[{"a":' * 500 + b"1" + b"}]" * 500 + b"}",
        b'{"messages": [{"role": "user", "content": "\\ud800"}], "max_tokens": 1e400}',
        b'{"messages": [{"role": "user", "content": "x"}], "seed": ' + b"9" * 5000 + b"}",
        b'{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}',
    ],
    ids=lambda body: repr(body[:30]),
)
@pytest.mark.parametrize("path", [CHAT, "/v1/responses", "/tools"])
def test_a_body_that_is_none_is_refused(served: Served, path: str, body: bytes) -> None:
    with served.client() as http:
        answer = http.post(path, content=body, headers={"Content-Type": "application/json"})
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["message"]
        assert http.get("/health").status_code == 200


@pytest.mark.parametrize("headers", [{}, {"Content-Type": "text/plain"}])
def test_bodies_that_any_site_may_send_are_refused(served: Served, headers: dict[str, str]) -> None:
    with served.client() as http:
        answer = http.post("/v1/completions", content=b'{"prompt": "x", "max_tokens": 1}', headers=headers)
    assert answer.status_code == 400
    assert "content-type: application/json" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "more",
    ['"metadata": {"a": 1e400}', '"tools": [{"type": "function", "name": "f", "parameters": {"maximum": NaN}}]', '"temperature": 1e400'],
)
def test_numbers_that_json_has_not_are_refused(served: Served, more: str) -> None:
    with served.client() as http:
        body = f'{{"input": "hi", "max_output_tokens": 1, {more}}}'
        answer = http.post("/v1/responses", content=body, headers={"Content-Type": "application/json"})
    assert (answer.status_code, "NaN or Infinity" in answer.json()["error"]["message"]) == (400, True)


def test_a_body_that_breaks_off_is_told_where(served: Served) -> None:
    with served.client() as http:
        answer = http.post(CHAT, content=b'{"messages": []} x', headers={"Content-Type": "application/json"}).json()["error"]
    assert (answer["message"], answer["param"], answer["code"]) == ("body: is no JSON: Extra data at character 17", None, "invalid_json")


@pytest.mark.parametrize("body", ['{"prompt": "Küste"}'.encode("latin-1"), gzip.compress(b'{"prompt": "x"}')], ids=["latin-1", "gzip"])
def test_a_body_that_is_no_text_names_the_way(served: Served, body: bytes) -> None:
    with served.client() as http:
        answer = http.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "invalid_json"
    assert "send JSON in UTF-8, neither compressed" in answer.json()["error"]["message"]


def test_what_cannot_be_honoured_is_to_be_left_out(served: Served) -> None:
    error = served.post("/v1/completions", {"prompt": "The keeper", "suffix": "sleeps."}, 400)["error"]
    assert (error["message"], error["param"]) == ("suffix='sleeps.': cannot be honoured here: leave it out", "suffix")


@pytest.mark.parametrize("path", ["/health", "/", "/v1/models"])
def test_monitors_ask_for_heads(served: Served, path: str) -> None:
    with served.client() as http:
        head, whole = http.head(path), http.get(path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-length"] == whole.headers["content-length"]


def test_the_head_of_what_never_ends_does(served: Served) -> None:
    with served.client(timeout=20) as http:
        head = http.head("/events")
        assert http.get("/health").status_code == 200, "over the same connection, which is free again"
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-type"].startswith("text/event-stream")


@pytest.mark.parametrize("path", ["/tools", "/v1/engine/pin"])
def test_a_time_without_end_is_refused(served: Served, path: str) -> None:
    body = (
        '{"name": "x", "ttl_s": 1e400, "system": "x"}'
        if path == "/tools"
        else '{"messages": [{"role": "user", "content": "x"}], "ttl_s": 1e400}'
    )
    with served.client() as http:
        assert http.post(path, content=body, headers={"Content-Type": "application/json"}).status_code == 400
        assert http.get("/tools").status_code == 200


def test_a_misspelt_query_of_the_engine_is_refused(served: Served) -> None:
    with served.client() as http:
        answer = http.get("/v1/engine/documents", params={"nmae": "manual"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "unknown_parameter")
    assert answer.json()["error"]["message"] == "query.nmae: this parameter is not known here: leave it out"


def test_lone_surrogates_come_back_as_they_came(served: Served) -> None:
    items = [{"type": "message", "role": "user", "content": "\ud83d", "id": "msg_1"}]  # half of an emoji: what cut the text counts UTF-16
    with served.client() as http:
        body = json.dumps({"input": items, "user": "\ud83d", "max_output_tokens": 1})
        answer = http.post("/v1/responses", content=body, headers={"Content-Type": "application/json"}).json()
        assert answer["user"] == http.get(f"/v1/responses/{answer['id']}").json()["user"] == "\ud83d"
        assert http.get(f"/v1/responses/{answer['id']}/input_items").json()["data"][0]["content"][0]["text"] == "\ud83d"


def test_parameters_that_are_null_ask_for_nothing(served: Served) -> None:
    asked = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    plain, nulls = (served.post(CHAT, {**asked, **more}) for more in ({}, {"functions": None, "prediction": None, "n": None}))
    assert nulls["choices"] == plain["choices"]


def test_a_fault_of_the_server_is_told_in_json(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served.state.models.first.engine, "stream", lambda *words, **options: 1 / 0)
    assert served.post(CHAT, {"messages": [{"role": "user", "content": "hi"}]}, 500)["error"]["code"] == "internal_error"


def test_a_request_with_a_fault_runs_no_more(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentcache.server.chat.message_of", lambda message: 1 / 0)
    served.post(CHAT, {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}, 500)
    with served.client() as http:
        assert http.get("/status?last=1").json()["last"][0]["state"] == "cancelled"


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (ChatBody, {"messages": [0, 0]}),
        (ChatBody, {"messages": [], "x": 1, "y": 2}),
        (ChatBody, {"messages": [], "stream_options": {"x": 1, "y": 2}}),
        (ToolsBody, {"name": "x", "tools": [0, 0]}),
        (StreamBody, {"messages": [], "tools": [0, 0]}),
        (DecodeBody, {"ids": [-1, -1]}),
        (ChatBody, {"messages": [{}] * 100_001}),
        (StreamBody, {"messages": [], "tools": [{}] * 100_001}),
    ],
)
def test_of_many_elements_one_error_is_told(kind: type[BaseModel], body: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as refused:  # 16 million elements fit into a body, and each error takes 600 bytes
        kind.model_validate(body)
    assert refused.value.error_count() == 1


def test_a_body_is_bounded_with_and_without_a_length(tmp_path: Path) -> None:
    with serving(store=tmp_path, body_bytes=1000) as served, served.client() as http:
        assert http.post(CHAT, content=b"x" * 1001).status_code == 413
        assert http.post(CHAT, content=iter([b"x" * 600, b"x" * 600])).status_code == 413
        assert http.post(CHAT, json={"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}).status_code == 200


def test_counting_and_probing_take_a_place(served: Served) -> None:
    with served.client() as http, ExitStack() as places:
        http.post("/tools", json={"name": "desk", "system": "You help at a desk."})
        for _ in range(16):
            places.enter_context(served.state.tenants.admit(next(iter(served.state.tenants))))
        asked = {"messages": [{"role": "user", "content": "hi"}]}  # each may hold 16 MiB to tokenise: 3 GB
        query = {"group": "desk", "question": "?"}
        for path, body in (("/v1/messages/count_tokens", asked), ("/v1/cache/probe", asked), ("/query", query)):
            answer = http.post(path, json=body)
            assert (answer.status_code, answer.headers["retry-after"]) == (429, "1"), path
        places.close()
        assert http.post("/v1/messages/count_tokens", json=asked).json()["input_tokens"] > 0


def test_an_answer_that_takes_too_long_ends_with_an_error(tmp_path: Path) -> None:
    with serving(store=tmp_path, answer_s=0.0) as served, ready(served).client() as http:
        late = http.post("/v1/completions", json={**ENDLESS, "stream": False})
        assert (late.status_code, late.json()["error"]["code"]) == (504, "timeout")
        told = http.post("/v1/completions", json=ENDLESS).text
        assert '"code":"timeout"' in told
        assert "data: [DONE]" in told


@pytest.mark.parametrize("stream", [False, True])
def test_an_error_ends_all_texts_of_its_request(served: Served, monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    monkeypatch.setattr(served.state, "answer_s", 0.0)
    with served.client() as http:
        http.post("/v1/completions", json={**ENDLESS, "prompt": ["The keeper", "A ship"], "stream": stream})
        last = http.get("/status?last=2").json()["last"]
    assert [(record["state"], bool(record["error"])) for record in last] == [("failed", True)] * 2


def test_unknown_routes_and_methods_say_so(served: Served) -> None:
    with served.client() as http:
        for path in ("/v1/none", "/chat/completions", "/messages", "/api/tags"):  # a URL without /v1; other APIs' clients
            lost = http.post(path, json={}).json()["error"]
            assert lost["code"] == "not_found"
            assert lost["message"].endswith("OpenAI's and Anthropic's APIs lie under /v1, and GET /openapi.json tells of all routes")
        assert http.put("/tools").status_code == 405
        assert http.get("/v1/models/none").json()["error"]["code"] == "model_not_found"
        assert http.get("/v1/models/embedded").json()["id"] == "embedded"


def test_a_body_that_is_not_declared_json_names_the_header(served: Served) -> None:
    with served.client() as http:
        answer = http.post(CHAT, content=b'{"messages": []}', headers={"Content-Type": "application/x-www-form-urlencoded"})
    assert answer.status_code == 400
    assert "send the header content-type: application/json" in answer.json()["error"]["message"]
