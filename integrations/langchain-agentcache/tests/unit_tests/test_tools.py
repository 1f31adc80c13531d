"""Tools of every kind, every tool choice, and forms: translated, and held to."""

from __future__ import annotations

from typing import Any

import pytest
from harbour import ASKED, Ship, log, tide
from langchain_agentcache import errors
from langchain_agentcache._tools import constraint, formatted, own_tools
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
)

from agentcache import Constraint


@pytest.mark.parametrize("seed", range(2))
def test_calls_are_valid_whatever_the_weights_say(chat: Any, seed: int) -> None:
    model = chat(max_tokens=300, temperature=1.5, seed=seed)
    for choice in ("log", {"type": "function", "function": {"name": "log"}}):
        message = model.bind_tools([tide, log], tool_choice=choice).invoke(ASKED)
        if message.response_metadata["finish_reason"] != "length":
            assert [call["name"] for call in message.tool_calls] == ["log"]
            assert isinstance(message.tool_calls[0]["args"]["text"], str)
        assert message.invalid_tool_calls == []
    free = model.bind_tools([tide, log], tool_choice="none").invoke(ASKED, max_tokens=20)
    assert free.tool_calls == []
    assert free.usage_metadata["input_token_details"]["cache_creation"] == 1, "the tools stay in the prompt"


def test_half_a_call_is_not_a_call(chat: Any) -> None:
    pay = {"title": "pay", "description": "Pay.", "type": "object", "properties": {"amount": {"type": "integer"}}, "required": ["amount"]}
    with pytest.raises(errors.ModelInvalidRequestError, match="max_tokens=9: the shortest answer") as refused:
        chat(max_tokens=9).bind_tools([pay], tool_choice="pay").invoke(ASKED)
    least, joined = int(str(refused.value).split(" has ")[1].split()[0]), None
    model = chat(max_tokens=least, temperature=1.5, seed=1).bind_tools([pay], tool_choice="pay")
    whole = model.invoke(ASKED)
    for piece in model.stream(ASKED):
        joined = piece if joined is None else joined + piece
    assert isinstance(joined, AIMessageChunk)
    assert whole.response_metadata["finish_reason"] == joined.response_metadata["finish_reason"] == "length"
    assert whole.tool_calls == joined.tool_calls == []
    assert joined.invalid_tool_calls


CHOICES = [
    (None, None),
    ("auto", None),
    (False, None),
    ("none", Constraint("none")),
    ("any", Constraint("any")),
    ("required", Constraint("any")),
    (True, Constraint("any")),
    ("log", Constraint("log")),
    ({"type": "function", "function": {"name": "log"}}, Constraint("log")),
    ({"type": "tool", "name": "log"}, Constraint("log")),
    ({"type": "any"}, Constraint("any")),
    (
        {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "name": "log"}]}},
        Constraint(allowed=("log",)),
    ),
    ({"type": "allowed_tools", "mode": "required", "tools": [{"function": {"name": "log"}}]}, Constraint("any", ("log",))),
]


@pytest.mark.parametrize(("choice", "expected"), CHOICES)
def test_tool_choices(choice: Any, expected: Constraint | None) -> None:
    assert constraint(own_tools([tide, log]), tool_choice=choice) == expected


def test_other_constraints() -> None:
    tools = own_tools([tide])
    assert constraint(tools, strict=True) == Constraint()
    assert constraint(tools, parallel_tool_calls=False) == Constraint(parallel=False)
    assert constraint(tools, forbidden=["tide"]) == Constraint(allowed=())
    assert constraint([], tool_choice="auto", strict=True) is None
    schema = {"type": "object", "properties": {}}
    asked = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    assert constraint(tools, response_format=asked) == Constraint(schema=schema)
    assert constraint(tools, response_format=asked, tool_choice="any") == Constraint("any"), "the form is for the answer behind the call"
    assert constraint([], response_format={"type": "json_object"}) == constraint([], response_format="json") == Constraint(schema=True)
    assert constraint([], response_format=schema) == Constraint(schema=schema)
    for wrong in (
        {"tool_choice": 3},
        {"tool_choice": {"type": "what"}},
        {"response_format": 3},
        {"response_format": {"type": "json_schema"}},
    ):
        with pytest.raises(errors.ModelInvalidRequestError, match="must be"):
            constraint(tools, **wrong)


def test_tools_of_every_kind_and_only_once() -> None:
    def plain(x: int) -> int:
        """Doubles."""
        return 2 * x

    schema = {"title": "Schema", "description": "d", "type": "object", "properties": {"a": {"type": "string"}}}
    anthropic = {"name": "claude", "description": "d", "input_schema": {"type": "object", "properties": {}}}
    made = formatted([tide, plain, Ship, schema, anthropic])
    assert [one["function"]["name"] for one in made] == ["tide", "plain", "Ship", "Schema", "claude"]
    assert formatted([tide])[0] is made[0], "converting is remembered"
    for wrong in (3, {"type": "web_search"}, {"type": "function"}):
        with pytest.raises(errors.ModelInvalidRequestError, match="tool "):
            formatted([wrong])  # type: ignore[list-item]


@pytest.mark.parametrize("method", ["function_calling", "json_schema"])
def test_structured_output(chat: Any, method: Any) -> None:
    model = chat(max_tokens=200, temperature=1.2, seed=3)
    assert isinstance(model.with_structured_output(Ship, method=method).invoke(ASKED), Ship)
    raw = model.with_structured_output(Ship, method=method, include_raw=True).invoke(ASKED)
    assert isinstance(raw["parsed"], Ship)
    assert isinstance(raw["raw"], AIMessage)
    assert raw["parsing_error"] is None
    with pytest.raises(errors.ModelInvalidRequestError, match="max_tokens=3: the shortest answer"):
        chat(max_tokens=3).with_structured_output(Ship, method=method, include_raw=True).invoke(ASKED)
    as_dict = model.with_structured_output(Ship.model_json_schema(), method=method).invoke(ASKED)
    assert as_dict.keys() == {"name", "flags"}
    for wrong in ({"method": "magic"}, {"method": method, "colour": 1}):
        with pytest.raises(errors.ModelInvalidRequestError):
            model.with_structured_output(Ship, **wrong)
    with pytest.raises(errors.ModelInvalidRequestError, match="needs a schema"):
        model.with_structured_output(None, method=method)
