"""The way into agentcache that still works when another package named `agentcache` is in the way. Knows nothing of models.

The name `agentcache` belongs to someone else's distribution too. If theirs comes first on the import path, none of our code
runs at `import agentcache`, so nothing in that folder could tell the user. This module lies beside it under a name of its own:
the command `agentcache` and the framework integrations enter here and get an error with a way out instead of an AttributeError.
"""

from __future__ import annotations

import atexit
import errno
import gc
import importlib.machinery
import importlib.util
import re
import sys
from collections.abc import Iterator
from importlib.metadata import Distribution, distributions
from pathlib import Path

DISTRIBUTION = "agentcache-llm"
PACKAGE = "agentcache"
OURS = Path(__file__).resolve().parent / PACKAGE


def _normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def foreign_distributions(path: list[str] | None = None) -> Iterator[Distribution]:
    """Installed distributions, other than ours, that bring a top-level `agentcache`. `path` defaults to sys.path."""
    for found in distributions() if path is None else distributions(path=path):
        if _normalised(found.metadata["Name"] or "") == DISTRIBUTION:
            continue
        tops = (found.read_text("top_level.txt") or "").split()
        record = found.read_text("RECORD") or ""
        if PACKAGE in tops or re.search(rf"^{PACKAGE}(/__init__)?\.py,", record, re.MULTILINE):
            yield found


def _named(found: Distribution) -> str:
    return f"{found.metadata['Name']} {found.version} in {found.locate_file('')}"


def conflict(path: list[str] | None = None) -> str | None:
    """What is wrong with `import agentcache` on this path and what to do about it; None if it is ours alone.

    path: a list like sys.path; the default is the running interpreter's own way of importing.
    """
    if path is None:
        spec = importlib.util.find_spec(PACKAGE)
    else:
        spec = importlib.machinery.PathFinder.find_spec(PACKAGE, path)
    if spec is None:
        return f"there is no package {PACKAGE!r} on the import path: pip install --force-reinstall {DISTRIBUTION}"
    origin = Path(spec.origin).resolve() if spec.origin else None
    others = list(foreign_distributions(path))
    if origin is None or origin.parent != OURS:
        where = str(origin) if origin else f"a folder without __init__.py, {list(spec.submodule_search_locations or [])}"
        owners = [found for found in others if origin and Path(str(found.locate_file(PACKAGE))).resolve() in (origin.parent, origin)]
        if not owners:
            return (
                f"`import {PACKAGE}` finds {where}, which no installed distribution owns, before {DISTRIBUTION} in {OURS}: "
                "rename or move it, or start Python from another folder"
            )
        name = owners[0].metadata["Name"]
        return (
            f"`import {PACKAGE}` finds {where}, of the distribution {_named(owners[0])}, before {DISTRIBUTION} in {OURS}: "
            f"pip uninstall {name}, or use a virtual environment of its own for one of the two"
        )
    mixed = [found for found in others if Path(str(found.locate_file(PACKAGE))).resolve() == OURS]
    if mixed:
        name = mixed[0].metadata["Name"]
        return (
            f"{_named(mixed[0])} is installed into the same folder as {DISTRIBUTION}, and each overwrites files of the other: "
            f"pip uninstall {name} {DISTRIBUTION}, then pip install {DISTRIBUTION}"
        )
    return None


def check(path: list[str] | None = None) -> None:
    """Raise ForeignPackageError when `import agentcache` would not give ours, or ours mixed with another's files."""
    found = conflict(path)
    if found:
        raise _error_class()(found)


def _error_class() -> type[Exception]:
    """ForeignPackageError from our own folder, whatever `import agentcache` finds."""
    if getattr(sys.modules.get(PACKAGE), "DISTRIBUTION", None) == DISTRIBUTION:
        from agentcache.errors import ForeignPackageError

        return ForeignPackageError
    spec = importlib.util.spec_from_file_location("agentcache_llm._errors", OURS / "errors.py")
    if spec is None or spec.loader is None or not (OURS / "errors.py").is_file():
        return ImportError
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    error: type[Exception] = module.ForeignPackageError
    return error


def _quick_conflict() -> str | None:
    """As `conflict`, but reads the installed distributions only where the import already looks wrong or the stranger is there."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is not None and spec.origin and Path(spec.origin).resolve().parent == OURS and not list(distributions(name=PACKAGE)):
        return None
    return conflict()


def _leave_objects() -> None:
    """Spare Python a look, of a second as it ends, at 400,000 objects of PyTorch and transformers. Triton reports its own as leaks then."""
    if "triton._C.libtriton" not in sys.modules:
        gc.freeze()


def main() -> None:
    """The command `agentcache`."""
    found = _quick_conflict()
    if found:
        sys.exit(f"agentcache: {found}")
    from agentcache.cli.app import app

    atexit.register(_leave_objects)
    try:
        app(prog_name=PACKAGE, obj=conflict)
    except OSError as error:
        if error.errno != errno.ENOSPC or error.filename is not None:
            raise
        sys.exit(f"agentcache: its output cannot be written: {error.strerror}")


if __name__ == "__main__":
    main()
