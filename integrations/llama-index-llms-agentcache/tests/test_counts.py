"""CacheCounts: what instrumentation tells adds up to what the engine counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cases import user
from llama_index.core.instrumentation import get_dispatcher
from llama_index.llms.agentcache import CacheCounts

Make = Callable[..., Any]


def test_instrumentation_counts_what_the_engine_counts(llm: Make) -> None:
    model, counts, handlers = llm("One.", "Two.", "Not counted."), CacheCounts(), get_dispatcher().event_handlers
    before = model.engine.stats()
    get_dispatcher().add_event_handler(counts)
    model.chat([user("Fog?")])
    list(model.stream_chat([user("Fog?")]))
    handlers.remove(counts)
    model.chat([user("Tide?")])
    after = model.engine.stats()
    assert sum(counts.stats["requests"].values()) == 2
    assert sum(after["requests"].values()) - sum(before.get("requests", {}).values()) == 3
    written = sum(one.completion_tokens for one in model.receipts[:2])
    assert counts.stats["tokens"]["completion"] == written
    assert counts.stats["tokens"]["memory"] == sum(one.cached_tokens for one in model.receipts[:2])
    assert set(counts.stats) <= set(after)
