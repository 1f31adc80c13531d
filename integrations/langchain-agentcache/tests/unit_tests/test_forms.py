"""Forms of answers that are no flat object, and types that no schema can show: held to whole, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Optional

import pytest
from harbour import ASKED, Ship, tide
from langchain_agentcache import errors
from langchain_agentcache._tools import constraint, own_tools
from langchain_core.callbacks import BaseCallbackHandler
from pydantic import BaseModel, Field
from pydantic.v1 import BaseModel as OldModel
from typing_extensions import TypedDict


class Node(BaseModel):
    """A branch."""

    n: int = Field(ge=0, le=9)
    kids: list[Node] = Field(max_length=2)


class OldShip(OldModel):
    """A ship of long ago."""

    name: str


class Plain:
    """A class that says nothing of its fields."""


class Branch(TypedDict):
    """A branch."""

    kids: list[Branch]


SHIP = {"type": "object", "properties": {"flags": {"type": "integer", "minimum": 0, "maximum": 9}}, "required": ["flags"]}
NAMES = {"title": "Names", "type": "array", "items": {"type": "string", "maxLength": 3}, "minItems": 1, "maxItems": 2}
EITHER = {"title": "Either", "anyOf": [{"enum": ["aye"]}, {"const": 7}]}

FORMS: list[tuple[Any, Any]] = [
    (NAMES, NAMES),
    (EITHER, EITHER),
    ({key: value for key, value in NAMES.items() if key != "title"}, None),
    ({"type": ["integer", "null"], "enum": [7, None]}, None),
    ({"name": "T", "strict": True, "schema": SHIP}, SHIP),
    ({"type": "json_schema", "json_schema": {"name": "T", "strict": True, "schema": SHIP}}, SHIP),
    ({"name": "T", "description": "d", "parameters": SHIP}, {"title": "T", "description": "d", **SHIP}),
    ({"type": "function", "function": {"name": "T", "parameters": SHIP}}, {"title": "T", **SHIP}),
    ({"name": "T", "input_schema": SHIP}, {"title": "T", **SHIP}),
    (Node, Node.model_json_schema()),
    (OldShip, None),
]


@pytest.mark.parametrize(("schema", "expected"), FORMS)
def test_a_form_reaches_the_engine_whole(chat: Any, schema: Any, expected: Any) -> None:
    bound = chat().with_structured_output(schema, method="json_schema").first
    found = bound.kwargs["response_format"]["json_schema"]["schema"]
    if schema is OldShip:
        assert found["properties"].keys() == {"name"}
    else:
        assert found == (expected or schema)


def test_answers_hold_to_such_forms(chat: Any) -> None:
    model = chat(max_tokens=200, temperature=1.2, seed=3)
    names = model.with_structured_output(NAMES, method="json_schema").invoke(ASKED)
    assert 1 <= len(names) <= 2
    assert all(isinstance(name, str) and len(name) <= 3 for name in names)
    assert model.with_structured_output(EITHER, method="json_schema").invoke(ASKED) in ("aye", 7)
    assert model.with_structured_output({"name": "T", "schema": SHIP}, method="json_schema").invoke(ASKED).keys() == {"flags"}
    assert model.with_structured_output({"type": ["integer", "null"], "enum": [7, None]}, method="json_schema").invoke(ASKED) in (7, None)


def test_the_kids_of_a_node_are_nodes(chat: Any) -> None:
    """Greedy random weights put anything into a list whose items may be anything."""
    for seed in range(3):
        raw = chat(max_tokens=160, temperature=1.5, seed=seed).with_structured_output(Node, method="json_schema", include_raw=True)
        done = raw.invoke(ASKED)
        if done["raw"].response_metadata["finish_reason"] == "stop":
            assert isinstance(done["parsed"], Node)


def test_tracers_see_the_form(chat: Any) -> None:
    seen: list[Any] = []

    class Looks(BaseCallbackHandler):
        def on_chat_model_start(self, *said: Any, **more: Any) -> None:
            seen.append(more["options"]["ls_structured_output_format"])

    chat().with_structured_output(NAMES, method="json_schema").invoke(ASKED, config={"callbacks": [Looks()]})
    assert seen == [{"kwargs": {"method": "json_schema"}, "schema": NAMES}]


@pytest.mark.parametrize("schema", [NAMES, EITHER, {"name": "T", "strict": True, "schema": SHIP}])
def test_what_no_function_can_take_is_refused(chat: Any, schema: dict[str, Any]) -> None:
    with pytest.raises(errors.ModelInvalidRequestError, match=r"schema=\{'(title|name)'.*use method='json_schema'"):
        chat().with_structured_output(schema)


def test_functions_without_arguments_are_no_fault(chat: Any) -> None:
    for schema in ({"type": "function", "function": {"name": "now"}}, {"name": "now", "description": "The time."}):
        chat().with_structured_output(schema)


# -- types that no schema can show -------------------------------------------------------------------------------------


def takes_a_function(call: Callable[[int], int]) -> str:
    """Call it."""
    return ""


def takes_a_plain_object(thing: Plain) -> str:
    """Look at it."""
    return ""


@pytest.mark.parametrize("function", [takes_a_function, takes_a_plain_object])
def test_tools_that_cannot_be_described(chat: Any, function: Any) -> None:
    with pytest.raises(errors.ModelInvalidRequestError, match=f"tool <function {function.__name__}.*cannot be described"):
        chat().bind_tools([function])
    with pytest.raises(errors.ModelInvalidRequestError, match="cannot be (described|written)"):
        chat().with_structured_output(function)
    with pytest.raises(errors.ModelInvalidRequestError, match=r"schema=<function .*cannot be written as a JSON schema \(.*\); pass"):
        chat().with_structured_output(function, method="json_schema")


class Holds(BaseModel):
    """Holds a function."""

    call: Callable[[int], int]


@pytest.mark.parametrize("schema", [Holds, Branch, list[Node], Optional[Node]])  # noqa: UP045  # as people write it
@pytest.mark.parametrize("method", ["function_calling", "json_schema"])
def test_forms_that_cannot_be_written(chat: Any, schema: Any, method: Any) -> None:
    with pytest.raises(errors.ModelInvalidRequestError, match="(tool|schema=).*(cannot be|must be)"):
        chat().with_structured_output(schema, method=method)
    with pytest.raises(errors.ModelInvalidRequestError, match="tool .* cannot be described"):
        chat().bind_tools([schema])


def test_no_title_is_needed(chat: Any) -> None:
    assert chat(max_tokens=60).with_structured_output(SHIP, method="json_schema").invoke(ASKED).keys() == {"flags"}


CHOICES = [
    {"type": "allowed_tools", "allowed_tools": ["tide"]},
    {"type": "allowed_tools", "allowed_tools": None},
    {"type": "allowed_tools", "tools": None},
    {"type": "allowed_tools", "tools": "tide"},
    {"type": "allowed_tools", "tools": [3]},
    {"type": "allowed_tools", "tools": [{}]},
    {"type": "allowed_tools", "tools": ["tide"], "mode": "often"},
    {"type": "allowed_tools", "tools": ["tide"], "mode": 3},
]


@pytest.mark.parametrize("choice", CHOICES)
def test_tool_choices_of_no_shape(chat: Any, choice: dict[str, Any]) -> None:
    with pytest.raises(errors.ModelInvalidRequestError, match=r"tool_choice=\{'type': 'allowed_tools'.*must be"):
        constraint(own_tools([tide]), tool_choice=choice)
    with pytest.raises(errors.ModelInvalidRequestError, match="tool_choice="):
        chat().bind_tools([tide], tool_choice=choice).invoke(ASKED)


def test_pydantic_classes_are_classes_still(chat: Any) -> None:
    assert isinstance(chat(max_tokens=200, temperature=1.2, seed=3).with_structured_output(Ship, method="json_schema").invoke(ASKED), Ship)
