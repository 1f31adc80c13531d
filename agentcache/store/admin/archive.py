"""A tool group as one file, to carry it to another store. Knows no models; what an archive says is checked before it is used.

    length (8) | header, JSON, with the manifest | blob of page 0 | blob of page 1 | ...        (docs/format-blobs.md)

An archive is in clear, and its blobs are authenticated with a key that everybody knows: that finds accidents; who made it is for its user
to know. The importing store authenticates and encrypts the pages anew.
"""

from __future__ import annotations

import errno
import glob
import json
import os
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from blake3 import blake3

from ...errors import BlobError, ConfigError, StoreCorruptError, StoreError, StoreFormatError, StoreFullError, StorePermissionError
from ...private import NEW
from ...types import PAGE_TOKENS
from ..disk import blob_files, blob_format, blob_io, process_identity, quantize
from ..disk.blob import TORCH, Blob, blob_at, opened, tensors
from ..disk.checkpoint_bytes import pack, unpack
from ..disk.folder import Folder
from ..disk.index import Index
from ..disk.schema import Row
from ..keys import Role, page_key
from ..memory.prefix_tree import PIECES
from ..tool_group import SESSION, ToolGroup
from .check import Progress, pages_of

FORMAT = "2"
FRONT_MOST = 16 << 20  # bytes before the pages
PUBLIC = Folder(Path("archive"), blake3(b"agentcache archive").digest(), writable=False, encrypted=False)  # holds the key of all archives


def _front(group: ToolGroup) -> bytes:
    manifest = group.to_json()
    digest = blake3(manifest.encode()).hexdigest()
    return blob_files.front_of({"agentcache archive": FORMAT, "digest": digest, "group": manifest})


# -- export --------------------------------------------------------------------------------------------------------


def export_group(
    folder: Folder, index: Index, group: ToolGroup, target: Path, *, clear: bool = False, progress: Progress | None = None
) -> int:
    """Write a group to a new file, every byte of it verified; returns its bytes. clear: although the store is encrypted.

    StoreError: a page is missing or damaged, the file is there already or cannot be written. Then there is no file.
    """
    if folder.encrypted and not clear:
        raise StoreError("the store is encrypted and an archive is not: who has the file can read the prompt; say --clear to export it so")
    rows, held, holder = _stored(index, group), list[int](), process_identity.token()
    try:
        while loose := {row.id for row in rows} - {*held}:
            held += index.pin(loose, holder)
            rows = _stored(index, group)  # as long as they were loose, others could take their place
        wanted, total = [replace(row, role=int(Role.GROUP)) for row in rows], sum(row.bytes for row in rows)
        last = group.prefix_tokens - PAGE_TOKENS * (len(rows) - 1)
        wanted[-1] = replace(wanted[-1], tokens=last, ids=rows[-1].ids[:last], page_key=group.tip)
        with _new_file(target) as fd:
            at = blob_files.write_from(fd, [memoryview(_front(group))], 0)
            for row, less in zip(rows, wanted, strict=True):
                with opened(folder, row) as source:
                    at = _write(source, less, fd, at)
                if progress:
                    progress(min(at, total), total)
            return at
    finally:
        index.release_pins(held, holder)


def _stored(index: Index, group: ToolGroup) -> list[Row]:
    """The rows of a group's pages. StoreError: one is missing."""
    found = pages_of(index, group)
    rows = [row for row in found if row is not None]
    if len(rows) < len(found):
        session = group.name.startswith(SESSION)
        what, cure = ("session", "ask it again") if session else ("tool group", "warm it again")
        said = f"{what} {group.name.removeprefix(SESSION)!r}: {len(found) - len(rows)} of {len(found)} pages"
        raise StoreError(f"{said} are not stored any more: {cure}")
    return rows


def _write(source: Blob, wanted: Row, fd: int, at: int) -> int:
    """Write a page's blob; of one that is stored longer, the first tokens, without what is known of later ones."""
    row, layers = source.row, len(wanted.widths)
    stored = source.plain(layers) if row.checkpoint_bytes else b""
    checkpoints = memoryview(pack(unpack(stored, wanted.tokens), wanted.tokens) if stored else b"")

    def section(number: int) -> list[memoryview]:
        if number == layers:
            return [checkpoints]
        stored = source.plain(number)
        return [stored if wanted.tokens == row.tokens else memoryview(_cut(row, wanted, number, stored))]

    return blob_io.write_at(PUBLIC, replace(wanted, checkpoint_bytes=len(checkpoints)), section, fd, at)


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
    name, unique = f"{target.name[:80]}.part-", f"{secrets.token_hex(4)}-{process_identity.token()}"
    part = target.with_name(name + unique)
    try:
        for left in target.parent.glob(f"{glob.escape(name)}*"):  # of a killed export: it holds the prompt, too
            writer = process_identity.TOKEN.fullmatch(left.name.rpartition("-")[2])
            if writer and not process_identity.alive(writer[0], left.lstat().st_mtime):
                left.unlink()
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
    with open_archive(path) as (exported, pages):
        now = time.time()
        for text in (name, namespace, exported.name, exported.namespace, exported.fingerprint, exported.regime):
            _check_encodable(text or "")
        group = replace(exported, name=_renamed(exported, name), namespace=namespace or exported.namespace, created=now)
        role = Role.GROUP
        if exported.lease_end:
            prompt_key = exported.prompt_key if group.namespace == exported.namespace else ""
            group = replace(group, lease_end=now + exported.lease_end - exported.created, superseded=(), splices=(), prompt_key=prompt_key)
            role = Role.PREFIX
        rows = [replace(row, created=now, role=int(role)) for row in _chained([page.row for page in pages], group)]
        group = replace(group, page_keys=tuple(row.page_key.hex() for row in rows))
        for other in index.groups(group.namespace, group.name):
            if other.fingerprint == group.fingerprint and other.tip != group.tip:
                raise ConfigError(f"a tool group {group.name!r} with other contents is in namespace {group.namespace!r}: give --name")
        blob_files.sweep(folder, index.has_blobs)  # what a killed import left takes the room of this one
        found = pages_of(index, group, [row.precision for row in rows])
        missing = [(row, page) for row, page, known in zip(rows, pages, found, strict=True) if known is None]
        written = _take(folder, index, missing, progress)
        for row, page, known in zip(rows, pages, found, strict=True):
            if known is not None and row.checkpoint_bytes:
                _add_checkpoints(folder, index, known, page)
        blob_files.remove(folder, index.promote([row.id for row in found if row is not None], role))
        index.put_group(group)
        return Imported(group, len(written), len(rows) - len(written), sum(row.bytes for row in written))


@contextmanager
def open_archive(path: Path) -> Iterator[tuple[ToolGroup, list[Blob]]]:
    """The manifest of an archive and its pages, whose ids make the keys that it says. No section is read.

    StoreFormatError: it is none of this version. BlobError: it is damaged.
    """
    try:
        fd = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))  # a link is as good
    except (OSError, ValueError) as error:
        raise StoreError(f"{str(path)!r} cannot be opened: {getattr(error, 'strerror', None) or error}") from error
    try:
        about, name = os.fstat(fd), str(path)
        if not stat.S_ISREG(about.st_mode):
            raise StoreFormatError(f"{name!r} is no plain file")
        group, at = _manifest(fd, name, about.st_size)
        pages: list[Blob] = []
        while at < about.st_size:
            try:
                pages.append(blob_at(PUBLIC, name, fd, at, about.st_size))
            except BlobError as error:
                raise BlobError(f"{error}: the archive was cut off or changed, copy or export it again") from error
            at += pages[-1].plan.bytes
        if not _belong([page.row for page in pages], group):
            raise BlobError(f"archive {name!r}: its pages are not those of the tool group {group.name[:80]!r}")
        yield group, pages
    finally:
        os.close(fd)


def _manifest(fd: int, name: str, size: int) -> tuple[ToolGroup, int]:
    """The manifest, and the offset of the first page."""
    try:
        front = blob_files.read_front(fd, name, 0, size, FRONT_MOST)
        header = json.loads(front[8:])
        if header["agentcache archive"] != FORMAT:
            said = header["agentcache archive"]
            raise StoreFormatError(f"{name!r} is an archive of version {said!r:.40}, this version reads {FORMAT!r}")
        group = ToolGroup.from_json(header["group"])
    except (BlobError, ValueError, KeyError, TypeError, RecursionError, StoreCorruptError):
        raise StoreFormatError(f"{name!r} is no archive of a tool group: give a file that `agentcache export` wrote") from None
    if _front(group) != front:
        raise BlobError(f"archive {name!r}: its header was changed since it was exported")
    return group, len(front)


def _belong(rows: Sequence[Row], group: ToolGroup) -> bool:
    """Tell whether these pages hold just this group."""
    kinds = {(row.namespace, row.fingerprint, row.regime, row.kind) for row in rows}
    return (
        len(kinds) == 1
        and all(kind[:3] == (group.namespace, group.fingerprint, group.regime) for kind in kinds)
        and all(row.tokens == PAGE_TOKENS for row in rows[:-1])
        and sum(row.tokens for row in rows) == group.prefix_tokens
        and [row.place for row in rows] == list(range(len(rows)))
        and [row.page_key.hex() for row in rows] == list(group.page_keys)
        and list(rows) == _chained(rows, group)
    )


def _chained(rows: Sequence[Row], group: ToolGroup) -> list[Row]:
    """The rows as this group has them: keys follow from its namespace and their ids."""
    parent, found = group.scope.root, []
    for row in rows:
        key = page_key(parent, row.ids)
        found.append(replace(row, parent=parent, page_key=key, namespace=group.namespace))
        parent = key
    return found


def _renamed(exported: ToolGroup, name: str | None) -> str:
    """The name under which an archive is recorded. ConfigError: that of a session, where it holds none."""
    named = name or exported.name
    if exported.lease_end:
        return SESSION + named.removeprefix(SESSION)
    if named.startswith(SESSION):
        raise ConfigError(f"name={named!r}: the archive holds a tool group, no session; give another --name")
    if exported.documents:  # of texts `name` renames what they are learnt under: a pack has a number after it
        number = exported.name.removeprefix(exported.documents)
        return named.removesuffix(number) + number
    return named


def _check_encodable(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{text[:80]!r} holds half a character: give another --name or --namespace") from None


def _layer_is_finite(row: Row, layer: int, stored: memoryview) -> bool:
    """Tell whether a layer gives keys and values without NaN and infinity."""
    found = tensors(row, layer, stored)
    if row.precision != "exact":
        dtype, (heads, *width) = TORCH[blob_format.DTYPES[row.dtype]], row.widths[layer]
        keys, values = torch.empty(heads, width[0], row.tokens, dtype=dtype), torch.empty(heads, row.tokens, width[1], dtype=dtype)
        quantize.dequantize(found, row.precision, keys, values)
        found = {"keys": keys, "values": values}
    return all(bool(torch.isfinite(tensor).all()) for tensor in found.values())


def _finite(page: Blob, progress: Callable[[int], None]) -> Callable[[int], list[memoryview]]:
    """The page's sections. BlobError with one that holds NaN or infinity, which would spoil every prompt that begins with it."""
    row = page.row

    def section(number: int) -> list[memoryview]:
        stored = page.plain(number, progress)
        if number < len(row.widths):
            finite = _layer_is_finite(row, number, stored)
        else:
            finite = all(known.finite for known in unpack(stored, row.tokens).values())
        if not finite:
            raise BlobError(
                f"archive {row.blob!r}: section {number} of page {row.place} holds NaN or infinity: export it again where it was computed"
            )
        return [stored]

    return section


def _add_checkpoints(folder: Folder, index: Index, known: Row, page: Blob) -> None:
    """Write a known page once more if it lacks checkpoints of the archive's: without them a model with states computes it again."""
    layers = len(known.widths)
    own = unpack(_finite(page, lambda count: None)(layers)[0], page.row.tokens)
    with suppress(BlobError), opened(folder, known) as blob:  # of a page that is damaged, or evicted meanwhile, nothing is mended here
        held = unpack(blob.plain(layers), known.tokens) if known.checkpoint_bytes else {}
        if own.keys() <= held.keys():
            return
        packed = memoryview(pack(own | held, known.tokens))
        mixed = page.row.numerics | ({PIECES} if any(one.cuts for one in own.values()) else set())
        more = replace(known, checkpoint_bytes=len(packed), numerics=known.numerics | mixed)
        new = blob_io.write_sections(folder, more, lambda at: [packed] if at == layers else [blob.plain(at)])
        spare = new
        try:
            spare = index.exchange(known, new)
        finally:
            blob_files.remove(folder, [spare])


def _take(folder: Folder, index: Index, missing: Sequence[tuple[Row, Blob]], progress: Progress | None) -> list[Row]:
    """Blobs first, then all rows at once."""
    need = sum(blob_format.plan(row, folder.encrypted).bytes for row, _ in missing)
    if shutil.disk_usage(folder.path).free < need:
        raise StoreFullError(f"{need} bytes do not fit on the disk of {str(folder.path)!r}: {os.strerror(errno.ENOSPC)}")
    done, written = 0, []

    def tell(count: int) -> None:
        nonlocal done
        done += count
        if progress:
            progress(min(done, need), need)

    try:
        for row, page in missing:
            written.append(blob_io.write_sections(folder, row, _finite(page, tell)))
        bad = [old.id for row in written if (old := index.row(row.page_key, row.fingerprint, row.precision)) is not None and old.bad]
        spare = index.remove(bad, force=True) + index.add(written)
    except BaseException:
        blob_files.remove(folder, written)
        raise
    blob_files.remove(folder, spare)
    return written
