"""Every reason, setting and option has its line in the docs, and no line is left of one that is gone."""

from __future__ import annotations

import dataclasses
import inspect
import re
from typing import Any

import pytest

from agentcache import Engine, LayoutOptions, Loading, Reason, Sampling, StoreOptions
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
    explained = set(inspect.signature(function).parameters) - {"self", "loading"}
    if function is Engine:
        explained |= Loading.__annotations__.keys()
    assert rows("configure.md", title) == explained


def test_every_command_and_option_is_explained() -> None:
    assert commands_page.PAGE.read_text(encoding="utf-8") == commands_page.page(), "run python -m tests.commands_page"


@pytest.mark.parametrize("name", ["reasons.md", "configure.md", "store.md", "layout.md"])
def test_pages_for_users_are_short(name: str) -> None:
    assert len((DOCS / name).read_text(encoding="utf-8").split()) <= 1500
