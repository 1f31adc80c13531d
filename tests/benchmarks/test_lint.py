"""benchmarks.lint: faults put in with their names, an oracle that compares values, and the figures it asserts on made-up episodes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from agentcache.traces import Episode, episode
from benchmarks.lint import app
from benchmarks.lint_faults import FAULTS, append_only, injected, requests, scored
from tests.lint.requests import SYSTEM, TOOLS, conversation


def recorded(name: str, steps: int = 6) -> dict[str, object]:
    messages = [*conversation(steps)[-1]["messages"][1:], {"role": "assistant", "content": "Yes, at pier b."}]
    return {"id": name, "system": SYSTEM, "tools": TOOLS, "messages": messages}


def made(name: str) -> Episode:
    return episode(recorded(name), Path("."))


def test_the_oracle_sees_only_growth() -> None:
    bodies = requests(made("a"))
    assert all(append_only(was, now) for was, now in zip(bodies, bodies[1:]))
    bodies[2]["messages"][1]["content"] += "!"
    assert not append_only(bodies[1], bodies[2])
    assert not append_only({"prompt": "a"}, {"prompt": "b"})


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_changes_what_its_label_says_and_nothing_else(name: str) -> None:
    bodies, labels = injected(made("a"), name, seed=3)
    assert len(bodies) == len(labels) == len(requests(made("a")))
    kept = [label is None for label in labels[1:]]
    assert kept == [append_only(was, now) for was, now in zip(bodies, bodies[1:])]
    assert not all(kept)
    assert scored(labels) == list(range(1, len(labels)))
    assert json.dumps(injected(made("a"), name, seed=3)[0]) == json.dumps(bodies)  # the seed decides, nothing else


def test_the_command_finds_every_fault_by_its_name(tmp_path: Path) -> None:
    path = tmp_path / "harbour.jsonl"
    path.write_text("\n".join(json.dumps(recorded(f"e{number}")) for number in range(4)), encoding="utf-8")
    done = CliRunner().invoke(app, ["--workload", str(tmp_path), "--seed", "5"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.output.splitlines()[-1])
    assert found["false_alarms"] == 0
    assert found["wrong"] == {}
    for row in found["classes"]:
        assert min(row["precision"], row["recall"]) == 1, row
    for row in found["faults"]:
        assert row["reused_after"] < row["reused_before"], row
    assert CliRunner().invoke(app, ["--workload", str(tmp_path / "nothing")]).exit_code == 1
