"""Who imports whom, by reading the files: no circle among them, and nothing of the product imports the lab.

Imports in functions and under TYPE_CHECKING count: both tie a file to another for whoever has to read it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.house import circle, graph, imported, modules
from tests.import_graph import importers


def is_command(name: str) -> bool:
    return name in ("agentcache.__main__", "agentcache.approximate.calibrate.cli") or name.startswith("agentcache.cli")


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
    outside = ("agentcache.bench", "agentcache.demo")
    strangers = {name for name in importers(lab) if name.startswith("agentcache.") and not (name.startswith(outside) or is_command(name))}
    assert not strangers, f"the core imports {lab}"


@pytest.mark.parametrize("integration", ["langchain_agentcache", "llama_index.llms.agentcache"])
def test_the_lab_finds_integrations_by_entry_points(integration: str) -> None:
    assert integration in graph()
    strangers = {name for name in importers(integration) if name.startswith(("agentcache", "benchmarks"))}
    assert not strangers
