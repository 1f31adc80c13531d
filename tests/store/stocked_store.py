"""Stores with tool groups in them, made without a model. Holds no tests."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from agentcache.kv import Page
from agentcache.kv_spec import KVSpec
from agentcache.store.disk import blob_io
from agentcache.store.disk.folder import Folder
from agentcache.store.disk.index import Index
from agentcache.store.disk.schema import Row
from agentcache.store.keys import Ids, Role, Scope, chain
from agentcache.store.tool_group import ToolGroup
from agentcache.types import PAGE_TOKENS
from tests.store.stored_pages import SPEC, noise_page, read_page, same_numbers, spec_of, unstored_row


def page_of_row(wanted: Row) -> Page:
    """What a page holds: the same for the same ids, wherever and however long it is stored."""
    return noise_page(spec_of(wanted), PAGE_TOKENS, seed=int(wanted.ids[0]))


def rows_of_group(prompt: Ids, scope: Scope, role: int = Role.GROUP, spec: KVSpec = SPEC, **more: Any) -> list[Row]:
    """The rows of a prompt's pages, root first, without blobs."""
    parent, rows = scope.root, []
    for place, key in enumerate(chain(scope.root, prompt)):
        own = prompt[place * PAGE_TOKENS : (place + 1) * PAGE_TOKENS]
        base = unstored_row(spec, len(own), scope.precision, namespace=scope.namespace)
        same_scope = {"fingerprint": scope.fingerprint, "regime": scope.regime, "created": time.time()}
        rows.append(replace(base, page_key=key, parent=parent, place=place, ids=own, role=int(role), **{**same_scope, **more}))
        parent = key
    return rows


def store_group(index: Index, prompt: Ids, name: str | None = None, *, scope: Scope | None = None, **more: Any) -> list[Row]:
    """Store a prompt's pages, and a group of that name over them; returns the rows as the index has them."""
    scope = scope or Scope("tests", "weights")
    written = []
    for wanted in rows_of_group(prompt, scope, **more):
        if index.row(wanted.page_key, wanted.fingerprint, wanted.precision) is None:
            written.append(blob_io.write(index.folder, wanted, page_of_row(wanted)))
    assert index.add(written) == []
    keys = chain(scope.root, prompt)
    if name is not None:
        index.put_group(manifest_of(prompt, name, scope))
    found = [index.row(key, scope.fingerprint, scope.precision) for key in keys]
    return [row for row in found if row is not None]


def manifest_of(prompt: Ids, name: str, scope: Scope, created: float = 0.0) -> ToolGroup:
    """The manifest of a prompt."""
    keys = tuple(key.hex() for key in chain(scope.root, prompt))
    made = created or time.time()
    return ToolGroup(name, scope.namespace, scope.fingerprint, scope.regime, len(prompt), keys, ("tide", "wind"), "toy", ("a", "b"), made)


def reads_back(folder: Folder, rows: list[Row]) -> bool:
    """Whether these pages are read back as they were stored."""
    return all(same_numbers(read_page(folder, found), page_of_row(found), found.tokens) for found in rows)


def blob_bytes(folder: Folder) -> dict[Path, bytes]:
    """All pages' files, byte by byte."""
    return {path: path.read_bytes() for path in folder.blobs.rglob("*") if path.is_file()}
