"""Several agents under one id, several conversations without any: each request is compared with one that it may go on from."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest

from agentcache.lint import Cause, Options, Report, lint
from agentcache.lint.conversations import Conversations
from agentcache.lint.values import Request, Said
from tests.lint.requests import SYSTEM, TOOLS, conversation, tool, with_system_line

PLANNER = [*TOOLS, *(tool(f"plan_{name}") for name in "abcde")]


def planner(steps: int) -> list[dict[str, Any]]:
    return [{**body, "tools": PLANNER} for body in conversation(steps)]


ASKED = conversation(0)[0]["messages"][1]


def titles(bodies: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """After each request of an agent, one of a writer of titles, which is told what the user asked first."""
    for body in bodies:
        yield body
        yield {"messages": [{"role": "system", "content": "Write a title of at most four words."}, ASKED]}


def under_one_id(bodies: Any, **options: Any) -> Report:
    return lint([{"metadata": {"session_id": "s1"}, **body} for body in bodies], Options(**options))


def test_two_agents_under_one_id_are_compared_each_with_itself() -> None:
    bodies = list(titles(planner(4)))
    found = under_one_id(bodies)
    assert found.findings == []
    assert [step.conversation for step in found.steps] == ["s1", "s1 (2)"] * 5
    assert found.conversations == 2
    assert found.totals()["reused_share"] > 0.9


def test_unrelated_calls_are_conversations_of_their_own() -> None:
    bodies = list(titles(planner(3)))
    for at, asked in zip((1, 3, 5, 7), ("Petrel berth Friday", "ahoy, who sails there?", "Why?", "The mast broke: what now?"), strict=True):
        bodies[at]["messages"][1] = {"role": "user", "content": asked}
    found = under_one_id(bodies)
    assert (found.conversations, found.findings) == (5, [])
    alone = [{"messages": [{"role": "user", "content": body["messages"][1]["content"]}]} for body in bodies[1::2]]
    assert len(under_one_id(alone).findings) == 3  # nobody else speaks under that id: a history that was dropped


@pytest.mark.parametrize("change", ["tools", "other tools", "clock", "text", "all but the words", "summary"])
def test_one_agents_change_is_found_between_anothers_requests(change: str) -> None:
    bodies = planner(4)
    for number, body in enumerate(bodies[2:]):
        system = body["messages"][0]
        if change == "tools":
            body["tools"] = PLANNER[:4]
        elif change == "other tools":
            body["tools"] = [tool("ring_bell")]
        elif change == "clock":
            system["content"] = f"It is 09:{number}7:53.\n{SYSTEM}"
        elif change == "text":
            system["content"] = "Work for the harbour master."
        elif change == "all but the words":
            system["content"], body["tools"] = "Work for the harbour master.", [tool("ring_bell")]
        else:
            system["content"] = f"Summary of the conversation so far: {number} piers were looked at."
            del body["messages"][1:-1]
    found = under_one_id(titles(bodies)).findings
    steps = (5, 7, 9) if change in ("clock", "summary") else (5,)
    assert [(finding.conversation, finding.request, finding.previous) for finding in found] == [("s1", at, at - 2) for at in steps]


def test_a_leading_counter_is_found_at_every_step() -> None:
    bodies = planner(4)
    for number, body in enumerate(bodies):
        body["messages"][0]["content"] = f"Step {number} of 20. {SYSTEM}"
    found = under_one_id(titles(bodies)).findings
    assert [(finding.cause, finding.request, finding.previous) for finding in found] == [
        (Cause.COUNTER, number, number - 2) for number in (3, 5, 7, 9)
    ]


def test_tools_that_come_and_go_are_found_both_times() -> None:
    bodies = conversation(3)
    for body in bodies[1::2]:
        body["tools"] = TOOLS[:2]
    assert [finding.cause for finding in under_one_id(bodies).findings] == [Cause.TOOL_SET] * 3


def test_raw_text_and_messages_under_one_id_are_two_agents() -> None:
    bodies = [each for number, body in enumerate(conversation(3)) for each in (body, {"prompt": "Q: a\n" + "A: b\n" * number})]
    assert under_one_id(bodies).findings == []


def test_an_id_like_a_second_agent_is_its_own() -> None:
    tracks = Conversations()

    def ask(name: str, text: str) -> str:
        said = Said("system", text), Said("user", f"asked of {text}")
        return tracks.place(Request(1, 1, name, (said[0],), (), (said[1],)))[0].name

    assert ask("a (2)", "Sail.") == "a (2)"
    assert [ask("a", "Sail."), ask("a", "Title it: what is said, in four words.")] == ["a", "a (3)"]
    assert ask("a (2)", "Sail.") == "a (2)"


def test_agents_that_are_closed_are_forgotten() -> None:
    closed: list[str] = []
    tracks = Conversations(most=2, closed=closed.append)
    for name, text in (("a", "Sail."), ("a", "Write titles of four words."), ("b", "Sail."), ("a", "Sail.")):
        request = Request(1, 1, name, (Said("system", text),), (), (Said("user", f"{name} asks {text}"),))
        before = tracks.place(request)[1]
    assert before is None
    assert closed == ["a", "a (2)"]


# Without ids


PLACES = [f"quay-{number} of Harbourmaster-{number}-{'abcdefghij'[number % 10] * 9}" for number in range(100)]


def middle(number: int) -> dict[str, Any]:
    """One request of a conversation of its own, in the middle of it."""
    body = copy.deepcopy(conversation(6)[6])
    for message in body["messages"][1:]:
        message["content"] = " ".join(f"{PLACES[number]} {at}{number}" for at in range(3)) + f" {message['content'][:0]}{number}"
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = f'{{"day": "{PLACES[number]}"}}'
    return body


def test_one_prompt_of_each_conversation_is_no_conversation() -> None:
    found = lint([middle(number) for number in range(100)])
    assert (found.conversations, found.findings) == (100, [])


def test_sampled_prompts_do_not_continue_a_beginning() -> None:
    """Nothing that is said in them was said there; only the application is the same."""
    found = lint([conversation(0)[0], *(middle(number) for number in range(20))])
    assert (found.conversations, found.findings) == (21, [])


def test_similar_sampled_prompts_are_not_chained() -> None:
    """The words are an application's own, so overlap alone tells nothing: no request of it was ever gone on from."""
    bodies = [copy.deepcopy(conversation(7)[7]) for _ in range(5)]
    for number, body in enumerate(bodies):
        for message in body["messages"][1:]:
            message["content"] = f"{message['content']} ({number})"
        for message in body["messages"][2:]:
            for call in message.get("tool_calls", ()):
                call["function"]["arguments"] = f'{{"day": "{number}"}}'
    assert (lint(bodies).conversations, lint(bodies).findings) == (5, [])


def test_a_clock_in_a_replaced_history_is_still_one_conversation() -> None:
    bodies = with_system_line(conversation(5), [f"It is 09:{number}7:53." for number in range(6)])
    for body in bodies[2:]:
        del body["messages"][1:-2]
    found = lint(bodies)
    assert found.conversations == 1
    assert len(found.findings) == 5


METEOROLOGIST = "Meteorologist on duty: report the wind in plain words, and say when a gale warning is out."


@pytest.mark.parametrize(("shared", "told"), [([], METEOROLOGIST), (TOOLS, METEOROLOGIST), ([], ""), ([], f"{SYSTEM} In the fog.")])
def test_an_agent_with_a_handed_task_is_another_one(shared: list[Any], told: str) -> None:
    """As a supervisor of LangGraph does, and LlamaIndex's workflow of agents, with the messages so far and without an id.

    An agent without a system text is one for which LangChain's LLMToolSelectorMiddleware asks another model.
    """
    bodies = []
    for body in conversation(2):
        own = [{"role": "system", "content": told}] if told else []
        bodies += [body, {"messages": [*own, *body["messages"][1:]], "tools": [*shared, tool("wind")]}]
    found = lint(bodies)
    assert (found.conversations, found.findings) == (2, [])
    assert found.totals()["reused_share"] > 0.5


@pytest.mark.parametrize(("other", "told"), [(METEOROLOGIST, 0), ("Answer from these passages:\n1. The quay opens at 6.", 3)])
def test_calls_without_tools_are_told_apart_by_system_texts(other: str, told: int) -> None:
    """A router asks about each question, in words of its own, before the agent answers it; passages are another text of the same one."""
    own, bodies = "Answer from these passages:\n1. The mole has a lamp.", []
    for body in conversation(2)[:2]:
        asked = body["messages"][1:]
        bodies += [{"messages": [{"role": "system", "content": text}, *asked]} for text in (own, other)]
    found = lint(bodies)
    assert (found.conversations, len(found.findings)) == (1 if told else 2, told)


def test_summaries_that_are_asked_for_replace_no_history() -> None:
    """As LlamaIndex's SummaryExtractor asks for one of each passage."""
    asked = "Here is the content of the section:\nn: {0}\n\nHarbour {0} has high water at {0}:05; its keeper is called Tom{0}.\n\n" + (
        "Summarize the key topics and entities of the section. \n\nSummary: "
    )
    found = lint([{"messages": [{"role": "user", "content": asked.format(number)}]} for number in range(4)])
    assert (found.conversations, found.findings) == (4, [])


def test_each_question_after_the_same_examples_is_another_one() -> None:
    """However alike: nothing of an earlier question is sent again, and its answer is not."""
    shown = [{"role": role, "content": f"An example of what the {role} writes down."} for role in ("user", "assistant")]
    asked = "What does the keeper write down on day {0} of the month, and why would anyone ask him of such a thing as that?"
    found = lint([{"messages": [*shown, {"role": "user", "content": asked.format(day)}]} for day in range(4)])
    assert (found.conversations, found.findings) == (4, [])


@pytest.mark.parametrize("answered", [False, True])
def test_the_same_instruction_after_other_texts_continues_none(answered: bool) -> None:
    """LlamaIndex asks for the facts of each part of a conversation that its memory lets go: nothing was edited."""
    told = ["I like tea, and my boat is red.", "Where does the ferry to Port Averil leave?", "My cat sleeps all day long."]
    said = [{"role": "assistant", "content": f"So it is, as of number {len(text)}."} if answered else None for text in told]
    found = lint([_extracted(text, reply) for text, reply in zip(told, said)])
    assert (found.conversations, found.findings) == (3, [])
    found = lint([_extracted(" ".join(told[:number]), None) for number in (1, 2, 3)])  # one text that grows before the instruction
    assert (found.conversations, len(found.findings)) == (1, 2)


def _extracted(text: str, reply: dict[str, str] | None) -> dict[str, Any]:
    asked = "Extract the facts from the conversation above, one to a line, and nothing else. " * 4
    turns = [{"role": "user", "content": text}, reply, {"role": "user", "content": asked}]
    return {"messages": [turn for turn in turns if turn]}
