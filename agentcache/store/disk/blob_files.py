"""Blobs as files: their names, safe opening, writing that is complete or leaves nothing, sweeping. Knows nothing of their contents.

blobs/ab/NAME.safetensors        NAME = 32 hexadecimal digits "-" the writer's process token; ab = its first two digits
blobs/ab/NAME.part               being written
blobs/ab/NAME.deleted            to be overwritten, once no process has it mapped: who maps a file shares a lock on it
"""

from __future__ import annotations

import errno
import functools
import json
import mmap
import os
import re
import secrets
import stat
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from ...errors import BlobError, StoreBusyError, StoreError, StoreFullError, StorePermissionError
from ...private import NEW, PLAIN, lock, ours
from . import process_identity
from .folder import Folder
from .schema import Row

WHOLE, PART, DELETED = ".safetensors", ".part", ".deleted"
NAME = re.compile(rf"(?a:[0-9a-f]{{32}})-({process_identity.TOKEN.pattern})")
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
DAMAGED = (errno.ENOENT, errno.ELOOP, errno.ENXIO, errno.ENODEV, errno.ENOTDIR, errno.EISDIR, errno.EIO)
ALIGN = 4096  # where data starts: whole pages of memory and of most disks
IOV = 512  # buffers per call, below every system's limit
LOCAL = {"ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "zfs", "overlay", "tmpfs"}  # where a deleted file that is mapped can still be read
POPULATE_READ = 22  # of madvise, Linux 5.14; Python has no name for it before 3.13
ZEROS = 1 << 20  # bytes that are overwritten at once
LATE_S = 3600.0  # a file that has no row after so long gets none: who evicted it was killed before it was unlinked
PROBE = 1 << 18  # bytes between two looks at what the system holds in memory
_seeking = threading.Lock()


@dataclass(frozen=True, slots=True)
class File:
    """One file of the store. writer: the token of the process that wrote it."""

    name: str
    writer: str
    suffix: str
    bytes: int
    changed: float


@dataclass(frozen=True, slots=True)
class Opened:
    """A blob's file as it was when it was opened. times: of its last change, and of its contents, in ns."""

    path: str
    file: tuple[int, int]
    bytes: int
    times: tuple[int, int]

    @classmethod
    def of(cls, folder: Folder, name: str, fd: int) -> Opened:
        """The file of a descriptor."""
        about = os.fstat(fd)
        path = os.fspath(folder.blobs / name[:2] / f"{name}{WHOLE}")
        return cls(path, (about.st_dev, about.st_ino), about.st_size, (about.st_ctime_ns, about.st_mtime_ns))

    def changed(self) -> bool:
        """Tell whether it was touched since. A file that was deleted, or replaced by another, cannot be: no reader finds it any more."""
        try:
            about = os.stat(self.path, follow_symlinks=False)
        except OSError:
            return False
        if (about.st_dev, about.st_ino) != self.file or not about.st_nlink:  # no links: its name is being taken away
            return False
        return (about.st_size, about.st_ctime_ns, about.st_mtime_ns) != (self.bytes, *self.times)


@contextmanager
def _place(folder: Folder, name: str, make: bool = False) -> Iterator[tuple[str, int | None]]:
    """The path of a blob's files but for its suffix, and the descriptor of the folder that it begins in.

    Nothing on the way is followed elsewhere. Windows has no such descriptors: the path is whole there.
    """
    if NAME.fullmatch(name) is None:
        raise BlobError(f"{name!r} is no name of a blob")
    if sys.platform == "win32":
        if make:
            (folder.blobs / name[:2]).mkdir(0o700, exist_ok=True)
        yield os.fspath(folder.blobs / name[:2] / name), None
        return
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
    above = os.open(folder.blobs, flags)
    try:
        try:
            place = os.open(name[:2], flags, dir_fd=above)
        except FileNotFoundError:
            if not make:
                raise
            with suppress(FileExistsError):
                os.mkdir(name[:2], 0o700, dir_fd=above)
            os.fsync(above)
            place = os.open(name[:2], flags, dir_fd=above)
    finally:
        os.close(above)
    try:
        yield name, place
    finally:
        os.close(place)


@contextmanager
def _refusing(name: str, doing: str) -> Iterator[None]:
    """Errors of ours for those of the operating system: a full disk, a bad blob, or neither."""
    try:
        yield
    except StoreError:
        raise
    except OSError as error:
        said = f"blob {name!r}: {doing} failed: {error.strerror or error}"
        if error.errno in FULL:
            raise StoreFullError(f"{said}; free some room or prune the store") from error
        kind = BlobError if doing == "reading" and error.errno in DAMAGED else StoreError
        raise kind(said) from error


def open_file(folder: Folder, name: str) -> tuple[int, int]:
    """A descriptor to read a blob from, and its size. BlobError if it is not there or no plain file of ours."""
    with _refusing(name, "reading"), _place(folder, name) as (path, place):
        fd = os.open(path + WHOLE, os.O_RDONLY | PLAIN, dir_fd=place)
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode) or not ours(found):
        os.close(fd)
        raise BlobError(f"blob {name!r} is no plain file of ours")
    return fd, found.st_size


def _read(fd: int, buffer: memoryview, at: int) -> int:
    """Read at an offset, as much as the system gives at once. From any thread, though Windows has one place in a file for all of them."""
    if hasattr(os, "preadv"):
        return os.preadv(fd, [buffer], at)
    with _seeking, open(fd, "rb", buffering=0, closefd=False) as file:
        file.seek(at)
        return file.readinto(buffer) or 0


def _write(fd: int, buffers: Sequence[memoryview], at: int) -> int:
    """The same of writing: the first buffers, or a part of them."""
    if hasattr(os, "pwritev"):
        return os.pwritev(fd, buffers[:IOV], at)
    with _seeking:
        os.lseek(fd, at, os.SEEK_SET)
        return os.write(fd, buffers[0])


def front_of(header: Any) -> bytes:
    """A header as a file begins with it: its length, JSON, and spaces up to where data may start."""
    text = json.dumps(header, separators=(",", ":")).encode("ascii")
    size = -(-(8 + len(text)) // ALIGN) * ALIGN
    return (size - 8).to_bytes(8, "little") + text.ljust(size - 8)


def front_bytes(length: bytes, room: int, most: int) -> int:
    """Bytes of such a front by its first 8, where `room` are left in the file."""
    size = 8 + int.from_bytes(length, "little")
    if len(length) != 8 or size % ALIGN or not ALIGN <= size <= min(most, room):
        raise BlobError(f"its header has {size - 8} bytes in a file of {room}")
    return size


def read_front(fd: int, name: str, start: int, size: int, most: int) -> bytes:
    """The front at offset `start` of a file of `size` bytes; BlobError where there is none of at most `most`."""
    length = bytearray(min(8, size - start))
    read_into(fd, memoryview(length), start, name)
    front = bytearray(front_bytes(bytes(length), size - start, most))
    read_into(fd, memoryview(front), start, name)
    return bytes(front)


def read_into(fd: int, buffer: memoryview, at: int, name: str) -> None:
    """Fill the buffer from offset `at`."""
    while len(buffer):
        with _refusing(name, "reading"):
            count = _read(fd, buffer, at)
        if not count:
            raise BlobError(f"blob {name!r} ends at byte {at}: it became shorter while it was read")
        buffer, at = buffer[count:], at + count


@functools.cache
def local(path: Path) -> bool:
    """Tell whether a folder lies on a file system of this machine's own: another machine could take a mapped file away under a reader."""
    path = path.resolve()
    mounts = {Path(part.mountpoint): part.fstype for part in psutil.disk_partitions(all=True)}
    return next((mounts[above] in LOCAL for above in (path, *path.parents) if above in mounts), False)


def in_memory(fd: int, size: int) -> bool:
    """Tell whether the system holds all of a file in its page cache, as far as samples tell."""
    if sys.platform != "linux" or not hasattr(os, "RWF_NOWAIT"):
        return False
    byte = bytearray(1)
    try:
        return all(os.preadv(fd, [byte], at, os.RWF_NOWAIT) for at in range(0, size, PROBE))
    except OSError:  # BlockingIOError where the disk would be asked; others where the question is unknown
        return False


def map_file(fd: int, size: int) -> mmap.mmap:
    """All of a file as memory that no write goes back from. The file may be deleted while it lives, but never be cut short.

    OSError: half of the files that this process may open are open. Each map keeps one, and the other half is for all else.
    """
    if sys.platform == "linux":
        from resource import RLIMIT_NOFILE, getrlimit

        os.close(next_fd := os.dup(fd))  # the lowest free number, which the map's copy gets
        if next_fd >= getrlimit(RLIMIT_NOFILE)[0] // 2 >= 0:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    return mmap.mmap(fd, size, access=mmap.ACCESS_COPY)


def bring_in(mapped: memoryview, at: int, size: int) -> None:
    """Have the system map these bytes of a mapped file at once instead of one memory page at a time, where it can."""
    memory = mapped.obj
    assert isinstance(memory, mmap.mmap)
    if sys.platform != "linux":
        return
    first = at // mmap.PAGESIZE * mmap.PAGESIZE
    with suppress(OSError, ValueError):  # a kernel that does not know it
        memory.madvise(POPULATE_READ, first, at + size - first)


def write_from(fd: int, buffers: Sequence[memoryview], at: int) -> int:
    """Write all buffers at offset `at`; returns the offset after them. OSError as the system raises it."""
    left = [buffer for buffer in buffers if len(buffer)]
    while left:
        count = _write(fd, left, at)
        if not count:
            raise OSError(errno.EIO, "nothing was written")
        at += count
        while left and count >= len(left[0]):
            count -= len(left.pop(0))
        if count:
            left[0] = left[0][count:]
    return at


@contextmanager
def new_file(folder: Folder) -> Iterator[tuple[str, int]]:
    """The name of a new blob and a descriptor to write it to. Complete and safe from a power cut once the block ends; or gone."""
    if not folder.writable:
        raise StorePermissionError(f"the store {str(folder.path)!r} is read-only: nothing can be added")
    name = f"{secrets.token_hex(16)}-{process_identity.token()}"
    with _refusing(name, "writing"), _place(folder, name, make=True) as (path, place):
        try:
            fd = os.open(path + PART, NEW, 0o600, dir_fd=place)
            try:
                yield name, fd
                os.fsync(fd)
            finally:
                os.close(fd)
            os.rename(path + PART, path + WHOLE, src_dir_fd=place, dst_dir_fd=place)
            if place is not None:
                os.fsync(place)
        except BaseException:
            for suffix in (PART, WHOLE):
                with suppress(OSError):
                    os.unlink(path + (_overwrite(path, suffix, place) if folder.overwrite else suffix), dir_fd=place)
            raise


def unlink(folder: Folder, name: str, suffix: str = WHOLE) -> bool:
    """Delete a file of the store; returns whether it was there. StoreBusyError: it is to be overwritten, and mapped by a process."""
    with _refusing(name, "deleting"):
        try:
            with _place(folder, name) as (path, place):
                if folder.overwrite or suffix == DELETED:
                    suffix = _overwrite(path, suffix, place)
                os.unlink(path + suffix, dir_fd=place)
        except FileNotFoundError:
            return False
        except BlockingIOError as error:
            raise StoreBusyError(f"blob {name!r} is deleted, but not overwritten yet: a running process has its page in memory") from error
        return True


def remove(folder: Folder, rows: Iterable[Row]) -> None:
    """Delete blobs of rows that are in no index any more; no matter if they are gone already."""
    for row in rows:
        if row.blob:
            with suppress(StoreError):  # what stays, such as a page that a process has mapped, is swept later
                unlink(folder, row.blob)


def _overwrite(path: str, suffix: str, place: int | None) -> str:
    """Write zeros over a file, under a suffix that no row's has, which is returned. BlockingIOError: a process has it mapped."""
    if place is not None:
        lock(place, wait=True)  # until it is closed: threads and processes that overwrite take turns
    os.rename(path + suffix, path + DELETED, src_dir_fd=place, dst_dir_fd=place)
    fd = os.open(path + DELETED, os.O_RDWR | PLAIN, dir_fd=place)
    try:
        lock(fd)
        size, zeros = os.fstat(fd).st_size, memoryview(bytes(ZEROS))
        for at in range(0, size, ZEROS):
            write_from(fd, [zeros[: size - at]], at)
        os.fsync(fd)
    finally:
        os.close(fd)
    return DELETED


def files(folder: Folder) -> Iterator[File]:
    """All blobs that lie in the store, finished or not. Files of other names are not ours and are left out."""
    with _refusing("*", "listing"):
        places = [entry.path for entry in os.scandir(folder.blobs) if entry.is_dir(follow_symlinks=False)]
        for place in sorted(places):
            for entry in os.scandir(place):
                name, dot, suffix = entry.name.rpartition(".")
                found = NAME.fullmatch(name)
                if found is None or dot + suffix not in (WHOLE, PART, DELETED) or name[:2] != os.path.basename(place):
                    continue
                with suppress(FileNotFoundError):  # deleted or renamed meanwhile
                    about = entry.stat(follow_symlinks=False)
                    yield File(name, found[1], dot + suffix, about.st_size, about.st_mtime)


def orphans(folder: Folder, known: Callable[[list[str]], Collection[str]]) -> tuple[list[File], int]:
    """Files that no row names, nor ever will: deleted ones, old ones, and those of dead writers. And the bytes of those that may get a row.

    known: which of these names have a row; asked after the files were listed, so that a row inserted meanwhile is seen.
    """
    found = list(files(folder))
    rows = known([file.name for file in found if file.suffix == WHOLE])
    unnamed = [file for file in found if file.suffix != WHOLE or file.name not in rows]
    late = time.time() - LATE_S
    dead = [one for one in unnamed if one.suffix == DELETED or one.changed < late or not process_identity.alive(one.writer, one.changed)]
    return dead, sum(file.bytes for file in unnamed) - sum(file.bytes for file in dead)


def sweep(folder: Folder, known: Callable[[list[str]], Collection[str]]) -> tuple[list[File], int]:
    """Delete orphans; returns what `orphans` found."""
    found = orphans(folder, known)
    for file in found[0]:
        with suppress(StoreError):  # Windows deletes no file that is open: the next sweep does
            unlink(folder, file.name, file.suffix)
    return found
