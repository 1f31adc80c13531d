"""The command line: answers at once, says things plainly, and its demo shows what it claims."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from agentcache import __version__, cli, cli_print, demo

ROOT = Path(__file__).resolve().parents[1]


def _run(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(cli.app, arguments, env={"COLUMNS": "120", "TERM": "dumb"})
    if done.exception and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.output


def test_help_names_every_verb() -> None:
    code, said = _run("--help")
    assert code == 0
    assert {"demo", "doctor", "bench"} <= set(said.replace("│", " ").split())


def test_help_loads_no_torch() -> None:
    program = (
        "import sys; sys.argv = ['agentcache', '--help']\n"
        "import agentcache_llm\n"
        "try: agentcache_llm.main()\n"
        "except SystemExit as end: assert not end.code\n"
        "print(*({'torch', 'transformers', 'numpy'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "demo" in done.stdout
    assert done.stderr.strip() == ""


def test_version() -> None:
    assert _run("--version") == (0, f"agentcache {__version__}\n")


def test_module_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "agentcache", "--version"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == f"agentcache {__version__}\n"


def test_doctor_json_says_versions_machine_and_numerics() -> None:
    code, said = _run("doctor", "--json")
    report = json.loads(said)
    assert code == 0
    assert report["installation"] == "ok"
    assert report["versions"]["agentcache"] == __version__
    assert report["machine"]["processors"] >= 1
    assert report["numerics"]["float32"]["numerics"]


def test_doctor_table_shows_nested_rows() -> None:
    code, said = _run("doctor")
    assert code == 0
    assert "  torch " in said
    assert "bitwise" in said
    assert "{" not in said


def test_doctor_of_a_model(model_folder: Path) -> None:
    done = CliRunner().invoke(cli.app, ["doctor", "--json", "--model", str(model_folder)])
    model = json.loads(done.stdout)["model"]
    assert model["family"] == "qwen3"
    assert model["reuse"] is True


def test_doctor_says_plainly_that_a_model_is_missing() -> None:
    code, said = _run("doctor", "--model", "/no/such/model")
    assert code == 1
    assert said.startswith("agentcache: model '/no/such/model' cannot be loaded")


def test_doctor_fails_when_the_installation_is_mixed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentcache_llm.conflict", lambda: "something is in the way")
    code, said = _run("doctor")
    assert code == 1
    assert "something is in the way" in said


def test_rows_of_a_report() -> None:
    report = {"a": {"b": True, "c_bytes": 2**31, "d": None, "e": ["x", 1], "f": []}}
    rows = [(label.strip(), value) for label, value in cli_print.lines(report)]
    assert rows == [("a", ""), ("b", "yes"), ("c", "2.0 GB"), ("d", "unknown"), ("e", "x, 1"), ("f", "none")]


# -- demo ----------------------------------------------------------------------------------------------------------


def test_episode_is_whole() -> None:
    episode = demo.load_episode()
    assert len(episode.tools) == 20
    assert len(episode.steps) >= 6
    for text, results in episode.steps:
        assert text.count("<tool_call>") == text.count("</tool_call>") == len(results)
    assert not episode.steps[-1][1]


def test_demo_on_a_small_model() -> None:
    console = Console(record=True, width=120)
    episode = demo.load_episode()
    report = demo.run(console, layers=1, hidden=128, episode=replace(episode, steps=(*episode.steps[:2], episode.steps[-1])))
    said = console.export_text()
    off, cold, warm = (report["modes"][mode]["steps"] for mode in ("off", "cold", "warm"))
    assert all(step["cached_tokens"] == 0 for step in off)
    assert cold[0]["cached_tokens"] == 0
    assert warm[0]["cached_tokens"] == report["modes"]["warm"]["warm_tokens"] > 2000
    for before, step in zip(cold, cold[1:], strict=False):  # a step pays for what is new behind the last one, and nothing else
        assert step["cached_tokens"] >= before["prompt_tokens"]
        new = step["prompt_tokens"] - before["prompt_tokens"] - before["completion_tokens"]
        assert step["computed_tokens"] <= new + 2
    second = report["modes"]["second"]
    assert second["disk_tokens"] == report["modes"]["warm"]["warm_tokens"], "it came from disk"
    assert [s["computed_tokens"] for s in second["steps"]] == [s["computed_tokens"] for s in warm]
    assert "drew the same 16 tokens" in " ".join(said.split())
    assert "ratio" in said


def test_demo_notices_another_answer() -> None:
    replays = {mode: demo.Replay(mode, drawn=(1, 2)) for mode in demo.MODES}
    replays["warm"].drawn = (1, 3)
    with pytest.raises(AssertionError, match="warm draws"):
        demo._check(replays)
