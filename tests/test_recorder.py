"""Recorder: what it writes is what lint and calibrate read; what cannot be written fails no request."""

from __future__ import annotations

import json
import os
import stat
import threading
from pathlib import Path
from typing import Any

import pytest

from agentcache import Message, Recorder, Tool, ToolCall
from agentcache.approximate.calibrate import shifts
from agentcache.errors import ConfigError, StoreWarning
from agentcache.lint import lint
from agentcache.traces import read

TOOLS = [Tool("tide", "When is high water?", {"type": "object", "properties": {"harbour": {"type": "string"}}}), Tool("log"), Tool("wind")]
CALLED = Message("assistant", "", (ToolCall("tide", {"harbour": "Zoë's"}, "abc"),), reasoning="Look it up.")


def conversation(recorder: Recorder, name: str | None, systems: tuple[str, str]) -> None:
    """Two requests, the second of which goes on from the first; their system prompts differ as given."""
    asked = Message("user", "When is high water?")
    recorder.record([Message("system", systems[0]), asked], TOOLS, CALLED, conversation=name, finish_reason="tool_calls")
    result = Message("tool", "At 3.", tool_call_id="abc", name="tide")
    later = [Message("system", systems[1]), asked, CALLED, result]
    recorder.record(later, TOOLS, {"role": "assistant", "content": "At 3."}, conversation=name, usage={"prompt_tokens": 7})


def test_lint_reads_it(tmp_path: Path) -> None:
    keeper = "You keep a lighthouse, and write down wind, tide and every ship that passes. It is {}."
    with Recorder(tmp_path / "log.jsonl") as recorder:
        conversation(recorder, "a", (keeper.format("09:26:53"), keeper.format("09:27:10")))
        conversation(recorder, "b", (keeper.format("noon"), keeper.format("noon")))
    report = lint(tmp_path / "log.jsonl")
    assert not report.problems
    assert [(found.conversation, str(found.cause), found.writer) for found in report.findings] == [("a", "clock", "system")]
    assert stat.S_IMODE(os.stat(tmp_path / "log.jsonl").st_mode) == 0o600, "prompts in clear are the owner's"


@pytest.mark.parametrize("names", [("a", "b"), (None, None)])
def test_calibrate_reads_it(tmp_path: Path, names: tuple[str | None, str | None]) -> None:
    with Recorder(tmp_path / "log.jsonl") as recorder:
        conversation(recorder, names[0], ("You keep a lighthouse.", "You keep a lighthouse."))
        recorder.record("Question: where?\nThought:", answer=" At the pier.", conversation=names[1])
        recorder.record([Message("user", "Cut short")], conversation="c")  # not answered
    first, second = read(tmp_path / "log.jsonl")
    assert [len(call.prompt) for call in first.calls] == [2, 4]
    assert first.calls[0].answer["tool_calls"][0]["function"] == {"name": "tide", "arguments": '{"harbour": "Zoë\'s"}'}
    assert first.calls[1].prompt[2]["reasoning_content"] == "Look it up."
    assert [tool["function"]["name"] for tool in first.calls[1].tools] == ["tide", "log", "wind"]
    assert [(call.prompt, call.answer) for call in second.calls] == [("Question: where?\nThought:", " At the pier.")]
    assert {case.family for case in shifts.cases([first], 1)} >= {"dated system", "added tool", "second agent"}
    assert [one.id for one in read(tmp_path / "log.jsonl", episodes=1)] == [first.id]


def test_a_line_is_a_request_in_openais_shape(tmp_path: Path) -> None:
    for _ in range(2):  # what is there stays
        with Recorder(tmp_path / "log.jsonl") as recorder, Recorder(tmp_path / "log.jsonl") as other:
            recorder.record(
                "Where\ud800?", answer=" At the pier.", conversation="a", model="m", finish_reason="stop", usage={"prompt_tokens": 7}
            )
            other.record([Message("user", "x")], [TOOLS[0]])
    first, second, *again = map(json.loads, (tmp_path / "log.jsonl").read_text(encoding="utf-8").splitlines())
    said = {"choices": [{"index": 0, "text": " At the pier.", "finish_reason": "stop"}], "usage": {"prompt_tokens": 7}}
    assert first == {"conversation_id": "a", "model": "m", "prompt": "Where??", "tools": [], "response": said}
    tool = {"name": "tide", "description": "When is high water?", "parameters": dict(TOOLS[0].parameters)}
    assert second == {
        "conversation_id": None,
        "model": "",
        "messages": [{"role": "user", "content": "x"}],
        "tools": [{"type": "function", "function": tool}],
    }
    assert again == [first, second]


def test_threads_do_not_mix_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr("agentcache.recorder.os.write", lambda file, line: write(file, line[:500]))  # as on a disk that is nearly full
    with Recorder(tmp_path / "log.jsonl") as recorder:
        writers = [threading.Thread(target=lambda: [conversation(recorder, "x", ("a" * 5000, "b")) for _ in range(20)]) for _ in range(4)]
        for each in writers:
            each.start()
        for each in writers:
            each.join()
    assert len([json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]) == 160


def test_what_cannot_be_written_fails_no_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(tmp_path / "log.jsonl")
    loop: list[Any] = []
    loop.append(loop)
    with pytest.warns(StoreWarning, match="left out"):
        recorder.record([{"role": "user", "content": loop}])
    with pytest.warns(StoreWarning, match="left out: 7 is no message: give a Message, or a dict; of a Completion its `message`"):
        recorder.record([Message("user", "x")], answer=7)  # type: ignore[arg-type]
    recorder.record([{"role": "user", "content": {1, 2}}])

    def full(*args: Any) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("agentcache.recorder.os.write", full)
        with pytest.warns(StoreWarning, match="No space left"):
            recorder.record([Message("user", "x")])
    recorder.record([Message("user", "after its end")])
    recorder.close()
    assert len((tmp_path / "log.jsonl").read_text().splitlines()) == 1
    with pytest.raises(ConfigError, match="nowhere"):
        Recorder(tmp_path / "nowhere" / "log.jsonl")


def test_a_deleted_file_ends_the_recording(tmp_path: Path) -> None:
    for empty in (False, True):
        with Recorder(tmp_path / "log.jsonl") as recorder:
            if not empty:
                recorder.record("first")
            (tmp_path / "log.jsonl").unlink()
            with pytest.warns(StoreWarning, match="the file was deleted"):
                recorder.record("second")
            recorder.record("after its end")


def test_a_request_begins_a_line_after_half_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, write = tmp_path / "log.jsonl", os.write
    with Recorder(file) as full, Recorder(file) as running:
        full.record("first")

        def half(fd: int, content: bytes) -> int:
            monkeypatch.setattr(os, "write", lambda *given: (_ for _ in ()).throw(OSError(28, "No space left on device")))
            return write(fd, content[:20])

        monkeypatch.setattr(os, "write", half)
        with pytest.warns(StoreWarning, match="No space left"):
            full.record("second")
        monkeypatch.undo()
        running.record("third")
    with Recorder(file) as later:
        later.record("fourth")
    lines = file.read_text().splitlines()
    assert [json.loads(line)["prompt"] for line in (lines[0], *lines[2:])] == ["first", "third", "fourth"]
    assert len(lines[1]) == 20
    assert len(lint(file).problems) == 1, "what is lost is the request that met the full disk"


def test_a_file_that_was_there_is_closed_to_others(tmp_path: Path) -> None:
    file = tmp_path / "log.jsonl"
    file.touch()
    file.chmod(0o644)
    with Recorder(file) as recorder:
        recorder.record("a secret")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    with Recorder(os.devnull) as nowhere:
        nowhere.record("a secret")


def test_a_file_that_cannot_be_closed_to_others_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, mode: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "fchmod", refuse)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ConfigError, match="not permitted; name a file of your own"):
        Recorder(tmp_path / "log.jsonl")
    assert len(os.listdir("/proc/self/fd")) == before
