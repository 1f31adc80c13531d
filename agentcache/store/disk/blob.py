"""One blob, open: its header, ids and list of MACs authenticated, its layers verified as they are read. Knows no pages in memory."""

from __future__ import annotations

import hmac
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
from blake3 import blake3

from ...errors import BlobError
from ...kv import Page
from ..keys import page_key
from . import blob_files
from .blob_format import FRONT_MOST, MAC_BYTES, SAME, Plan, parse, parts, section_context, tail_context
from .folder import Folder
from .schema import Row

PIECE = 1 << 20  # bytes read, then hashed while they are still in a core's cache
MAPPED_PIECE = 1 << 23  # mapped bytes are hashed in larger ones: between two of them a thread waits for the interpreter
TORCH = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I8": torch.int8, "U8": torch.uint8}
Progress = Callable[[int], None]


def view(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the CPU, of any dtype."""
    return memoryview(tensor.detach().view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def mac_of(key: bytes, context: bytes, *buffers: bytes | memoryview) -> bytes:
    """The keyed hash of these bytes in their context."""
    mac = blake3(context, key=key)
    for buffer in buffers:
        mac.update(buffer)
    return mac.digest()


@dataclass(slots=True, eq=False)
class Blob:
    """An open blob whose header, ids and list of macs are authenticated. row: as the blob tells it. start: its offset in the file."""

    folder: Folder
    row: Row
    plan: Plan
    fd: int
    macs: bytes
    start: int = 0

    def read(self, section: int, buffers: Sequence[memoryview], done: Progress) -> None:
        """Fill buffers with a section's bytes, and authenticate them. BlobError: their contents must not be used."""
        at = self.start + self.plan.at(section)

        def pieces() -> Iterator[memoryview]:
            nonlocal at
            for buffer in buffers:
                for start in range(0, len(buffer), PIECE):
                    piece = buffer[start : start + PIECE]
                    blob_files.read_into(self.fd, piece, at, self.row.blob)
                    at += len(piece)
                    yield piece

        self._check(section, pieces(), done)
        assert at == self.start + self.plan.at(section + 1)

    def plain(self, section: int, done: Progress = lambda count: None) -> memoryview:
        """The plain bytes of a section in new memory, authenticated and decrypted."""
        stored = memoryview(bytearray(self.plan.size(section)))
        self.read(section, [stored], done)
        return self.unsealed(section, stored)

    def unsealed(self, section: int, stored: memoryview) -> memoryview:
        """The plain bytes of an authenticated section."""
        if not self.plan.sealed:
            return stored
        return memoryview(bytearray(self.folder.open_sealed(stored, section_context(self.row, section, True))))

    def read_into_cache(self, section: int, scratch: memoryview, done: Progress = lambda count: None) -> None:
        """Have the system read a section into its page cache, and authenticate it on the way."""
        first, last = self.plan.at(section), self.plan.at(section + 1)

        def pieces() -> Iterator[memoryview]:
            for at in range(first, last, len(scratch)):
                piece = scratch[: min(last - at, len(scratch))]
                blob_files.read_into(self.fd, piece, self.start + at, self.row.blob)
                yield piece

        self._check(section, pieces(), done)

    def check(self, section: int, whole: memoryview, done: Progress) -> None:
        """Authenticate a section of a mapped file. whole: the file."""
        first, last = self.plan.at(section), self.plan.at(section + 1)
        self._check(section, (whole[at : min(last, at + MAPPED_PIECE)] for at in range(first, last, MAPPED_PIECE)), done)

    def _check(self, section: int, pieces: Iterable[memoryview], done: Progress) -> None:
        mac = blake3(section_context(self.row, section, self.plan.sealed), key=self.folder.key)
        for piece in pieces:
            mac.update(piece)
            done(len(piece))
        if not hmac.compare_digest(mac.digest(), self.macs[section * MAC_BYTES : (section + 1) * MAC_BYTES]):
            raise BlobError(f"blob {self.row.blob!r}: section {section} was changed since it was written")

    def close(self) -> None:
        os.close(self.fd)


def open_blob(folder: Folder, name: str) -> Blob:
    """A blob whose header, ids and macs are as written; BlobError otherwise."""
    fd, size = blob_files.open_file(folder, name)
    try:
        blob = blob_at(folder, name, fd, 0, size)
        if blob.plan.bytes != size:
            raise BlobError(f"blob {name!r}: it has {size} bytes instead of {blob.plan.bytes}")
        return blob
    except BaseException:
        os.close(fd)
        raise


def blob_at(folder: Folder, name: str, fd: int, start: int, size: int) -> Blob:
    """The blob that begins at offset `start` of a file of `size` bytes. folder: holds its key."""
    try:
        front = blob_files.read_front(fd, name, start, size, FRONT_MOST)
        row, made = parse(front, folder.encrypted)
        if start + made.bytes > size:
            raise BlobError(f"it has {size - start} bytes instead of {made.bytes}")
        tail = bytearray(made.bytes - made.ids)
        blob_files.read_into(fd, memoryview(tail), start + made.ids, name)
        ids, macs = bytes(tail[: made.macs - made.ids]), bytes(tail[made.macs - made.ids :])
        context = tail_context(row, made.sealed)
        if not hmac.compare_digest(mac_of(folder.key, context, made.front, ids, macs[:-MAC_BYTES]), macs[-MAC_BYTES:]):
            raise BlobError("its header, ids or list of macs was changed since it was written, or it is another store's")
        ids = folder.open_sealed(ids, context) if made.sealed else ids
        row = replace(row, ids=np.frombuffer(ids, dtype="<u4").astype(np.uint32), blob=name, bytes=size)
        if page_key(row.parent, row.ids) != row.page_key:
            raise BlobError("its ids are not those of its key")
        return Blob(folder, row, made, fd, macs, start)
    except BlobError as error:
        raise error if repr(name) in str(error) else BlobError(f"blob {name!r}: {error}") from error.__cause__


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
    """BlobError if a blob, as `found` describes it, is not the one of this index row."""
    for name in SAME:
        if getattr(row, name) != getattr(found, name):
            raise BlobError(f"blob {row.blob!r} has {name} {getattr(found, name)!r}, its row says {getattr(row, name)!r}")
    if not np.array_equal(row.ids, found.ids):
        raise BlobError(f"blob {row.blob!r} has other ids than its row")


def tensors(row: Row, layer: int, stored: memoryview) -> dict[str, torch.Tensor]:
    """A layer as it is stored, in clear, as tensors over that memory."""
    found, at = {}, 0
    for part in parts(row, layer):
        some = stored[at : at + part.bytes]
        flat = torch.frombuffer(some, dtype=torch.uint8) if some else torch.empty(0, dtype=torch.uint8)  # an indexer has no values
        found[part.name] = flat.view(TORCH[part.dtype]).view(part.shape)
        at += part.bytes
    return found


def fits(row: Row, page: Page) -> bool:
    """Tell whether the page has the shape and type of what the row stores."""
    return row.kind == page.spec.kind and page.keys.device.type == "cpu"
