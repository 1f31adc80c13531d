"""Recorded requests replayed: what reuse does not change is green, one wrong page is red and named."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from agentcache import Engine, Sampling
from agentcache.cli.app import app
from agentcache.errors import ConfigError
from agentcache.kv import Page
from agentcache.lint.values import Request
from agentcache.replay import Outcome, Replay, read
from agentcache.store.disk import blob_io
from agentcache.store.disk.disk_tier import DiskTier
from agentcache.types import StoreOptions
from tests.approximate.repeated_text import FIRST, OTHER, calibration, tiny_model
from tests.engines import tool
from tests.saved_adapters import save_for
from tests.store import stored_pages

TOOLS = [tool("get_tide", "place"), tool("ring_bell", "times")]
SYSTEM = "You keep a lighthouse. " * 120  # more than a page


def recorded(*questions: str, **more: Any) -> list[dict[str, Any]]:
    """A conversation's requests, each with the questions before it."""
    asked: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM}]
    out = []
    for question in questions:
        asked = [*asked, {"role": "user", "content": question}]
        out.append({"conversation_id": "c1", "messages": asked, "tools": TOOLS, **more})
        asked = [*asked, {"role": "assistant", "content": "It is so."}]
    return out


@pytest.fixture
def file(tmp_path: Path) -> Callable[..., Path]:
    def write(requests: list[Any]) -> Path:
        path = tmp_path / "recorded.jsonl"
        path.write_text("".join(f"{json.dumps(one)}\n" for one in requests))
        return path

    return write


@pytest.fixture(scope="module")
def made() -> Iterator[Engine]:
    with Engine("embedded", store=None) as engine:
        yield engine


@pytest.fixture
def running(made: Engine) -> Engine:
    made.store.clear()
    return made


QUESTIONS = ("Is the lamp lit?", "And the fog?", "Good night.")


def requests(file: Callable[..., Path], wanted: list[Any] | None = None) -> list[Request]:
    return read(str(file(recorded(*QUESTIONS) if wanted is None else wanted)), False, 100)[0]


def cli(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["replay", *arguments])
    if done.exception and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.stdout


def test_reuse_that_changes_nothing_is_green(running: Engine, file: Callable[..., Path]) -> None:
    found = Replay(running, tokens=8).run(requests(file))
    assert found.difference is None
    assert (found.requests, found.left_out, found.ways, found.bitwise) == (3, 0, ("exact",), 6)
    assert found.cached_tokens > 0.8 * found.prompt_tokens


def poisoned(running: Engine, file: Callable[..., Path], slot: int, value: float) -> Outcome:
    """A replay before whose second request one number of the first page is changed."""

    def tell(done: int) -> None:
        if done == 1:
            page = next(entry.page for entry in running.store.tree.entries() if entry.place == 0)
            assert page is not None
            page.layer_values[-1][0, slot, 0] = value

    return Replay(running, tokens=8).run(requests(file), tell)


def test_a_poisoned_page_is_red_and_named(running: Engine, file: Callable[..., Path]) -> None:
    first = poisoned(running, file, 300, 9.0).difference
    assert first is not None
    assert (first.request, first.line, first.conversation, first.way) == (2, 2, "c1", "exact")
    assert first.reason in ("bits", "ids")
    assert (first.page, first.token) == (0, 300)
    span = next(span for span in running.renderer.render(recorded("x")[0]["messages"], TOOLS).spans if span.start <= 300 < span.stop)
    assert first.span == span.kind
    assert {entry.scope.namespace for entry in running.store.tree.entries()} == {"default"}, "what the search computed is gone"


def test_a_page_of_nan_is_red_though_recomputed(running: Engine, file: Callable[..., Path]) -> None:
    first = poisoned(running, file, 5, float("nan")).difference
    assert first is not None
    assert (first.request, first.reason) == (2, "NON_FINITE")


def tamper(options: StoreOptions, change: Callable[[Page], Any]) -> None:
    """Wrong numbers with a right MAC in the first page on disk."""
    disk = DiskTier(options)
    row = next(row for row in disk.index.rows() if row.place == 0)
    page = Page(stored_pages.spec_of(row))
    stored_pages.fill_page(disk.folder, row, page, tokens=row.tokens)
    change(page)
    wrong = blob_io.write(disk.folder, row, page)
    stored_pages.blob_path(disk.folder, wrong).replace(stored_pages.blob_path(disk.folder, row))
    disk.close()


def test_a_poisoned_page_on_disk_is_red(file: Callable[..., Path], tmp_path: Path) -> None:
    path, store = file(recorded(*QUESTIONS)), tmp_path / "store"
    code, said = cli(str(path), "--store", str(store), "--max-tokens", "4", "--json")
    assert (code, json.loads(said)["difference"]) == (0, None)
    tamper(StoreOptions(store), lambda page: page.layer_values[-1][0, 7, 0].add_(100))
    code, said = cli(str(path), "--store", str(store), "--max-tokens", "4", "--json")
    first = json.loads(said)["difference"]
    assert code == 1
    assert (first["request"], first["page"], first["token"]) == (1, 0, 7)
    assert first["reason"] in ("bits", "ids")


def calling(running: Engine) -> tuple[list[Any], list[Any]]:
    """A request that the model answers with calls, and these."""
    asked = [{"role": "system", "content": "You help."}, {"role": "user", "content": "What is the tide at Brest?"}]
    said = running.generate(asked, TOOLS, reuse="off", sampling=Sampling(max_tokens=60)).message
    assert said.tool_calls
    return asked, [{"type": "function", "function": {"name": one.name, "arguments": one.arguments}} for one in said.tool_calls]


@pytest.mark.parametrize("changed", [False, True])
def test_recorded_calls_are_compared_as_calls(running: Engine, file: Callable[..., Path], changed: bool) -> None:
    asked, calls = calling(running)
    for call in calls:  # other text of the same arguments
        call["function"]["arguments"] = json.dumps({**call["function"]["arguments"], **({"place": "Hull"} if changed else {})}, indent=3)
    answer = {"choices": [{"message": {"role": "assistant", "content": None, "tool_calls": calls}}]}
    found = Replay(running, tokens=60, recorded=True).run(requests(file, [{"messages": asked, "tools": TOOLS, "response": answer}]))
    assert found.calls == 1
    assert (found.difference and (found.difference.way, found.difference.reason)) == (("off", "recorded") if changed else None)


def test_pages_of_fewer_bits_are_held_to_calls(running: Engine, file: Callable[..., Path], tmp_path: Path) -> None:
    asked, _ = calling(running)
    wanted, options = (
        requests(file, [{"messages": asked, "tools": TOOLS}]),
        StoreOptions(tmp_path / "store", precision="int8", refuse_slow=False),
    )
    with Engine("embedded", store=options) as engine:
        engine.generate(asked, TOOLS, sampling=Sampling(max_tokens=1))
    with Engine("embedded", store=options) as engine:
        found = Replay(engine, tokens=60).run(wanted)
        assert (found.ways, found.calls, found.difference) == (("lossy", "exact"), 1, None)
        assert found.bitwise == 2, "the lossy answer was not held to bits"
    tamper(options, lambda page: [values.zero_() for values in page.layer_values])
    with Engine("embedded", store=options) as engine:
        first = Replay(engine, tokens=60).run(wanted).difference
    assert first is not None
    assert (first.way, first.reason, first.page) == ("lossy", "calls", None)


@pytest.mark.parametrize(("kl", "reason"), [(10.0, None), (0.0, "kl")])
def test_segments_are_held_to_their_calibration(file: Callable[..., Path], kl: float, reason: str | None) -> None:
    model, tokenizer, fingerprint = tiny_model()
    known = calibration(fingerprint=fingerprint, kl=kl)
    with Engine(model, tokenizer, store=None, calibration=known) as engine:
        found = Replay(engine, known, tokens=12).run(requests(file, [{"messages": FIRST}, {"messages": OTHER}]))
    assert found.ways == ("segments", "exact")
    assert found.kl is not None
    assert found.kl > 0, "text of the first prompt stands in the second"
    assert (found.difference and (found.difference.reason, found.difference.request)) == ((reason, 2) if reason else None)


def test_first_choices_below_the_calibrated_share_are_red(file: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer, fingerprint = tiny_model()
    known = calibration(fingerprint=fingerprint, kl=10.0, top1=1.0)
    with Engine(model, tokenizer, store=None, calibration=known) as engine:
        run = Replay(engine, known, tokens=12)
        wanted = requests(file, [{"messages": FIRST}, {"messages": OTHER}])
        found = run.run(wanted)
        assert found.top1 is not None
        run._near = [(0.0, 1.0, wanted[0]), (0.0, 0.5, wanted[1])]
        found = run.run([])
    assert found.difference is not None
    assert (found.top1, found.difference.reason, found.difference.request) == (0.75, "top1", 2)
    assert found.difference.detail == "0.750 equal first choices, calibrated 1.000; here 0.500"


def test_a_policy_bounds_what_a_replay_asks_for(file: Callable[..., Path], tmp_path: Path) -> None:
    policy = tmp_path / "policy.toml"
    policy.write_text('[[rule]]\nnamespace = "guest"\nreuse = ["off"]\n')
    source = str(file(recorded(*QUESTIONS)))
    cached = {}
    for namespace in ("guest", "default"):
        code, said = cli(source, "--policy", str(policy), "--namespace", namespace, "--max-tokens", "2", "--json")
        found = json.loads(said)
        assert (code, found["requests"], found["difference"]) == (0, 3, None)
        cached[namespace] = found["cached_tokens"]
    assert cached["guest"] == 0 < cached["default"], "the rule allows no reuse"


def test_an_adapter_answers_a_replay(file: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("peft")
    with Engine("embedded", store=None) as spare:  # PEFT writes into the model that it wraps
        place = save_for(spare.model.model, tmp_path / "lora")
    with Engine("embedded", store=None) as engine:
        engine.add_adapter("legal", place)
        asked = requests(file)
        own = [engine.generate(list(recorded(*QUESTIONS)[0]["messages"]), TOOLS, adapter=one).ids for one in (None, "legal")]
        assert own[0] != own[1]
        run = Replay(engine, tokens=8, adapter="legal")
        found = run.run(asked)
        assert (found.requests, found.difference) == (3, None)
        page = next(entry for entry in engine.store.tree.entries() if entry.scope.adapter and entry.place == 0).page
        page.layer_values[0][:, 300] += 1
        first = run.run(asked).difference
    assert first is not None
    assert (first.reason, first.page, first.token) == ("bits", 0, 300)
    source, generate, answered = str(file(recorded(*QUESTIONS))), Engine.generate, set[str | None]()

    def spied(*given: Any, **more: Any) -> Any:
        answered.add(more["adapter"])
        return generate(*given, **more)

    monkeypatch.setattr(Engine, "generate", spied)
    assert cli(source, "--adapter", f"legal={place}", "--limit", "1", "--max-tokens", "2")[0] == 0
    assert answered == {"legal"}
    assert cli(source, "--adapter", "legal")[0] == 1


def test_a_request_that_fails_only_with_reuse_is_red(running: Engine, file: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    ask = running.generate

    def generate(*given: Any, reuse: Any = None, **more: Any) -> Any:
        if reuse == "exact":
            raise ConfigError("broken")
        return ask(*given, reuse=reuse, **more)

    monkeypatch.setattr(running, "generate", generate)
    first = Replay(running, tokens=2).run(requests(file)).difference
    assert first is not None
    assert (first.reason, first.detail) == ("error", "ConfigError: broken")


def test_what_cannot_be_asked_is_left_out(running: Engine, file: Callable[..., Path]) -> None:
    odd = [{"messages": [{"role": "oracle", "content": "?"}]}, {"messages": [{"role": "user", "content": "word " * 20_000}]}]
    found = Replay(running, tokens=2).run(requests(file, [*odd, *recorded("Hi")]))
    assert (found.requests, found.left_out) == (1, 2)
    assert "'oracle'" in found.why_left_out[0]
    assert "exceeds" in found.why_left_out[1]


def test_a_replay_that_compares_nothing_is_red(file: Callable[..., Path]) -> None:
    odd = [{"messages": [{"role": "oracle", "content": "?"}]}, {"messages": [3], "tools": [1]}]
    done = CliRunner().invoke(app, ["replay", str(file(odd))])
    assert done.exit_code == 1
    assert "nothing was compared" in done.stderr
    assert [line.split(": ")[0] for line in done.stderr.splitlines() if "messages[0]=3" in line] == ["not read as it is"]


def test_the_command_prints_one_object(file: Callable[..., Path]) -> None:
    code, said = cli(str(file(recorded(*QUESTIONS))), "--limit", "2", "--max-tokens", "2", "--json")
    found = json.loads(said)
    assert (code, found["requests"], found["model"], found["difference"]) == (0, 2, "embedded", None)


@pytest.mark.parametrize(("text", "why"), [(None, "is not there"), ("{", "no request that can be read"), ("[1]", "no request")])
def test_an_unreadable_file_is_refused(tmp_path: Path, text: str | None, why: str) -> None:
    path = tmp_path / "recorded.jsonl"
    if text is not None:
        path.write_text(text)
    done = CliRunner().invoke(app, ["replay", str(path)])
    assert done.exit_code == 1
    assert why in done.stderr
