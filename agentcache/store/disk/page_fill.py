"""Pages being filled from blobs, by several threads at once. Writes no files, and knows no index.

One layer is one unit of work: threads take layers in turn, so that one reads while another hashes the bytes it has just read. A page counts
as filled only when the macs of all its layers, and the one over everything else, were right.

A full page and checkpoints keep the memory of the system's page cache, mapped, which other processes share: nothing is copied, and no new
memory has to be found, which can take longer than reading. What the cache holds already is checked there; the rest is read through a small
buffer while it comes in, and is mapped after that.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy.typing as npt
import torch

from ...errors import BlobError, StoreError
from ...kv import PAGE_TOKENS, Page
from ...private import lock
from . import blob_files
from .blob import PIECE, Blob, Progress, fits, open_blob, same, tensors, view
from .folder import Folder
from .schema import Row

WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # whole numbers of so many bytes


def _bits(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """The same memory as whole numbers: numpy has no bfloat16."""
    found: npt.NDArray[Any] = tensor.view(WHOLE[tensor.dtype.itemsize]).numpy()
    return found


class Filling:
    """One page being filled by several threads. What counts is guarded by the reading's lock."""

    def __init__(self, row: Row, page: Page, tokens: int) -> None:
        assert fits(row, page) and page.filled == 0 and 0 < tokens <= row.tokens
        self.row, self.page, self.tokens = row, page, tokens
        self.blob: Blob | None = None
        self.file: blob_files.Opened | None = None
        self.mapped: memoryview | None = None  # the whole file, where the page will lie in it
        self.in_cache = False  # whether the system's page cache holds it already
        self.next = self.active = 0  # sections handed out, sections being read
        self.error: StoreError | None = None
        self.ended = False
        self.checkpoints: memoryview | None = None  # packed

    def open(self, folder: Folder) -> None:
        self.blob = open_blob(folder, self.row.blob)
        self.file = blob_files.Opened.of(folder, self.row.blob, self.blob.fd)  # before anything of it is verified
        same(self.row, self.blob.row)
        size = self.blob.plan.bytes
        if not blob_files.local(folder.path):
            return
        self.in_cache = blob_files.in_memory(self.blob.fd, size)
        if self.in_cache or self.row.checkpoint_bytes or (self.unencoded and self.tokens == PAGE_TOKENS):
            with suppress(OSError):  # a limit on maps: read instead
                lock(self.blob.fd, shared=True)  # as long as it is mapped: nobody overwrites it
                self.mapped = memoryview(blob_files.map_file(self.blob.fd, size))

    @property
    def unencoded(self) -> bool:
        """Tell whether layers are stored as they lie in a page."""
        assert self.blob is not None
        return self.row.precision == "exact" and self.row.tokens == PAGE_TOKENS and not self.blob.plan.sealed

    @property
    def becomes_page(self) -> bool:
        """Tell whether the page will lie in the mapped file."""
        return self.mapped is not None and self.unencoded and self.tokens == PAGE_TOKENS

    def fill(self, layer: int, scratch: Callable[[int], memoryview], done: Progress) -> None:
        """Check one layer, or the checkpoints after the last one, and put it into the page: directly if it is stored as it lies there."""
        blob, row, page = self.blob, self.row, self.page
        assert blob is not None
        states = layer == len(row.widths)
        if self.mapped is not None:
            if self.in_cache:
                blob_files.bring_in(self.mapped, blob.plan.at(layer), blob.plan.size(layer))
                blob.check(layer, self.mapped, done)
            else:
                blob.read_into_cache(layer, scratch(PIECE), done)
                blob_files.bring_in(self.mapped, blob.plan.at(layer), blob.plan.size(layer))
            if self.becomes_page and not states:
                return
            stored = self.mapped[blob.plan.at(layer) : blob.plan.at(layer + 1)]
        elif self.unencoded and not states:
            blob.read(layer, [view(page.layer_keys[layer]), view(page.layer_values[layer])], done)
            return
        else:
            size = blob.plan.size(layer)
            stored = memoryview(bytearray(size)) if states else scratch(size)  # states stay where they are read
            blob.read(layer, [stored], done)
        stored = blob.unsealed(layer, stored)
        if states:
            self.checkpoints = stored
        else:
            self._copy_layer(layer, stored)

    def _copy_layer(self, layer: int, stored: memoryview) -> None:
        """Put a verified layer where it belongs in the page."""
        row, found = self.row, tensors(self.row, layer, stored)
        keys, values = self.page.layer_keys[layer][:, :, : row.tokens], self.page.layer_values[layer][:, : row.tokens]
        if row.precision == "exact":
            some = slice(self.tokens)
            for target, stored_part in ((keys[..., some], found["keys"][..., some]), (values[:, some], found["values"][:, some])):
                _bits(target)[...] = _bits(stored_part)  # not copy_: it would wake a team of threads in each of these threads
        else:
            from . import quantize

            quantize.dequantize(found, row.precision, keys, values)

    def end(self) -> None:
        """Declare the page filled, or make it empty again."""
        if self.ended:
            return
        self.ended = True
        if self.blob is not None:
            self.blob.close()
        if self.error is None and self.file is not None and self.file.changed():
            self.error = BlobError(f"blob {self.row.blob!r} was written to while it was read")
        if self.error is None and self.checkpoints is not None:
            self._unpack(self.checkpoints)
        keep = 0 if self.error else self.tokens
        if self.blob is not None and self.becomes_page:
            if keep:
                self._take()
        elif self.next and (self.error or self.unencoded or self.row.precision != "exact"):  # else nothing was written after them
            for keys, values in self.page.blocks:
                keys[..., keep : self.row.tokens] = 0
                values[..., keep : self.row.tokens, :] = 0
        self.page.filled = keep

    def _unpack(self, packed: memoryview) -> None:
        from .checkpoint_bytes import unpack

        try:
            self.page.checkpoints = unpack(packed, self.tokens, self.file if self.mapped is not None else None)
        except BlobError as error:
            self.error = BlobError(f"blob {self.row.blob!r}: {error}")

    def _take(self) -> None:
        """Give the page the memory of the mapped file, layer by layer as it lies there."""
        assert self.blob is not None and self.mapped is not None and self.file is not None
        plan, spec = self.blob.plan, self.page.spec
        count = PAGE_TOKENS * spec.token_bytes // spec.dtype.itemsize
        self.page.use_mapped(torch.frombuffer(self.mapped, dtype=spec.dtype, count=count, offset=plan.at(0)), self.file)


class Reading:
    """Pages being filled: hands out their sections, of the largest blobs first, to as many threads as `work` runs on."""

    def __init__(self, folder: Folder, fillings: list[Filling], stop: threading.Event | None, progress: Progress | None) -> None:
        self.folder, self.fillings, self.stop, self.progress = folder, fillings, stop, progress
        self._order = sorted(fillings, key=lambda filling: -filling.row.bytes)  # one large section is not what all wait for at the end
        self._at = 0
        self._lock = threading.Lock()
        self._local = threading.local()

    def work(self) -> None:
        """Fill layers until there are none, or until another thread failed in a way that no page can explain."""
        try:
            while (task := self._take()) is not None:
                filling, layer = task
                error: StoreError | None = None
                try:
                    filling.fill(layer, self._scratch, self._done)
                except StoreError as failed:
                    error = failed
                self._ended(filling, error)
        finally:
            self._at = len(self.fillings)

    def close(self) -> None:
        """Empty unfinished pages, once no thread works any more."""
        for filling in self.fillings:
            if not filling.ended:
                filling.error = filling.error or StoreError(f"reading of blob {filling.row.blob!r} was interrupted")
                filling.end()

    def _take(self) -> tuple[Filling, int] | None:
        with self._lock:
            while self._at < len(self._order):
                filling = self._order[self._at]
                try:
                    self._check()
                    if filling.blob is None and filling.error is None:
                        filling.open(self.folder)
                except StoreError as error:
                    filling.error = filling.error or error
                if filling.error is None and filling.next < filling.row.sections:
                    filling.next += 1
                    filling.active += 1
                    return filling, filling.next - 1
                self._at += 1
                if not filling.active:
                    filling.end()
            return None

    def _ended(self, filling: Filling, error: StoreError | None) -> None:
        with self._lock:
            filling.error = filling.error or error
            filling.active -= 1
            if not filling.active and (filling.error is not None or filling.next == filling.row.sections):
                filling.end()

    def _check(self) -> None:
        if self.stop is not None and self.stop.is_set():
            raise BlobError("reading was stopped")

    def _done(self, count: int) -> None:
        self._check()
        if self.progress is not None:
            with self._lock:
                self.progress(count)

    def _scratch(self, size: int) -> memoryview:
        """Memory of this thread's, used again by its next layer."""
        if len(getattr(self._local, "scratch", b"")) < size:
            self._local.scratch = bytearray(size)
        return memoryview(self._local.scratch)[:size]
