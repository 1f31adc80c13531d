"""The endpoints that LlamaIndex expects of a model with tools, each asked once, sync and async, streaming and not."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable
from typing import Any

import pytest
from cases import call, system, tools, user
from llama_index.core.base.llms.base import BaseLLM
from llama_index.core.base.llms.types import ChatMessage, ChatResponse, TextBlock, ThinkingBlock, ToolCallBlock
from llama_index.core.callbacks import CallbackManager, TokenCountingHandler
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.llms.function_calling import FunctionCallingLLM
from llama_index.core.prompts import PromptTemplate
from llama_index.core.response_synthesizers import get_response_synthesizer
from llama_index.llms.agentcache import AgentCacheLLM, NoToolCallError, ReceiptEvent
from llama_index.llms.agentcache.translate import to_messages

from agentcache.errors import ConfigError

Make = Callable[..., Any]
ASKED = [system("You keep the light."), user("When is high water?")]


def test_class_is_a_model_that_calls_functions() -> None:
    names = [base.__name__ for base in AgentCacheLLM.__mro__]
    assert BaseLLM.__name__ in names
    assert FunctionCallingLLM.__name__ in names
    assert not AgentCacheLLM.__abstractmethods__
    assert AgentCacheLLM.class_name() == "AgentCache_LLM"


def test_metadata_and_payload_are_plain(llm: Make) -> None:
    model = llm()
    assert model.metadata.is_chat_model
    assert model.metadata.is_function_calling_model
    assert model.metadata.context_window == 16384
    assert llm(context_window=512).metadata.context_window == 512
    json.dumps(model.to_payload())
    json.dumps(model.to_dict())


def test_chat(llm: Make) -> None:
    response = llm("At five past two.").chat(ASKED)
    assert response.message.role == "assistant"
    assert response.message.content == "At five past two."
    assert response.delta is None


def test_chat_holds_one_response_at_a_time(llm: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each response carries all of the answer so far: a long answer's, kept until its end, would take the square of its length."""
    model, made, alive = llm("At five past two. " * 20), [], []
    responses = AgentCacheLLM._responses

    def watched(*args: Any) -> Any:
        for response in responses(*args):
            made.append(weakref.ref(response))
            alive.append(sum(one() is not None for one in made))
            yield response

    monkeypatch.setattr(AgentCacheLLM, "_responses", watched)
    assert model.chat(ASKED).message.content == ("At five past two. " * 20).strip()
    assert len(made) > 20
    assert max(alive) <= 3  # the one just made, and those before it that a frame still holds


def test_stream_chat_deltas_make_the_message(llm: Make) -> None:
    responses = list(llm("  At five past two.\n\nNot before. ").stream_chat(ASKED))
    assert "".join(one.delta for one in responses) == responses[-1].message.content == "At five past two.\n\nNot before."
    assert all(len(a.message.content) <= len(b.message.content) for a, b in zip(responses, responses[1:]))
    assert responses[-1].raw is not None
    assert all(one.raw is None for one in responses[:-1])


def test_achat_and_astream_chat(llm: Make, run: Make) -> None:
    async def ask() -> tuple[str, list[str]]:
        model = llm("One.", "Two, three.")
        whole = await model.achat(ASKED)
        parts = [one.delta async for one in await model.astream_chat(ASKED)]
        return whole.message.content, parts

    whole, parts = run(ask())
    assert whole == "One."
    assert "".join(parts) == "Two, three."
    assert len(parts) > 2


def test_complete_asks_as_a_user_and_formatted_continues_the_text(llm: Make) -> None:
    model = llm("Answer.", "Answer.", system_prompt="You keep the light.")
    first = model.complete("When is high water?")
    assert first.text == "Answer."
    asked = model.receipts[0].prompt_tokens
    model.complete("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", formatted=True)
    rendered = model.engine.renderer.render(
        [{"role": "system", "content": "You keep the light."}, {"role": "user", "content": "When is high water?"}]
    )
    assert asked == len(rendered.ids)
    assert model.receipts[1].prompt_tokens < asked


def test_other_completion_endpoints(llm: Make, run: Make) -> None:
    model = llm("One two.", "Three.", "Four five.")
    assert "".join(one.delta for one in model.stream_complete("count")) == "One two."

    async def ask() -> tuple[str, str]:
        whole = await model.acomplete("count")
        parts = [one.delta async for one in await model.astream_complete("count")]
        return whole.text, "".join(parts)

    assert run(ask()) == ("Three.", "Four five.")


def test_predict_and_stream(llm: Make) -> None:
    model = llm("Blue.", "Red.")
    prompt = PromptTemplate("Which colour has the {thing}?")
    assert model.predict(prompt, thing="buoy") == "Blue."
    assert "".join(model.stream(prompt, thing="buoy")) == "Red."


# -- tools -------------------------------------------------------------------------------------------------------------


def test_chat_with_tools_family(llm: Make, run: Make) -> None:
    text = call("tide", harbour="Averil")
    model = llm(text, text, text, text)

    async def ask() -> list[Any]:
        whole = await model.achat_with_tools(tools(), user_msg="tide?")
        *_, last = [one async for one in await model.astream_chat_with_tools(tools(), user_msg="tide?")]
        return [whole, last]

    *_, streamed = model.stream_chat_with_tools(tools(), user_msg="tide?")
    responses = [model.chat_with_tools(tools(), user_msg="tide?"), streamed, *run(ask())]
    for response in responses:
        (found,) = model.get_tool_calls_from_response(response)
        assert (found.tool_name, found.tool_kwargs) == ("tide", {"harbour": "Averil"})
        assert response.message.content is None
        assert response.raw["finish_reason"] == "tool_calls"


def test_only_text_before_a_call_is_streamed(llm: Make) -> None:
    text = f"Let me look.\n{call('tide', harbour='Averil')}"
    responses = list(llm(text).stream_chat_with_tools(tools(), user_msg="tide?"))
    assert "".join(one.delta for one in responses) == "Let me look." == responses[-1].message.content
    assert [block.block_type for block in responses[-1].message.blocks] == ["text", "tool_call"]


FOUND = {"answer": "At 14:05.", "query_satisfied": True}


@pytest.mark.parametrize("streaming", [False, True])
def test_a_query_engine_that_filters_answers_finds_the_call(llm: Make, run: Make, streaming: bool) -> None:
    """LlamaIndex looks for the calls of a stream in additional_kwargs only."""
    options: dict[str, Any] = {"streaming": streaming, "structured_answer_filtering": True, "response_mode": "refine"}
    said = [call("StructuredRefineResponse", **FOUND)] * 2
    synthesizer = get_response_synthesizer(llm=llm(*said), **options)

    async def ask() -> str:
        told = await synthesizer.aget_response("Tide?", ["High water at 14:05."])
        return told if isinstance(told, str) else "".join([one async for one in told])

    assert "".join(synthesizer.get_response("Tide?", ["High water at 14:05."])) == "At 14:05."
    assert run(ask()) == "At 14:05."


def test_a_call_that_comes_back_is_told_once(llm: Make) -> None:
    model = llm("Look:\n" + call("tide", harbour="Averil"), "At 14:05.")
    message = model.chat([user("?")], tools=tools()).message
    assert message.additional_kwargs["tool_calls"] == [
        {"id": message.blocks[-1].tool_call_id, "type": "function", "function": {"name": "tide", "arguments": '{"harbour": "Averil"}'}}
    ]
    (made,) = to_messages([message])
    assert [(one.name, one.arguments) for one in made.tool_calls] == [("tide", {"harbour": "Averil"})]
    again = ChatMessage.model_validate_json(message.model_dump_json())
    assert to_messages([again]) == [made]
    model.chat([user("?"), again, *_result(ChatResponse(message=again))], tools=tools())
    before, after = model.receipts
    assert after.cached_tokens >= before.prompt_tokens + before.completion_tokens - 2


def test_parallel_calls_are_kept_or_cut_to_one(llm: Make) -> None:
    text = call("tide", harbour="Averil") + "\n" + call("wind", harbour="Averil")
    model = llm(text, text)
    both = model.get_tool_calls_from_response(model.chat_with_tools(tools(), user_msg="?", allow_parallel_tool_calls=True))
    assert [one.tool_name for one in both] == ["tide", "wind"]
    assert len({one.tool_id for one in both}) == 2
    assert [one.tool_name for one in model.get_tool_calls_from_response(model.chat_with_tools(tools(), user_msg="?"))] == ["tide"]


def test_call_ids_are_repeatable_and_differ_along_a_conversation(llm: Make) -> None:
    text = call("tide", harbour="Averil")
    model = llm(text, text, text)
    first = model.chat_with_tools(tools(), user_msg="tide?")
    again = model.chat_with_tools(tools(), user_msg="tide?")
    later = model.chat_with_tools(tools(), chat_history=[user("tide?"), first.message, *_result(first)])
    ids = [model.get_tool_calls_from_response(one)[0].tool_id for one in (first, again, later)]
    assert ids[0] == ids[1] != ids[2]


def _result(response: Any) -> list[ChatMessage]:
    (block,) = [block for block in response.message.blocks if isinstance(block, ToolCallBlock)]
    return [ChatMessage(role="tool", content="14:05", additional_kwargs={"tool_call_id": block.tool_call_id})]


def test_no_tools_gives_no_calls(llm: Make) -> None:
    model = llm("Hello.", f"So: {call('tide', harbour='Averil')} or so.")
    response = model.chat_with_tools([], user_msg="hello")
    assert model.get_tool_calls_from_response(response, error_on_no_tool_call=False) == []
    with pytest.raises(NoToolCallError, match="Hello"):
        model.get_tool_calls_from_response(response)
    *_, said = responses = list(model.stream_chat([user("say it")]))  # nothing was offered: what looks like a call is text
    assert "".join(one.delta for one in responses) == said.message.content == f"So: {call('tide', harbour='Averil')} or so."


def test_predict_and_call_runs_the_tool(llm: Make, run: Make) -> None:
    model = llm(call("tide", harbour="Averil"), call("wind", harbour="Averil", hour=3))
    assert str(model.predict_and_call(tools(), user_msg="tide?")) == "high water in Averil at 14:05"
    assert str(run(model.apredict_and_call(tools(), user_msg="wind?"))) == "Averil 3h: north, 4"


def test_a_malformed_call_stays_text(llm: Make) -> None:
    text = 'So:\n<tool_call>\n{"name": tide}\n</tool_call>'
    *_, last = responses = list(llm(text).stream_chat_with_tools(tools(), user_msg="tide?"))
    assert "".join(one.delta for one in responses) == last.message.content == text
    assert not [block for block in last.message.blocks if isinstance(block, ToolCallBlock)]


# -- thinking ----------------------------------------------------------------------------------------------------------


def test_thinking_comes_as_a_block_and_as_deltas(llm: Make) -> None:
    responses = list(llm("<think>\nThe moon <is> full.\n</think>\n\nAt two.").stream_chat(ASKED))
    assert "".join(one.additional_kwargs.get("thinking_delta", "") for one in responses) == "The moon <is> full."
    assert "".join(one.delta for one in responses) == "At two."
    assert [type(block) for block in responses[-1].message.blocks] == [ThinkingBlock, TextBlock]


def test_thinking_that_never_ends_is_thinking(llm: Make) -> None:
    message = llm("<think>\nThe moon").chat(ASKED).message
    assert message.content in (None, "")
    assert message.blocks[0].content == "The moon"


# -- what is told beside the text --------------------------------------------------------------------------------------


def test_raw_is_small_json_in_openai_shape(llm: Make) -> None:
    model = llm("One.", "Two.")
    model.chat(ASKED)
    raw = model.chat(ASKED).raw
    assert len(json.dumps(raw)) < 1500
    assert raw["usage"]["prompt_tokens_details"]["cached_tokens"] == raw["usage"]["prompt_tokens"] - 1
    assert raw["receipt"]["bitwise"] is True
    assert raw["receipt"]["segment_tokens"] == raw["receipt"]["halo_tokens"] == 0  # approximate reuse shows there
    assert "cache_read_input_tokens" not in raw["usage"]  # tracers would count those tokens twice


def test_token_counting_handler_reads_usage(llm: Make) -> None:
    counter = TokenCountingHandler(tokenizer=lambda text: text.split())
    model = llm("One two three.", callback_manager=CallbackManager([counter]))
    usage = model.chat(ASKED).raw["usage"]
    assert counter.prompt_llm_token_count == usage["prompt_tokens"]
    assert counter.completion_llm_token_count == usage["completion_tokens"]


def test_receipts_reach_instrumentation(llm: Make) -> None:
    heard: list[Any] = []

    class Ears(BaseEventHandler):
        def handle(self, event: Any, **kwargs: Any) -> None:
            heard.append(event)

    root, ears = get_dispatcher(), Ears()
    root.add_event_handler(ears)
    try:
        llm("One.").chat(ASKED)
    finally:
        root.event_handlers.remove(ears)
    (receipt,) = [event for event in heard if isinstance(event, ReceiptEvent)]
    assert receipt.receipt["usage"]["prompt_tokens"] > 0
    assert {"LLMChatStartEvent", "LLMChatEndEvent"} <= {type(event).__name__ for event in heard}


def test_stop_strings_of_settings_and_of_a_call(llm: Make) -> None:
    model = llm("one STOP two", "one STOP two", "one STOP two", stop=["STOP"])
    assert model.chat(ASKED, stop="ST").message.content == "one"
    assert model.chat(ASKED).message.content == "one"
    assert model.chat(ASKED, stop=[" two"]).message.content == "one STOP"


def test_a_completion_that_comes_back_costs_nothing(llm: Make) -> None:
    model = llm("<think>\nHm.\n</think>\nAt two.", "Yes.")
    first = model.chat(ASKED)
    model.chat([*ASKED, first.message, user("Sure?")])
    before, after = model.receipts
    assert after.cached_tokens >= before.prompt_tokens + before.completion_tokens - 2


def test_copies_share_the_engine_and_spare_given_ones(llm: Make) -> None:
    import copy

    model = llm("One.")
    assert copy.deepcopy(model).engine is model.engine
    other = AgentCacheLLM(engine=model.engine)
    other.close()
    assert model.chat(ASKED).message.content == "One."


def test_loads_a_folder_and_closes_it(tmp_path: Any) -> None:
    from cases import VOCAB, tokenizer

    from agentcache import toy
    from agentcache.errors import EngineClosedError

    toy.model(VOCAB, layers=1, hidden=128).save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    with AgentCacheLLM(model=str(tmp_path), store=None, memory_bytes=64 << 20, max_tokens=3, additional_kwargs={"seed": 1}) as model:
        assert model.chat(ASKED, ignore_eos=True).raw["usage"]["completion_tokens"] == 3
        assert model.model == str(tmp_path)
    with pytest.raises((EngineClosedError, RuntimeError)):
        model.chat(ASKED)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({}, "model=None"),
        ({"model": "no/such/model", "devise": "cpu"}, "devise"),
        ({"model": "no/such/model", "additional_kwargs": {"top_q": 1}}, "top_q"),
        ({"model": "no/such/model", "additional_kwargs": {"top_p": 2.0}}, "top_p"),
    ],
)
def test_settings_that_cannot_work_are_refused_before_weights_are_loaded(options: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        AgentCacheLLM(**options)


def test_usage_counts_the_thought(llm: Make) -> None:
    raw = llm("<think>\nLet me see.\n</think>\n\nAt noon.").chat([user("Tide?")]).raw
    told = raw["usage"]["completion_tokens_details"]["reasoning_tokens"]
    assert 0 < told < raw["usage"]["completion_tokens"]
    assert llm("At noon.").chat([user("Tide?")]).raw["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}


def test_log_probabilities_are_told_of_each_token(llm: Make, run: Make) -> None:
    """The chosen token first, which is the likeliest here, then the others; 0 asks for the chosen one alone."""
    model = llm("At two.", "At two.", "At two.", "At two.", "At two.")

    async def streamed() -> Any:
        return [one async for one in await model.astream_complete("Tide?", logprobs=0)][-1]

    answers = [model.chat([user("Tide?")], logprobs=2), list(model.stream_complete("Tide?", logprobs=2))[-1]]
    answers += [model.complete("Tide?", logprobs=0), run(streamed())]
    for answer, number in zip(answers, (2, 2, 0, 0)):
        assert "".join(each[0].token for each in answer.logprobs).startswith("At two.")
        assert {len(each) for each in answer.logprobs} <= {number or 1, number + 1}
        assert all(one.logprob < 0 for each in answer.logprobs for one in each)
    assert model.chat([user("Tide?")]).logprobs is None
