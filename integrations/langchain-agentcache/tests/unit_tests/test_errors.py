"""What users get wrong: every refusal is typed, shows the value, and says what to do instead; nothing is computed for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from harbour import ASKED, Ship, tide
from langchain_agentcache import AgentCacheLLM, AgentCacheMiddleware, ChatAgentCache, errors
from langchain_core import exceptions as theirs
from langchain_core.messages import HumanMessage

from agentcache import Engine
from agentcache import errors as own

Make = Callable[..., Any]


class Plain:
    """A class that says nothing of its fields."""


WRONG_SETTINGS = [
    ({"model": 3}, "model=3: must be a Hugging Face id or a folder; .* engine=agentcache.Engine"),
    ({"model": object()}, "model=<object object at .*: must be a Hugging Face id"),
    ({"engine": "Qwen"}, "engine='Qwen': must be an agentcache.Engine; a name or a folder goes into model="),
    ({"temperature": "hot"}, "temperature='hot': input should be a valid number"),
    ({"num_ctx": -1}, "num_ctx=-1: input should be greater than 0"),
    ({"timeout": 0}, "timeout=0: input should be greater than 0"),
    ({"memory_bytes": -1}, "memory_bytes=-1: input should be greater than or equal to 0"),
    ({"reuse": "some"}, "reuse='some': input should be 'exact', 'lossy'"),
    ({"tools_order": "random", "reasoning": "maybe"}, "reasoning='maybe': .*; tools_order='random': input should be 'given'"),
]


@pytest.mark.parametrize(("settings", "words"), WRONG_SETTINGS)
def test_settings_that_cannot_be(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(errors.ModelInvalidRequestError, match=words) as caught:
        ChatAgentCache(**{"model": "x", **settings})
    assert isinstance(caught.value, ValueError)
    assert "validation error for" not in str(caught.value)


@pytest.mark.parametrize("kind", [ChatAgentCache, AgentCacheLLM])
@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("temperature", "hot", "temperature='hot': must be 0"),
        ("timeout", "soon", "timeout='soon': must be a positive number of seconds"),
        ("template_kwargs", "x", "template_kwargs='x': must be a dict"),
    ],
)
def test_an_assigned_setting_that_cannot_be_is_named(model_folder: str, kind: Any, name: str, value: Any, words: str) -> None:
    """Neither pydantic nor LangChain checks what is assigned: a timer with a text for its seconds never ended an answer."""
    model = kind(model=model_folder, memory_bytes=64 << 20)
    setattr(model, name, value)
    with pytest.raises(errors.ModelInvalidRequestError, match=words):
        model.invoke(ASKED)


WRONG_CALLS = [
    ({"temperature": "hot"}, "temperature='hot': must be 0"),
    ({"max_tokens": -1}, "max_tokens=-1: must be an integer of at least 1; a large one ends where the context does"),
    ({"stop": 3}, "stop=3: must be a text or a list of texts"),
    ({"stop": [""]}, "stop=.*: must be a tuple of non-empty strings"),
    ({"timeout": "soon"}, "timeout='soon': must be a positive number of seconds"),
    ({"timeout": -1}, "timeout=-1: must be a positive number"),
    ({"namespace": 3}, "namespace=3: must be a text"),
    ({"template_kwargs": 3}, "template_kwargs=3: must be a dict"),
    ({"cache_control": "yes"}, "cache_control='yes': must be {'type': 'ephemeral'"),
    ({"cache_control": {"ttl": []}}, r"cache_control=\{'ttl': \[\]\}: must be"),
    ({"forbidden_tools": "tide", "tools": [tide]}, "forbidden_tools='tide': must be a list of names"),
    ({"tools": [{"function": {}}]}, "tool {'function': {}}: (is no function with a name|cannot be described)"),
    ({"tools": [3]}, "tool 3: cannot be described to a model"),
    ({"tool_choice": "any"}, "there is no tool to call; pass tools"),
    ({"response_format": 3}, "response_format=3: must be"),
    ({"volatile": 3}, "volatile=3: give a text"),
]


@pytest.mark.parametrize(("options", "words"), WRONG_CALLS)
async def test_calls_that_cannot_be(chat: Make, options: dict[str, Any], words: str) -> None:
    model = chat()
    for ask in (model.invoke, lambda *said, **more: list(model.stream(*said, **more))):
        with pytest.raises(errors.ModelInvalidRequestError, match=words):
            ask(ASKED, **options)
    with pytest.raises(errors.ModelInvalidRequestError, match=words):
        await model.ainvoke(ASKED, **options)


@pytest.mark.parametrize("tools", [None, "tide", tide, {"name": "tide"}])
def test_tools_are_a_list(chat: Make, tools: Any) -> None:
    with pytest.raises(errors.ModelInvalidRequestError, match="tools=.*: must be a list of tools"):
        chat().bind_tools(tools)


@pytest.mark.parametrize("method", ["function_calling", "json_schema", "json_mode"])
@pytest.mark.parametrize("schema", [3, "Ship", Plain])
def test_forms_that_are_none(chat: Make, method: Any, schema: Any) -> None:
    with pytest.raises(errors.ModelInvalidRequestError, match="schema=.*: must be a pydantic class, a TypedDict"):
        chat().with_structured_output(schema, method=method)
    with pytest.raises(errors.ModelInvalidRequestError, match=r"unknown arguments \['tools'\]; .*bind_tools\(tools, response_format="):
        chat().with_structured_output(Ship, method=method, tools=[tide])
    chat().with_structured_output(Ship, method=method, strict=True, tools=None)


def test_blocks_show_what_they_are(chat: Make) -> None:
    for block in ({"colour": 1}, {"type": "input_audio", "input_audio": {}}):
        with pytest.raises(errors.ModelInvalidRequestError, match=r"messages\[0\]: a human message with .*(colour|input_audio).*text only"):
            chat().invoke([HumanMessage([block])])
    tagged = [{"type": "text", "text": "x", "cache_control": "yes"}]
    with pytest.raises(errors.ModelInvalidRequestError, match="cache_control='yes'"):
        chat().invoke([HumanMessage(tagged)])


def test_models_that_are_not_there(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_text("x")
    for name, words in (("/nowhere/at/all", "does not exist"), (file, "is no folder"), ("./nothing", "does not exist")):
        with pytest.raises(errors.ModelNotFoundError, match=f"model .* cannot be loaded: {words}. Pass a folder, a Hugging Face id"):
            ChatAgentCache(model=name, cache_dir="").invoke("x")


def test_what_this_machine_does_not_have(chat: Make) -> None:
    for options, words in (
        ({"device": "tpu"}, "device='tpu': cannot be used here .*; use 'cpu'"),
        ({"dtype": "float3"}, "dtype='float3': must be 'auto' or one of torch's"),
    ):
        with pytest.raises(errors.ModelInvalidRequestError, match=words):
            chat(**options).invoke("x")


def test_a_folder_by_its_path(model_folder: str) -> None:
    assert ChatAgentCache(model=Path(model_folder)).model == model_folder


def test_a_store_that_cannot_be_opened(chat: Make, tmp_path: Path) -> None:
    file = tmp_path / "store"
    file.write_text("x")
    with pytest.raises(errors.StoreUnusableError, match="name another one") as caught:
        chat(cache_dir=str(file)).invoke("x")
    assert isinstance(caught.value, theirs.ModelError)
    assert isinstance(caught.value, own.StoreError)


def test_a_closed_engine(model_folder: str) -> None:
    with Engine(model_folder, store=None, memory_bytes=1 << 20) as engine:
        chat = ChatAgentCache(engine=engine, max_tokens=1)
    with pytest.raises(errors.EngineClosedError, match="create a new one") as caught:
        chat.invoke("x")
    assert isinstance(caught.value, theirs.ModelError)
    assert isinstance(caught.value, own.EngineClosedError)


def test_what_a_policy_refuses(model_folder: str, tmp_path: Path) -> None:
    (tmp_path / "policy.toml").write_text('[[rule]]\nname = "none"\nrequests = 1\ngroups = []')
    with Engine(model_folder, store=None, memory_bytes=1 << 20, policy=tmp_path / "policy.toml") as engine:
        chat = ChatAgentCache(engine=engine, max_tokens=1)
        with pytest.raises(errors.ModelPermissionDeniedError, match="'none'") as caught:
            chat.warm("You keep a light.", name="lights")
        assert isinstance(caught.value, theirs.ModelPermissionDeniedError)
        with engine.stream("Fog."), pytest.raises(errors.ModelPermissionDeniedError, match="has 1 requests running"):
            chat.invoke("x")


def test_middleware_that_cannot_work(chat: Make) -> None:
    from langchain.agents import create_agent

    for wrong in ({"volatile": "now"}, {"facts": 3}, {"model": "Qwen"}, {"on_change": "shout"}):
        ((name, value),) = wrong.items()
        with pytest.raises(errors.ModelInvalidRequestError, match=f"{name}={value!r}: must be"):
            AgentCacheMiddleware(**wrong)
    for hook in ("volatile", "facts"):
        agent = create_agent(chat(), [tide], middleware=[AgentCacheMiddleware(**{hook: lambda state: 3})])
        with pytest.raises(errors.ModelInvalidRequestError, match=f"{hook}: the function returned 3; it must return text"):
            agent.invoke({"messages": ASKED})
