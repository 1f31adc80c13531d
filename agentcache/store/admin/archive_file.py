"""An archive as a file: a tool group's pages, whose header follows from its own rows. Writes nothing, believes nothing.

    length (8) | header, JSON | pages, each layer after layer | ids of all pages | digests        a safetensors file (docs/format-blobs.md)

digests: of each page, then of header, ids and those digests. They find accidents; who made the archive is for its user to know.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3

from ...errors import BlobError, StoreCorruptError, StoreError, StoreFormatError
from ...types import PAGE_TOKENS
from ..disk import blob_files, blob_format
from ..disk.schema import Row
from ..keys import page_key
from ..tool_group import ToolGroup

FORMAT = "1"
ALIGN = blob_format.ALIGN
FRONT_MOST = 16 << 20  # bytes before the pages: a million tokens of a large model
DIGEST_BYTES = 32


@dataclass(frozen=True, slots=True)
class Plan:
    """Offsets in an archive."""

    front: bytes  # all bytes before the pages
    pages: tuple[int, ...]  # offset of each
    ids: int  # offset
    digests: int  # offset
    bytes: int  # offset of the end


def plan(group: ToolGroup, rows: Sequence[Row]) -> Plan:
    """The archive of these pages. StoreError if its header would be too long to be read again."""
    told = {"agentcache archive": FORMAT, "group": group.to_json(), "pages": json.dumps([blob_format.pack(row) for row in rows])}
    header: dict[str, Any] = {"__metadata__": told}
    at, starts = 0, []

    def tensor(name: str, dtype: str, shape: tuple[int, ...], size: int) -> None:
        nonlocal at
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": (at, at + size)}
        at += size

    for number, row in enumerate(rows):
        starts.append(at)
        for layer in range(row.layers):
            for part in blob_format.parts(row, layer):
                tensor(f"{number}.{part.name}.{layer}", part.dtype, part.shape, part.bytes)
    ids = at
    tensor("ids", "U32", (group.prefix_tokens,), 4 * group.prefix_tokens)
    digests = at
    tensor("digests", "U8", (len(rows) + 1, DIGEST_BYTES), DIGEST_BYTES * (len(rows) + 1))
    text = json.dumps(header, separators=(",", ":")).encode("ascii")
    size = -(-(8 + len(text)) // ALIGN) * ALIGN
    if size > FRONT_MOST:
        raise StoreError(f"tool group {group.name[:80]!r}: a header of {size} bytes, {FRONT_MOST} are possible in an archive")
    front = (size - 8).to_bytes(8, "little") + text.ljust(size - 8)
    return Plan(front, tuple(size + start for start in starts), size + ids, size + digests, size + at)


@dataclass(frozen=True, slots=True)
class Archive:
    """An open archive whose header, ids and digests belong together, and whose ids make the keys it says."""

    fd: int
    name: str
    group: ToolGroup
    rows: tuple[Row, ...]
    plan: Plan
    digests: bytes

    @property
    def texts(self) -> tuple[str, ...]:
        """Values that become text in an index."""
        return self.group.name, self.group.namespace, self.group.fingerprint, self.group.regime

    def page(self, number: int, progress: Callable[[int], None]) -> Callable[[int], list[memoryview]]:
        """Gives a page's layers, asked for in order. BlobError with the last one if the page differs from the exported one."""
        row, digest = self.rows[number], blake3()
        sizes = [blob_format.stored_bytes(row, at) for at in range(row.layers)]
        starts = list(accumulate(sizes, initial=self.plan.pages[number]))
        expected = self.digests[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES]

        def layer(at: int) -> list[memoryview]:
            buffer = memoryview(bytearray(sizes[at]))
            blob_files.read_into(self.fd, buffer, starts[at], self.name)
            digest.update(buffer)
            progress(sizes[at])
            if at == row.layers - 1 and digest.digest() != expected:
                raise BlobError(f"archive {self.name!r}: page {number} was changed since it was exported")
            return [buffer]

        return layer


@contextmanager
def open_archive(path: Path) -> Iterator[Archive]:
    """An archive, checked before any page is looked at. StoreFormatError: it is none of this version. BlobError: it is damaged."""
    try:
        fd = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except (OSError, ValueError) as error:
        raise StoreError(f"{str(path)!r} cannot be opened: {getattr(error, 'strerror', None) or error}") from error
    try:
        about = os.fstat(fd)
        if not stat.S_ISREG(about.st_mode):
            raise StoreFormatError(f"{str(path)!r} is no plain file")
        yield _read(fd, str(path), about.st_size)
    finally:
        os.close(fd)


def _read(fd: int, name: str, size: int) -> Archive:
    length = bytearray(min(8, size))
    blob_files.read_into(fd, memoryview(length), 0, name)
    front = 8 + int.from_bytes(length, "little")
    if len(length) < 8 or front % ALIGN or not ALIGN <= front <= min(FRONT_MOST, size):
        raise StoreFormatError(f"{name!r} is no archive of a tool group, or is cut short")
    header = bytearray(front)
    blob_files.read_into(fd, memoryview(header), 0, name)
    group, rows = _parse(bytes(header), name)
    made = plan(group, rows)
    if made.front != header or made.bytes != size:
        raise BlobError(f"archive {name!r}: it has {size} bytes instead of {made.bytes}, or a header that its contents do not call for")
    tail = bytearray(made.bytes - made.ids)
    blob_files.read_into(fd, memoryview(tail), made.ids, name)
    ids, digests = bytes(tail[: made.digests - made.ids]), bytes(tail[made.digests - made.ids :])
    if blake3(made.front + ids + digests[:-DIGEST_BYTES]).digest() != digests[-DIGEST_BYTES:]:
        raise BlobError(f"archive {name!r}: its header, ids or digests were changed since it was exported")
    return Archive(fd, name, group, _with_ids(name, group, rows, np.frombuffer(ids, dtype="<u4").astype(np.uint32)), made, digests)


def _parse(front: bytes, name: str) -> tuple[ToolGroup, list[Row]]:
    """Read the header, checked for shape and for size: building the header it should have must not be more work than reading it."""
    try:
        header = json.loads(front[8:])
        told = header["__metadata__"]
        if told["agentcache archive"] != FORMAT:
            said = told["agentcache archive"]
            raise StoreFormatError(f"{name!r} is an archive of version {said!r:.40}, this version reads {FORMAT!r}")
        group = ToolGroup.from_json(told["group"])
        rows = [blob_format.unpack(text) for text in json.loads(told["pages"])]
        tensors = sum(row.layers * len(blob_format.parts(row, 0)) for row in rows)
    except (ValueError, KeyError, TypeError, RecursionError, StoreCorruptError) as error:
        raise StoreFormatError(f"{name!r} is no archive of a tool group: {type(error).__name__} in its header") from None
    if group.prefix_tokens != sum(row.tokens for row in rows):  # before memory is asked for by it
        raise BlobError(f"archive {name!r}: {group.prefix_tokens!r} tokens in a group whose pages have {sum(row.tokens for row in rows)}")
    if len(header) != tensors + 3:
        raise BlobError(f"archive {name!r}: {len(header)} entries in its header, {tensors + 3} belong there")
    return group, rows


def _with_ids(name: str, group: ToolGroup, rows: Sequence[Row], ids: np.ndarray) -> tuple[Row, ...]:
    """Rows with their ids, if those make their keys and all belong to one group. BlobError if not."""
    kinds = {(row.namespace, row.fingerprint, row.regime, row.precision, row.dtype, row.kv_heads, row.head_dim, row.widths) for row in rows}
    lengths = [PAGE_TOKENS] * (len(rows) - 1) + [group.prefix_tokens - PAGE_TOKENS * (len(rows) - 1)]
    right = (
        len(kinds) == 1
        and all(kind[:3] == (group.namespace, group.fingerprint, group.regime) for kind in kinds)
        and [row.tokens for row in rows] == lengths
        and [row.place for row in rows] == list(range(len(rows)))
        and [row.page_key.hex() for row in rows] == list(group.page_keys)
    )
    whole = [replace(row, ids=ids[row.place * PAGE_TOKENS : row.place * PAGE_TOKENS + row.tokens]) for row in rows] if right else []
    if not right or whole != chained(whole, group):
        raise BlobError(f"archive {name!r}: its pages are not those of the tool group {group.name[:80]!r}")
    return tuple(whole)


def chained(rows: Sequence[Row], group: ToolGroup) -> list[Row]:
    """The rows as this group has them: keys follow from its namespace and their ids."""
    parent, found = group.scope.root, []
    for row in rows:
        key = page_key(parent, row.ids)
        found.append(replace(row, parent=parent, page_key=key, namespace=group.namespace))
        parent = key
    return found
