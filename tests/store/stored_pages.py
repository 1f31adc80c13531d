"""Stores, rows and pages for the tests of the store on disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agentcache.errors import BlobError, StoreError
from agentcache.kv import Page
from agentcache.kv_spec import KVSpec
from agentcache.store.disk import blob_io
from agentcache.store.disk.folder import Folder
from agentcache.store.disk.schema import Row
from agentcache.store.keys import Scope, page_key

SPEC = KVSpec(3, 2, 16, torch.bfloat16)


def noise_page(spec: KVSpec = SPEC, tokens: int = 512, seed: int = 0) -> Page:
    """A page with noise in its first slots."""
    noise = torch.Generator().manual_seed(seed)
    made = Page(spec)
    made.keys[..., :tokens] = torch.randn(made.keys[..., :tokens].shape, generator=noise).to(spec.dtype)
    made.values[..., :tokens, :] = torch.randn(made.values[..., :tokens, :].shape, generator=noise).to(spec.dtype)
    made.filled = tokens
    return made


def unstored_row(spec: KVSpec = SPEC, tokens: int = 512, precision: str = "exact", first: int = 0, namespace: str = "tests") -> Row:
    """A row for the first page of a prompt first, first + 1, ...; without a blob."""
    ids = np.arange(first, first + tokens, dtype=np.uint32)
    scope = Scope(namespace, "weights")
    return Row(
        id=0, page_key=page_key(scope.root, ids), parent=scope.root, namespace=namespace, fingerprint="weights", regime="", place=0,
        tokens=tokens, ids=ids, numerics=frozenset({"b", "a"}), precision=precision, role=1, dtype=str(spec.dtype).removeprefix("torch."),
        layers=spec.layers, kv_heads=spec.kv_heads, head_dim=spec.head_dim, created=1700000000.25,
    )  # fmt: skip


def blob_path(folder: Folder, row: Row) -> Path:
    """The file of a row's blob."""
    return folder.blobs / row.blob[:2] / f"{row.blob}.safetensors"


def read_page(folder: Folder, written: Row, tokens: int | None = None, spec: KVSpec = SPEC, **more: Any) -> Page:
    """A new page filled from a blob."""
    found = Page(spec)
    blob_io.read(folder, written, found, tokens=written.tokens if tokens is None else tokens, **more)
    return found


def same_numbers(a: Page, b: Page, tokens: int) -> bool:
    """Whether the first slots hold the same numbers."""
    return torch.equal(a.keys[..., :tokens], b.keys[..., :tokens]) and torch.equal(a.values[..., :tokens, :], b.values[..., :tokens, :])


def refused_read(folder: Folder, written: Row, spec: KVSpec = SPEC, kind: type[StoreError] = BlobError, **more: Any) -> StoreError:
    """Reading fails and leaves an empty page of zeros."""
    found = Page(spec)
    with pytest.raises(kind) as caught:
        blob_io.read(folder, written, found, tokens=written.tokens, **more)
    assert found.filled == 0
    assert not found.keys.any()
    assert not found.values.any()
    return caught.value


def edit_file(file: Path, change: Callable[[bytearray], object]) -> bytes:
    """Change a file's bytes in place; returns what they were."""
    before = file.read_bytes()
    content = bytearray(before)
    change(content)
    file.write_bytes(content)
    return before


def files_under_blobs(folder: Folder) -> list[Path]:
    """All files under blobs/."""
    return [path for path in folder.blobs.rglob("*") if not path.is_dir()]
