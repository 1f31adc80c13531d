"""What is cut is never a result: half a call, half an object and half a step are errors that name max_tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from cases import tools, user
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.async_utils import run_jobs
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.agentcache import AgentCacheLLM, NoToolCallError, StableReActAgent, StructuredOutputError, answer_at_tail
from pydantic import BaseModel, RootModel

from agentcache import Engine
from agentcache.errors import ConfigError

pytest.importorskip("llguidance", reason="constrained decoding needs the extra `constrain`")

Make = Callable[..., Any]


class Amount(RootModel[int]):
    """How much."""


class Payment(BaseModel):
    """How much."""

    amount: int


class Pay(BaseModel):
    """Whom, and how much."""

    to: str
    amount: int


@pytest.fixture
def short(shared_engine: Engine, request: pytest.FixtureRequest) -> Iterator[Callable[[int], AgentCacheLLM]]:
    """A model that says what its random weights say, in so many tokens."""
    made = []

    def make(max_tokens: int) -> AgentCacheLLM:
        made.append(AgentCacheLLM(engine=shared_engine, namespace=request.node.name, max_tokens=max_tokens))
        return made[-1]

    yield make
    for one in made:
        one.close()


def _cut_call(short: Any, demanded: dict[str, Any]) -> tuple[Any, int]:
    """A call that was cut in its number, and its max_tokens."""
    for max_tokens in range(25, 90):
        try:
            response = short(max_tokens).chat_with_tools([pay()], user_msg="Pay?", **demanded)
        except ConfigError as error:
            assert f"max_tokens={max_tokens}: the shortest answer" in str(error)  # noqa: PT017
        else:
            if response.raw.get("cut"):
                return response, max_tokens
    raise AssertionError("random weights seldom write a number of one digit")


def pay() -> FunctionTool:
    return FunctionTool.from_defaults(lambda amount: amount, name="pay", description="Pay.", fn_schema=Payment)


@pytest.mark.parametrize("demanded", [{"tool_required": True}, {"tool_choice": "pay"}])
@pytest.mark.parametrize("error_on_no_tool_call", [True, False])
def test_a_cut_demanded_call_says_that_it_was_cut(llm: Make, short: Any, demanded: dict[str, Any], error_on_no_tool_call: bool) -> None:
    response, max_tokens = _cut_call(short, demanded)
    assert f"max_tokens={max_tokens}" in response.raw["invalid_calls"][0]["error"]
    with pytest.raises(NoToolCallError, match=f"cut short.*max_tokens={max_tokens}: raise it") as caught:
        llm().get_tool_calls_from_response(response, error_on_no_tool_call=error_on_no_tool_call)
    assert "demand a call" not in str(caught.value)


def test_a_cut_call_is_no_answer_of_an_agent(short: Any, run: Make) -> None:
    async def ask(max_tokens: int) -> Any:
        return await FunctionAgent(tools=[pay()], llm=short(max_tokens), initial_tool_choice="pay").run("Pay?")

    with pytest.raises(ConfigError, match="max_tokens=9: the shortest answer"):
        run(ask(9))
    _, max_tokens = _cut_call(short, {"tool_choice": "pay"})
    with pytest.raises((NoToolCallError, ConfigError), match="max_tokens="):
        run(ask(max_tokens))


def test_words_that_were_cut_before_a_call_name_max_tokens(short: Any) -> None:
    model = short(5)
    response = model.chat_with_tools([pay()], user_msg="Pay?")
    assert response.raw["finish_reason"] == "length"
    with pytest.raises(NoToolCallError, match="called no tool but said .*; raise max_tokens, which ended it"):
        model.get_tool_calls_from_response(response)


def test_a_malformed_call_is_named_where_a_call_was_demanded(llm: Make) -> None:
    model = llm('<tool_call>\n{"name": "tide", "arguments": [1]}\n</tool_call>')
    response = model.chat_with_tools(tools(), user_msg="Tide?")
    assert response.raw["invalid_calls"][0]["name"] == "tide"
    with pytest.raises(NoToolCallError, match="'tide'.*malformed"):
        model.get_tool_calls_from_response(response)
    assert model.get_tool_calls_from_response(response, error_on_no_tool_call=False) == []  # free decoding: it is text


@pytest.mark.parametrize(("wanted", "max_tokens"), [(Amount, 1), (Amount, 3)])
def test_a_cut_object_is_none_even_where_it_fits(short: Any, run: Make, wanted: Any, max_tokens: int) -> None:
    """One token of a number is a number, too."""
    model, prompt = short(max_tokens), PromptTemplate("How much?")

    async def streamed() -> list[Any]:
        return [one async for one in await model.astream_structured_predict(wanted, prompt)]

    for ask in (
        lambda: model.structured_predict(wanted, prompt),
        lambda: run(model.astructured_predict(wanted, prompt)),
        lambda: list(model.stream_structured_predict(wanted, prompt)),
        lambda: run(streamed()),
        lambda: model.as_structured_llm(wanted).chat([user("How much?")]),
    ):
        with pytest.raises(StructuredOutputError, match=f"cut off after {max_tokens} tokens; raise max_tokens"):
            ask()


def test_an_object_at_the_tail_that_was_cut_is_told(llm: Make, run: Make, short: Any) -> None:
    """LlamaIndex makes a warning of the error; it names max_tokens."""
    agent = answer_at_tail(FunctionAgent(tools=tools(), llm=short(3)), Pay)

    async def ask() -> Any:
        return (await agent.run("Pay?")).structured_response

    with pytest.warns(UserWarning, match="max_tokens=3: the shortest answer"):
        assert run(ask()) is None


def _cutting(llm: Make, text: str) -> Any:
    """A model whose max_tokens end its answer after this text."""
    model = llm(text)
    sampling = model._ask

    def cut(messages: Any, given: Any) -> Any:
        ask, answer = sampling(messages, given)
        ids = ask.sampling.forced[:-1]  # without the end of the answer
        return replace(ask, sampling=replace(ask.sampling, forced=ids, max_tokens=len(ids))), answer

    object.__setattr__(model, "_ask", cut)
    return model


@pytest.mark.parametrize("streaming", [True, False])
def test_an_agent_names_max_tokens_where_a_call_was_cut(llm: Make, run: Make, streaming: bool) -> None:
    """Of a call that the model makes unasked."""
    model = _cutting(llm, 'I look.\n<tool_call>\n{"name": "tide", "arguments": {"harbour": "A"')

    async def ask() -> Any:
        return await FunctionAgent(tools=tools(), llm=model, streaming=streaming).run("Tide?")

    with pytest.raises(NoToolCallError, match=r"the call 'tide' with .* is cut short: .*, at max_tokens=\d+: raise it$"):
        run(ask())


@pytest.mark.parametrize("streaming", [True, False])
def test_a_step_that_was_cut_is_not_completed(llm: Make, run: Make, streaming: bool) -> None:
    """LlamaIndex's parser reads {"harbour": "A", "hour": 12 as a whole input."""
    model = _cutting(llm, 'Thought: I look.\nAction: wind\nAction Input: {"harbour": "A", "hour": 12')

    async def ask() -> Any:
        return await StableReActAgent(tools=tools(), llm=model, streaming=streaming).run("Wind?")

    with pytest.raises(NoToolCallError, match="cut off after .* raise max_tokens"):
        run(ask())


@pytest.mark.parametrize("streaming", [True, False])
def test_an_answer_that_ended_in_its_thought_is_told(llm: Make, run: Make, streaming: bool) -> None:
    model = _cutting(llm, "<think>\nLet me see. High water")

    async def ask() -> Any:
        return await FunctionAgent(tools=tools(), llm=model, streaming=streaming).run("Tide?")

    with pytest.warns(UserWarning, match="the answer is empty, as max_tokens .*: raise it") as told:
        assert str(run(ask())) == ""
    assert len([each for each in told if "is empty" in str(each.message)]) == 1


def test_a_shortened_answer_is_told(short: Any) -> None:
    with pytest.warns(UserWarning, match="ended early, to fit into max_tokens") as told:
        response = short(30).chat([user("Whose?")], response_format={"type": "json_object"})
    assert [each.filename for each in told] == [__file__]
    assert response.raw["shortened"] is True
    assert "cut" not in response.raw


def test_a_shortened_answer_names_its_line_under_progress_bars(short: Any) -> None:
    """Extractors show their progress: the frames of tqdm lie between."""

    async def ask() -> Any:
        return await run_jobs([short(30).achat([user("Whose?")], response_format={"type": "json_object"})], show_progress=True)

    with pytest.warns(UserWarning, match="ended early, to fit into max_tokens") as told:
        asyncio.run(ask())
    assert [each.filename for each in told] == [__file__]
