"""A memory that grows at its end: what it shows, what it leaves out and when, and what that saves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from cases import system, user
from llama_index.core.base.llms.types import ChatMessage, ToolCallBlock
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.llms.agentcache import AppendOnlyMemory
from llama_index.llms.agentcache.replay import kept

Make = Callable[..., Any]


def _said(count: int) -> list[ChatMessage]:
    return [ChatMessage(role="assistant" if i % 2 else "user", content=f"turn {i} " * 10) for i in range(count)]


def test_nothing_is_left_out_without_a_limit() -> None:
    memory = AppendOnlyMemory(messages=_said(100))
    assert memory.get() == memory.get_all() == _said(100)
    memory.put(user("more"))
    assert memory.get()[-1].content == "more"
    memory.reset()
    assert memory.get() == []


def test_many_turns_go_at_once_and_it_starts_with_a_user_turn() -> None:
    memory = AppendOnlyMemory.from_defaults(token_limit=400, tokenizer_fn=str.split)  # 20 words a message
    starts = []
    for message in _said(100):
        memory.put(message)
        memory.get()
        starts.append(memory.start)
    assert starts[:20] == [0] * 20
    moved = [after - before for before, after in zip(starts, starts[1:]) if after != before]
    assert min(moved) >= 10  # rarely, and then half of it
    assert all(memory.messages[start].role == "user" for start in set(starts))
    assert len(memory.get_all()) == 100


def test_the_last_turn_is_never_left_out() -> None:
    memory = AppendOnlyMemory.from_defaults(token_limit=5, tokenizer_fn=str.split)
    memory.put(user("one two three"))
    memory.put(user("a very long question of more than five words"))
    assert [one.content for one in memory.get()] == ["a very long question of more than five words"]


def test_set_with_the_same_start_changes_nothing() -> None:
    memory = AppendOnlyMemory.from_defaults(token_limit=400, tokenizer_fn=str.split)
    memory.set(_said(40))
    memory.get()
    start = memory.start
    memory.set(_said(42))
    assert memory.start == start > 0
    memory.set(_said(4)[::-1])
    assert memory.start == 0
    assert len(memory.get()) == 4


def test_it_goes_through_json_and_counts_calls() -> None:
    call = ChatMessage(role="assistant", blocks=[ToolCallBlock(tool_call_id="a", tool_name="tide", tool_kwargs={"x": "y " * 50})])
    memory = AppendOnlyMemory(messages=[system("s"), *_said(20), user("now"), call], token_limit=60)
    memory.get()
    again = AppendOnlyMemory.from_dict(memory.to_dict())
    assert again.get() == memory.get()
    assert again.start == memory.start > 0


@pytest.mark.parametrize("options", [{"token_limit": 0}, {"keep_share": 1.0}, {"chat_store": None}])
def test_options_that_cannot_work(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        AppendOnlyMemory.from_defaults(**options)


def test_what_a_full_memory_keeps_of_the_prompt(llm: Make) -> None:
    """Twenty turns with room for about eight: the usual buffer starts a new prompt at each, this one at a few."""
    shares = {}
    for kind in ("buffer", "append"):
        model = llm(*["Answer."] * 20, namespace=kind)
        limit: dict[str, Any] = {"token_limit": 400, "tokenizer_fn": model.count}
        memory: Any = ChatMemoryBuffer.from_defaults(**limit) if kind == "buffer" else AppendOnlyMemory.from_defaults(**limit)
        for turn in range(20):
            memory.put(user(f"Question {turn}: " + "what of the light " * 5))
            memory.put(model.chat([system("You keep the light."), *memory.get()]).message)
        shares[kind] = kept(model.receipts)[8:]
    mean = {kind: sum(one) / len(one) for kind, one in shares.items()}
    assert mean["buffer"] < 0.3
    assert mean["append"] > 0.7
