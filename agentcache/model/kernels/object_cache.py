"""Compiled code that outlives its process, in a folder that only its owner may write. Knows no kernels.

DIR/kernels/    0700, in the folder where a store lies by default; AGENTCACHE_DIR="" keeps nothing
  key           32 random bytes, 0600
  NAME.o        keyed BLAKE3 of its name and the code, then the code      NAME = digest of source, processor, its features, compiler

Such code is run as it is. What the key does not vouch for is compiled again; a folder that others may write is refused, and said so.
"""

from __future__ import annotations

import hmac
import os
import secrets
import stat
import warnings
from contextlib import suppress
from pathlib import Path

from blake3 import blake3

from ...errors import StoreError, StorePermissionError, StoreWarning
from ...private import KEY_BYTES, PLAIN, check, default_path, locked, put

MOST_BYTES = 16 << 20  # of all files together; one model has about a hundred kilobytes
TAG_BYTES = 32


class Objects:
    """Code by name, found again by later processes of this user. machine: all that decides what a source is compiled to."""

    def __init__(self, machine: str) -> None:
        self._machine = machine
        self._place: Path | None = None
        self._key = b""
        try:
            if (store := default_path()) is not None:
                self._open(store.absolute())
        except StorePermissionError as error:
            with suppress(StoreWarning):  # an error where warnings are errors: the engine computes all the same
                warnings.warn(f"compiled code is not kept on disk: {error}", StoreWarning, stacklevel=2)
        except (OSError, StoreError):  # nowhere to write: compiled again in each process
            return

    def _open(self, store: Path) -> None:
        store.parent.mkdir(parents=True, exist_ok=True)
        place = store / "kernels"
        for folder in (store, place):
            with suppress(FileExistsError):
                folder.mkdir(mode=0o700)
            check(folder, stat.S_ISDIR)
        with locked(place):
            if not os.path.lexists(place / "key") or (place / "key").lstat().st_size != KEY_BYTES:  # no key, or what is left of one
                put(place / "key", secrets.token_bytes(KEY_BYTES))
        check(place / "key", stat.S_ISREG)
        self._place, self._key = place, (place / "key").read_bytes()

    def name(self, source: str) -> str:
        """The name of this source's code."""
        return blake3(f"{self._machine}\n{source}".encode()).hexdigest()

    def find(self, name: str) -> bytes | None:
        """The code of that name; None if there is none, or it is not what was kept under it."""
        if self._place is None:
            return None
        try:
            with open(os.open(self._place / f"{name}.o", os.O_RDONLY | PLAIN), "rb") as file:
                tag, code = file.read(TAG_BYTES), file.read(MOST_BYTES)
        except OSError:
            return None
        return code if hmac.compare_digest(tag, self._tag(name, code)) else None

    def keep(self, name: str, code: bytes) -> None:
        """Let later processes find it; no effect where it cannot be written."""
        if self._place is not None and len(code) < MOST_BYTES:
            with suppress(OSError):
                put(self._place / f"{name}.o", self._tag(name, code) + code, durable=False)
                self._bound(self._place)

    def _bound(self, place: Path) -> None:
        """Delete what was compiled longest ago, beyond MOST_BYTES."""
        files = sorted(((found.st_mtime, found.st_size, path) for path in place.glob("*.*") if (found := path.lstat())), reverse=True)
        total = 0
        for _, size, path in files:
            total += size
            if total > MOST_BYTES:
                path.unlink(missing_ok=True)

    def _tag(self, name: str, code: bytes) -> bytes:
        return blake3(name.encode() + code, key=self._key).digest(length=TAG_BYTES)
