"""What is cut is never a result: half a call or a malformed one is named as such, and half an object is told."""

from __future__ import annotations

from typing import Any

import pytest

from agentcache import Completion, Constraint, Engine, InvalidCall, Message, Sampling, Tool
from tests.answer.grammars import FAMILIES
from tests.answer.response_templates import CHANNEL, CHANNELS, TAGGED, TAGS, tokenizer
from tests.engines import chat, engine

PAY = {"type": "object", "properties": {"to": {"type": "string"}, "amount": {"type": "integer"}}, "required": ["to", "amount"]}
TOOLS = [Tool("pay", "", PAY)]
CALL = '{"name": "pay", "arguments": {"to": "Bob", "amount": 1250}}'
HERMES = f"<tool_call>\n{CALL}\n</tool_call>"


def said(running: Engine, text: str, max_tokens: int = 0, tools: Any = TOOLS, **fields: Any) -> Completion:
    """What the engine makes of this text; max_tokens: all of it and the end by default."""
    ids = running.tokenizer(text, add_special_tokens=False)["input_ids"]
    forced = (*ids, running.tokenizer.eos_token_id)
    return running.generate(chat("Pay Bob."), tools, sampling=Sampling(max_tokens or len(forced), forced=forced, **fields))


def until(running: Engine, text: str) -> int:
    return len(running.tokenizer(text, add_special_tokens=False)["input_ids"])


@pytest.mark.parametrize(
    ("family", "before"),
    [
        ("hermes", '<tool_call>\n{"name": "pay", "arguments": '),
        ("mistral", '[TOOL_CALLS] [{"name": "pay", "arguments": '),
        ("llama", '{"name": "pay", "parameters": '),
    ],
)
def test_a_call_that_was_cut_is_no_call_and_named(family: str, before: str) -> None:
    with engine(chat_template=FAMILIES[family]) as running:
        text = before + '{"to": "Bob", "amount": 12'
        done = said(running, text, until(running, text))
        assert done.finish_reason == "length"
        assert done.message.tool_calls == ()
        assert done.message.content == text, "nothing is lost"
        (call,) = done.invalid_calls
        assert (call.name, call.arguments) == ("pay", '{"to": "Bob", "amount": 12')
        assert f"max_tokens={until(running, text)}" in call.error
        assert call.id
        assert done.cut


def test_deltas_name_the_call_by_the_same_id() -> None:
    text = f'{HERMES}\n<tool_call>\n{{"name": "pay", "arguments": [1]}}\n</tool_call>\n{HERMES}\n{HERMES[:-30]}'
    with engine() as running:
        ids = running.tokenizer(text, add_special_tokens=False)["input_ids"]
        stream = running.stream(chat("Pay."), TOOLS, sampling=Sampling(len(ids), forced=ids))
        told = [delta for delta in stream.deltas() if delta.kind in ("call", "cut")]
        done = stream.completion
    assert [call.id for call in (*done.message.tool_calls, done.invalid_calls[-1])] == [d.id for d in told if d.kind == "call"]
    assert told[-1].kind == "cut"
    assert len(done.message.tool_calls) == 2
    odd, half = done.invalid_calls
    assert (odd.name, odd.arguments.strip(), odd.id) == ("pay", "[1]}", None)
    assert "malformed" in odd.error
    assert "max_tokens" in half.error


@pytest.mark.parametrize(
    ("text", "name", "arguments"),
    [
        ('<tool_call>\n{"name": "pay", "arguments": {"to": Bob}}\n</tool_call>', "pay", '{"to": Bob}}\n'),
        ("<tool_call>\n{broken\n</tool_call>", "", ""),
        ('I pay. <tool_call>{"name": "pay", "arguments": [1]}</tool_call>', "pay", "[1]}"),
        ('[TOOL_CALLS][{"name": "pay", "arguments": {"to": }}]', "pay", '{"to": }}]'),
    ],
)
def test_malformed_calls_are_named(text: str, name: str, arguments: str) -> None:
    with engine() as running:
        done = said(running, text)
    assert done.message == Message("assistant", text.strip())
    (call,) = done.invalid_calls
    assert (call.name, call.arguments) == (name, arguments)
    assert "malformed" in call.error
    assert "max_tokens" not in call.error
    assert not done.cut, "it is what the model meant to write"


@pytest.mark.parametrize("text", ["A <tool_call> tag begins a call.", '{"name": "Ada"', "[TOOL_CALLS] is a mark", "Hello."])
def test_text_about_calls_is_text(text: str) -> None:
    with engine() as running:
        for size in (0, until(running, text)):
            done = said(running, text, size)
            assert done.invalid_calls == ()
            assert not done.cut


def test_calls_read_by_a_response_template_too(tiny: Any) -> None:
    for template, text, call in (
        (TAGS, TAGGED[: TAGGED.index("\n</parameter>")], InvalidCall("tide", "\n<parameter=harbour>\n7", "")),
        (CHANNELS, CHANNEL[:-1], InvalidCall("tide", '{"harbour": "Averil"', "")),
    ):
        with Engine(tiny("qwen3"), tokenizer(template), store=None) as running:
            done = said(running, text, until(running, text), [Tool("tide")])
        assert done.message.tool_calls == ()
        assert done.cut
        (found,) = done.invalid_calls
        assert (found.name, found.arguments) == (call.name, call.arguments)
        assert (found.id is None) == (template is TAGS), "arguments in JSON were told while they came"
        assert "max_tokens" in found.error


def test_a_stop_string_cuts_as_well() -> None:
    with engine() as running:
        done = said(running, HERMES, stop=("1250",))
        assert done.message.tool_calls == ()
        assert "stop string" in done.invalid_calls[0].error
        assert done.cut


def test_a_call_cut_by_a_stop_string_is_none(tiny: Any) -> None:
    with Engine(tiny("qwen3"), tokenizer(TAGS), store=None) as running:
        done = said(running, TAGGED, tools=[Tool("tide")], stop=("<parameter=days>",))
    assert done.message.tool_calls == (), "it lacks an argument that the model was about to write"
    assert "stop string" in done.invalid_calls[0].error
    assert done.cut


def test_a_thought_without_an_answer_is_cut(tiny: Any) -> None:
    with engine() as running:
        thought = "<think>\nWhat could it"
        assert said(running, thought, until(running, thought)).cut
        assert not said(running, "<think>a</think>yes").cut
        assert not said(running, "Once upon", until(running, "Once upon")).cut, "a text that was cut is a text"


def test_an_object_that_was_cut_is_told() -> None:
    pytest.importorskip("llguidance")
    with engine() as running:
        stopped = running.generate(chat("x"), sampling=Sampling(60), constraint=Constraint(regex="abc-def(-ghi)?"))
        assert not stopped.cut
        assert stopped.finish_reason == "stop"
        for stop in ("-", "def"):
            assert running.generate(chat("x"), sampling=Sampling(60, stop=(stop,)), constraint=Constraint(regex="abc-def(-ghi)?")).cut


def test_words_before_a_cut_are_the_models_own() -> None:
    """Where nothing prescribes an answer, each shorter one is its beginning, a call that has no room included."""
    tools = [Tool("get_invoice", "Get an invoice.", {"type": "object", "properties": {"invoice_id": {"type": "string"}}})]
    asked = [Message("system", "You are a helpful assistant."), Message("user", "Get the invoice A-1204.")]
    with Engine("embedded", store=None, strict=True) as engine:
        call = engine.generate(asked, tools)
        told = [*asked, call.message, Message("tool", '{"status": "open", "amount": 240, "owner": "Ada Blikun"}')]
        for prompt, whole in ((asked, call), (told, engine.generate(told, tools))):
            for most in range(1, len(whole.ids)):
                cut = engine.generate(prompt, tools, sampling=Sampling(max_tokens=most))
                assert (cut.ids, cut.shortened) == (whole.ids[:most], False)
