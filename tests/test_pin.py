"""`Engine.pin`: the start of a conversation stays in memory, and every continuation begins with it."""

from __future__ import annotations

from typing import Any

import pytest

from agentcache import Message, Tool, ToolCall
from agentcache.errors import AgentCacheError
from agentcache.layout import Renderer
from tests import chat_templates
from tests.chat_templates import TOOL_TEMPLATES
from tests.engines import SYSTEM, TOOLS, chat, decode, engine, long_text

LOOK = Tool("search", "Finds things.", {"type": "object", "properties": {"q": {"type": "string"}}})
TALK = [
    Message("system", "You keep a log."),
    Message("user", "Where is the boat?"),
    Message("assistant", "", (ToolCall("search", {"q": "boat"}, id="abcdefghi"),)),
    Message("tool", "At the pier.", tool_call_id="abcdefghi", name="search"),
    Message("assistant", "It is at the pier."),
    Message("user", "And the oars?"),
]


@pytest.mark.parametrize("stop", range(1, len(TALK) + 1))
@pytest.mark.parametrize("name", sorted(TOOL_TEMPLATES))
def test_the_opening_starts_what_comes(name: str, stop: int) -> None:
    renderer = Renderer(chat_templates.tokenizer("byte_bpe", TOOL_TEMPLATES[name]))
    opening = renderer.opening(TALK[:stop], [LOOK])
    coming = [one for one in range(stop, len(TALK) + 1) if TALK[one - 1].role in ("user", "tool")][:1]
    for end in coming:
        ids = list(renderer.render(TALK[:end], [LOOK]).ids)
        assert ids[: len(opening.ids)] == list(opening.ids), f"{name}: {end} turns do not begin with the opening of {stop}"
    assert all(span.stop <= len(opening.ids) for span in opening.spans)


def test_it_reaches_as_far_as_the_conversation() -> None:
    renderer = Renderer(chat_templates.tokenizer("byte_bpe", chat_templates.CHATML))
    for stop in range(2, len(TALK) + 1):
        said = renderer.opening(TALK[:stop], [LOOK]).text
        assert (TALK[stop - 1].content or "boat") in said
        assert "sentinel" not in said.lower()


def test_a_pinned_conversation_survives_pressure_and_is_let_go() -> None:
    talk = chat("What is the wind? " + long_text(150), "North, four.", "And the tide?", system=SYSTEM)
    with engine(memory_bytes=6 * page_bytes()) as running:
        held = running.pin(talk, TOOLS, name="talk")
        assert held.prefix_tokens > 600
        press(running, 0)
        asked = [*talk, Message("assistant", "High at two."), Message("user", "Sure?")]
        for messages in (talk, asked):
            assert running.generate(messages, TOOLS, sampling=decode(1)).receipt.cached_tokens >= held.prefix_tokens - 1
        assert running.release("talk")
        press(running, 50)
        assert running.generate(talk, TOOLS, sampling=decode(1)).receipt.cached_tokens < held.prefix_tokens - 1


def page_bytes() -> int:
    with engine() as running:
        return int(running.model.spec.page_bytes)  # type: ignore[union-attr]


def press(running: Any, first: int) -> None:
    for i in range(6):
        running.generate(chat(long_text(5, i), system=long_text(130, first + i)), sampling=decode(1))


def test_what_cannot_be_pinned_is_named() -> None:
    with engine() as running:
        for messages in ("a text", [{"role": "nobody", "content": "x"}]):
            with pytest.raises(AgentCacheError):
                running.pin(messages)
