"""The programs in examples/ that use LangChain: run as they stand, on a small model that calls the tools it should."""

from __future__ import annotations

import asyncio
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import script

PACKAGE = Path(__file__).resolve().parents[2]
ROOT = PACKAGE.parents[1]
EXAMPLES = ROOT / "examples"
IN_PROCESS = {
    "langchain_agent.py": [r"step 2: \d+ prompt tokens, [1-9]\d+ cached", r'tide\{"harbour": "Port Averil"'],
    "langchain_two_agents.py": [r"workshop: \d+ prompt tokens, [1-9]\d+ cached", r"counter: \d+ prompt tokens, [1-9]\d+ cached"],
    "langchain_supervisor.py": [r"\['ask_weather'\]", r"all agents: \d+ prompt tokens, [1-9]\d+ cached"],
    "langchain_documents.py": [r"When did the Aurora come in with salt\?", r"\d+ tokens cached"],
    "langchain_summary.py": [r"(?m)^\d+ messages, \d+ prompt tokens, [1-9]\d\d cached: What will"],
}


def test_every_example_is_run_here() -> None:
    assert {path.name for path in EXAMPLES.glob("langchain_*.py")} == {*IN_PROCESS, "langchain_graph.py"}


@pytest.mark.parametrize("name", sorted(IN_PROCESS))
def test_example_runs(name: str, model_folder: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(script.LINES, "When is high water in Port Averil tomorrow?", script.call("tide", harbour="Port Averil", day=1))
    monkeypatch.setitem(script.LINES, "How many tyres are left?", script.call("count", part="tyres"))
    monkeypatch.setitem(script.LINES, "Is it safe to sail from Port Averil?", script.call("ask_weather", task="The wind?"))
    monkeypatch.setitem(script.LINES, "The wind?", script.call("wind", harbour="Port Averil"))
    module = runpy.run_path(str(EXAMPLES / name))
    running = module["main"](model_folder)
    if running is not None:
        asyncio.run(running)
    said = capsys.readouterr().out
    for wanted in IN_PROCESS[name]:
        assert re.search(wanted, said), said


@pytest.mark.slow
def test_a_conversation_goes_on_in_another_process(model_folder: str, tmp_path: Path) -> None:
    pytest.importorskip("langgraph.checkpoint.sqlite", reason="the example keeps its conversation with langgraph-checkpoint-sqlite")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(PACKAGE)])}
    said = []
    for question in ("My name is Ada. Is the light burning?", "What is my name?"):
        command = [sys.executable, str(EXAMPLES / "langchain_graph.py"), model_folder, str(tmp_path), question]
        done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=env)
        assert done.returncode == 0, done.stderr
        said.append(done.stdout.splitlines()[-1])
    cached, read = map(int, re.search(r"^4 messages, (\d+) tokens cached, (\d+) of them", said[1]).groups())  # type: ignore[union-attr]
    assert cached >= read > 100, said
    assert [line.rpartition(": ")[2] for line in said] == ["new", "extend"]
