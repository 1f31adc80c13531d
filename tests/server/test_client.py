"""RemoteEngine over a running server: what an Engine in process answers, accounts for, pins and refuses."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from agentcache import PASSAGES, Constraint, Engine, Message, Part, RemoteEngine, Sampling, Schema, client, remote_stream
from agentcache.cli.app import app
from agentcache.errors import (
    AgentCacheError,
    CancelledError,
    ConfigError,
    ContextOverflowError,
    EngineClosedError,
    GenerationError,
    MessageError,
    PolicyError,
    ToolSchemaError,
)
from tests.engines import wait_until
from tests.serving import ADMIN, ALICE, ASKED, BOB, SYSTEM, TIDE, Served, keyed, ready, serving

SHORT = Sampling(max_tokens=24, logprobs=1)
TIDES = ("The ebb begins at noon and ends at dusk. ", "A bell rings twice in fog, once an hour. ", "Ropes are sold at the old lock. ")


@pytest.fixture(scope="module")
def remote(served: Served) -> Iterator[RemoteEngine]:
    with RemoteEngine(served.url) as engine:
        yield engine


@pytest.fixture(scope="module")
def local() -> Iterator[Engine]:
    with Engine("embedded", store=None) as engine:
        yield engine


@pytest.mark.parametrize(
    ("asked", "tools", "constraint"),
    [
        ([Message("user", "When is high water?")], [], None),
        ([Message("user", "When is high water in Port Averil?")], [TIDE], Constraint("any")),
        ([Message("user", "A number.")], [], Constraint(regex="[0-9]{3}")),
        ("The keeper of the", [], None),
    ],
)
def test_answers_are_those_of_an_engine(remote: RemoteEngine, local: Engine, asked: object, tools: list, constraint: object) -> None:
    options = {"sampling": SHORT, "constraint": constraint, "turn": "one", "reuse": "off"}
    there, here = (engine.generate(asked, tools, **options) for engine in (remote, local))
    assert (there.text, there.ids, there.message, there.logprobs) == (here.text, here.ids, here.message, here.logprobs)
    assert (there.cut, there.invalid_calls, there.usage) == (here.cut, here.invalid_calls, here.usage)
    told = [list(engine.stream(asked, tools, **options).deltas()) for engine in (remote, local)]
    assert told[0] == told[1]
    told = [[(chunk.text, chunk.ids) for chunk in engine.stream(asked, tools, **options)] for engine in (remote, local)]
    assert told[0] == told[1]
    assert remote.tokenizer.decode(there.ids) == local.tokenizer.decode(there.ids)


def test_deltas_after_the_last_chunk_arrive(remote: RemoteEngine, local: Engine) -> None:
    """What may begin a call is held back until the answer ends."""
    forced = "It is lit. <tool_"
    options = {"sampling": Sampling(max_tokens=len(local.tokenizer(forced, add_special_tokens=False)["input_ids"]), forced=forced)}
    told = ["".join(d.text for d in engine.stream(ASKED, [TIDE], **options).deltas()) for engine in (remote, local)]
    assert told == [forced, forced]


def test_receipts_count_what_the_server_cached(remote: RemoteEngine) -> None:
    first, second = (remote.generate(ASKED, [TIDE], sampling=SHORT).receipt for _ in range(2))
    assert first.cached_tokens + first.computed_tokens == first.prompt_tokens
    assert second.cached_tokens == second.prompt_tokens - 1
    assert [str(one.reason) for one in second.refusals] == ["LAST_TOKEN"]
    assert remote.probe(ASKED, [TIDE]).memory_tokens == second.cached_tokens
    assert len(remote.renderer.render(ASKED, [TIDE]).ids) == second.prompt_tokens


def test_a_receipt_is_whole_once_its_stream_has_ended(remote: RemoteEngine) -> None:
    stream = remote.stream(ASKED, [TIDE], sampling=SHORT)
    ids = [one for chunk in stream for one in chunk.ids]
    receipt = stream.receipt
    assert (receipt.completion_tokens, receipt.finish_reason) == (len(ids), "stop")
    assert receipt is stream.completion.receipt


def test_errors_keep_their_classes(remote: RemoteEngine, local: Engine) -> None:
    long = "word " * local.model.context_tokens
    for kind, asked, tools in ((ContextOverflowError, long, []), (MessageError, [], []), (ToolSchemaError, ASKED, [{"name": 1}])):
        said = []
        for engine in (remote, local):
            with pytest.raises(kind) as told:
                engine.stream(asked, tools)
            said.append(str(told.value))
        assert said[0] == said[1]
    with pytest.raises(ConfigError, match="on_logits="):
        remote.stream(ASKED, on_logits=print)
    with pytest.raises(ConfigError, match="wrong: this parameter is not known"):
        remote.stream(ASKED, wrong=1)
    with pytest.raises(ConfigError, match="the API key decides"):
        remote.stream(ASKED, namespace="mine")
    with pytest.raises(EngineClosedError, match="no server answers"), RemoteEngine("http://127.0.0.1:9") as nowhere:
        nowhere.stream(ASKED)


@pytest.mark.parametrize("address", [5, "localhost:8787", "http://127.0.0.1:port", "http://127.0.0.1:99999"])
def test_an_address_that_is_none_is_named(address: Any) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"base_url={address!r}: must be the address of an `agentcache serve`")):
        RemoteEngine(address)


@pytest.mark.parametrize(
    ("status", "kind", "said"),
    [
        (404, "text/plain", "404 page not found"),  # Ollama
        (404, "application/json", '{"detail": "Not Found"}'),  # vLLM
        (404, "application/json", '{"error": {"code": 404, "message": "File Not Found", "type": "not_found_error"}}'),  # llama.cpp
        (200, "application/json", '{"error": "Unexpected endpoint or method. (POST /v1/engine/stream)"}'),  # LM Studio
        (200, "text/html", "<html>"),
    ],
)
def test_another_server_is_told_from_one_of_ours(status: int, kind: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with RemoteEngine("http://127.0.0.1:9/v1") as engine:
        answers = httpx.MockTransport(lambda _: httpx.Response(status, headers={"content-type": kind}, text=said))
        monkeypatch.setattr(engine, "_http", httpx.AsyncClient(base_url="http://127.0.0.1:9", transport=answers))
        with pytest.raises(ConfigError, match=re.escape(f"answered {status} {said!r:.100}: is it an `agentcache serve`?")):
            engine.generate("x")


def test_tool_groups_are_pinned_and_released(served: Served, remote: RemoteEngine) -> None:
    group = remote.warm(SYSTEM, [TIDE], name="tides")
    assert group in remote.groups
    assert (group.name, group.tools) == ("tides", ("tide",))
    with served.client() as http:
        (listed,) = [one for one in http.get("/tools").json()["groups"] if one["name"] == "tides"]
        told = {"status": "pinned", "pinned": True, "tools": ["tide"], "digest": group.page_keys[-1], "pages": group.pages}
        assert told.items() <= listed.items()
        assert http.patch("/tools/tides", json={"pinned": False}).json()["pinned"] is False
        assert http.delete("/tools/tides").status_code == 404
        assert group not in remote.groups
    assert remote.warm(SYSTEM, [TIDE], name="tides").page_keys == group.page_keys
    answer = remote.generate(ASKED, [TIDE], tools_order="sticky", group="tides", sampling=SHORT)
    assert answer.receipt.cached_tokens >= group.prefix_tokens
    assert remote.release("tides")
    assert not remote.release("tides")
    assert group not in remote.groups
    assert remote.forget(older_than=0).memory_pages > 0
    assert remote.probe(ASKED, [TIDE]).memory_tokens == 0
    with pytest.raises(ConfigError, match="name what is to be forgotten"):
        remote.forget()


def test_a_diagnosis_is_asked_over_http(remote: RemoteEngine) -> None:
    receipt = remote.generate(ASKED, sampling=SHORT, diagnose="routes").receipt
    assert any("no experts" in note for note in receipt.notes)


def test_a_fault_in_reading_an_answer_reaches_the_caller(remote: RemoteEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_stream, "reads", None)
    with pytest.raises(GenerationError, match="broke off: 'NoneType'"):
        remote.generate(ASKED, sampling=SHORT)


def test_a_session_is_named_and_forgotten(remote: RemoteEngine) -> None:
    first = remote.generate(ASKED, [TIDE], sampling=SHORT, session="keeper")
    asked = [*ASKED, first.message, Message("user", "And tomorrow?")]
    assert remote.generate(asked, [TIDE], sampling=SHORT, session="keeper").receipt.resumed == "extend"
    assert remote.forget(session="keeper").groups == ("session:keeper",)
    assert remote.generate(asked, [TIDE], sampling=SHORT, session="keeper").receipt.resumed == ""


def test_counts_are_those_of_the_key(remote: RemoteEngine, served: Served) -> None:
    before = remote.stats()
    receipt = remote.generate("Fog.", sampling=Sampling(max_tokens=2)).receipt
    after = remote.stats()
    assert sum(after["requests"].values()) == sum(before.get("requests", {}).values()) + 1
    assert after["tokens"]["completion"] == before.get("tokens", {}).get("completion", 0) + receipt.completion_tokens
    with pytest.raises(ConfigError, match="the API key decides"):
        remote.stats("other")
    done = CliRunner().invoke(app, ["stats", "--url", served.url, "--json"])
    assert json.loads(done.stdout)["requests"] == after["requests"]


def test_leaving_early_frees_the_device(served: Served, remote: RemoteEngine) -> None:
    with remote.stream("The keeper of the", sampling=Sampling(max_tokens=3000)) as stream:
        next(stream)
    with pytest.raises(CancelledError):
        _ = stream.completion
    _idle(served)


def _idle(served: Served) -> None:
    assert wait_until(lambda: not served.state.tenants.running)


def test_closing_ends_its_requests(served: Served) -> None:
    engine = RemoteEngine(served.url)
    stream = engine.stream("The keeper of the", sampling=Sampling(max_tokens=3000))
    next(stream)
    engine.close()
    with pytest.raises(CancelledError):
        list(stream)
    with pytest.raises(EngineClosedError):
        engine.stream(ASKED)
    _idle(served)


def error_of(work: Callable[[], object]) -> list[AgentCacheError]:
    """What a call raises; nothing if it does not come back."""
    found: list[AgentCacheError] = []

    def run() -> None:
        try:
            work()
        except AgentCacheError as error:
            found.append(error)

    thread = threading.Thread(target=run, name="asks", daemon=True)
    thread.start()
    thread.join(30)
    return found


def test_a_call_that_meets_the_close_is_refused(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, stopping, asked = RemoteEngine(served.url), threading.Event(), threading.Event()
    closing = threading.Thread(target=engine.close)
    check, stop, run = engine.check_open, engine._loop.stop, asyncio.run_coroutine_threadsafe

    def checked() -> None:
        check()
        closing.start()
        assert stopping.wait(30)

    def stopped() -> None:
        stop()
        stopping.set()
        assert asked.wait(30)

    def scheduled(*given: Any) -> Any:
        try:
            return run(*given)
        finally:
            if threading.current_thread().name == "asks":
                asked.set()

    def ask() -> None:
        try:
            engine._call("GET", "/v1/engine/stats", {})
        finally:
            asked.set()

    monkeypatch.setattr(engine, "check_open", checked)
    monkeypatch.setattr(engine._loop, "stop", stopped)
    monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", scheduled)
    assert [type(error) for error in error_of(ask)] == [EngineClosedError]
    closing.join(30)


def test_a_stream_closed_before_it_is_read_ends(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    begin = asyncio.ensure_future

    def cancelled(work: Any) -> Any:
        task = begin(work)
        if work.__name__ == "read":
            task.cancel()  # as `close` does, where its turn comes before the reader's first
        return task

    with RemoteEngine(served.url) as engine:
        monkeypatch.setattr(asyncio, "ensure_future", cancelled)
        stream = engine.stream("The keeper of the", sampling=SHORT)
        monkeypatch.undo()
        assert [type(error) for error in error_of(lambda: list(stream))] == [CancelledError]
    _idle(served)


def test_streams_are_read_in_a_loop(remote: RemoteEngine) -> None:
    async def answer() -> str:
        stream = remote.stream(ASKED, [TIDE], sampling=SHORT)
        told = [delta.text async for delta in stream.adeltas() if delta.kind == "text"]
        return "".join(told) if stream.completion.message.content else ""

    async def both() -> list[str]:
        return await asyncio.gather(answer(), answer())

    first, second = asyncio.run(both())
    assert first == second != ""


def test_a_full_server_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(store=tmp_path, most=1) as one, RemoteEngine(ready(one).url) as engine:
        stream = engine.stream("The keeper of the", sampling=Sampling(max_tokens=3000))
        monkeypatch.setattr(client, "RETRY_S", 0.5)
        with pytest.raises(GenerationError, match="1 requests running"):
            engine.stream(ASKED)
        monkeypatch.setattr(client, "RETRY_S", 30.0)
        threading.Timer(0.1, stream.close).start()
        assert engine.generate(ASKED, sampling=SHORT).text


def test_keys_decide_the_namespace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "RETRY_S", 0.0)
    with keyed(tmp_path) as one:
        url = one.url
        with RemoteEngine(url, ALICE) as alice, RemoteEngine(url, BOB) as bob, RemoteEngine(url, "sk-unknown-0123456789") as nobody:
            alice.warm("You help at a harbour. " * 10, name="own")
            assert alice.generate(ASKED, sampling=SHORT).receipt.namespace == "alice"
            assert bob.generate(ASKED, sampling=SHORT).receipt.cached_tokens == 0
            assert [bob.groups, bob.release("own")] == [(), False]
            with RemoteEngine(url, ADMIN) as root:
                assert [sum(each.stats()["requests"].values()) for each in (alice, bob, root)] == [2, 1, 3]
            with pytest.raises(PolicyError, match="may pin 3 pages"):
                alice.warm(SYSTEM * 5, name="large")
            with pytest.raises(ConfigError, match="API key is unknown"):
                nobody.stream(ASKED)
            streams = [alice.stream("The keeper of the", sampling=Sampling(max_tokens=3000)) for _ in range(2)]
            with pytest.raises(GenerationError, match="wait for one to end"):
                alice.stream(ASKED)
            for stream in streams:
                stream.close()


def test_documents_are_the_keys_own(tmp_path: Path) -> None:
    texts = {f"note-{number}": f"Note {number}: {TIDES[number] * 4}" for number in range(3)}
    asked = [{"role": "user", "content": f"{PASSAGES}\n\nWhen?"}]
    with keyed(tmp_path) as one, RemoteEngine(one.url, ALICE) as alice, RemoteEngine(one.url, BOB) as bob:
        learnt = alice.learn(texts, messages=asked, name="log")
        assert [document.source for document in learnt.documents] == list(texts)
        assert (learnt.computed_tokens > 100, learnt.known) == (True, 0)
        assert alice.documents("log") == alice.documents() == learnt.documents
        assert (alice.learn(texts, messages=asked, name="log").known, alice.documents("other")) == (3, ())
        shown = [texts["note-2"], texts["note-0"], texts["note-1"]]
        order = alice.arrange(shown, asked)
        assert (order.order, order.ranks) == ((1, 2, 0), "Best passages first: 3, 1, 2.")
        assert order.cached_tokens > order.given_tokens + 100
        assert (bob.documents(), bob.arrange(shown, asked).order, bob.unlearn(list(texts), name="log")) == ((), (0, 1, 2), 0)
        assert (alice.unlearn("note-1", name="log"), len(alice.documents())) == (1, 2)


def test_texts_beyond_a_keys_pages_are_deleted_again(tmp_path: Path) -> None:
    with keyed(tmp_path) as one, RemoteEngine(one.url, ALICE) as alice:
        first = alice.learn(["The harbour opens at six."])
        with pytest.raises(PolicyError, match="may pin 3 pages"):
            alice.learn([f"{number} {SYSTEM}" for number in range(3)], pack_tokens=1)
        assert alice.documents() == first.documents
        assert len(alice.groups) == 1


def test_documents_refuse_what_a_request_refuses(remote: RemoteEngine) -> None:
    with pytest.raises(ConfigError, match="the API key decides it"):
        remote.learn(["a"], namespace="mine")
    with pytest.raises(ConfigError, match="in their place"):
        remote.arrange(["a"], [{"role": "user", "content": "no place"}])
    with pytest.raises(ConfigError, match="must be a text that is not empty"):
        remote.learn([" "])
    with pytest.raises(ConfigError, match="progress"):
        remote.learn(["a"], progress=True)
    with pytest.raises(ConfigError, match="texts=Schema.*must be a list of texts"):
        remote.learn(Schema("desk", [Part("rules", "Be brief.")]))  # type: ignore[arg-type]


def test_documents_take_what_an_engine_takes(remote: RemoteEngine) -> None:
    asked, texts = [{"role": "user", "content": f"{PASSAGES}\n\nWhen?"}], [f"\ud83d {tide * 4}" for tide in TIDES[:3]]
    assert len(remote.learn(iter(texts[::-1]), messages=asked).documents) == 3  # type: ignore[arg-type]
    assert remote.arrange(iter(texts), asked).order == (2, 1, 0)  # type: ignore[arg-type]


def test_the_client_loads_no_torch() -> None:
    said = "import sys; from agentcache import RemoteEngine, Stream; print({'torch', 'transformers'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", said], capture_output=True, text=True, check=True).stdout.strip() == "set()"


def test_adapters_are_refused_with_the_way_out(remote: RemoteEngine) -> None:
    with pytest.raises(ConfigError, match="add_adapter.'judge'.*agentcache serve MODEL --adapter NAME=PATH"):
        remote.add_adapter("judge", "judge/")
    with pytest.raises(ConfigError, match="remove_adapter.'judge'"):
        remote.remove_adapter("judge")
