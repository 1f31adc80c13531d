"""The three packages as a user gets them: built from this tree without a network, installed into an empty environment, imported there."""

from __future__ import annotations

import shutil
import subprocess
import sys
import venv
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

from tests.checkout import ROOT

PACKAGES = {  # distribution: (its folder here, the folder of its modules in there)
    "agentcache_llm": (".", "agentcache"),
    "langchain_agentcache": ("integrations/langchain-agentcache", "langchain_agentcache"),
    "llama_index_llms_agentcache": ("integrations/llama-index-llms-agentcache", "llama_index/llms/agentcache"),
}
IMPORTS = """
import importlib, sys
for name, what in (("agentcache", "Engine"), ("langchain_agentcache", "ChatAgentCache"), ("llama_index.llms.agentcache", "AgentCacheLLM")):
    module = importlib.import_module(name)
    getattr(module, what)
    print(name, module.__file__)
"""
LATER = "agentcache/embedded/model/weights.safetensors"  # the embedded model lies here once it is trained


def run(*command: object, cwd: Path) -> str:
    """What a program printed; its errors are shown if it fails."""
    done = subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tree: building leaves folders behind."""
    copy = tmp_path_factory.mktemp("source") / "tree"
    unwanted = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist", "docs", "examples")
    shutil.copytree(ROOT, copy, ignore=unwanted)
    (copy / LATER).parent.mkdir(exist_ok=True)
    (copy / LATER).touch()
    return copy


@pytest.fixture(scope="module")
def wheels(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Wheels by the name of their distribution."""
    folder = tmp_path_factory.mktemp("wheels")
    offline = ("--no-index", "--no-deps", "--no-build-isolation", "--disable-pip-version-check", "--quiet")
    run(sys.executable, "-m", "pip", "wheel", *offline, "--wheel-dir", folder, *(where for where, _ in PACKAGES.values()), cwd=source)
    return {path.name.split("-")[0]: path for path in folder.glob("*.whl")}


def files(wheel: Path) -> set[str]:
    """Names of the files in a wheel, but for what describes it."""
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def metadata(wheel: Path) -> Message:
    """What a wheel says of itself."""
    with zipfile.ZipFile(wheel) as archive:
        assert any(".dist-info/licenses/LICENSE" in name for name in archive.namelist())
        return Parser().parsestr(archive.read(next(name for name in archive.namelist() if name.endswith("/METADATA"))).decode())


def test_each_wheel_holds_its_package_and_nothing_else(source: Path, wheels: dict[str, Path]) -> None:
    """Also types, recorded texts and weights; no tests. No `__init__` in LlamaIndex's own folders: they belong to everybody."""
    assert wheels.keys() == PACKAGES.keys()
    for name, (where, package) in PACKAGES.items():
        base = source / where
        expected = {str(path.relative_to(base)) for path in (base / package).rglob("*") if path.is_file()}
        assert f"{package}/py.typed" in expected
        if name == "agentcache_llm":
            expected.add("agentcache_llm.py")
            assert {LATER, "agentcache/bench/museum.json", "agentcache/bench/cases.jsonl.gz"} <= expected
        assert files(wheels[name]) == expected


def test_what_a_wheel_needs_is_what_it_is_for(wheels: dict[str, Path]) -> None:
    """The integrations need this project and their framework; the version they ask for is the one that stands beside them."""
    told = {name: metadata(path) for name, path in wheels.items()}
    ours = {name: told[name].get_all("Requires-Dist") or [] for name in PACKAGES}
    for name, framework in (("langchain_agentcache", "langchain-core"), ("llama_index_llms_agentcache", "llama-index-core")):
        needed = [line for line in ours[name] if "extra ==" not in line]
        assert sorted(line.split(">")[0].split("<")[0] for line in needed) == sorted(["agentcache-llm[constrain]", framework])
        assert told[name]["Description-Content-Type"] == "text/markdown"
    assert told["agentcache_llm"]["Version"].startswith("0.1")
    assert not [line for line in ours["agentcache_llm"] if "lang" in line and "extra ==" not in line]


def test_they_are_installed_offline_and_imported(wheels: dict[str, Path], tmp_path: Path) -> None:
    """Into an environment that has what they need, as other installations of it, and not this tree."""
    venv.create(tmp_path / "venv", with_pip=False, symlinks=True)
    python = tmp_path / "venv" / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check")
    run(*pip, "install", "--no-index", "--no-deps", "--quiet", *wheels.values(), cwd=tmp_path)
    site = Path(run(python, "-I", "-c", "import site; print(site.getsitepackages()[0])", cwd=tmp_path).strip())
    others = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    (site / "others.pth").write_text("\n".join(others))  # behind its own; editable installations of this tree do not count there
    found = dict(line.split(" ", 1) for line in run(python, "-I", "-c", IMPORTS, cwd=tmp_path).splitlines())
    assert len(found) == len(PACKAGES)
    assert all(Path(file).is_relative_to(site) for file in found.values()), found
    assert run(tmp_path / "venv" / "bin" / "agentcache", "--version", cwd=tmp_path).strip()
