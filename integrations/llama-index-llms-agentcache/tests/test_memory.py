"""A memory that grows at its end: what it shows, what it leaves out and when, and what that saves."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import llama_index.core
import pytest
from cases import system, tiny, user
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.base.llms.types import ChatMessage, ToolCallBlock
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.core.workflow import Context
from llama_index.llms.agentcache import AppendOnlyMemory
from llama_index.llms.agentcache.replay import kept

Make = Callable[..., Any]


@pytest.fixture(autouse=True)
def _no_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """LlamaIndex sets its own for all of the process once something of it counts tokens: a test of another file may have."""
    monkeypatch.setattr(llama_index.core, "global_tokenizer", None)


def _said(count: int) -> list[ChatMessage]:
    return [ChatMessage(role="assistant" if i % 2 else "user", content=f"turn {i} " * 10) for i in range(count)]


def test_nothing_is_left_out_without_a_limit() -> None:
    memory = AppendOnlyMemory(messages=_said(100))
    assert memory.get() == memory.get_all() == _said(100)
    memory.put(user("more"))
    assert memory.get()[-1].content == "more"
    memory.reset()
    assert memory.get() == []


def test_many_turns_go_at_once_up_to_a_user_turn() -> None:
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


def _spelled() -> list[ChatMessage]:
    """Messages with far more tokens than a quarter of their letters."""
    return [ChatMessage(role="assistant" if i % 2 else "user", content="§¶ø " * 10) for i in range(40)]


def test_a_memory_that_was_saved_counts_with_the_same_model(llm: Make) -> None:
    model = llm()
    memory = AppendOnlyMemory.from_defaults(_spelled(), llm=model, token_limit=400)
    again = AppendOnlyMemory.from_dict(json.loads(memory.to_json()))
    assert again.get() == memory.get()
    assert copy.deepcopy(again).get() == memory.get()
    assert again.start == memory.start > 20
    guessed = AppendOnlyMemory(messages=_spelled(), token_limit=400)  # a quarter of its letters
    guessed.get()
    assert guessed.start == 0


def test_each_run_in_one_context_counts_with_the_model(llm: Make, run: Make) -> None:
    """LlamaIndex saves and restores a context's memory between its runs."""
    model = llm("One.", "Two.")

    async def ask() -> AppendOnlyMemory:
        agent = FunctionAgent(llm=model)
        ctx, memory = Context(agent), AppendOnlyMemory.from_defaults(_spelled(), llm=model, token_limit=10_000)
        await agent.run("Lit?", ctx=ctx, memory=memory)
        await agent.run("Lit now?", ctx=ctx)
        return await ctx.store.get("memory")

    memory = run(ask())
    assert len(memory.get_all()) == 44
    assert memory._size(_spelled()[0]) == len(model.count("§¶ø " * 10)) > 20


def test_a_memory_falls_back_to_the_settings_tokenizer(llm: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = AppendOnlyMemory.from_defaults(llm=llm(), tokenizer_fn=list, token_limit=400)
    assert memory._size(user("one two")) == 7
    again = AppendOnlyMemory.from_dict(memory.to_dict())
    assert again._size(user("one two")) == 1
    monkeypatch.setattr(llama_index.core, "global_tokenizer", str.split)  # what Settings.tokenizer = ... sets
    assert again._size(user("one two")) == 2
    assert memory._size(user("one two")) == 7
    gone = AppendOnlyMemory(messages=_said(1), counter="a model that is not open here")
    assert gone._size(user("one two")) == 2


def test_a_closed_model_counts_no_tokens(llm: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama_index.core, "global_tokenizer", str.split)
    with tiny() as engine:
        engine.name = "a name of its own"
        memory = AppendOnlyMemory.from_defaults(llm=llm(engine=engine), token_limit=400)
        assert memory._size(user("§¶ø " * 10)) > 20
    assert memory._size(user("§¶ø " * 10)) == 10


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
