"""Whole engines in processes of their own on one store: they share it, wait for one another, evict pages, and never answer wrongly."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentcache import Engine
from agentcache.store.admin import check
from agentcache.store.disk.folder import Folder
from tests.engines import MB, decode
from tests.processes import Child
from tests.store.child_processes import PROMPTS, ask_for_a_while, compute_once, wait_for_files

# -- two start together ------------------------------------------------------------------------------------------------


def test_of_two_that_start_together_one_computes(model_folder: Path, tmp_path: Path) -> None:
    ready, go = [tmp_path / "ready-0", tmp_path / "ready-1"], tmp_path / "go"
    children = [Child(compute_once, model_folder, tmp_path / "store", path, go) for path in ready]
    wait_for_files(ready, children)
    go.touch()
    first, second = sorted((child.end() for child in children), key=lambda found: int(found["computed"]))
    assert first["ids"] == second["ids"]
    assert second["computed"] > 1500, "one of them computes it"
    assert first["computed"] < 600, "and the other one does not, but for what was no whole page yet"
    assert first["disk"] > 1000


# -- many, for a while -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "seconds"), [(2, 2), pytest.param(8, 60, marks=pytest.mark.slow)])
def test_many_processes_admit_evict_and_match(model_folder: Path, tmp_path: Path, count: int, seconds: int) -> None:
    go, store = tmp_path / "go", tmp_path / "store"
    with Engine(str(model_folder), store=None, reuse="off") as running:
        right = [list(running.generate(prompt, sampling=decode(3)).ids) for prompt in PROMPTS]
    children = [Child(ask_for_a_while, model_folder, store, number, seconds, right, go) for number in range(count)]
    wait_for_files([Path(f"{go}{number}") for number in range(count)], children)
    go.touch()
    found = [child.end() for child in children]
    assert all(each["wrong"] == 0 and each["asked"] > 0 for each in found), found
    assert sum(each["disk_tokens"] for each in found) > 0
    folder = Folder.open(store)
    report = check.verify(folder)
    assert not report.problems, report.problems
    with Engine(str(model_folder), store=str(store)) as running:
        assert running.store.disk is not None
        stats = running.store.disk.index.stats()
        assert running.model.spec is not None
        page = running.model.spec.page_bytes + 65536
    assert stats["pins"] == stats["leases"] == 0
    assert 0 < stats["bytes"] <= 2 * MB + count * page, "each may have found room for one page at the same time"
