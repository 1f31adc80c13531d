"""Pages on disk: written so that they are complete or not there, read straight into a page, every byte authenticated. Knows no index."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np

from ...errors import StoreError
from ...kv import Page
from . import blob_files, quantize
from .blob import PIECE, Progress, mac_of, open_blob, opened, view
from .blob_format import layer_context, plan, stored_bytes, tail_context
from .checkpoint_bytes import pack
from .folder import Folder
from .page_fill import Filling, Reading, fits
from .schema import Row

THREADS = 4  # what reads and hashes one request's pages; more than cores, as some wait for the disk


def write(folder: Folder, row: Row, page: Page) -> Row:
    """Store the first row.tokens slots of a page in the computer's memory; returns the row with blob and bytes.

    The blob is there as a whole or not at all. StoreFullError, StoreError: it is not.
    """
    assert fits(row, page) and row.tokens <= page.filled
    size, packed = stored_bytes(row, row.layers), pack(page.checkpoints, row.tokens)
    whole = with_checkpoints(row, len(packed))
    padded = memoryview(packed.ljust(whole.checkpoint_layers * size, b"\0"))

    def stored(layer: int) -> list[memoryview]:
        at = (layer - row.layers) * size
        return _stored(row, page, layer) if at < 0 else [padded[at : at + size]]

    return write_layers(folder, whole, stored)


def with_checkpoints(row: Row, size: int) -> Row:
    """The same row, with layers for so many bytes of checkpoints in the place of its own."""
    own = -(-size // stored_bytes(row, row.layers))
    return replace(row, layers=row.layers - row.checkpoint_layers + own, checkpoint_layers=own)


def write_layers(folder: Folder, row: Row, stored: Callable[[int], list[memoryview]]) -> Row:
    """`write` from the stored bytes of each layer, in clear (`blob_format.parts`); asked for in order. If that fails, nothing is left."""
    assert len(row.ids) == row.tokens
    made = plan(row, folder.encrypted)
    with blob_files.new_file(folder) as (name, fd):
        at = blob_files.write_from(fd, [memoryview(made.front)], 0)
        macs = bytearray()
        for layer in range(row.layers):
            context = layer_context(row, layer, made.sealed)
            buffers = stored(layer)
            if made.sealed:
                buffers = [memoryview(folder.seal(b"".join(buffers), context))]
            macs += mac_of(folder.key, context, *buffers)
            at = blob_files.write_from(fd, buffers, at)
        assert at == made.ids
        context = tail_context(row, made.sealed)
        ids: bytes = np.ascontiguousarray(row.ids, dtype="<u4").tobytes()
        ids = folder.seal(ids, context) if made.sealed else ids
        macs += mac_of(folder.key, context, made.front, ids, bytes(macs))
        at = blob_files.write_from(fd, [memoryview(ids), memoryview(macs)], at)
        assert at == made.bytes
    return replace(row, blob=name, bytes=made.bytes)


def _stored(row: Row, page: Page, layer: int) -> list[memoryview]:
    """Bytes that a layer is stored as; of a full page, the page's own memory."""
    keys, values = page.layer_keys[layer][:, :, : row.tokens], page.layer_values[layer][:, : row.tokens]
    if row.precision == "exact":
        return [view(keys.contiguous()), view(values.contiguous())]
    return [view(tensor) for tensor in quantize.quantize(keys, values, row.precision).values()]


def read(
    folder: Folder, row: Row, page: Page, *, tokens: int, stop: threading.Event | None = None, progress: Progress | None = None,
    threads: int = THREADS,
) -> None:  # fmt: skip
    """Fill the first `tokens` slots of an empty page in the computer's memory from the blob of `row`.

    progress: called with the bytes of each piece, from one thread at a time. stop: give up between two pieces; that is a BlobError too.
    BlobError: the blob is damaged or foreign. StoreError: it could not be read for another reason. The page is empty and zero then.
    """
    (error,) = read_many(folder, [(row, page, tokens)], stop=stop, progress=progress, threads=threads)
    if error is not None:
        raise error


def read_many(
    folder: Folder, jobs: Sequence[tuple[Row, Page, int]], *, stop: threading.Event | None = None, progress: Progress | None = None,
    threads: int = THREADS,
) -> list[StoreError | None]:  # fmt: skip
    """`read` for several (row, page, tokens), in order; returns what went wrong with each. The calling thread is one of the `threads`."""
    reading = Reading(folder, [Filling(*job) for job in jobs], stop, progress)
    helpers = min(threads, sum(row.layers for row, _, _ in jobs)) - 1
    pool = ThreadPoolExecutor(max(1, helpers), "agentcache-read")
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
        for layer in range(row.layers):
            left = blob.plan.size(layer)
            pieces = [scratch] * (left // PIECE) + [scratch[: left % PIECE]]
            blob.read(layer, pieces, lambda count: None)


def remove(folder: Folder, row: Row) -> None:
    """Delete the blob of a row that is in no index any more; no matter if it is gone already."""
    if row.blob:
        blob_files.unlink(folder, row.blob)
