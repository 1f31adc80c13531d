"""The rules of the tests themselves: short names, and no test module that another one needs."""

from __future__ import annotations

import ast

import pytest

from benchmarks.house import imported
from tests.checkout import ROOT

pytestmark = pytest.mark.usefixtures("no_garbage")
FILES = sorted({*(ROOT / "tests").rglob("*.py"), *(ROOT / "integrations").glob("*/tests/**/*.py")})


def test_names_are_sentences_of_at_most_ten_words() -> None:
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in FILES]
    functions = [node for tree in trees for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    names = [node.name.removeprefix("test_") for node in functions if node.name.startswith("test_")]
    assert [name for name in names if len(name.split("_")) > 10] == []
    assert len(names) > 1500


def test_no_test_module_imports_another() -> None:
    inside = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in FILES}
    modules = {name for name in inside if name.rpartition(".")[2].startswith("test_")}
    found = {name: sorted(imported(name, path, inside) & modules) for name, path in inside.items()}
    assert {name: others for name, others in found.items() if others} == {}
    assert len(modules) > 100


def test_examples_do_not_depend_on_what_is_loaded() -> None:
    """Hypothesis also draws numbers that stand in the project's modules, as many as are loaded by then."""
    from hypothesis.internal.conjecture import providers

    assert len(providers._get_local_constants()) == 0
