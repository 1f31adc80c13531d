"""Settings under the names they have elsewhere, in the constructor and in calls: the same meaning, or an error or a warning that helps."""

from __future__ import annotations

import asyncio
import inspect
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harbour import ASKED
from langchain_agentcache import AgentCacheLLM, ChatAgentCache, _caller_warnings, errors
from langchain_core.messages import HumanMessage

from agentcache import Engine, toy


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is told once was not told before this test."""
    monkeypatch.setattr(_caller_warnings.caller_warnings, "_said", {})


# -- the same meaning --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["num_predict", "max_new_tokens", "max_completion_tokens", "max_tokens"])
def test_how_long_under_every_name(chat: Any, name: str) -> None:
    silent = {"max_tokens": None, name: 3}
    for said in (chat().bind(**{name: 3}).invoke(ASKED), chat().invoke(ASKED, **{name: 3}), chat(**silent).invoke(ASKED)):
        assert said.usage_metadata["output_tokens"] == 3


@pytest.mark.parametrize("name", ["stop", "stop_sequences", "stop_strings", "stop_sequence"])
def test_where_to_end_under_every_name(chat: Any, name: str) -> None:
    text = chat().invoke(ASKED).text
    stop = text[4:7]
    cut = text[: text.index(stop)].strip()
    for said in (chat().bind(**{name: [stop]}).invoke(ASKED), chat().invoke(ASKED, **{name: stop}), chat(**{name: stop}).invoke(ASKED)):
        assert said.text == cut
    assert "".join(piece.text for piece in chat().stream(ASKED, **{name: [stop]})).strip() == cut


def test_what_huggingface_takes_in_dicts() -> None:
    model = ChatAgentCache(
        model_id="x",
        model_kwargs={"torch_dtype": "float32", "trust_remote_code": True, "device_map": {"": "cpu"}},
        pipeline_kwargs={"max_new_tokens": 5, "return_full_text": False, "repetition_penalty": 1.1, "do_sample": False},
    )
    assert (model.dtype, model.trust_remote_code, model.device) == ("float32", True, "cpu")
    assert (model.max_tokens, model.repetition_penalty, model.temperature) == (5, 1.1, 0.0)
    assert ChatAgentCache(model="x", device=-1).device == "cpu"
    assert ChatAgentCache(model="x", device=1).device == "cuda:1"


def test_sampling_in_transformers_words(chat: Any) -> None:
    assert (ChatAgentCache(model="x", do_sample=True).temperature, ChatAgentCache(model="x", do_sample=True).top_k) == (1.0, 50)
    assert ChatAgentCache(model="x", do_sample=True, temperature=0.3, top_k=2).top_k == 2
    model = chat(temperature=0.4, top_k=3)
    sampling = model._sampling(None, model._call({"do_sample": True}))
    assert (sampling.temperature, sampling.top_k) == (0.4, 3)
    assert model._sampling(None, model._call({"do_sample": False})).temperature == 0.0
    with pytest.raises(errors.ModelInvalidRequestError, match="do_sample=True and temperature=0: 0 is greedy"):
        ChatAgentCache(model="x", do_sample=True, temperature=0)


def test_json_as_ollama_says_it(chat: Any) -> None:
    model = chat(format="json", max_tokens=40)
    assert model._form({}) == "json"
    assert model._form({"format": {"type": "object"}}) == {"type": "object"}
    assert chat(format="")._form({}) is None
    assert chat(format={"type": "integer", "minimum": 4, "maximum": 4}).invoke(ASKED).text == "4"
    with pytest.raises(errors.ModelInvalidRequestError, match="response_format='yaml': must be"):
        chat(format="yaml").invoke(ASKED)


def test_a_file_with_a_chat_template(tmp_path: Path, chat: Any) -> None:
    place = tmp_path / "own.jinja"
    place.write_text(toy.CHAT_TEMPLATE.replace("assistant\\n' }}", "keeper\\n' }}"))
    for given in (place, str(place)):
        model = chat(chat_template=given)
        assert model.chat_template == place.read_text()
        assert model._engine().renderer.render([{"role": "user", "content": "x"}]).text.endswith("<|im_start|>keeper\n")
    with pytest.raises(errors.ModelInvalidRequestError, match="chat_template='/nowhere.jinja': is no Jinja template, and no file"):
        chat(chat_template="/nowhere.jinja")


def test_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ChatAgentCache(model="x", cache_dir=tmp_path).cache_dir == str(tmp_path)
    monkeypatch.setenv("AGENTCACHE_DIR", str(tmp_path))
    silent, none, nowhere = (ChatAgentCache(model="x", **given) for given in ({}, {"cache_dir": None}, {"cache_dir": ""}))
    assert silent._engine_options() == none._engine_options() == {"store": str(tmp_path)}, "None says nothing"
    assert nowhere._engine_options() == {"store": None}


def test_the_hub_s_settings_reach_the_engine() -> None:
    model = ChatAgentCache(model="x", revision="v2", hf_token="hf_secret", trust_remote_code=True, torch_dtype="bfloat16", cache_dir="")
    expected = {"revision": "v2", "token": "hf_secret", "trust_remote_code": True, "dtype": "bfloat16", "store": None}
    assert model._engine_options() == expected
    for shown in (repr(model), str(model.to_config()), str(model._identifying_params), model._get_llm_string()):
        assert "hf_secret" not in shown
        assert "v2" in shown


# -- what cannot be ----------------------------------------------------------------------------------------------------


WRONG = [
    ({"max_tokens": 5, "num_predict": 7}, "max_tokens=5 and num_predict=7 are one setting: give it once, as max_tokens"),
    ({"device_map": "auto"}, "device_map='auto': the weights lie on one device; say device="),
    ({"quantization_config": {"a": 1}}, "quantization_config=.*: say load_in_4bit=True"),
    ({"reasoning": "low"}, r"reasoning='low': .*; reasoning= takes True or False; how much is template_kwargs={'reasoning_effort'"),
    ({"llm": object()}, r"llm=<object.*: from_pipeline\(...\) takes over a pipeline or a HuggingFacePipeline"),
    ({"pipeline": object()}, r"pipeline=<object.*: from_pipeline\(...\) takes over"),
    ({"tokenizer": object()}, r"tokenizer=<object.*: comes with the model; for another one pass engine="),
    ({"model_kwargs": {"cache_dir": "/hub"}}, "cache_dir='/hub' in model_kwargs: is the Hugging Face Hub's, set HF_HUB_CACHE"),
    ({"token": "hf_secret", "use_auth_token": "hf_other"}, r"^token=\.\.\. and use_auth_token=\.\.\. are one setting"),
    ({"return_full_text": True}, "return_full_text=True: ChatAgentCache answers with the completion alone"),
    ({"max_retries": -1}, "max_retries=-1: input should be greater than or equal to 0"),
    ({"num_predict": "many"}, r"max_tokens='many': .* \(num_predict is max_tokens here\)"),
    ({"torch_dtype": "float3", "max_new_tokens": "x"}, r"\(max_new_tokens is max_tokens here\)"),
]


@pytest.mark.parametrize(("settings", "words"), WRONG)
def test_refused_with_the_word_that_was_used(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(errors.ModelInvalidRequestError, match=words):
        ChatAgentCache(model="x", **settings)


def test_refused_in_calls_too(chat: Any) -> None:
    with pytest.raises(errors.ModelInvalidRequestError, match="max_tokens=5 and num_predict=7 are one setting"):
        chat().bind(max_tokens=5).invoke(ASKED, num_predict=7)
    with pytest.raises(errors.ModelInvalidRequestError, match=r"max_tokens=-1: .*\(num_predict is max_tokens here\)"):
        chat().invoke(ASKED, num_predict=-1)
    for given in ("low", "off", {"effort": "low"}):
        with pytest.raises(errors.ModelInvalidRequestError, match="reasoning=.*: must be a boolean; reasoning= takes True or False"):
            chat().invoke(ASKED, reasoning=given)
    for name in ("quantization_config", "llm", "pipeline", "tokenizer"):
        with pytest.raises(errors.ModelInvalidRequestError, match=f"{name}=<object"):
            chat().invoke(ASKED, **{name: object()})
    assert chat().bind(max_tokens=5).invoke(ASKED, max_new_tokens=5).usage_metadata["output_tokens"] == 5


def test_an_engine_is_set_already(chat: Any, model_folder: str, tmp_path: Path) -> None:
    with Engine(model_folder, store=None, memory_bytes=32 << 20) as engine:
        for given in ({"dtype": "float16"}, {"cache_dir": tmp_path}, {"load_in_4bit": True}, {"chat_template": "{{ x }}"}):
            with pytest.raises(errors.ModelInvalidRequestError, match=f"{next(iter(given))}=.*: the engine that is passed is made already"):
                ChatAgentCache(engine=engine, **given)
        off = ChatAgentCache(engine=engine, reuse="off", max_tokens=1)
        for _ in range(2):
            said = off.invoke(ASKED)
        assert said.usage_metadata["input_token_details"]["cache_read"] == 0, "how much is reused is a request's matter"


# -- what is told ------------------------------------------------------------------------------------------------------


HINTS = [
    ({"num_thread": 4}, "ignores num_thread=4: it has no such setting; call torch.set_num_threads()"),
    ({"functions": [{"name": "tide"}]}, "ignores functions=.*; bind_tools"),
    ({"mirostat": 2}, "ignores mirostat=2: .*; temperature, top_p"),
    ({"client_kwargs": {"x": 1}}, r"ignores client_kwargs=\.\.\.: .*; base_url and api_key are all"),
    ({"reasoning_effort": "low"}, "ignores reasoning_effort='low': .*; reasoning= takes True or False; how much is template_kwargs="),
    ({"extra_body": {"top_k": 2}}, "ignores extra_body=.*; say what is in it as settings of their own"),
    ({"eos_token_id": [3, 4]}, r"ignores eos_token_id=\[3, 4\]: .*; stop=\[...\] takes the texts of tokens"),
    ({"api_key": "sk-1"}, r"ignores api_key=\.\.\.: it is for base_url=, an `agentcache serve`; namespace= separates prompts here"),
    ({"task": "translation"}, "ignores task='translation': .*; a causal model of transformers answers"),
    ({"temprature": 1}, "ignores temprature=1: it has no such setting; did you mean temperature?"),
]


@pytest.mark.parametrize("form", [ChatAgentCache, AgentCacheLLM])
@pytest.mark.parametrize(("settings", "words"), HINTS)
def test_what_is_ignored_is_told_once_with_a_hint(form: Any, settings: dict[str, Any], words: str) -> None:
    with pytest.warns(UserWarning, match=f"{form.__name__} {words}"):
        form(model="x", **settings)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        form(model="x", **settings)


def test_what_changes_nothing_is_not_told(chat: Any) -> None:
    said = {"task": "text-generation", "backend": "default", "n": 1, "num_beams": 1, "presence_penalty": 0.0, "client_kwargs": {}}
    said |= {"pad_token_id": 3, "use_cache": True, "stream_usage": True, "model_kwargs": {"low_cpu_mem_usage": True}}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        chat(**said, num_ctx=4000).invoke(ASKED, **said, num_ctx=4000, tokenizer=None)


def test_none_in_a_call_says_nothing(chat: Any) -> None:
    model = chat(max_tokens=3, temperature=0.5)
    sampling = model._sampling(None, model._call({"num_predict": None, "temperature": None}))
    assert (sampling.max_tokens, sampling.temperature) == (3, 0.5)


def test_a_setting_of_the_model_is_told_in_a_call(chat: Any) -> None:
    with pytest.warns(UserWarning, match=r"ignores api_key=\.\.\. of a call: it is a setting of the whole model"):
        chat(max_tokens=1).invoke(ASKED, api_key="sk-2")
    with pytest.warns(UserWarning, match="ignores num_ctx=30 of a call: it is a setting of the whole model"):
        chat(max_tokens=1).invoke(ASKED, max_length=30)


def test_chat_openai_and_vllm_say_server_and_template_so() -> None:
    model = ChatAgentCache(openai_api_base="http://127.0.0.1:9/v1", openai_api_key="sk-1", chat_template_kwargs={"enable_thinking": False})
    assert (model.base_url, model.api_key.get_secret_value()) == ("http://127.0.0.1:9/v1", "sk-1")
    assert model.template_kwargs == {"enable_thinking": False}


def _here() -> int:
    frame = inspect.currentframe()
    assert frame
    assert frame.f_back
    return frame.f_back.f_lineno


@pytest.fixture
def heard() -> Iterator[list[warnings.WarningMessage]]:
    """Warnings, instead of errors."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield caught


def test_a_warning_names_the_caller_s_line(chat: Any, heard: list[warnings.WarningMessage]) -> None:
    line = _here()
    model = chat()
    ChatAgentCache(model="x", colour=1)
    model.invoke(ASKED, shade=1)
    list(model.stream(ASKED, tone=1))
    model.bind(tint=1).invoke(ASKED)
    model.batch([ASKED], hue=1)
    places = {str(each.message).split("ignores ")[1][:4]: (each.filename, each.lineno - line) for each in heard}
    assert places == {"colo": (__file__, 2), "shad": (__file__, 3), "tone": (__file__, 4), "tint": (__file__, 5), "hue=": (__file__, 6)}


def test_an_engines_store_is_not_ignored_in_silence() -> None:
    with pytest.warns(UserWarning, match="ignores store=None.*cache_dir='' writes nothing to disk"):
        ChatAgentCache(model="x", store=None)


async def test_and_in_a_loop(chat: Any, heard: list[warnings.WarningMessage]) -> None:
    model = chat(memory_bytes=1)
    line = _here()
    await model.ainvoke(ASKED, shade=1)
    [piece async for piece in model.astream([HumanMessage("x", name="Bob")])]
    await model.ainvoke(ASKED, cache_control={"type": "ephemeral"})
    assert [(each.filename, each.lineno - line) for each in heard] == [(__file__, 1), (__file__, 2), (__file__, 3)]
    assert "shows no names" in str(heard[1].message)
    assert "nothing was pinned" in str(heard[2].message)


def test_and_in_a_thread_of_nobody(chat: Any, heard: list[warnings.WarningMessage]) -> None:
    thread = threading.Thread(target=chat(max_tokens=1).invoke, args=(ASKED,), kwargs={"shade": 1})
    thread.start()
    thread.join()
    assert len(heard) == 1


# -- names of users ----------------------------------------------------------------------------------------------------


NAMED = toy.CHAT_TEMPLATE.replace("+ message.role + '\\n' +", "+ message.role + (' ' + message.name if message.name else '') + '\\n' +")


def test_names_of_users_reach_templates_that_show_them(chat: Any) -> None:
    asked = [HumanMessage("Who am I?", name="Bob")]
    shown = chat(chat_template=NAMED, max_tokens=1)
    plain = shown.get_num_tokens_from_messages([HumanMessage("Who am I?")])
    assert shown.invoke(asked).usage_metadata["input_tokens"] > plain, "and nobody is warned"
    with pytest.warns(UserWarning, match=r"messages\[0\]: HumanMessage\(name='Bob'\): the model's chat template shows no names"):
        chat(max_tokens=1).invoke(asked)


# -- tries and time ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["invoke", "ainvoke"])
def test_a_timeout_is_tried_again(chat: Any, way: str) -> None:
    model = chat(max_retries=2, max_tokens=3)
    engine, tries = model._engine(), []
    original = engine.stream

    def hurried(*asked: Any, **options: Any) -> Any:
        tries.append(len(tries))
        return original(*asked, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "stream", hurried)
        ask = model.invoke if way == "invoke" else lambda *said, **more: asyncio.run(model.ainvoke(*said, **more))
        with pytest.raises(errors.ModelTimeoutError):
            ask(ASKED, timeout=0.05, max_tokens=8000)
        assert len(tries) == 3
        assert ask(ASKED).usage_metadata["output_tokens"] == 3
        assert len(tries) == 4
        with pytest.raises(errors.ModelInvalidRequestError):
            ask(ASKED, temperature=-1)
        assert len(tries) == 4, "what cannot work is not tried again"
