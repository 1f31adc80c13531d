"""What users get wrong: every refusal is one of agentcache's errors, shows the value, and says what to do instead."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cases import tide, tiny, tools, user
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.llms.agentcache import AgentCacheLLM, AppendOnlyMemory, SharedAgentWorkflow, answer_at_tail
from pydantic import BaseModel

from agentcache import Engine
from agentcache.errors import AgentCacheError, ConfigError, EngineClosedError, MessageError, ModelLoadError, ToolSchemaError

Make = Callable[..., Any]


class Berth(BaseModel):
    number: int


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"temperature": "hot"}, "temperature='hot': input should be a valid number"),
        ({"temperature": -1}, "temperature=-1: input should be greater than or equal to 0"),
        ({"max_tokens": -1}, "max_tokens=-1: input should be greater than 0"),
        ({"context_window": -1}, "context_window=-1: input should be greater than 0"),
        ({"stop": "x", "late_system": "robot"}, "stop='x': input should be a valid list; late_system='robot': input should be 'user'"),
        ({"namespace": 3}, "namespace=3: input should be a valid string"),
        ({"additional_kwargs": 3}, "additional_kwargs=3: must be a dict"),
        ({"additional_kwargs": {"colour": 1}}, r"unknown options \['colour'\]: known are"),
        (
            {"additional_kwargs": {"tool_choice": "any"}},
            "additional_kwargs=.*'tool_choice'.*: given to each call, .*with_superset",
        ),
        ({"additional_kwargs": {"tool_required": True}}, "'tool_required'"),
        ({"additional_kwargs": {"allow_parallel_tool_calls": False}}, "'allow_parallel_tool_calls'"),
        ({"additional_kwargs": {"tools": []}}, "'tools'"),
        ({"memory_bytes": 1}, r"leave out .*\['memory_bytes'\]"),
        ({"colour": "red"}, r"unknown options \['colour'\]: neither AgentCacheLLM nor Engine has them$"),
        ({"max_token": 5}, r"unknown options \['max_token'\]: neither .* has them; did you mean max_tokens\?$"),
    ],
)
def test_settings_that_cannot_be(shared_engine: Engine, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        AgentCacheLLM(engine=shared_engine, **settings)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("temperature", "hot", "temperature='hot': must be 0"),
        ("max_tokens", None, "max_tokens=None: must be an integer of at least 1"),
        ("context_window", "wide", "context_window='wide': input should be a valid integer"),
        ("late_system", "robot", "late_system='robot': must be 'user' or 'system'"),
        ("additional_kwargs", None, "additional_kwargs=None: must be a dict"),
    ],
)
def test_an_assigned_setting_that_cannot_be_is_named(llm: Make, name: str, value: Any, words: str) -> None:
    """Neither pydantic nor LlamaIndex checks what is assigned."""
    model = llm("Aye.")
    setattr(model, name, value)
    with pytest.raises(ConfigError, match=words):
        model.chat([user("Tide?")])


def test_models_that_are_none(shared_engine: Engine, tmp_path: Path) -> None:
    for wrong in (3, "Qwen"):
        with pytest.raises(ConfigError, match=f"engine={wrong!r}: must be an agentcache.Engine"):
            AgentCacheLLM(engine=wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="tokenizer=3: must be the model's tokenizer"):
        AgentCacheLLM(model=shared_engine.model.model, tokenizer=3)
    for place, words in (("/nowhere/at/all", "does not exist"), (str(tmp_path), "cannot be loaded: .* Pass a folder")):
        with pytest.raises(ModelLoadError, match=words):
            AgentCacheLLM(model=place, store=None)
    with pytest.raises(ConfigError, match="give a Hugging Face id, a folder"):
        AgentCacheLLM()


ONE_CALL: list[tuple[dict[str, Any], str]] = [
    ({"stop": 3}, "stop=3: must be a text or a list of texts"),
    ({"best_of": 2}, r"unknown options \['best_of'\]: known are .*\]$"),
    ({"max_token": 5, "temprature": 1}, r"unknown options .*\]; did you mean max_tokens, temperature\?$"),
    ({"max_tokens": -1}, "max_tokens=-1: must be"),
    ({"namespace": 3}, "namespace=3: must be a text"),
    ({"tools": [{"function": {}}]}, "has no function name"),
    ({"tools": "tide"}, "tools='tide': give a list"),
    ({"tool_choice": "nobody"}, "tool_choice='nobody': must be 'auto', .*; the tools are"),
    ({"tool_choice": {"type": "what"}}, "tool_choice={'type': 'what'}: must be 'auto'"),
    ({"tool_choice": ["tide"]}, r"tool_choice=\['tide'\]: must be 'auto'"),
    ({"tool_required": True, "tools": []}, "a tool call is demanded"),
]


@pytest.mark.parametrize(("options", "words"), ONE_CALL)
def test_calls_that_cannot_be(llm: Make, run: Make, options: dict[str, Any], words: str) -> None:
    model, given = llm(), {"tools": tools(), **options}
    for ask in (
        lambda: model.chat([user("x")], **given),
        lambda: list(model.stream_chat([user("x")], **given)),
        lambda: run(model.achat([user("x")], **given)),
    ):
        with pytest.raises((ConfigError, ToolSchemaError), match=words):
            ask()


def test_tool_choice_of_other_makers(llm: Make) -> None:
    offered = llm().offered(tools())
    from llama_index.llms.agentcache.tools import tool_choice

    assert [tool_choice({"type": kind}, False, offered) for kind in ("auto", "none", "any", "required")] == ["auto", "none", "any", "any"]
    assert tool_choice({"type": "tool", "name": "wind"}, False, offered) == "wind"


def test_conversations_that_are_none(llm: Make) -> None:
    for wrong in ({"user_msg": 3}, {"user_msg": "x", "chat_history": "y"}, {"user_msg": user("x"), "chat_history": {"role": "user"}}):
        with pytest.raises(MessageError, match="chat_history=.*, user_msg=.*: give a list of ChatMessage"):
            llm().chat_with_tools(tools(), **wrong)
    with pytest.raises(MessageError, match="is empty"):
        llm("x").chat_with_tools(tools())
    with pytest.raises(MessageError, match="answers no open call"):
        llm("x").chat([user("x"), ChatMessage(role="tool", content="y", additional_kwargs={"tool_call_id": "z"})])


def test_forms_that_are_none(llm: Make, run: Make) -> None:
    for wrong in (dict, 3, BaseModel):
        with pytest.raises(ConfigError, match="output_cls=.*: must be a pydantic class"):
            llm().structured_predict(wrong, PromptTemplate("x"))
    for ask in (lambda: llm().structured_predict(Berth, "x"), lambda: run(llm().astructured_predict(Berth, "x"))):
        with pytest.raises(ConfigError, match="prompt='x': must be a prompt template"):
            ask()


def test_a_closed_model(run: Make) -> None:
    with tiny() as engine:
        model = AgentCacheLLM(engine=engine)
        model.close()
        for ask in (
            lambda: model.chat([user("x")]),
            lambda: run(model.achat([user("x")])),
            lambda: list(model.stream_complete("x")),
        ):
            with pytest.raises(EngineClosedError, match="make a new one, over the same engine="):
                ask()
        other = AgentCacheLLM(engine=engine)
    with pytest.raises(EngineClosedError, match="create a new one"):
        other.chat([user("x")])


def test_agents_and_memories_that_are_none() -> None:
    with pytest.raises(ConfigError, match="agents: 3 is no agent"):
        SharedAgentWorkflow([3])  # type: ignore[list-item]
    with pytest.raises(ConfigError, match="agent=3: must be an agent"):
        answer_at_tail(3, Berth)  # type: ignore[type-var]
    with pytest.raises(ConfigError, match="llm=3: must be an LLM"):
        AppendOnlyMemory.from_defaults(llm=3)  # type: ignore[arg-type]
    for limit, words in ((0, "token_limit=0: must be positive"), ("x", "token_limit='x': input should be a valid integer")):
        with pytest.raises(ConfigError, match=f"^{words}"):
            AppendOnlyMemory.from_defaults(token_limit=limit)  # type: ignore[arg-type]


def test_a_function_is_no_tool_yet(llm: Make) -> None:
    with pytest.raises(AgentCacheError, match=r"tool <function tide .* wrap it in FunctionTool.from_defaults"):
        llm().chat_with_tools([tide], user_msg="x")
