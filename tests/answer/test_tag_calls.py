"""Calls as tags in tags: written by the grammar, read back by the response template, with every value as its schema has it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentcache import Constraint, Engine, Message, Sampling, Tool, toy
from agentcache.answer.call_forms import HERMES
from agentcache.answer.expected import reads
from agentcache.answer.grammar import Grammars
from agentcache.answer.parser import AnswerParser
from agentcache.answer.response_template import template_for, template_of
from agentcache.answer.tag_forms import TAGS
from agentcache.answer.tag_values import is_text, value_of
from agentcache.errors import ToolSchemaError
from agentcache.types import ToolCall
from tests import models
from tests.answer.deltas import message_of, spoken, taken
from tests.answer.grammars import drawn_blindly, grammars_of, spelled
from tests.answer.response_templates import OBJECT
from tests.answer.response_templates import TAGS as OWN
from tests.engines import chat

pytest.importorskip("llguidance")

_START = toy.CHAT_TEMPLATE.index("{%- for call in message.tool_calls")
_STOP = toy.CHAT_TEMPLATE.index("{%- endfor %}", _START)
TEMPLATE = (
    toy.CHAT_TEMPLATE[:_START]
    + "{%- for call in message.tool_calls or [] %}{%- if not loop.first or message.content %}{{- '\\n' }}{%- endif %}"
    + "{{- '<tool_call>\\n<function=' + call.function.name + '>\\n' }}{%- for key, value in call.function.arguments | items %}"
    + "{{- '<parameter=' + key + '>\\n' }}{{- value if value is string else value | tojson }}{{- '\\n</parameter>\\n' }}{%- endfor %}"
    + "{{- '</function>\\n</tool_call>' }}"
    + toy.CHAT_TEMPLATE[_STOP:]
)
SHIP = {"type": "object", "properties": {"name": {"type": "string"}, "masts": {"type": "integer", "maximum": 3}}, "required": ["name"]}
LOOK = {
    "type": "object",
    "properties": {
        "harbour": {"type": "string", "maxLength": 6},
        "unit": {"enum": ["C", "F", 3]},
        "days": {"type": "integer", "minimum": 0, "maximum": 9},
        "ship": {"$ref": "#/$defs/Ship"},
        "note": {"anyOf": [{"type": "string", "maxLength": 4}, {"type": "null"}]},
        "depth": {"anyOf": [{"type": "integer", "maximum": 9, "minimum": 0}, {"type": "null"}]},
        "code": {"type": "string", "pattern": "^[A-C]{2}$"},
        "wind": {"anyOf": [{"enum": ["north", "east"]}, {"type": "null"}]},
        "free": {"type": "string"},
    },
    "required": ["harbour", "unit", "days"],
    "$defs": {"Ship": SHIP},
}
TOOLS = [Tool("look", "", LOOK), Tool("ping")]
PING = "<tool_call>\n<function=ping>\n</function>\n</tool_call>"


def tokenizer(response: dict[str, Any] | None = None, template: str = TEMPLATE) -> Any:
    made = models.toy_tokenizer()
    made.chat_template = template
    made.response_template = response
    return made


def grammars() -> Grammars:
    return grammars_of(tokenizer())


def read(text: str) -> Message:
    reader = AnswerParser(template_for(TAGS), tools=TOOLS_SHOWN, names=("look", "ping"))
    assert message_of(taken(reader, text)) == reader.message
    return reader.message


TOOLS_SHOWN = [{"name": tool.name, "parameters": tool.parameters} for tool in TOOLS]


def call(**values: str) -> str:
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function=look>\n{inner}</function>\n</tool_call>"


def check(made: ToolCall) -> None:
    said = dict(made.arguments)
    if made.name == "ping":
        assert said == {}
        return
    assert {"harbour", "unit", "days"} <= said.keys() <= LOOK["properties"].keys()
    assert isinstance(said["harbour"], str)
    assert len(said["harbour"]) <= 6
    assert said["unit"] in ("C", "F", 3)
    assert said["days"] in range(10)
    assert len(said.get("note", "")) <= 4
    assert said.get("wind", "east") in ("north", "east")
    assert said.get("depth") is None or said["depth"] in range(10)
    assert len(said.get("code", "AB")) == 2
    if "ship" in said:
        assert isinstance(said["ship"]["name"], str)


def test_the_form_is_read_off_the_chat_template() -> None:
    assert grammars().form == TAGS


def test_what_the_grammar_lets_through() -> None:
    made = grammars()
    right = call(harbour="Averil", unit="C", days="3", ship='{"name": "Aurora"}', depth="null", code="AB", wind="east", free="a\nb <c> ")
    assert spelled(made, Constraint("look"), right, TOOLS) == "end"
    assert spelled(made, Constraint("any"), f"{PING}\n{PING}", TOOLS) == "end"
    assert spelled(made, Constraint(), f"At noon.\n{PING}", TOOLS) == "end"
    for wrong in (
        call(harbour="Averil"),  # something required is missing
        call(harbour="Port Averil", unit="C", days="3"),  # too long
        call(harbour="A", unit="K", days="3"),  # not in the list
        call(harbour="A", unit="C", days="three"),
        call(harbour="A", unit="C", days="3", code="XY"),
        call(harbour="A", unit="C", days="3", colour="red"),
        call(harbour="A", unit="C", days="3", free="a</parameter>"),
        call(harbour="A", unit="C", days="3", note="much too long"),  # the one branch that is a text
        call(harbour="A", unit="C", days="3", wind="south"),
    ):
        assert spelled(made, Constraint("look"), wrong, TOOLS) not in ("end", "more")


@pytest.mark.parametrize("seed", range(4))
def test_whatever_is_drawn_is_a_valid_call(seed: int) -> None:
    made = grammars()
    for choice in ("any", "look", "ping"):
        text = drawn_blindly(made, Constraint(choice, parallel=False), seed, TOOLS)
        found = read(text).tool_calls if text else ()
        assert found or not text
        for each in found:
            assert choice in ("any", each.name)
            check(each)
    assert any(drawn_blindly(made, Constraint("look"), s, TOOLS) for s in range(4))


TEXT = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=30).filter(lambda text: "</" not in text)


@settings(max_examples=30, deadline=None)
@given(note=TEXT, days=st.integers(), ship=st.dictionaries(TEXT, st.none() | st.booleans() | TEXT, max_size=3))
def test_values_come_back_as_they_went_in(note: str, days: int, ship: dict[str, Any]) -> None:
    said = read(call(harbour=note, days=str(days), ship=json.dumps(ship), unit="3"))
    assert said.tool_calls == (ToolCall("look", {"harbour": note, "days": days, "ship": ship, "unit": 3}),)


def test_values_by_their_schema() -> None:
    root = {
        "properties": {
            "any": {},
            "flag": {"type": "boolean"},
            "one": {"const": 4},
            "many": {"allOf": [{"$ref": "#/definitions/Many"}]},
            "lost": {"$ref": "#/$defs/Nothing"},
        },
        "definitions": {"Many": {"type": "array", "items": {}}},
    }
    shown = {"any": ("3", "3"), "flag": ("True", True), "one": ("4", 4), "many": ("[1]", [1]), "lost": ("x", "x"), "unknown": ("x", "x")}
    assert {key: value_of(text, root, key) for key, (text, _) in shown.items()} == {key: value for key, (_, value) in shown.items()}
    assert value_of("no", root, "flag") == "no", "nothing is lost"
    assert value_of("[{'a': None}]", root, "many") == [{"a": None}]
    assert value_of("[(1, 2)]", root, "many") == "[(1, 2)]", "JSON has no tuples"
    assert is_text({"type": ["string", "null"]}, {})
    assert not is_text({"properties": {}}, {})
    assert not is_text({"allOf": [{"type": "integer"}, {"minimum": 1}]}, {})
    assert value_of("7", {"properties": {"n": {"allOf": [{"type": "integer"}, {"minimum": 1}]}}}, "n") == 7
    parts = {"odd/one": {"type": "array", "items": {}}, "part": {"$ref": "#/properties/odd~1one"}, "self": {"$ref": "#"}}
    assert value_of("[1]", {"properties": parts}, "part") == [1]
    assert value_of('{"part": [1]}', {"properties": parts}, "self") == {"part": [1]}
    grammars().guide(Constraint("odd"), [Tool("odd", "", {"type": "object", "properties": parts})], "")


def test_which_template_reads_what_a_constraint_wrote() -> None:
    one, own = template_of(tokenizer(OBJECT)), template_of(tokenizer(OWN))
    ours, plain = template_for(TAGS), template_for(HERMES)
    assert one is not None
    assert own is not None
    for begun in ("", "<think>\n"):
        assert reads(one, begun, HERMES)
        assert reads(plain, begun, HERMES)
        assert not reads(ours, begun, HERMES)
        assert not reads(one, begun, TAGS)
        assert not reads(own, begun, HERMES)
        assert reads(ours, begun, TAGS)


def test_free_calls_are_read_though_the_tokenizer_brings_no_template(tiny: Any) -> None:
    with Engine(tiny("qwen3"), tokenizer(), store=None) as running:
        text = "I look.\n" + call(harbour="Averil", days="3", unit="C") + "\n" + PING
        done = running.generate(chat("Tide?"), TOOLS, sampling=spoken(text, running.tokenizer))
    assert done.message.content == "I look."
    assert [(each.name, dict(each.arguments)) for each in done.message.tool_calls] == [
        ("look", {"harbour": "Averil", "days": 3, "unit": "C"}),
        ("ping", {}),
    ]
    assert done.finish_reason == "tool_calls"


@pytest.mark.parametrize("response", [None, OWN], ids=["none", "own"])
def test_random_weights_make_valid_calls_that_go_on(tiny: Any, response: Any) -> None:
    with Engine(tiny("qwen3"), tokenizer(response), store=None) as running:
        seen = 0
        for seed in range(3):
            stream = running.stream(
                chat("Tide?"), TOOLS, sampling=Sampling(max_tokens=500, temperature=1.5, seed=seed), constraint=Constraint("look")
            )
            deltas = list(stream.deltas())
            done = stream.completion
            if done.finish_reason == "length":
                continue
            seen += 1
            (made,) = done.message.tool_calls
            check(made)
            assert [d.id for d in deltas if d.kind == "call"] == [made.id]
            assert json.loads("".join(d.text for d in deltas if d.kind == "arguments")) == made.arguments
            assert not done.receipt.notes
            again = [*chat("Tide?"), done.message, Message("tool", "At 3.", tool_call_id=made.id)]
            after = running.generate(again, TOOLS, sampling=Sampling(max_tokens=1))
            assert after.receipt.cached_tokens >= done.receipt.prompt_tokens + done.receipt.completion_tokens - 1, "its own tokens"
        assert seen


def test_held_answers_are_read_by_the_tokenizers_template(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    inner = AnswerParser.finish
    monkeypatch.setattr(AnswerParser, "finish", lambda self, cut="": asked.append(self._text) or inner(self, cut))
    with Engine(tiny("qwen3"), tokenizer(OBJECT, toy.CHAT_TEMPLATE), store=None) as running:
        done = running.generate(chat("Tide?"), [Tool("ping")], sampling=Sampling(max_tokens=100), constraint=Constraint("ping"))
    assert [each.name for each in done.message.tool_calls] == ["ping"]
    assert asked[-1] == done.text


def test_a_pattern_that_cannot_be_held_names_the_tool() -> None:
    bad = Tool("odd", "", {"type": "object", "properties": {"a": {"type": "string", "pattern": "(?=x)"}}})
    with pytest.raises(ToolSchemaError, match="'odd': its schema cannot be enforced"):
        grammars().guide(Constraint("odd"), [bad], "")
