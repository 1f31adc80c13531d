"""Schemas: prompts of named parts, their holes and choices; each part computed once, and told when it has changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agentcache import Calibration, Message, Part, Sampling, Schema
from agentcache.errors import SchemaError
from tests.engines import engine, long_text

FILE = """
name = "trip"

[[parts]]
name = "rules"
text = "Plan a trip. Braces {stay} as they are."

[[parts]]
name = "city"
text = "The city:"

[[parts.one_of]]
name = "rome"
text = "Rome lies on seven hills."

[[parts.one_of]]
name = "oslo"
text = "Oslo lies at a fjord."

[[parts]]
name = "length"
text = "It takes {days} days {{at most}}."
holes = { days = 2 }
optional = true
"""
RULES, ROME, OSLO = "Plan a trip. Braces {stay} as they are.", "Rome lies on seven hills.", "Oslo lies at a fjord."


@pytest.fixture
def trip(tmp_path: Path) -> Schema:
    file = tmp_path / "prompt.toml"
    file.write_text(FILE, "utf-8")
    return Schema.from_file(file)


def test_a_prompt_shows_chosen_parts_and_their_spans(trip: Schema) -> None:
    made = trip.render(["oslo", "length"], {"days": "3"})
    text = f"{RULES}\n\nThe city:\n\n{OSLO}\n\nIt takes 3 days {{at most}}."
    assert made.messages == (Message("system", text),)
    assert {name: text[start:stop] for name, (start, stop) in made.spans.items()} == {
        "rules": RULES,
        "city": f"The city:\n\n{OSLO}",
        "oslo": OSLO,
        "length": "It takes 3 days {at most}.",
    }
    assert trip.render("rome").messages[0].content == f"{RULES}\n\nThe city:\n\n{ROME}"


def test_a_nested_part_brings_those_around_it() -> None:
    inner = Part("guide", optional=True, parts=[Part("food", "Eat."), Part("night", "Sleep.", optional=True)])
    schema = Schema("visit", [Part("start", "Go."), inner], role="user", separator=" ")
    assert schema.render().messages == (Message("user", "Go."),)
    assert schema.render("night").messages[0].content == "Go. Eat. Sleep."
    assert schema.render("guide").spans == {"start": (0, 3), "guide": (4, 8), "food": (4, 8)}


@pytest.mark.parametrize(
    ("parts", "params", "said"),
    [
        (["paris"], {}, "'paris'.* has 'rules', 'city', 'rome', 'oslo', 'length'"),
        ([], {}, r"'city' shows one of \['rome', 'oslo'\].*\[\]"),
        (["rome", "oslo"], {}, r"\['rome', 'oslo'\]: asked for are \['rome', 'oslo'\]"),
        (["rome", "length"], {}, "'length' has the hole 'days': give it"),
        (["rome", "length"], {"days": "100"}, "'100'.* at most 2 characters"),
        (["rome", "length"], {"days": 3}, "=3: must be a text"),
        (["rome"], {"days": "3"}, "'days': no part that is shown"),
    ],
)
def test_a_prompt_that_cannot_be_is_refused(trip: Schema, parts: list[str], params: dict[str, Any], said: str) -> None:
    with pytest.raises(SchemaError, match=said):
        trip.render(parts, params)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("parts = 3", "parts=3: must be tables"),
        ("[[parts]]\ntext = 'a'", "a name and a text"),
        ("[[parts]]\nname = 'a'", "'a' is empty"),
        ("[[parts]]\nname = 'a'\ntext = 'b'\nhole = 3", "'hole' is none of 'name', 'text', 'holes'"),
        ("[[parts]]\nname = 'a'\ntext = '{b}'\nholes = { c = 3 }", r"\['b'\] and bounds \['c'\]"),
        ("[[parts]]\nname = 'a'\ntext = '{b'\nholes = { b = 3 }", "written twice"),
        ("[[parts]]\nname = 'a'\ntext = '{b}'\nholes = { b = 0 }", "at least 1"),
        ("[[parts]]\nname = 'a'\ntext = 'b'\n" * 2, "two parts of the name 'a'"),
        ("[[parts]]\nname = 'a'\n[[parts.parts]]\nname = 'b'\ntext = 'c'\n[[parts.one_of]]\nname = 'd'\ntext = 'e'", "of its own"),
        ("separator = 3\n[[parts]]\nname = 'a'\ntext = 'b'", "separator=3: must be a text"),
        ("role = 'tool'\n[[parts]]\nname = 'a'\ntext = 'b'", "role of"),
        ("name = ", "cannot be read"),
    ],
)
def test_a_file_that_is_no_schema_is_refused(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "bad.toml").write_text(text, "utf-8")
    with pytest.raises(SchemaError, match=said):
        Schema.from_file(tmp_path / "bad.toml")


def schema(**texts: str) -> Schema:
    """Two parts in every prompt, then one of two, then one more with a hole."""
    names = ("rules", "style", "north", "south", "end")
    said = {name: f"Part {name}. {long_text(24, number)}." for number, name in enumerate(names)} | texts
    north, south = (Part(name, said[name]) for name in ("north", "south"))
    end = Part("end", f"{said['end']} Ask {{whom}}. {long_text(24, 9)}", holes={"whom": 8})
    return Schema("desk", [Part("rules", said["rules"]), Part("style", said["style"]), Part("side", one_of=[north, south]), end])


def test_each_part_is_computed_once(tmp_path: Path) -> None:
    with engine(store=tmp_path) as running:
        made = running.learn(schema())
        assert [one.source.partition("@")[0] for one in made.documents] == ["rules", "style", "north", "south", "end", "end"]
        assert made.computed_tokens < 1.1 * sum(one.tokens for one in made.documents)
        again = running.learn(schema())
        assert (again.computed_tokens, again.known, again.documents) == (0, 6, made.documents)


@pytest.mark.parametrize("side", ["north", "south"])
def test_parts_up_to_the_first_choice_are_exact_hits(tmp_path: Path, side: str) -> None:
    with engine(store=tmp_path) as running:
        tokens = {one.source.partition("@")[0]: one.tokens for one in running.learn(schema()).documents}
    with engine(store=tmp_path) as running:
        shown = schema().render([side], {"whom": "Ann"}, learnt=running.documents("desk"))
        asked = [*shown.messages, Message("user", "Where?")]
        receipt = running.generate(asked, sampling=Sampling(max_tokens=2, ignore_eos=True)).receipt
        assert receipt.cached_tokens >= tokens["rules"] + tokens["style"] + tokens[side] - 4
        assert receipt.precision == "exact"


def test_a_part_that_changed_is_told_and_learnt_anew(tmp_path: Path) -> None:
    with engine(store=tmp_path) as running:
        running.learn(schema())
        changed = schema(south="Another south.")
        learnt = running.documents("desk")
        changed.render(["north"], {"whom": "Ann"}, learnt=learnt)
        with pytest.raises(SchemaError, match=r"'south' has changed .* engine\.learn\(schema\)"):
            changed.render(["south"], {"whom": "Ann"}, learnt=learnt)
        assert running.learn(changed).known == 5
        learnt = running.documents("desk")
        assert len(learnt) == 6
        changed.render(["south"], {"whom": "Ann"}, learnt=learnt)


def test_a_schema_is_learnt_behind_its_own_text_only() -> None:
    with engine(store=None) as running, pytest.raises(SchemaError, match="system='You are'"):
        running.learn(schema(), system="You are")


def test_parts_after_the_first_choice_are_attached_by_consent() -> None:
    with engine(store=None) as running:
        running.learn(schema())
        assert running.fingerprint is not None
        by_hand = Calibration(running.fingerprint.whole, layers=3, steps=((4, 3),), min_tokens=16, kl=1.0)
        shown = schema().render("south", {"whom": "Ann"})
        asked = [*shown.messages, Message("user", "Where?")]
        receipt = running.generate(asked, sampling=Sampling(max_tokens=2, ignore_eos=True), reuse=by_hand).receipt
        assert len(receipt.segments) == 2
        assert receipt.cached_tokens > 0.85 * receipt.prompt_tokens
