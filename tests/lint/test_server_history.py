"""Responses requests that hold only what is new: made whole where the log has the response that they name, else compared with none."""

from __future__ import annotations

from typing import Any

import pytest

from agentcache.lint import Options, Report, lint
from agentcache.lint.server_history import ServerHistories

TOOLS = [{"type": "function", "name": "find_berth", "description": "Finds.", "parameters": {"type": "object", "properties": {}}}]


def turn(number: int, before: str | None, **more: Any) -> dict[str, Any]:
    """One call: a question or a tool's result, answered by a tool call."""
    call = {"type": "function_call", "call_id": f"c{number}", "name": "find_berth", "arguments": f'{{"berth": {number}}}', "id": "fc"}
    result = {"type": "function_call_output", "call_id": f"c{number - 1}", "output": f"berth {number - 1} is taken by a boat"}
    new: Any = "Is there room for the Petrel on Friday?" if number == 0 else [result]
    request = {"model": "m", "instructions": "You keep the ledger.", "tools": TOOLS, "input": new, **more}
    if before is not None:
        request["previous_response_id"] = before
    thought = {"type": "reasoning", "id": "rs", "summary": []}
    said = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": f"I look at berth {number}."}]}
    return {"request": request, "response": {"id": f"resp_{number}", "object": "response", "output": [thought, said, call]}}


def chain(steps: int) -> list[dict[str, Any]]:
    return [turn(number, f"resp_{number - 1}" if number else None) for number in range(steps)]


def said(found: Report) -> list[str]:
    return [problem.message for problem in found.problems]


def test_what_the_response_before_left_out_is_put_before_it() -> None:
    found = lint(chain(6))
    assert (found.findings, said(found), found.conversations) == ([], [], 1)
    assert [step.tokens for step in found.steps] == sorted({step.tokens for step in found.steps})
    assert found.totals()["reused_share"] > 0.7


def test_a_finding_in_such_a_chain_is_found() -> None:
    bodies = chain(5)
    for number, body in enumerate(bodies):
        body["request"]["instructions"] += f" It is 09:{number}7:53."
    assert [str(finding.cause) for finding in lint(bodies).findings] == ["clock"] * 4


def test_two_requests_that_go_on_from_the_same_response() -> None:
    bodies = [*chain(3), turn(2, "resp_1")]
    bodies[3]["request"]["input"] = [{"role": "user", "content": "Never mind."}]
    found = lint(bodies)
    assert said(found) == []
    assert [finding.previous for finding in found.findings] == [3]


def test_a_log_without_responses_compares_none_and_says_so_once() -> None:
    found = lint([{"session_id": "a", **body["request"]} for body in chain(6)])
    assert found.findings == []
    assert (len(found.steps), found.conversations, found.totals()["later_requests"]) == (6, 1, 0)
    (problem,) = found.problems
    assert (problem.line, "'resp_0'" in problem.message, "provider holds the history" in problem.message) == (2, True, True)


def test_a_log_may_begin_in_the_middle() -> None:
    found = lint(chain(6)[2:])
    assert found.findings == []
    assert (found.conversations, found.totals()["later_requests"], len(found.problems)) == (1, 3, 1)


@pytest.mark.parametrize("conversation", ["conv_1", {"id": "conv_1"}])
def test_a_conversation_that_the_provider_holds(conversation: Any) -> None:
    found = lint([turn(number, None, conversation=conversation) for number in range(5)])
    assert (found.findings, found.conversations, found.totals()["later_requests"]) == ([], 1, 0)
    assert len(found.problems) == 1
    assert "conv_1" in found.problems[0].message
    hidden = lint([turn(number, None, conversation=conversation) for number in range(5)], Options(redact=True))
    assert "conv_1" not in str(hidden.as_dict())


def test_a_logs_own_conversation_name_is_no_provider_state() -> None:
    items = [{"role": "user", "content": f"{number} boats"} for number in range(4)]
    found = lint([{"conversation": "a", "input": items[:2]}, {"conversation": "a", "input": items[1:]}])
    assert (len(found.findings), found.problems) == (1, [])
    assert lint([{"conversation": "a", "input": "Q: a\n"}, {"conversation": "a", "input": "Q: a\nA: b\n"}]).findings == []


def test_what_is_kept_is_bounded_and_the_newest_stays() -> None:
    kept, told = ServerHistories(held=4_000), list[str]()
    alone = [
        kept.whole(body["request"], body, lambda wording, *values: told.append(wording % values))[1]
        for number in range(40)
        for body in (turn(number, f"resp_{number - 1}" if number else None),)
        if number < 4 or body["request"].pop("previous_response_id")
    ]
    assert not any(alone)
    assert 0 < kept.size <= 4_000
    late = turn(40, "resp_39")
    assert not kept.whole(late["request"], late, lambda wording, *values: None)[1]
    lost = turn(41, "resp_5")
    assert kept.whole(lost["request"], lost, lambda wording, *values: told.append(wording % values))[1]
    assert len(told) == 1
