"""A model that is written down and made again: the same weights, or an error that says what is missing."""

from __future__ import annotations

import gc
import json
import logging
import pickle
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import VOCAB, tokenizer, tools, user
from llama_index.llms.agentcache import AgentCacheLLM, AppendOnlyMemory

from agentcache import Engine, StoreOptions, toy
from agentcache.errors import ConfigError

Make = Callable[..., Any]
TEMPLATE = "{% for message in messages %}<|im_start|>{{ message.content }}{% endfor %}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    toy.model(VOCAB, layers=1, hidden=128).save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    return tmp_path


def _again(llm: AgentCacheLLM, way: str) -> AgentCacheLLM:
    if way == "pickle":
        return pickle.loads(pickle.dumps(llm))
    return AgentCacheLLM.from_json(llm.to_json()) if way == "json" else AgentCacheLLM.from_dict(llm.to_dict())


@pytest.mark.parametrize("way", ["dict", "json", "pickle"])
def test_a_model_made_again_has_the_options_of_its_engine(folder: Path, way: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    options: dict[str, Any] = {"dtype": torch.bfloat16, "chat_template": TEMPLATE, "store": None, "memory_bytes": 64 << 20, "device": "cpu"}
    options |= {"max_tokens": 7, "stop": ["x"], "additional_kwargs": {"seed": 1}}
    with AgentCacheLLM(model=str(folder), **options) as llm, _again(llm, way) as other:
        assert other.model == llm.model == str(folder)
        assert (other.max_tokens, other.stop, other.additional_kwargs) == (7, ["x"], {"seed": 1})
        assert other.engine is llm.engine, "one model and one set of options: one engine"
        assert next(other.engine.model.model.parameters()).dtype == torch.bfloat16
        assert other.engine.store.disk is None
        assert other.engine.renderer.render([{"role": "user", "content": "hello"}]).text == "<|im_start|>hello"
    assert "npickleable" not in caplog.text


def test_models_of_one_name_share_an_engine(folder: Path) -> None:
    options: dict[str, Any] = {"model": str(folder), "store": None, "memory_bytes": 64 << 20, "max_tokens": 2}
    one, other = AgentCacheLLM(**options), AgentCacheLLM(**options, temperature=1.0)
    engine = one.engine
    assert other.engine is engine
    assert AgentCacheLLM(**{**options, "memory_bytes": 65 << 20}).engine is not engine
    one.close()
    assert other.chat([user("?")]).raw
    with other.with_superset(tools()) as sharing:
        assert sharing.chat([user("?")]).raw
    assert not engine.closed, "a view that is closed leaves its model open"
    other.close()
    assert engine.closed


def test_an_engine_in_use_outlives_its_dropped_model(folder: Path) -> None:
    options: dict[str, Any] = {"model": str(folder), "store": None, "memory_bytes": 64 << 20, "max_tokens": 2}
    sharing = AgentCacheLLM(**options).with_superset(tools())
    gc.collect()
    with AgentCacheLLM(**options) as another:
        assert another.engine is sharing.engine
    assert sharing.chat([user("?")]).raw
    engine = weakref.ref(sharing.engine)
    del sharing, another
    gc.collect()
    assert engine() is None, "weights go with the last model that uses them"


def test_a_folder_may_be_a_path(folder: Path) -> None:
    with AgentCacheLLM(model=folder, store=None, memory_bytes=64 << 20) as llm, _again(llm, "dict") as other:
        assert other.model == llm.model == str(folder)


def test_a_pickled_model_keeps_its_superset(folder: Path) -> None:
    with AgentCacheLLM(model=str(folder), store=None, memory_bytes=64 << 20) as llm, _again(llm.with_superset(tools()), "pickle") as other:
        assert other.offered([]) == llm.with_superset(tools()).offered([])


@pytest.mark.parametrize("kind", ["engine", "model", "store"])
def test_what_lives_in_one_process_is_asked_for_again(folder: Path, shared_engine: Engine, kind: str) -> None:
    given: dict[str, Any] = {
        "engine": {"engine": shared_engine},
        "model": {"model": shared_engine.model.model, "tokenizer": tokenizer()},
        "store": {"model": str(folder), "store": StoreOptions(folder / "store", encryption_key=b"0123456789abcdef" * 2)},
    }[kind]
    few = {} if kind == "engine" else {"memory_bytes": 64 << 20}
    with AgentCacheLLM(max_tokens=7, **given, **few) as llm:
        data = json.loads(llm.to_json())
        assert "0123456789abcdef" not in json.dumps(data)
        with pytest.raises(ConfigError, match=rf"'{kind}'.* lived in the process .*from_dict\(data, {kind}=\.\.\."):
            AgentCacheLLM.from_dict(data)
        with pytest.raises(ConfigError, match=rf"'{kind}'.* cannot be pickled.*from_dict\(data, {kind}=\.\.\."):
            pickle.dumps(llm)
        assert llm.chat([user("hello")], max_tokens=2).raw  # it goes on as it was
    with AgentCacheLLM.from_dict(data, **given) as other:
        assert other.max_tokens == 7


def test_an_engine_may_take_the_place_of_options(folder: Path, shared_engine: Engine) -> None:
    with AgentCacheLLM(model=str(folder), store=None, memory_bytes=64 << 20, max_tokens=7) as llm:
        data = llm.to_dict()
    with AgentCacheLLM.from_dict(data, engine=shared_engine) as other:
        assert other.engine is shared_engine
        assert other.max_tokens == 7


def test_a_memory_is_pickled_without_the_model_that_counts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with AgentCacheLLM(model=str(folder), store=None, memory_bytes=64 << 20) as llm:
        memory = AppendOnlyMemory.from_defaults([user("hello")], llm=llm)
        written = pickle.dumps(memory)
        monkeypatch.setattr(AgentCacheLLM, "__init__", lambda *args, **options: pytest.fail("a second model is loaded"))
        again = pickle.loads(written)
        assert (again.messages, again.token_limit) == (memory.messages, memory.token_limit)
        assert again._size(user("§¶ø " * 10)) == len(llm.count("§¶ø " * 10))
