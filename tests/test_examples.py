"""Every program in examples/ runs from the command line and says what its docstring promises."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = {
    "agent_loop.py": (["What is 17 * 23?"], "step 0: "),
    "many_agents.py": ([], "shop: "),
}


def test_every_example_is_run_here() -> None:
    assert {path.name for path in (ROOT / "examples").glob("*.py")} == set(EXAMPLES)


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
