"""Which modules import which, from the files. Holds no tests."""

from __future__ import annotations

from benchmarks.house import graph


def importers(of: str) -> set[str]:
    """Modules outside a package or a file that import it."""
    inside = {name for name in graph() if name == of or name.startswith(f"{of}.")}
    return {name for name, found in graph().items() if found & inside} - inside
