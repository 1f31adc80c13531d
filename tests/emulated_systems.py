"""Windows and macOS as far as one process on Linux can show them: what Python lacks there is taken away, before anything of ours is loaded.

Shows missing modules, functions and flags, and files that cannot be deleted while they are open. Shows no other compiler, library or disk.
"""

from __future__ import annotations

import errno
import mmap
import os
import pathlib
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import psutil

ABSENT = {
    "win32": (
        "chown fchmod fchown fork forkpty getegid geteuid getgid getuid posix_fadvise pread preadv pwrite pwritev register_at_fork "
        "sched_getaffinity sysconf O_CLOEXEC O_DIRECTORY O_NOFOLLOW O_NONBLOCK RWF_NOWAIT"
    ),
    "darwin": "posix_fadvise sched_getaffinity RWF_NOWAIT",
}
MODULES = {"win32": ("fcntl", "grp", "pwd", "resource"), "darwin": ()}
BINARY = 0x8000  # as on Windows; Linux opens large files with it, which it does anyway
SHARING_VIOLATION = 32


def become(system: str) -> None:
    """Take away from this process what Python does not have on that system."""
    import torch  # these read sys.platform when they are loaded, and are not what is shown here
    import transformers

    with suppress(ImportError):
        import llvmlite.binding  # noqa: F401

    assert transformers.Qwen3ForCausalLM
    assert transformers.PreTrainedTokenizerFast
    assert not any(name.startswith("agentcache") for name in sys.modules)
    for name in ABSENT[system].split():
        delattr(os, name)
    for name in dir(mmap):
        if name.startswith("MADV_") or (system == "win32" and name.startswith(("MAP_", "PROT_"))):
            delattr(mmap, name)
    if system == "win32":
        _windows_locks()
        _windows_files()
        mmap.mmap = _WindowsMap  # type: ignore[misc]
    for module in MODULES[system]:
        sys.modules[module] = None  # type: ignore[assignment]
    torch.backends.mkldnn.is_available = lambda: False
    _hide("/proc", "libgomp")
    sys.platform = system


def _hide(root: str, library: str) -> None:
    """No files below a root, and no library of this name, for what asks with pathlib, as our code does."""
    read_text, read_bytes, glob = pathlib.Path.read_text, pathlib.Path.read_bytes, pathlib.Path.glob

    def hidden(read: Callable[..., Any]) -> Callable[..., Any]:
        def reads(path: pathlib.Path, *args: Any, **kwargs: Any) -> Any:
            if str(path).startswith(root):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
            return read(path, *args, **kwargs)

        return reads

    def globbed(path: pathlib.Path, pattern: str) -> Iterator[pathlib.Path]:
        return iter(()) if library in pattern else glob(path, pattern)

    pathlib.Path.read_text, pathlib.Path.read_bytes = hidden(read_text), hidden(read_bytes)  # type: ignore[method-assign]
    pathlib.Path.glob = globbed  # type: ignore[method-assign,assignment]


class _WindowsMap(mmap.mmap):
    """A map as Windows has them: without flags, protections and advice, and writable only in itself if it is of no file."""

    def __new__(cls, fileno: int, length: int, access: int = mmap.ACCESS_DEFAULT) -> _WindowsMap:
        assert fileno != -1 or access == mmap.ACCESS_DEFAULT
        return super().__new__(cls, fileno, length, access=access)

    madvise = property()  # type: ignore[assignment]


def _windows_locks() -> None:
    import fcntl

    def locking(fd: int, mode: int, count: int) -> None:
        assert count == 1
        fcntl.flock(fd, fcntl.LOCK_EX | (0 if mode == msvcrt.LK_LOCK else fcntl.LOCK_NB))

    msvcrt: Any = types.ModuleType("msvcrt")
    msvcrt.LK_LOCK, msvcrt.LK_NBLCK, msvcrt.locking = 1, 2, locking
    sys.modules["msvcrt"] = msvcrt


def _windows_files() -> None:
    """No descriptors of folders, nothing relative to one; modes open to all; a file that is open is neither deleted nor replaced."""
    psutil.disk_partitions = lambda all: [types.SimpleNamespace(mountpoint="/", fstype="NTFS")]
    real = {name: getattr(os, name) for name in ("open", "mkdir", "unlink", "remove", "rename", "replace", "fsync")}
    os.O_BINARY = BINARY  # type: ignore[attr-defined]
    os.umask(0)

    def opens(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        _whole(dir_fd)
        if os.path.isdir(path):
            raise PermissionError(errno.EACCES, "Permission denied", os.fspath(path))
        return int(real["open"](path, flags, 0o666))

    def makes(path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        _whole(dir_fd)
        real["mkdir"](path, 0o777)

    def deletes(path: Any, *, dir_fd: int | None = None) -> None:
        _whole(dir_fd)
        _closed(path)
        real["unlink"](path)

    def renames(source: Any, target: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None) -> None:
        _whole(src_dir_fd, dst_dir_fd)
        if os.path.exists(target):
            raise FileExistsError(errno.EEXIST, "File exists", os.fspath(target))
        replaces(source, target)

    def replaces(source: Any, target: Any) -> None:
        _closed(source)
        _closed(target)
        real["replace"](source, target)

    os.open, os.mkdir, os.unlink, os.remove = opens, makes, deletes, deletes  # type: ignore[assignment]
    os.rename, os.replace = renames, replaces  # type: ignore[assignment]


def _whole(*descriptors: int | None) -> None:
    if any(each is not None for each in descriptors):
        raise NotImplementedError("dir_fd unavailable on this platform")


def _closed(path: Any) -> None:
    """Raise as Windows does for a file that this process has open."""
    whole = os.path.realpath(path)
    for fd in os.listdir("/proc/self/fd"):
        try:
            found = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue
        if found == whole:
            error = PermissionError(errno.EACCES, "The process cannot access the file because it is being used by another process", whole)
            error.winerror = SHARING_VIOLATION  # type: ignore[attr-defined]
            raise error
