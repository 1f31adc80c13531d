"""What a model is set to: what tells its answers from another's in LangChain's cache, and what a file keeps of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import script
from harbour import ASKED
from langchain_agentcache import AgentCacheLLM, ChatAgentCache, errors
from langchain_core.caches import InMemoryCache

from agentcache import Engine, LayoutOptions, toy
from agentcache.calibration import Calibration

CALIBRATION = Calibration("f" * 64, 2, ((0, 1), (8, 2)), 16, 0.01, measured={"kl": 0.002})

DECIDES = [
    {"namespace": "bob"},
    {"chat_template": "{{ messages }}"},
    {"template_kwargs": {"enable_thinking": True}},
    {"dtype": "float16"},
    {"load_in_4bit": True},
    {"load_in_8bit": True},
    {"layout": "off"},
    {"layout": LayoutOptions("warn")},
    {"reuse": "lossy"},
    {"calibration": CALIBRATION},
    {"tools_order": "sorted"},
    {"group": "museum"},
    {"device": "cuda"},
    {"num_ctx": 10},
    {"stop": ["Observation"]},
    {"strict": True},
    {"seed": 1},
]


@pytest.mark.parametrize("settings", DECIDES, ids=lambda settings: "-".join(settings))
def test_what_decides_an_answer_tells_it_apart(settings: dict[str, Any]) -> None:
    one, other = ChatAgentCache(model="x"), ChatAgentCache(model="x", **settings)
    assert one._get_llm_string() != other._get_llm_string()
    assert other._get_llm_string() == ChatAgentCache(model="x", **settings)._get_llm_string()
    json.dumps(other._identifying_params)


def test_what_a_call_adds_hides_no_setting() -> None:
    of_call = {"template_kwargs": {"tone": "dry"}, "strict": None, "model": None}
    for settings in ({"template_kwargs": {"enable_thinking": True}}, {"strict": True}, {"model": "y"}):
        one, other = ChatAgentCache(model="x"), ChatAgentCache(**{"model": "x", **settings})
        assert one._get_llm_string(**of_call) != other._get_llm_string(**of_call)


def test_a_call_s_own_stop_is_the_key() -> None:
    model = ChatAgentCache(model="x", stop=["a"])
    assert model._get_llm_string(stop=["a"]) == model._get_llm_string() != model._get_llm_string(stop=[])


def test_nobody_gets_the_answer_of_another_namespace(chat: Any) -> None:
    cache = InMemoryCache()
    alice, bob, again = (chat(namespace=name, cache=cache) for name in ("alice", "bob", "alice"))
    first = alice.invoke(ASKED)
    assert "total_cost" in again.invoke(ASKED).usage_metadata, "LangChain's mark of an answer out of its cache"
    assert "total_cost" not in bob.invoke(ASKED).usage_metadata
    assert first.text == bob.invoke(ASKED).text


@pytest.mark.parametrize("model", [ChatAgentCache, AgentCacheLLM])
def test_keys_of_a_server_are_told_apart(model: Any) -> None:
    """Each has a namespace of its own there."""
    models = (model(base_url="http://127.0.0.1:9", api_key=key) for key in ("sk-alice", "sk-bob", "sk-alice"))
    alice, bob, again = (json.dumps(one._identifying_params) for one in models)
    assert alice == again != bob
    assert "sk-" not in alice + bob


def test_engines_of_one_name_are_told_apart() -> None:
    tokenizer = toy.tokenizer(script.TEXTS, script.VOCAB)
    engines = [Engine(toy.model(script.VOCAB, layers=2, hidden=128, seed=seed), tokenizer, store=None) for seed in (0, 1)]
    try:
        one, two = (ChatAgentCache(engine=engine) for engine in engines)
        assert one.model == two.model
        assert one._get_llm_string() != two._get_llm_string()
        assert one._get_llm_string() == ChatAgentCache(engine=engines[0])._get_llm_string()
    finally:
        for engine in engines:
            engine.close()


def test_no_memory_is_a_setting(chat: Any) -> None:
    assert ChatAgentCache(model="x", memory_bytes=0)._engine_options()["memory_bytes"] == 0
    model = chat(memory_bytes=0, max_tokens=1)
    model.invoke(ASKED)
    assert model.invoke(ASKED).usage_metadata["input_token_details"]["cache_read"] == 0


@pytest.mark.parametrize(
    "settings",
    [
        {"layout": LayoutOptions("warn", rules="/etc/layout.toml", keep=True, repairs=("dates",))},
        {"calibration": CALIBRATION},
        {"layout": "off", "calibration": "/a/calibration.json"},
    ],
)
def test_objects_come_back_as_objects(settings: dict[str, Any]) -> None:
    model = ChatAgentCache(model="x", **settings)
    config = json.loads(json.dumps(model.to_config()))
    again = ChatAgentCache.from_config(config)
    assert again.to_config() == config
    for name, value in settings.items():
        assert getattr(again, name) == value


def test_paths_are_kept_as_texts() -> None:
    config = json.loads(json.dumps(ChatAgentCache(model="x", layout=LayoutOptions(rules=Path("/etc/layout.toml"))).to_config()))
    assert ChatAgentCache.from_config(config).layout == LayoutOptions(rules="/etc/layout.toml")


def test_a_layout_works_after_it_was_a_file(chat: Any) -> None:
    config = json.loads(json.dumps(chat(layout=LayoutOptions("warn"), max_tokens=1).to_config()))
    assert ChatAgentCache.from_config(config).invoke(ASKED).response_metadata["finish_reason"] == "length"


def test_files_that_describe_no_object() -> None:
    for name, form in (("layout", "LayoutOptions"), ("calibration", "Calibration")):
        with pytest.raises(errors.ModelInvalidRequestError, match=f"{name}=.*'colour': 1.*: is no {form} .*to_config"):
            ChatAgentCache.from_config({"model": "x", name: {"colour": 1}})


# -- the context that the profile tells --------------------------------------------------------------------------------


def test_the_context_of_a_nested_config(tmp_path: Path) -> None:
    place = tmp_path / "config.json"
    for config, expected in (
        ({"text_config": {"max_position_embeddings": 4096}}, 4096),
        ({"max_position_embeddings": 512, "text_config": {"max_position_embeddings": 4096}}, 512),
        ({"text_config": None}, None),
        ({}, None),
    ):
        place.write_text(json.dumps(config))
        assert ChatAgentCache(model=str(tmp_path)).profile.get("max_input_tokens") == expected


def test_the_context_of_an_engine(chat: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = chat()._engine()
    monkeypatch.setattr(engine.model, "context_tokens", 65536)  # as where rope stretches it
    assert ChatAgentCache(engine=engine).profile["max_input_tokens"] == 65536
    assert ChatAgentCache(engine=engine, num_ctx=100).profile["max_input_tokens"] == 100
    monkeypatch.setattr(engine.model.config, "max_position_embeddings", 0)
    assert "max_input_tokens" not in ChatAgentCache(engine=engine).profile, "unknown, and not guessed"
