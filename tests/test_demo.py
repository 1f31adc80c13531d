"""The demo: real tools that take anything, and modes that differ in nothing but time."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from agentcache.demo import run as demo
from agentcache.demo.tools import TOWN, Desk, arithmetic, described, result_of
from agentcache.types import StoreOptions, ToolCall

# -- the tools ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expression", "value"),
    [("1 + 2 * 3", 7), ("(1 + 2) * 3", 9), ("-4 / 8", -0.5), ("74 - 31", 43), ("2.5*4", 10), (" 1+1 ", 2), ("+-3", -3)],
)
def test_arithmetic(expression: str, value: float) -> None:
    assert arithmetic(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        "", "1 +", "a + 1", "9 ** 9", "1 if 1 else 2", "__import__('os')", "print(1)", "[1]", "'a' * 9", "True + 1", "1 // 2", "1j",
        "(" * 150, "1 +" * 300 + "1", "x := 1", "1; 2", "1 < 2",
    ],
)  # fmt: skip
def test_what_is_no_arithmetic_is_refused(expression: str) -> None:
    with pytest.raises(ValueError, match="expression|neither"):
        arithmetic(expression)


@given(st.text(max_size=40))
def test_no_text_does_anything_but_arithmetic(text: str) -> None:
    with contextlib.suppress(ValueError, ArithmeticError):
        assert isinstance(arithmetic(text), float)


def test_the_desk_does_what_its_tools_say() -> None:
    desk = Desk()
    assert "Hana Brellin" in desk.search("the Clara Museum")
    assert desk.search("zebra") == desk.search("") == "nothing found"
    assert desk.calculator("74 - 31") == "43"
    assert desk.create_note("buy stamps") == '{"status": "done"}'
    assert desk.list_notes() == '{"notes": "buy stamps"}'
    assert "not found" in desk.delete_note("buy bread")
    assert desk.delete_note("buy stamps") == '{"status": "done"}'
    assert '"code": "T41"' in desk.book_ticket("Lisbon", "2026-12-01")
    assert desk.cancel_ticket("T41") == '{"status": "done"}'
    assert "not found" in desk.cancel_ticket("T41")
    assert desk.get_calendar("2026-12-01") == '{"day": "Tuesday"}'
    assert "invalid" in desk.get_calendar("tomorrow")
    assert desk.convert_length(100) == '{"feet": 328.1}'
    assert desk.count_words("the tide is high") == '{"count": 4}'


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("search", {}), ("search", {"q": "x"}), ("search", {"query": 3}), ("calculator", {"expression": "1 / 0"}), ("_words", {}),
        ("__init__", {}), ("texts", {}), ("no_such", {}), ("convert_length", {"metres": "far"}), ("get_calendar", {"date": None}),
    ],
)  # fmt: skip
def test_a_wrong_call_is_answered_and_breaks_nothing(name: str, arguments: dict[str, Any]) -> None:
    assert "error" in result_of(Desk(), ToolCall(name, arguments, "1"))


def test_tools_are_described_by_their_methods() -> None:
    tool = described(Desk.book_ticket)
    assert (tool.name, tool.description) == ("book_ticket", "Book a ticket.")
    assert tool.parameters == {
        "type": "object",
        "properties": {"place": {"type": "string"}, "date": {"type": "string"}},
        "required": ["place", "date"],
    }
    assert described(Desk.convert_length).parameters["properties"] == {"metres": {"type": "number"}}
    assert [one.name for one in demo.TOOLS] == TOWN["tools"]


# -- the modes ---------------------------------------------------------------------------------------------------------


def check(report: dict[str, Any], said: str) -> None:
    """What every demo shows."""
    off, warm = report["modes"]["off"]["steps"], report["modes"]["warm"]["steps"]
    assert all(step["cached_tokens"] == 0 for step in off)
    assert warm[0]["cached_tokens"] == report["warm_tokens"] > 0
    second = report["modes"]["second"]
    assert second["disk_tokens"] == report["warm_tokens"], "it came from disk"
    assert [s["computed_tokens"] for s in second["steps"]] == [s["computed_tokens"] for s in warm]
    assert "ratio" in said


def test_the_embedded_model_answers_with_real_tools() -> None:
    console = Console(record=True, width=120, file=io.StringIO())
    report = demo.run(console, TOWN["conversations"][:2])
    said = console.export_text()
    check(report, said)
    cold = report["modes"]["cold"]["steps"]
    assert cold[0]["cached_tokens"] == 0
    first = next(at for at, line in enumerate(report["said"]) if line.startswith("answer"))  # a call is a line, and so is the question
    for before, step in zip(cold[:first], cold[1:first]):  # a step pays for what is new behind the last one, and nothing else
        assert step["cached_tokens"] >= before["prompt_tokens"]
        new = step["prompt_tokens"] - before["prompt_tokens"] - before["completion_tokens"]
        assert step["computed_tokens"] <= new + 2
    assert "drew the same" in " ".join(said.split())
    assert all(any(f"user     {turn}" == line for line in report["said"]) for turns in TOWN["conversations"][:2] for turn, _ in turns)


def test_the_embedded_model_answers_every_question_right(tmp_path: Path) -> None:
    with demo.engine_of(StoreOptions(tmp_path / "store")) as engine:
        played = demo.play(engine, TOWN["conversations"], lambda label: lambda at, of: None)
    asked = [line for line in played.lines if line.startswith("  call")]
    assert len(asked) == len(set(asked)), "a call is made again with its result before it"
    told = [line.removeprefix("answer   ") for line in played.lines if line.startswith("answer")]
    assert told == [answer for turns in TOWN["conversations"] for _, answer in turns]


def test_another_answer_is_noticed() -> None:
    replays = {mode: demo.Replay(drawn=(1, 2)) for mode in demo.MODES}
    replays["warm"].drawn = (1, 3)
    with pytest.raises(AssertionError, match="warm draws"):
        demo.check(replays, 0)
