"""What is cut is never a result: a typed error, a `parsing_error`, an invalid call."""

from __future__ import annotations

import functools
import operator
from typing import Any

import pytest
import script
from harbour import ASKED, Ship, tide
from langchain_agentcache import AgentCacheLLM, ChatAgentCache
from langchain_agentcache.errors import ModelInvalidRequestError, OutputCutError
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from pydantic import BaseModel

from agentcache.errors import AgentCacheError


class Pay(BaseModel):
    """A payment."""

    to: str
    amount: int


@pytest.fixture
def weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is scripted: random weights write until their tokens are used up."""
    monkeypatch.setattr(script, "answer", lambda *asked: None)


@pytest.mark.usefixtures("weights")
@pytest.mark.parametrize("method", ["function_calling", "json_schema"])
async def test_half_an_object_is_an_error(chat: Any, method: Any) -> None:
    """Old parsers completed it, so that 1250 could become 12, or gave None."""
    with pytest.raises(ModelInvalidRequestError, match="max_tokens=1: the shortest answer") as refused:
        chat(max_tokens=1).with_structured_output(Pay, method=method).invoke(ASKED)
    least, failed = int(str(refused.value).split(" has ")[1].split()[0]), 0
    for budget in range(least, least + 6):
        model = chat(max_tokens=budget).with_structured_output(Pay, method=method, include_raw=True)
        for done in (model.invoke(ASKED), await model.ainvoke(ASKED)):
            assert (done["parsed"] is None) == isinstance(done["parsing_error"], AgentCacheError)
            if done["parsed"] is None:
                assert "max_tokens" in str(done["parsing_error"])
                failed = budget
    assert failed, "random weights seldom write a number of one digit"
    short = chat(max_tokens=failed).with_structured_output(Pay, method=method)
    with pytest.raises(AgentCacheError, match="max_tokens"):
        short.invoke(ASKED)
    with pytest.raises(AgentCacheError, match="max_tokens"):
        list(short.stream(ASKED))
    with pytest.raises(AgentCacheError, match="max_tokens"):
        [piece async for piece in short.astream(ASKED)]


@pytest.mark.usefixtures("weights")
def test_json_of_any_form_is_whole(chat: Any) -> None:
    for budget in (2, 12, 30):
        done = chat(max_tokens=budget).with_structured_output(method="json_mode", include_raw=True).invoke(ASKED)
        assert isinstance(done["parsed"], dict)
        assert done["parsing_error"] is None
    assert done["raw"].response_metadata["agentcache"]["shortened"] is True


@pytest.mark.usefixtures("weights")
async def test_a_shortened_object_is_a_warning(chat: Any) -> None:
    """Of an object alone nobody sees the metadata."""
    model = chat(max_tokens=30)
    short = model.with_structured_output(method="json_mode")
    text = AgentCacheLLM(model=model.model, memory_bytes=model.memory_bytes, max_tokens=30, namespace=model.namespace, format="json")
    for ask in (short.invoke, text.invoke, lambda said: list(short.stream(said))):
        with pytest.warns(UserWarning, match="ended early, to fit into max_tokens") as told:
            ask(str(ASKED))
        assert [each.filename for each in told] == [__file__]
    with pytest.warns(UserWarning, match="ended early, to fit into max_tokens"):
        await short.ainvoke(str(ASKED))


@pytest.mark.usefixtures("weights")
def test_whole_objects_pass(chat: Any) -> None:
    done = chat(max_tokens=120).with_structured_output(Ship, include_raw=True).invoke(ASKED)
    assert isinstance(done["parsed"], Ship)
    assert done["parsing_error"] is None


def bound(chat: Any, monkeypatch: pytest.MonkeyPatch, text: str, **options: Any) -> Any:
    monkeypatch.setattr(script, "answer", lambda *asked: text)
    return chat(**options).bind_tools([tide])


async def test_an_answer_that_ended_in_its_thought_is_a_warning(chat: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent ends with it, and shows nothing."""
    model = bound(chat, monkeypatch, "<think>\nHigh water is when the moon is high, and that is at noon or soon after.", max_tokens=24)
    for ask in (model.invoke, lambda said: list(model.stream(said))):
        with pytest.warns(UserWarning, match="the answer is empty, as max_tokens") as told:
            ask(ASKED)
        assert [each.filename for each in told] == [__file__]
    with pytest.warns(UserWarning, match="the answer is empty, as max_tokens"):
        assert (await model.ainvoke(ASKED)).content == ""


@pytest.mark.parametrize(
    ("text", "tokens", "why"),
    [
        (script.call("tide", harbour="Port Averil of the North and of the South", day=1250), 24, "max_tokens=24"),
        ('<tool_call>\n{"name": "tide", "arguments": {"harbour": Averil}}\n</tool_call>', 100, "malformed"),
    ],
)
def test_calls_that_are_none_are_named(chat: Any, monkeypatch: pytest.MonkeyPatch, text: str, tokens: int, why: str) -> None:
    model = bound(chat, monkeypatch, text, max_tokens=tokens)
    whole, joined = model.invoke(ASKED), None
    for chunk in model.stream(ASKED):
        joined = chunk if joined is None else joined + chunk
    for message in (whole, joined):
        assert message.tool_calls == []
        (bad,) = message.invalid_tool_calls
        assert bad["name"] == "tide"
        assert bad["args"].startswith('{"harbour": ')
    assert why in whole.invalid_tool_calls[0]["error"]
    assert whole.invalid_tool_calls[0]["id"] == joined.invalid_tool_calls[0]["id"]
    assert whole.content == joined.content, "as the model is shown it later"


@pytest.mark.parametrize("streams", [False, True])
def test_a_conversation_goes_on_behind_a_call_that_is_none(chat: Any, monkeypatch: pytest.MonkeyPatch, streams: bool) -> None:
    """As it is, and answered by an agent that tells the model what was wrong."""
    model = bound(chat, monkeypatch, '<tool_call>\n{"name": "tide", "arguments": {"harbour": Averil}}\n</tool_call>', max_tokens=60)
    first = functools.reduce(operator.add, model.stream(ASKED)) if streams else model.invoke(ASKED)
    monkeypatch.setattr(script, "answer", lambda *asked: "At 3.")
    again = model.invoke([*ASKED, first, HumanMessage("That was no call.")])
    cached = again.usage_metadata["input_token_details"]["cache_read"]
    assert cached >= first.usage_metadata["total_tokens"] - 2, "the model's own ids are found again"
    (bad,) = first.invalid_tool_calls
    if bad["id"]:
        assert model.invoke([*ASKED, first, ToolMessage("malformed", tool_call_id=bad["id"])]).text == "At 3."
    assert isinstance(first, AIMessage)


@pytest.mark.usefixtures("weights")
def test_the_object_of_an_agent_is_whole_or_an_error(chat: Any) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "pay", "schema": Pay.model_json_schema()}}
    for budget in range(30, 90):
        model: ChatAgentCache = chat(max_tokens=budget)
        try:
            model.invoke(ASKED, response_format=form)
        except ModelInvalidRequestError as error:
            assert f"max_tokens={budget}: the shortest answer" in str(error)  # noqa: PT017
        except OutputCutError:
            break
    for ask in (model.invoke, lambda *said, **more: list(model.stream(*said, **more))):
        with pytest.raises(OutputCutError, match="no room after .* raise max_tokens") as raised:
            ask(ASKED, response_format=form)
        assert isinstance(raised.value, ValueError), "as LangChain's parsers raise it"
