"""Strategies of layout: one text that changes, in six places, over the same sessions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agentcache import traces
from agentcache.engine import Engine
from agentcache.errors import ConfigError
from benchmarks import strategies
from benchmarks.strategies import STRATEGIES, interval, requests, run, sessions
from tests import models
from tests.bench.recorded_episodes import CHAT, TEXT, tool

HERE = Path()  # no catalog is read
OWN = {"tools": [tool("wash"), tool("feed")], "tools_events": []}
EPISODES = [traces.episode({key: value for key, value in raw.items() if key != "tools_ref"} | OWN, HERE) for raw in CHAT]


def size(text: str, tools: Any) -> int:
    return len(text) // 4 + 40 * len(tools)


def test_sessions_have_the_size_and_calls_asked_for() -> None:
    for prompt in (60, 300, 700):
        made = sessions(EPISODES, size, prompt, 7, 3)
        assert len(made) == 3
        for one in made:
            assert len(one.calls) == 7
            assert 0.8 * prompt <= size(one.system, one.tools) <= prompt
            assert all(one.messages[stop]["role"] == "assistant" for stop in one.calls)
            ids = [call["id"] for message in one.messages for call in message.get("tool_calls", ())]
            assert len(set(ids)) == len(ids)
    with pytest.raises(ConfigError, match="no chat episodes"):
        sessions([traces.episode(raw, HERE) for raw in TEXT], size, 100, 2, 1)


def test_the_text_changes_at_each_call_in_its_place() -> None:
    (session,) = sessions(EPISODES, size, 300, 4, 1)
    for strategy in STRATEGIES:
        asked = list(requests(session, strategy))
        said = [f"Call {number}." for number in (1, 2, 3, 4)]
        for text, (messages, volatile) in zip(said, asked):
            inside = [message["role"] for message in messages if text in message["content"]] if strategy != "none" else []
            if strategy in ("front", "system"):
                assert inside == ["system"]
                assert messages[0]["content"].startswith(text) == (strategy == "front")
            elif strategy == "results":
                assert set(inside) <= {"tool"}
            else:
                assert inside == []
            assert volatile.startswith(text) == (strategy in ("kept", "tail"))
    assert any("Call 4." in message["content"] for message in list(requests(session, "results"))[-1][0])


def test_counting_agrees_with_an_engine() -> None:
    made, tok = models.build("qwen3"), models.toy_tokenizer()
    counted = run(tok, EPISODES, (600,), (6,), 2, 0.1)["cells"][0]["strategies"]

    def engine_of(strategy: str) -> Engine:
        return Engine(made, tok, store=None, memory_bytes=64 << 20, layout=strategies.options(strategy))

    timed = run(tok, EPISODES, (600,), (6,), 2, 0.1, engine_of)["cells"][0]["strategies"]
    for strategy in STRATEGIES:
        assert counted[strategy]["ttft_ms"] is None
        assert timed[strategy]["ttft_ms"] > 0
        assert counted[strategy]["prompt_tokens"] == timed[strategy]["prompt_tokens"]
        assert counted[strategy]["computed_tokens"] == pytest.approx(timed[strategy]["computed_tokens"], rel=0.02)
    share = {strategy: row["hit_share"] for strategy, row in counted.items()}
    assert share["front"] < 0.1
    assert share["front"] < share["system"] < share["results"] < share["none"]
    assert share["tail"] > share["kept"] > share["system"]
    assert share["none"] - share["tail"] < 0.05


def test_an_interval_holds_its_ratio() -> None:
    middle, low, high = interval([(1.0, 2.0), (3.0, 4.0), (2.0, 8.0)], "seed")
    assert middle == pytest.approx(6 / 14)
    assert low < middle < high
    assert interval([(1.0, 2.0)] * 5, "seed") == (0.5, 0.5, 0.5)
