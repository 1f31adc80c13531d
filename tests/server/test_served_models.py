"""Models that load in the background, fail, lie idle, and stand beside each other."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.requests import Request
from typer.testing import CliRunner

from agentcache import Engine
from agentcache.cli.app import app
from agentcache.server.cache_api import events
from agentcache.server.listening import EndingServer
from agentcache.server.registered_tools import Registered, RegisteredTools
from agentcache.server.served_models import ServedModel, ServedModels
from agentcache.server.state import ServerState
from agentcache.server.tenants import Tenants
from tests.engines import wait_until
from tests.serving import ASKED, ENDLESS, commanded, ready, serving

CHAT = "/v1/chat/completions"
BODY = {"messages": ASKED, "max_tokens": 1}


def embedded(name: str = "embedded") -> ServedModel:
    return ServedModel(name, lambda say: Engine("embedded", store=None))


def test_health_is_answered_while_weights_load() -> None:
    go = threading.Event()

    def open_slowly(say: Callable[[str], None]) -> Engine:
        say("reading weights")
        go.wait()
        return Engine("embedded", store=None)

    with serving(ServedModel("slow", open_slowly)) as served, served.client() as http:
        health = http.get("/health").json()
        while health["models"][0]["phase"] != "reading weights":
            health = http.get("/health").json()
        assert (health["status"], health["models"][0]["state"]) == ("loading", "loading")
        assert http.get("/ready").status_code == 503
        answers: list[int] = []
        asking = threading.Thread(target=lambda: answers.append(http.post(CHAT, json=BODY).status_code))
        asking.start()
        go.set()
        asking.join()
        assert answers == [200], "a request waits until its model is there"
        assert http.get("/ready").json()["ready"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, BODY),
        ("/v1/messages/count_tokens", BODY),
        ("/v1/cache/probe", {"messages": BODY["messages"]}),
        ("/v1/engine/render", {"text": "tide"}),
        ("/tools", {"name": "desk", "system": "Answer."}),
        ("/query", {"group": "known", "question": "When?"}),
    ],
)
def test_a_client_that_leaves_a_loading_model_frees_its_place(path: str, body: dict[str, Any]) -> None:
    go = threading.Event()

    def open_slowly(say: Callable[[str], None]) -> Engine:
        go.wait()
        return Engine("embedded", store=None)

    with serving(ServedModel("slow", open_slowly), most=1) as served, served.client() as http:
        served.state.tools.add(Registered("known", "default", "slow", "Answer.", pinned=False))
        with pytest.raises(httpx.ReadTimeout):
            http.post(path, json=body, timeout=0.3)
        first = served.state.models.first
        left = wait_until(lambda: not served.state.tenants.running and not first.busy)
        assert (left, first.state) == (True, "loading")
        go.set()
        assert wait_until(lambda: http.post(path, json=body).status_code == 200), "on a busy machine it comes once its client has left"


def test_forgetting_reaches_every_model() -> None:
    with serving(embedded("a"), embedded("b")) as served, ready(served).client() as http:
        for name in ("a", "b"):
            http.post(CHAT, json={**BODY, "model": name})
        http.post("/v1/cache/forget", json={})
        for name in ("a", "b"):
            assert http.post("/v1/cache/probe", json={"messages": ASKED, "model": name}).json()["memory_tokens"] == 0


def test_models_stay_open_while_all_forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was idle was closed meanwhile, and the deletion ended as 503, half done."""
    with serving(embedded("a"), embedded("b")) as served, ready(served).client() as http:
        http.post(CHAT, json={**BODY, "model": "b"})
        first, other = served.state.models.all
        assert first.engine is not None
        assert other.engine is not None
        forget, close, busy = first.engine.forget, other.engine.close, list[int]()

        def slow(**wanted: Any) -> Any:
            busy.append(other.busy)
            if not other.busy:  # as `ServedModels.look_after` closes it
                close()
            return forget(**wanted)

        monkeypatch.setattr(first.engine, "forget", slow)
        answer = http.post("/v1/cache/forget", json={})
        assert (busy, answer.status_code) == ([1], 200)
        assert (first.busy, other.busy) == (0, 0)


def test_the_end_of_loading_is_told_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that was ready right after an event was shown as loading for 15 seconds."""
    model, waits = embedded(), list[float]()
    state = ServerState(ServedModels([model]), Tenants.read(None, 16), RegisteredTools(None))

    async def wait(seconds: float) -> None:
        waits.append(seconds)

    async def told() -> list[str]:
        said: AsyncIterator[Any] = (await events(Request({"type": "http"}), state, state.tenants.of(""))).body_iterator  # type: ignore[attr-defined]
        model.state = "loading"
        first = await anext(said)
        model.state = "ready"
        return [first, await anext(said)]

    monkeypatch.setattr(state.records, "wait", wait)
    assert [word in said for word, said in zip(("loading", "ready"), asyncio.run(told()), strict=True)] == [True, True]
    assert len(waits) == 1


def test_a_model_that_cannot_be_loaded_says_why(caplog: pytest.LogCaptureFixture) -> None:
    tried: list[int] = []

    def fail(say: Callable[[str], None]) -> Engine:
        tried.append(1)
        raise KeyError("no such layer")

    with serving(ServedModel("broken", fail), embedded()) as served, served.client() as http:
        answer = http.post(CHAT, json=BODY)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "model_failed")
        assert "no such layer" in answer.text
        assert http.get("/health").json()["status"] == "failed"
        for told in ("/health", "/status"):
            assert http.get(told).json()["models"][0]["phase"] == "KeyError: 'no such layer'"
        assert http.post(CHAT, json={**BODY, "model": "embedded"}).status_code == 200
        before = len(tried)  # one, if the request came amid the first try
        assert http.post(CHAT, json=BODY).status_code == 503
        assert len(tried) == before + 1, "each request tries again"
    assert caplog.text.count("model 'broken' could not be loaded: KeyError: 'no such layer'") == len(tried)
    assert "never retrieved" not in caplog.text


def test_models_are_told_apart_by_name() -> None:
    with serving(embedded("one"), embedded("two")) as served, ready(served).client() as http:
        assert [model["id"] for model in http.get("/v1/models").json()["data"]] == ["one", "two"]
        assert served.state.models.get("two").state == "unloaded"
        assert http.post(CHAT, json={**BODY, "model": "two"}).json()["model"] == "two"
        assert http.post(CHAT, json=BODY).json()["model"] == "one"
        assert served.state.models.get("two").state == "ready"


def test_an_idle_model_is_closed_and_loaded_again() -> None:
    with serving(embedded(), idle_s=0.05) as served, ready(served).client() as http:
        first = served.state.models.first
        for _ in range(2):
            assert http.post(CHAT, json=BODY).status_code == 200
            engine = first.engine
            while not (engine is None or engine.closed):
                time.sleep(0.01)
            assert first.state == "unloaded"


@pytest.mark.parametrize("ends", ["stream", "whole"])
def test_running_answers_are_told_when_the_server_ends(ends: str) -> None:
    body = {**ENDLESS, "stream": ends == "stream"}
    with serving(embedded()) as served, ready(served).client() as http:
        said: list[str] = []
        asking = threading.Thread(target=lambda: said.append(http.post("/v1/completions", json=body).text))
        asking.start()
        engine = served.state.models.first.engine
        while engine is None or not engine.scheduler.live:
            time.sleep(0.005)
        loop = served.state.models.first.load().get_loop()
        loop.call_soon_threadsafe(served.state.closing.set)
        asking.join()
        assert '"code":"shutting_down"' in said[0]
        assert http.post(CHAT, json=BODY).status_code == 503


@pytest.mark.parametrize(("option", "loading"), [(["--weights", "int8"], {"weights": "int8"}), (["--bits", "4"], {"load_in_4bit": True})])
def test_weights_are_quantized_as_the_command_says(monkeypatch: pytest.MonkeyPatch, option: list[str], loading: dict[str, Any]) -> None:
    made: list[dict[str, Any]] = []
    monkeypatch.setattr("agentcache.engine.Engine", lambda path, **options: made.append(options))
    state, _ = commanded(monkeypatch, "embedded", *option)
    assert state is not None
    state.models.first.open(print)
    assert loading.items() <= made[0].items()
    assert "--bits=3: must be 4 or 8" in commanded(monkeypatch, "embedded", "--bits", "3")[1]
    assert "choose one" in commanded(monkeypatch, "embedded", "--bits", "4", "--weights", "int8")[1]
    assert "MODEL: there is no folder '/no/model'" in commanded(monkeypatch, "m=/no/model")[1]
    assert "--adapter: there is no folder './no'" in commanded(monkeypatch, "embedded", "--adapter", "a=./no")[1]


def test_the_command_has_receipts_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made: list[dict[str, Any]] = []
    monkeypatch.setattr("agentcache.engine.Engine", lambda path, **options: made.append(options))
    state, _ = commanded(monkeypatch, "embedded", "--receipts", str(tmp_path / "receipts"))
    assert state is not None
    state.models.first.open(print)
    assert made[0]["receipts"] == tmp_path / "receipts"
    (tmp_path / "file").touch()
    assert "name a folder of your own" in commanded(monkeypatch, "embedded", "--receipts", str(tmp_path / "file"))[1]


def test_the_command_tells_an_address_that_clients_take(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "http://127.0.0.1:" in commanded(monkeypatch, "embedded")[1]
    with socket.create_server(("::1", 0), family=socket.AF_INET6) if socket.has_ipv6 else pytest.skip("no IPv6"):
        assert "http://[::1]:" in commanded(monkeypatch, "embedded", "--host", "::1")[1]


@pytest.mark.parametrize(("option", "value"), [("--requests", "0"), ("--timeout", "-1"), ("--timeout", "0"), ("--idle", "-1")])
def test_bounds_that_are_none_are_refused(monkeypatch: pytest.MonkeyPatch, option: str, value: str) -> None:
    monkeypatch.setattr(EndingServer, "run", lambda server, sockets: None)
    done = CliRunner().invoke(app, ["serve", "embedded", "--port", "0", option, value])
    assert done.exit_code > 0
    assert option in done.output


@pytest.mark.parametrize(("option", "said"), [("--warm", "--warm="), ("--system", "--system="), ("--policy", "policy=")])
def test_files_that_are_not_there_are_told_at_once(monkeypatch: pytest.MonkeyPatch, option: str, said: str) -> None:
    state, told = commanded(monkeypatch, "embedded", option, "/nowhere.json")
    assert state is None
    assert f"{said}'/nowhere.json'" in told


def test_the_server_loads_no_library_for_web_sockets() -> None:
    server = EndingServer(None, asyncio.Event())
    server.config.load()
    assert server.config.ws_protocol_class is None
