"""A tool group as one file, to carry it to another store. Knows no models; what an archive says is checked before it is used.

An archive is in clear, and without another store's keys: the importing store authenticates and encrypts its pages anew.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from blake3 import blake3

from ...errors import BlobError, ConfigError, StoreError, StoreFullError, StorePermissionError
from ...private import NEW
from ...types import PAGE_TOKENS
from ..disk import blob_files, blob_format, blob_io, process_identity
from ..disk.blob import layer_is_finite, opened
from ..disk.checkpoint_bytes import pack, unpack
from ..disk.folder import Folder
from ..disk.index import Index
from ..disk.schema import Row
from ..keys import Role
from ..tool_group import ToolGroup
from .archive_file import Archive, Plan, chained, open_archive, plan
from .check import Progress, pages_of

# -- export --------------------------------------------------------------------------------------------------------


def export_group(
    folder: Folder, index: Index, group: ToolGroup, target: Path, *, clear: bool = False, progress: Progress | None = None
) -> Plan:
    """Write a group to a new file, every byte of it verified. clear: although the store is encrypted and an archive is not.

    StoreError: a page is missing or damaged, the file is there already or cannot be written. Then there is no file.
    """
    if folder.encrypted and not clear:
        raise StoreError("the store is encrypted and an archive is not: who has the file can read the prompt; say --clear to export it so")
    found = pages_of(index, group)
    rows = [row for row in found if row is not None]
    if len(rows) < len(found):
        raise StoreError(
            f"tool group {group.name!r}: {len(found) - len(rows)} of {len(found)} pages are not stored any more: warm it again"
        )
    wanted = [replace(row, blob="", bytes=0, used=0, hits=0, role=int(Role.GROUP)) for row in rows]
    last = group.prefix_tokens - PAGE_TOKENS * (len(rows) - 1)
    wanted[-1] = replace(wanted[-1], tokens=last, ids=rows[-1].ids[:last], page_key=group.tip)
    ids, holder = [row.id for row in rows], process_identity.token()
    held = index.pin(ids, holder)
    try:
        if len(held) < len(ids):
            raise StoreError(f"tool group {group.name!r}: a page was evicted just now: warm it again")
        checkpoints = [_checkpoints(folder, row, one.tokens) for row, one in zip(rows, wanted, strict=True)]
        wanted = [blob_io.with_checkpoints(one, len(packed)) for one, packed in zip(wanted, checkpoints, strict=True)]
        made = plan(group, wanted)
        _write(folder, list(zip(rows, wanted, checkpoints, strict=True)), made, target, progress)
    finally:
        index.release_pins(held, holder)
    return made


def _write(folder: Folder, rows: Sequence[tuple[Row, Row, bytes]], made: Plan, target: Path, progress: Progress | None) -> None:
    with _new_file(target) as fd:
        at = blob_files.write_from(fd, [memoryview(made.front)], 0)
        digests = b""
        for row, wanted, checkpoints in rows:
            digest = blake3()
            for buffer in _layers(folder, row, wanted, checkpoints):
                digest.update(buffer)
                at = blob_files.write_from(fd, [buffer], at)
                if progress:
                    progress(at, made.bytes)
            digests += digest.digest()
        assert at == made.ids
        ids = b"".join(wanted.ids.astype("<u4").tobytes() for _, wanted, _ in rows)
        digests += blake3(made.front + ids + digests).digest()
        at = blob_files.write_from(fd, [memoryview(ids), memoryview(digests)], at)
        assert at == made.bytes


def _checkpoints(folder: Folder, row: Row, tokens: int) -> bytes:
    """The checkpoints within a page's first tokens: later ones know what was said after them."""
    stored = b"".join(_stored(folder, row, range(row.layers - row.checkpoint_layers, row.layers)))
    return pack(unpack(stored, tokens), tokens) if stored else b""


def _layers(folder: Folder, row: Row, wanted: Row, checkpoints: bytes) -> Iterator[memoryview]:
    """Bytes of each layer of a page, in clear and verified; of a page that is stored longer, the first tokens. Then its checkpoints."""
    for layer, stored in enumerate(_stored(folder, row, range(row.layers - row.checkpoint_layers))):
        yield stored if wanted.tokens == row.tokens else memoryview(_cut(row, wanted, layer, stored))
    size = blob_format.stored_bytes(wanted, wanted.layers)
    padded = memoryview(checkpoints.ljust(wanted.checkpoint_layers * size, b"\0"))
    yield from (padded[at : at + size] for at in range(0, len(padded), size))


def _stored(folder: Folder, row: Row, layers: range) -> Iterator[memoryview]:
    """Stored bytes of these layers, in clear and verified."""
    with opened(folder, row) as source:
        for layer in layers:
            stored = memoryview(bytearray(source.plan.size(layer)))
            source.read(layer, [stored], lambda count: None)
            if source.plan.sealed:
                stored = memoryview(folder.open_sealed(stored, blob_format.layer_context(source.row, layer, True)))
            yield stored


def _cut(row: Row, wanted: Row, layer: int, stored: memoryview) -> bytes:
    """A layer's first `wanted.tokens` tokens, still as they were quantised."""
    found, at = [], 0
    for part, less in zip(blob_format.parts(row, layer), blob_format.parts(wanted, layer), strict=True):
        item = blob_format.ITEM_BYTES[part.dtype]
        array = np.frombuffer(stored[at : at + part.bytes], dtype=f"V{item}").reshape(part.shape)
        at += part.bytes
        if row.precision == "int4" and part.name == "keys":  # numbers j and j + ceil(tokens / 2) share a byte
            array = _repacked(array.view(np.uint8), row.tokens, wanted.tokens).view("V1")
        found.append(array[tuple(slice(length) for length in less.shape)].tobytes())
    return b"".join(found)


def _repacked(packed: np.ndarray, tokens: int, wanted: int) -> np.ndarray:
    numbers = np.concatenate([packed & 15, packed >> 4], axis=-1)[..., : min(tokens, wanted)]
    half = -(-wanted // 2)
    found = numbers[..., :half].copy()
    found[..., : wanted - half] |= numbers[..., half:] << 4
    return found


@contextmanager
def _new_file(target: Path) -> Iterator[int]:
    """A descriptor for a file that gets its name once the block ends, and is gone if it fails. StoreError if the name is taken."""
    part = target.with_name(f"{target.name[:80]}.{secrets.token_hex(8)}.part")
    try:
        if os.path.lexists(target):
            raise StoreError(f"{str(target)!r} is there already: name another file, or delete it")
        fd = os.open(part, NEW, 0o600)
        try:
            try:
                yield fd
                os.fsync(fd)
            finally:
                os.close(fd)  # before its name changes: Windows renames no file that is open
            os.rename(part, target)
        except BaseException:
            with suppress(OSError):
                os.unlink(part)
            raise
    except StoreError:
        raise
    except OSError as error:
        kind = StoreFullError if error.errno in blob_files.FULL else StoreError
        raise kind(f"{str(target)!r} cannot be written: {error.strerror or error}") from error


# -- import --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Imported:
    """A group as it is recorded now. written, known: pages that were missing, and that were there."""

    group: ToolGroup
    written: int
    known: int
    bytes: int


def import_group(
    folder: Folder, index: Index, path: Path, *, name: str | None = None, namespace: str | None = None, progress: Progress | None = None
) -> Imported:
    """Take an archive's pages into the store, those it has not, and record the group (under another name, in another namespace).

    All of it or, with an error, nothing. ConfigError: a group of that name is there, with other contents.
    """
    if not folder.writable:
        raise StorePermissionError(f"the store {str(folder.path)!r} is read-only: nothing can be imported")
    with open_archive(path) as archive:
        now = time.time()
        for text in (name, namespace, *archive.texts):
            _speakable(text or "")
        group = replace(archive.group, name=name or archive.group.name, namespace=namespace or archive.group.namespace, created=now)
        rows = [replace(row, created=now, role=int(Role.GROUP)) for row in chained(archive.rows, group)]
        group = replace(group, page_keys=tuple(row.page_key.hex() for row in rows))
        for other in index.groups(group.namespace, group.name):
            if other.fingerprint == group.fingerprint and other.tip != group.tip:
                raise ConfigError(f"a tool group {group.name!r} with other contents is in namespace {group.namespace!r}: give --name")
        found = pages_of(index, group, rows[0].precision)
        written = _take(folder, index, archive, rows, [row is None for row in found], progress)
        index.promote([row.id for row in found if row is not None], Role.GROUP)
        index.put_group(group)
        return Imported(group, len(written), len(rows) - len(written), sum(row.bytes for row in written))


def _speakable(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{text[:80]!r} holds half a character: give another --name or --namespace") from None


def _finite(row: Row, page: Callable[[int], list[memoryview]], name: str) -> Callable[[int], list[memoryview]]:
    """The same layers. BlobError with one that holds NaN or infinity, which would spoil every prompt that begins with it."""

    own, checkpoints = row.layers - row.checkpoint_layers, bytearray()

    def layer(at: int) -> list[memoryview]:
        stored = page(at)
        if at >= own:
            checkpoints.extend(stored[0])
        finite = at >= own or layer_is_finite(row, at, stored[0])
        if at >= own and at == row.layers - 1:
            finite = all(known.finite for known in unpack(bytes(checkpoints), row.tokens).values())
        if not finite:
            raise BlobError(
                f"archive {name!r}: layer {at} of page {row.place} holds NaN or infinity: export it again where it was computed"
            )
        return stored

    return layer


def _take(
    folder: Folder, index: Index, archive: Archive, rows: Sequence[Row], missing: Sequence[bool], progress: Progress | None
) -> list[Row]:
    """Blobs first, then all rows at once."""
    need = sum(blob_format.plan(row, folder.encrypted).bytes for row, wanted in zip(rows, missing, strict=True) if wanted)
    if shutil.disk_usage(folder.path).free < need:
        raise StoreFullError(f"{need} bytes do not fit on the disk of {str(folder.path)!r}: {os.strerror(errno.ENOSPC)}")
    done, written = 0, []

    def tell(count: int) -> None:
        nonlocal done
        done += count
        if progress:
            progress(min(done, need), need)

    try:
        for number, row in enumerate(rows):
            if missing[number]:
                written.append(blob_io.write_layers(folder, row, _finite(row, archive.page(number, tell), archive.name)))
        bad = [old.id for row in written if (old := index.row(row.page_key, row.fingerprint, row.precision)) is not None and old.bad]
        spare = index.remove(bad, force=True) + index.add(written)
    except BaseException:
        for row in written:
            blob_io.remove(folder, row)
        raise
    for row in spare:
        blob_io.remove(folder, row)
    return written
