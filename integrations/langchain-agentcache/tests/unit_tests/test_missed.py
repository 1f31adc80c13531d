"""What was computed again is told: cause, cure and LangChain's name for it, in the metadata of each answer and in one warning per cause."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import pytest
import script
from harbour import log, tide
from langchain.agents import create_agent
from langchain.agents.middleware import dynamic_prompt
from langchain_agentcache import AgentCacheMiddleware, ChatAgentCache, _caller_warnings, _miss_hints
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage

from agentcache import Missed, MissWarnings, Receipt
from agentcache.lint.values import Cause

KEEPER = "You are the keeper of a lighthouse. Write down wind, tide and every ship that passes. " * 3


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that begins."""
    monkeypatch.setattr(_caller_warnings.caller_warnings, "_said", {})
    monkeypatch.setattr(_miss_hints, "_warnings", MissWarnings(_miss_hints.SELDOM))


@pytest.fixture
def model(chat: Any, monkeypatch: pytest.MonkeyPatch) -> ChatAgentCache:
    monkeypatch.setitem(script.LINES, "When is high water?", script.call("tide", harbour="Averil"))
    return chat(max_tokens=8)


def heard(ask: Any) -> list[str]:
    """What is warned of while this runs."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        ask()
    return [str(each.message) for each in said if "computed again" in str(each.message)]


def at(clock: str, *more: Any) -> list[Any]:
    return [SystemMessage(f"It is {clock}. {KEEPER}"), HumanMessage("Hello"), *more]


@pytest.mark.parametrize("way", ["invoke", "stream"])
def test_a_cause_is_told_once_and_stands_in_every_answer(model: ChatAgentCache, way: str) -> None:
    def ask(clock: str) -> dict[str, Any]:
        if way == "invoke":
            return model.invoke(at(clock)).response_metadata["agentcache"]
        return [chunk.response_metadata["agentcache"] for chunk in model.stream(at(clock)) if chunk.response_metadata.get("agentcache")][-1]

    assert ask("10:30")["missed"] is None
    found: list[Any] = []
    (text,) = heard(lambda: found.extend(ask(clock) for clock in ("10:31", "10:32")))
    assert "clock (system)" in text
    assert "AgentCacheMiddleware(volatile=...)" in text
    assert [each["missed"]["cause"] for each in found] == ["clock", "clock"]
    assert all("volatile" in each["missed"]["hint"] and each["missed"]["fix"] for each in found)


async def test_other_causes_are_told_beside_it(model: ChatAgentCache) -> None:
    def tools() -> None:
        for bound in ([tide, log], [log, tide], [tide]):
            model.bind_tools(bound).invoke(at("noon"))

    texts = heard(tools)
    assert ["order" in texts[0], "changed tool set" in texts[1]] == [True, True]
    assert "tools_order='sorted'" in texts[0]
    assert "AgentCacheMiddleware(tools=[...])" in texts[1]


def test_passages_in_another_order_belong_at_the_end(model: ChatAgentCache) -> None:
    known = [f"The mole of harbour {n} has a lamp that is seen for {n} miles." for n in range(8)]

    def ask(found: list[str]) -> None:
        model.invoke([SystemMessage("\n\n".join([KEEPER, *found])), HumanMessage("Hello")])

    ask(known)
    (text,) = heard(lambda: ask(known[::-1]))
    assert "order (system)" in text
    assert "retrieved passages, into the newest message" in text
    assert _miss_hints.HINTS["changed system text"] in text
    assert "tools_order" not in text


def test_shortening_is_told_if_it_does_not_stop(model: ChatAgentCache) -> None:
    turns = [each for n in range(6) for each in (HumanMessage(f"Ship {n} passes, and says so with flags."), AIMessage(f"Noted: {n}."))]

    def ask(first: int) -> None:
        model.invoke([SystemMessage(KEEPER), *turns[first : first + 5]])

    ask(0)
    assert heard(lambda: ask(2)) == []
    (text,) = heard(lambda: ask(4))
    assert "truncated history" in text
    assert "SummarizationMiddleware" in text


def test_the_middleware_says_it_with_a_name_instead(model: ChatAgentCache) -> None:
    clock = itertools.count(10)

    @dynamic_prompt
    def timed(request: Any) -> str:
        return f"It is {next(clock)}:30. {KEEPER}"

    def ask(on_change: Any) -> None:
        agent = create_agent(model, [tide], middleware=[timed, AgentCacheMiddleware(on_change=on_change)])
        agent.invoke({"messages": [HumanMessage("When is high water?")]})

    model.max_tokens = 40
    (text,) = heard(lambda: ask("warn"))
    assert text.startswith("timed changed the system prompt")
    assert heard(lambda: ask("ignore")) == []


def test_a_redacted_account_names_nobody() -> None:
    missed = Missed("clock", "system prompt of alice", 3, 10, 200, "alice's clock goes to the end")
    (text,) = heard(lambda: _miss_hints.tell_missed(Receipt(missed=missed, redacted=True).as_dict()["missed"]))
    assert text.startswith("200 prompt tokens were computed again: clock ((redacted)).")
    assert "alice" not in text
    assert _miss_hints.HINTS["clock"] in text


def test_every_hint_is_about_a_cause() -> None:
    assert _miss_hints.HINTS.keys() <= {str(cause) for cause in Cause}
