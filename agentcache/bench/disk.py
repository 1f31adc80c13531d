"""Tool groups read back from disk: what a hit costs a process that has the model but none of the pages. Knows no stock methods.

Physics: the group's bytes are read once, from disk or from the system's page cache, each is hashed once, and then the tail runs as after
resident pages. So a hit is the floor plus the time to read; hashing costs nothing where cores are free.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..engine import Engine
from ..errors import ConfigError
from ..store.policy import WriteBudget
from . import engine_timing
from .baselines import Timed

PIECE = 16 << 20  # bytes read at once by the raw reader


def blobs(engine: Engine, namespace: str) -> list[Path]:
    """The files that hold a namespace's pages, in order."""
    disk = engine.store.disk
    if disk is None:
        raise ConfigError("there is no store on disk: the engine was made with store=None")
    rows = sorted(disk.index.rows(namespace=namespace), key=lambda row: row.place)
    return [disk.folder.blobs / row.blob[:2] / f"{row.blob}.safetensors" for row in rows]


def drop_caches(paths: Sequence[Path]) -> None:
    """Ask the system to forget these files' contents. They are written through: nothing is lost."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def raw_ms(paths: Sequence[Path], buffer: bytearray) -> float:
    """Milliseconds to read these files, whole, into memory that is already there."""
    view, began = memoryview(buffer), time.perf_counter()
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            at, size = 0, os.fstat(fd).st_size
            assert size <= len(buffer)
            while at < size:
                count = os.preadv(fd, [view[at : min(size, at + PIECE)]], at)
                assert count > 0, f"{path.name} ended after {at} of {size} bytes"
                at += count
        finally:
            os.close(fd)
    return (time.perf_counter() - began) * 1e3


def read_ms(paths: Sequence[Path]) -> dict[str, float]:
    """Raw reading, from a cold and from a warm page cache."""
    buffer = bytearray(max(path.stat().st_size for path in paths))
    for at in range(0, len(buffer), 4096):
        buffer[at] = 1
    drop_caches(paths)
    return {"read_cold_ms": raw_ms(paths, buffer), "read_warm_ms": raw_ms(paths, buffer)}


def allow_writing(engine: Engine, allowed: bool) -> None:
    """Let pages be written from now on, or stop it: nothing is written while something is timed."""
    disk = engine.store.disk
    assert disk is not None
    engine.flush(120.0)
    disk.writer.budget = WriteBudget(disk.options.write_bytes_per_hour if allowed else 0)


def hit(engine: Engine, namespace: str, messages: Any, tools: Any, new: int, cold: bool) -> tuple[Timed, Any]:
    """A request whose pages are on disk only; (times, receipt). The engine must not refuse slow disks: their cost is measured."""
    engine.store.clear(namespace)
    if cold:
        drop_caches(blobs(engine, namespace))
    done, receipt = engine_timing.ask(engine, messages, tools, new, namespace=namespace)
    came = f"{receipt.disk_tokens} of {receipt.cached_tokens} came from disk: {receipt.refusals}"
    assert receipt.disk_tokens == receipt.cached_tokens > 0, came
    return done, receipt
