"""Pages on disk: written so that they are complete or not there, read straight into a page, every byte authenticated. Knows no index."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from ...errors import StoreError
from ...kv import Page
from ...openmp import use_one_thread
from . import blob_files
from .blob import PIECE, Progress, fits, mac_of, open_blob, opened, view
from .blob_format import plan, section_context, tail_context
from .folder import Folder
from .schema import Row

if TYPE_CHECKING:
    from ...checkpoints import Checkpoint

THREADS = max(2, min(4, os.cpu_count() or 2))  # what reads and hashes one request's pages; more than cores only wait for each other


def write(folder: Folder, row: Row, page: Page, checkpoints: dict[int, Checkpoint] | None = None) -> Row:
    """Store the first row.tokens slots of a page, with these or its own checkpoints; returns the row with blob and bytes.

    The blob is there as a whole or not at all. StoreFullError, StoreError: it is not.
    """
    page = page if page.keys.device.type == "cpu" else page.copy(row.tokens, "host")
    assert fits(row, page) and row.tokens <= page.filled
    packed = b""
    if checkpoints := page.checkpoints if checkpoints is None else checkpoints:
        from .checkpoint_bytes import pack

        packed = pack(checkpoints, row.tokens)
    layers = len(row.widths)
    return write_sections(
        folder, replace(row, checkpoint_bytes=len(packed)), lambda at: _stored(row, page, at) if at < layers else [memoryview(packed)]
    )


def write_sections(folder: Folder, row: Row, stored: Callable[[int], list[memoryview]]) -> Row:
    """`write` from the stored bytes of each section, in clear (`blob_format.parts`); asked for in order. If that fails, nothing is left."""
    with blob_files.new_file(folder) as (name, fd):
        size = write_at(folder, row, stored, fd, 0)
    return replace(row, blob=name, bytes=size)


def write_at(folder: Folder, row: Row, stored: Callable[[int], list[memoryview]], fd: int, start: int) -> int:
    """Write a blob at offset `start` of a file; returns the offset of its end. folder: holds its key."""
    assert len(row.ids) == row.tokens
    made = plan(row, folder.encrypted)
    at = blob_files.write_from(fd, [memoryview(made.front)], start)
    macs = bytearray()
    for section in range(row.sections):
        context = section_context(row, section, made.sealed)
        buffers = stored(section)
        if made.sealed:
            buffers = [memoryview(folder.seal(b"".join(buffers), context))]
        macs += mac_of(folder.key, context, *buffers)
        at = blob_files.write_from(fd, buffers, at)
    assert at == start + made.ids
    context = tail_context(row, made.sealed)
    ids: bytes = np.ascontiguousarray(row.ids, dtype="<u4").tobytes()
    ids = folder.seal(ids, context)
    macs += mac_of(folder.key, context, made.front, ids, bytes(macs))
    at = blob_files.write_from(fd, [memoryview(ids), memoryview(macs)], at)
    assert at == start + made.bytes
    return at


def _stored(row: Row, page: Page, layer: int) -> list[memoryview]:
    """Bytes that a layer is stored as; of a full page, the page's own memory."""
    keys, values = page.layer_keys[layer][:, :, : row.tokens], page.layer_values[layer][:, : row.tokens]
    if row.precision == "exact":
        return [view(keys.contiguous()), view(values.contiguous())]
    from . import quantize

    return [view(tensor) for tensor in quantize.quantize(keys, values, row.precision).values()]


def read_many(
    folder: Folder, jobs: Sequence[tuple[Row, Page, int]], *, stop: threading.Event | None = None, progress: Progress | None = None,
    threads: int = THREADS,
) -> list[StoreError | None]:  # fmt: skip
    """Fill the first slots of empty pages in the computer's memory, for each (row, page, tokens); returns what went wrong with each.

    progress: called with the bytes of each piece, from one thread at a time. stop: give up between two pieces; that is a BlobError too.
    BlobError: the blob is damaged or foreign. StoreError: it could not be read for another reason. Such a page is empty and zero. The
    calling thread is one of the `threads`.
    """
    from .page_fill import Filling, Reading

    reading = Reading(folder, [Filling(*job) for job in jobs], stop, progress)
    helpers = min(threads, sum(row.sections for row, _, _ in jobs)) - 1
    pool = ThreadPoolExecutor(max(1, helpers), "agentcache-read", use_one_thread)
    try:
        others = [pool.submit(reading.work) for _ in range(helpers)]
        reading.work()
    finally:
        pool.shutdown()
        reading.close()
    for other in others:
        other.result()
    return [filling.error for filling in reading.fillings]


def describe(folder: Folder, name: str) -> Row:
    """The row of a blob, as its authenticated metadata tell it (id 0); what layers hold is not looked at."""
    blob = open_blob(folder, name)
    blob.close()
    return blob.row


def verify(folder: Folder, row: Row) -> None:
    """Check every byte of a blob, in little memory. BlobError names the fault."""
    with opened(folder, row) as blob:
        scratch = memoryview(bytearray(PIECE))
        for section in range(row.sections):
            blob.read_into_cache(section, scratch)
