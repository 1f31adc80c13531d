"""What no request can be: values that JSON has not, templates without end. Each is refused by a typed error that names the place."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from agentcache.errors import ConfigError, ContextOverflowError, MessageError, TemplateError, ToolSchemaError
from agentcache.layout import Renderer, rendering, template
from agentcache.layout.overlong import check_length
from agentcache.layout.tokenise import Encoder
from agentcache.types import Message, Tool, ToolCall
from tests.chat_templates import CHATML, tokenizer
from tests.layout.renderers import renderer_of


def deep(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


def endless() -> Any:
    value: dict[str, Any] = {}
    value["self"] = value
    return value


ODD = {
    "set": ({1, 2}, "of type set, which JSON has not"),
    "bytes": (b"x", "of type bytes"),
    "object": (object(), "of type object"),
    "cycle": (endless(), "or in itself"),
    "tuple as a key": ({(1, 2): 3}, r"has the key \(1, 2\), which is no string"),
    "5,000 digits": (10**5000, "<int.*> has more than 4000 digits"),
    "300 levels": (deep(300), "more than 128 levels"),
    "100,000 levels": (deep(100_000), "more than 128 levels"),
}


@pytest.mark.parametrize("how", ["canonical", "stock"])
@pytest.mark.parametrize(("odd", "words"), ODD.values(), ids=ODD)
def test_values_that_are_no_json(odd: Any, words: str, how: Any) -> None:
    renderer, fine = renderer_of(), Tool("fine")
    bad = Tool("search", "", {"type": "object", "properties": {"x": {"default": odd}}})
    with pytest.raises(ToolSchemaError, match=words) as found:
        renderer.render([Message("user", "Go")], [fine, bad], rendering=how)
    assert str(found.value).startswith("tools[1] 'search': tool.function.parameters.properties.x.default")
    said = [Message("user", "Go"), Message("assistant", "", (ToolCall("fine", {}), ToolCall("search", {"x": [odd]})))]
    with pytest.raises(MessageError, match=words) as found_too:
        renderer.render(said, [fine], rendering=how)
    assert str(found_too.value).startswith("messages[1].tool_calls[1] 'search': arguments.x[0]")
    for error in (found, found_too):
        assert len(str(error.value)) < 600
    assert renderer.render([Message("user", "Go")], [fine], rendering=how).ids  # nothing is left behind


@pytest.mark.parametrize("role", ["system", "user", "tool"])
def test_a_message_without_content_is_refused(role: str) -> None:
    renderer = renderer_of()
    renderer.render([{"role": "user", "content": None}], [])  # what is known of it says nothing of the other
    with pytest.raises(MessageError, match=r"messages\[0\] has the keys \['role', 'text'\]: give a Message or a dict with"):
        renderer.render([{"role": role, "text": "Go"}], [])
    assert renderer_of().render([{"role": "user", "content": ""}, {"role": "assistant"}, {"role": "user", "content": "Go"}], []).ids


@pytest.mark.parametrize("odd", [value for value, _ in ODD.values()], ids=ODD)
def test_odd_values_in_any_place_are_refused_by_type(odd: Any) -> None:
    renderer = renderer_of()
    user, call = Message("user", "Go"), {"id": "a", "function": {"name": "f", "arguments": {}}}
    for messages in (
        [{"role": odd, "content": "x"}],
        [{"role": "user", "content": odd}],
        [Message("user", odd)],
        [user, Message("assistant", "", (ToolCall("f", odd, "a"),))],
        [user, {"role": "assistant", "tool_calls": odd}],
        [user, {"role": "assistant", "tool_calls": [odd]}],
        [user, {"role": "assistant", "tool_calls": [{**call, "id": odd}]}],
        [user, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "x", "tool_call_id": odd}],
        [odd],
    ):
        for how in ("canonical", "stock"):
            with pytest.raises(MessageError, match=r"messages\["):
                renderer.render(messages, rendering=how)  # type: ignore[arg-type]
        with pytest.raises(MessageError, match=r"messages\["):
            renderer.opening(messages)  # type: ignore[arg-type]
    for tools in ([odd], [{"type": "function", "function": odd}], [Tool("f", odd)], [Tool("f", "", odd)]):
        with pytest.raises(ToolSchemaError, match=r"tools\[0\]"):
            renderer.render([user], tools)


def test_keys_that_json_writes_as_strings_are_strings() -> None:
    named = {"type": "object", "properties": {"x": {"default": {1: "a", "b": 2, None: 3}}}}
    plain = {"type": "object", "properties": {"x": {"default": {"1": "a", "b": 2, "null": 3}}}}
    one, two = (renderer_of().render([Message("user", "Go")], [Tool("f", "", schema)]) for schema in (named, plain))
    assert one.ids == two.ids


def test_keys_of_several_types_have_an_order() -> None:
    call = {"id": "a", "function": {"name": "f", "arguments": {1: "a", "b": 2}}}
    layout = renderer_of().render([{"role": "user", "content": "Go"}, {"role": "assistant", "tool_calls": [call]}], rendering="stock")
    assert '{"1": "a", "b": 2}' in layout.text


@pytest.mark.parametrize("odd", [[], None, 5, b"x", {"a"}])
def test_namespaces_are_strings(odd: Any) -> None:
    with pytest.raises(ConfigError, match="namespace="):
        renderer_of().render([Message("user", "Go")], namespace=odd)
    with pytest.raises(ConfigError, match="namespace="):
        renderer_of().render("Go", namespace=odd)


@pytest.mark.parametrize(
    "odd", [5, {1: 2, "a": 3}, {"a": endless()}, {"a": 10**5000}, {"tokenize": True}, {"add_generation_prompt": False}]
)
def test_arguments_of_the_template(odd: Any) -> None:
    with pytest.raises(ConfigError, match="template_kwargs="):
        renderer_of().render([Message("user", "Go")], template_kwargs=odd)


# --- templates -----------------------------------------------------------------------------------------------------------

LOOPS = "{% for a in range(90000) %}{% for b in range(90000) %}{% set c = a * b %}{% endfor %}{% endfor %}"


def test_a_template_that_renders_nothing() -> None:
    with pytest.raises(TemplateError, match="made '' of 1 messages"):
        renderer_of("{% if false %}x{% endif %}").render([Message("user", "Go")])


def test_a_template_that_multiplies_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template, "MOST_CHARS", 10_000)
    with pytest.raises(TemplateError, match="made 20000 characters of 1 messages"):
        renderer_of("{{ messages[0].content * 10000 }}").render([Message("user", "Go")])
    with pytest.raises(TemplateError, match="MemoryError|OverflowError"):
        renderer_of("{{ messages[0].content * 10 ** 18 }}").render([Message("user", "Go")])


def test_a_template_without_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendering, "LIMIT_S", 0.2)
    probed = f"{{% if messages[0].content == {template.SYSTEM!r} %}}{LOOPS}{{% endif %}}{{{{ messages[0].content }}}}"
    of_all = Renderer(tokenizer("byte_bpe"), chat_template=LOOPS + "{{ messages[0].content }}")
    for made in (renderer_of(LOOPS), of_all, renderer_of(probed)):
        with pytest.raises(TemplateError, match=r"not done after 0\.2 s"):
            made.render([Message("user", "Go")])
    for left in [thread for thread in threading.enumerate() if thread.name == "agentcache-template"]:
        left.join(30)
        assert not left.is_alive()


def test_a_shape_is_probed_on_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []
    monkeypatch.setattr(rendering.Rendering, "start", lambda self: (started.append(self.name), threading.Thread.start(self)))
    assert template.Template(tokenizer("byte_bpe"), CHATML).shape(True).closers
    assert started == ["agentcache-template"]


def test_each_probe_is_rendered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """With tools, and without them those of 8 and 7 messages: each start of them, with the generation prompt only the whole."""
    asked, attempt = list[tuple[Any, ...]](), template.Template.attempt
    monkeypatch.setattr(template.Template, "attempt", lambda self, *given: (asked.append(given), attempt(self, *given))[1])
    template.Template(tokenizer("byte_bpe"), CHATML).shape(True)
    assert len(set(map(repr, asked))) == len(asked)
    assert sum(not listed for _, listed, _ in asked) == (8 + 1) + (7 + 1) - 1, "both begin with the same message"


@pytest.mark.parametrize("how", ["canonical", "stock", "text"])
def test_a_prompt_far_too_long_is_not_tokenised_whole(how: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    renderer, said, read = renderer_of(), "The harbour master reads the tables. " * 3000, list[int]()
    whole = len(renderer.render(said).ids)
    encode = Encoder._encode
    monkeypatch.setattr(Encoder, "_encode", lambda self, text: (read.append(len(text)), encode(self, text))[1])
    asked = {"messages": said} if how == "text" else {"messages": [Message("user", said)], "rendering": how}
    with pytest.raises(ContextOverflowError) as refused:
        renderer_of().render(**asked, most_tokens=100)
    assert max(read) <= 6400
    assert abs(refused.value.prompt_tokens - whole) < 0.1 * whole
    renderer_of().render(**asked, most_tokens=whole + 50)  # it would fit


@pytest.mark.parametrize("kind", ["byte_bpe", "unigram", "wordpiece"])
@pytest.mark.parametrize("text", ["a" * 9000, "word " * 9000, "\n" * 9000, "e\u0301" * 9000], ids=["letters", "words", "lines", "marks"])
def test_a_text_that_fits_is_never_refused(kind: str, text: str) -> None:
    encoder = Encoder(tokenizer(kind))
    most = len(encoder.encode(text)[0])
    for chars in (37, 1000, 8000):
        check_length(text, chars, most, encoder)
