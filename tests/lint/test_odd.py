"""Records that nobody expected: each is named, or kept as text, and none of them loses the others."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agentcache.lint import Options, Report, json_stream, lint
from agentcache.lint.templated import Loaded
from tests import chat_templates as templates
from tests.checkout import ROOT
from tests.lint.requests import TOOLS, conversation, tool, with_system_line
from tests.models import toy_tokenizer

CLOCKED = [{"conversation_id": "a", **body} for body in with_system_line(conversation(1), ["It is 09:26.", "It is 09:27."])]


def between(odd: Any, **options: Any) -> Report:
    """The odd one between two that are fine, which must be compared all the same."""
    found = lint([CLOCKED[0], odd, CLOCKED[1]], Options(**options))
    assert [str(finding.cause) for finding in found.findings if finding.conversation == "a"] == ["clock"]
    return found


def deep(levels: int, inner: Any = 1) -> Any:
    for _ in range(levels):
        inner = {"a": [inner]}
    return inner


def said(role: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": "ahoy", **fields}]}


ODD = {
    "reasoning that is a number": (said("assistant", reasoning_details=5, thinking_blocks="x"), "reasoning_details=5"),
    "text nested without end": ({"body": "[" * 200_000}, "no request"),
    "tools that are none": ({"tools": 7, **said("user")}, "tools=7"),
    "content nested deeply": (said("user", content=deep(480)), ""),
    "content nested more deeply": (said("user", content=deep(50_000)), "nested too deeply"),
}


@pytest.mark.parametrize(("odd", "told"), ODD.values(), ids=ODD)
def test_one_odd_record_loses_no_other(odd: Any, told: str) -> None:
    found = between(odd)
    assert any(told in problem.message for problem in found.problems) or not told, found.problems


def test_tools_nested_too_deeply_to_be_compared() -> None:
    one, two = ({"conversation_id": "b", **said("user"), "tools": [{"name": "x", "deep": deep(220, n)}]} for n in (1, 2))
    found = lint([one, CLOCKED[0], two, CLOCKED[1]])
    assert [str(finding.cause) for finding in found.findings if finding.conversation == "a"] == ["clock"]


@pytest.mark.parametrize("odd", ["rename", {"function": "rename"}, {"type": "web_search"}, 5, {"name": 7}])
def test_a_tool_that_is_none_with_a_tokenizer(odd: Any) -> None:
    bodies = [{**body, "tools": [*TOOLS, odd]} for body in conversation(1)]
    found = between({"conversation_id": "b", **bodies[0]}, tokenizer=Loaded(toy_tokenizer(), templates.CHATML))
    assert "compared in characters (ToolSchemaError)" in found.problems[-1].message
    assert len(found.steps) == 3


def test_a_refused_request_is_compared_in_characters() -> None:
    bodies = [{"conversation_id": "b", **body} for body in conversation(3)]
    bodies[2]["messages"][2]["tool_calls"][0]["function"]["arguments"] = "{oops"
    bodies[2]["messages"] = [bodies[2]["messages"][0], *bodies[2]["messages"][2:]]
    found = lint(bodies, Options(tokenizer=Loaded(toy_tokenizer(), templates.CHATML)))
    assert [finding.request for finding in found.findings] == [3, 4]
    assert found.conversations == 1
    assert "compared in characters" in found.problems[0].message


def test_results_whose_calls_were_dropped_are_compared() -> None:
    bodies = [{"conversation_id": "b", **body} for body in conversation(3)]
    for body in bodies[2:]:
        del body["messages"][1:3]
    found = lint(bodies, Options(tokenizer=Loaded(toy_tokenizer(), templates.CHATML)))
    assert [(finding.request, str(finding.cause)) for finding in found.findings] == [(3, "truncated history")]
    assert len(found.problems) == 2


# What is not to be shown

SECRETS = {
    "arguments": {"messages": [{"role": "assistant", "tool_calls": '{"patient": "Mrs Miller: is hunter2", "iban": "DE12 4711"'}]},
    "tools": {"messages": [], "tools": {"x": {"description": "for ACME only: hunter2 is it"}}},
    "message": {"messages": ["my password is hunter2"]},
    "messages": {"messages": "a: b is hunter2"},
    "role": {"messages": [{"role": "nurse: hunter2 is on", "content": ""}]},
    "call": {"messages": [{"role": "assistant", "tool_calls": ["is hunter2: x"]}]},
    "keys": {"patient hunter2": 1},
    "nothing": "hunter2",
    "a tool": {"messages": [], "tools": [{"description": "is hunter2"}]},
    "provider": {"previous_response_id": "hunter2", "input": []},
}


@pytest.mark.parametrize("record", SECRETS.values(), ids=SECRETS)
def test_redacted_problems_have_no_text_of_the_trace(record: Any) -> None:
    shown = lint([record]).problems
    assert any("hunter2" in problem.message for problem in shown), shown
    hidden = lint([record], Options(redact=True)).problems
    assert len(hidden) == len(shown)
    assert "hunter2" not in str(hidden)
    assert "Miller" not in str(hidden)
    assert any("..." in problem.message for problem in hidden)


def test_redacted_refusals_have_no_text_of_the_trace() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "x", "arguments": '{"patient": "Mrs Miller", "iban": "DE12 4711"'}}
    body = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": [call]}]}
    for redact in (False, True):
        (problem,) = lint([body], Options(tokenizer=Loaded(toy_tokenizer(), templates.CHATML), redact=redact)).problems
        assert ("Miller" in problem.message) is not redact
        assert "compared in characters" in problem.message


# Megabytes of brackets


@pytest.mark.parametrize("odd", ["[\n", "[,", '{"a":\n', '[{"role":\n'])
def test_what_only_begins_is_left_out_soon(odd: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted in tries, each of which may look through all of it; what stood before is there."""
    tried = 0

    class Counting(json.JSONDecoder):
        def raw_decode(self, text: str, at: int = 0) -> Any:
            nonlocal tried
            tried += 1
            return super().raw_decode(text, at)

    monkeypatch.setattr(json_stream.json, "JSONDecoder", Counting)
    notes: list[str] = []
    text = b'[{"a": 1}, {"a": 2},\n' + odd.encode() * 20_000
    found = list(json_stream.JsonStream(text, io.BytesIO(), lambda line, why: notes.append(why)).values())
    assert [value for _, value in found] == [{"a": 1}, {"a": 2}]
    assert tried < 2 * json_stream.TRIES
    assert len(notes) == 1


# A stream that cannot show all of it


@pytest.mark.parametrize("encoding", ["cp1252", "ascii", "utf-8"])
def test_a_stream_that_is_not_utf8(tmp_path: Path, encoding: str) -> None:
    path = tmp_path / "log.jsonl"
    bodies = [{**body, "tools": [*TOOLS, tool("finde_Liegeplätze_☂")]} for body in CLOCKED]
    path.write_text("".join(json.dumps(body) + "\n" for body in bodies), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "agentcache_llm", "lint", str(path)],
        cwd=ROOT,
        capture_output=True,
        check=False,
        env={**os.environ, "PYTHONIOENCODING": encoding, "COLUMNS": "120"},
    )
    assert done.returncode == 1, done.stderr.decode()
    shown = done.stdout.decode(encoding)
    assert "clock" in shown
    assert "Traceback" not in done.stderr.decode()
    assert ("█" in shown) is (encoding == "utf-8")
    assert ("= reused" in shown) is (encoding != "utf-8")
