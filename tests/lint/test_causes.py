"""lint: forms of the faults that its own bench does not put in; what is a value, what is a turn, what was said for one request only."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from difflib import SequenceMatcher
from typing import Any

import pytest

from agentcache.lint import Cause, lint, texts
from agentcache.lint.texts import PAIRS, Aligner, causes, pieces
from agentcache.lint.volatile import values
from tests.lint.requests import conversation, only_finding, report, with_system_line


@pytest.mark.parametrize(
    ("was", "now", "cause"),
    [
        ("Heure : 5 novembre 2029 22h13", "Heure : 6 novembre 2029 01h15", Cause.CLOCK),
        ("Es ist 22:13, 5. Dezember 2029", "Es ist 02:13, 6. Dezember 2029", Cause.CLOCK),
        ("2029年11月5日", "2029年11月6日", Cause.CLOCK),
        ("The session started 35 seconds ago.", "The session started 91 seconds ago.", Cause.CLOCK),
        ("up for 3m 12s", "up for 4m 01s", Cause.CLOCK),
        ("nonce=V1StGXR8_Z5jdHi6B-myT", "nonce=Uakgb_J5m9g-0JDMbcJqL", Cause.ID),
        ("trace q83vEjRWeJA/+AASNFZ4kA==", "trace 3q2+7wAAABI0Vniavn/erQ==", Cause.ID),
        ("correlation 1a2b3c4d-5e6f", "correlation 99e07f12-00a1", Cause.ID),
        ("Request ID: 4821930", "Request ID: 1234567", Cause.ID),
        ("session 12, turn 3", "session 12, turn 4", Cause.COUNTER),
        ("Tokens used so far: 1,234 of 8,000", "Tokens used so far: 1,551 of 8,000", Cause.COUNTER),
        ("The gate is python-3.", "The gate is getUserById.", Cause.STATE),
    ],
)
def test_forms_of_values(was: str, now: str, cause: Cause) -> None:
    assert only_finding(with_system_line(conversation(1), [was, now])).cause is cause


def test_a_number_needs_a_word_that_names_it() -> None:
    assert causes("You have 30 steps left.", "You have 29 steps left.") == [Cause.COUNTER]
    assert causes("The price is 30 crowns.", "The price is 29 crowns.") == [None]


@pytest.mark.parametrize(
    "text", ["{'day': 'friday', 'size': 0}", json.dumps('{"day": "friday", "size": 0}'), '{"day": "friday", "size": 0}\n']
)
def test_arguments_printed_by_python_or_dumped_twice(text: str) -> None:
    bodies = conversation(2)[1:]
    bodies[1]["messages"][2]["tool_calls"][0]["function"]["arguments"] = text
    assert only_finding(bodies).cause is Cause.ARGUMENTS


@pytest.mark.parametrize(
    "kept",
    [
        {"reasoning_details": [{"type": "reasoning.text", "text": "Look at the piers."}]},
        {"thinking_blocks": [{"type": "thinking", "thinking": "Look at the piers.", "signature": "s"}]},
        {"content": [{"type": "redacted_thinking", "data": "c2VjcmV0"}, {"type": "text", "text": "Let me look at pier a."}]},
    ],
)
def test_reasoning_in_the_fields_of_other_providers(kept: dict[str, Any]) -> None:
    bodies = conversation(2)[1:]
    bodies[0]["messages"][2] |= kept
    assert only_finding(bodies).cause is Cause.REASONING


def for_one_request(bodies: list[dict[str, Any]], place: int, said: str) -> list[dict[str, Any]]:
    for number, body in enumerate(bodies):
        body["messages"].insert(len(body["messages"]) - place, {"role": "user", "content": said.format(n=number)})
    return bodies


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("said", ["The bell rang {n} times.", "It is 09:2{n}."])
def test_text_for_one_request_is_told_from_a_window(place: int, said: str) -> None:
    found = report(for_one_request(conversation(3), place, said)).findings
    assert [finding.cause for finding in found] == [Cause.EDITED] * 3
    assert all("taken out again" in finding.detail and "(user)" in finding.writer for finding in found)
    assert "for one request" in found[-1].fix


def test_a_vanished_answered_turn_is_a_window() -> None:
    bodies = conversation(3)[1:]
    for body in bodies:
        body["messages"][2:2] = [{"role": "user", "content": "And the Gannet?"}]
    del bodies[2]["messages"][2]  # the user's second message, long before the newest
    assert [finding.cause for finding in report(bodies).findings] == [Cause.TRUNCATED]


def test_results_that_are_alike_do_not_hide_a_window() -> None:
    bodies = conversation(4)
    for body in bodies:
        for message in body["messages"]:
            if message["role"] == "tool":
                message["content"] = "ok"
        del body["messages"][1:-4]
    assert {finding.cause for finding in report(bodies).findings} == {Cause.TRUNCATED}


def test_a_summary_beside_results_that_are_alike() -> None:
    bodies = conversation(5)[1:]
    for number, body in enumerate(bodies):
        for message in body["messages"]:
            if message["role"] == "tool":
                message["content"] = "ok"
        said = f"Summary so far: {number + 1} piers were looked at, the last one {'abcde'[number]}."
        body["messages"][1:-2] = [{"role": "user", "content": said}]
    assert [finding.cause for finding in report(bodies).findings] == [Cause.SUMMARY] * 4


def test_text_that_replaces_the_whole_history() -> None:
    bodies = conversation(3)[2:]
    bodies[1]["messages"][1:-2] = [{"role": "user", "content": "The Petrel needs a berth; two piers are taken."}]
    bodies[0]["messages"][2:] = bodies[0]["messages"][2:4]
    assert only_finding(bodies).cause is Cause.SUMMARY


def test_a_window_that_cuts_a_raw_prompt_inside_a_line() -> None:
    long = "Thought: the first pier is taken, and so is the second one, so look at the third and the fourth as well."
    was = f"Rules.\nQ: a\n{long}\nAct: look\nSeen: two boats\nThought: go on\n"
    now = f"Rules.\nQ: a\n{long[40:]}\nAct: look\nSeen: two boats\nThought: go on\nAct: end\n"
    assert only_finding([{"prompt": was}, {"prompt": now}]).cause is Cause.TRUNCATED
    assert only_finding([{"prompt": was}, {"prompt": f"The user is in a hurry.\n{was}Act: end\n"}]).cause is Cause.STATE


def test_a_window_without_ids_is_found_by_its_last_message() -> None:
    one, two = conversation(5), conversation(5)
    for body in two:
        body["messages"] = json.loads(json.dumps(body["messages"]).replace("pier", "quay").replace("Petrel", "Gannet"))
    bodies = [copy.deepcopy(body) for pair in zip(one, two) for body in pair]
    for body in bodies[2:]:
        long = "A long account of what was seen. " * 12 + str(len(body["messages"]))
        body["messages"][1:-3] = [{"role": "user", "content": f"Summary of it all: {long} {body['messages'][-1]['content'][:4]}"}]
    found = lint(bodies)
    assert found.conversations == 2


class Places(list[int]):
    """Where a value stands; counts how often such places are looked at, which is what aligning spends its time on."""

    looked = 0

    def __iter__(self) -> Iterator[int]:
        for at in super().__iter__():
            Places.looked += 1
            yield at


def counted(matcher: SequenceMatcher[Any]) -> SequenceMatcher[Any]:
    matcher.b2j = {value: Places(at) for value, at in matcher.b2j.items()}  # type: ignore[attr-defined]
    return matcher


def test_repetitive_texts_are_not_compared_to_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds of it were spent in requests that only asked why they missed."""
    was = " ".join(f"tide {at % 7} reed" for at in range(90))
    now = " ".join(f"reed {at % 5} tide" for at in range(88))
    counted(SequenceMatcher(None, values(was), values(now), autojunk=False)).get_opcodes()
    whole, Places.looked = Places.looked, 0
    monkeypatch.setattr(texts, "Aligner", lambda before, after: counted(Aligner(before, after)))
    found = pieces(was, now)
    assert 0 < Places.looked <= PAIRS < whole / 2
    assert all(piece.was in was and piece.now in now for piece in found)


def test_differences_far_apart_are_found_one_by_one() -> None:
    was = f"Today is Monday. {'Mind the gap between the boat and the quay. ' * 60}It is the 4th call."
    now = was.replace("Monday", "Friday").replace("4th", "5th")
    assert [(piece.was, piece.now) for piece in pieces(was, now)] == [("Monday", "Friday"), ("4", "5")]
