"""Where a test run keeps the kernels that it compiles and the verdicts that it finds: each of its processes would repeat them."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

shared: Path | None = None


def share(place: Path | None) -> None:
    """Keep them here, in this process, where a test does not name AGENTCACHE_DIR."""
    global shared
    shared = place
    from agentcache.private import default_path

    def path() -> Path | None:
        return default_path() or shared

    mock.patch("agentcache.model.kernels.object_cache.default_path", path).start()
