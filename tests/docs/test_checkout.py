"""The check that the README names is the one that continuous integration runs, and the drawing of the house names every module."""

from __future__ import annotations

import re
import subprocess
from importlib.metadata import PackageNotFoundError, distribution

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from tests.checkout import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    named = set(re.findall(r"\bmake ([a-z][a-z-]*)\b", "".join(re.findall(r"^    make .*$|`[^`\n]*make [^`\n]*`", README, re.MULTILINE))))
    assert named >= {"demo", "test"}
    assert named <= targets


def test_ci_runs_the_readmes_check() -> None:
    run = ROOT / ".ci" / "run"
    assert run.stat().st_mode & 0o111
    assert run.read_text(encoding="utf-8").rstrip().endswith("exec make test")
    assert "test" in subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def test_what_is_pinned_for_every_python_runs_on_the_oldest() -> None:
    """As far as it is installed here; elsewhere the resolver would search for hours."""
    oldest, wrong = {"python_version": "3.10"}, []
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines():
        if not line or line.startswith("#") or ((pin := Requirement(line)).marker and not pin.marker.evaluate(oldest)):
            continue
        try:
            found = distribution(pin.name)
        except PackageNotFoundError:
            continue
        if found.version in pin.specifier and "3.10" not in SpecifierSet(found.metadata["Requires-Python"] or ""):
            wrong.append(line)
    assert wrong == []


def test_structure_names_every_module() -> None:
    said = (ROOT / "docs" / "structure.md").read_text(encoding="utf-8")
    modules = [path.relative_to(ROOT / "agentcache") for path in (ROOT / "agentcache").rglob("*.py") if not path.stem.startswith("__")]
    missing = [str(path) for path in modules if path.name not in said]
    assert not [path for path in missing if not path.startswith(("bench/", "store/"))], "each module has a line in docs/structure.md"
