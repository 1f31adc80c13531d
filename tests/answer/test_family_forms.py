"""Each family's form: read off a chat template of its shape, read back from what that renders, and written under a constraint."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentcache import Constraint, Engine, Message, Sampling, Tool, ToolCall
from agentcache.answer.family_forms import form_of
from agentcache.answer.grammar import Grammars
from agentcache.answer.parser import AnswerParser
from agentcache.answer.response_template import template_for
from agentcache.errors import ToolSchemaError
from agentcache.layout import Renderer
from tests import models
from tests.answer.deltas import message_of, parsed, spoken, taken
from tests.answer.grammars import drawn_blindly, grammars_of, spelled

pytest.importorskip("llguidance")

OBJECT = "{{ c.function.arguments | tojson }}"
NAMED = '{"name": "{{ c.function.name }}", "arguments": ' + OBJECT + "}"
VALUES = "{% for k, v in c.function.arguments | items %}BEFORE{{ k }}BETWEEN{{ v if v is string else v | tojson }}AFTER{% endfor %}"
GEMMA = (
    "{% for k, v in c.function.arguments | items %}{{ ',' if not loop.first }}{{ k }}:"
    "{{ '<|\"|>' + v + '<|\"|>' if v is string else v }}{% endfor %}"
)


def values(before: str, between: str, after: str) -> str:
    return VALUES.replace("BEFORE", before).replace("BETWEEN", between).replace("AFTER", after)


@dataclass(frozen=True)
class Family:
    """What its chat template writes: each call, and what stands around and between them, around thoughts and around text."""

    call: str
    opened: str = ""
    joint: str = ""
    closed: str = ""
    thought: tuple[str, str] = ("<think>\n", "\n</think>\n\n")
    text: tuple[str, str] = ("", "\n")
    # calls as a constraint writes them, where the template shows them otherwise
    written: str = ""
    parallel: bool = True
    flat: bool = False
    head: str = ""  # of every prompt


FAMILIES = {
    "nemotron": Family(NAMED, "<TOOLCALL>[", ", ", "]</TOOLCALL>"),
    "lfm2": Family(NAMED, "<|tool_call_start|>[", ", ", "]<|tool_call_end|>"),
    "jamba": Family(NAMED, "<tool_calls>[", ", ", "]</tool_calls>"),
    "lfm2.5": Family(
        "{{ c.function.name }}({% for k, v in c.function.arguments | items %}{{ ', ' if not loop.first }}{{ k }}="
        "{{ \"'\" + v + \"'\" if v is string else v | tojson if v is mapping else v | string }}{% endfor %})",
        "<|tool_call_start|>[",
        ", ",
        "]<|tool_call_end|>",
    ),
    "phi4": Family(NAMED, "<|tool_call|>[", ", ", "]<|/tool_call|>"),
    "granite3": Family(NAMED, "<|tool_call|>[", ", ", "]"),
    "mistral": Family("[TOOL_CALLS]{{ c.function.name }}[ARGS]" + OBJECT, thought=("[THINK]", "[/THINK]"), text=("", "")),
    "seed": Family(
        "\n<seed:tool_call>\n<function={{ c.function.name }}>\n"
        + values("<parameter=", ">", "</parameter>\n")
        + "</function>\n</seed:tool_call>",
        thought=("<seed:think>", "</seed:think>\n"),
    ),
    "glm": Family(
        "\n<tool_call>{{ c.function.name }}\n"
        + values("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n")
        + "</tool_call>"
    ),
    "minimax": Family(
        '<invoke name="{{ c.function.name }}">\n' + values('<parameter name="', '">', "</parameter>\n") + "</invoke>\n",
        "<minimax:tool_call>\n",
        closed="</minimax:tool_call>",
    ),
    "gpt-oss": Family(
        " to=functions.{{ c.function.name }}<|channel|>commentary json<|message|>" + OBJECT + "<|call|>",
        thought=("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
        text=("<|channel|>commentary<|message|>", "<|end|><|start|>assistant"),
        written='<|channel|>commentary to=functions.ping <|constrain|>json<|message|>{}',
        parallel=False,
    ),
    "deepseek": Family(
        "<｜tool▁call▁begin｜>{{ c.function.name }}<｜tool▁sep｜>" + OBJECT + "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁begin｜>",
        closed="<｜tool▁calls▁end｜>",
    ),
    "deepseek-v3": Family(
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ c.function.name }}\n```json\n" + OBJECT + "\n```<｜tool▁call▁end｜>",
        "<｜tool▁calls▁begin｜>",
        "\n",
        "<｜tool▁calls▁end｜>",
    ),
    "deepseek-v4": Family(
        '<｜DSML｜invoke name="{{ c.function.name }}">\n'
        + values('<｜DSML｜parameter name="', "\" string=\"{{ 'true' if v is string else 'false' }}\">", "</｜DSML｜parameter>\n")
        + "</｜DSML｜invoke>\n",
        "<｜DSML｜tool_calls>\n",
        closed="</｜DSML｜tool_calls>",
    ),
    "apertus": Family(
        '{"{{ c.function.name }}": ' + OBJECT + "}",
        "<|tools_prefix|>[",
        ", ",
        "]<|tools_suffix|>",
        thought=("<|inner_prefix|>", "<|inner_suffix|>"),
    ),
    "functionary": Family("<function={{ c.function.name }}>" + OBJECT + "</function>"),
    "minicpm": Family('<function name="{{ c.function.name }}">' + values('<param name="', '">', "</param>") + "</function>", joint="\n"),
    "hunyuan": Family(
        "<tool_call:opensource>{{ c.function.name }}<tool_sep:opensource>\n"
        + values("<arg_key:opensource>", "</arg_key:opensource>\n<arg_value:opensource>", "</arg_value:opensource>\n")
        + "</tool_call:opensource>\n",
        "<tool_calls:opensource>\n",
        closed="</tool_calls:opensource>",
        thought=("<think:opensource>", "</think:opensource>"),
    ),
    "solar": Family(
        "<|tool_call:begin|>{{ c.id }}<|tool_call:name|>{{ c.function.name }}<|tool_call:args|>" + OBJECT + "<|tool_call:end|>",
        "<|tool_calls|>",
        closed="<|calls|>",
        thought=("<|think|>", "<|end|><|begin|>assistant"),
        text=("<|content|>", "<|end|><|begin|>assistant"),
        written="<|tool_calls|><|tool_call:begin|>0<|tool_call:name|>ping<|tool_call:args|>{}<|tool_call:end|><|calls|>",
        parallel=False,
    ),
    "muse": Family(
        ' to={{ c.function.name }}<|message|><atem:function_calls>\n<atem:invoke name="{{ c.function.name }}">\n'
        + values('<atem:parameter name="', '">', "</atem:parameter>\n")
        + "</atem:invoke>\n</atem:function_calls>",
        joint="<|eom|><|start|>assistant",
        thought=(" to=self<|message|>", "<|eom|><|start|>assistant"),
        text=(" to=user<|message|>", "<|eom|><|start|>assistant"),
    ),
    "internlm": Family("<|action_start|><|plugin|>\n" + NAMED + "<|action_end|>", parallel=False),
    "gigachat": Family(
        "<|message_sep|>\n\nfunction call<|role_sep|>\n" + NAMED,
        thought=("<think>", "</think>"),
        parallel=False,
    ),
    "apriel": Family(
        NAMED,
        "<tool_calls>[",
        ", ",
        "]</tool_calls>",
        thought=("Here are my reasoning steps:\n", "\n[BEGIN FINAL RESPONSE]\n"),
        head="<|im_start|>system\nAnswer after [BEGIN FINAL RESPONSE].<|im_end|>\n",
    ),
    "kimi": Family(
        "<|tool_call_begin|>functions.{{ c.function.name }}:{{ loop.index0 }}<|tool_call_argument_begin|>" + OBJECT + "<|tool_call_end|>",
        "<|tool_calls_section_begin|>",
        closed="<|tool_calls_section_end|>",
        written="<|tool_calls_section_begin|><|tool_call_begin|>functions.ping:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
        "<|tool_calls_section_end|>",
        parallel=False,
    ),
    "cohere": Family(
        '    {"tool_call_id": "{{ loop.index0 }}", "tool_name": "{{ c.function.name }}", "parameters": ' + OBJECT + "}",
        "<|START_ACTION|>[\n",
        ",\n",
        "\n]<|END_ACTION|>",
        thought=("<|START_THINKING|>", "<|END_THINKING|>"),
        text=("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
        parallel=False,
    ),
    "gemma": Family(
        "<|tool_call>call:{{ c.function.name }}{{ '{' }}" + GEMMA + "}<tool_call|>",
        thought=("<|channel>thought\n", "<channel|>"),
        flat=True,
    ),
    "functiongemma": Family(
        "<start_function_call>call:{{ c.function.name }}{{ '{' }}" + GEMMA.replace('<|"|>', "<escape>") + "}<end_function_call>", flat=True
    ),
}  # fmt: skip
LOOK = {
    "type": "object",
    "properties": {
        "query": {"type": "string", "maxLength": 6},
        "n": {"type": "integer", "minimum": 0, "maximum": 9},
        "deep": {"type": "object"},
    },
    "required": ["query"],
}
TOOLS = [Tool("look", "", LOOK), Tool("ping")]
SHOWN = [{"name": tool.name, "parameters": tool.parameters} for tool in TOOLS]


@cache
def grammars(name: str) -> Grammars:
    family, made = FAMILIES[name], models.toy_tokenizer()
    (opened, closed), (before, after) = family.thought, family.text
    call = "{{ JOINT if not loop.first }}".replace("JOINT", repr(family.joint)) + family.call
    made.chat_template = family.head + (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if m.reasoning_content %}" + opened + "{{ m.reasoning_content }}" + closed + "{% endif %}"
        "{% if m.content and m.role == 'assistant' %}" + before + "{{ m.content }}" + after + "{% else %}{{ m.content }}{% endif %}"
        "{% if m.tool_calls %}" + family.opened + "{% for c in m.tool_calls %}" + call + "{% endfor %}" + family.closed + "{% endif %}"
        "<|im_end|>\n{% if loop.first and tools %}{{ tools | tojson }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    return grammars_of(made)


def rendered(made: Grammars, message: Message) -> str:
    """An assistant's turn, as its chat template shows it."""
    shown = Renderer(made.tokenizer).render([Message("user", "Tide?"), message], TOOLS, generation=False).text
    return str(shown.split("<|im_start|>assistant\n")[-1].split("<|im_end|>")[0])


def drawn_call(made: Grammars, schema: Any, seed: int) -> ToolCall:
    """A call of a tool with this schema, drawn blindly and read back."""
    written = drawn_blindly(made, Constraint("look"), seed, [Tool("look", "", schema)])
    (call,) = parsed(made.form, written, tools=[{"name": "look", "parameters": schema}]).message.tool_calls
    return call


def read(made: Grammars, text: str, cuts: list[int]) -> AnswerParser:
    parser = AnswerParser(template_for(made.form), tools=SHOWN, names=("look", "ping"))
    deltas = taken(parser, text, cuts)
    if not parser.invalid_calls:
        assert message_of(deltas) == parser.message
    return parser


@cache
def turns(name: str) -> list[tuple[Message, str]]:
    """Assistant's turns and what the chat template shows of each."""
    arguments = {"query": "tide {7} é", "n": 3} | ({} if FAMILIES[name].flat else {"deep": {"a": [1, None, "}"]}})
    calls = (ToolCall("look", arguments), ToolCall("ping", {}))
    said = (
        Message("assistant", "I look.", calls, reasoning="Tides? Maybe <b>."),
        Message("assistant", "", calls[:1]),
        Message("assistant", "At noon.", reasoning="Hm."),
        Message("assistant", "At noon."),
    )
    return [(message, rendered(grammars(name), message)) for message in said]


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=15, deadline=None)
@given(cuts=st.lists(st.integers(0, 400), max_size=60))
def test_what_the_template_shows_is_read_back(name: str, cuts: list[int]) -> None:
    for message, text in turns(name):
        for places in ([], cuts):
            parser = read(grammars(name), text, places)
            said = parser.message
            assert (said.content, said.reasoning) == (message.content, message.reasoning), text
            assert [(c.name, dict(c.arguments)) for c in said.tool_calls] == [(c.name, dict(c.arguments)) for c in message.tool_calls]
            assert parser.invalid_calls == ()


@pytest.mark.parametrize("name", FAMILIES)
def test_it_is_read_back_character_by_character(name: str) -> None:
    for _, text in turns(name):
        assert read(grammars(name), text, list(range(len(text)))).message == read(grammars(name), text, []).message


@pytest.mark.parametrize("name", FAMILIES)
def test_half_a_call_of_any_family_is_none(name: str) -> None:
    made = grammars(name)
    text = rendered(made, Message("assistant", "", (ToolCall("look", {"query": "tide", "n": 3}, "functions.look:0"),))).lstrip()
    whole = read(made, text, []).message
    for stop in range(len(text)):
        parser = parsed(made.form, text[:stop], "at max_tokens=9: raise it", tools=SHOWN, names=("look", "ping"))
        calls, content = parser.message.tool_calls, parser.message.content
        assert calls == whole.tool_calls or (not calls and content == text[:stop].strip()), text[:stop]


WRITTEN = sorted(set(FAMILIES) - {"muse"})


@pytest.mark.parametrize("name", WRITTEN)
def test_calls_are_written_as_the_template_shows_them(name: str) -> None:
    made, family = grammars(name), FAMILIES[name]
    assert made.form.known
    one = family.written or rendered(made, Message("assistant", "", (ToolCall("ping", {}, "functions.ping:0"),))).lstrip()
    for constraint in (Constraint("ping"), Constraint("any"), Constraint()):
        assert spelled(made, constraint, one, TOOLS) == "end", one
    assert spelled(made, Constraint("look"), one, TOOLS) not in ("end", "more")
    two = rendered(made, Message("assistant", "", (ToolCall("ping", {}, "a"), ToolCall("look", {"query": "tide"}, "b")))).lstrip()
    two = two.replace("'", '"')  # LFM2.5's template shows texts as Python does
    if family.parallel:
        assert spelled(made, Constraint("any"), two, TOOLS) == "end", two
        assert spelled(made, Constraint("any", parallel=False), two, TOOLS) not in ("end", "more")


@pytest.mark.parametrize("name", sorted(FAMILIES))
@pytest.mark.parametrize("seed", range(2))
def test_whatever_is_drawn_is_a_valid_call(name: str, seed: int) -> None:
    made = grammars(name)
    text = drawn_blindly(made, Constraint("look"), seed, TOOLS)
    if text:
        (call,) = parsed(made.form if made.form.known else None, text, tools=SHOWN).message.tool_calls
        assert call.name == "look"
        assert len(call.arguments["query"]) <= 6
        assert call.arguments.keys() <= LOOK["properties"].keys()


@pytest.mark.parametrize("name", ["gemma", "functiongemma", "lfm2.5"])
@pytest.mark.parametrize("required", [(), ("n",), ("kind", "where"), ("many", "kind", "n", "where")])
@pytest.mark.parametrize("seed", range(2))
def test_arguments_between_commas_fit_their_schemas(name: str, required: tuple[str, ...], seed: int) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    text = {"type": "string", "maxLength": 5}
    place = {"type": "object", "properties": {"at": text, "high": {"type": "boolean"}, "as": {"enum": ["a", "b"]}}, "required": ["high"]}
    properties = {
        "many": {"type": "array", "items": {"anyOf": [text, {"type": "null"}]}, "minItems": 1, "maxItems": 3},
        "kind": {"enum": ["in", "out"]},
        "where": {"type": "array", "items": {"$ref": "#/$defs/Place"}, "maxItems": 2},
        "n": {"type": ["integer", "null"], "minimum": -9, "maximum": 9},
    }
    schema = {"type": "object", "properties": properties, "required": list(required), "$defs": {"Place": place}}
    call = drawn_call(grammars(name), schema, seed)
    jsonschema.validate(call.arguments, {**schema, "additionalProperties": False})


@pytest.mark.parametrize("name", ["gemma", "glm", "nemotron"])
def test_counts_written_as_floats_are_whole(name: str) -> None:
    properties = {"many": {"type": "array", "items": {"type": "string", "maxLength": 2.0}, "minItems": 2.0, "maxItems": 2.0}}
    schema = {"type": "object", "properties": properties, "required": ["many"]}
    many = drawn_call(grammars(name), schema, 0).arguments["many"]
    assert (len(many), max(map(len, many)) <= 2) == (2, True)


@pytest.mark.parametrize("seed", range(3))
def test_a_schema_that_holds_itself_is_written(seed: int) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    part = {"type": "object", "properties": {"of": {"type": "array", "items": {"$ref": "#/$defs/Part"}, "maxItems": 1}}, "required": ["of"]}
    schema = {"type": "object", "properties": {"part": {"$ref": "#/$defs/Part"}}, "required": ["part"], "$defs": {"Part": part}}
    jsonschema.validate(drawn_call(grammars("gemma"), schema, seed).arguments, schema)


@cache
def python_without_marks() -> Grammars:
    made = models.toy_tokenizer()
    made.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}[{{ c.function.name }}("
        "{% for k, v in c.function.arguments | items %}{{ k }}={{ v | tojson }}{% endfor %})]{% endfor %}<|im_end|>\n"
        "{% if loop.first and tools %}{{ tools | tojson }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    return grammars_of(made)


def test_calls_in_python_without_marks_are_written() -> None:
    grammar = python_without_marks()
    assert spelled(grammar, Constraint("any"), '[look(query="tide", n=3), ping()]', TOOLS) == "end"
    assert spelled(grammar, Constraint(), '[look(n=3, query="tide")]', TOOLS) not in ("end", "more"), "its order is the schema's"
    assert spelled(grammar, Constraint(), "[See: look]", TOOLS) == "end"


@pytest.mark.parametrize(
    ("text", "calls", "invalid"),
    [
        ("[look(n=3)]", ["look"], []),
        ("[ look(n=3), see(n=4)]", ["look", "see"], []),
        ("[see(page=3)]", [], []),
        ("[see(page 3)] is what I read.", [], []),
        ("[looking(n=3)]", [], []),
        ("[look(n=", [], ["look"]),
    ],
)
def test_unmarked_lists_in_python_call_only_tools(text: str, calls: list[str], invalid: list[str]) -> None:
    parser = parsed(python_without_marks().form, text, names={"look"})
    assert [call.name for call in parser.message.tool_calls] == calls
    assert [call.name for call in parser.invalid_calls] == invalid
    assert parser.message.content == ("" if calls else text)


@pytest.mark.parametrize("name", ["lfm2.5", "gemma", "functiongemma", "glm", "minimax"])
def test_arguments_with_names_of_any_kind_are_read_back(name: str) -> None:
    made, keys = grammars(name), ("from", "file-path", "$filter", "@type", "a.b", "two words", "2d")
    digit = {"type": "integer", "minimum": 1, "maximum": 9}
    inner = {"type": "object", "properties": dict.fromkeys(keys, digit), "required": list(keys)}
    schema = {"type": "object", "properties": {**inner["properties"], "inner": inner}, "required": [*keys, "inner"]}
    call = drawn_call(made, schema, 1)
    assert (list(call.arguments), list(call.arguments["inner"])) == ([*keys, "inner"], list(keys))
    for odd in ("a<b", 'a"b', "a\nb", ""):
        odds = {"type": "object", "properties": {odd: digit}}
        with pytest.raises(ToolSchemaError, match="cannot be written in this model's calls: rename it"):
            made.guide(Constraint("look"), [Tool("look", "", odds)], "")


@pytest.mark.parametrize("name", ["nemotron", "lfm2.5", "gemma", "functiongemma", "glm", "seed"])
def test_arguments_that_are_a_reference_or_a_long_text(name: str) -> None:
    made = grammars(name)
    long = {"type": "object", "properties": {"q": {"type": "string"}}, "required": ["q"]}
    made.guide(Constraint("look"), [Tool("look", "", long)], "", max_tokens=90)
    whole = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 1, "maximum": 9}}, "required": ["n"]}
    schema = {"$ref": "#/$defs/Whole", "$defs": {"Whole": whole}}
    assert drawn_call(made, schema, 1).arguments["n"] in range(1, 10)


@pytest.mark.parametrize("way", ["anyOf", "oneOf", "allOf"])
def test_tags_refuse_arguments_that_only_branches_name(way: str) -> None:
    parts = [{"type": "object", "properties": {key: {"type": "string"}}, "required": [key]} for key in "ab"]
    with pytest.raises(ToolSchemaError, match=f"'look': this model's calls name their arguments, and '{way}' does not"):
        grammars("glm").guide(Constraint("look"), [Tool("look", "", {"type": "object", way: parts})], "")


def test_quoted_texts_hold_no_control_characters() -> None:
    opened = '<|tool_call>call:look{query:<|"|>a'
    assert spelled(grammars("gemma"), Constraint("look"), opened + "\n\t", TOOLS) == "more"
    assert spelled(grammars("gemma"), Constraint("look"), opened + "\x02", TOOLS) == opened, "transformers' reader takes none"


@pytest.mark.parametrize(
    ("shown", "token", "trigger"),
    [
        ("List of tools: []", "<|tool_list_start|>", "<|tool_call_start|>"),
        ("<|start_of_role|>tools<|end_of_role|>[]", "<|tool_call|>", "<|tool_call|>"),
        ('<tool_call>\n{"name": <name>, "arguments": <object>}\n</tool_call>', "<|im_start|>", "<tool_call>"),
        ("<tool_call>\n{'arguments': <dict>, 'name': <name>}\n</tool_call>", "<|im_start|>", "<tool_call>"),
        ("Tools: []", "<|im_start|>", None),
    ],
)
def test_templates_that_show_no_calls_have_their_family_s_form(shown: str, token: str, trigger: str | None) -> None:
    made = models.toy_tokenizer()
    made.add_special_tokens({"additional_special_tokens": [token]})
    made.chat_template = (
        "{% if tools %}" + shown + "{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    )
    form = grammars_of(made).form
    assert (form.known, form.trigger) == (trigger is not None, trigger or "<tool_call>")


LLAMA = '{"name": "zprobe_fn", "parameters": {"zarg": "zval"}}'
XLAM = '[{"name": "zprobe_fn", "arguments": {"zarg": "zval"}}]'


@pytest.mark.parametrize(
    ("shown", "text"),
    [
        (LLAMA, '{"name": "ping", "parameters": {}}'),
        (LLAMA, '<|python_tag|>{"name": "ping", "parameters": {}}'),
        (LLAMA, '<|python_start|>{"name": "ping", "parameters": {}}<|python_end|>'),
        (f"<|python_start|><|python_end|>{LLAMA}", '<|python_start|><|python_end|>{"name": "ping", "parameters": {}}'),
        (XLAM, '[{"name": "ping", "arguments": {}}]'),
        ("[zprobe_fn(zarg='zval')]", "[ping()]"),
    ],
)
def test_calls_that_are_the_whole_turn_are_read(shown: str, text: str) -> None:
    parser = parsed(form_of(f"assistant\n{shown}", shown), text, tools=SHOWN, names=("look", "ping"))
    assert [call.name for call in parser.message.tool_calls] == ["ping"]
    assert not parser.message.content


@pytest.mark.parametrize("name", ["gpt-oss", "cohere", "solar"])
def test_text_stands_between_the_marks_of_its_family(name: str) -> None:
    made = grammars(name)
    opened, closed = made.form.answer
    schema = Constraint(schema={"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
    assert spelled(made, Constraint(), f"{opened}At noon.{closed}", TOOLS) == "end"
    assert spelled(made, Constraint("none"), f"{opened}At noon.{closed}", TOOLS) == "end"
    assert spelled(made, Constraint(), "At noon.", TOOLS) == ""
    assert spelled(made, Constraint(), f"{opened}At noo", TOOLS) == "end", "a text that was cut is a text"
    assert spelled(made, schema, f'{opened}{{"a": 1}}{closed}', []) == "end"
    assert spelled(made, schema, '{"a": 1}', []) == ""
    thought = "".join((made.form.thought[0], "Hm.", made.form.thought[1]))
    assert spelled(made, schema, f'{thought}{opened}{{"a": 1}}{closed}', [], thinks=True) == "end"
    assert spelled(made, schema, f'{thought}{opened}{{"a": 1}}{closed}', []) != "end"
    assert json.loads(read(made, f'{thought}{opened}{{"a": 1}}{closed}', []).message.content) == {"a": 1}


def test_marks_that_are_special_tokens_are_written() -> None:
    made = models.toy_tokenizer()
    made.chat_template = grammars("gpt-oss").tokenizer.chat_template
    marks = ["<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|start|>", "<|call|>"]
    made.add_special_tokens({"additional_special_tokens": [*marks, "<|refusal|>"]})
    ids = dict(zip(marks, made.convert_tokens_to_ids(marks)))
    grammar = Grammars(made, len(made), frozenset({ids["<|call|>"]}), Renderer(made).render)
    guide = grammar.guide(Constraint("ping"), TOOLS, "")
    for token in (*made(FAMILIES["gpt-oss"].written, add_special_tokens=False)["input_ids"], ids["<|call|>"]):
        masked = guide.mask(torch.zeros(len(made)))
        assert masked is not None
        assert masked[token] == 0
        assert masked[made.convert_tokens_to_ids("<|refusal|>")] == -torch.inf
        guide.accept(token)


@pytest.mark.parametrize("name", ["gpt-oss", "glm", "gemma", "lfm2.5", "muse"])
def test_the_engine_reads_and_writes_its_templates_form(tiny: Any, name: str) -> None:
    message, text = turns(name)[0]
    with Engine(tiny("qwen3"), grammars(name).tokenizer, store=None) as engine:
        free = engine.generate([Message("user", "Tide?")], TOOLS, sampling=spoken(text, engine.tokenizer))
        answer = spoken(turns(name)[2][1], engine.tokenizer)
        text_only = engine.generate([Message("user", "Tide?")], TOOLS, sampling=answer, constraint=Constraint("none"))
        held = engine.generate([Message("user", "Tide?")], TOOLS, sampling=Sampling(max_tokens=200), constraint=Constraint("ping"))
    assert [(c.name, dict(c.arguments)) for c in free.message.tool_calls] == [(c.name, dict(c.arguments)) for c in message.tool_calls]
    assert (free.message.content, free.message.reasoning) == (message.content, message.reasoning)
    assert free.receipt.reasoning_tokens > 0
    assert (text_only.message.content, text_only.message.reasoning) == ("At noon.", "Hm."), "without calls, too, it is read by its form"
    assert free.finish_reason == "tool_calls"
    assert [(c.name, dict(c.arguments)) for c in held.message.tool_calls] == [("ping", {})]
    assert any("Hermes" in note for note in held.receipt.notes) == (name == "muse")


@pytest.mark.parametrize("name", FAMILIES)
def test_own_ids_return_and_volatile_text_is_last(name: str) -> None:
    made, (message, text) = grammars(name), turns(name)[1]
    tokenizer, renderer, asked = made.tokenizer, Renderer(made.tokenizer), [Message("user", "Tide?")]
    layout = renderer.render(asked, TOOLS)
    said = [*(token for character in text for token in tokenizer(character)["input_ids"]), tokenizer.eos_token_id]
    renderer.remember(layout, said, message)
    later = [*asked, message, Message("tool", "It ebbs.", name="look")]
    plain, timed = renderer.render(later, TOOLS), renderer.render(later, TOOLS, volatile="It is 10:33.")
    start = len(timed.ids) - timed.ephemeral_tokens
    for rendered_again in (plain, timed):
        assert list(rendered_again.ids[: len(layout.ids) + len(said)]) == [*layout.ids, *said]
    assert timed.ids[:start] == plain.ids[:start]
    assert timed.text.index("It is 10:33.") > timed.text.index("It ebbs.")


def test_pieces_of_a_damaged_mark_say_the_same() -> None:
    text = " to=self<|message|>Hm.<|eom|><|start|>assistanto=user<|message|>At noon."
    whole, pieces = (read(grammars("muse"), text, cuts).message for cuts in ([], list(range(len(text)))))
    assert whole == pieces
    assert whole.content == "At noon."
