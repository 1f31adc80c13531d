"""Adapters that a server serves: each under a model's name, from all clients, with the answers of an engine in this process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentcache import PASSAGES, Engine, RemoteEngine
from agentcache.errors import ConfigError
from tests.engines import chat, decode
from tests.saved_adapters import save
from tests.serving import Served, adapted, commanded, ready, serving

ASKED = chat("When is high water?")


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("judge"))


@pytest.fixture(scope="module")
def local(judge: Path) -> Iterator[Engine]:
    with adapted(judge).open(print) as engine:
        yield engine


@pytest.fixture(scope="module")
def served(judge: Path) -> Iterator[Served]:
    with serving(adapted(judge)) as one:
        yield ready(one)


@pytest.mark.parametrize(("path", "said"), [("chat/completions", {"messages": ASKED}), ("completions", {"prompt": "When"})])
def test_an_adapter_answers_under_its_name(path: str, said: Any, served: Served, local: Engine) -> None:
    prompt = said.get("messages", said.get("prompt"))
    with served.client() as http:
        assert [one["id"] for one in http.get("/v1/models").json()["data"]] == ["base", "judge"]
        for name, adapter in (("base", None), ("judge", "judge")):
            assert http.get(f"/v1/models/{name}").json()["id"] == name
            answer = http.post(f"/v1/{path}", json={**said, "model": name, "max_tokens": 6}).json()
            expected = local.generate(prompt, sampling=decode(6), adapter=adapter)
            assert answer["model"] == name
            assert answer["x_agentcache"]["receipt"]["adapter"] == expected.receipt.adapter == local.adapters.get(name, "")


def test_a_remote_engine_names_it_as_model_or_adapter(served: Served, local: Engine) -> None:
    expected = local.generate(ASKED, sampling=decode(6), adapter="judge")
    with RemoteEngine(served.url) as base, RemoteEngine(served.url, model="judge") as other:
        asked = {"sampling": decode(6)}
        assert base.generate(ASKED, **asked).ids == local.generate(ASKED, **asked).ids != expected.ids
        for done in (base.generate(ASKED, **asked, adapter="judge"), other.generate(ASKED, **asked)):
            assert (done.ids, done.receipt.adapter) == (expected.ids, local.adapters["judge"])
        assert base.warm("A keeper.", name="keeper", adapter="judge").adapter == local.adapters["judge"]
        only = chat("Who keeps the light?")
        other.generate(only, **asked)
        assert other.probe(only).computed_tokens == base.probe(only, adapter="judge").computed_tokens == 1
        assert base.probe(only).computed_tokens > 1
        with pytest.raises(ConfigError, match="adapter='critic': there is none of that name"):
            base.generate(ASKED, adapter="critic")


def test_texts_are_learnt_and_ordered_under_its_name(served: Served) -> None:
    texts = [f"Note {number}: {'the quay is wet. ' * 12}" for number in range(3)]
    asked = [{"role": "user", "content": f"{PASSAGES} Why?"}]
    with RemoteEngine(served.url) as base, RemoteEngine(served.url, model="judge") as other:
        other.learn(texts)
        for order in (other.arrange(texts[::-1], asked).order, base.arrange(texts[::-1], asked, adapter="judge").order):
            assert order == (2, 1, 0)
        assert base.arrange(texts[::-1], asked).order == (0, 1, 2)
        assert base.learn(texts, adapter="judge").known == 3


def test_a_tool_group_of_an_adapter_is_its_own(served: Served, local: Engine) -> None:
    with served.client() as http:
        made = http.post("/tools", json={"name": "desk", "system": "A desk. " * 20, "tools": [], "model": "judge"}).json()
        assert made["model"] == "judge"
        answer = http.post("/query", json={"group": "desk", "question": "Why?", "max_tokens": 2}).json()
        assert answer["x_agentcache"]["receipt"]["adapter"] == local.adapters["judge"]
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 20
        [told] = [group for group in http.get("/tools").json()["groups"] if group["name"] == "desk"]
        assert (told["model"], told["hits"]) == ("judge", 1)


def test_an_unpinned_group_of_an_adapter_has_its_own_size(tmp_path: Path, judge: Path) -> None:
    with serving(adapted(judge, tmp_path), store=tmp_path) as served, ready(served).client() as http:
        base, made = (
            http.post("/tools", json={"name": "desk", "system": "A desk. " * count, "model": name}).json()
            for name, count in (("base", 40), ("judge", 20))
        )
        assert http.patch("/tools/desk", json={"pinned": False}).json()["pinned"] is False
        served.state.models.first.engine.flush()  # type: ignore[union-attr]
        [told] = http.get("/tools").json()["groups"]
        assert (told["tier"], told["digest"], told["bytes"]) == ("disk", made["digest"], made["bytes"])
        assert told["bytes"] < base["bytes"]


def test_a_restarted_server_pins_tool_groups_of_adapters(tmp_path: Path, judge: Path, local: Engine) -> None:
    with serving(adapted(judge, tmp_path), store=tmp_path) as served, ready(served).client() as http:
        http.post("/tools", json={"name": "desk", "system": "A desk. " * 20, "model": "judge"})
    with serving(adapted(judge, tmp_path), store=tmp_path) as served:
        [group] = ready(served).state.models.first.engine.groups  # type: ignore[union-attr]
        assert (group.name, group.adapter) == ("desk", local.adapters["judge"])
        assert group.computed_tokens < 2 < group.prefix_tokens


def test_the_command_gives_adapters_to_the_first_model(monkeypatch: pytest.MonkeyPatch) -> None:
    engines: list[tuple[str, Any]] = []
    monkeypatch.setattr("agentcache.engine.Engine", lambda path, adapters, **options: engines.append((path, adapters)))
    state, _ = commanded(monkeypatch, "m=base", "n=other", "--adapter", "judge=a=b", "--adapter", "critic=hub/id")
    assert state is not None
    for model in state.models.all:
        model.open(print)
    assert engines == [("base", {"judge": "a=b", "critic": "hub/id"}), ("other", {})]
    assert {name: state.models.owner(name) for name in state.models.names} == {"m": "m", "n": "n", "judge": "m", "critic": "m"}


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (["judge"], "give NAME=PATH"),
        (["=folder"], "give NAME=PATH"),
        (["a=x", "a=y"], "two have one name"),
        (["m=x"], "two have one name"),
    ],
)
def test_a_wrong_adapter_option_is_refused(monkeypatch: pytest.MonkeyPatch, given: list[str], why: str) -> None:
    state, said = commanded(monkeypatch, "m=folder", *(word for one in given for word in ("--adapter", one)))
    assert state is None
    assert why in said
