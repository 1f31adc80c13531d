"""What a constraint lets through, token by token, without a model: families, choices, reasoning, schemas, and what cannot be enforced."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from agentcache import Constraint, Tool
from agentcache.answer.call_forms import CallForm
from agentcache.answer.family_forms import form_of
from agentcache.answer.grammar import Grammars
from agentcache.answer.grammar_rules import closed
from agentcache.errors import ConfigError, ToolSchemaError
from agentcache.layout import Renderer
from benchmarks.answers import parse
from tests import models
from tests.answer.grammars import FAMILIES, TOOLS, drawn_blindly, grammars, grammars_of, spelled

pytest.importorskip("llguidance")

CALLS = {
    "hermes": '<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>',
    "llama": '{"name": "ping", "parameters": {}}',
    "mistral": '[TOOL_CALLS] [{"name": "ping", "arguments": {}}]',
    "other": '<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>',
}


def test_forms_are_read_off_the_template() -> None:
    assert grammars("hermes").form == CallForm()
    assert grammars("llama").form == CallForm("", "", '{"name": "', '", "parameters": ', "}", None, "")
    assert grammars("mistral").form == CallForm("[TOOL_CALLS]", " [", '{"name": "', '", "arguments": ', "}", ", ", "]")
    assert grammars("other").form == CallForm(known=False)
    assert form_of('<tool_call>{"name":"zprobe_fn","arguments":{"zarg":"zval"}}</tool_call>').between == '","arguments":'


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("seed", range(6))
def test_whatever_is_drawn_is_a_valid_call(family: str, seed: int) -> None:
    made = grammars(family)
    for choice in ("any", "get_weather", "ping"):
        text = drawn_blindly(made, Constraint(choice), seed)
        calls = parse(text, ("get_weather", "ping")).tool_calls
        assert calls or not text
        assert choice == "any" or len(calls) < 2
        for call in calls:
            assert choice in ("any", call.name)
            if call.name == "ping":
                assert call.arguments == {}
            else:
                assert set(call.arguments) <= {"city", "days"}
                assert isinstance(call.arguments["city"], str)
                assert len(call.arguments["city"]) <= 6
                assert call.arguments.get("days", 1) in (1, 2)
    assert any(drawn_blindly(made, Constraint("ping"), s) for s in range(3))


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_choices(family: str) -> None:
    made, call = grammars(family), CALLS[family]
    wrong = call.replace("ping", "pong")
    assert spelled(made, Constraint(), "The tide turns.") == "end"
    assert spelled(made, Constraint(), call) == "end"
    assert call.startswith(spelled(made, Constraint(), wrong)[:-1])
    assert spelled(made, Constraint(), wrong) not in ("end", "more")
    assert spelled(made, Constraint("any"), call) == "end"
    assert spelled(made, Constraint("any"), "The tide") == ""
    assert spelled(made, Constraint("none"), "The tide turns.") == "end"
    assert spelled(made, Constraint("none"), call) not in ("end", "more")
    assert spelled(made, Constraint("get_weather"), call) not in ("end", "more")
    assert spelled(made, Constraint(allowed=("get_weather",)), call) not in ("end", "more")
    assert spelled(made, Constraint(allowed=("ping",)), call) == "end"
    assert spelled(made, Constraint(allowed=()), call) not in ("end", "more")
    assert spelled(made, Constraint(), "yes", tools=[]) == "end"


@pytest.mark.parametrize("family", ["hermes", "mistral"])
def test_calls_behind_text_and_several(family: str) -> None:
    made, call = grammars(family), CALLS[family]
    assert spelled(made, Constraint(), f"I look.\n{call}") == "end"
    two = f"{call}\n{call}" if family == "hermes" else call[:-1] + ", " + call.split("[")[2]
    assert spelled(made, Constraint("any"), two) == "end"
    assert len(parse(two).tool_calls) == 2
    for once in (Constraint(parallel=False), Constraint("any", parallel=False), Constraint("ping")):
        assert spelled(made, once, two) not in ("end", "more")


def test_reasoning_comes_first_where_the_template_has_it() -> None:
    made, call = grammars(thinking=True), CALLS["hermes"]
    schema = Constraint(schema={"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
    thought = "<think>\nMaybe <tool_call> or not\n</think>\n\n"
    assert spelled(made, Constraint(), thought + "yes") == "end"
    assert spelled(made, Constraint(), "\n" + thought) == "\n<think", "no white space before it"
    assert spelled(made, Constraint("any"), call) == "end"
    assert spelled(made, Constraint("any"), thought + call) == "<", "nobody asked for one"
    assert spelled(made, schema, thought + '{"a": 1}', tools=[]) == ""
    assert spelled(made, Constraint("any"), thought + call, thinks=True) == "end"
    assert spelled(made, Constraint("any"), call, thinks=True) == "end"
    assert spelled(made, Constraint("any"), thought + "yes", thinks=True).startswith("<think>")
    assert spelled(made, schema, thought + '{"a": 1}', tools=[], thinks=True) == "end"
    assert spelled(made, schema, " " + thought + '{"a": 1}', tools=[], thinks=True) == ""
    assert spelled(made, Constraint(), "<think>\nstill") == "more", "a thought does not just end"
    opened = thought.removeprefix("<think>")
    assert spelled(made, Constraint("any"), opened + call, prompt="<|im_start|>assistant\n<think>\n") == "end"
    assert spelled(made, Constraint("any"), call, prompt="<think>\n") == "more"
    assert spelled(made, Constraint("any"), thought, prompt="<think>\n\n</think>\n\n") == "<", "the thought is over"
    assert spelled(grammars(), Constraint("any"), thought) == "<", "this template knows no thoughts"


def test_text_of_a_form() -> None:
    made = grammars()
    schema = {"type": "object", "properties": {"ship": {"type": "string"}, "n": {"type": "integer"}}, "required": ["ship", "n"]}
    assert spelled(made, Constraint(schema=schema), '{"ship": "Ada", "n": 3}', tools=[]) == "end"
    assert spelled(made, Constraint(schema=schema), '{"ship": "Ada", "n": "3"}', tools=[]).startswith('{"ship": "Ada"')
    assert spelled(made, Constraint(schema=True), '{"x": [1, {"y": null}]}', tools=[]) == "end"
    assert spelled(made, Constraint(schema=True), "[1]", tools=[]) == ""
    assert spelled(made, Constraint(regex=r"[a-c]+/\d"), "abc/7", tools=[]) == "end"
    assert spelled(made, Constraint(grammar='start: "tide" ("s")?'), "tides", tools=[]) == "end"
    both = Constraint(schema=schema)
    assert spelled(made, both, CALLS["hermes"]) == "end", "with tools, a call is an answer, too"
    assert spelled(made, Constraint("none", schema=schema), CALLS["hermes"]) == ""


def test_objects_are_closed_unless_they_say_otherwise() -> None:
    inner = {"type": "object", "properties": {"x": {}}}
    out = closed({"type": "object", "properties": {"a": inner, "b": {**inner, "additionalProperties": True}}, "$defs": {"D": inner}})
    assert (
        out["additionalProperties"] is out["properties"]["a"]["additionalProperties"] is out["$defs"]["D"]["additionalProperties"] is False
    )
    assert out["properties"]["b"]["additionalProperties"] is True
    assert closed({"allOf": [inner]}) == {"allOf": [inner]}
    assert "additionalProperties" not in closed({"type": "object"})
    assert spelled(grammars(), Constraint("ping"), CALLS["hermes"].replace("{}", '{"a": 1}')) not in ("end", "more")


@pytest.mark.parametrize(
    "value",
    [
        {"type": "string", "format": "path"},  # pydantic's, of a Path; "binary" of bytes, "password" of a SecretStr
        {"type": "array", "items": {"type": "string", "format": "byte"}, "uniqueItems": False},
        {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "string"}},  # zod's, of a record
        {"allOf": [{"type": "string", "format": "binary"}]},
        {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a", "b"]},
    ],
)
def test_keywords_that_refuse_no_value_are_no_error(value: Any) -> None:
    parameters = {"type": "object", "properties": {"format": value}, "required": ["format"]}
    grammars().guide(Constraint("any"), [Tool("odd", "", parameters)], "")
    grammars().guide(Constraint(schema=parameters), [], "")


BAD = {"type": "object", "properties": {"a": {"type": "string", "pattern": "(?=x)y"}}}


@pytest.mark.parametrize(
    ("constraint", "tools", "error", "words"),
    [
        (Constraint("any"), [*TOOLS, Tool("odd", "", BAD)], ToolSchemaError, "'odd': its schema cannot be enforced"),
        (Constraint(schema=BAD), [], ConfigError, "cannot be enforced.*look-ahead"),
        (Constraint(schema={"type": "strung"}), [], ConfigError, "strung"),
        (Constraint(schema={"oneOf": [{"type": "number"}, {"type": "integer"}]}), [], ConfigError, "Write anyOf instead"),
        (Constraint(schema={"$ref": "#"}), [], ConfigError, "^((?!<state>).)*$"),
        (Constraint(schema={"a": object()}), [], ConfigError, "is not JSON"),
        (Constraint(regex="["), [], ConfigError, r"regex='\['.*cannot be enforced"),
        (Constraint(grammar="start: what"), [], ConfigError, "unknown name"),
        (Constraint("any"), [], ConfigError, "no tool to call"),
        (Constraint("any", allowed=()), TOOLS, ConfigError, "no tool to call"),
        (Constraint("pong"), TOOLS, ConfigError, "'pong'.*no such tool, only"),
        (Constraint("ping", allowed=("get_weather",)), TOOLS, ConfigError, "not among"),
        (Constraint(allowed=("pong",)), TOOLS, ConfigError, "no tool 'pong'"),
    ],
)
def test_what_cannot_be_enforced(constraint: Constraint, tools: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words) as caught:
        grammars().guide(constraint, tools, "")
    assert "x-guidance" not in str(caught.value), "our own grammar is nobody's business"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tool_choice": ""}, "tool_choice"),
        ({"tool_choice": True}, "tool_choice"),
        ({"allowed": "ping"}, "allowed"),
        ({"schema": False}, "schema"),
        ({"schema": "object"}, "schema"),
        ({"regex": 3}, "regex"),
        ({"regex": "a", "schema": True}, "choose one"),
        ({"tool_choice": "any", "schema": True}, "has no text"),
    ],
)
def test_constraints_are_checked(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Constraint(**fields)


def test_slow_tokenizers_are_refused() -> None:
    class Slow:
        chat_template = ""

    with pytest.raises(ConfigError, match="Slow is none"):
        Grammars(Slow(), 10, frozenset(), lambda *a, **k: Renderer(models.toy_tokenizer()).render("x")).guide(Constraint(regex="a"), [], "")


def test_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ConfigError, match=r"pip install 'agentcache-llm\[constrain\]'"):
        grammars().guide(Constraint(regex="a"), [], "")


def test_a_model_without_an_end_of_turn() -> None:
    tokenizer = models.toy_tokenizer()
    made = Grammars(tokenizer, models.VOCAB, frozenset(), Renderer(tokenizer).render)
    guide = made.guide(Constraint("ping"), TOOLS, "")
    for token in tokenizer(CALLS["hermes"], add_special_tokens=False)["input_ids"]:
        assert guide.mask(torch.zeros(models.VOCAB)) is not None
        guide.accept(token)
    assert guide.over or guide.mask(torch.zeros(models.VOCAB)) is None


def test_markers_that_are_tokens_of_their_own() -> None:
    """Tokenizers may have <tool_call> as one added token, special or not: it is written like any other."""
    tokenizer = models.toy_tokenizer()
    tokenizer.add_tokens(["<tool_call>", "</tool_call>"])
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "[TOOL_CALLS]"]})
    made = grammars_of(tokenizer, len(tokenizer))
    guide = made.guide(Constraint(), TOOLS, "")
    for token in tokenizer("Yes: " + CALLS["hermes"], add_special_tokens=False)["input_ids"]:
        masked = guide.mask(torch.zeros(len(tokenizer)))
        assert masked is not None
        assert masked[token] == 0
        assert guide.accept(token) == ""
    free = made.guide(Constraint("none"), TOOLS, "").mask(torch.zeros(len(tokenizer)))
    assert free is not None
    assert free[tokenizer.convert_tokens_to_ids("<tool_call>")] == -torch.inf
    assert free[tokenizer.convert_tokens_to_ids("<|im_start|>")] == -torch.inf, "a turn is not begun inside an answer"


def test_a_grammar_is_made_once_and_followed_apart() -> None:
    made = grammars()
    one, two = (made.guide(Constraint("ping"), TOOLS, "") for _ in range(2))
    assert made._compiler is not None
    assert len(made._compiler._compiled) == 1
    token = made.tokenizer("<", add_special_tokens=False)["input_ids"][0]
    assert one.accept(token) == ""
    assert one.accept(made.tokenizer("x", add_special_tokens=False)["input_ids"][0]) != ""
    assert two.accept(token) == "", "the other request did not move"


def test_patterns_that_a_value_must_match_at_once_are_bounded() -> None:
    many = {"type": "object", "properties": {"a": {"allOf": [{"type": "string", "pattern": f"x{i}"} for i in range(300)]}}}
    apart = {"type": "object", "allOf": [{"properties": {f"p{i}": {"type": "string", "pattern": f"^a{{{i}}}"}}} for i in range(40)]}
    made = grammars()
    with pytest.raises(ToolSchemaError, match="tool 'many': a must match 300 patterns at once, at most 8"):
        made.guide(Constraint("any"), [Tool("many", "", many)], "")
    with pytest.raises(ConfigError, match="schema: a must match 300 patterns"):
        made.guide(Constraint(schema=many), [], "")
    made.guide(Constraint(schema=apart), [], "")


@pytest.mark.parametrize("schema", [{"type": "integer", "maximum": 10**400}, {"type": "string", "pattern": "("}])
def test_unenforceable_numbers_and_patterns_are_named_with_their_tool(schema: Any) -> None:
    parameters = {"type": "object", "properties": {"n": schema}, "required": ["n"]}
    with pytest.raises(ToolSchemaError, match="tool 'odd': its schema cannot be enforced"):
        grammars().guide(Constraint("any"), [Tool("odd", "", parameters)], "")
