"""Writes docs/commands.md from the command line itself: `python -m tests.commands_page`."""

from __future__ import annotations

import re
from typing import Any

import typer

from agentcache.cli.app import app
from tests.checkout import ROOT

PAGE = ROOT / "docs" / "commands.md"
HEAD = """# Commands

Written by `python -m tests.commands_page` from the commands' own help. Each ends with exit code 1 and one line if something is wrong.
"""


def page() -> str:
    """Every command with its arguments and options, in Markdown."""
    return "\n".join([HEAD, *_sections(typer.main.get_command(app), "agentcache")])


def _sections(command: Any, path: str) -> list[str]:
    if hasattr(command, "commands"):
        return [line for name, inner in sorted(command.commands.items()) for line in _sections(inner, f"{path} {name}")]
    rows = []
    for parameter in command.params:
        if not parameter.hidden and "--help" not in parameter.opts:
            option = parameter.param_type_name == "option"
            names = [*parameter.opts, *parameter.secondary_opts] if option else [str(parameter.name).upper()]
            rows.append(f"| {', '.join(f'`{name}`' for name in names)} | {_plain(parameter.help)} |")
    told = _plain((command.help or "").split("\f")[0])
    table = ["| | |", "| --- | --- |", *rows, ""] if rows else []
    return [f"## {path}", "", told, "", *table]


def _plain(text: str | None) -> str:
    return re.sub(r"\s+", " ", text or "").replace("|", "\\|").strip()


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
