"""Models out of transformers' own pipelines: what these are set to comes along, or is refused by name."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import script
from langchain_agentcache import AgentCacheLLM, ChatAgentCache, errors
from transformers import GenerationConfig, pipeline

from agentcache import toy

PROMPT = "The keeper of the lighthouse"
SMALL = {"memory_bytes": 64 << 20, "cache_dir": ""}


@functools.cache
def loaded() -> tuple[Any, Any]:
    """One small model with its tokenizer."""
    return toy.model(script.VOCAB, layers=2, hidden=128), toy.tokenizer(script.TEXTS, script.VOCAB)


def pipe(**settings: Any) -> Any:
    """A pipeline of transformers around the model."""
    model, tokenizer = loaded()
    return pipeline("text-generation", model=model, tokenizer=tokenizer, **settings)


@pytest.fixture(autouse=True)
def standing() -> Iterator[None]:
    """The model's generation config is as it was."""
    model, _ = loaded()
    before = model.generation_config
    model.generation_config = GenerationConfig.from_dict(before.to_dict())
    yield
    model.generation_config = before


GREEDY = {"max_tokens": 256, "temperature": 0.0, "top_p": None, "top_k": None}
SETTINGS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"max_tokens": 256, "temperature": 0.7, "top_k": 50}),  # the pipeline's own defaults
    ({"do_sample": True}, {"temperature": 0.7, "top_k": 50}),
    ({"do_sample": True, "temperature": 0.3, "top_p": 0.9, "top_k": 7}, {"temperature": 0.3, "top_p": 0.9, "top_k": 7}),
    ({"do_sample": False, "temperature": 0.3, "top_p": 0.5}, GREEDY),
    ({"max_new_tokens": 5, "do_sample": False, "repetition_penalty": 1.3}, {**GREEDY, "max_tokens": 5, "repetition_penalty": 1.3}),
    ({"max_length": 50, "do_sample": False}, {"max_tokens": None, "num_ctx": 50}),
    ({"do_sample": False, "stop_sequence": "tide"}, {"stop": ["tide"]}),
    (
        {"generation_config": GenerationConfig(max_new_tokens=7, do_sample=True, min_p=0.1)},
        {"max_tokens": 7, "temperature": 0.7, "min_p": 0.1},
    ),
]


@pytest.mark.parametrize(("given", "expected"), SETTINGS)
@pytest.mark.parametrize("form", [ChatAgentCache, AgentCacheLLM])
def test_a_pipeline_s_settings_come_along(form: Any, given: dict[str, Any], expected: dict[str, Any]) -> None:
    made = form.from_pipeline(pipe(**given), **SMALL)
    assert {name: getattr(made, name) for name in expected} == expected


def test_the_generation_config_of_the_model_counts() -> None:
    loaded()[0].generation_config.update(do_sample=True, temperature=0.2, top_k=3)
    made = ChatAgentCache.from_pipeline(pipe(max_new_tokens=4), **SMALL)
    assert (made.temperature, made.top_k, made.max_tokens) == (0.2, 3, 4)


def test_what_is_said_here_wins() -> None:
    made = ChatAgentCache.from_pipeline(pipe(do_sample=True, max_new_tokens=4), num_predict=9, temperature=0, **SMALL)
    assert (made.temperature, made.max_tokens) == (0.0, 9)


@pytest.mark.parametrize("settings", [{"max_new_tokens": 24}, {"max_new_tokens": 24, "repetition_penalty": 1.4}, {"max_length": 20}])
def test_the_same_words_as_the_pipeline(settings: dict[str, Any]) -> None:
    theirs = pipe(do_sample=False, return_full_text=False, **settings)
    said = theirs(PROMPT)[0]["generated_text"]
    made = AgentCacheLLM.from_pipeline(theirs, **SMALL)
    assert made.invoke(PROMPT) == said != ""


def test_the_profile_has_the_context() -> None:
    made = ChatAgentCache.from_pipeline(pipe(), **SMALL)
    assert made.profile["max_input_tokens"] == loaded()[0].config.max_position_embeddings
    assert "reasoning_output" in made.profile, "its chat template was looked at"


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"num_beams": 4}, "num_beams=4 of the pipeline has no equal here"),
    ({"no_repeat_ngram_size": 3}, "no_repeat_ngram_size=3"),
    ({"generation_config": GenerationConfig(max_new_tokens=3, bad_words_ids=[[3]])}, "bad_words_ids=.*3"),
    ({"handle_long_generation": "hole"}, "handle_long_generation='hole'"),
    ({"prefix": "Once"}, "prefix='Once'"),
    ({"skip_special_tokens": False}, "skip_special_tokens=False"),
    ({"eos_token_id": [5, 6]}, r"eos_token_id=\[5, 6\] .*end no completion of this model; name them in model.generation_config"),
]


@pytest.mark.parametrize(("settings", "words"), REFUSED)
def test_what_has_no_equal_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(errors.ModelInvalidRequestError, match=words):
        ChatAgentCache.from_pipeline(pipe(**settings), **SMALL)


def test_ends_that_the_model_has() -> None:
    ends = loaded()[1].eos_token_id
    assert ChatAgentCache.from_pipeline(pipe(eos_token_id=ends), **SMALL).max_tokens == 256


@dataclass
class HuggingFacePipeline:
    """LangChain's, as far as it is looked at."""

    pipeline: Any
    pipeline_kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass
class ChatHuggingFace:
    """LangChain's, as far as it is looked at."""

    llm: Any
    temperature: float | None = None
    max_tokens: int | None = None
    stop: Any = None
    tokenizer: Any = None


def test_langchain_s_classes_around_one() -> None:
    llm = HuggingFacePipeline(pipe(max_new_tokens=5, do_sample=False), {"repetition_penalty": 1.5})
    chat = ChatAgentCache.from_huggingface(ChatHuggingFace(llm, max_tokens=6, stop="tide"), **SMALL)
    assert (chat.max_tokens, chat.temperature, chat.repetition_penalty, chat.stop) == (6, 0.0, 1.5, ["tide"])
    text = AgentCacheLLM.from_pipeline(llm, **SMALL)
    assert (text.max_tokens, text.repetition_penalty) == (5, 1.5)
    assert chat.engine is text.engine, "one model, one engine"
    assert chat.invoke("x").usage_metadata["output_tokens"] <= 6


def test_a_chat_template_of_the_chat_s_own_tokenizer() -> None:
    llm, other = HuggingFacePipeline(pipe(max_new_tokens=2)), toy.tokenizer(script.TEXTS, script.VOCAB)
    other.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    for tokenizer, expected in ((other, other.chat_template), (llm.pipeline.tokenizer, None), (None, None)):
        assert ChatAgentCache.from_huggingface(ChatHuggingFace(llm, tokenizer=tokenizer), **SMALL).chat_template == expected


def test_another_tokenizer_is_another_engine() -> None:
    one = ChatAgentCache.from_pipeline(pipe(), **SMALL)
    other = pipe()
    other.tokenizer = toy.tokenizer(script.TEXTS, script.VOCAB)
    assert ChatAgentCache.from_pipeline(other, **SMALL).engine is not one.engine


@pytest.mark.parametrize("wrong", [object(), HuggingFacePipeline(None), ChatHuggingFace(None)])
def test_what_is_no_pipeline(wrong: Any) -> None:
    with pytest.raises(errors.ModelInvalidRequestError, match="needs a text-generation pipeline"):
        ChatAgentCache.from_pipeline(wrong)
    with pytest.raises(errors.ModelInvalidRequestError, match="not in this process"):
        ChatAgentCache.from_huggingface(wrong)


def test_what_is_loaded_is_not_loaded_again() -> None:
    with pytest.raises(errors.ModelInvalidRequestError, match="dtype.*load the model that way yourself"):
        ChatAgentCache.from_pipeline(pipe(), torch_dtype="float32")
