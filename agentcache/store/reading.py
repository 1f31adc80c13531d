"""Blobs while they are read: opened and authenticated, and pages being filled from them by several threads. Writes no files.

One layer is one unit of work: threads take layers in turn, so that one reads while another hashes what it has just read. A page counts
as filled only when the macs of all its layers, and the one over everything else, were right.

A full page keeps the memory of the system's page cache, mapped, which other processes share: nothing is copied, and no new memory has
to be found, which can take longer than reading. What the cache holds already is checked there; the rest is read through a small buffer
while it comes in, and is mapped after that.
"""

from __future__ import annotations

import hmac
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from blake3 import blake3

from ..errors import BlobError, StoreError
from ..kv import PAGE_TOKENS, Page
from . import files, lossy
from .container import DTYPES, MAC_BYTES, SAME, Plan, front_bytes, layer_context, parse, parts, tail_context
from .folder import Folder
from .keys import page_key
from .schema import Row

PIECE = 1 << 20  # bytes read, then hashed while they are still in a core's cache
MAPPED_PIECE = 1 << 23  # what is mapped is hashed in larger ones: between two of them a thread waits for the interpreter
TORCH = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I8": torch.int8, "U8": torch.uint8}
WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # whole numbers of so many bytes
Progress = Callable[[int], None]


def view(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the CPU, of any dtype."""
    return memoryview(tensor.detach().view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def fits(row: Row, page: Page) -> bool:
    """Whether the page has the shape and type of what the row stores."""
    spec = page.spec
    shape = str(spec.dtype).removeprefix("torch."), spec.layers, spec.kv_heads, spec.head_dim
    return shape == (row.dtype, row.layers, row.kv_heads, row.head_dim) and page.keys.device.type == "cpu"


def _bits(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """The same memory as whole numbers: numpy has no bfloat16."""
    found: npt.NDArray[Any] = tensor.view(WHOLE[tensor.dtype.itemsize]).numpy()
    return found


def mac_of(key: bytes, context: bytes, *buffers: bytes | memoryview) -> bytes:
    """The keyed hash of these bytes in their context."""
    mac = blake3(context, key=key)
    for buffer in buffers:
        mac.update(buffer)
    return mac.digest()


@dataclass(slots=True, eq=False)
class Blob:
    """An open blob whose header, ids and list of macs are authenticated. row: as the blob tells it."""

    folder: Folder
    row: Row
    plan: Plan
    fd: int
    macs: bytes

    def mac(self, layer: int) -> bytes:
        return self.macs[layer * MAC_BYTES : (layer + 1) * MAC_BYTES]

    def read(self, layer: int, buffers: Sequence[memoryview], done: Progress) -> None:
        """Fill buffers with a layer's bytes, and check them. BlobError: they hold what must not be used."""
        at = self.plan.at(layer)

        def pieces() -> Iterator[memoryview]:
            nonlocal at
            for buffer in buffers:
                for start in range(0, len(buffer), PIECE):
                    piece = buffer[start : start + PIECE]
                    files.read_into(self.fd, piece, at, self.row.blob)
                    at += len(piece)
                    yield piece

        self._check(layer, pieces(), done)
        assert at == self.plan.at(layer + 1)

    def come(self, layer: int, scratch: memoryview, done: Progress) -> None:
        """Have the system read a layer into its page cache, and check it on the way."""
        first, last = self.plan.at(layer), self.plan.at(layer + 1)

        def pieces() -> Iterator[memoryview]:
            for at in range(first, last, len(scratch)):
                piece = scratch[: min(last - at, len(scratch))]
                files.read_into(self.fd, piece, at, self.row.blob)
                yield piece

        self._check(layer, pieces(), done)

    def check(self, layer: int, whole: memoryview, done: Progress) -> None:
        """Check a layer of a file that is mapped."""
        first, last = self.plan.at(layer), self.plan.at(layer + 1)
        self._check(layer, (whole[at : min(last, at + MAPPED_PIECE)] for at in range(first, last, MAPPED_PIECE)), done)

    def _check(self, layer: int, pieces: Iterable[memoryview], done: Progress) -> None:
        mac = blake3(layer_context(self.row, layer, self.plan.sealed), key=self.folder.key)
        for piece in pieces:
            mac.update(piece)
            done(len(piece))
        if not hmac.compare_digest(mac.digest(), self.mac(layer)):
            raise BlobError(f"blob {self.row.blob!r}: layer {layer} was changed since it was written")

    def close(self) -> None:
        os.close(self.fd)


def open_blob(folder: Folder, name: str) -> Blob:
    """A blob whose header, ids and macs are what was written; BlobError otherwise."""
    fd, size = files.open_file(folder, name)
    try:
        length = bytearray(min(8, size))
        files.read_into(fd, memoryview(length), 0, name)
        front = bytearray(front_bytes(bytes(length), size))
        files.read_into(fd, memoryview(front), 0, name)
        row, made = parse(bytes(front), folder.encrypted)
        if made.bytes != size:
            raise BlobError(f"it has {size} bytes instead of {made.bytes}")
        tail = bytearray(made.bytes - made.ids)
        files.read_into(fd, memoryview(tail), made.ids, name)
        ids, macs = bytes(tail[: made.macs - made.ids]), bytes(tail[made.macs - made.ids :])
        context = tail_context(row, made.sealed)
        if not hmac.compare_digest(mac_of(folder.key, context, made.front, ids, macs[:-MAC_BYTES]), macs[-MAC_BYTES:]):
            raise BlobError("its header, ids or list of macs was changed since it was written, or it is another store's")
        ids = folder.open_sealed(ids, context) if made.sealed else ids
        row = replace(row, ids=np.frombuffer(ids, dtype="<u4").astype(np.uint32), blob=name, bytes=size)
        if page_key(row.parent, row.ids) != row.page_key:
            raise BlobError("its ids are not those of its key")
        return Blob(folder, row, made, fd, macs)
    except BaseException as error:
        os.close(fd)
        if isinstance(error, BlobError) and repr(name) not in str(error):
            raise BlobError(f"blob {name!r}: {error}") from error.__cause__
        raise


@contextmanager
def opened(folder: Folder, row: Row) -> Iterator[Blob]:
    """The blob of a row; BlobError if it is another's."""
    blob = open_blob(folder, row.blob)
    try:
        same(row, blob.row)
        yield blob
    finally:
        blob.close()


def same(row: Row, found: Row) -> None:
    for name in SAME:
        if getattr(row, name) != getattr(found, name):
            raise BlobError(f"blob {row.blob!r} has {name} {getattr(found, name)!r}, its row says {getattr(row, name)!r}")
    if not np.array_equal(row.ids, found.ids):
        raise BlobError(f"blob {row.blob!r} has other ids than its row")


def tensors(row: Row, stored: memoryview) -> dict[str, torch.Tensor]:
    """A layer as it is stored, in clear, as tensors over that memory."""
    found, at = {}, 0
    for part in parts(row):
        flat = torch.frombuffer(stored[at : at + part.bytes], dtype=torch.uint8)
        found[part.name] = flat.view(TORCH[part.dtype]).view(part.shape)
        at += part.bytes
    return found


def layer_is_finite(row: Row, stored: memoryview) -> bool:
    """Whether a layer gives keys and values without NaN and infinity."""
    found = tensors(row, stored)
    if row.precision != "exact":
        dtype, shape = TORCH[DTYPES[row.dtype]], (row.kv_heads, row.head_dim, row.tokens)
        keys, values = torch.empty(shape, dtype=dtype), torch.empty((shape[0], shape[2], shape[1]), dtype=dtype)
        lossy.dequantise(found, row.precision, keys, values)
        found = {"keys": keys, "values": values}
    return all(bool(torch.isfinite(tensor).all()) for tensor in found.values())


class Filling:
    """One page being filled by several threads. What counts is guarded by the reading's lock."""

    def __init__(self, row: Row, page: Page, tokens: int) -> None:
        assert fits(row, page) and page.filled == 0 and 0 < tokens <= row.tokens
        self.row, self.page, self.tokens = row, page, tokens
        self.blob: Blob | None = None
        self.file: files.Opened | None = None
        self.mapped: memoryview | None = None  # the whole file, where the page will lie in it
        self.here = False  # whether the system's page cache holds it already
        self.next = self.active = 0  # layers handed out, layers being read
        self.error: StoreError | None = None
        self.ended = False

    def open(self, folder: Folder) -> None:
        self.blob = open_blob(folder, self.row.blob)
        self.file = files.Opened.of(folder, self.row.blob, self.blob.fd)  # before anything of it is verified
        same(self.row, self.blob.row)
        size = self.blob.plan.bytes
        if not files.local(folder.path):
            return
        self.here = files.in_memory(self.blob.fd, size)
        if self.here or (self.lies and self.tokens == PAGE_TOKENS):
            with suppress(OSError):  # a limit on maps: read instead
                self.mapped = memoryview(files.map_file(self.blob.fd, size))

    @property
    def lies(self) -> bool:
        """Whether layers are stored as they lie in a page."""
        assert self.blob is not None
        return self.row.precision == "exact" and self.row.tokens == PAGE_TOKENS and not self.blob.plan.sealed

    @property
    def stays(self) -> bool:
        """Whether the page will lie in the mapped file."""
        return self.mapped is not None and self.lies and self.tokens == PAGE_TOKENS

    def fill(self, layer: int, scratch: Callable[[int], memoryview], done: Progress) -> None:
        """Check one layer and put it into the page: directly if it is stored as it lies there."""
        blob, row, page = self.blob, self.row, self.page
        assert blob is not None
        if self.mapped is not None:
            if self.here:
                files.bring_in(self.mapped, blob.plan.at(layer), blob.plan.layer_bytes)
                blob.check(layer, self.mapped, done)
            else:
                blob.come(layer, scratch(PIECE), done)
                files.bring_in(self.mapped, blob.plan.at(layer), blob.plan.layer_bytes)
            if self.stays:
                return
            stored = self.mapped[blob.plan.at(layer) : blob.plan.at(layer + 1)]
        elif self.lies:
            blob.read(layer, [view(page.layer_keys[layer]), view(page.layer_values[layer])], done)
            return
        else:
            stored = scratch(blob.plan.layer_bytes)
            blob.read(layer, [stored], done)
        if blob.plan.sealed:
            stored = memoryview(bytearray(blob.folder.open_sealed(stored, layer_context(row, layer, True))))
        self._spread(layer, stored)

    def _spread(self, layer: int, stored: memoryview) -> None:
        """Put a verified layer where it belongs in the page."""
        row, found = self.row, tensors(self.row, stored)
        keys, values = self.page.layer_keys[layer][:, :, : row.tokens], self.page.layer_values[layer][:, : row.tokens]
        if row.precision == "exact":
            some = slice(self.tokens)
            for target, stored_part in ((keys[..., some], found["keys"][..., some]), (values[:, some], found["values"][:, some])):
                _bits(target)[...] = _bits(stored_part)  # not copy_: it would wake a team of threads in each of these threads
        else:
            lossy.dequantise(found, row.precision, keys, values)

    def end(self) -> None:
        """Declare the page filled, or make it empty again."""
        if self.ended:
            return
        self.ended = True
        if self.blob is not None:
            self.blob.close()
        if self.error is None and self.file is not None and self.file.changed():
            self.error = BlobError(f"blob {self.row.blob!r} was written to while it was read")
        keep = 0 if self.error else self.tokens
        if self.blob is not None and self.stays:
            if keep:
                self._take()
        elif self.next and (self.error or self.lies or self.row.precision != "exact"):  # else nothing was written behind them
            self.page.keys[..., keep : self.row.tokens] = 0
            self.page.values[..., keep : self.row.tokens, :] = 0
        self.page.filled = keep

    def _take(self) -> None:
        """Give the page the memory of the mapped file, layer by layer as it lies there."""
        assert self.blob is not None and self.mapped is not None and self.file is not None
        plan, spec = self.blob.plan, self.page.spec
        each = spec.kv_heads * spec.head_dim * PAGE_TOKENS
        shapes = (spec.kv_heads, spec.head_dim, PAGE_TOKENS), (spec.kv_heads, PAGE_TOKENS, spec.head_dim)
        data = torch.frombuffer(self.mapped, dtype=spec.dtype, count=2 * spec.layers * each, offset=plan.at(0)).view(spec.layers, 2, each)
        keys, values = (data[:, i].unflatten(1, shape) for i, shape in enumerate(shapes))
        self.page.lie_in(keys, values, self.file)


class Reading:
    """Pages being filled: hands out layers, in order, to as many threads as `work` runs on."""

    def __init__(self, folder: Folder, fillings: list[Filling], stop: threading.Event | None, progress: Progress | None) -> None:
        self.folder, self.fillings, self.stop, self.progress = folder, fillings, stop, progress
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
        """Empty what was not finished, once no thread works any more."""
        for filling in self.fillings:
            if not filling.ended:
                filling.error = filling.error or StoreError(f"reading of blob {filling.row.blob!r} was interrupted")
                filling.end()

    def _take(self) -> tuple[Filling, int] | None:
        with self._lock:
            while self._at < len(self.fillings):
                filling = self.fillings[self._at]
                try:
                    self._check()
                    if filling.blob is None and filling.error is None:
                        filling.open(self.folder)
                except StoreError as error:
                    filling.error = filling.error or error
                if filling.error is None and filling.next < filling.row.layers:
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
            if not filling.active and (filling.error is not None or filling.next == filling.row.layers):
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
