"""lint: two requests of one conversation, the cause of their parting, who wrote it, and what it costs. Nothing here is recorded."""

from __future__ import annotations

import copy
import json
import time
from typing import Any

import pytest

from agentcache.lint import Cause, Options, lint
from agentcache.lint.values import Said
from agentcache.lint.volatile import hidden, pattern, spots, values
from tests.lint.requests import SYSTEM, TOOLS, conversation, only_finding, report, tool, with_system_line


def test_a_history_that_only_grows_has_no_findings() -> None:
    found = report(conversation(6))
    assert found.findings == []
    assert found.problems == []
    totals = found.totals()
    assert totals["later_requests"] == totals["clean_requests"] == 6
    assert totals["reused_share"] == totals["possible_share"] < 1


@pytest.mark.parametrize(
    ("was", "now", "cause"),
    [
        ("It is 2031-03-14 09:26:53 UTC.", "It is 2031-03-14 09:27:10 UTC.", Cause.CLOCK),
        ("Today is Friday, 14 March 2031.", "Today is Saturday, 15 March 2031.", Cause.CLOCK),
        ("Date: 31/01/2031 9:05 am", "Date: 01/02/2031 11:40 pm", Cause.CLOCK),
        ("now=1931244413", "now=1931244499", Cause.CLOCK),
        ("Uptime: 35 minutes", "Uptime: 36 minutes", Cause.CLOCK),
        ("Mar 14, 2031, 09:26", "Mar 15, 2031, 10:01", Cause.CLOCK),
        ("session 6f1d3c1e-8d0e-4a55-9b0f-0d6f3f0a9a11", "session 0b7e2d9a-11aa-4d7c-8a10-9e5b6c3d2f44", Cause.ID),
        ("trace_id: 9f86d081884c7d65", "trace_id: 60303ae22b998861", Cause.ID),
        ("<Cfg object at 0x7f3a10c2b4d0>", "<Cfg object at 0x7f91c02b1a30>", Cause.ID),
        ("request req_a81bc81b", "request req_77e0f9d2", Cause.ID),
        ("Step 4 of 20", "Step 5 of 20", Cause.COUNTER),
        ("You have 12 calls left.", "You have 11 calls left.", Cause.COUNTER),
        ("The weather is fine.", "The weather has turned and the fog bell rings.", Cause.STATE),
        ("Skills: rowing, sailing, knots", "Skills: knots, rowing, sailing", Cause.ORDER),
        ("Summary of the conversation so far: nothing.", "Summary of the conversation so far: the Petrel has a berth.", Cause.SUMMARY),
        ("Notes of proj.\nSummarise seldom.\nIn proj.", "Notes of the harbour.\nSummarise seldom.\nIn the harbour.", Cause.STATE),
    ],
)
def test_what_changed_in_the_system_text_is_named(was: str, now: str, cause: Cause) -> None:
    found = only_finding(with_system_line(conversation(1), [was, now]))
    assert (found.cause, found.writer) == (cause, "system")
    assert "system" in found.fix


def test_position_context_and_cost() -> None:
    bodies = with_system_line(conversation(1), ["It is 09:26:53 now.", "It is 09:27:10 now."])
    found = only_finding(bodies)
    assert found.request == 2
    assert found.previous == 1
    text = f"<system>\n{bodies[1]['messages'][0]['content']}\n"
    assert found.char == text.index("09:27") + len("09:2")
    assert found.token == found.char // 4
    assert found.context.before.endswith("It is 09:2")
    assert found.context.was.startswith("6:53")
    assert found.context.now.startswith("7:10")
    again = (
        len(text)
        - text.index(" now.")
        + sum(len(json.dumps(one)) + 1 for one in TOOLS)
        + len("<user>\nIs there room for the Petrel on Friday?\n")
    )
    assert abs(found.cost_tokens - again / 4) <= 1  # all that stood behind the clock, and the clock itself not


def test_tools_in_another_order_and_with_another_order_of_keys() -> None:
    bodies = conversation(1)
    bodies[1]["tools"] = [TOOLS[1], TOOLS[0], TOOLS[2]]
    found = only_finding(bodies)
    assert (found.cause, found.writer) == (Cause.ORDER, "tool 0 'list_ships'")
    assert "sort" in found.fix
    bodies = conversation(1)
    bodies[1]["tools"][1]["function"] = dict(reversed(list(TOOLS[1]["function"].items())))
    found = only_finding(bodies)
    assert (found.cause, found.writer) == (Cause.ORDER, "tool 1 'list_ships'")
    assert "keys" in found.detail


@pytest.mark.parametrize("change", ["added", "removed", "replaced", "none left", "description"])
def test_another_set_of_tools(change: str) -> None:
    bodies = conversation(1)
    tools: list[dict[str, Any]] = bodies[1]["tools"]
    if change == "added":
        tools.append(tool("ring_bell"))
    elif change == "removed":
        del tools[1]
    elif change == "replaced":
        tools[1] = tool("ring_bell")
    elif change == "none left":
        tools.clear()
    else:
        tools[1]["function"]["description"] = "Lists what lies at the piers."
    assert only_finding(bodies).cause is Cause.TOOL_SET


def test_an_address_in_a_schema_is_an_id() -> None:
    bodies = conversation(1)
    for body, address in zip(bodies, ("0x7f3a10c2b4d0", "0x7f91c02b1a30")):
        body["tools"][1]["function"]["description"] = f"list_ships(cfg=<Cfg object at {address}>)"
    assert (only_finding(bodies).cause, only_finding(bodies).writer) == (Cause.ID, "tool 1 'list_ships'")


def _call(body: dict[str, Any], at: int) -> dict[str, Any]:
    return body["messages"][at]["tool_calls"][0]


def test_arguments_written_differently() -> None:
    for text in ('{"day":"friday","size":0}', '{"size": 0, "day": "friday"}', '{\n  "day": "friday",\n  "size": 0\n}'):
        bodies = conversation(2)[1:]
        _call(bodies[1], 2)["function"]["arguments"] = text
        found = only_finding(bodies)
        assert (found.cause, found.writer) == (Cause.ARGUMENTS, "message 2 (assistant)")


@pytest.mark.parametrize("form", ["field", "block", "beside"])
def test_reasoning_that_is_gone(form: str) -> None:
    bodies = conversation(2)[1:]
    spoken = bodies[0]["messages"][2]
    if form == "field":
        spoken["reasoning_content"] = "The user wants a berth, so look at the piers."
    elif form == "block":
        spoken["content"] = f"<think>\nLook at the piers.\n</think>\n\n{spoken['content']}"
    else:
        bodies[1]["messages"][2]["content"] = None
    assert only_finding(bodies).cause is Cause.REASONING


def test_ids_of_calls_made_anew() -> None:
    bodies = conversation(2)[1:]
    _call(bodies[1], 2)["id"] = bodies[1]["messages"][3]["tool_call_id"] = "call_zzz999"
    assert only_finding(bodies).cause is Cause.ID


def test_results_in_another_order() -> None:
    bodies = conversation(2)[1:]
    calls = [{"id": f"c{n}", "type": "function", "function": {"name": "find_berth", "arguments": f'{{"berth": "{n}"}}'}} for n in range(2)]
    results = [{"role": "tool", "tool_call_id": f"c{n}", "content": f"berth {'ab'[n]} is {'free' if n else 'taken'}"} for n in range(2)]
    for body, order in zip(bodies, (results, results[::-1])):
        body["messages"][2:4] = [{"role": "assistant", "content": "", "tool_calls": calls}, *order]
    found = only_finding(bodies)
    assert found.cause is Cause.ORDER
    assert "calls" in found.fix


def test_an_old_result_that_is_elided() -> None:
    bodies = conversation(3)[2:]
    bodies[1]["messages"][3]["content"] = "[cleared]"
    found = only_finding(bodies)
    assert (found.cause, found.writer) == (Cause.EDITED, "message 3 (tool)")
    kept = sum(len(message["content"]) for message in bodies[0]["messages"][4:])
    assert found.cost_tokens > kept / 4  # what stood behind the elided message


def test_a_message_put_in_and_taken_out_again() -> None:
    bodies = conversation(4)[2:]
    bodies[1]["messages"].insert(4, {"role": "user", "content": "You tried this before: do something else."})
    found = report(bodies).findings
    assert [finding.cause for finding in found] == [Cause.EDITED, Cause.EDITED]
    assert "put in" in found[0].detail
    assert "taken out" in found[1].detail
    assert found[1].writer == "message 4 (user)"


def test_a_message_for_one_request_at_the_tail() -> None:
    bodies = conversation(2)[1:]
    bodies[0]["messages"].append({"role": "user", "content": "Reminder: be brief."})
    found = only_finding(bodies)
    assert found.cause is Cause.EDITED
    assert "not kept" in found.detail


@pytest.mark.parametrize("role", ["user", "system"])
def test_a_summary_in_place_of_old_messages(role: str) -> None:
    bodies = conversation(4)
    for number, body in enumerate(bodies[2:]):
        body["messages"][1:-3] = [{"role": role, "content": f"What happened: the piers {'abcd'[: number + 2]} were looked at."}]
    assert [finding.cause for finding in report(bodies).findings] == [Cause.SUMMARY] * 3


def test_a_window_over_the_newest_messages() -> None:
    bodies = conversation(4)
    for body in bodies:
        del body["messages"][1:-4]
    found = report(bodies).findings
    assert {finding.cause for finding in found} == {Cause.TRUNCATED}


def test_the_first_difference_wins_and_the_others_are_told() -> None:
    bodies = with_system_line(conversation(2), ["It is 09:26:53.", "It is 09:26:53.", "It is 09:27:10."])[1:]
    bodies[1]["messages"][3]["content"] = "[cleared]"
    found = only_finding(bodies)
    assert found.cause is Cause.CLOCK
    assert found.also == (Cause.EDITED,)


def test_tools_first_decides_what_differs_first() -> None:
    bodies = with_system_line(conversation(1), ["It is 09:26:53.", "It is 09:27:10."])
    bodies[1]["tools"].reverse()
    assert only_finding(bodies).cause is Cause.CLOCK
    assert only_finding(bodies, tools_first=True).cause is Cause.ORDER


def test_a_shorter_or_equal_request_is_no_finding() -> None:
    bodies = conversation(3)
    assert report([bodies[3], bodies[3], bodies[1]]).findings == []


@pytest.mark.parametrize(
    ("was", "now", "cause"),
    [
        ("Rules.\nTime: 09:26\nQ: a\n", "Rules.\nTime: 09:27\nQ: a\nA: b\n", Cause.CLOCK),
        ("Tools:\nadd\nsub\nmul\nUse them.\nQ: a\n", "Tools:\nmul\nadd\nsub\nUse them.\nQ: a\nA: b\n", Cause.ORDER),
        ("Rules.\n\nOne\nTwo\nThree\nFour\nFive\nSix\n", "Rules.\n\nThree\nFour\nFive\nSix\nSeven\n", Cause.TRUNCATED),
    ],
)
def test_raw_prompts(was: str, now: str, cause: Cause) -> None:
    assert only_finding([{"prompt": was}, {"prompt": now}]).cause is cause


def test_raw_prompts_that_grow_are_clean() -> None:
    assert report([{"prompt": "Q: a\nThought:"}, {"prompt": "Q: a\nThought: look\nAct:"}]).findings == []


# Several conversations


def test_conversations_without_ids_are_kept_apart() -> None:
    one, two = conversation(4), conversation(4)
    for body in two:
        body["messages"][1]["content"] = "When does the Gannet leave, and who sails her?"
        for message in body["messages"][2:]:
            message["content"] = message["content"].replace("pier", "quay")
    for number, body in enumerate(one):
        body["messages"][0]["content"] += f"\nIt is 09:{number + 10}:00."
    found = lint([body for pair in zip(one, two) for body in pair])
    assert found.conversations == 2
    assert [(finding.cause, finding.conversation) for finding in found.findings] == [(Cause.CLOCK, "conversation 1")] * 4


def test_the_same_task_again_is_a_conversation_of_its_own() -> None:
    found = lint([*conversation(3), *conversation(3)])
    assert found.conversations == 2
    assert found.findings == []


def test_across_conversations() -> None:
    bodies = [{"conversation_id": str(number), **conversation(0)[0]} for number in range(3)]
    for number, body in enumerate(copy.deepcopy(bodies)):
        body["messages"][0]["content"] = f"It is 2031-03-1{number} 09:26:53 UTC.\n{SYSTEM}"
        bodies[number] = body
    assert lint(bodies).findings == []
    found = lint(bodies, Options(across=True)).findings
    assert [(finding.cause, finding.across) for finding in found] == [(Cause.CLOCK, True)] * 2
    assert found[0].cost_tokens * 4 > sum(len(json.dumps(one)) for one in TOOLS)


# Single requests, values


def test_hazards_are_told_apart_from_findings() -> None:
    bodies = with_system_line(conversation(2), ["The current time is 2031-03-14 09:26:53."] * 3)
    found = report(bodies)
    assert found.findings == []
    (hazard, requests, different), *rest = found.hazards
    assert rest == []
    assert (hazard.cause, hazard.writer, requests, different) == (Cause.CLOCK, "system", 3, 1)


def test_an_answer_that_comes_back_changed_is_a_hazard() -> None:
    bodies = conversation(1)
    said = copy.deepcopy(bodies[1]["messages"][2])
    said["tool_calls"][0]["function"]["arguments"] = '{"day":"friday","size":0}'
    found = lint(
        [
            {"conversation_id": "a", "request": bodies[0], "response": {"choices": [{"message": said}]}},
            {"conversation_id": "a", **bodies[1]},
        ]
    )
    assert found.findings == []
    assert [hazard.cause for hazard, _, _ in found.hazards] == [Cause.ARGUMENTS]


def test_policies_and_examples_are_no_hazards() -> None:
    text = "Refunds take 24 hours. Dates look like 2031-03-14, for example 2031-03-14T09:26:53Z. The gate opens at 6:30. Rule 12 of 2019."
    assert spots(text) == []
    text = "It is Sunday now. The gate opens at 6:30. Time: 9:30. Today we rest. Ships leave at 7:00."
    assert [text[spot.start : spot.stop] for spot in spots(text)] == ["9:30"]


def test_values_are_the_text() -> None:
    text = "It is 2031-03-14T09:26:53Z (Friday), id 6f1d3c1e-8d0e-4a55-9b0f-0d6f3f0a9a11; 3 of 4.5 ☂ \n\tend"
    assert "".join(value.text for value in values(text)) == text


def test_long_rules_of_dashes_are_cut_soon() -> None:
    def took(count: int) -> float:
        before = time.process_time()
        assert "".join(value.text for value in values("-" * count)) == "-" * count
        return time.process_time() - before

    assert took(64_000) < 12 * min(took(16_000) for _ in range(3))  # with a look at all that follows each: 16 times


def test_a_pattern_ends_with_a_long_line() -> None:
    table = ", ".join(f'{{"berth": {number}, "at": "2031-03-14T09:26:53Z"}}' for number in range(2_000))
    assert len(pattern(table, 36, 56)) < 2_000


def test_hidden_text_says_nothing() -> None:
    shown = hidden("The Petrel, berth 12, at 09:26 for Ms Hale")
    assert not {"Petrel", "12", "09:26", "Hale"} & set(shown.replace("<", " ").split())


def test_a_pattern_finds_the_next_value() -> None:
    import re

    text = "Be kind. The current time is 2031-03-14 09:26:53 UTC. Be brief."
    found = pattern(text, text.index("2031"), text.index(" UTC"))
    assert re.search(found, text.replace("14 09:26:53", "15 10:00:01"))
    assert not re.search(found, "Be kind. Be brief.")


def test_said_is_compared_without_its_place() -> None:
    assert Said("user", "a", source=1) == Said("user", "a", source=2)
