"""Every program in examples/ runs from the command line and says what its docstring promises."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkout import ROOT

EXAMPLES = {
    "agent_loop.py": (["What is 17 * 23?"], "step 0: "),
    "many_agents.py": ([], "shop: "),
}


def test_every_example_is_run_here_or_by_its_integration() -> None:
    found = {path.name for path in (ROOT / "examples").glob("*.py")}
    assert {name for name in found if not name.startswith(("langchain_", "llamaindex_", "serve_"))} == set(EXAMPLES)
    assert "serve_two_agents.py" in (ROOT / "tests" / "server" / "test_example.py").read_text(encoding="utf-8")
    tests = [path.parent for path in (ROOT / "integrations").rglob("test_examples.py")]
    assert len(tests) == 2, "the others are run by the tests of their integration, which check that they run all of them"


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_example_runs(name: str, model_folder: Path) -> None:
    arguments, said = EXAMPLES[name]
    command = [sys.executable, str(ROOT / "examples" / name), str(model_folder), *arguments]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=240, env={"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    )
    assert done.returncode == 0, done.stderr
    assert said in done.stdout
    assert "cached" in done.stdout
