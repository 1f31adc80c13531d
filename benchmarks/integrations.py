"""The integrations' classes, found by their entry points: nothing here imports an integration by its name."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any

from agentcache.errors import ConfigError

GROUP = "agentcache.integrations"


def integration(framework: str) -> Any:
    """The module that an installed package offers for a framework; ConfigError if none does."""
    for found in entry_points(group=GROUP, name=framework):
        return found.load()
    raise ConfigError(f"framework={framework!r}: no installed package has the entry point {GROUP!r} of that name; install its integration")
