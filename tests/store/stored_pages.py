"""Stores, rows and pages for the tests of the store on disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agentcache import page_check
from agentcache.errors import BlobError, StoreError
from agentcache.kv import Page
from agentcache.kv_spec import KVSpec
from agentcache.store.disk import blob_io
from agentcache.store.disk.folder import Folder
from agentcache.store.disk.schema import Row
from agentcache.store.keys import Scope, page_key

SPEC = KVSpec(3, 2, 16, torch.bfloat16)
UNEVEN = KVSpec(4, 2, 24, torch.bfloat16, widths=((2, 24, 8), (1, 8, 16), (1, 16, 0), (2, 16, 24)))  # the third: keys of an indexer
SPECS = {"alike": SPEC, "widths that differ": UNEVEN}


def noise_page(spec: KVSpec = SPEC, tokens: int = 512, seed: int = 0) -> Page:
    """A page with noise in its first slots."""
    noise = torch.Generator().manual_seed(seed)
    made = Page(spec)
    for keys, values in made.blocks:
        keys[..., :tokens] = torch.randn(keys[..., :tokens].shape, generator=noise).to(spec.dtype)
        values[..., :tokens, :] = torch.randn(values[..., :tokens, :].shape, generator=noise).to(spec.dtype)
    made.filled = tokens
    return made


def unstored_row(spec: KVSpec = SPEC, tokens: int = 512, precision: str = "exact", first: int = 0, namespace: str = "tests") -> Row:
    """A row for the first page of a prompt first, first + 1, ...; without a blob."""
    ids = np.arange(first, first + tokens, dtype=np.uint32)
    scope = Scope(namespace, "weights")
    return Row(
        id=0, page_key=page_key(scope.root, ids), parent=scope.root, namespace=namespace, fingerprint="weights", regime="", place=0,
        tokens=tokens, ids=ids, numerics=frozenset({"b", "a"}), precision=precision, role=1, dtype=str(spec.dtype).removeprefix("torch."),
        widths=spec.layer_widths, created=1700000000.25,
    )  # fmt: skip


def blob_path(folder: Folder, row: Row) -> Path:
    """The file of a row's blob."""
    return folder.blobs / row.blob[:2] / f"{row.blob}.safetensors"


def spec_of(row: Row) -> KVSpec:
    """The shape of what a row stores."""
    dtype, widths = row.kind
    most, alike = tuple(map(max, zip(*widths, strict=True))), len({*widths}) == 1 and widths[0][1] == widths[0][2]
    return KVSpec(len(widths), most[0], max(most[1:]), getattr(torch, dtype), widths=() if alike else widths)


def fill_page(folder: Folder, row: Row, page: Page, *, tokens: int, **more: Any) -> None:
    """Fill an empty page from a blob; raises what went wrong."""
    [error] = blob_io.read_many(folder, [(row, page, tokens)], **more)
    if error is not None:
        raise error


def read_page(folder: Folder, written: Row, tokens: int | None = None, **more: Any) -> Page:
    """A new page filled from a blob."""
    found = Page(spec_of(written))
    fill_page(folder, written, found, tokens=written.tokens if tokens is None else tokens, **more)
    return found


def same_numbers(a: Page, b: Page, tokens: int) -> bool:
    """Whether the first slots hold the same numbers."""
    return page_check.alike(a, b, tokens, 0)


def empty_from(page: Page, tokens: int) -> bool:
    """Whether all slots from this one on are zeros."""
    return not any(keys[..., tokens:].any() or values[..., tokens:, :].any() for keys, values in page.blocks)


def refused_read(folder: Folder, written: Row, kind: type[StoreError] = BlobError, **more: Any) -> StoreError:
    """Reading fails and leaves an empty page of zeros."""
    found = Page(spec_of(written))
    with pytest.raises(kind) as caught:
        fill_page(folder, written, found, tokens=written.tokens, **more)
    assert found.filled == 0
    assert empty_from(found, 0)
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
