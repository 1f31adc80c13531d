"""Constrained completions end within max_tokens: whatever is drawn, in every family's form, for many schemas."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from agentcache import Constraint, Tool
from agentcache.answer.grammar import Grammars
from agentcache.answer.guide import Guide
from agentcache.errors import ConfigError
from benchmarks.answers import parse
from benchmarks.constrained import SCHEMAS, SHAPES, TEXT, TREE, WHOLE, many, thing
from tests import models
from tests.answer.grammars import FAMILIES, grammars

jsonschema = pytest.importorskip("jsonschema")
pytest.importorskip("llguidance")

PAY = thing(to=TEXT, amount=WHOLE)
Choose = Callable[[torch.Tensor], torch.Tensor]


def need(made: Grammars, constraint: Constraint, tools: Any = ()) -> int:
    """The fewest tokens that are not refused."""
    with pytest.raises(ConfigError, match="max_tokens=0: the shortest answer") as caught:
        made.guide(constraint, tools, "", max_tokens=0)
    return int(str(caught.value).split(" has ")[1].split()[0])


def written(made: Grammars, guide: Guide, max_tokens: int, seed: int = 0, likes: str = "") -> str:
    """A completion of at most so many tokens, drawn blindly but for the characters that the model likes; it has ended, or was cut."""
    generator, ids = torch.Generator().manual_seed(seed), list[int]()
    bias = torch.zeros(models.VOCAB)
    for token in made.tokenizer(likes, add_special_tokens=False)["input_ids"]:
        bias[token] = 20.0
    while len(ids) < max_tokens and not guide.over and (masked := guide.mask(bias)) is not None:
        token = int(torch.multinomial(torch.softmax(masked, -1), 1, generator=generator))
        if not guide.fits(token):
            masked = guide.narrow(bias, token)
            if masked is None:
                break
            token = int(torch.multinomial(torch.softmax(masked, -1), 1, generator=generator))
        ids.append(token)
        assert guide.accept(token) == ""
    if ids and ids[-1] == made.tokenizer.eos_token_id:
        ids.pop()
    text = str(made.tokenizer.decode(ids))
    assert guide.accepting or guide.cut, text
    return text


@pytest.mark.parametrize("name", sorted(SCHEMAS))
def test_objects_end_within_max_tokens(name: str) -> None:
    made, schema = grammars(), SCHEMAS[name][0]
    constraint = Constraint(schema=schema)
    least = need(made, constraint)
    with pytest.raises(ConfigError, match=f"max_tokens={least - 1}: the shortest answer .* has {least} tokens"):
        made.guide(constraint, [], "", max_tokens=least - 1)
    whole = 0
    for room, likes in ((0, ""), (1, ","), (5, 'a{["'), (40, "0123456789"), (90, 'a{["'), (140, "")):
        guide = made.guide(constraint, [], "", max_tokens=least + room)
        text = written(made, guide, least + room, room, likes)
        if not guide.cut:
            jsonschema.validate(json.loads(text), schema)
            whole += 1
    assert whole > 1


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("name", ["payment", "tree", "plan", "email", "any object"])
def test_calls_end_within_max_tokens(family: str, name: str) -> None:
    made, tools, whole = grammars(family), [Tool("act", "", SCHEMAS[name][0]), Tool("ping")], 0
    for constraint in (Constraint("any"), Constraint("act")):
        least = need(made, constraint, tools)
        for room in (0, 3, 60, 110):
            guide = made.guide(constraint, tools, "", max_tokens=least + room)
            calls = parse(written(made, guide, least + room, room), ("act", "ping")).tool_calls
            assert calls or guide.cut
            whole += bool(calls)
            for call in calls:
                jsonschema.validate(call.arguments, SCHEMAS[name][0] if call.name == "act" else {"type": "object"})
    assert whole > 1


def test_a_text_gives_way_and_what_follows_is_the_models() -> None:
    made, constraint = grammars(), Constraint(schema=PAY)
    guide = made.guide(constraint, [], "", max_tokens=90)
    said = json.loads(written(made, guide, 90, likes="a7"))
    assert set(said["to"]) == {"a", "7"}
    assert len(said["to"]) > 20
    assert set(str(said["amount"])[1:]) == {"7"}, "not the shortest number there is"
    assert guide.shortened
    assert not guide.cut
    guide = made.guide(constraint, [], "", max_tokens=400)
    written(made, guide, 400, likes='"1,}')
    assert not guide.shortened, "there was room"


def test_a_number_is_whole_or_cut() -> None:
    made, constraint = grammars(), Constraint(schema=thing(n=WHOLE))
    least, cut = need(made, constraint), []
    pieces = [str(made.tokenizer.decode([token])) for token in range(models.VOCAB)]
    for room in range(6):
        guide = made.guide(constraint, [], "", max_tokens=least + room)
        rest, text = '{"n": 1250}', ""
        while not guide.over:
            likes = torch.tensor([9.0 if piece and rest.startswith(piece) else 0.0 for piece in pieces])
            masked = guide.mask(likes)
            assert masked is not None
            if not guide.fits(int(masked.argmax())):
                masked = guide.narrow(likes, int(masked.argmax()))
            if masked is None:
                break
            piece = pieces[int(masked.argmax())]
            assert guide.accept(int(masked.argmax())) == ""
            rest, text = rest.removeprefix(piece), text + piece
        assert text == '{"n": 1250}' or guide.cut
        cut.append(guide.cut)
    assert cut == sorted(cut, reverse=True)
    assert set(cut) == {True, False}
    guide = made.guide(constraint, [], "", max_tokens=200)
    assert len(str(json.loads(written(made, guide, 200, likes="7"))["n"])) <= 24


def test_lists_and_recursion_take_no_further_part() -> None:
    made = grammars()
    for schema, likes in ((thing(items=many(WHOLE)), "1, "), (TREE, '{[children":, name'), (thing(a=many(SHAPES)), ',{"kindboxwh')):
        for max_tokens in (120, 250):
            guide = made.guide(Constraint(schema=schema), [], "", max_tokens=max_tokens)
            jsonschema.validate(json.loads(written(made, guide, max_tokens, likes=likes)), schema)
            assert not guide.cut


def test_what_fits_is_drawn_as_ever() -> None:
    """All tokens after which an ending fits may be drawn, however unlikely."""
    made, names = grammars(), [f"{letter}{letter}" for letter in "abcdefghijkl"]
    constraint, drawn = Constraint(schema=thing(kind={"enum": names})), set()
    for seed in range(80):
        guide = made.guide(constraint, [], "", max_tokens=30)
        drawn.add(json.loads(written(made, guide, 30, seed))["kind"])
        assert not guide.shortened
    assert drawn == set(names)


def test_a_thought_leaves_half_of_the_tokens() -> None:
    made = grammars(thinking=True)
    for prompt, thinks in (("<think>\n", False), ("", True)):
        guide = made.guide(Constraint(schema=PAY), [], prompt, max_tokens=200, thinks=thinks)
        thought, closed, rest = written(made, guide, 200, likes="<thinka").partition("</think>")
        assert closed
        assert len(thought) > 50
        jsonschema.validate(json.loads(rest), PAY)
        assert not guide.cut


@pytest.mark.parametrize("max_tokens", [100, 10_000])
def test_what_never_ends_is_refused_at_the_start(max_tokens: int) -> None:
    with pytest.raises(ConfigError, match="no answer of the prescribed form was found that ends; simplify"):
        grammars().guide(Constraint(grammar='start: "a" start'), [], "", max_tokens=max_tokens)


def test_an_error_of_the_grammar_is_told_without_its_state(monkeypatch: pytest.MonkeyPatch) -> None:
    guide = grammars().guide(Constraint(regex="ab"), [], "", max_tokens=10)
    monkeypatch.setattr(guide, "_matcher", SimpleNamespace(consume_token=lambda token: False, get_error=lambda: "too many\n<state>\n{}"))
    assert guide.accept(1) == "too many"


@pytest.mark.parametrize(
    "pattern", [r"[a-z ]+\.", r"(\w\.)+x", r"(ab)+c", r"\w+@\w+\.com", r"(?s:.*)END", r"(yes|no|a{3,})?[^a\d]!", r"\d{4}-\d\d", r"-?\d+"]
)
def test_regular_expressions_end_within_max_tokens(pattern: str) -> None:
    made, constraint, whole = grammars(), Constraint(regex=pattern), 0
    least = need(made, constraint)
    assert least <= 8
    for room, likes in ((0, ""), (1, "a"), (6, "a1"), (9, "b."), (30, "a .@1"), (60, "")):
        guide = made.guide(constraint, [], "", max_tokens=least + room)
        text = written(made, guide, least + room, room, likes)
        if not guide.cut:
            assert re.fullmatch(pattern, text), text
            whole += 1
    assert whole > 1


def test_texts_of_any_pattern_end_whatever_was_asked_before() -> None:
    made = grammars()
    for pattern in ("@", r"^\S+@\S+$", r"\.(pdf|md)$", "[A-Z]", "[äöü]", "^x|y$", "foo.*bar", r"^[^,]+,[^,]+$", '"/', "abc"):
        schema = thing(a={"type": "string", "pattern": pattern}, b=WHOLE)
        constraint = Constraint(schema=schema)
        least = need(made, constraint)
        assert least <= 20
        for room, likes in ((0, ""), (9, "a1,"), (40, "ab .,")):
            guide = made.guide(constraint, [], "", max_tokens=least + room)
            text = written(made, guide, least + room, room, likes)
            if not guide.cut:
                jsonschema.validate(json.loads(text), schema)
    names = {"type": "object", "patternProperties": {"key": TEXT}, "additionalProperties": False, "minProperties": 1}
    made.guide(Constraint("act"), [Tool("act", "", {**thing(of=names), "required": ["of"]})], "", max_tokens=60)


def test_more_optional_properties_than_the_parser_takes_are_refused() -> None:
    schema = {"type": "object", "properties": {f"p{number}": {"type": "string"} for number in range(1500)}}
    with pytest.raises(ConfigError, match="cannot be enforced: .*max is"):
        grammars().guide(Constraint(schema=schema), [], "", max_tokens=100)


def test_forced_tokens_are_those_that_the_model_has() -> None:
    made = grammars(sorted(FAMILIES)[0])
    guide = made.guide(Constraint(regex="The harbour is open"), (), "", max_tokens=60)
    assert guide is not None
    whole = guide.forced()
    assert len(whole) > 1
    at = whole.index(max(whole))
    guide._vocab = whole[at]  # a model with fewer ids than its tokenizer
    assert guide.forced() == whole[:at]
