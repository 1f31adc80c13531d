"""Libraries of extras: what is missing or too old is refused by name, before it fails in the middle."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.version import Version
from transformers.utils import import_utils

from agentcache import Constraint, extras
from agentcache.errors import ConfigError
from agentcache.toml_file import read_toml
from tests.engines import chat, decode, engine

ROOT = Path(__file__).parents[1]


def asked_for() -> list[tuple[str, str, str]]:
    """Each library, its oldest release and its extra, as the package asks for it."""
    trees = (ast.parse(file.read_text("utf-8")) for file in (ROOT / "agentcache").rglob("*.py"))
    calls = (node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == "extras.library")
    return sorted(tuple(ast.literal_eval(one) for one in call.args[:3]) for call in calls)


def test_releases_are_those_of_the_distribution() -> None:
    listed = read_toml(ROOT / "pyproject.toml", "pyproject.toml")[0]["project"]["optional-dependencies"]
    names = {name for name, *_ in asked_for()}
    assert sorted(names) == ["datasketch", "fastapi", "httpx", "llguidance", "peft", "prometheus_client", "pydantic"]
    for name, oldest, extra in asked_for():
        assert f"{name.replace('_', '-')}>={oldest}" in listed[extra]


@pytest.mark.parametrize(
    ("release", "refused"), [("1.3.0", True), ("1.7", False), ("1.10.0rc1", False), ("2", False), ("0.9.dev3+g1", True)]
)
def test_an_older_release_is_refused_by_name(release: str, refused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "release", lambda name: release)
    if not refused:
        assert extras.library("llguidance", "1.7", "constrain", "this").__name__ == "llguidance"
        return
    with pytest.raises(
        ConfigError, match=re.escape(f"this: llguidance {release} is older than 1.7; pip install -U 'agentcache-llm[constrain]'")
    ):
        extras.library("llguidance", "1.7", "constrain", "this")


def test_an_old_library_stops_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "release", lambda name: "1.3.0")
    with engine(strict=True) as running:
        said = running.generate(chat("Is the tide high?"), [{"name": "tide", "parameters": {}}], sampling=decode(2))
        assert any("llguidance 1.3.0 is older" in note for note in said.receipt.notes)
        with pytest.raises(ConfigError, match=r"llguidance 1\.3\.0 is older"):
            running.generate(chat("Is the tide high?"), [], sampling=decode(2), constraint=Constraint(regex="yes|no"))


def test_the_oldest_accelerate_loads_weights_in_fewer_bits() -> None:
    listed = read_toml(ROOT / "pyproject.toml", "pyproject.toml")[0]["project"]["optional-dependencies"]["bitsandbytes"]
    (oldest,) = re.findall(r"accelerate>=([\d.]+)", " ".join(listed))
    assert Version(oldest) >= Version(import_utils.ACCELERATE_MIN_VERSION)


@pytest.mark.parametrize(
    ("missing", "extra", "program"),
    [
        ("httpx", "client", "from agentcache import RemoteEngine; RemoteEngine('http://127.0.0.1:1')"),
        ("prometheus_client", "server", "from agentcache.prometheus import EngineCollector; EngineCollector(dict)"),
    ],
)
def test_a_class_names_the_extra_that_it_lacks(missing: str, extra: str, program: str) -> None:
    said = f"import sys; sys.modules[{missing!r}] = None; {program}"
    run = subprocess.run([sys.executable, "-c", said], capture_output=True, text=True, timeout=120)
    last = run.stderr.splitlines()[-1]
    assert "ConfigError: " in last
    assert last.endswith(f": needs {missing}; pip install 'agentcache-llm[{extra}]'")
