"""`benchmarks.through langchain`: the same agent does the same through both classes, and what is timed is what is said."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from agentcache import toy
from benchmarks import through_langchain
from benchmarks import through_task as through
from benchmarks.episode import Episode, load_episode
from benchmarks.through import app

HERE = through_langchain
CALLS = 3


def small(task: Episode) -> tuple[Any, Any]:
    return toy.model(2048, layers=2, hidden=128), toy.tokenizer(task.texts, 2048)


def test_the_task_in_text() -> None:
    task = load_episode()
    told = through.in_text(task, HERE.THOUGHT, HERE.END)
    assert len(told) == 1 + sum(len(results) for _, results in task.steps)
    assert all("\nAction: " in turn.said and "\nAction Input: {" in turn.said for turn in told[:-1])
    assert "Final Answer: " in told[-1].said
    assert [result for turn in told for _, result in turn.results] == [result for _, results in task.steps for result in results]


def test_ours_alone_and_first_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HERE, "STOCK", ())
    monkeypatch.setattr(HERE, "NEEDED", {})
    task = load_episode()
    found = through.run(HERE, lambda: small(task), task, calls=CALLS)
    (way,) = found["ways"]
    assert way["computed_tokens"][0] == way["prompt_tokens"][0] > 3000
    assert len(way["step_ms"]) == CALLS
    assert max(way["computed_tokens"][1:]) < 500
    seen = found["first_tokens"]
    assert seen["computed_tokens"][0] == seen["prompt_tokens"][0]
    assert max(seen["computed_tokens"][1:]) < 700
    assert all(mine >= own > 0 for mine, own in zip(seen["agent_ms"], seen["engine_ms"]))
    assert len(seen["agent_ms"]) == CALLS
    assert len(through.tables(found)) == 2
    json.dumps(found, allow_nan=False)


def test_another_text_or_answer_is_no_comparison() -> None:
    told = [through.Turn("Thought: so", ())]
    one = through.Way("one", [1.0], ["Thought: so"], "yes")
    through._check([one, through.Way("two", [1.0], [" Thought: so"], "yes")], told, {})
    for other in (through.Way("two", [1.0], ["Thought: no"], "yes"), through.Way("two", [1.0], ["Thought: so"], "no")):
        with pytest.raises(AssertionError, match="two"):
            through._check([one, other], told, {})


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HERE, "NEEDED", {"no_such.thing": "no-such-thing", "langchain": "langchain"})
    done = CliRunner().invoke(app, ["langchain"])
    assert done.exit_code == 1
    assert "langchain: not installed: no-such-thing; pip install no-such-thing" in done.output


@pytest.mark.skipif(importlib.util.find_spec("langchain_huggingface") is None, reason="compares with langchain-huggingface")
def test_side_by_side(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    places = [str(tmp_path / name) for name in ("steps.json", "steps.png")]
    done = CliRunner().invoke(app, ["langchain", "--calls", "3", "--json", places[0], "--plot", places[1]])
    assert done.exit_code == 0, done.output
    found = json.loads(Path(places[0]).read_text())
    assert [way["name"] for way in found["ways"]] == ["ChatHuggingFace", "ChatAgentCache"]
    assert [len(way["step_ms"]) for way in found["ways"]] == [3, 3]
    assert Path(places[1]).stat().st_size > 1000


def test_episode_is_whole() -> None:
    episode = load_episode()
    assert len(episode.tools) == 20
    assert len(episode.steps) >= 6
    for text, results in episode.steps:
        assert text.count("<tool_call>") == text.count("</tool_call>") == len(results)
    assert not episode.steps[-1][1]
