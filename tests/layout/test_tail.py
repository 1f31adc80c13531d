"""Declared volatile text: taken out of the system prompt, shown at the tail, never silently and never above its role."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentcache import LayoutOptions, Message, Move, ToolCall, volatile
from agentcache.errors import ConfigError, MessageError, TemplateError
from agentcache.layout import Renderer
from agentcache.layout.declared import read_rules, split
from tests.chat_templates import CHATML, TOOL_TEMPLATES, episode, tokenizer, tool
from tests.engines import decode, engine

TOOLS = [tool("search", "Finds flights."), tool("book", "Books one.")]
SYSTEM = "You are a clerk.\n{}\nBe brief."


def fresh(template: str = CHATML, **options: Any) -> Renderer:
    return Renderer(tokenizer(), chat_template=template, tail=LayoutOptions(**options))


def asked(clock: str, steps: int = 1) -> list[Any]:
    return [{"role": "system", "content": SYSTEM.format(volatile(clock))}, *episode(steps, False)[: 1 + 2 * steps]]


# --- what is declared ----------------------------------------------------------------------------------------------------


def test_text_without_declarations_is_not_touched() -> None:
    messages = [{"role": "system", "content": "It is 10:33. Call 7f3c."}, Message("user", volatile("x"))]
    declared = split(messages)
    assert declared.stable == declared.whole == messages
    assert declared.stable[0] is messages[0]
    assert declared.pieces == ()


def test_markers_are_taken_out_and_never_shown() -> None:
    text = f"One. {volatile('10:33')} Two.\n{volatile('day 5')}\nThree.\n\n{volatile(7)}"
    declared = split([Message("system", text), Message("user", "hi")])
    assert declared.stable[0]["content"] == "One. Two.\nThree."
    assert declared.whole[0]["content"] == "One. 10:33 Two.\nday 5\nThree.\n\n7"
    assert [piece.text for piece in declared.pieces] == ["10:33", "day 5", "7"]
    assert {(piece.by, piece.role, piece.message) for piece in declared.pieces} == {("marker", "system", 0)}
    for piece in declared.pieces:
        assert declared.whole[0]["content"][piece.start : piece.stop] == piece.text


def test_half_a_marker_is_removed_and_declares_nothing() -> None:
    declared = split([Message("system", "A <agentcache:volatile>clock without end"), Message("user", "hi")])
    assert declared.stable[0]["content"] == "A clock without end"
    assert declared.pieces == ()


def test_parts_behind_the_last_cache_control_are_volatile() -> None:
    parts = [
        {"type": "text", "text": "Policy. ", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "More policy. ", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "It is "},
        {"type": "text", "text": "10:33."},
    ]
    declared = split([{"role": "system", "content": parts}, {"role": "user", "content": "hi"}])
    assert declared.stable[0]["content"] == "Policy. More policy."
    assert [(piece.text, piece.by) for piece in declared.pieces] == [("It is 10:33.", "cache_control")]


def test_a_requests_volatile_text_leaves_the_system_prompt() -> None:
    brought = [Message("user", "It is 10:33."), Message("user", "Rain.")]
    messages = [Message("system", "Clerk. It is 10:33. Brief."), Message("user", "hi")]
    declared = split(messages, brought)
    assert declared.stable[0]["content"] == "Clerk. Brief."
    assert [(piece.text, piece.role, piece.message) for piece in declared.pieces] == [
        ("It is 10:33.", "system", 0),
        ("Rain.", "user", None),
    ]


def test_history_is_never_looked_at() -> None:
    later = [Message("user", volatile("a")), Message("assistant", volatile("b")), Message("system", volatile("c")), Message("tool", "d")]
    declared = split([Message("system", "S"), *later], [Message("user", "d")])
    assert declared.stable[1:] == later
    assert [piece.text for piece in declared.pieces] == ["d"]


def test_rules_of_a_reviewed_file(tmp_path: Path) -> None:
    path = tmp_path / "layout.toml"
    path.write_text('[[volatile]]\npattern = "^Now: .*$"\nclass = "clock"\n\n[[volatile]]\npattern = "run [0-9a-f]{4}"\n', "utf-8")
    declared = split([Message("system", "Clerk.\nNow: 10:33\nThis is run 7f3c.")], rules=read_rules(path))
    assert declared.stable[0]["content"] == "Clerk.\nThis is ."
    assert [(piece.text, piece.by) for piece in declared.pieces] == [("Now: 10:33", "rule"), ("run 7f3c", "rule")]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[[volatile]\n", "cannot be read"),
        ("[[stable]]\n", "expected only tables"),
        ("volatile = 3\n", "expected only tables"),
        ("[[volatile]]\nclass = 'clock'\n", "give pattern"),
        ("[[volatile]]\npattern = '('\n", "no regular expression"),
        ("[[volatile]]\npattern = 'x*'\n", "matches nothing"),
        ("[[volatile]]\npattern = 'x'\nwhere = 'tools'\n", "only text of the system prompt"),
        ("[[volatile]]\npattern = 'x'\nrole = 'user'\n", "got {'pattern': 'x', 'role': 'user'}"),
    ],
)
def test_a_wrong_file_is_refused_by_what_is_wrong(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "layout.toml"
    path.write_text(text, "utf-8")
    with pytest.raises(ConfigError, match="layout.toml") as told:
        read_rules(path)
    assert said in str(told.value)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_rules(tmp_path / "missing.toml")


WORDS = st.text(st.sampled_from("ab \n"), max_size=6)


@given(st.lists(st.tuples(WORDS, WORDS), max_size=4), WORDS)
@settings(max_examples=200, deadline=None)
def test_stable_and_volatile_text_make_up_the_whole(parts: list[tuple[str, str]], end: str) -> None:
    text = "".join(before + volatile(inside) for before, inside in parts) + end
    declared = split([Message("system", text)])
    whole = declared.whole[0]["content"] if isinstance(declared.whole[0], dict) else declared.whole[0].content
    assert whole == "".join(before + inside for before, inside in parts) + end
    stable = declared.stable[0]["content"] if isinstance(declared.stable[0], dict) else declared.stable[0].content
    assert sorted("".join([stable, *(piece.text for piece in declared.pieces)]).replace("\n", "").replace(" ", "")) == sorted(
        whole.replace("\n", "").replace(" ", "")
    )


# --- where it goes -------------------------------------------------------------------------------------------------------


def test_a_clock_in_the_system_prompt_costs_the_tail_only() -> None:
    renderer = fresh()
    one, two = (renderer.render(asked(clock), TOOLS) for clock in ("It is 10:33.", "It is 10:34."))
    shared = next(n for n, (a, b) in enumerate(zip(one.ids, two.ids)) if a != b)
    assert shared >= len(one.ids) - one.ephemeral_tokens > one.prefix_tokens
    assert "It is 10:33." in one.text[-120:]
    assert one.text.index("Be brief.") < one.text.index("It is 10:33.")
    assert one.moves == (Move(0, 17, 29, "marker", "tail", "system"),)
    assert any("volatile" in note for note in one.differences)
    (span,) = [span for span in one.spans if span.kind == "volatile"]
    assert "It is 10:33." in tokenizer().decode(one.ids[span.start : span.stop])
    assert [span.start for span in one.spans] == [0, *(span.stop for span in one.spans[:-1])]
    off = fresh(mode="off").render(asked("It is 10:33."), TOOLS)
    assert "It is 10:33." in off.text[: off.text.index("Be brief.")]
    assert off.moves == ()


def test_the_next_step_goes_on_where_the_ephemeral_text_began() -> None:
    renderer = fresh()
    one, two = (renderer.render(asked("It is 10:33.", steps), TOOLS) for steps in (1, 2))
    kept = len(one.ids) - one.ephemeral_tokens
    assert two.ids[:kept] == one.ids[:kept]
    assert two.ids[: kept + 1] != one.ids[: kept + 1]


def test_generated_ids_return_although_earlier_text_is_gone() -> None:
    renderer, tok = fresh(), tokenizer()
    messages = asked("It is 10:33.")
    one = renderer.render(messages, TOOLS)
    written = tok("fly ", add_special_tokens=False)["input_ids"] + tok("high", add_special_tokens=False)["input_ids"]
    answer = Message("assistant", tok.decode(written))
    renderer.remember(one, written, answer)
    two = renderer.render([*messages[:-1], messages[-1], answer, Message("user", "Why?")], TOOLS, volatile="It is 10:34.")
    assert two.spliced_tokens == len(written)


def test_kept_text_stays_after_its_user_message() -> None:
    renderer = fresh(keep=True)
    one, two = (renderer.render(asked("It is 10:33.", steps), TOOLS) for steps in (1, 2))
    assert one.moves[0].to == "turn"
    assert one.ephemeral_tokens == two.ephemeral_tokens == 0
    start = renderer.report.step_preserving and len(one.ids) - 8
    assert two.ids[:start] == one.ids[:start]


def test_text_ahead_opens_the_last_user_message() -> None:
    renderer, messages = fresh(ahead=True), [*asked("Rain."), Message("assistant", "Done."), Message("user", "It is 10:34, is it?")]
    layout, plain = renderer.render(messages, TOOLS, volatile="It is 10:33."), renderer.render(messages, TOOLS)
    assert "It is 10:33.\n\nIt is 10:34, is it?" in layout.text
    at = plain.text.index("It is 10:34")
    assert layout.text[:at] == plain.text[:at]
    (span,) = [span for span in layout.spans if span.kind == "volatile"]
    assert "It is 10:34, is it?" in tokenizer().decode(layout.ids[span.start :])
    assert layout.ephemeral_tokens >= len(layout.ids) - span.start, "no later prompt shares the message that follows the text"
    longer = renderer.render([*messages, Message("assistant", "No."), Message("user", "Why?")], TOOLS)
    kept = len(layout.ids) - layout.ephemeral_tokens
    assert longer.ids[:kept] == layout.ids[:kept]
    results = messages[:4]
    assert fresh(ahead=True).render(results, TOOLS, volatile="Sun.").ids == fresh().render(results, TOOLS, volatile="Sun.").ids


def test_a_tokenizer_says_that_its_model_reads_such_text_ahead() -> None:
    tok = tokenizer("metaspace_bpe")
    tok.init_kwargs["volatile_ahead"] = True
    hinted, refused = (Renderer(tok, chat_template=CHATML, tail=LayoutOptions(ahead=ahead)) for ahead in (None, False))
    assert "Rain.\n\nhi" in hinted.render([Message("user", "hi")], volatile="Rain.").text
    assert "hi\n\nRain." in refused.render([Message("user", "hi")], volatile="Rain.").text


# Writes what is named "aside" before the turn that it follows: one loop for turns, a message or a run of results each.
ASIDES = """{%- set ns = namespace(start=0, at=0) %}
{%- for m in messages %}
{%- if m.name == 'aside' %}{%- set ns.at = ns.start %}
{%- elif m.role != 'tool' or messages[loop.index0 - 1].role != 'tool' %}{%- set ns.start = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for m in messages if m.name != 'aside' %}
{%- if loop.index0 == ns.at %}{%- for n in messages if n.name == 'aside' %}{{- '(' + n.content + ')\n' }}{%- endfor %}{%- endif %}
{{- m.role + ': ' + (m.content or '-') + '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- 'assistant: ' }}{%- endif %}"""


@pytest.mark.parametrize("role", ["user", "system"])
@pytest.mark.parametrize("steps", [0, 1, 2])
def test_named_text_stands_before_the_turn_that_is_answered(role: Any, steps: int) -> None:
    tok = tokenizer("metaspace_bpe")
    tok.init_kwargs["volatile_ahead"] = "aside"
    renderer, messages = Renderer(tok, chat_template=ASIDES), asked("", steps)
    layout, plain = renderer.render(messages, volatile=Message(role, "Rain.")), renderer.render(messages)
    turn = plain.text.rindex("user: " if not steps else "tool: ")
    assert layout.text == f"{plain.text[:turn]}(Rain.)\n{plain.text[turn:]}"
    assert [(move.to, move.role) for move in layout.moves] == [("tail", role)]
    kept = len(layout.ids) - layout.ephemeral_tokens
    assert layout.ids[:kept] == plain.ids[:kept]
    assert plain.encoded.tokens_before(turn) <= kept
    results = [Message("user", "Go."), Message("assistant", tool_calls=(ToolCall("search", {}, "a"), ToolCall("search", {}, "b")))]
    two = [*results, Message("tool", "one", tool_call_id="a"), Message("tool", "two", tool_call_id="b")]
    assert "(Rain.)\ntool: one\ntool: two\n" in renderer.render(two, volatile=Message(role, "Rain.")).text, "results are one turn"


def test_an_unknown_name_shows_the_text_at_the_tail() -> None:
    messages = asked("", 1)
    layout, plain = (fresh(ahead=ahead).render(messages, TOOLS, volatile="Rain.") for ahead in ("aside", None))
    assert layout.text == plain.text


@pytest.mark.parametrize("name", TOOL_TEMPLATES)
@pytest.mark.parametrize("demote", [False, True])
@pytest.mark.parametrize(("keep", "ahead"), [(False, False), (True, False), (False, True), (True, True), (False, "aside"), (True, "aside")])
def test_no_template_loses_text_or_lifts_its_role(name: str, demote: bool, keep: bool, ahead: bool | str) -> None:
    renderer = fresh(TOOL_TEMPLATES[name], allow_demote=demote, keep=keep, ahead=ahead)
    for steps in (0, 1, 2):
        messages = asked("It is 10:33.", steps)
        layout = renderer.render(messages, TOOLS, volatile="Rain.")
        moves = {move.by: move for move in layout.moves}
        assert moves["volatile"].role == "user"
        if moves["marker"].to == "stays":
            assert moves["marker"].why
            assert "It is 10:33." in layout.text or name in ("drops_system", "last_user"), "these templates drop it themselves"
        else:
            assert layout.text.count("It is 10:33.") == 1
            assert moves["marker"].role == "system" or demote
            stable = renderer.render([{**messages[0], "content": "You are a clerk.\nBe brief."}, *messages[1:]], TOOLS)
            if not keep:
                at = len(layout.ids) - layout.ephemeral_tokens
                assert layout.ids[:at] == stable.ids[:at]
        assert layout.text.count("Rain.") == 1


def test_system_text_is_lowered_only_if_that_is_allowed() -> None:
    early = "{%- elif m.role in ['system', 'user'] %}"
    refuses = CHATML.replace(early, "{%- elif m.role == 'system' %}{{ raise_exception('late') }}{%- elif m.role == 'user' %}")
    layout = fresh(refuses).render(asked("It is 10:33."), TOOLS)
    assert [(move.to, move.role) for move in layout.moves] == [("stays", "system")]
    assert "allow_demote=True" in layout.moves[0].why
    assert layout.text.index("It is 10:33.") < layout.text.index("Be brief.")
    lowered = fresh(refuses, allow_demote=True).render(asked("It is 10:33."), TOOLS)
    assert [(move.to, move.role) for move in lowered.moves] == [("tail", "user")]
    assert lowered.text.index("It is 10:33.") > lowered.text.index("Be brief.")


def test_warn_moves_nothing_and_says_so() -> None:
    layout = fresh(mode="warn").render(asked("It is 10:33."), TOOLS, volatile="Rain.")
    assert [(move.by, move.to) for move in layout.moves] == [("marker", "stays"), ("volatile", "tail")]
    assert layout.text.index("It is 10:33.") < layout.text.index("Be brief.")


def test_a_warm_prefix_is_the_one_that_requests_have() -> None:
    renderer = fresh()
    prefix = renderer.prefix(asked("It is 10:33.")[:1], TOOLS)
    layout = renderer.render(asked("It is 10:34."), TOOLS)
    assert layout.ids[: len(prefix.ids)] == prefix.ids
    assert layout.prefix_tokens == len(prefix.ids)


def test_text_that_no_tail_can_show_is_an_error() -> None:
    deaf = "{{ messages[0].content[:2] }}{% if add_generation_prompt %}>{% endif %}"
    with pytest.raises(TemplateError, match="Rain"):
        fresh(deaf).render([Message("user", "hi"), Message("assistant", "ho")], volatile="Rain.")


def test_bad_volatile_is_refused() -> None:
    messages = [Message("user", "hi")]
    for given_text, said in (
        (3, "give a text"),
        ([Message("tool", "x", tool_call_id="c")], "speaks for"),
        ([{"role": "user"}, 3], "give a Message"),
    ):
        with pytest.raises(MessageError, match=said):
            fresh().render(messages, volatile=given_text)
    with pytest.raises(MessageError, match="stock"):
        fresh().render(messages, rendering="stock", volatile="x")
    with pytest.raises(MessageError, match="string prompt"):
        fresh().render("raw", volatile="x")
    with pytest.raises(ConfigError, match="'maybe'"):
        LayoutOptions("maybe")  # type: ignore[arg-type]


# --- in the engine -------------------------------------------------------------------------------------------------------


def test_a_new_clock_computes_the_tail_and_nothing_else() -> None:
    with engine() as running:
        first = running.generate(asked("It is 10:33."), TOOLS, sampling=decode(6))
        assert first.receipt.ephemeral_tokens > 0
        assert first.receipt.repeated_tokens == 6
        assert first.receipt.as_dict()["moves"] == [
            {"message": 0, "start": 17, "stop": 29, "by": "marker", "to": "tail", "role": "system", "why": ""}
        ]
        second = running.generate(asked("It is 11:47."), TOOLS, sampling=decode(6))
        assert second.receipt.computed_tokens <= second.receipt.ephemeral_tokens
        off = running.generate(asked("It is 11:47."), TOOLS, sampling=decode(6), reuse="off")
        assert second.ids == off.ids
        group = running.warm("You are a clerk.\nBe brief.", TOOLS, name="clerk")
        assert group.computed_tokens <= 1
    with engine(layout="off") as running:
        for clock in ("It is 10:33.", "It is 11:47."):
            receipt = running.generate(asked(clock), TOOLS, sampling=decode(6)).receipt
        assert receipt.computed_tokens > 0.5 * receipt.prompt_tokens, "the clock stands before nearly everything"
        assert receipt.moves == ()


def test_a_wrong_mode_and_a_missing_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'tidy'"), engine(layout="tidy"):
        pass
    with pytest.raises(ConfigError, match="layout.toml"), engine(layout=LayoutOptions(rules=tmp_path / "layout.toml")):
        pass
