"""The comparison with ChatHuggingFace: the same agent does the same through both."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from agentcache.bench import through
from agentcache.errors import ConfigError


def test_an_task_in_text() -> None:
    task = through.load()
    told = through.react(task)
    assert len(told) == 1 + sum(len(results) for _, results in task.steps)
    assert all("\nAction: " in text and "\nAction Input: {" in text for text, _ in told[:-1])
    assert "Final Answer: " in told[-1][0]
    assert [seen for _, seen in told[:-1]] == [result for _, results in task.steps for result in results]


def test_through_our_own() -> None:
    task = through.load()
    told = through.react(task)
    told = [*told[:2], told[-1]]
    way = through._through("ChatAgentCache", task, told, 2, 128)
    assert way.answer == told[-1][0].partition("Final Answer: ")[2]
    assert len(way.step_ms) == 3
    assert way.computed_tokens[0] == way.prompt_tokens[0] > 3000
    assert max(way.computed_tokens[1:]) < 400


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(through, "NEEDED", ("no_such_thing",))
    with pytest.raises(ConfigError, match="'no_such_thing'.* not installed; pip install no-such-thing"):
        through.compare()


@pytest.mark.skipif(importlib.util.find_spec("langchain_huggingface") is None, reason="compares with langchain-huggingface")
def test_side_by_side(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    figures = through.compare(layers=2, hidden=128, steps=2, plot=tmp_path / "steps.png")
    assert figures["steps"] == 3
    assert len(figures["step_ratios"]) == 3
    assert (tmp_path / "steps.png").stat().st_size > 1000
