"""Files that are nearly what was expected: what can be read of them is read, and what cannot is named once."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from agentcache.lint import Report, lint
from agentcache.lint import json_stream as stream
from tests.lint.requests import conversation, with_system_line

BODIES = with_system_line(conversation(3), [f"It is 09:{number}7:53." for number in range(4)])
LISTS = [body["messages"] for body in BODIES]


def linted(path: Path, text: str | bytes) -> Report:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return lint(path)


def seen(found: Report) -> tuple[int, list[str], int]:
    """Requests read, findings, and problems told."""
    return len(found.steps), [str(finding.cause) for finding in found.findings], len(found.problems)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log.json"


@pytest.mark.parametrize("indent", [None, 1])
def test_an_array_of_bare_message_lists(log: Path, indent: int | None) -> None:
    assert seen(linted(log, json.dumps(LISTS, indent=indent))) == (4, ["clock"] * 3, 0)


def test_bare_message_lists_over_several_lines(log: Path) -> None:
    assert seen(linted(log, json.dumps(LISTS[0], indent=1))) == (1, [], 0)
    found = linted(log, "\n".join(json.dumps(each, indent=1) for each in LISTS))
    assert seen(found) == (4, ["clock"] * 3, 0)
    assert found.findings[0].line == 1 + json.dumps(LISTS[0], indent=1).count("\n") + 1
    cut = json.dumps(LISTS[3], indent=1)
    assert seen(linted(log, cut[: cut.rindex("{")])) == (1, [], 0)


BAD = {
    "a bare word": '{"messages": [oops]}',
    "with messages in it": '{"messages": [{"role": "user", "content": oops}, {"role": "user", "content": "ahoy"}], "tools": []}',
    "cut": json.dumps(BODIES[1])[:-40],
    "cut in a string": '{"messages": [{"role": "us',
    "a number that nobody can read": f'{{"messages": [{{"role": "user", "content": {"7" * 5_000}}}]}}',
    "nested without end": "[" * 100_000,
}


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
@pytest.mark.parametrize("between", [",", ",\n", "\n"], ids=["one line", "lines", "no commas"])
def test_a_damaged_element_costs_no_other(log: Path, bad: str, between: str) -> None:
    good = [json.dumps(body) for body in BODIES]
    found = linted(log, f"[{between.join([good[0], bad, *good[1:]])}]")
    assert seen(found) == (4, ["clock"] * 3, 1), found.problems
    assert found.problems[0].line == (2 if "\n" in between else 1)
    assert [finding.line for finding in found.findings] == ([3, 4, 5] if "\n" in between else [1] * 3)


def test_a_damaged_message_costs_no_other_of_its_list(log: Path) -> None:
    text = json.dumps(LISTS[3], indent=1)
    second = [at for at in range(len(text)) if text.startswith("\n {", at)][1]
    found = linted(log, f"{text[:second]}\n {{oops}},{text[second:]}")
    assert seen(found) == (1, [], 1)


def test_a_cut_first_line_before_a_very_long_one(log: Path) -> None:
    large = json.dumps({"messages": [{"role": "user", "content": "x" * (stream.CHUNK + 10)}]})
    small = json.dumps({"messages": [{"role": "user", "content": "y"}]})
    found = linted(log, "\n".join(['{"messages": [{"role": "use', large, small, ""]))
    assert seen(found) == (2, [], 1)
    assert found.problems[0].line == 1


def test_an_object_over_lines_with_a_very_long_one(log: Path) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "x" * (stream.CHUNK + 10)}]}
    for text in (json.dumps(body, indent=1), f'{{"model": "m",\n"messages": {json.dumps(body["messages"])}}}'):
        assert seen(linted(log, text + text.replace("x", "y"))) == (2, [], 0)


def test_where_a_chunk_ends_makes_no_difference(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(7)
    bodies: list[Any] = [{"messages": [{"role": "user", "content": "ærø ☂ " * rng.randrange(9)}], "n": 10**number} for number in range(9)]
    for text in (json.dumps(bodies, ensure_ascii=False), "[{oops}," + json.dumps(bodies, ensure_ascii=False)[1:]):
        whole = seen(linted(log, text))
        assert whole[0] == 9
        for size in (1, 2, 3, 7, 64):
            monkeypatch.setattr(stream, "CHUNK", size)
            told: list[int] = []
            with log.open("rb") as file:
                values = list(stream.JsonStream(file.read(1), file, lambda line, said, told=told: told.append(line)).values())  # type: ignore[misc]
            monkeypatch.undo()
            assert [value for _, value in values] == bodies
            assert len(told) == whole[2]
