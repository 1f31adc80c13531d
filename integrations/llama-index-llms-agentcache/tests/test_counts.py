"""CacheCounts: what instrumentation tells adds up to what the engine counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from cases import user
from llama_index.core.instrumentation import get_dispatcher
from llama_index.llms.agentcache import CacheCounts

Make = Callable[..., Any]


def test_instrumentation_counts_what_the_engine_counts(llm: Make) -> None:
    model, counts, handlers = llm("One.", "Two.", "Not counted."), CacheCounts(), get_dispatcher().event_handlers
    get_dispatcher().add_event_handler(counts)
    model.chat([user("Fog?")])
    list(model.stream_chat([user("Fog?")]))
    handlers.remove(counts)
    own = model.engine.stats(model.namespace)
    model.chat([user("Tide?")])
    for family, heard in counts.stats.items():
        assert heard == pytest.approx(own[family]), family
    assert {"requests", "tokens", "refusals", "ttft_s", "token_s"} <= set(counts.stats)
    assert counts.stats["tokens"]["memory"] > 0
