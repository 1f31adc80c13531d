"""ChatAgentCache over a small model: what goes in, what comes out, and what happens when neither can be."""

from __future__ import annotations

import asyncio
import json
import shutil
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import script
from harbour import ASKED, SYSTEM, log, tide
from langchain_agentcache import ChatAgentCache, errors
from langchain_agentcache._messages import converted
from langchain_core import exceptions as theirs
from langchain_core.callbacks import UsageMetadataCallbackHandler
from langchain_core.messages import (
    AIMessage,
    ChatMessage,
    HumanMessage,
    RemoveMessage,
    SystemMessage,
    ToolMessage,
)

from agentcache import Engine, Message, ToolCall, toy
from agentcache import errors as own

# -- answers -----------------------------------------------------------------------------------------------------------


def test_a_step_pays_for_its_new_tokens_only(chat: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(script.LINES, "When is high water in Port Averil?", script.call("tide", harbour="Port Averil"))
    model = chat(max_tokens=60).bind_tools([tide, log])
    first = model.invoke(ASKED)
    assert [(call["name"], call["args"]) for call in first.tool_calls] == [("tide", {"harbour": "Port Averil"})]
    assert first.response_metadata["finish_reason"] == "tool_calls"
    result = tide.invoke(first.tool_calls[0])
    second = model.invoke([*ASKED, first, result])
    used, before = second.usage_metadata, first.usage_metadata
    assert used["input_token_details"]["cache_read"] >= before["input_tokens"] + before["output_tokens"] - 1, "its own tokens, too"
    assert sum(used["input_token_details"].values()) == used["input_tokens"]
    assert second.response_metadata["model_provider"] == chat()._get_ls_params()["ls_provider"] == "agentcache"
    counted = {"prompt_tokens": used["input_tokens"], "completion_tokens": used["output_tokens"], "total_tokens": used["total_tokens"]}
    assert second.response_metadata["token_usage"] == counted, "under the names of other classes"
    json.dumps(second.response_metadata)
    assert "spans" not in second.response_metadata["agentcache"]


def test_invoke_and_stream_say_the_same(chat: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    said = "<think>\nThe tide.\n</think>\n\nI look. " + script.call("tide", harbour='Port "Averil"') + "\n" + script.call("log", text="{")
    monkeypatch.setitem(script.LINES, "Look!", said)
    model = chat(max_tokens=200).bind_tools([tide, log])
    whole = model.invoke("Look!")
    pieces = list(model.stream("Look!"))
    joined = pieces[0]
    for piece in pieces[1:]:
        joined += piece
    assert (joined.content, joined.tool_calls) == (whole.content, whole.tool_calls)
    assert joined.additional_kwargs == whole.additional_kwargs == {"reasoning_content": "The tide."}
    assert joined.usage_metadata["output_tokens"] == whole.usage_metadata["output_tokens"]
    assert len([piece for piece in pieces if piece.tool_call_chunks]) > 4, "arguments come while they are written"
    assert len([piece for piece in pieces if piece.usage_metadata]) == 1
    again = model.invoke(
        [
            HumanMessage("Look!"),
            joined,
            ToolMessage("3", tool_call_id=joined.tool_calls[0]["id"]),
            *[ToolMessage("ok", tool_call_id=joined.tool_calls[1]["id"])],
        ]
    )
    assert again.usage_metadata["input_token_details"]["cache_read"] > whole.usage_metadata["input_tokens"]


def test_tokens_of_a_thought_are_counted(chat: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(script.LINES, "Think!", "<think>\nThe tide turns at noon.\n</think>\n\nAt noon.")
    model = chat(max_tokens=100)
    whole, pieces = model.invoke("Think!"), list(model.stream("Think!"))
    spelled = len(model.get_token_ids("<think>\nThe tide turns at noon."))
    for usage in (whole.usage_metadata, pieces[-1].usage_metadata):
        assert abs(usage["output_token_details"]["reasoning"] - spelled) <= 1, "a token may hold the thought's end and more"
        assert usage["output_token_details"]["reasoning"] < usage["output_tokens"]
    assert "output_token_details" not in model.invoke("Hello").usage_metadata


async def test_async_is_the_same(chat: Any) -> None:
    model = chat()
    expected = model.invoke(ASKED).content
    assert (await model.ainvoke(ASKED)).content == expected
    assert "".join([piece.text async for piece in model.astream(ASKED)]) == expected
    results = await model.abatch([ASKED] * 3)
    assert [result.content for result in results] == [expected] * 3


def test_settings_of_a_call_win(chat: Any) -> None:
    model = chat(max_tokens=3, stop=["nothing like this"])
    assert model.invoke(ASKED).usage_metadata["output_tokens"] <= 3
    assert model.invoke(ASKED, max_tokens=5).usage_metadata["output_tokens"] == 5
    text = chat(max_tokens=12).invoke(ASKED).text
    stop = text[4:7]
    assert chat(max_tokens=12).invoke(ASKED, stop=[stop]).text == text[: text.index(stop)].strip()
    assert chat(max_tokens=12, stop=[stop]).invoke(ASKED).text == text[: text.index(stop)].strip()
    assert chat(max_tokens=12).bind(stop=[stop]).invoke(ASKED).text == text[: text.index(stop)].strip()


def test_words_of_other_classes(model_folder: str) -> None:
    model = ChatAgentCache(model_name=model_folder, num_predict=7, repeat_penalty=1.2, stop_sequences=["x"])
    assert (model.model, model.max_tokens, model.repetition_penalty, model.stop) == (model_folder, 7, 1.2, ["x"])
    with pytest.warns(UserWarning, match="ignores keep_alive='5m'"):
        ChatAgentCache(model=model_folder, keep_alive="5m")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ChatAgentCache(model=model_folder, keep_alive="5m")


def test_unknown_settings_of_a_call_warn_once(chat: Any) -> None:
    model = chat(max_tokens=2)
    with pytest.warns(UserWarning, match="ignores presence_penalty=0.5"):
        model.invoke("x", presence_penalty=0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.invoke("x", presence_penalty=0.5)


def test_usage_callback_and_profile(chat: Any) -> None:
    model, counted = chat(), UsageMetadataCallbackHandler()
    model.invoke(ASKED, config={"callbacks": [counted]})
    assert counted.usage_metadata[model.model]["input_token_details"]["cache_creation"] > 0
    assert model.profile["max_input_tokens"] == 16384
    assert model.profile["structured_output"]
    assert ChatAgentCache(model="nobody/has-this").profile["tool_calling"], "an unknown context is left out, not guessed"


def test_generate_tells_the_tokens_of_all_answers(chat: Any) -> None:
    made = chat(max_tokens=3).generate([[HumanMessage("Hi")], ASKED])
    each = [one[0].message.usage_metadata["total_tokens"] for one in made.generations]
    assert made.llm_output["token_usage"]["total_tokens"] == sum(each)


def test_a_model_by_name_follows_a_policy_and_leaves_receipts(model_folder: str, tmp_path: Path) -> None:
    rules, evidence = tmp_path / "policy.toml", tmp_path / "receipts"
    rules.write_text('[[rule]]\nname = "guests"\nreuse = ["off"]\n')
    with ChatAgentCache(model=model_folder, cache_dir="", policy=rules, receipts=evidence, max_tokens=1) as model:
        said = model.invoke("Look!")
    assert "guests" in str(said.response_metadata["agentcache"]["refusals"])
    assert len([*evidence.glob("*.jsonl")]) == 1
    assert type(model)(**model.model_dump(exclude_defaults=True)).policy == str(rules)


THINKS = "{%- if enable_thinking is defined %}{{- '<think>' }}{%- endif %}"
NO_TOOLS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + m.content + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant' }}{% endif %}"
)


def test_the_profile_says_what_the_chat_template_does(model_folder: str, tmp_path: Path) -> None:
    plain = ChatAgentCache(model=model_folder).profile
    assert plain["mid_conversation_system_messages"] is True
    assert plain["mid_conversation_tools"] is plain["reasoning_output"] is False
    thinking = ChatAgentCache(model=model_folder, chat_template=toy.CHAT_TEMPLATE + THINKS).profile
    assert thinking["reasoning_output"]
    assert ChatAgentCache(model=model_folder, chat_template=NO_TOOLS).profile["tool_calling"] is False
    assert "reasoning_output" not in ChatAgentCache(model="nobody/has-this").profile
    shutil.copytree(model_folder, tmp_path / "copy")
    config = tmp_path / "copy" / "tokenizer_config.json"
    fields = {"thinking": {"open": "<|a|>", "close": "<|b|>"}}
    config.write_text(json.dumps({**json.loads(config.read_text()), "response_template": {"fields": fields}}))
    assert ChatAgentCache(model=str(tmp_path / "copy")).profile["reasoning_output"]
    config.write_text("{broken")
    assert ChatAgentCache(model=str(tmp_path / "copy")).profile["tool_calling"]


def test_the_profile_of_a_running_engine(chat: Any) -> None:
    of_files, running = chat().profile, ChatAgentCache(engine=chat()._engine()).profile
    assert running == {**of_files, "name": running["name"]}


def test_tokens_are_counted_as_they_are_sent(chat: Any) -> None:
    model = chat(max_tokens=1)
    sent = model.bind_tools([tide]).invoke(ASKED).usage_metadata["input_tokens"]
    assert model.get_num_tokens_from_messages(ASKED, tools=[tide]) == sent > model.get_num_tokens_from_messages(ASKED)
    assert model.get_num_tokens("high water") == len(model.get_token_ids("high water")) > 0
    assert model.get_num_tokens_from_messages([ToolMessage("half a conversation", tool_call_id="x")]) > 0


def test_weights_are_shared_and_loaded_late(model_folder: str) -> None:
    options = {"model": model_folder, "memory_bytes": 33 << 20}
    one, two = ChatAgentCache(**options), ChatAgentCache(**options, temperature=1.0)
    known = set(script.MADE)
    one.invoke("x", max_tokens=1)
    assert set(script.MADE) - known == {one._engine()}
    assert one._engine() is two._engine()
    assert ChatAgentCache(model=model_folder, memory_bytes=34 << 20)._engine() is not one._engine()


def test_reasoning_goes_to_the_template(chat: Any) -> None:
    assert chat(reasoning=False)._template_kwargs({}) == {"enable_thinking": False}
    assert chat(template_kwargs={"a": 1})._template_kwargs({"reasoning": True}) == {"a": 1, "enable_thinking": True}


def test_configuration_there_and_back(chat: Any) -> None:
    model = chat(temperature=0.5, stop=["x"])
    config = json.loads(json.dumps(model.to_config()))
    assert ChatAgentCache.from_config(config).to_config() == config


# -- what cannot be ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([HumanMessage([{"type": "image_url", "image_url": {"url": "x"}}])], "a block of type 'image_url': this model reads text only"),
        ([ChatMessage("x", role="narrator")], "role 'narrator' is unknown"),
        ([RemoveMessage(id="x")], "role 'remove' is unknown"),
        ([HumanMessage("x"), ToolMessage("y", tool_call_id="z")], "answers no open call"),
        ([], "is empty"),
    ],
)
def test_messages_that_cannot_be_shown(chat: Any, messages: Any, words: str) -> None:
    for call in (chat().invoke, lambda m: list(chat().stream(m))):
        with pytest.raises(theirs.ModelInvalidRequestError, match=words) as caught:
            call(messages) if messages else chat()._generate([])
        assert isinstance(caught.value, own.PromptError)


def test_messages_are_translated_both_ways() -> None:
    blocks = [
        {"type": "thinking", "thinking": "hm"},
        {"type": "text", "text": "a"},
        "b",
        {"type": "tool_use", "id": "1", "name": "t", "input": {}},
    ]
    bad = {"name": "log", "args": "{broken", "id": "2", "error": "x", "type": "invalid_tool_call"}
    made = converted(
        [
            ChatMessage("rules", role="developer"),
            AIMessage(blocks, tool_calls=[{"name": "t", "args": {}, "id": "1", "type": "tool_call"}], invalid_tool_calls=[bad]),
            ToolMessage("x", tool_call_id="1"),
            ToolMessage([{"type": "json", "json": {"é": 1}}], tool_call_id="2", status="error"),
            AIMessage("c", additional_kwargs={"reasoning_content": "so"}),
        ]
    )
    assert made == [
        Message("system", "rules"),
        Message("assistant", "ab", (ToolCall("t", {}, "1"), ToolCall("log", {"invalid_arguments": "{broken"}, "2")), reasoning="hm"),
        Message("tool", "x", tool_call_id="1"),
        Message("tool", '{"é": 1}', tool_call_id="2"),
        Message("assistant", "c", reasoning="so"),
    ]


def test_typed_errors(chat: Any) -> None:
    with pytest.raises(theirs.ContextOverflowError, match="exceeds the context of 16384 tokens") as caught:
        chat().invoke("tide " * 20000)
    assert isinstance(caught.value, own.ContextOverflowError)
    with pytest.raises(theirs.ContextOverflowError, match="exceeds num_ctx=10, which counts both, by .*raise num_ctx"):
        chat(num_ctx=10).invoke(ASKED)
    with pytest.raises(theirs.ModelNotFoundError):
        ChatAgentCache(model="/nowhere/at/all").invoke("x")
    with pytest.raises(theirs.ModelInvalidRequestError, match="name a Hugging Face id"):
        ChatAgentCache().invoke("x")
    with pytest.raises(theirs.ModelInvalidRequestError, match="temperature=-1"):
        chat(temperature=-1.0).invoke("x")
    with pytest.raises(theirs.ModelInvalidRequestError, match="there is no such tool, only"):
        chat().bind_tools([tide], tool_choice="nobody")
    bad = {"name": "odd", "description": "", "parameters": {"type": "object", "properties": {"a": {"type": "string", "pattern": "(?=x)"}}}}
    with pytest.raises(theirs.ModelInvalidRequestError, match="'odd': its schema cannot be enforced"):
        chat().bind_tools([bad], tool_choice="any").invoke("x")
    recovered = ChatAgentCache(model="/nowhere/at/all").with_fallbacks([chat(max_tokens=2)]).invoke("x")
    assert isinstance(recovered, AIMessage)


def test_timeout_ends_a_completion(chat: Any) -> None:
    model = chat(timeout=0.3, max_tokens=8000)
    model.invoke("x", max_tokens=1)
    began = time.monotonic()
    with pytest.raises(theirs.ModelTimeoutError, match="timeout=0.3") as caught:
        model.invoke("Tell me a long story.")
    assert caught.value.is_retryable
    with pytest.raises(theirs.ModelTimeoutError):
        asyncio.run(model.ainvoke("Tell me a long story."))
    assert time.monotonic() - began < 20


async def test_twenty_at_once_half_of_them_cancelled(chat: Any) -> None:
    model = chat(max_tokens=40)
    engine = model._engine()
    tasks = [asyncio.create_task(model.ainvoke([SYSTEM, HumanMessage(f"Question {n}?")])) for n in range(20)]
    await asyncio.sleep(0.2)
    for task in tasks[::2]:
        task.cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(result, AIMessage) for result in results[1::2])
    assert all(isinstance(result, (AIMessage, asyncio.CancelledError)) for result in results[::2])
    assert await asyncio.to_thread(script.until, lambda: not engine.scheduler.live)
    assert not engine.scheduler._waiting
    held = {id(entry.page) for entry in engine.store.tree.entries()}
    assert engine.store.tree.bytes == len(held) * engine.model.spec.page_bytes, "only what the store accounts for is held"
    assert (await model.ainvoke(ASKED)).usage_metadata["input_token_details"]["cache_read"] > 0


async def test_leaving_a_stream_frees_the_device(chat: Any) -> None:
    model = chat(max_tokens=8000)
    async for _ in model.astream(ASKED):
        break
    for _ in model.stream(ASKED):
        break
    engine = model._engine()
    assert await asyncio.to_thread(script.until, lambda: not engine.scheduler.live)


def test_a_loop_that_closes_in_the_middle_ends_the_request(chat: Any) -> None:
    model = chat(max_tokens=8000)
    engine, loop = model._engine(), asyncio.new_event_loop()
    pieces = model._astream(ASKED)
    loop.run_until_complete(pieces.__anext__())
    assert len(engine.scheduler.live) == 1
    loop.close()
    assert script.until(lambda: not engine.scheduler.live), "nobody can read it any more, though somebody keeps it"
    del pieces
    assert model.invoke(ASKED, max_tokens=1).usage_metadata["input_token_details"]["cache_read"] > 0


async def test_inside_a_running_loop(chat: Any) -> None:
    """As in a notebook: the sync methods work where a loop is running already."""
    assert chat().invoke(ASKED).content == (await chat().ainvoke(ASKED)).content


# -- pins, labels, other classes' models -------------------------------------------------------------------------------


def test_cache_control_pins_and_the_label_names_it(chat: Any) -> None:
    model = chat(max_tokens=2)
    engine = model._engine()
    before = {group.name for group in engine.groups}
    tagged = SystemMessage([{"type": "text", "text": "You keep a light. " * 9, "cache_control": {"type": "ephemeral", "ttl": 0.2}}])
    message = model.bind_tools([tide]).invoke([tagged, HumanMessage("x")], prompt_cache_key="lights")
    assert message.response_metadata["prompt_cache_key"] == "lights"
    (name,) = {group.name for group in engine.groups} - before
    assert name.startswith("lights-")
    model.bind_tools([tide]).invoke([tagged, HumanMessage("y")], prompt_cache_key="lights")
    assert len(engine.groups) == len(before) + 1, "pinned once"
    time.sleep(0.25)
    model.invoke(ASKED, cache_control={"type": "ephemeral"})
    assert name not in {group.name for group in engine.groups}, "its time is over"
    with pytest.raises(errors.ModelInvalidRequestError, match="cache_control"):
        model.invoke(ASKED, cache_control={"type": "ephemeral", "ttl": "2 weeks"})


def test_cache_control_on_a_later_message_pins_up_to_it(chat: Any) -> None:
    model = chat(max_tokens=2)
    before = {group.name for group in model._engine().groups}
    marked = [{"type": "text", "text": "And the wind? " * 9, "cache_control": {"type": "ephemeral"}}]
    talk = [SystemMessage("You keep a light."), HumanMessage("The tide?"), AIMessage("High."), HumanMessage(marked)]
    first = model.bind_tools([tide]).invoke(talk)
    (held,) = [group for group in model._engine().groups if group.name not in before]
    assert first.usage_metadata["input_tokens"] - 1 <= held.prefix_tokens <= first.usage_metadata["input_tokens"]
    second = model.bind_tools([tide]).invoke([*talk, first, HumanMessage("Sure?")])
    assert second.usage_metadata["input_token_details"]["cache_read"] >= held.prefix_tokens


def test_an_impossible_pin_does_not_break_the_request(chat: Any) -> None:
    model = chat(max_tokens=2, memory_bytes=1)
    with pytest.warns(UserWarning, match="nothing was pinned: .*cannot hold this tool group"):
        assert model.invoke(ASKED, cache_control={"type": "ephemeral"}).text
    with pytest.warns(UserWarning, match="nothing was pinned: .*cannot hold"):
        chat(max_tokens=2, memory_bytes=1).invoke(ASKED, cache_control={"type": "ephemeral"})


def test_a_long_history_is_only_read_once(chat: Any) -> None:
    model = chat(max_tokens=2)
    history = [SYSTEM, *[m for n in range(150) for m in (HumanMessage(f"Ship {n}?"), AIMessage("Passed."))]]
    first = model.invoke([*history, HumanMessage("And now?")])
    second = model.invoke([*history, HumanMessage("And now?"), first, HumanMessage("Well?")])
    assert first.usage_metadata["input_tokens"] > 3000
    assert second.usage_metadata["input_token_details"]["cache_creation"] < 40


def test_an_engine_of_your_own() -> None:
    with Engine(toy.model(script.VOCAB, layers=2, hidden=128), toy.tokenizer(script.TEXTS, script.VOCAB), store=None) as engine:
        chat = ChatAgentCache(engine=engine, max_tokens=2)
        assert chat.invoke("x").response_metadata["model_name"] == chat.model == engine.name
        assert "engine" not in chat.to_config()


def test_how_much_is_reused_goes_to_the_engine(model_folder: str) -> None:
    chat = ChatAgentCache(model=model_folder, memory_bytes=35 << 20, max_tokens=1, cache_dir="", reuse="off")
    for _ in range(2):
        said = chat.invoke("Which way does the tide run?")
    assert said.usage_metadata["input_token_details"]["cache_read"] == 0
    near = ChatAgentCache(model=model_folder, memory_bytes=36 << 20, cache_dir="", reuse="approximate")
    with pytest.raises(theirs.ModelInvalidRequestError, match="agentcache calibrate"):
        near.invoke("Which way does the tide run?")
