"""RequestRecorder: what an agent asked is what lint and calibrate read."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import script
from harbour import tide
from langchain.agents import create_agent
from langchain.agents.middleware import dynamic_prompt
from langchain_agentcache import AgentCacheLLM, ChatAgentCache, RequestRecorder
from langchain_core.language_models import GenericFakeChatModel
from langchain_core.messages import AIMessage, HumanMessage
from langgraph.checkpoint.memory import InMemorySaver

from agentcache import Recorder
from agentcache.approximate.calibrate import shifts
from agentcache.errors import AgentCacheError
from agentcache.lint import lint
from agentcache.traces import read

KEEPER = "You are the keeper of a lighthouse. Write down wind, tide and every ship that passes. "


@pytest.fixture
def model(chat: Any, monkeypatch: pytest.MonkeyPatch) -> ChatAgentCache:
    monkeypatch.setitem(script.LINES, "When is high water?", script.call("tide", harbour="Averil"))
    return chat(max_tokens=40)


def asked(text: str = "When is high water?") -> Any:
    return {"messages": [HumanMessage(text)]}


@script.TOLD_IN_LOOPS
async def test_agents_are_recorded(model: ChatAgentCache, tmp_path: Path) -> None:
    clock = itertools.count(12)

    @dynamic_prompt
    def timed(request: Any) -> str:
        return f"{KEEPER} It is {next(clock)}:30."

    agent = create_agent(model, [tide], middleware=[timed], checkpointer=InMemorySaver())
    steady = create_agent(model, [tide], system_prompt=KEEPER, checkpointer=InMemorySaver())
    path = tmp_path / "requests.jsonl"
    with RequestRecorder(path) as recorder:
        agent.invoke(asked(), {"callbacks": [recorder], "configurable": {"thread_id": "a"}})
        await steady.ainvoke(asked(), {"callbacks": [recorder], "configurable": {"thread_id": "b"}})
        for _ in steady.stream(asked("Hello"), {"callbacks": [recorder], "configurable": {"thread_id": "b"}}, stream_mode="messages"):
            pass
    recorder.recorder.record("after its end")
    lines = path.read_text(encoding="utf-8").splitlines()
    assert "after its end" not in lines[-1], "its own file was closed with it"
    first = json.loads(lines[0])["response"]
    assert first["choices"][0]["finish_reason"] == "tool_calls"
    assert first["usage"]["input_tokens"] > 0
    report = lint(path)
    assert not report.problems
    assert {(found.conversation, str(found.cause), found.writer) for found in report.findings} == {("a", "clock", "system")}
    episodes = {episode.id: episode for episode in read(path)}
    assert sorted(episodes) == ["a", "b"]
    assert [len(call.prompt) for call in episodes["b"].calls] == [2, 4, 6]
    answer: Any = episodes["b"].calls[0].answer
    assert answer["tool_calls"][0]["function"] == {"name": "tide", "arguments": '{"harbour": "Averil"}'}
    assert [each["function"]["name"] for each in episodes["b"].calls[0].tools] == ["tide"]
    assert {case.family for case in shifts.cases(list(episodes.values()), 1)} >= {"dated system", "second agent"}


def test_text_models_other_providers_and_failures(model: ChatAgentCache, model_folder: str, tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "requests.jsonl")
    with recorder, RequestRecorder(recorder) as callback:
        told: Any = {"callbacks": [callback], "metadata": {"session_id": "s"}}
        AgentCacheLLM(model=model_folder, max_tokens=4, memory_bytes=64 << 20).invoke("Wind and tide", told)
        picture = {"type": "image_url", "image_url": {"url": "data:,x"}}
        GenericFakeChatModel(messages=iter([AIMessage("A ship.")])).invoke([HumanMessage([picture])], told)
        with pytest.raises(AgentCacheError):
            model.invoke([HumanMessage([picture])], told)
        callback.close()
        assert not callback._asked, "nothing is remembered of what has ended"
        recorder.record("It is the caller's: still open")
    lines = (tmp_path / "requests.jsonl").read_text(encoding="utf-8").splitlines()
    assert ['"prompt": "Wind and tide"' in line for line in lines] == [True, False, False, False]
    assert lines.pop().startswith('{"conversation_id": null'), "a Recorder that was given is its owner's to close"
    assert ['"response"' in line for line in lines] == [True, True, False]
    assert [json.loads(line)["model"] for line in lines] == [model_folder, "", model_folder]
    (episode,) = read(tmp_path / "requests.jsonl")
    assert [type(call.prompt) for call in episode.calls] == [str, list]


def test_a_request_with_blocks_that_openai_lacks_is_recorded(tmp_path: Path) -> None:
    document, film = {"type": "text-plain", "text": "High water at 3:12."}, {"type": "video", "url": "https://example.com"}
    said = HumanMessage([document, film, {"cachePoint": {"type": "default"}}, "When?"])
    with RequestRecorder(tmp_path / "requests.jsonl") as recorder:
        GenericFakeChatModel(messages=iter([AIMessage("At 3:12.")])).invoke([said], {"callbacks": [recorder]})
    (line,) = (tmp_path / "requests.jsonl").read_text(encoding="utf-8").splitlines()
    assert "High water at 3:12.\\nWhen?" in line
