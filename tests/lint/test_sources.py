"""lint reads what people have: every shape of a request, files that are damaged, large or odd, and says which line it could not use."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from agentcache.errors import ConfigError
from agentcache.lint import Cause, Options, Report, lint
from agentcache.lint.conversations import Conversations
from agentcache.lint.values import Request, Said
from tests.lint.requests import SYSTEM, TOOLS, conversation, with_system_line

CHAT = [{"conversation_id": "a", **body} for body in conversation(2)]


def lines(folder: Path, values: list[Any]) -> Path:
    path = folder / "log.jsonl"
    path.write_text("".join(f"{value if isinstance(value, str) else json.dumps(value)}\n" for value in values), encoding="utf-8")
    return path


def clocked() -> list[dict[str, Any]]:
    return with_system_line(conversation(2), [f"It is 09:{number}7:53." for number in range(3)])


def causes(found: Report) -> list[str]:
    return [str(finding.cause) for finding in found.findings]


@pytest.mark.parametrize("wrap", ["request", "body", "payload", "text", "batch"])
def test_requests_inside_log_lines(tmp_path: Path, wrap: str) -> None:
    def wrapped(body: dict[str, Any]) -> dict[str, Any]:
        if wrap == "text":
            return {"level": "info", "body": json.dumps(body)}
        if wrap == "batch":
            return {"custom_id": "7", "method": "POST", "url": "/v1/chat/completions", "body": body}
        return {"time": 1, wrap: body}

    found = lint(lines(tmp_path, [wrapped(body) for body in clocked()]))
    assert found.problems == []
    assert causes(found) == ["clock", "clock"]


@pytest.mark.parametrize("indent", [None, 1])
def test_a_json_array_and_objects_over_several_lines(tmp_path: Path, indent: int | None) -> None:
    path = tmp_path / "log.json"
    path.write_text(json.dumps(clocked(), indent=indent), encoding="utf-8")
    assert causes(lint(path)) == ["clock", "clock"]
    path.write_text("\n".join(json.dumps(body, indent=indent) for body in clocked()), encoding="utf-8")
    assert causes(lint(path)) == ["clock", "clock"]


def test_bare_message_lists(tmp_path: Path) -> None:
    found = lint(lines(tmp_path, [body["messages"] for body in clocked()]))
    assert (found.conversations, causes(found)) == (1, ["clock", "clock"])


def test_content_blocks_and_tools_first() -> None:
    def body(now: str, grown: bool) -> dict[str, Any]:
        messages: list[dict[str, Any]] = [{"role": "user", "content": [{"type": "text", "text": "Is there room?"}]}]
        if grown:
            use = {"type": "tool_use", "id": "t1", "name": "find_berth", "input": {"berth": "b"}}
            messages += [
                {"role": "assistant", "content": [{"type": "thinking", "thinking": "Look."}, {"type": "text", "text": "I look."}, use]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "free"}]}]},
            ]
        tools = [{"name": "find_berth", "description": "Finds.", "input_schema": {"type": "object", "properties": {}}}]
        system = [{"type": "text", "text": "You keep a ledger.", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": now}]
        return {"model": "m", "system": system, "tools": tools, "messages": messages}

    assert causes(lint([body("", False), body("", True)])) == []
    (finding,) = lint([body(" It is 09:26.", False), body(" It is 09:27.", True)]).findings
    assert (finding.cause, finding.writer) == (Cause.CLOCK, "system")
    assert finding.char > len("find_berth")  # the tools stand before it


def test_responses_items() -> None:
    items: list[dict[str, Any]] = [{"role": "user", "content": [{"type": "input_text", "text": "Is there room?"}]}]
    call = {"type": "function_call", "call_id": "c1", "name": "find_berth", "arguments": '{"berth": "b"}'}
    more = [*items, call, {"type": "function_call_output", "call_id": "c1", "output": "free"}]
    again = [*items, {**call, "arguments": '{"berth":"b"}'}, more[2], {"role": "assistant", "content": "Yes."}, items[0]]
    found = lint([{"instructions": "Be kind.", "input": each} for each in (items, more, again)])
    assert causes(found) == ["re-serialised arguments"]


def test_old_functions_and_unknown_roles(tmp_path: Path) -> None:
    call = {"role": "assistant", "content": None, "function_call": {"name": "find_berth", "arguments": "{}"}}
    body = {"messages": [{"role": "narrator", "content": "Dawn."}, call], "functions": [TOOLS[0]["function"]]}
    found = lint(lines(tmp_path, [body, body]))
    assert causes(found) == []
    assert [(problem.line, "'narrator'" in problem.message) for problem in found.problems] == [(1, True), (2, True)]


def test_damaged_lines_are_named_and_the_rest_is_read(tmp_path: Path) -> None:
    good = [json.dumps({"conversation_id": "a", **body}) for body in clocked()]
    path = tmp_path / "log.jsonl"
    bad = [good[1][:200], "{not json}", "17", '{"nothing": 1}', '{"messages": "hello"}', "[" * 100_000]
    path.write_bytes("\n".join([good[0], *bad, good[1], ""]).encode() + b'{"a": "\xff"}\n' + good[2][: len(good[2]) // 2].encode())
    found = lint(path)
    assert causes(found) == ["clock"]
    assert found.findings[0].line == 8
    told = {problem.line: problem.message for problem in found.problems}
    assert "half-written" in told[2]
    assert "not JSON" in told[3]
    assert set(told) >= {2, 3, 4, 5, 7, 9, 10}
    assert "UTF-8" in told[9]
    assert "half-written" in told[10]


def test_odd_messages_lose_nothing_else() -> None:
    odd: list[Any] = [
        "text",
        7,
        None,
        {"role": "user"},
        {"role": "assistant", "tool_calls": "x"},
        {"role": "assistant", "tool_calls": [3, {}]},
    ]
    bodies = [{"messages": [*body["messages"], *odd], "tools": {"a": 1}} for body in clocked()[:1] * 2]
    found = lint(bodies)
    assert causes(found) == []
    assert len(found.problems) >= 8


def test_lone_surrogates_and_controls_go_through() -> None:
    bodies = [
        {"messages": [{"role": "system", "content": f"\ud800\x1b[31m it is 09:2{number}"}, {"role": "user", "content": "a"}]}
        for number in (1, 2)
    ]
    assert causes(lint(bodies)) == ["clock"]


def test_transcripts(tmp_path: Path) -> None:
    whole = {"messages": [*conversation(2)[-1]["messages"], {"role": "assistant", "content": "Yes."}], "tools": TOOLS}
    assert len(lint(lines(tmp_path, [whole])).steps) == 1
    found = lint(tmp_path / "log.jsonl", Options(transcripts=True))
    assert (len(found.steps), found.conversations, causes(found)) == (3, 1, [])


def test_program_objects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "harbour_log.py").write_text("import json\ndef requests():\n    yield from json.loads(TEXT)\nTEXT = ''\nNUMBER = 3\n")
    import importlib

    sys.path.insert(0, str(tmp_path))
    try:
        importlib.import_module("harbour_log").TEXT = json.dumps(clocked())
        assert causes(lint("harbour_log:requests")) == ["clock", "clock"]
        with pytest.raises(ConfigError, match="int"):
            lint("harbour_log:NUMBER")
        with pytest.raises(ConfigError, match="nothing"):
            lint("harbour_log:nothing")
    finally:
        sys.path.remove(str(tmp_path))
        sys.modules.pop("harbour_log", None)


@pytest.mark.parametrize("source", ["no-such-file.jsonl", "."])
def test_sources_that_are_none(source: str) -> None:
    with pytest.raises(ConfigError, match=r"\.jsonl|folder"):
        lint(source)


@pytest.mark.parametrize("form", ["lines", "array"])
def test_large_files_are_streamed(tmp_path: Path, form: str) -> None:
    body = {"conversation_id": "a", "messages": [{"role": "user", "content": "x" * 200_000}]}
    path = tmp_path / "log.json"
    text, count = json.dumps(body), 100
    path.write_text("[" + ",".join([text] * count) + "]" if form == "array" else f"{text}\n" * count, encoding="utf-8")
    tracemalloc.start()
    try:
        found = lint(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(found.steps) == count
    assert peak < 12_000_000 < path.stat().st_size


MEASURED = """
import resource, sys
from agentcache.lint import lint
lint([])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
found = lint(sys.argv[1])
print(len(found.steps), len(found.findings), found.conversations, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def long_log(path: Path, conversations: int, steps: int, chars: int) -> int:
    """Conversations that come one after the other, a clock in each of their requests; returns its bytes."""
    page = "The bell rang, a boat came in, and the clerk wrote both down. " * (chars // 62 + 1)
    with path.open("w", encoding="utf-8") as file:
        for number in range(conversations):
            for step in range(steps):
                system = {"role": "system", "content": f"{SYSTEM}\nIt is 09:{step:02d}:53."}
                said = [{"role": "user", "content": f"{number}.{at} {page[:chars]}"} for at in range(step + 1)]
                file.write(json.dumps({"conversation_id": str(number), "messages": [system, *said]}) + "\n")
    return path.stat().st_size


@pytest.mark.parametrize(
    ("conversations", "most_mb"), [(12, 6), pytest.param(280, 50, marks=pytest.mark.slow)], ids=["five megabytes", "a hundred"]
)
def test_memory_does_not_grow_with_the_file(tmp_path: Path, conversations: int, most_mb: int) -> None:
    """What is held is the last request of each open conversation, up to 32 million characters, and no more in a file of a gigabyte."""
    size = long_log(tmp_path / "log.jsonl", conversations, 24, 1_300)
    assert size > 390_000 * conversations
    done = subprocess.run([sys.executable, "-c", MEASURED, str(tmp_path / "log.jsonl")], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    requests, findings, held, grown_kb = map(int, done.stdout.split())
    assert (requests, findings, held) == (24 * conversations, 23 * conversations, conversations)
    assert grown_kb / 1024 < most_mb


def test_the_longest_silent_conversations_are_closed_first() -> None:
    closed: list[str] = []
    tracks = Conversations(most=3, held=1_000, closed=closed.append)

    def ask(name: str, chars: int) -> bool:
        request = Request(1, 1, name, history=(Said("user", "x" * chars),))
        return tracks.place(request)[1] is not None

    assert [ask("a", 400), ask("b", 400), ask("a", 450)] == [False, False, True]
    assert not ask("c", 300)  # 1,150 characters: b has been silent longest
    assert closed == ["b"]
    assert not ask("d", 100)
    assert not ask("e", 100)  # four conversations
    assert closed == ["b", "a"]
    assert not ask("f", 5_000)  # more than may be held, and still the one that is compared with the next
    assert ask("f", 5_000)
    assert len(tracks) == 1


# -- conversations without ids -----------------------------------------------------------------------------------------


def last_exchange(body: dict[str, Any], *front: dict[str, Any]) -> dict[str, Any]:
    """The request with all but its last call and result gone, and something else in front of them."""
    return {**body, "messages": [body["messages"][0], *front, *body["messages"][-2:]]}


def test_a_history_that_was_replaced_whole_is_no_new_conversation() -> None:
    first, *later = conversation(4)
    told = {"role": "user", "content": "What happened: piers were looked at."}
    summed = [first, later[0], *(last_exchange(body, {**told, "content": f"{told['content']} {n}"}) for n, body in enumerate(later[1:]))]
    found = lint(summed)
    assert (found.conversations, [str(finding.cause) for finding in found.findings]) == (1, ["front summary"] * 3)
    cut = lint([first, later[0], *map(last_exchange, later[1:])])
    assert (cut.conversations, set(causes(cut))) == (1, {"truncated history"})


def test_a_conversation_that_begins_is_a_new_one() -> None:
    one, other = conversation(3), conversation(3)
    for body in other:
        body["messages"][1]["content"] = "Which boats lie at the fish market?"
    assert (lint([*one, *other]).conversations, causes(lint([*one, *other]))) == (2, [])
    demonstration = [{"role": "user", "content": "What time is it?"}, {"role": "assistant", "content": "I have no watch."}]
    for body in (*one, *other):
        body["messages"][1:1] = copy.deepcopy(demonstration)
    mixed = [body for pair in zip(one, other, strict=True) for body in pair]
    assert (lint(mixed).conversations, causes(lint(mixed))) == (2, [])


def test_other_tools_in_the_middle_are_another_application() -> None:
    found = lint([*conversation(2), last_exchange({**conversation(4)[4], "tools": TOOLS[:1]})])
    assert (found.conversations, causes(found)) == (2, [])


def test_a_request_continues_the_conversation_that_says_the_same() -> None:
    one, other = conversation(3), conversation(3)
    for body in one:
        body["messages"][1]["content"] = "Where lies vessel AX-4417 of harbour master Benedikt?"
        body["messages"][-1]["content"] += " AX-4417 Benedikt"
    for body in other:
        body["messages"][1]["content"] = "Register crane QR-9921 for foreman Theodora."
        body["messages"][-1]["content"] += " QR-9921 Theodora"
    third = last_exchange(one[3], {"role": "user", "content": "What happened: AX-4417 of Benedikt."})
    found = lint([one[0], one[1], other[0], other[1], third])
    assert found.conversations == 2
    assert [(finding.request, finding.previous) for finding in found.findings][-1] == (5, 2)
