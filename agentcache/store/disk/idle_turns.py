"""Turns of idle sessions, rewritten in fewer bits: each row names the new blob in place of the exact one. Knows no memory.

exact stays what holds the stable start of a prompt, what a tool group or a session in use names, what a running process has pinned
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from ...errors import BlobError, StoreError
from ...types import PAGE_TOKENS, Precision
from . import blob_files, blob_io, quantize
from .blob import Blob, opened, tensors, view
from .blob_format import plan
from .index import Index
from .schema import Row

if TYPE_CHECKING:
    from .disk_tier import DiskTier


def rewrite_all(disk: DiskTier, idle_s: float, on_rewritten: Callable[[int], None]) -> None:
    """Store turns of sessions that are idle so long in fewer bits, a page at a time, within the write budget. On the writing thread.

    on_rewritten: called with the id of each row.
    """
    left = deque(due(disk.index, idle_s))

    def one() -> None:
        if not left or not (size := _size(disk.index, *left[0], disk.precision)) or not disk.writer.budget.take(size):
            return
        disk.writer.after(one)
        id, spare = rewrite(disk.index, *left.popleft(), disk.precision)
        on_rewritten(id)
        blob_files.remove(disk.folder, spare)

    one()


def due(index: Index, idle_s: float) -> list[tuple[bytes, str]]:
    """Page keys, and fingerprints, of the exact pages that hold turns of sessions which were not asked for so many seconds."""
    since, groups = time.time() - idle_s, index.groups()
    idle = [group for group in groups if group.lease_end and group.created < since]
    kept = {(key, group.fingerprint) for group in groups if not group.lease_end or group.created >= since for key in group.page_keys}
    stable = {(key, one.fingerprint) for one in idle for key in one.page_keys[: -(-one.stable_tokens // PAGE_TOKENS)]}
    turns = {(key, one.fingerprint): None for one in idle for key in one.page_keys}
    wanted = [(bytes.fromhex(key), fingerprint) for key, fingerprint in turns if (key, fingerprint) not in kept | stable]
    sql = "SELECT 1 FROM pages WHERE page_key = ? AND fingerprint = ? AND precision = 'exact' AND bad IS NULL"
    return index.database.read(lambda connection: [one for one in wanted if connection.execute(sql, one).fetchone()])


def rewrite(index: Index, key: bytes, fingerprint: str, precision: Precision) -> tuple[int, Sequence[Row]]:
    """Store an exact page in fewer bits; returns the id of its row (0: it stays), and the rows whose blobs are to be unlinked now.

    StoreError: it cannot be stored so. A page that is damaged is quarantined.
    """
    row = index.row(key, fingerprint)
    if row is None or row.bad or row.id in index.pinned():
        return 0, ()
    try:
        with opened(index.folder, row) as blob:
            written = blob_io.write_sections(index.folder, replace(row, precision=precision), lambda at: _section(blob, at, precision))
    except BlobError as error:
        index.quarantine(row.id, str(error))
        return 0, ()
    spare = [written]
    try:
        if (twin := index.row(key, fingerprint, precision)) is not None:
            spare += index.remove([twin.id], force=True)
        spare[0] = index.exchange(row, written)
    except StoreError:  # no row names them, and nobody sweeps what a running process has written
        blob_files.remove(index.folder, spare)
        raise
    return row.id, spare


def _size(index: Index, key: bytes, fingerprint: str, precision: Precision) -> int:
    row = index.row(key, fingerprint)
    return plan(replace(row, precision=precision), index.folder.encrypted).bytes if row is not None else 1


def _section(blob: Blob, number: int, precision: Precision) -> list[memoryview]:
    stored = blob.plain(number)
    if number == len(blob.row.widths):  # checkpoints stay as they are
        return [stored]
    exact = tensors(blob.row, number, stored)
    with torch.inference_mode():
        return [view(tensor) for tensor in quantize.quantize(exact["keys"], exact["values"], precision).values()]
