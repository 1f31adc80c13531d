"""Libraries of extras: imported when first needed, refused by name where they are missing or too old."""

from __future__ import annotations

import re
from contextlib import suppress
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from .errors import ConfigError


def library(name: str, oldest: str, extra: str, wanted: str) -> Any:
    """Import a library for what is `wanted`. ConfigError: it is missing, or older than release `oldest`."""
    try:
        found = import_module(name)
    except ImportError as error:
        raise ConfigError(f"{wanted}: needs {name}; pip install 'agentcache-llm[{extra}]'") from error
    with suppress(PackageNotFoundError):  # a copy that no installer knows
        if _numbers(present := version(name)) < _numbers(oldest):
            raise ConfigError(f"{wanted}: {name} {present} is older than {oldest}; pip install -U 'agentcache-llm[{extra}]'")
    return found


def _numbers(release: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", release)[:2]]
