"""The package as a whole: its public face, what it loads, its manners, and the stranger of the same name."""

from __future__ import annotations

import ast
import atexit
import gc
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest

import agentcache
import agentcache_llm
from agentcache.errors import ForeignPackageError
from tests.checkout import ROOT

SOURCES = sorted([*(ROOT / "agentcache").rglob("*.py"), ROOT / "agentcache_llm.py"])


def _loaded(statement: str) -> set[str]:
    """Names of the modules that a fresh interpreter has after a statement."""
    program = f"import sys; {statement}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize(
    ("first", "given", "spins"),
    [
        ("agentcache", {}, "2000"),
        ("agentcache", {"GOMP_SPINCOUNT": "7"}, "7"),
        ("agentcache", {"OMP_WAIT_POLICY": "passive"}, ""),
        ("torch", {}, ""),
    ],
)
def test_threads_that_wait_soon_sleep(first: str, given: dict[str, str], spins: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    program = f"import os, {first}, agentcache; print(os.environ.get('GOMP_SPINCOUNT', ''))"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env={**environment, **given}, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == spins


# -- the public face -----------------------------------------------------------------------------------------------


def test_public_names() -> None:
    names = (
        "AnswerCounts Arrangement Calibration CallerWarnings Chunk Completion Constraint Delta Document Engine EngineLease Forgotten "
        "InvalidCall Layout LayoutOptions Learnt Loading Logprob Message MissWarnings Missed ModelFacts Move PASSAGES Part Reason "
        "Receipt Recorder Refusal RemoteEngine "
        "Sampling Schema Session Span StoreOptions Stream Tool ToolCall ToolGroup __version__ embedded errors foreign_settings volatile"
    )
    assert agentcache.__all__ == names.split()
    assert dir(agentcache) == sorted(agentcache.__all__)
    for name in agentcache.__all__:
        assert getattr(agentcache, name) is not None


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'agentcache' has no attribute 'Cache'"):
        agentcache.Cache  # noqa: B018


@pytest.mark.parametrize("statement", ["import agentcache", "import agentcache.cli.app", "from agentcache import Message, Sampling"])
def test_import_is_light(statement: str) -> None:
    assert not _loaded(statement) & {"torch", "transformers", "tokenizers", "numpy", "langchain_core", "llama_index"}


def test_version_is_the_distributions() -> None:
    assert version("agentcache-llm") == agentcache.__version__


# -- manners -------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_garbage")
@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_sources_are_small_and_say_what_they_are(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    assert text.count("\n") <= 400, "longer than 400 lines: which two things does it hide?"
    assert not text or ast.get_docstring(tree), "no module docstring"
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            assert node.end_lineno is not None
            assert node.end_lineno - node.lineno < 60, f"{node.name} is longer than 60 lines"


def test_no_secret_lies_in_the_checkout() -> None:
    """A key that an engine or a test wrote into the current folder once went along with a commit, unseen."""
    names = {"key", "registered-tools.json"}
    assert [path for path in ROOT.iterdir() if path.name in names or path.suffix in {".lock", ".sqlite"}] == []


# -- the stranger --------------------------------------------------------------------------------------------------


def _install(site: Path, name: str, package: str = "agentcache", *, record: bool = True) -> None:
    """A fake installed distribution of one package."""
    (site / package).mkdir(parents=True, exist_ok=True)
    (site / package / "__init__.py").touch()
    info = site / f"{name.replace('-', '_')}-9.9.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 9.9\n")
    if record:
        (info / "RECORD").write_text(f"{package}/__init__.py,,\n")
    else:
        (info / "top_level.txt").write_text(f"{package}\n")


@pytest.mark.parametrize("record", [True, False])
def test_foreign_distribution_found_first_is_named(tmp_path: Path, record: bool) -> None:
    _install(tmp_path, "agentcache", record=record)
    with pytest.raises(ForeignPackageError) as caught:
        agentcache_llm.check([str(tmp_path), str(ROOT)])
    said = str(caught.value)
    assert "agentcache 9.9" in said
    assert str(tmp_path) in said
    assert "pip uninstall agentcache" in said


def test_foreign_folder_found_first_is_named(tmp_path: Path) -> None:
    (tmp_path / "agentcache").mkdir()
    (tmp_path / "agentcache" / "__init__.py").touch()
    with pytest.raises(ForeignPackageError, match="no installed distribution owns.*rename or move"):
        agentcache_llm.check([str(tmp_path), str(ROOT)])


def test_foreign_module_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "agentcache.py").touch()
    with pytest.raises(ForeignPackageError, match=r"agentcache\.py"):
        agentcache_llm.check([str(tmp_path), str(ROOT)])


def test_two_distributions_in_one_folder_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _install(tmp_path, "agentcache")
    _install(tmp_path, "agentcache-llm")
    monkeypatch.setattr(agentcache_llm, "OURS", tmp_path / "agentcache")
    with pytest.raises(ForeignPackageError, match="same folder.*pip uninstall agentcache agentcache-llm, then pip install agentcache-llm"):
        agentcache_llm.check([str(tmp_path)])


def test_missing_package_is_named(tmp_path: Path) -> None:
    assert "pip install" in (agentcache_llm.conflict([str(tmp_path)]) or "")


def test_ours_first_is_no_conflict(tmp_path: Path) -> None:
    _install(tmp_path, "agentcache")
    _install(tmp_path, "unrelated", "somethingelse")
    assert agentcache_llm.conflict([str(ROOT), str(tmp_path)]) is None
    agentcache_llm.check()


def test_the_command_names_a_foreign_package_in_its_way(tmp_path: Path) -> None:
    _install(tmp_path, "agentcache")
    program = f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT)!r}]; import agentcache_llm; agentcache_llm.main()"
    done = subprocess.run([sys.executable, "-c", program, "--help"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("agentcache: `import agentcache` finds ")
    assert "Traceback" not in done.stderr


def test_the_error_has_its_class_under_a_taken_name(tmp_path: Path) -> None:
    _install(tmp_path, "agentcache")
    program = f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT)!r}]; import agentcache_llm; agentcache_llm.check()"
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert "ForeignPackageError: `import agentcache` finds" in done.stderr


@pytest.mark.parametrize("triton", [False, True])
def test_the_command_ends_without_a_look_unless_triton_is_loaded(triton: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    at_exit: list[Callable[[], object]] = []
    frozen: list[bool] = []
    monkeypatch.setattr(atexit, "register", at_exit.append)
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(True))
    monkeypatch.setattr(sys, "argv", ["agentcache", "--version"])
    monkeypatch.delitem(sys.modules, "triton._C.libtriton", raising=False)
    if triton:
        monkeypatch.setitem(sys.modules, "triton._C.libtriton", agentcache_llm)
    with pytest.raises(SystemExit):
        agentcache_llm.main()
    for each in at_exit:
        each()
    assert frozen == [True] * (not triton)
