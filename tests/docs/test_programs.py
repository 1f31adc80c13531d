"""The programs and commands of the README and of docs/ run as they stand. The model they name becomes a tiny folder."""

from __future__ import annotations

import importlib.util
import re
import shlex
import sys
from pathlib import Path

import pytest
import typer

from agentcache.cli.app import app
from tests.checkout import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
TEXTS = {str(page.relative_to(ROOT)): page.read_text(encoding="utf-8") for page in PAGES}
MODEL = '"Qwen/Qwen3-0.6B"'
COMMANDS = typer.main.get_command(app)


def programs(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", TEXTS[page], re.MULTILINE | re.DOTALL)


def commands() -> list[tuple[str, list[str]]]:
    """Pages and the words of each command that they indent, its comment left out, lines joined where one ends in a backslash."""
    found = []
    for page, text in TEXTS.items():
        for line in re.findall(r"^    ((?:agentcache |python -m ).*)$", text.replace("\\\n", " "), re.MULTILINE):
            found.append((page, shlex.split(line.partition("  ")[0] if line.startswith("agentcache") else line, comments=True)))
    return found


def test_the_readme_and_the_docs_have_programs() -> None:
    assert len(programs("README.md")) == 3
    assert {page for page in TEXTS if programs(page)} >= {
        "docs/start.md",
        "docs/layout.md",
        "docs/approximate.md",
        "docs/store.md",
        "docs/lint.md",
    }


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # what the frameworks do of it is theirs to mend
@pytest.mark.filterwarnings("ignore:Core Pydantic V1:UserWarning")
@pytest.mark.parametrize(("page", "number"), [(page, number) for page in TEXTS for number in range(len(programs(page)))])
def test_program_runs(
    page: str, number: int, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)  # one of them writes a file
    block = programs(page)[number]
    exec(compile(block.replace(MODEL, repr(str(model_folder))), f"{page}, program {number + 1}", "exec"), {"__name__": "__main__"})
    printed = capsys.readouterr().out
    if "Engine(" in block or "AgentCache" in block:
        assert "cache" in printed
    if (page, number) == ("README.md", 0):
        assert f"At first it prints:\n\n```\n{printed}```" in README
    for comment in re.findall(r"^print\(.*\)  # (.*)$", block, re.MULTILINE):
        assert comment in printed


def test_the_first_program_needs_no_extra(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)  # with it, calls are held to the names of the tools
    exec(programs("README.md")[0], {"__name__": "__main__"})
    assert f"At first it prints:\n\n```\n{capsys.readouterr().out}```" in README


def test_first_program_is_about_ten_lines() -> None:
    lines = [line for line in programs("README.md")[0].splitlines() if line.strip()]
    assert len(lines) <= 12


def test_every_fenced_block_is_a_program_or_output() -> None:
    kinds = {(page, kind) for page, text in TEXTS.items() for kind in re.findall(r"^```(.*)\n(?:.*\n)*?```$", text, re.MULTILINE)}
    assert {kind for kind in kinds if kind[1] != "python"} <= {("README.md", "")}


def test_commands_and_their_options_exist() -> None:
    checked = 0
    for page, (program, *words) in commands():
        if program == "agentcache":
            command = COMMANDS
            while words and words[0] in getattr(command, "commands", {}):
                command = command.commands[words.pop(0)]  # type: ignore[attr-defined]
            assert command is not COMMANDS, f"{page}: agentcache {words}"
            known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
            given = {word.strip("[]") for word in words if word.strip("[]").startswith("--")}
            assert given <= known, f"{page}: {given - known}"
        else:
            module = words[1]
            assert importlib.util.find_spec(module), f"{page}: python -m {module}"
        checked += 1
    assert checked > 30


def test_linked_files_exist() -> None:
    for page, text in TEXTS.items():
        for target, part in re.findall(r"\]\(([^)#:]*)(#[^)]*)?\)", text):
            linked = ROOT / page if not target else (ROOT / page).parent / target
            assert linked.exists(), f"{page}: {target}"
            if part:
                titles = re.findall(r"^#+ (.*)$", linked.read_text(encoding="utf-8"), re.MULTILINE)
                anchors = {"#" + re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
                assert part in anchors, f"{page}: {target}{part}"
