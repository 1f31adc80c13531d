"""Why a prefix was missed, in the receipt: the cause, who wrote it, and what it cost; and nothing where nothing was lost."""

from __future__ import annotations

from typing import Any

import pytest

from agentcache import Message, ToolCall, miss_report, volatile
from agentcache.layout import Renderer
from agentcache.miss_report import CONVERSATIONS, MissReport
from agentcache.types import Missed
from tests.chat_templates import TOOL_TEMPLATES, episode, tokenizer, tool
from tests.engines import TOOLS, chat, decode, engine, long_text

SYSTEM = "You are the keeper of a lighthouse. {} " + "Write down wind, tide and every ship that passes. " * 6


def asked(system: str, count: int = 1) -> list[dict[str, Any]]:
    return chat(*[f"Question {n}: {long_text(20, n)}" for n in range(2 * count - 1)], system=system)


def look(renderer: Renderer, *requests: tuple[Any, Any]) -> list[Missed | None]:
    misses = MissReport()
    return [misses.explain("default", renderer.render(messages, tools)) for messages, tools in requests]


@pytest.mark.parametrize("name", ["chatml", "first_user"])
def test_an_episode_that_only_grows_has_nothing_to_say(name: str) -> None:
    renderer, whole = Renderer(tokenizer(), chat_template=TOOL_TEMPLATES[name]), episode(3, True)
    tools = [tool("search", "Finds flights."), tool("book", "Books one.")]
    assert look(renderer, *[(whole[:stop], tools) for stop in (2, 4, 6, len(whole))]) == [None] * 4


@pytest.mark.parametrize(
    ("cause", "writer", "system", "tools"),
    [
        ("clock", "system", SYSTEM.format("It is 10:34."), TOOLS),
        ("order", "tool", SYSTEM.format("It is 10:33."), TOOLS[::-1]),
        (None, "", SYSTEM.format("It is 10:33."), TOOLS),
        (None, "", "You sell tickets of the ferry to the islands, and know its prices. " * 5, TOOLS),  # another agent
        (None, "", SYSTEM.format("It is 10:34."), TOOLS[1:]),
    ],
    ids=["clock", "order", "same", "another agent", "other tools"],
)
def test_a_conversation_that_could_begin_as_another_says_why_not(cause: str | None, writer: str, system: str, tools: list[Any]) -> None:
    with engine(chat_template=TOOL_TEMPLATES["chatml"]) as running:
        asked = [chat(f"Question {n}: {long_text(20, n)}", system=SYSTEM.format("It is 10:33.")) for n in range(3)]
        for first in asked[:2]:
            assert running.generate(first, TOOLS, sampling=decode(4)).receipt.missed is None
        begun = [{"role": "system", "content": system}, *asked[2][1:]]
        receipt = running.generate(begun, tools, sampling=decode(4)).receipt
        assert (receipt.missed.cause if receipt.missed else None) == cause
        if receipt.missed:
            assert writer in receipt.missed.writer
            assert 32 <= receipt.missed.cost_tokens < receipt.computed_tokens - 20, "of system and tools, not of the question"
        again = chat(f"Once more: {long_text(40, 9)}", system=SYSTEM.format("It is 10:33."))
        assert running.generate(again, TOOLS, sampling=decode(4)).receipt.missed is None, "both beginnings are cached by now"


def test_instructions_amid_messages_make_no_two_conversations_one() -> None:
    about = {"role": "system", "content": f"The folder holds: {long_text(40, 9)}"}  # as coding agents put it after the question
    renderer, requests = Renderer(tokenizer(), chat_template=TOOL_TEMPLATES["chatml"]), []
    for number in range(2):
        begun = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": f"Question {number}: {long_text(20, number)}"}, about]
        requests += [(begun, []), ([*begun, {"role": "assistant", "content": "Yes."}, {"role": "user", "content": "Go on."}], [])]
    assert look(renderer, *requests) == [None] * 4
    cleared = [requests[-1][0][0], {"role": "user", "content": "Cleared."}, *requests[-1][0][2:], *requests[-1][0][3:]]
    found = look(renderer, *requests, (cleared, []))[-1]
    assert found is not None
    assert found.cause == "edited history"


@pytest.mark.parametrize(
    ("cause", "writer", "change"),
    [
        ("clock", "system", lambda messages, tools: ([{**messages[0], "content": SYSTEM.format("It is 10:34.")}, *messages[1:]], tools)),
        ("order", "tool", lambda messages, tools: (messages, tools[::-1])),
        ("changed tool set", "tool", lambda messages, tools: (messages, tools[1:])),
        (
            "edited history",
            "message",
            lambda messages, tools: ([messages[0], {**messages[1], "content": "Cleared."}, *messages[2:]], tools),
        ),
    ],
)
def test_each_cause_is_named_with_its_writer(cause: str, writer: str, change: Any) -> None:
    with engine(chat_template=TOOL_TEMPLATES["chatml"]) as running:
        before = asked(SYSTEM.format("It is 10:33."), 2)
        first = running.generate(before, TOOLS, sampling=decode(4)).receipt
        assert first.missed is None
        grown = [*before, {"role": "assistant", "content": "Yes."}, {"role": "user", "content": "And now?"}]
        messages, tools = change(grown, TOOLS)
        receipt = running.generate(messages, tools, sampling=decode(4)).receipt
        assert receipt.missed is not None
        assert receipt.missed.cause == cause
        assert writer in receipt.missed.writer
        assert receipt.missed.fix
        assert 32 <= receipt.missed.cost_tokens <= receipt.computed_tokens
        assert receipt.missed.token <= receipt.cached_tokens + 1
        assert receipt.as_dict()["missed"]["cause"] == cause


def test_what_an_earlier_prompt_had_left_is_no_miss() -> None:
    """Two that alternate: the prompt before it is another one, and all of it is there from the one before that."""
    with engine(chat_template=TOOL_TEMPLATES["chatml"]) as running:
        told = [
            running.generate(asked(SYSTEM.format(f"It is 10:{minute}."), 2), TOOLS, sampling=decode(4)).receipt for minute in (33, 34, 33)
        ]
        assert told[1].missed is not None
        assert told[2].computed_tokens < 32
        assert told[2].missed is None


def test_tail_text_is_no_miss_and_reuse_off_asks_nothing() -> None:
    with engine(chat_template=TOOL_TEMPLATES["chatml"]) as running:
        for clock in ("It is 10:33.", "It is 10:34."):
            receipt = running.generate(asked(SYSTEM.format(volatile(clock))), TOOLS, sampling=decode(4)).receipt
            assert receipt.missed is None
        for clock in ("It is 10:33.", "It is 10:34."):
            receipt = running.generate(asked(SYSTEM.format(clock)), TOOLS, sampling=decode(4), reuse="off", namespace="off").receipt
            assert receipt.missed is None


def test_other_conversations_and_namespaces_are_not_compared() -> None:
    renderer = Renderer(tokenizer(), chat_template=TOOL_TEMPLATES["chatml"])
    misses = MissReport()
    one, other = (chat(long_text(60, salt), system="S") for salt in (1, 2))
    assert misses.explain("a", renderer.render(one)) is None
    assert misses.explain("a", renderer.render(other)) is None
    changed = [{"role": "system", "content": "It is 10:33. S"}, *one[1:]]
    assert misses.explain("b", renderer.render(changed, namespace="b")) is None
    assert misses.explain("a", renderer.render(changed)) is not None
    for number in range(3 * CONVERSATIONS):
        misses.explain("a", renderer.render(chat(long_text(8, number), system="S")))
    assert len(misses.prompts("a").compared) <= CONVERSATIONS


def test_each_question_about_the_same_text_is_another_conversation() -> None:
    """As LlamaIndex's DocumentContextExtractor asks: the document in one message, a chunk of it in the next."""
    renderer, text = Renderer(tokenizer(), chat_template=TOOL_TEMPLATES["chatml"]), long_text(90, 1)
    asks = [f"{long_text(30, salt)}\n\nSay where in the whole document this chunk stands, for a search of it." for salt in (2, 3, 4)]
    asked = [([{"role": "user", "content": text}, {"role": "user", "content": ask}], []) for ask in asks]
    assert look(renderer, *asked) == [None, None, None]
    edited = [{"role": "user", "content": f"Draft. {text}"}, *asked[2][0][1:]]
    missed = look(renderer, asked[2], (edited, []))[1]
    assert missed is not None
    assert missed.writer == "message 0 (user)"


def test_a_conversation_is_known_by_its_first_and_last_prompt() -> None:
    """Lint compares from the first prompt on that goes on from no other; what came before counts as if it had always compared."""
    renderer = Renderer(tokenizer(), chat_template=TOOL_TEMPLATES["chatml"])
    grown = [renderer.render(asked(SYSTEM.format("It is 10:33."), count)) for count in (1, 2, 3)]
    moved = renderer.render(asked(SYSTEM.format("It is 10:34."), 4))
    lazy, compared = MissReport(), MissReport()
    compared.explain("default", grown[0])
    assert len(compared.prompts("default").compared) == 1
    for one in grown:
        assert lazy.explain("default", one) is None
        assert compared.explain("default", one) is None
    missed = lazy.explain("default", moved)
    assert missed is not None
    assert missed == compared.explain("default", moved)
    assert len(lazy.prompts("default").compared) == 1


def test_last_prompts_are_bounded_in_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(miss_report, "CHARS", 5000)
    renderer, misses = Renderer(tokenizer(), chat_template=TOOL_TEMPLATES["chatml"]), MissReport()
    for number in range(8):
        misses.explain("a", renderer.render(chat(f"{number} {long_text(200, number)}", system="S")))
    assert 0 < misses.prompts("a").compared.chars <= 5000


def test_arguments_in_another_order_of_keys_are_named() -> None:
    renderer = Renderer(tokenizer(), chat_template=TOOL_TEMPLATES["chatml"])
    tools = [tool("search", "Finds flights.")]

    def called(arguments: dict[str, Any]) -> list[Any]:
        call = Message("assistant", "", (ToolCall("search", arguments, "c1"),))
        return [Message("user", "Go"), call, Message("tool", long_text(40), tool_call_id="c1"), Message("user", "And?")]

    first, second = look(renderer, (called({"city": "Lisbon", "day": 3}), tools), (called({"day": 3, "city": "Lisbon"}), tools))
    assert first is None
    assert second is not None
    assert second.cause in ("order", "re-serialised arguments")


def test_a_redacted_account_names_no_tool() -> None:
    with engine(chat_template=TOOL_TEMPLATES["chatml"], redact=True) as running:
        messages = asked(SYSTEM.format(""), 2)
        running.generate(messages, TOOLS, sampling=decode(4))
        grown = [*messages, {"role": "assistant", "content": "Yes."}, {"role": "user", "content": "And now?"}]
        missed = running.generate(grown, TOOLS[1:], sampling=decode(4)).receipt.as_dict()["missed"]
        assert missed["cause"] == "changed tool set"
        assert not any(tool["function"]["name"] in str(missed) for tool in TOOLS)


@pytest.mark.parametrize("moved", ["wrapped", "joined"])
def test_text_that_stood_inside_other_text_is_counted_and_told(moved: str) -> None:
    """A message that was shown with a state around it, and one that is joined to the turn before it: computed again, word for word."""
    renderer, told = Renderer(tokenizer(), chat_template=TOOL_TEMPLATES["chatml"]), long_text(60, 1)
    system, step = {"role": "system", "content": SYSTEM}, {"role": "assistant", "content": "I look it up."}
    if moved == "wrapped":
        before = [system, {"role": "user", "content": f"Current state:\nlit\n\nCurrent message:\n{told}\n"}]
        after = [system, {"role": "user", "content": told}, step, {"role": "user", "content": "And now?"}]
    else:
        asked = [system, *[{"role": role, "content": long_text(30, n)} for n, role in enumerate(("user", "assistant", "user"))]]
        before = [*asked, step, {"role": "user", "content": told}]
        after = [*asked, {"role": "assistant", "content": f"I look it up.\n{told}\nIt is."}, {"role": "user", "content": "And now?"}]
    _, missed = look(renderer, (before, []), (after, []))
    assert missed is not None
    assert missed.cause == "edited history"
    words = len(renderer.render([{"role": "user", "content": told}]).ids)
    assert 0.8 * words < missed.cost_tokens <= words + 16
    assert ("taken out again" in missed.fix) is (moved == "wrapped")
