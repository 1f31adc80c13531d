"""Libraries of extras: imported when first needed, refused by name where they are missing or too old."""

from __future__ import annotations

import functools
import re
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
    if (present := release(name)) and _numbers(present) < _numbers(oldest):
        raise ConfigError(f"{wanted}: {name} {present} is older than {oldest}; pip install -U 'agentcache-llm[{extra}]'")
    return found


@functools.cache  # requests ask, and finding it reads files
def release(name: str) -> str:
    """The release of a library; empty for a copy that no installer knows."""
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _numbers(release: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", release)[:2]]
