"""Recorded episodes: all three kinds are read as they are meant, and replayed to the token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from agentcache import traces as trace_files
from agentcache.bench import cli, react, shapes
from agentcache.bench.cli import app
from agentcache.engine import Engine
from agentcache.errors import ConfigError
from tests.bench.recorded_episodes import CHAT, STEPS, TEXT, said, tool, write_traces


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    """traces/{chat,text,steps}.jsonl and tools/zoo.jsonl"""
    return write_traces(tmp_path)


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
    with pytest.raises(ConfigError, match="is not a file: give a .jsonl trace, such as agentcache.Recorder writes"):
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
    for field, value in (("messages", 5), ("messages", [5]), ("tools", 5)):
        (traces / "bad.jsonl").write_text(json.dumps({**CHAT[0], field: value}), encoding="utf-8")
        with pytest.raises(ConfigError, match="line 1: not a chat episode"):
            list(trace_files.read(traces / "bad.jsonl", tools_dir=traces.parent / "tools"))
    for encoded in ('{"id": "\u00fc"}'.encode("latin-1"), b"[" * 100_000):
        (traces / "bad.jsonl").write_bytes(encoded)
        with pytest.raises(ConfigError, match="line 1: not JSON"):
            list(trace_files.read(traces / "bad.jsonl"))
    with pytest.raises(ConfigError, match="without 'completions'"):
        trace_files.episode({"prompts": []}, traces)
    with pytest.raises(ConfigError, match="--tools-dir"):
        list(trace_files.read(traces / "chat.jsonl", tools_dir=traces))
    with pytest.raises(ConfigError, match="'fly'"):
        trace_files.episode({**CHAT[0], "tool_names": ["fly"]}, traces.parent / "tools")


def test_a_trace_with_a_bom_may_name_no_tools(traces: Path) -> None:
    plain = {key: value for key, value in CHAT[0].items() if key not in {"tools_ref", "tool_names", "tools_events"}}
    (traces / "plain.jsonl").write_text(json.dumps({**plain, "tools": None}), "utf-8-sig")
    [one] = trace_files.read(traces / "plain.jsonl")
    assert {call.tools for call in one.calls} == {()}


def test_traces_of_one_name_are_all_read(traces: Path, tmp_path: Path) -> None:
    (other := tmp_path / "other").mkdir()
    (other / "text.jsonl").write_text(json.dumps(STEPS[0]))
    [(name, found)] = cli._recorded([traces / "text.jsonl", other / "text.jsonl"], None, None, None).items()
    assert (name, {one.kind for one in found}) == ("text", {"text", "chat_steps"})


def test_replay_sums_calls_and_times(traces: Path, engine: Engine) -> None:
    families = {path.stem: list(trace_files.read(path)) for path in sorted(traces.glob("*.jsonl"))}
    found = react.run(engine, families, off=True, stock=True)
    assert found["calls"] == 8 + 2 + 2
    assert found["prompt_tokens"] == sum(family["prompt_tokens"] for family in found["families"].values())
    for family in found["families"].values():
        assert family["computed_tokens"] < family["prompt_tokens"]
        assert all(family[key] > 0 for key in ("ms", "off_ms", "stock_ms"))
        assert family["calls"] == sum(episode["calls"] for episode in family["episodes"])


def test_forced_answers_end_with_their_end_token(traces: Path, engine: Engine) -> None:
    replay = react.Replay(engine)
    [steps] = trace_files.read(traces / "steps.jsonl")
    ids = replay.answers.ids(steps.calls[0])
    text = engine.tokenizer.decode(ids)
    assert text == '<tool_call>\n{"name": "feed", "arguments": {"id": "b"}}\n</tool_call><|im_end|>'
    assert ids[-1] == engine.tokenizer.eos_token_id


def test_calls_beyond_the_context_are_counted(traces: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.model, "context_tokens", 640)
    sums = react.Replay(engine, off=False).episode(next(iter(trace_files.read(traces / "chat.jsonl"))))
    assert sums.skipped_calls + sums.calls == 4
    assert sums.skipped_calls


def test_command(traces: Path, tmp_path: Path, engine: Engine) -> None:
    path = tmp_path / "out.json"
    arguments = ("react", "--workload", str(traces / "text.jsonl"), "--workload", str(traces / "chat.jsonl"), "--episodes", "1")
    done = CliRunner().invoke(app, [*arguments, "--shape", "small", "--no-off", "--json", str(path)])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == json.loads(path.read_text())
    assert {"calls", "prompt_tokens", "computed_tokens", "stock_ms", "off_ms", "ms"} <= set(found)
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


@pytest.mark.parametrize("command", ["react", "serve"])
def test_a_workload_without_calls_is_refused(tmp_path: Path, command: str) -> None:
    (tmp_path / "empty.jsonl").touch()
    done = CliRunner().invoke(app, [command, "--workload", str(tmp_path / "empty.jsonl")])
    assert done.exit_code == 1
    assert "empty.jsonl': no recorded call" in done.stderr
