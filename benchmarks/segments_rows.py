"""Rows of a long measurement, written as they are measured: a run that was ended goes on where it stopped. Knows nothing of what they say.

first line   the settings; a file of other settings is refused
then         {"part", "number", ...} each; the last line may be torn, and is measured again
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentcache.errors import ConfigError

Row = dict[str, Any]


class Rows:
    """What was measured, in memory, and in a file if one is named. Thread safe."""

    def __init__(self, path: Path | None, settings: Mapping[str, Any]) -> None:
        self.path = path
        self.rows: list[Row] = []
        self._lock = threading.Lock()
        head = json.loads(json.dumps({"part": "settings", **settings}))
        if path is None:
            return
        if path.is_file() and (known := settings_of(path)) is not None:
            differs = sorted(name for name in {*head, *known} if head.get(name) != known.get(name))
            if differs:
                said = f"{differs[0]}={known.get(differs[0])!r} instead of {head.get(differs[0])!r}"
                raise ConfigError(f"rows {str(path)!r} were measured with {said}: name another file")
            lines = path.read_text(encoding="utf-8").split("\n")
            whole = [line for line in lines[:-1] if line]  # what has no line end behind it was torn
            self.rows = [json.loads(line) for line in whole[1:]]
            path.write_text("".join(f"{line}\n" for line in whole), encoding="utf-8")
        else:
            path.write_text(json.dumps(head) + "\n", encoding="utf-8")

    def add(self, row: Row) -> None:
        """Keep a row."""
        with self._lock:
            self.rows.append(row)
            if self.path is not None:
                with self.path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row, allow_nan=False) + "\n")

    def of(self, part: str) -> list[Row]:
        """The rows of one part, by number."""
        return sorted((row for row in self.rows if row["part"] == part), key=lambda row: row["number"])

    def done(self, part: str) -> set[int]:
        """Numbers of a part that are measured."""
        return {row["number"] for row in self.of(part)}


def settings_of(path: Path) -> Row | None:
    """The first line of such a file, None if it has none; ConfigError if it is something else."""
    lines = path.read_text(encoding="utf-8").split("\n")
    if len(lines) < 2:
        return None
    try:
        head = json.loads(lines[0])
    except ValueError as error:
        raise ConfigError(f"rows {str(path)!r}: not JSON lines ({error}): name another file") from error
    if not isinstance(head, dict) or head.get("part") != "settings":
        raise ConfigError(f"rows {str(path)!r} begins with {lines[0][:60]!r}, no settings: name another file")
    return head
