"""Requests as they were sent, in a file that lint and calibrate read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cases import call, system, tools, user
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.instrumentation import get_dispatcher
from llama_index.llms.agentcache import AppendOnlyMemory, RequestRecorder

from agentcache.lint import lint
from agentcache.traces import read

Make = Callable[..., Any]
PROMPT = "You keep the light and answer what ships ask. " * 8


def test_an_agents_requests_are_read_by_lint_and_calibrate(llm: Make, run: Make, tmp_path: Path) -> None:
    model, path = llm(call("tide", harbour="Averil"), "At 14:05.", "Yes.", "Not written down."), tmp_path / "requests.jsonl"

    async def ask() -> None:
        memory = AppendOnlyMemory()
        for clock in ("10:11:12", "10:12:40"):
            agent = FunctionAgent(tools=tools()[:1], llm=model.with_superset(tools()), system_prompt=f"{PROMPT} It is {clock}.")
            await agent.run("Tide?", memory=memory)

    before = list(get_dispatcher().event_handlers)
    with RequestRecorder(path):
        run(ask())
    model.chat([user("?")])
    assert get_dispatcher().event_handlers == before
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [len(one["messages"]) for one in lines] == [2, 4, 6]
    assert all([tool["function"]["name"] for tool in one["tools"]] == ["tide", "wind"] for one in lines)  # as shown: the superset
    assert lines[1]["messages"][2]["tool_calls"][0]["function"]["name"] == "tide"
    assert [one["response"]["choices"][0]["message"]["content"] for one in lines] == ["", "At 14:05.", "Yes."]
    assert lines[1]["response"]["usage"]["prompt_tokens"] == model.receipts[1].prompt_tokens
    assert [str(one.cause) for one in lint(path).findings] == ["clock"]
    (episode,) = read(path)
    assert [len(one.prompt) for one in episode.calls] == [2, 4, 6]


def test_a_raw_prompt_and_a_name_of_the_conversation(llm: Make, tmp_path: Path) -> None:
    model, path = llm("One.", "Two."), tmp_path / "requests.jsonl"
    with RequestRecorder(path, conversation="a"):
        model.complete("Once upon a time", formatted=True)
        assert model.chat([system("Be brief."), user("?")]).message.content == "Two."
    raw, chat = (json.loads(line) for line in path.read_text().splitlines())
    assert (raw["prompt"], raw["response"]["choices"][0]["text"]) == ("Once upon a time", "One.")
    assert raw["conversation_id"] == chat["conversation_id"] == "a"


def test_events_that_are_dumped_hold_no_prompt(llm: Make) -> None:
    heard: list[Any] = []
    model = llm("One.")
    with RequestRecorder("/dev/null") as recorder:
        object.__setattr__(recorder, "handle", lambda one, **kwargs: heard.append(one))
        model.chat([user("a secret")])
    told = [one for one in heard if one.class_name() == "AgentCacheReceiptEvent"]
    assert len(told) == 1
    assert "a secret" in str(told[0].prompt)
    assert "a secret" not in told[0].model_dump_json() + repr(told[0])
