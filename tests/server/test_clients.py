"""Clients of OpenAI's API, and agents of frameworks, on the embedded model: it chooses the tools itself."""

from __future__ import annotations

import asyncio
from typing import Literal

import pytest
from pydantic import BaseModel

from tests.serving import ASKED, Served

QUESTIONS = [("Cancel the order 77812.", "cancel_order 77812", "accepted")]
called: list[str] = []


def get_invoice(invoice_id: str) -> str:
    """Get an invoice."""
    called.append(f"get_invoice {invoice_id}")
    return '{"status": "open", "amount": 240}'


def cancel_order(order_id: str) -> str:
    """Cancel an order."""
    called.append(f"cancel_order {order_id}")
    return '{"status": "accepted"}'


@pytest.fixture(autouse=True)
def _none_called() -> None:
    called.clear()


class Port(BaseModel):
    """What a caller asks for, in fields."""

    port: str
    water: Literal["high", "low"]


def test_openai_parses_a_chat_into_a_model(served: Served) -> None:
    said = served.openai().chat.completions.parse(model="embedded", messages=ASKED, response_format=Port, max_tokens=96)
    assert isinstance(said.choices[0].message.parsed, Port)


def test_openai_parses_a_response_into_a_model(served: Served) -> None:
    said = served.openai().responses.parse(model="embedded", input="Which port?", text_format=Port, max_output_tokens=96)
    assert isinstance(said.output_parsed, Port)


def test_openai_parses_the_arguments_of_a_call(served: Served) -> None:
    openai = pytest.importorskip("openai")
    tool = openai.pydantic_function_tool(Port)
    asked = {"model": "embedded", "messages": ASKED, "tools": [tool], "tool_choice": "required", "max_tokens": 96}
    [call] = served.openai().chat.completions.parse(**asked).choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, Port)
    with served.openai().chat.completions.stream(**asked) as stream:
        final = stream.get_final_completion().choices[0].message.tool_calls[0].function
    assert final.parsed_arguments == call.function.parsed_arguments


@pytest.mark.parametrize(("question", "call", "answer"), QUESTIONS)
@pytest.mark.parametrize("api", ["chat", "responses"])
@pytest.mark.parametrize("streaming", [False, True])
def test_a_langchain_agent_calls_and_answers(served: Served, question: str, call: str, answer: str, api: str, streaming: bool) -> None:
    chat_openai = pytest.importorskip("langchain_openai").ChatOpenAI
    agents = pytest.importorskip("langchain.agents")
    model = chat_openai(
        model="embedded", base_url=f"{served.url}/v1", api_key="none", max_retries=0, max_tokens=120, use_responses_api=api == "responses",
        streaming=streaming, stream_usage=True,
    )  # fmt: skip
    agent = agents.create_agent(model, [get_invoice, cancel_order], system_prompt="You are a helpful assistant.")
    *_, last = agent.invoke({"messages": [{"role": "user", "content": question}]})["messages"]
    assert called == [call]
    assert answer in last.text
    assert last.usage_metadata["input_token_details"]["cache_read"] > 0, "the second step goes on from the first"


@pytest.mark.parametrize("streaming", [False, True])
def test_anthropics_tool_runner_calls_and_answers(served: Served, streaming: bool) -> None:
    client, tool = served.anthropic(), pytest.importorskip("anthropic").beta_tool
    asked = {"model": "embedded", "max_tokens": 120, "system": "You are a helpful assistant.", "stream": streaming}
    question, call, answer = QUESTIONS[0]
    tools, turns = [tool(get_invoice), tool(cancel_order)], [{"role": "user", "content": question}]
    runner = client.beta.messages.tool_runner(**asked, tools=tools, messages=turns)
    *_, last = [step.get_final_message() if streaming else step for step in runner]
    assert called == [call]
    assert answer in last.content[0].text
    assert last.usage.cache_read_input_tokens > 0, "the second step goes on from the first"


@pytest.mark.filterwarnings("ignore")  # its own, of pydantic
def test_a_litellm_completion_calls_and_streams(served: Served) -> None:
    litellm = pytest.importorskip("litellm", reason="litellm needs boto3 and openai<3, which are not in the extra dev")
    asked = {"model": "openai/embedded", "api_base": f"{served.url}/v1", "api_key": "none", "messages": ASKED, "max_tokens": 96}
    tool = {"type": "function", "function": {"name": "port", "parameters": Port.model_json_schema()}}
    [call] = litellm.completion(**asked, tools=[tool], tool_choice="required").choices[0].message.tool_calls
    assert call.function.name == "port"
    assert Port.model_validate_json(call.function.arguments)
    whole = litellm.completion(**asked)
    *_, last = chunks = list(litellm.completion(**asked, stream=True, stream_options={"include_usage": True}))
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == whole.choices[0].message.content
    assert last.usage.prompt_tokens_details.cached_tokens == last.usage.prompt_tokens - 1


@pytest.mark.filterwarnings("ignore")  # its own, of pydantic
@pytest.mark.parametrize("streaming", [False, True])
def test_a_llama_index_agent_calls_and_answers(served: Served, streaming: bool) -> None:
    reason = "llama-index-llms-openai-like needs openai<3, which is not in the extra dev"
    openai_like = pytest.importorskip("llama_index.llms.openai_like", reason=reason).OpenAILike
    workflow = pytest.importorskip("llama_index.core.agent.workflow")
    llm = openai_like(
        model="embedded", api_base=f"{served.url}/v1", api_key="none", is_chat_model=True, is_function_calling_model=True, max_tokens=120
    )
    question, call, answer = QUESTIONS[0]

    async def ask() -> str:
        tools, system = [get_invoice, cancel_order], "You are a helpful assistant."
        return str(await workflow.FunctionAgent(tools=tools, llm=llm, system_prompt=system, streaming=streaming).run(question))

    assert answer in asyncio.run(ask())
    assert called == [call]
