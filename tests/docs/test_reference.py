"""Every reason, setting and option has its line in the docs, and no line is left of one that is gone."""

from __future__ import annotations

import dataclasses
import inspect
import re
from typing import Any

import pytest

import agentcache
from agentcache import Engine, LayoutOptions, Loading, Reason, Sampling, StoreOptions, Stream
from agentcache.request import Callbacks
from tests import commands_page
from tests.checkout import ROOT

DOCS = ROOT / "docs"


def rows(name: str, title: str = "") -> set[str]:
    """The first cells, in backquotes, of the tables of a page, or of one part of it."""
    text = (DOCS / name).read_text(encoding="utf-8")
    if title:
        text = text.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    return set(re.findall(r"^\| `([^`]+)` \|", text, re.MULTILINE))


def test_every_reason_is_explained() -> None:
    assert rows("reasons.md") == {reason.value for reason in Reason}


@pytest.mark.parametrize("kind", [Sampling, StoreOptions, LayoutOptions])
def test_every_field_is_explained(kind: Any) -> None:
    assert rows("configure.md", f"`{kind.__name__}`") == {field.name for field in dataclasses.fields(kind)}


@pytest.mark.parametrize(
    ("function", "title"),
    [(Engine, "`Engine(...)`"), (Engine.stream, "`Engine.stream(...)` and `Engine.generate(...)`")],
    ids=["Engine", "stream"],
)
def test_every_parameter_is_explained(function: Any, title: str) -> None:
    explained = set(inspect.signature(function).parameters) - {"self", "loading", "callbacks"}
    explained |= (Loading if function is Engine else Callbacks).__annotations__.keys()
    assert rows("configure.md", title) == explained


def test_every_command_and_option_is_explained() -> None:
    assert commands_page.PAGE.read_text(encoding="utf-8") == commands_page.page(), "run python -m tests.commands_page"


@pytest.mark.parametrize(
    ("title", "names"),
    [
        ("`agentcache`", set(agentcache.__all__)),
        ("`Engine`", {name for name in dir(Engine) if not name.startswith("_")}),
        ("`Stream`", {name for name in vars(Stream) if not name.startswith("_")}),
        ("`agentcache.errors`", {name for name, value in vars(agentcache.errors).items() if isinstance(value, type)}),
    ],
    ids=["agentcache", "Engine", "Stream", "errors"],
)
def test_every_public_name_is_explained(title: str, names: set[str]) -> None:
    assert rows("api.md", title) == names


def test_pages_are_short() -> None:
    # commands.md is written from the commands' own help, structure.md has a line for each module, docs/benchmarks is the lab's
    pages = [*DOCS.glob("*.md"), *(DOCS / "notes").glob("*.md")]
    words = {page.name: len(page.read_text(encoding="utf-8").split()) for page in pages if page.name not in ("commands.md", "structure.md")}
    assert len(words) > 12
    assert {name: count for name, count in words.items() if count > 1500} == {}
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= 1800


def test_the_readme_has_one_short_table_of_ratios() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    measured = readme.partition("\n## What was measured\n")[2].partition("\n## ")[0]
    lines = re.findall(r"^\| .* \|$", measured, re.MULTILINE)[2:]
    assert 0 < len(lines) <= 8
    assert all(line.split("|")[3].strip() for line in lines), "a machine in each line"
    assert re.findall(r"\([^()]*\([^()]*\)[^()]*\)", re.sub(r"```.*?```|`[^`]*`|\]\([^)]*\)", "", readme, flags=re.DOTALL)) == []
