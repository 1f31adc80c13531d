"""Recorded episodes: all three kinds are read as they are meant, and replayed to the token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from agentcache import traces as trace_files
from agentcache.bench import react, shapes
from agentcache.bench.cli import app
from agentcache.engine import Engine
from agentcache.errors import ConfigError
from tests.bench.recorded_episodes import CHAT, TEXT, asks, said, tool, user

Json = dict[str, Any]


STEPS: list[Json] = [
    {
        "id": "edit-1",
        "tools": [tool("feed")],
        "steps": [
            {"messages": [{"role": "system", "content": "A zoo."}, user("Feed it.")], "completion": asks("feed", 1, '{\n "id": "b"}')},
            {"messages": [{"role": "system", "content": "A zoo."}, user("(shortened)"), user("And now?")], "completion": said("Fed.")},
        ],
    }
]


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    """traces/{chat,text,steps}.jsonl and tools/zoo.jsonl"""
    for folder, files in {
        "traces": {"chat": CHAT, "text": TEXT, "steps": STEPS},
        "tools": {"zoo": [tool("feed"), tool("wash"), tool("count")]},
    }.items():
        (tmp_path / folder).mkdir()
        for name, lines in files.items():
            (tmp_path / folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n", encoding="utf-8")
    return tmp_path / "traces"


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Any:
    tiny = {**shapes.SHAPES["small"][1], "hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "vocab_size": 2048}
    monkeypatch.setitem(shapes.SHAPES, "small", ("qwen3", tiny))
    with Engine(*shapes.load("small")) as made:
        yield made


def test_chat_is_one_call_per_assistant_turn(traces: Path) -> None:
    episodes = list(trace_files.read(traces / "chat.jsonl"))
    assert [e.id for e in episodes] == ["zoo-1", "zoo-2"]
    calls = episodes[0].calls
    assert [len(call.prompt) for call in calls] == [3, 5, 7, 10]  # system and all before; the greeting is no call
    assert calls[0].prompt[1] == said("Hello.")
    assert [call.answer for call in calls] == [CHAT[0]["messages"][at] for at in (2, 4, 6, 9)]
    names = [[t["function"]["name"] for t in call.tools] for call in calls]
    assert names == [["wash", "feed"]] * 2 + [["wash", "feed", "count"]] * 2


def test_text_and_steps(traces: Path) -> None:
    [text] = trace_files.read(traces / "text.jsonl")
    assert [(call.prompt, call.answer) for call in text.calls] == list(zip(TEXT[0]["prompts"], TEXT[0]["completions"], strict=True))
    [steps] = trace_files.read(traces / "steps.jsonl")
    assert steps.kind == "chat_steps"
    assert steps.calls[1].prompt == STEPS[0]["steps"][1]["messages"]
    assert steps.calls[1].tools == (tool("feed"),)


def test_limits(traces: Path) -> None:
    [one] = trace_files.read(traces / "chat.jsonl", episodes=1, calls=2)
    assert len(one.calls) == 2
    assert sum(map(len, trace_files.texts([one], most_chars=100))) <= 100


def test_broken_workloads_are_named(traces: Path) -> None:
    with pytest.raises(ConfigError, match="is not a file"):
        list(trace_files.read(traces / "nothing.jsonl"))
    (traces / "bad.jsonl").write_text('{"id": 1}\n', encoding="utf-8")
    with pytest.raises(ConfigError, match="line 1: has none of"):
        list(trace_files.read(traces / "bad.jsonl"))
    (traces / "bad.jsonl").write_text("\n[1]\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="line 2: list instead of an object"):
        list(trace_files.read(traces / "bad.jsonl"))
    (traces / "bad.jsonl").write_text("{", encoding="utf-8")
    with pytest.raises(ConfigError, match="not JSON"):
        list(trace_files.read(traces / "bad.jsonl"))
    with pytest.raises(ConfigError, match="without 'completions'"):
        trace_files.episode({"prompts": []}, traces)
    with pytest.raises(ConfigError, match="--tools-dir"):
        list(trace_files.read(traces / "chat.jsonl", tools_dir=traces))
    with pytest.raises(ConfigError, match="'fly'"):
        trace_files.episode({**CHAT[0], "tool_names": ["fly"]}, traces.parent / "tools")


def test_replay_computes_what_is_new(traces: Path, engine: Engine) -> None:
    families = {path.stem: list(trace_files.read(path)) for path in sorted(traces.glob("*.jsonl"))}
    found = react.run(engine, families, decode=2, off=True, stock=True)
    assert found["calls"] == 8 + 2 + 2
    for name, family in found["families"].items():
        assert family["within_bound"], name
        assert family["new_tokens"] < family["prompt_tokens"]
        assert all(family[key] > 0 for key in ("ms", "off_ms", "stock_ms"))
        assert family["calls"] == sum(episode["calls"] for episode in family["episodes"])
    assert found["families"]["chat"]["tool_groups"] == 1
    assert found["families"]["chat"]["group_pages"] >= 1
    second = found["families"]["chat"]["episodes"][1]
    assert second["new_tokens"] < second["prompt_tokens"] / 10  # what it shares with the first episode is not new


def test_forced_answers_end_with_their_end_token(traces: Path, engine: Engine) -> None:
    replay = react.Replay(engine)
    [steps] = trace_files.read(traces / "steps.jsonl")
    ids = replay.answers.ids(steps.calls[0])
    text = engine.tokenizer.decode(ids)
    assert text == '<tool_call>\n{"name": "feed", "arguments": {"id": "b"}}\n</tool_call><|im_end|>'
    assert ids[-1] == engine.tokenizer.eos_token_id


def test_a_second_copy_of_a_group_is_noticed(traces: Path, engine: Engine) -> None:
    replay = react.Replay(engine, off=False)
    first, second = trace_files.read(traces / "chat.jsonl")
    replay.episode(first)
    kept = engine.store.match(react.engine_timing.scope_of(engine, replay.namespace, 2000), react.as_ids(_ids(engine, first)))
    engine.store.clear()
    with pytest.raises(AssertionError, match="holds its own copy"):
        replay.episode(second)
    assert kept.tokens


def _ids(engine: Engine, episode: trace_files.Episode) -> list[int]:
    call = episode.calls[-1]
    return list(engine.renderer.render(call.prompt, call.tools, namespace="react").ids)


def test_calls_beyond_the_context_are_counted(traces: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.model, "context_tokens", 640)
    sums, _ = react.Replay(engine, off=False).episode(next(iter(trace_files.read(traces / "chat.jsonl"))))
    assert sums.skipped_calls + sums.calls == 4
    assert sums.skipped_calls


def test_command(traces: Path, tmp_path: Path, engine: Engine) -> None:
    path = tmp_path / "out.json"
    arguments = ("react", "--workload", str(traces / "text.jsonl"), "--workload", str(traces / "chat.jsonl"), "--episodes", "1")
    done = CliRunner().invoke(app, [*arguments, "--shape", "small", "--no-off", "--json", str(path)])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == json.loads(path.read_text())
    assert {"calls", "prompt_tokens", "new_tokens", "computed_tokens", "stock_ms", "off_ms", "ms"} <= set(found)
    assert found["calls"] == 6
    assert found["stock_ms"] is None
    assert found["off_ms"] is None
    assert found["ms"] > 0
    assert set(found["families"]) == {"text", "chat"}


def test_command_says_plainly_what_is_wrong(traces: Path) -> None:
    done = CliRunner().invoke(app, ["react", "--workload", "/no/such.jsonl"])
    assert done.exit_code == 1
    assert done.stderr.startswith("agentcache: workload '/no/such.jsonl' is not a file")
    nothing = CliRunner().invoke(app, ["react"])
    assert nothing.exit_code == 1
    assert "name a recorded trace" in nothing.output
