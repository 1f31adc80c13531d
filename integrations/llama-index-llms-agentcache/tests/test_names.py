"""Settings as HuggingFaceLLM and Ollama call them: taken over where they mean the same, otherwise refused with the way out."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cases import VOCAB, tokenizer, tools, user
from llama_index.core.prompts import PromptTemplate
from llama_index.llms.agentcache import AgentCacheLLM
from llama_index.llms.agentcache.requests import split
from llama_index.llms.agentcache.saved_args import renamed
from pydantic import BaseModel

from agentcache import toy
from agentcache.errors import ConfigError

Make = Callable[..., Any]
FIELDS = AgentCacheLLM.model_fields


class Berth(BaseModel):
    """Where a ship lies."""

    number: int


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path: Path = tmp_path_factory.mktemp("model")
    toy.model(VOCAB, layers=1, hidden=128).save_pretrained(path)
    tokenizer().save_pretrained(path)
    return str(path)


def test_what_huggingface_llm_is_made_with_makes_this_one(folder: str) -> None:
    """Every argument that has the same meaning here."""
    with AgentCacheLLM(
        model_name=folder,
        tokenizer_name=folder,
        context_window=300,
        max_new_tokens=7,
        generate_kwargs={"temperature": 0.7, "top_k": 50, "top_p": 0.95, "repetition_penalty": 1.1},
        model_kwargs={"torch_dtype": "bfloat16"},
        tokenizer_kwargs={},
        device_map="cpu",
        query_wrapper_prompt="{query_str}",
        tokenizer_outputs_to_remove=["token_type_ids"],
        is_chat_model=True,
        stopping_ids=None,
        store=None,
        memory_bytes=64 << 20,
    ) as llm:
        assert (llm.model, llm.max_tokens, llm.temperature, llm.metadata.context_window) == (folder, 7, 0.7, 300)
        assert llm.additional_kwargs == {"top_k": 50, "top_p": 0.95, "repetition_penalty": 1.1}
        assert "bfloat16" in str(llm.engine.model.dtype)
        assert llm.chat([user("?")], max_new_tokens=2).raw["usage"]["completion_tokens"] <= 2


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ({"do_sample": False, "temperature": 0.7}, {"temperature": 0.0}),
        ({"do_sample": True}, {"temperature": 1.0, "top_k": 50}),
        ({"do_sample": True, "temperature": 0.5}, {"temperature": 0.5, "top_k": 50}),
        ({"num_predict": 9, "stop_sequences": ["x"]}, {"max_tokens": 9, "stop": ["x"]}),
        ({"max_new_tokens": 9, "max_tokens": 9, "max_completion_tokens": 9}, {"max_tokens": 9}),
        ({"extra_headers": {"anthropic-beta": "prompt-caching-2024-07-31"}}, {}),
        ({"reuse_client": True}, {}),
        ({"stop_strings": ["x"], "chat_template_kwargs": {"a": 1}}, {"stop": ["x"], "template_kwargs": {"a": 1}}),
        ({"pad_token_id": 3, "use_cache": True, "num_beams": 1, "n": 1, "presence_penalty": 0.0}, {}),
        ({"json_mode": True}, {"schema": True}),
        ({"json_mode": False, "request_timeout": None, "keep_alive": 0}, {}),
        ({"format": "json"}, {"schema": True}),
        ({"format": {"type": "object"}}, {"schema": {"type": "object"}}),
        ({"response_format": {"type": "json_object"}}, {"schema": True}),
        ({"response_format": {"type": "text"}}, {}),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}}}, {"schema": {"type": "object"}}),
        ({"response_format": Berth}, {"schema": Berth.model_json_schema()}),
    ],
)
def test_names_of_a_request(given: dict[str, Any], meant: dict[str, Any]) -> None:
    sampling, options, form = split(given)
    assert {**sampling, **options, **form} == meant
    _, settings = renamed("m", given, FIELDS)
    assert {**settings.pop("additional_kwargs", {}), **settings} == meant


@pytest.mark.parametrize(
    ("given", "way_out"),
    [
        ({"request_timeout": 60.0}, "asyncio.wait_for"),
        ({"async_client": object()}, "base_url= and api_key="),
        ({"keep_alive": "5m"}, r"close\(\)"),
        ({"stopping_ids": [2]}, r"stop=\["),
        ({"tokenizer_name": "other"}, "tokenizer="),
        ({"tokenizer_kwargs": {"max_length": 9}}, "tokenizer="),
        ({"model_kwargs": {"quantization_config": object()}}, "load_in_4bit=True"),
        ({"model_kwargs": {"max_memory": {0: "1GB"}}}, "from_pretrained"),
        ({"tokenizer_kwargs": {"token": "hf_secret"}}, r"^tokenizer_kwargs=\.\.\. is no setting"),
        ({"headers": {"Authorization": "secret"}}, r"^headers=\.\.\. is no setting"),
        ({"api_key": "sk-1", "base_url": "http://x", "api_base": "http://x"}, "base_url= and api_key="),
        ({"token": "hf_secret", "model_kwargs": {"token": "hf_other"}}, r"otherwise: token=\.\.\.; give each setting once"),
        ({"timeout": 60.0}, "asyncio.wait_for"),
        ({"max_retries": 3}, "needs no second"),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
        ({"top_logprobs": 3}, "logprobs, how many"),
        ({"additional_kwargs": {"extra_body": {"top_k": 2}}}, "with what is in it"),
        ({"generate_kwargs": {"eos_token_id": [3]}}, r"stop=\["),
        ({"generate_kwargs": {"max_length": 300}}, "without its prompt"),
        ({"model_kwargs": {"attn_implementation": "sdpa"}}, "its own attention"),
        ({"model_kwargs": "bf16"}, "dict"),
        ({"generate_kwargs": {"num_beams": 4}}, "beams"),
        ({"generate_kwargs": {"typical_p": 0.9}}, "top_p, top_k and min_p"),
        ({"generate_kwargs": {"length_penalty": 2.0}}, "unknown options.*length_penalty"),
        ({"additional_kwargs": {"repeat_penalty": 1.1}}, "repetition_penalty"),
        ({"query_wrapper_prompt": "<s>{query_str}"}, "completion_to_prompt"),
        ({"query_wrapper_prompt": PromptTemplate("<s>{query_str}")}, "completion_to_prompt"),
        ({"device_map": "balanced"}, "one device"),
        ({"device_map": {"model.layers.0": 0, "lm_head": 1}}, "one device"),
        ({"is_chat_model": False}, "messages and tools"),
        ({"is_function_calling_model": False}, "StableReActAgent"),
        ({"response_format": "json"}, "schema=, a JSON schema"),
        ({"response_format": {"type": "xml"}}, "schema=, a JSON schema"),
        ({"do_sample": "yes"}, "True or False"),
        ({"thinking": True}, "enable_thinking"),
        ({"thinking": False}, "enable_thinking"),
        ({"think": False}, "enable_thinking"),
        ({"parallel_tool_calls": False}, "allow_parallel_tool_calls"),
        ({"options": {"num_predict": 2}}, "with what is in it"),
        ({"max_tokens": 5, "max_new_tokens": 6}, "give each setting once"),
        ({"temperature": 0.1, "generate_kwargs": {"temperature": 0.2}}, "give each setting once"),
        ({"model_name": "another"}, "two models"),
    ],
)
def test_what_means_something_else_is_named_with_the_way_out(given: dict[str, Any], way_out: str) -> None:
    """Before weights are loaded: there is no such model."""
    with pytest.raises(ConfigError, match=way_out):
        AgentCacheLLM(model="no such model", **given)


def test_none_says_nothing(shared_engine: Any) -> None:
    with AgentCacheLLM(engine=shared_engine, max_tokens=None, temperature=None, stop=None) as llm:
        assert (llm.max_tokens, llm.temperature, llm.stop) == (512, 0.0, [])


def test_names_beside_a_loaded_model_are_not_needed() -> None:
    model = toy.model(VOCAB, layers=1, hidden=128)
    assert renamed(model, {"model_name": "a", "tokenizer_name": "b", "device_map": None}, FIELDS) == (model, {})


def test_the_hubs_settings_reach_the_engine_and_no_file(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", lambda _, **hub: asked.append(hub) or tokenizer())
    hub = {"token": "hf_secret", "trust_remote_code": True}
    assert renamed("m", {"model_kwargs": {"revision": "v2", **hub}}, FIELDS)[1] == {"revision": "v2", **hub}
    with AgentCacheLLM(model=folder, model_kwargs=hub, store=None, memory_bytes=64 << 20) as llm:
        assert hub.items() <= asked[0].items()
        written = llm.to_dict()
        assert (written["trust_remote_code"], written["give_again"]) == (True, ["token"])
        assert "hf_secret" not in f"{written!r} {llm!r}"
        with pytest.raises(ConfigError, match="token"):
            pickle.dumps(llm)


def test_a_context_window_is_at_most_the_models(llm: Make) -> None:
    longest = llm().metadata.context_window
    assert llm(context_window=longest + 1).metadata.context_window == longest
    assert llm(context_window=9).metadata.context_window == 9


@pytest.mark.parametrize(
    ("asked", "device"), [("auto", None), (None, None), ("cuda:1", "cuda:1"), (1, "cuda:1"), ({"": "cpu"}, "cpu"), ({"": 0}, "cuda:0")]
)
def test_a_device_map_of_one_device(asked: Any, device: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert renamed("m", {"device_map": asked}, FIELDS) == ("m", {} if device is None else {"device": device})
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert renamed("m", {"device_map": "auto"}, FIELDS)[1] == {"device": "cuda"}


def test_a_call_that_asks_for_another_form_than_the_settings(llm: Make) -> None:
    pytest.importorskip("llguidance")
    model = llm(namespace="form", json_mode=True)
    assert model.additional_kwargs == {"schema": True}
    ask, _ = model.with_superset(tools())._ask([user("?")], {}) if model.expect("x") is None else (None, None)
    assert ask.form == {"schema": True}
    model.expect("x")
    assert model._ask([user("?")], {"regex": "[a-z]+"})[0].form == {"regex": "[a-z]+"}
