"""`Engine.pin`: the start of a conversation stays in memory, and every continuation begins with it."""

from __future__ import annotations

import gc
import math
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from agentcache import Engine, EngineLease, Message, Tool, ToolCall
from agentcache.errors import AgentCacheError, ConfigError
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


# -- timed pins ----------------------------------------------------------------------------------------------------


@pytest.fixture
def running() -> Iterator[Engine]:
    with engine() as made:
        yield made


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, to be moved on."""
    at = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: at[0])
    return at


def ask(running: Engine) -> None:
    running.generate(chat("Anything."), sampling=decode(1))


def test_a_timed_pin_ends_after_its_time(running: Engine, now: list[float]) -> None:
    held = running.pin(TALK[:2], TOOLS, ttl_s=60)
    now[0] += 59
    ask(running)
    assert running.groups == (held,)
    now[0] += 2
    assert running.groups == ()
    assert not running.release(held.name), "it is unpinned, not merely left out of the list"


def test_its_time_is_looked_at_with_every_request(running: Engine, now: list[float]) -> None:
    held = running.pin(TALK[:2], TOOLS, ttl_s=60)
    now[0] += 61
    ask(running)
    assert not running.release(held.name)


def test_asked_for_again_it_only_lasts_longer(running: Engine, now: list[float]) -> None:
    held = running.pin(TALK[:2], TOOLS, name="talk", ttl_s=60, sources=[("note", "digest", 3)])
    assert held.sources == (("note", "digest", 3),)
    forwards = running.scheduler.ms_per_token
    now[0] += 50
    assert running.pin(TALK[:2], TOOLS, name="talk", ttl_s=60) is held
    assert running.scheduler.ms_per_token == forwards, "nothing was computed for it"
    assert running.pin(TALK[:2], TOOLS, name="talk", ttl_s=1) is held, "a shorter time does not shorten it"
    now[0] += 50
    assert running.groups == (held,)
    now[0] += 11
    assert running.groups == ()


def test_timed_pins_of_one_name_stand_beside_each_other(running: Engine) -> None:
    first, second = (running.pin(TALK[:stop], TOOLS, name="talk", ttl_s=60) for stop in (1, 2))
    assert first.name != second.name
    assert first.name.startswith("talk-")
    assert set(running.groups) == {first, second}
    assert running.pin(TALK[:1], TOOLS, name="talk", ttl_s=60, template_kwargs={"x": 1}).name not in {first.name, second.name}
    assert running.pin(TALK[:1], TOOLS, name="talk", ttl_s=60, namespace="alice").namespace == "alice"
    assert running.pin(TALK[:1], name="plain").name == "plain", "without a time, a name is a name"


def test_a_lease_takes_its_pins_with_it(running: Engine) -> None:
    with EngineLease() as lease:
        running.pin(TALK[:2], TOOLS, ttl_s=math.inf, lease=lease)
        running.pin(TALK[:1], TOOLS, ttl_s=60, lease=lease)
        assert len(running.groups) == 2
    assert running.groups == ()
    lease.release()


def test_a_pin_stays_for_the_last_of_its_leases(running: Engine, now: list[float]) -> None:
    one, other = EngineLease(), EngineLease()
    held = running.pin(TALK[:2], TOOLS, ttl_s=3600, lease=one)
    assert running.pin(TALK[:2], TOOLS, ttl_s=5, lease=other) is held
    other.release()
    assert running.groups == (held,)
    assert running.pin(TALK[:2], TOOLS, ttl_s=5) is held
    one.release()
    assert running.groups == (held,), "somebody without a lease asked for it, too"
    now[0] += 6
    assert running.groups == ()


def test_the_pins_of_a_lease_that_is_collected_end(running: Engine) -> None:
    lease = EngineLease()
    running.pin(TALK[:2], TOOLS, ttl_s=math.inf, lease=lease)
    del lease
    gc.collect()
    assert running.groups == ()


def test_what_was_unpinned_otherwise_is_pinned_anew(running: Engine) -> None:
    held = running.pin(TALK[:2], TOOLS, ttl_s=60)
    running.release(held.name)
    assert running.pin(TALK[:2], TOOLS, ttl_s=60).name == held.name
    running.forget(namespace="default")
    again = running.pin(TALK[:2], TOOLS, ttl_s=60)
    assert running.groups == (again,)
    assert again.computed_tokens == again.prefix_tokens, "its pages were deleted"
    with torch.no_grad():
        next(running.model.model.parameters()).mul_(1.5)
    other = running.pin(TALK[:2], TOOLS, ttl_s=60)
    assert other is not again
    assert other.computed_tokens == again.prefix_tokens, "other weights, other pages"


def test_a_time_that_ends_meanwhile_unpins_no_new_group(running: Engine, now: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    held = running.pin(TALK[:2], TOOLS, ttl_s=60)
    running.release(held.name)
    groups, hold = running._groups, running._groups.hold

    def then_asked(*given: Any) -> Any:
        made = hold(*given)
        now[0] += 61
        groups.lapse()  # as another thread's request does
        return made

    monkeypatch.setattr(groups, "hold", then_asked)
    made = running.pin(TALK[:2], TOOLS, ttl_s=60)
    assert running.groups == (made,)


def test_of_two_that_ask_at_once_one_computes(running: Engine) -> None:
    made: list[Any] = []
    threads = [threading.Thread(target=lambda: made.append(running.pin(TALK[:2], TOOLS, ttl_s=60))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made[0] is made[1]


def test_a_lease_of_a_closed_engine_is_released_quietly() -> None:
    lease = EngineLease()
    with engine() as running:
        running.pin(TALK[:2], TOOLS, ttl_s=60, lease=lease)
    lease.release()


@pytest.mark.parametrize("ttl_s", [0, -1, math.nan, True, "5m"])
def test_a_time_that_is_none_is_refused(running: Engine, ttl_s: Any) -> None:
    with pytest.raises(ConfigError, match="ttl_s=.*: must be a positive number of seconds"):
        running.pin(TALK[:2], TOOLS, ttl_s=ttl_s)
