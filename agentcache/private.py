"""Files that only their owner may read and write: where they lie by default, checked before they are used, put there whole or not at all.

Windows has neither owners nor modes of this kind: there the folder of the user's profile keeps others out. Knows nothing of their content.
"""

from __future__ import annotations

import os
import secrets
import shlex
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import platformdirs

from .errors import StoreCorruptError, StoreError, StorePermissionError

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

KEY_BYTES = 32
# Flags of os.open. Bytes stay as they are, no link is followed, and no pipe is waited for.
PLAIN = getattr(os, "O_BINARY", 0) | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | PLAIN


def default_path() -> Path | None:
    """AGENTCACHE_DIR, else the user's cache folder. None where AGENTCACHE_DIR is set to nothing: no store on disk.

    StoreError: it lies in the home of a user who has none, such as a number that a container runs under.
    """
    if (given := os.environ.get("AGENTCACHE_DIR")) == "":
        return None
    try:
        return (Path(given) if given else platformdirs.user_cache_path("agentcache")).expanduser()
    except RuntimeError as error:
        said = f"the store has no folder, AGENTCACHE_DIR={given!r} and this user has no home"
        raise StoreError(f"{said}: set AGENTCACHE_DIR to an absolute path, or to nothing to keep nothing on disk") from error


def lock(fd: int, *, shared: bool = False, wait: bool = False) -> None:
    """Lock an open file against other processes until it is closed; OSError if one of them has it and `wait` is off.

    shared: with others who share it. Windows has no such locks here and needs none: it replaces no file that is open.
    """
    if sys.platform != "win32":
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
    elif not shared:
        msvcrt.locking(fd, msvcrt.LK_LOCK if wait else msvcrt.LK_NBLCK, 1)


@contextmanager
def locked(place: Path) -> Iterator[None]:
    """Alone among all processes and threads that ask so for this folder. The lock ends with its process."""
    # Windows opens no folders: a file beside the folder's key stands for it
    fd = os.open(place / "key.lock", os.O_RDWR | os.O_CREAT) if sys.platform == "win32" else os.open(place, os.O_RDONLY)
    try:
        lock(fd, wait=True)
        yield
    finally:
        os.close(fd)


def put(path: Path, content: bytes, durable: bool = True) -> None:
    """Write a small file that is either there as a whole or not at all; durable: even after a power cut."""
    part = path.with_name(f"{path.name}.{secrets.token_hex(4)}.new")
    fd = os.open(part, NEW, 0o600)
    try:
        with open(fd, "wb") as file:
            file.write(content)
            if durable:
                file.flush()
                os.fsync(fd)
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    if not durable or sys.platform == "win32":
        return
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def ours(found: os.stat_result) -> bool:
    """Tell whether a file belongs to this user, as far as the system tells."""
    return sys.platform == "win32" or found.st_uid == os.geteuid()


def check(path: Path, kind: Any) -> None:
    """Refuse a path that is missing, a link, of another kind, of another user, or open to others."""
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        raise StoreCorruptError(f"{str(path)!r} is missing from the store: delete the folder it belongs in, it will be made anew") from None
    if not kind(found.st_mode):
        what = "a symbolic link" if stat.S_ISLNK(found.st_mode) else "not what it should be"
        raise StorePermissionError(f"{str(path)!r} is {what}: a store is a plain folder with plain files; name another one")
    if sys.platform == "win32":
        return
    if not ours(found):
        raise StorePermissionError(f"{str(path)!r} belongs to user {found.st_uid}, not to {os.geteuid()}: name a folder of your own")
    if found.st_mode & 0o077:
        mode, mend = stat.S_IMODE(found.st_mode), "700" if stat.S_ISDIR(found.st_mode) else "600"
        raise StorePermissionError(f"{str(path)!r} is open to other users (mode {mode:o}): chmod {mend} {shlex.quote(str(path))}")
