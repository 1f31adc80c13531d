"""Who imports whom, by reading the files: no circle among them, and nothing of the product imports the lab.

Imports in functions and under TYPE_CHECKING count: both tie a file to another for whoever has to read it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = (ROOT, ROOT / "integrations" / "langchain-agentcache", ROOT / "integrations" / "llama-index-llms-agentcache")
FILES = ("agentcache_llm.py", "agentcache", "benchmarks", "examples", "langchain_agentcache", "llama_index")
Graph = Mapping[str, frozenset[str]]


def modules(package: Path) -> Iterator[tuple[str, Path]]:
    for name in FILES:
        found = [package / name] if name.endswith(".py") else (package / name).rglob("*.py")
        for path in (path for path in found if path.exists()):
            parts = path.relative_to(package).with_suffix("").parts
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def imported(name: str, path: Path, known: Mapping[str, Path]) -> frozenset[str]:
    """The modules among `known` that a file names in its import statements, wherever they stand."""
    inside = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = inside[: len(inside) - node.level + 1] if node.level else []
            source = ".".join([*above, *([node.module] if node.module else [])])
            found.update(child if (child := f"{source}.{alias.name}") in known else source for alias in node.names)
    return frozenset(found & known.keys()) - {name}


@cache
def graph() -> Graph:
    known = dict(pair for package in PACKAGES for pair in modules(package))
    return {name: imported(name, path, known) for name, path in known.items()}


def circle(among: Graph) -> list[str]:
    """One circle of files; empty if there is none."""
    try:
        TopologicalSorter(among).prepare()
    except CycleError as error:
        return list(reversed(error.args[1]))
    return []


def importers(of: str) -> set[str]:
    """Modules outside a package or a file that import it."""
    inside = {name for name in graph() if name == of or name.startswith(f"{of}.")}
    return {name for name, found in graph().items() if found & inside} - inside


def is_command(name: str) -> bool:
    return name == "agentcache.__main__" or name.startswith("agentcache.cli")


def test_no_circle_of_files() -> None:
    assert len(graph()) > 200
    found = circle(graph())
    assert not found, "imports in a circle: " + " -> ".join(found)


def test_a_circle_under_type_checking_is_found(tmp_path: Path) -> None:
    (tmp_path / "agentcache").mkdir()
    (tmp_path / "agentcache" / "__init__.py").touch()
    (tmp_path / "agentcache" / "tree.py").write_text("def f():\n    from .store import Store\n")
    (tmp_path / "agentcache" / "store.py").write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from agentcache import tree\n"
    )
    known = dict(modules(tmp_path))
    found = circle({name: imported(name, path, known) for name, path in known.items()})
    assert set(found) == {"agentcache.tree", "agentcache.store"}


def test_only_commands_import_the_bench() -> None:
    strangers = {name for name in importers("agentcache.bench") if name.startswith("agentcache.") and not is_command(name)}
    assert not strangers


@pytest.mark.parametrize("lab", ["agentcache.bench", "agentcache.demo", "agentcache.cli", "benchmarks", "examples"])
def test_the_core_imports_no_command_and_no_lab(lab: str) -> None:
    outside = ("agentcache.bench", "agentcache.demo", "agentcache.cli", "agentcache.__main__")
    strangers = {name for name in importers(lab) if name.startswith("agentcache.") and not name.startswith(outside)}
    assert not strangers, f"the core imports {lab}"


@pytest.mark.parametrize("integration", ["langchain_agentcache", "llama_index.llms.agentcache"])
def test_the_lab_finds_integrations_by_entry_points(integration: str) -> None:
    assert integration in graph()
    strangers = {name for name in importers(integration) if name.startswith(("agentcache", "benchmarks"))}
    assert not strangers
