"""The folder a store lives in: made once by the first process, refused where it belongs to another user. Knows no pages.

DIR/            0700, ours, no symlink
  format        "agentcache store 1", written last: without it the folder was never finished
  key           32 random bytes, 0600: authenticates everything in the store
  encryption    "none", or the cipher and a value that tells whether a key is the right one
  generation    the number of the last deletion (deletion.py); another file each time, so that one look tells whether there was one
  blobs/        pages (blob_io.py)        index.sqlite    places of pages (index.py)      index.lock    held while the index is open
  kernels/      compiled code, in the default folder only (model/object_cache.py)
"""

from __future__ import annotations

import errno
import hmac
import os
import secrets
import stat
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from blake3 import blake3

from ...errors import BlobError, ConfigError, StoreCorruptError, StoreError, StoreFormatError, StoreFullError, StoreLostError
from ...private import KEY_BYTES, check, default_path, locked, put

FORMAT = "agentcache store 1\n"
INDEX = "index.sqlite"
LOCK = "index.lock"
OURS = ("format", "key", "encryption", "generation", "blobs", "kernels", INDEX, LOCK)  # or what starts so: "key.new", "index.sqlite-wal"
NONCE_BYTES = 12
NO_STORE = "`agentcache warm` or an Engine makes one; name another with --store or AGENTCACHE_DIR"
CIPHER = "AES-256-GCM"


def default_key() -> bytes | None:
    """The encryption key of AGENTCACHE_KEY: 64 hexadecimal digits, or the path of a file that holds them or 32 bytes. None if unset."""
    given = os.environ.get("AGENTCACHE_KEY", "")
    if not given:
        return None
    if (key := _from_hex(given)) is not None:
        return key
    try:
        content = Path(given).expanduser().read_bytes()
    except (OSError, ValueError):
        raise ConfigError("AGENTCACHE_KEY: must be 64 hexadecimal digits or the path of a file that holds a key") from None
    key = content if len(content) == KEY_BYTES else _from_hex(content.decode("ascii", "replace"))
    if key is None:
        raise ConfigError(f"AGENTCACHE_KEY={given!r}: the file must hold 32 bytes or 64 hexadecimal digits")
    return key


def _from_hex(text: str) -> bytes | None:
    try:
        key = bytes.fromhex(text)
    except ValueError:
        return None
    return key if len(key) == KEY_BYTES else None


@dataclass(frozen=True, slots=True, eq=False)
class Folder:
    """An opened store's folder, checked. key: authenticates stored bytes. writable: if not, all is read-only, which is no error. overwrite:
    blobs are, before they are unlinked."""

    path: Path
    key: bytes = field(repr=False)
    writable: bool
    encrypted: bool
    overwrite: bool = False
    _cipher: Any = field(default=None, repr=False)
    _made: bytes = field(default=b"", repr=False)  # its file `key`, which no other folder has

    @classmethod
    def open(
        cls, path: str | os.PathLike[str] | None = None, *, create: bool = True, key: bytes | None = None, overwrite: bool = False
    ) -> Folder:
        """Open the store at `path` (default_path()), and make it unless `create` is off.

        key: 32 bytes to encrypt with (default_key()); it must be given exactly if the store was made with it.
        StorePermissionError: belongs or is open to another user. StoreFormatError: another version, another key, or no store at all.
        """
        place = default_path() if path is None else Path(os.path.expanduser(path))
        if place is None:
            raise StoreError("AGENTCACHE_DIR='': nothing is kept on disk; unset it or name a folder")
        place = place.absolute()
        secret = default_key() if key is None else key
        if secret is not None and len(secret) != KEY_BYTES:
            raise ConfigError(f"an encryption key of {len(secret)} bytes: must be {KEY_BYTES}")
        try:
            writable = _prepare(place, create, secret)
            return replace(_opened(place, secret, writable), overwrite=overwrite)
        except StoreError:
            raise
        except OSError as error:
            raise StoreError(f"the store {str(place)!r} cannot be opened: {error}") from error

    @property
    def blobs(self) -> Path:
        """Folder of the pages."""
        return self.path / "blobs"

    @property
    def index(self) -> Path:
        """The index's file."""
        return self.path / INDEX

    @property
    def generation_stat(self) -> tuple[int, ...]:
        """The identity of the file `generation`, () without one: it changes with each deletion, and when the folder is deleted."""
        try:
            status = os.stat(self.path / "generation")
        except OSError:
            return ()
        return status.st_dev, status.st_ino, status.st_ctime_ns, status.st_size

    def write_generation(self, number: int) -> None:
        """Replace the file `generation`: running processes that look at it see that something was deleted."""
        try:
            with locked(self.path):
                put(self.path / "generation", f"{number}\n".encode())
        except OSError as error:
            kind = StoreFullError if error.errno in (errno.ENOSPC, errno.EDQUOT) else StoreError
            raise kind(f"a deletion cannot be told to those who use {str(self.path)!r}: {error.strerror or error}") from error

    def check_same(self) -> None:
        """StoreLostError: the folder that was opened is gone, or another one is in its place. StoreError: nobody can tell."""
        try:
            same = (self.path / "key").read_bytes() == self._made
        except (FileNotFoundError, NotADirectoryError):
            same = False
        except OSError as error:  # too many open files, perhaps: pages and pins are there still
            raise StoreError(f"the store {str(self.path)!r} cannot be used: {error}") from error
        if not same:
            raise StoreLostError(f"the store {str(self.path)!r} was deleted, or made anew, while it was in use: open it again")

    def seal(self, data: bytes | memoryview, context: bytes) -> bytes:
        """Encrypt and authenticate, bound to `context`. In a store that is not encrypted: the bytes as they are."""
        if self._cipher is None:
            return bytes(data)
        nonce = secrets.token_bytes(NONCE_BYTES)
        return nonce + self._cipher.encrypt(nonce, data, context)

    def open_sealed(self, data: bytes | memoryview, context: bytes) -> bytes:
        """Decrypt data that was sealed with this context; BlobError if it was not, or not here."""
        if self._cipher is None:
            return bytes(data)
        from cryptography.exceptions import InvalidTag

        try:
            return self._cipher.decrypt(bytes(data[:NONCE_BYTES]), bytes(data[NONCE_BYTES:]), context)
        except (InvalidTag, ValueError) as error:  # ValueError: cut short
            raise BlobError(f"{len(data)} encrypted bytes are damaged, or were written elsewhere") from error


def _prepare(place: Path, create: bool, secret: bytes | None) -> bool:
    """Make missing files, check the rest; True if the folder can be written."""
    if create:
        place.parent.mkdir(parents=True, exist_ok=True)  # by the umask: stores of other users may lie there, too
        with suppress(FileExistsError):
            place.mkdir(mode=0o700)
    made = os.path.lexists(place / "format")
    # before its mode: a folder named by mistake is to stay as it is
    if not os.path.lexists(place) or (place.is_dir() and not made and not create):
        raise StoreFormatError(f"there is no store at {str(place)!r}: {NO_STORE}")
    check(place, stat.S_ISDIR)
    writable = _can_write(place)
    if not made:
        if not writable:
            raise StoreFormatError(f"there is no store at {str(place)!r}, and it cannot be made there: name a folder that can be written")
        with locked(place):
            _finish(place, secret)
    return writable


def check_room(place: Path) -> None:
    """StoreError: something that is there keeps a store from being made at this place, where there is none."""
    there = next(path for path in (place, *place.parents) if os.path.lexists(path))
    if there == place:
        check(place, stat.S_ISDIR)
        _check_empty(place)
    elif not there.is_dir():
        raise StoreFormatError(f"{str(there)!r} is no folder: name another place")


def _check_empty(place: Path) -> None:
    strange = [name for name in sorted(os.listdir(place)) if not name.startswith(OURS)]
    if strange:
        raise StoreFormatError(f"{str(place)!r} holds {strange[0]!r} and is no store: name an empty folder")


def _can_write(place: Path) -> bool:
    """By permission and by what the owner's mode says, which does not bind root."""
    paths = [path for path in (place, place / "blobs", place / INDEX) if path.exists()]
    return all(os.access(path, os.W_OK) and path.stat().st_mode & stat.S_IWUSR for path in paths)


def _finish(place: Path, secret: bytes | None) -> None:
    """Make the contents of a new folder, or of one whose making was interrupted. Called under the lock; `format` comes last."""
    if (place / "format").exists():  # another process was faster
        return
    _check_empty(place)
    if not (place / "key").exists():
        put(place / "key", secrets.token_bytes(KEY_BYTES))
    mac_key = (place / "key").read_bytes()
    record = "none"
    if secret is not None:
        _cipher(secret, mac_key)  # no encrypted store where nothing can encrypt
        record = f"{CIPHER} {_check_value(secret, mac_key)}"
    put(place / "encryption", f"{record}\n".encode())
    (place / "blobs").mkdir(mode=0o700, exist_ok=True)
    put(place / "generation", b"0\n")
    put(place / "format", FORMAT.encode())


def _opened(place: Path, secret: bytes | None, writable: bool) -> Folder:
    check(place / "format", stat.S_ISREG)
    found = (place / "format").read_bytes()[:80]
    if found != FORMAT.encode():
        said = found.decode("utf-8", "replace")
        raise StoreFormatError(f"the store {str(place)!r} says {said!r}, this version reads {FORMAT!r}: name another folder, or delete it")
    for name in ("key", "encryption", *((INDEX,) if os.path.lexists(place / INDEX) else ())):
        check(place / name, stat.S_ISREG)
    check(place / "blobs", stat.S_ISDIR)
    key = (place / "key").read_bytes()
    if len(key) != KEY_BYTES:
        raise StoreCorruptError(f"the key of the store {str(place)!r} has {len(key)} bytes instead of {KEY_BYTES}: delete the store")
    record = (place / "encryption").read_bytes()[:200].decode("utf-8", "replace").split()
    if record == ["none"]:
        if secret is not None:
            raise StoreFormatError(f"the store {str(place)!r} is not encrypted, yet a key was given: drop the key, or name another folder")
        return Folder(place, key, writable, encrypted=False, _made=key)
    if len(record) != 2 or record[0] != CIPHER:
        raise StoreFormatError(f"the store {str(place)!r} is encrypted by {record!r}, this version knows {CIPHER!r}")
    if secret is None:
        raise StoreFormatError(f"the store {str(place)!r} is encrypted: give its key, for example in AGENTCACHE_KEY")
    if not hmac.compare_digest(record[1].encode(), _check_value(secret, key).encode()):
        raise StoreFormatError(f"the store {str(place)!r} is encrypted with another key: give that one, or name another folder")
    # not the key alone: the folder would confirm guesses of its contents
    mac_key = blake3(b"agentcache authentication" + key, key=secret).digest()
    return Folder(place, mac_key, writable, encrypted=True, _cipher=_cipher(secret, key), _made=key)


def _check_value(secret: bytes, mac_key: bytes) -> str:
    return blake3(b"agentcache encryption check" + mac_key, key=secret).hexdigest()


def _cipher(secret: bytes, mac_key: bytes) -> Any:
    """Its key is derived for this store: two stores under one secret never share nonces."""
    try:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    except ImportError as error:
        raise StoreError("an encrypted store needs cryptography: pip install 'agentcache-llm[encryption]'") from error
    return AESGCM(blake3(b"agentcache encryption" + mac_key, key=secret).digest())
