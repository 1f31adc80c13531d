"""TOML files that users write. Knows nothing of what stands in them."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from .errors import AgentCacheError, ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def read_toml(path: str | os.PathLike[str], name: str, error: type[AgentCacheError] = ConfigError) -> tuple[dict[str, Any], str]:
    """The tables of a file, and its text. name: what an error calls the file."""
    try:
        text = Path(os.path.expanduser(path)).read_text(encoding="utf-8-sig")
        return tomllib.loads(text), text
    except (OSError, ValueError) as fault:
        raise error(f"{name} cannot be read: {fault}") from fault
