"""CacheCounts: what callbacks hear adds up to what the engine counted."""

from __future__ import annotations

from typing import Any

from langchain_agentcache import AgentCacheLLM, CacheCounts
from langchain_core.caches import InMemoryCache
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import HumanMessage
from langchain_core.outputs import LLMResult


def test_callbacks_count_what_the_engine_counts(chat: Any) -> None:
    counts, model = CacheCounts(), chat(max_tokens=4, namespace="counted", cache=InMemoryCache())
    config: Any = {"callbacks": [counts]}
    for _ in range(2):  # the second answer is LangChain's
        model.invoke([HumanMessage("Fog?")], config)
    list(model.stream([HumanMessage("Fog?")], config))
    own = model._engine().stats("counted")
    model.invoke([HumanMessage("Not counted.")])
    assert counts.stats == {family: own[family] for family in counts.stats}
    assert {"requests", "tokens", "refusals", "ttft_s", "token_s"} <= set(counts.stats)
    assert counts.stats["tokens"]["memory"] > 0


def test_text_models_are_counted(model_folder: str) -> None:
    counts, model = CacheCounts(), AgentCacheLLM(model=model_folder, max_tokens=3, cache_dir="")
    model.invoke("High water is at", {"callbacks": [counts]})
    assert counts.stats["tokens"]["completion"] == 3


class _Ends(BaseCallbackHandler):
    """The generations that tracers see, with the names of their runs."""

    def __init__(self) -> None:
        self.names: list[str | None] = []
        self.infos: list[Any] = []

    def on_chat_model_start(self, serialized: dict[str, Any], messages: Any, **kwargs: Any) -> None:
        self.names.append(serialized.get("name"))

    def on_llm_end(self, response: LLMResult, **kwargs: Any) -> None:
        self.infos.append(response.generations[0][0].generation_info)


async def test_tracers_hear_a_name_and_why_an_answer_ended(chat: Any) -> None:
    ends, model = _Ends(), chat(max_tokens=4, name="harbour")
    config: Any = {"callbacks": [ends]}
    model.invoke([HumanMessage("Fog?")], config)
    await model.ainvoke([HumanMessage("Fog?")], config)
    list(model.stream([HumanMessage("Fog?")], config))
    assert [one.text async for one in model.astream([HumanMessage("Fog?")], config)]
    assert ends.infos == [{"finish_reason": "length"}] * 4
    assert ends.names == ["harbour"] * 4
