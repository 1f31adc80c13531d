"""The README's programs run as they stand, and the commands it names exist. The model they name becomes a tiny folder."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from agentcache.cli import app
from tests.checkout import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
STORE = re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs" / "store.md").read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
MODEL = '"Qwen/Qwen3-0.6B"'


def test_readme_has_programs() -> None:
    assert len(BLOCKS) >= 2


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # what the frameworks do of it is theirs to mend
@pytest.mark.filterwarnings("ignore:Core Pydantic V1:UserWarning")
@pytest.mark.parametrize("number", range(len(BLOCKS + STORE)))
def test_program_runs(number: int, model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    block = (BLOCKS + STORE)[number]
    assert MODEL in block or '"embedded"' in block, f"programs in the README load {MODEL} or the embedded model"
    exec(compile(block.replace(MODEL, repr(str(model_folder))), f"README.md, program {number + 1}", "exec"), {"__name__": "__main__"})
    assert "cache" in (printed := capsys.readouterr().out)
    if number == 0:
        assert f"It prints:\n\n```\n{printed}```" in README


def test_first_program_is_about_ten_lines() -> None:
    lines = [line for line in BLOCKS[0].splitlines() if line.strip()]
    assert len(lines) <= 12


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    named = set(re.findall(r"\bmake ([a-z][a-z-]*)\b", "".join(re.findall(r"^    make .*$|`[^`\n]*make [^`\n]*`", README, re.MULTILINE))))
    assert named >= {"demo", "test"}
    assert named <= targets


def test_commands_exist() -> None:
    verbs = {command.name or getattr(command.callback, "__name__", "") for command in app.registered_commands}
    verbs |= {str(group.name) for group in app.registered_groups}
    named = set(re.findall(r"^    agentcache ([a-z]+)", README, re.MULTILINE))
    assert named
    assert named <= verbs


def test_linked_files_exist() -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / target).is_file(), target


def test_ci_runs_the_readmes_check() -> None:
    run = ROOT / ".ci" / "run"
    assert run.stat().st_mode & 0o111
    assert run.read_text(encoding="utf-8").rstrip().endswith("exec make test")
    assert "test" in subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def test_structure_names_every_module() -> None:
    said = (ROOT / "docs" / "structure.md").read_text(encoding="utf-8")
    modules = [path.relative_to(ROOT / "agentcache") for path in (ROOT / "agentcache").rglob("*.py") if not path.stem.startswith("__")]
    missing = [str(path) for path in modules if path.name not in said]
    assert not [path for path in missing if not path.startswith(("bench/", "store/"))], "each module has a line in docs/structure.md"
