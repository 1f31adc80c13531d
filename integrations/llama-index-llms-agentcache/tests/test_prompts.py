"""Prompts that a user's own functions write, as HuggingFaceLLM takes them: read by the model as they are, or refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from cases import call, tools, user
from llama_index.core.agent.workflow import AgentWorkflow
from llama_index.core.base.llms.types import CacheControl, CachePoint, ChatMessage, TextBlock
from llama_index.core.prompts import PromptTemplate
from llama_index.llms.agentcache import ReplayLLM, StableReActAgent

from agentcache.errors import ConfigError

Make = Callable[..., Any]


def zephyr(messages: Sequence[ChatMessage]) -> str:
    return "".join(f"<|{one.role.value}|>\n{one.content}\n" for one in messages) + "<|assistant|>\n"


def alpaca(text: str) -> str:
    return f"### Instruction:\n{text}\n### Response:\n"


@pytest.fixture
def read(shared_engine: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the model has read, prompt by prompt."""
    texts: list[str] = []
    render = shared_engine.renderer.render

    def spy(*args: Any, **options: Any) -> Any:
        layout = render(*args, **options)
        texts.append(layout.text)
        return layout

    monkeypatch.setattr(shared_engine.renderer, "render", spy)
    return texts


def test_messages_to_prompt_writes_what_the_model_reads(llm: Make, run: Make, read: list[str]) -> None:
    model = llm("One.", "Two.", "Three.", "Four.", messages_to_prompt=zephyr, system_prompt="Be brief.")
    turns = [ChatMessage(role="system", content="Keep the light."), user("Lit?")]
    written = zephyr(turns)
    assert model.chat(turns).message.content == "One."
    assert list(model.stream_chat(turns))[-1].message.content == "Two."
    assert run(model.achat(turns)).message.content == "Three."
    assert model.complete("Lit?").text == "Four."
    assert read == [written] * 3 + [zephyr([ChatMessage(role="system", content="Be brief."), user("Lit?")])]


def test_completion_to_prompt_writes_what_the_model_reads(llm: Make, run: Make, read: list[str]) -> None:
    model = llm(*["Yes."] * 4, completion_to_prompt=alpaca)
    assert model.complete("Lit?").text == "Yes."
    assert run(model.acomplete("Lit?")).text == "Yes."
    assert model.predict(PromptTemplate("Lit at {place}?"), place="Averil") == "Yes."  # what query engines ask with
    assert model.complete("as it is", formatted=True).text == "Yes."
    assert read == [alpaca("Lit?")] * 2 + [alpaca("Lit at Averil?"), "as it is"]
    assert not model.metadata.is_chat_model


def test_tools_and_a_prompt_of_ones_own_are_refused(llm: Make) -> None:
    model = llm(messages_to_prompt=zephyr)
    for ask in (lambda: model.chat_with_tools(tools(), user_msg="?"), lambda: model.with_superset(tools()).chat([user("?")])):
        with pytest.raises(ConfigError, match="told of no tools, but there are .'tide'.*StableReActAgent"):
            ask()
    assert not model.metadata.is_function_calling_model


def test_text_agents_write_tools_and_stop_at_observations(llm: Make, run: Make, read: list[str]) -> None:
    script = (
        'Thought: I look.\nAction: tide\nAction Input: {"harbour": "Averil"}\nObservation: made up',
        "Thought: I know.\nAnswer: 14:05.",
    )
    model = llm(*script, messages_to_prompt=zephyr)

    async def ask() -> str:
        return str(await StableReActAgent(tools=tools(), llm=model).run("Tide?"))

    assert run(ask()) == "14:05."
    assert all(text.startswith("<|system|>") for text in read)
    assert "made up" not in read[1]
    workflow = AgentWorkflow.from_tools_or_functions(tools(), llm=model)
    assert type(workflow.agents["Agent"]).__name__ == "ReActAgent"


def test_a_cache_point_in_it_is_told_as_not_pinned(llm: Make) -> None:
    point = CachePoint(cache_control=CacheControl(type="ephemeral"))
    model = llm("One.", messages_to_prompt=zephyr)
    response = model.chat([ChatMessage(role="user", blocks=[TextBlock(text="?"), point])])
    assert any("not pinned" in note for note in response.raw["receipt"]["notes"])


@pytest.mark.parametrize("name", ["messages_to_prompt", "completion_to_prompt"])
def test_a_function_that_writes_no_text_is_refused(llm: Make, name: str) -> None:
    model = llm("One.", **{name: lambda what: None})
    with pytest.raises(ConfigError, match="must return the prompt as a text"):
        model.complete("?")


def test_a_function_must_be_given_again(llm: Make) -> None:
    """No file can hold it, and without it the model would be another one."""
    data = json.loads(llm(messages_to_prompt=zephyr).to_json())
    given = {"engine": llm().engine}
    with pytest.raises(ConfigError, match=r"'messages_to_prompt'.* from_dict\(data, messages_to_prompt=\.\.\."):
        ReplayLLM.from_dict(data, **given)
    again = ReplayLLM.from_dict(data, **given, messages_to_prompt=zephyr)
    again.expect(call("tide", harbour="Averil"))
    assert again.chat([user("?")]).raw["usage"]["prompt_tokens"] == len(again.count(zephyr([user("?")])))
