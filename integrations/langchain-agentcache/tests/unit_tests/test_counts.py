"""CacheCounts: what callbacks hear adds up to what the engine counted."""

from __future__ import annotations

from typing import Any

from langchain_agentcache import AgentCacheLLM, CacheCounts
from langchain_core.caches import InMemoryCache
from langchain_core.messages import HumanMessage


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
    counts, model = CacheCounts(), AgentCacheLLM(model=model_folder, max_tokens=3, store=None)
    model.invoke("High water is at", {"callbacks": [counts]})
    assert counts.stats["tokens"]["completion"] == 3
