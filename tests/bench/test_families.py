"""`agentcache bench families`: its rows are measured, and other tokens, bits or processes show in them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from agentcache.bench import families, family_reuse
from agentcache.bench.cli import app
from agentcache.model import proof
from tests.checkout import ROOT

KEYS = {"family", "path", "group", "step", "second_process", "equal", "bitwise", "why"}


def rows(*names: str) -> tuple[dict[str, dict[str, Any]], dict[str, int]]:
    """Rows by family, and the summary, measured in this process and a second one."""
    kept: dict[str, Any] = {}
    found = family_reuse.run(names, torch.empty(0), lambda text: None, kept.update)
    assert found == kept["rows"]
    return {row["family"]: row for row in found}, kept["summary"]


def test_kinds_of_layers_are_reused_in_a_second_process(tmp_path: Path) -> None:
    names, page = ("gemma3_text", "gpt_oss", "qwen3_5_text", "lfm2", "deepseek_v3", "recurrent_gemma"), tmp_path / "page.md"
    done = CliRunner().invoke(app, ["families", "--only", ",".join(names), "--json", str(tmp_path / "row.json"), "--markdown", str(page)])
    assert done.exit_code == 0, done.output
    said = json.loads(done.stdout.splitlines()[-1])
    assert json.loads((tmp_path / "row.json").read_text()) == said
    assert [row["family"] for row in said["rows"]] == list(names)
    assert all(row.keys() >= KEYS for row in said["rows"])
    *reused, lossy = said["rows"]
    for row in reused:
        known = families.TINY[row["family"]]
        assert row["equal"], row
        assert row["bitwise"] or not known.bits, row
        assert row["path"] == ("checkpoints" if known.recurrent else "pages")
        assert 600 < row["group"] < row["step"] < row["second_process"], row
    assert (lossy["path"], lossy["group"], lossy["equal"]) == ("stock", 0, None)
    assert "continued after 64 tokens" in lossy["why"]
    assert {"tried": 6, "reused": 5, "equal": 5}.items() <= said["summary"].items()
    assert "6 tried, 5 reused, 5 equal" in done.stdout
    assert "6 of 6: recurrent_gemma" in done.stderr
    assert "| lfm2, qwen3_5_text | checkpoints |" in page.read_text()


def test_other_weights_in_the_second_process_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    build = families.build
    monkeypatch.setattr(families, "build", lambda name, dtype: build(name, dtype, seed=1))  # the second process has seed 0
    found, summary = rows("llama")
    assert (found["llama"]["second_process"], found["llama"]["equal"], found["llama"]["bitwise"]) == (0, False, False)
    assert "of the second process differs" in found["llama"]["why"]
    assert summary == {"tried": 1, "reused": 0, "equal": 0, "bitwise": 0}


def test_a_family_that_fails_does_not_end_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(families.TINY, "opt", families.Family({"num_attention_heads": 7}))  # does not divide its width
    found, summary = rows("opt", "recurrent_gemma")
    assert found["opt"]["path"] == "failed"
    assert found["opt"]["why"].startswith("ValueError: ")
    assert found["recurrent_gemma"]["path"] == "stock"
    assert summary["tried"] == 2


def test_a_run_proves_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTCACHE_DIR", str(tmp_path))
    proven: list[str] = []
    prove = proof.prove
    monkeypatch.setattr(proof, "prove", lambda model, window: proven.append(model.support.name) or prove(model, window))
    for _ in range(2):
        rows("recurrent_gemma")
    assert proven == ["recurrent_gemma"] * 2
    assert os.environ["AGENTCACHE_DIR"] == str(tmp_path)
    assert not list(tmp_path.iterdir())


def test_an_unknown_family_is_named() -> None:
    done = CliRunner().invoke(app, ["families", "--only", "llama,lama"])
    assert done.exit_code == 1
    assert "only='lama'" in done.stderr
    assert "use some of" in done.stderr


def test_the_docs_have_every_family_once() -> None:
    page = (ROOT / "docs" / "families.md").read_text(encoding="utf-8")
    table = page.partition("| families | path |")[2].partition("\n\n")[0]
    named = [name for line in table.splitlines()[2:] for name in line.split("|")[1].strip().split(", ")]
    assert sorted(named) == sorted(families.TINY)
