"""`cache_control` beside time limits and cancelling: a pin is made when the answer is there, and holds nobody up."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest
import script
from harbour import ASKED
from langchain_agentcache import errors
from langchain_agentcache._messages import converted
from langchain_core import exceptions as theirs
from langchain_core.messages import HumanMessage, SystemMessage

PINNED = {"cache_control": {"type": "ephemeral"}}
SLOW_S = 2.0
LONG = [SystemMessage("You keep a light. Wind and tide: " + "north, high; " * 1500), HumanMessage("x")]


@pytest.fixture
def pins(chat: Any, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the engine pinned for a time."""
    engine, made = chat()._engine(), []
    original = engine.pin

    def pin(*said: Any, **options: Any) -> Any:
        group = original(*said, **options)
        if "ttl_s" in options:
            made.append(group)
        return group

    monkeypatch.setattr(engine, "pin", pin)
    return made


@pytest.fixture
def steps(chat: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tokens of each step of the device, which is slow here: all of the long prompt take SLOW_S and more."""
    done: list[int] = []
    runner = chat()._engine().scheduler.runner
    original = type(runner).run

    def slow(self: Any, work: Any) -> Any:
        time.sleep(SLOW_S / 20)
        done.append(sum(len(each.ids) for each in work))
        return original(self, work)

    monkeypatch.setattr(type(runner), "run", slow)
    return done


async def astreamed(model: Any, messages: Any) -> Any:
    return [piece async for piece in model.astream(messages, **PINNED)][-1]


WAYS: dict[str, Callable[[Any, Any], Any]] = {
    "invoke": lambda model, messages: model.invoke(messages, **PINNED),
    "stream": lambda model, messages: list(model.stream(messages, **PINNED))[-1],
    "ainvoke": lambda model, messages: asyncio.run(model.ainvoke(messages, **PINNED)),
    "astream": lambda model, messages: asyncio.run(astreamed(model, messages)),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_pin_finds_what_the_request_computed(chat: Any, pins: list[Any], way: str) -> None:
    messages = [SystemMessage("You keep a light. " * 40), HumanMessage("x")]
    answered = WAYS[way](chat(max_tokens=2), messages)
    (group,) = pins
    assert group.name.startswith("pinned-")
    assert group.prefix_tokens > 200
    assert group.computed_tokens < 20
    assert answered.usage_metadata["input_token_details"]["cache_creation"] >= group.prefix_tokens, "the request has paid for it"
    again = WAYS[way](chat(max_tokens=2), messages)
    assert again.usage_metadata["input_token_details"]["cache_read"] >= group.prefix_tokens - 1
    assert pins[0] is pins[-1], "it is only prolonged"


@pytest.mark.parametrize("way", WAYS)
def test_a_time_limit_holds_for_a_prompt_to_pin(chat: Any, pins: list[Any], steps: list[int], way: str) -> None:
    model = chat(max_tokens=1, timeout=SLOW_S / 10)
    with pytest.raises(theirs.ModelTimeoutError, match="passed before the completion ended"):
        WAYS[way](model, LONG)
    assert script.until(lambda: not model._engine().scheduler.live)
    assert sum(steps) < model.get_num_tokens_from_messages(LONG) - 1024, "the device was left alone at once"
    assert pins == []


async def test_cancelling_ends_the_prompt_that_is_to_be_pinned(chat: Any, pins: list[Any], steps: list[int]) -> None:
    model = chat(max_tokens=1)
    engine = model._engine()
    task = asyncio.create_task(model.ainvoke(LONG, **PINNED))
    assert await asyncio.to_thread(script.until, lambda: steps)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert await asyncio.to_thread(script.until, lambda: not engine.scheduler.live)
    assert sum(steps) < model.get_num_tokens_from_messages(LONG) - 1024
    assert pins == []


def test_what_is_not_answered_is_not_pinned(chat: Any, pins: list[Any]) -> None:
    for _ in chat(max_tokens=500).stream(ASKED, **PINNED):
        break
    with pytest.raises(errors.ContextOverflowError):
        chat(num_ctx=10).invoke(ASKED, **PINNED)
    assert pins == []


def test_a_pin_that_was_forgotten_is_made_again(chat: Any, pins: list[Any]) -> None:
    model, messages = chat(max_tokens=2), [SystemMessage("You keep a light. " * 40), HumanMessage("x")]
    for _ in range(2):
        model.invoke(messages, **PINNED)
    engine = model._engine()
    assert pins[-1] in engine.groups
    engine.forget(namespace=model.namespace)
    assert pins[-1] not in engine.groups
    model.invoke(messages, **PINNED)
    assert pins[-1] in engine.groups
    assert pins[-1] is not pins[0]


def test_a_cache_point_of_bedrock_pins_what_is_before_it(chat: Any, pins: list[Any]) -> None:
    """As histories have them that ChatBedrockConverse began: a block of its own, in a message of any kind."""
    point = {"cachePoint": {"type": "default", "ttl": "1h"}}
    system = SystemMessage([{"type": "text", "text": "You keep a light."}, point, {"type": "text", "text": "It is noon."}])
    chat().invoke([system, HumanMessage([{"type": "text", "text": ASKED}, point])])
    tagged = SystemMessage([{"type": "text", "text": "You keep a light.", "cache_control": {"ttl": "1h"}}, system.content[2]])
    assert len(pins) == 2
    assert converted([system]) == converted([tagged])
