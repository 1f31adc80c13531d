"""Tool groups, questions, probes, status and forgetting over HTTP; a restarted server goes on from its disk."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agentcache.model.fingerprint import Fingerprint
from agentcache.server.records import Records
from agentcache.server.registered_tools import Registered, RegisteredTools
from agentcache.server.served_models import ServedModel, ServedModels
from agentcache.server.state import ServerState
from agentcache.server.tenants import Tenants
from tests.engines import wait_until
from tests.serving import ASKED, SYSTEM, TIDE, Served, embedded, ready, serving

GROUP = {"name": "desk", "system": SYSTEM, "tools": [TIDE]}
QUESTION = {"group": "desk", "question": "When is high water in Port Averil?", "max_tokens": 2}


def test_a_group_is_registered_asked_and_deleted(served: Served) -> None:
    made = served.post("/tools", GROUP)
    assert (made["status"], made["pinned"], made["tools"]) == ("warm", True, ["tide"])
    assert made["computed_tokens"] == made["prefix_tokens"] > 300
    assert served.post("/tools", GROUP)["computed_tokens"] <= 1, "known already"
    with served.client() as http:
        assert [group["name"] for group in http.get("/tools").json()["groups"]] == ["desk"]
        answer = http.post("/query", json=QUESTION).json()
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= made["prefix_tokens"]
        assert http.delete("/tools/desk").json()["groups"] == ["desk"]
        assert http.delete("/tools/desk").status_code == 404
        assert http.get("/tools").json()["groups"] == []
    assert served.post("/query", QUESTION, 404)["error"]["code"] == "group_not_found"
    assert served.state.models.first.engine.store.audit()["pins"] == 0  # type: ignore[union-attr]


def test_a_probe_says_what_the_next_request_finds(served: Served) -> None:
    messages = [{"role": "system", "content": f"Of probes. {SYSTEM}"}, ASKED[1]]
    body = {"messages": messages, "tools": [TIDE]}
    cold = served.post("/v1/cache/probe", body)
    assert (cold["memory_tokens"], cold["disk_tokens"]) < (32, 1)
    asked = served.post("/v1/chat/completions", {**body, "max_tokens": 1})
    warm = served.post("/v1/cache/probe", body)
    assert cold["prompt_tokens"] == warm["prompt_tokens"] == asked["usage"]["prompt_tokens"]
    assert cold["computed_tokens"] == asked["x_agentcache"]["receipt"]["computed_tokens"]
    assert (warm["computed_tokens"], warm["reason"]) == (1, "LAST_TOKEN")


def test_a_restarted_server_computes_the_tail_only(tmp_path: Path) -> None:
    with serving(store=tmp_path) as first:
        made = ready(first).post("/tools", GROUP)
        cold = first.post("/query", QUESTION)
    with serving(store=tmp_path) as second:
        with ready(second).client() as http:
            (group,) = http.get("/tools").json()["groups"]
        assert (group["name"], group["status"], group["digest"]) == ("desk", "warm", made["digest"])
        warm = second.post("/query", {**QUESTION, "question": "When is high water in Tarn Haven?"})
    assert warm["usage"]["prompt_tokens_details"]["cached_tokens"] >= made["prefix_tokens"]
    assert cold["usage"]["prompt_tokens"] < made["prefix_tokens"] + 60


def test_loading_names_no_tool_group(tmp_path: Path) -> None:
    registered = RegisteredTools(tmp_path)
    registered.add(Registered("secret", "alice", "embedded", SYSTEM))
    told: list[str] = []  # /health tells it without a key
    model = ServedModel("embedded", lambda say: SimpleNamespace(warm=told.append, adapters=()))  # type: ignore[arg-type, return-value]
    ServerState(ServedModels([model]), Tenants(None, 1), registered)
    with suppress(TypeError):
        model.open(told.append)
    assert told
    assert "secret" not in str(told)


def test_groups_beyond_the_bound_are_not_computed(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentcache.server.registered_tools.MOST", 0)
    assert served.post("/tools", {**GROUP, "name": "beyond"}, 429)["error"]["code"] == "too_many_groups"
    assert all(group.name != "beyond" for group in served.state.models.engines["embedded"].groups)


def test_listing_groups_looks_at_no_weights(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    made = served.post("/tools", {**GROUP, "pinned": False})
    served.state.models.engines["embedded"].flush()
    looks: list[Fingerprint] = []  # of each group, while all answers wait
    monkeypatch.setattr(Fingerprint, "whole", property(looks.append))
    with served.client() as http:
        (group,) = http.get("/tools").json()["groups"]
    assert (group["prefix_tokens"], looks) == (made["prefix_tokens"], [])


def test_a_group_forgotten_while_computed_may_be_sent_again(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = served.state.models.first.engine
    assert engine is not None
    warm, body = engine.warm, {"name": "long", "system": SYSTEM * 8}

    def during(done: int, total: int) -> None:
        if done < total:
            engine.forget(namespace="default")

    monkeypatch.setattr(engine, "warm", partial(warm, on_progress=during))
    with served.client() as http:
        answer = http.post("/tools", json=body)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        monkeypatch.undo()
        assert http.post("/tools", json=body).status_code == 200
        assert http.delete("/tools/long").status_code == 200


def test_forgetting_takes_the_stored_responses(served: Served) -> None:
    asked = served.post("/v1/responses", {"input": "hi", "max_output_tokens": 1})
    with served.client() as http:
        for body, status in (({"older_than": 1000}, 200), ({"older_than": 0}, 404)):
            assert served.post("/v1/cache/forget", body)
            assert http.get(f"/v1/responses/{asked['id']}").status_code == status


def test_forgetting_leaves_nothing(served: Served) -> None:
    served.post("/v1/chat/completions", {"messages": ASKED, "max_tokens": 1})
    assert served.post("/v1/cache/forget", {"older_than": 0})["memory_pages"] > 0
    assert served.post("/v1/cache/probe", {"messages": ASKED})["memory_tokens"] == 0
    assert served.post("/v1/cache/forget", {"group": "none"}, 404)["error"]["code"] == "group_not_found"


def test_status_tells_of_groups_tiers_and_requests(served: Served) -> None:
    served.post("/tools", GROUP)
    asked = served.post("/query", QUESTION)
    with served.client() as http:
        status = http.get("/status?last=1").json()
        assert http.get(f"/v1/receipts/{asked['id']}").json() == status["last"][0] == asked["x_agentcache"]
        metrics = http.get("/metrics").text
        assert http.get("/v1/receipts/none").status_code == 404
    model = status["models"][0]
    assert (model["model"], model["state"]) == ("embedded", "ready")
    assert model["memory"]["pinned_pages"] > 0
    assert status["groups"][0]["name"] == "desk"
    assert status["refusals"]
    assert 0 < status["tokens"]["hit_share"] < 1
    for name in (
        "agentcache_requests_total{",
        "agentcache_ttft_seconds_bucket{",
        'source="memory"',
        'what="evictions"',
        'reason="DIVERGED"',
    ):
        assert name in metrics, name
    assert SYSTEM[:20] not in str(status)


def test_who_follows_the_status_sees_requests_end(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    running: list[int] = []
    wake = Records.wake

    def told(self: Records) -> None:
        running.append(served.state.tenants.running)
        wake(self)

    monkeypatch.setattr(Records, "wake", told)
    with served.client() as http:
        assert http.post("/v1/completions", json={"prompt": "Fog.", "max_tokens": 1}).status_code == 200
    assert wait_until(lambda: running[-1:] == [0])
    assert 1 in running


def test_a_timed_group_is_unpinned_and_pinned_again(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    served.post("/tools", {**GROUP, "name": "brief", "ttl_s": 3600})
    (group,) = [one for one in served.state.tools.of(None) if one.name == "brief"]
    assert served.state.tools.lapsed() == []
    served.state.tools._used[group.namespace, "brief"] -= 3601
    served.state.models.keep()
    engine = served.state.models.first.engine
    assert engine is not None
    assert "brief" not in {one.name for one in engine.groups}
    served.post("/query", {**QUESTION, "group": "brief"})
    assert "brief" in {one.name for one in engine.groups}


def test_a_timed_group_lapses_after_a_restart(tmp_path: Path) -> None:
    with serving(store=tmp_path) as first:
        ready(first).post("/tools", {**GROUP, "ttl_s": 3600})
    with serving(store=tmp_path) as second:
        used = ready(second).state.tools._used
        assert set(used) == {("default", "desk")}
        used["default", "desk"] -= 3600
        second.post("/v1/chat/completions", {"messages": ASKED, "tools": [TIDE], "max_tokens": 1})
        assert second.state.tools.lapsed() == [], "a question with these tools is a use"
        used["default", "desk"] -= 3600
        assert [group.name for group in second.state.tools.lapsed()] == ["desk"]


def test_of_a_deleted_group_no_time_is_kept() -> None:
    tools = RegisteredTools(None)
    group = Registered("a", "alice", "small", "x", ttl_s=5.0)
    tools.add(group)
    tools.use("alice", "a")
    tools.drop(group)
    assert not tools._used


def test_servers_on_one_store_remember_all_groups(tmp_path: Path) -> None:
    one, two = Registered("a", "alice", "small", "x"), Registered("b", "bob", "large", "y")
    first, second = RegisteredTools(tmp_path), RegisteredTools(tmp_path)
    first.add(one)
    second.add(two)
    assert RegisteredTools(tmp_path).of(None) == second.of(None) == [one, two]
    second.drop(two)
    first.add(replace(one, ttl_s=5.0))
    assert RegisteredTools(tmp_path).of(None) == [replace(one, ttl_s=5.0)]


def test_a_group_of_another_model_is_deleted(tmp_path: Path) -> None:
    with serving(replace(embedded(None), name="small"), replace(embedded(tmp_path), name="large"), store=tmp_path) as served:
        ready(served).post("/tools", {**GROUP, "model": "large"})
        for name in ("gone", "old"):
            served.state.tools.add(Registered(name, "default", "removed", SYSTEM, ttl_s=1.0))
        assert served.post("/v1/cache/forget", {"group": "desk"})["memory_pages"] > 0
        assert served.post("/v1/cache/forget", {"group": "gone"})["groups"] == []
        served.state.tools.use("default", "old")
        served.state.tools._used["default", "old"] -= 1
        served.state.models.keep()
        with served.client() as http:
            assert http.delete("/tools/old").status_code == 200
            assert http.get("/tools").json()["groups"] == []


@pytest.mark.parametrize("body", [{}, {"name": ""}, {"name": "x", "ttl_s": 0}, {"name": "x", "more": 1}, {"name": "x", "tools": [5]}])
def test_a_group_that_cannot_be_is_refused(served: Served, body: dict[str, Any]) -> None:
    assert served.post("/tools", body, 400)["error"]["message"]


def test_released_pin_leaves_its_group_on_disk(served: Served) -> None:
    with served.client() as client:
        client.post("/tools", json={"name": "loose", "system": SYSTEM, "tools": [TIDE]})
        assert client.patch("/tools/loose", json={"pinned": False}).json()["pinned"] is False
        served.state.models.first.engine.flush()  # type: ignore[union-attr]
        (group,) = [one for one in client.get("/tools").json()["groups"] if one["name"] == "loose"]
        assert (group["pinned"], group["tier"]) == (False, "disk")
        again = client.patch("/tools/loose", json={"pinned": True}).json()
        assert (again["pinned"], again["tier"], again["prefix_tokens"]) == (True, "memory", group["prefix_tokens"])
        client.delete("/tools/loose")


def test_reuse_off_computes_all_and_is_no_miss(served: Served) -> None:
    with served.client() as client:
        client.post("/tools", json={"name": "off", "system": SYSTEM, "tools": [TIDE]})
        asked = {"group": "off", "question": "When is high water in Port Averil?", "max_tokens": 4}
        on, off = client.post("/query", json=asked).json(), client.post("/query", json={**asked, "reuse": "off"}).json()
        assert on["choices"][0]["message"]["content"] == off["choices"][0]["message"]["content"]
        assert on["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        assert off["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        (group,) = [one for one in client.get("/tools").json()["groups"] if one["name"] == "off"]
        assert (group["hits"], group["requests"]) == (1, 1)
        client.delete("/tools/off")


@pytest.mark.parametrize("most", [0, -1])
def test_a_question_of_no_tokens_is_refused(served: Served, most: int) -> None:
    served.post("/tools", GROUP)
    assert served.post("/query", {**QUESTION, "max_tokens": most}, 400)["error"]["param"] == "max_tokens"


def test_a_probe_of_many_contexts_is_refused_at_once(served: Served) -> None:
    told = served.post("/v1/cache/probe", {"messages": [{"role": "user", "content": "water " * 200_000}]}, 400)["error"]
    assert told["code"] == "context_length_exceeded"
