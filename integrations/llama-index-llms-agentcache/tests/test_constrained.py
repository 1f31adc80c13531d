"""Answers of a random model, held to what was asked for: whatever it would like to say, calls and objects are valid."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, Literal

import pytest
from cases import tide, tools, user
from llama_index.core.base.llms.types import ToolCallBlock
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.agentcache import AgentCacheLLM
from pydantic import BaseModel, Field

from agentcache import Engine
from agentcache.errors import ConfigError, ToolSchemaError

pytest.importorskip("llguidance", reason="constrained decoding needs the extra `constrain`")

Make = Callable[..., Any]


class Berth(BaseModel):
    """Where a ship lies."""

    name: Literal["north", "south"]
    number: int = Field(ge=1, le=9)
    lit: bool


PROMPT = PromptTemplate("Where does the {ship} lie?")


@pytest.fixture
def model(shared_engine: Engine, request: pytest.FixtureRequest) -> Iterator[AgentCacheLLM]:
    """A model that says what its random weights say."""
    with AgentCacheLLM(engine=shared_engine, namespace=request.node.name, max_tokens=200) as made:
        yield made


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_structured_predict_gives_the_class(model: AgentCacheLLM, temperature: float) -> None:
    berth = model.structured_predict(Berth, PROMPT, llm_kwargs={"temperature": temperature, "seed": 3}, ship="Aurora")
    assert isinstance(berth, Berth)


def test_structured_predict_async_and_growing(model: AgentCacheLLM, run: Make) -> None:
    async def ask() -> tuple[Any, list[Any]]:
        whole = await model.astructured_predict(Berth, PROMPT, ship="Aurora")
        return whole, [one async for one in await model.astream_structured_predict(Berth, PROMPT, ship="Aurora")]

    whole, growing = run(ask())
    streamed = list(model.stream_structured_predict(Berth, PROMPT, ship="Aurora"))
    assert whole == growing[-1] == streamed[-1]
    assert isinstance(streamed[-1], Berth)
    assert len(streamed) > 1
    assert all(one.model_dump() != other.model_dump() for one, other in zip(streamed[:-2], streamed[1:-1]))
    assert type(streamed[0]).__name__ in ("FlexibleBerth", "Berth")


def test_structured_llm_and_chat(model: AgentCacheLLM) -> None:
    text = model.as_structured_llm(Berth).chat([user("Where?")]).message.content
    Berth.model_validate_json(text)


def test_the_start_of_the_prompt_stays(model: AgentCacheLLM) -> None:
    asked = [user("Where does the Aurora lie? " * 10)]
    before = model.chat(asked, max_tokens=2, tools=tools()).raw["usage"]["prompt_tokens"]
    raw = model.chat(asked, max_tokens=2, tools=tools(), tool_choice="none", regex="[a-z]+").raw
    assert raw["usage"]["prompt_tokens"] == before
    assert raw["usage"]["prompt_tokens_details"]["cached_tokens"] >= before - 8


def test_output_class_must_be_a_class(model: AgentCacheLLM) -> None:
    with pytest.raises(ConfigError, match="BaseModel"):
        model.structured_predict(dict, PROMPT, ship="Aurora")  # type: ignore[type-var]


def test_an_object_that_looks_like_a_call_is_an_object(llm: Make) -> None:
    made = llm('{"name": "north", "number": 2, "lit": true}').structured_predict(Berth, PROMPT, ship="Aurora")
    assert made == Berth(name="north", number=2, lit=True)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_demanded_call_is_made_and_fits(model: AgentCacheLLM, seed: int) -> None:
    response = model.chat_with_tools(tools(), user_msg="wind?", tool_required=True, temperature=1.0, seed=seed, max_tokens=400)
    if response.raw["finish_reason"] == "length":
        pytest.skip("a random model wrote a very long string")
    (found,) = model.get_tool_calls_from_response(response)
    assert found.tool_name in ("tide", "wind")
    assert isinstance(found.tool_kwargs["harbour"], str)


class Press(BaseModel):
    """Which button, and how."""

    digit: Literal["1", "2"]
    sure: bool


def _press() -> FunctionTool:
    return FunctionTool.from_defaults(lambda digit, sure: f"{digit} {sure}", name="press", description="Press a button.", fn_schema=Press)


@pytest.mark.parametrize("choice", ["press", {"type": "function", "function": {"name": "press"}}, "required", "any", True])
def test_tool_choice_in_all_its_spellings(model: AgentCacheLLM, choice: Any) -> None:
    press = _press()
    given = [press] if choice in ("required", "any", True) else [FunctionTool.from_defaults(tide), press]
    response = model.chat_with_tools(given, user_msg="?", tool_choice=choice)
    (found,) = model.get_tool_calls_from_response(response)
    assert found.tool_name == "press"
    assert found.tool_kwargs["digit"] in ("1", "2")
    assert isinstance(found.tool_kwargs["sure"], bool)


def test_choice_none_shows_the_tools_and_forbids_calls(model: AgentCacheLLM) -> None:
    asked = [user("tide?")]
    with_calls = model.chat(asked, tools=tools(), max_tokens=3)
    without = model.chat(asked, tools=tools(), tool_choice="none", max_tokens=40)
    assert without.raw["usage"]["prompt_tokens"] == with_calls.raw["usage"]["prompt_tokens"]
    assert not [block for block in without.message.blocks if isinstance(block, ToolCallBlock)]


def test_a_superset_masks_and_keeps_the_prompt(model: AgentCacheLLM) -> None:
    press = _press()
    sharing = model.with_superset([*tools(), press])
    first = sharing.chat_with_tools([press], user_msg="?", tool_required=True)
    assert [one.tool_name for one in sharing.get_tool_calls_from_response(first)] == ["press"]
    assert json.dumps(first.raw)
    again = sharing.chat([user("?")], max_tokens=4)  # no tools at all: the same prompt, no call possible
    assert again.raw["usage"]["prompt_tokens"] == first.raw["usage"]["prompt_tokens"]
    assert again.raw["usage"]["prompt_tokens_details"]["cached_tokens"] == first.raw["usage"]["prompt_tokens"] - 1


def test_an_unenforceable_schema_is_refused_before_computing(model: AgentCacheLLM) -> None:
    bad = {"type": "function", "function": {"name": "odd", "parameters": {"type": "object", "properties": {"x": {"type": "strange"}}}}}
    with pytest.raises((ConfigError, ValueError), match="odd"):
        model.chat([user("?")], tools=[bad], tool_choice="odd")


@pytest.mark.parametrize("strict", [False, True])
def test_tools_that_cannot_be_enforced_are_held_where_demanded(
    model: AgentCacheLLM, shared_engine: Engine, monkeypatch: pytest.MonkeyPatch, strict: bool
) -> None:
    monkeypatch.setattr(shared_engine.grammars, "strict", strict)  # of the embedded model: the engine notes it, too

    def tag(tags: set[str]) -> str:
        """Tag a ship."""
        return "tagged"

    listed = [FunctionTool.from_defaults(tag), *tools()]
    answer = model.chat_with_tools(listed, user_msg="Tag it.", max_tokens=8)
    assert isinstance(answer.raw, dict)
    (note,) = answer.raw["receipt"]["notes"]
    assert "calls are not held to their schemas: tool 'tag': its schema" in note
    monkeypatch.setattr(shared_engine, "redact", True)
    assert "tag" not in str(model.chat_with_tools(listed, user_msg="Tag it.", max_tokens=8).raw["receipt"]["notes"])
    with pytest.raises(ToolSchemaError, match="uniqueItems"):
        model.chat_with_tools(listed, user_msg="Tag it.", tool_required=True)
