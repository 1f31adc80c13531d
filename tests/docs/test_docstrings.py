"""Docstrings start with a verb or a noun."""

from __future__ import annotations

import ast
import re

import pytest

from tests.checkout import ROOT

pytestmark = pytest.mark.usefixtures("no_garbage")
CLAUSE = re.compile(r"(What|Whether|How|Where|Of|As)\b")
PACKAGE = ROOT / "agentcache"
# files with docstrings that do not: no entry may join
LEFT = ("answer/", "model/", "plan.py", "store/store.py")


def test_docstrings_start_with_a_verb_or_a_noun() -> None:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found, seen = [], 0
    for path in sorted(PACKAGE.rglob("*.py")):
        if (name := str(path.relative_to(PACKAGE))).startswith(LEFT):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, kinds) and (text := ast.get_docstring(node)):
                seen += 1
                if CLAUSE.match(text):
                    found.append(f"{name}: {text[:60]}")
    assert found == []
    assert seen > 1000
