"""`agentcache bench store`: how fast pages go to disk and come back, beside raw files. Knows models by their shapes.

Physics: every byte is read once and hashed once. Where the system still holds the file, full pages are mapped and only hashed; from a cold
disk the disk decides. Mapped formats look faster until the bytes are touched: all rows here touch every byte.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..errors import ConfigError
from ..kv import PAGE_TOKENS, Page
from ..kv_spec import KVSpec
from ..store.disk import blob_files, blob_io
from ..store.disk.folder import Folder
from ..store.disk.index import Index, Row
from ..store.keys import Scope, page_key
from . import shapes
from .environment import Samples, Say, watch


def spec_of(shape: str, dtype: str) -> KVSpec:
    """The shape of a named model's KV."""
    config = shapes.config(shape)
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return KVSpec(config.num_hidden_layers, config.num_key_value_heads, dim, getattr(torch, dtype))


def pages_of(spec: KVSpec, tokens: int) -> list[Page]:
    """Pages of random numbers."""
    pages = []
    for start in range(0, tokens, PAGE_TOKENS):
        page = Page(spec)
        page.keys.normal_()
        page.values.normal_()
        page.filled = min(PAGE_TOKENS, tokens - start)
        pages.append(page)
    return pages


def rows_of(spec: KVSpec, tokens: int, scope: Scope, seed: int = 0) -> list[Row]:
    """Index rows of such pages."""
    ids = np.random.default_rng(seed).integers(0, 1 << 16, tokens, dtype=np.uint32)
    rows, parent = [], scope.root
    for place, start in enumerate(range(0, tokens, PAGE_TOKENS)):
        part = ids[start : start + PAGE_TOKENS]
        key = page_key(parent, part)
        about = (scope.namespace, scope.fingerprint, scope.regime, place, len(part), part, frozenset({"bench"}), "exact", 2)
        rows.append(Row(0, key, parent, *about, *spec.kind, created=time.time()))
        parent = key
    return rows


def drop_caches(paths: Sequence[Path]) -> None:
    """Ask the system to forget these files' contents. They are written through: nothing is lost."""
    if sys.platform == "win32" or sys.platform == "darwin":
        raise ConfigError(f"{sys.platform!r} lets no program drop files from its page cache: cold figures are measured on Linux only")
    for path in paths:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def raw_ms(paths: Sequence[Path], buffer: bytearray) -> float:
    """Milliseconds to read these files, whole, into memory that is already there."""
    began = time.perf_counter()
    for path in paths:
        with path.open("rb", buffering=0) as file:
            count = file.readinto(buffer)
        assert count == path.stat().st_size, f"{path.name} was read up to byte {count}"
    return (time.perf_counter() - began) * 1e3


def ms(run: Callable[[], Any]) -> float:
    """Milliseconds that a call takes."""
    began = time.perf_counter()
    run()
    return (time.perf_counter() - began) * 1e3


class Files:
    """One group of pages on disk, and the same bytes raw, under `place`."""

    def __init__(self, spec: KVSpec, tokens: int, place: Path) -> None:
        self.spec, self.tokens, self.place = spec, tokens, place
        self.folder = Folder.open(place / "store")
        self.index = Index(self.folder)
        self.pages = pages_of(spec, tokens)
        self.wanted = rows_of(spec, tokens, Scope("bench", "bench"))
        self.rows: list[Row] = []
        self.raw = place / "raw.bin"
        self.tensors = {f"{name}.{i}": getattr(p, name) for i, p in enumerate(self.pages) for name in ("keys", "values")}

    @property
    def bytes(self) -> int:
        """Sum over the pages' blobs."""
        return sum(row.bytes for row in self.rows)

    def close(self) -> None:
        """The folder is its maker's to remove."""
        self.index.close()

    def write(self) -> None:
        """All pages, each complete and in the index; those of the last time go first."""
        blob_files.remove(self.folder, self.index.remove([row.id for row in self.index.rows()], force=True))
        written = [blob_io.write(self.folder, row, page) for row, page in zip(self.wanted, self.pages, strict=True)]
        assert not self.index.add(written)
        self.rows = sorted(self.index.rows(), key=lambda row: row.place)

    def write_raw(self) -> None:
        """The same bytes, one file, synchronised."""
        with open(self.raw, "wb", buffering=0) as out:
            for tensor in self.tensors.values():
                out.write(memoryview(tensor.view(torch.uint8).reshape(-1).numpy()))
            os.fsync(out.fileno())

    def load(self) -> None:
        """Into new pages, verified."""
        pages = [Page(self.spec, whole=True) for _ in self.rows]
        errors = blob_io.read_many(self.folder, [(row, page, row.tokens) for row, page in zip(self.rows, pages, strict=True)])
        assert not any(errors), errors
        assert torch.equal(pages[0].keys[0], self.pages[0].keys[0]), "other numbers came back"

    def verify(self) -> None:
        """Authenticate each blob, as `agentcache verify` does."""
        for row in self.rows:
            blob_io.verify(self.folder, row)

    def ways(self) -> dict[str, tuple[list[Path], Callable[[], Any]]]:
        """Readers by name: their files, and the call that touches every byte."""
        blobs = [self.folder.blobs / row.blob[:2] / f"{row.blob}.safetensors" for row in self.rows]
        buffer = bytearray(max(path.stat().st_size for path in blobs))
        return {"raw": (blobs, lambda: raw_ms(blobs, buffer)), "agentcache": (blobs, self.load), "verify": (blobs, self.verify)}

    def writes(self) -> dict[str, Callable[[], Any]]:
        return {"agentcache": self.write, "raw": self.write_raw}

    def check(self) -> None:
        """Compare, after each repeat, the bytes read with those written. `load` looks at its pages itself."""


def run(files: Files, repeats: int, say: Say = lambda _: None) -> dict[str, Any]:
    """Medians of interleaved repeats: writing, and reading from a cold and from a warm page cache."""
    samples = Samples()
    for number in range(1, repeats + 1):
        for name, write in files.writes().items():
            say(f"repeat {number} of {repeats}: write, {name}")
            samples.add(f"{name}_write_ms", ms(write))
        for name, (paths, way) in files.ways().items():
            say(f"repeat {number} of {repeats}: read, {name}")
            with watch() as load:
                drop_caches(paths)
                samples.add(f"{name}_cold_ms", ms(way))
                samples.add(f"{name}_warm_ms", ms(way))
            samples.note(name, load)
        files.check()
    kinds = ("write", "cold", "warm")
    rows = [{"way": name, **{f"{kind}_ms": samples.median(f"{name}_{kind}_ms") for kind in kinds}} for name in files.ways()]
    return {"tokens": files.tokens, "bytes": files.bytes, "rows": rows, "repeats": repeats, "load": samples.report()}
