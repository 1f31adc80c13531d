"""One SQLite file shared by many processes and threads: a connection for each, whole writes or none, typed errors. Knows no rows.

SQLite keeps book of its file locks per process, and a fork inherits the book without the locks. So no connection is open while a process
forks: all are closed before, and opened again where they are used after.
"""

from __future__ import annotations

import functools
import os
import shutil
import sqlite3
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from ...errors import StoreBusyError, StoreCorruptError, StoreError, StoreFormatError, StoreFullError
from ...private import PLAIN, lock
from .folder import LOCK, Folder
from .schema import SCHEMA, VERSION

T = TypeVar("T")
Use = Callable[[sqlite3.Connection], T]
APPLICATION = 0x61676361  # "agca": this SQLite file is ours
BUSY_S = 10.0  # how long a lock is waited for
BRIEF_S = 0.02  # by a request that has something better to do
PAUSE_S = (0.001, 0.05)  # between tries, doubling
CACHE_KIB = 8192
FORESEEN = 16  # later versions of the tables; any other number than theirs and those of earlier ones is damage
LOG_PAGES = 1000  # of the write-ahead log, before they go into the file
LEAST_ROOM = 1 << 20  # bytes that must be free on a disk whose errors are not for want of room
OUTSIDE = ("unable to open", "readonly", "disk i/o", "out of memory", "interrupted")  # trouble that need not come from the file

_guard = threading.Lock()
_databases: weakref.WeakSet[Database] = weakref.WeakSet()


@dataclass(slots=True, eq=False)
class _Link:
    """One thread's connection. lock: held while it is used. file: of which file it is."""

    thread: threading.Thread
    lock: threading.RLock = field(default_factory=threading.RLock)
    connection: sqlite3.Connection | None = None
    file: tuple[int, ...] = ()

    def close(self) -> None:
        if self.connection is not None:
            self.connection.close()
            self.connection = None


class Database:
    """read() and write() from any thread; close() once. The tables of schema.py are made where they are missing.

    path: of a database in the making, which no other process knows; None for the folder's index. unshared: on a disk without room for the
    memory that processes share, lock all others out instead of failing. Not for long.
    """

    def __init__(self, folder: Folder, path: Path | None = None, *, unshared: bool = False) -> None:
        self.folder = folder
        self.path = path or folder.index
        self._shared = path is None
        self._unshared = unshared
        self._closed = False
        self._use = -1
        self._fresh()
        with _guard:
            _databases.add(self)
        try:
            self.read(lambda connection: None)
        except BaseException:
            self.close()
            raise

    def _fresh(self) -> None:
        """Without connections: at the start, and in a child after a fork."""
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._links: list[_Link] = []
        self._local = threading.local()

    # -- using it --------------------------------------------------------------------------------------------------

    def read(self, use: Use[T]) -> T:
        """Return what `use` does; it is called again if the file was busy."""
        return self._persist(use, BUSY_S)

    def write(self, use: Use[T], brief: bool = False) -> T:
        """The same in a transaction of its own. Only in a writable folder. brief: wait for no lock longer than BRIEF_S, nor for the log."""
        assert self.folder.writable

        def transact(connection: sqlite3.Connection) -> T:
            connection.execute(f"PRAGMA busy_timeout={round((BRIEF_S if brief else BUSY_S / 2) * 1e3)}")
            connection.execute(f"PRAGMA wal_autocheckpoint={0 if brief else LOG_PAGES}")
            with transaction(connection):
                return use(connection)

        return self._persist(transact, BRIEF_S if brief else BUSY_S)

    def empty_log(self) -> bool:
        """Leave no copy of deleted rows in the write-ahead log. False: others read it all the time, or it is not ours to write."""

        def empty(connection: sqlite3.Connection) -> None:
            if connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]:
                raise sqlite3.OperationalError("the log is locked")  # by another checkpoint, which SQLite does not wait for

        if self.folder.writable:
            with suppress(StoreBusyError):
                self.read(empty)
                return True
        return False

    def close(self) -> None:
        """Close the connections of all threads. Later use raises StoreError."""
        self._closed = True
        with self._lock:
            for link in self._links:
                with link.lock:
                    link.close()
            self._links.clear()
            if self._use >= 0:
                os.close(self._use)
                self._use = -1

    def _check_open(self) -> None:
        if self._closed:
            raise StoreError(f"the index {str(self.path)!r} was closed")

    def _persist(self, use: Use[T], patience_s: float) -> T:
        link = self._link()
        until, pause = time.monotonic() + patience_s, PAUSE_S[0]
        while True:
            with link.lock:
                try:
                    return use(self._connection(link))
                except sqlite3.Error as error:
                    if not _busy(error) or time.monotonic() > until:
                        raise _named(error, self.path) from error
                except UnicodeEncodeError as error:
                    raise StoreError(f"{error.object[:80]!r} names nothing in a store: give a text that UTF-8 can write") from error
                except OSError as error:
                    if isinstance(error, StoreError):
                        raise
                    raise StoreError(f"the index {str(self.path)!r} cannot be used: {error}") from error
                except (ValueError, TypeError, LookupError, ArithmeticError) as error:  # values that no writer of ours put there
                    raise corrupt(self.path, f"{type(error).__name__}: {error}") from error
                except BaseException:  # an interrupt, which may leave a transaction open
                    link.close()
                    raise
            time.sleep(pause)
            pause = min(2 * pause, PAUSE_S[1])

    # -- connections -----------------------------------------------------------------------------------------------

    def _link(self) -> _Link:
        self._check_open()
        if self._pid != os.getpid():  # forked by something that runs no hooks of Python: these connections are the parent's
            _abandoned.append(self._links)
            self._fresh()
        link: _Link | None = getattr(self._local, "link", None)
        if link is None:
            link = _Link(threading.current_thread())
            with self._lock:
                self._check_open()  # it may have been closed since: a late thread must not lock the file again
                if self._use < 0 and self._shared and self.folder.writable:  # no process may replace a file that is in use
                    self._use = lock_index(self.folder, shared=True)
                for ended in [other for other in self._links if not other.thread.is_alive()]:
                    ended.close()
                    self._links.remove(ended)
                self._links.append(link)
            self._local.link = link
        return link

    def _connection(self, link: _Link) -> sqlite3.Connection:
        """Called with the link's lock held."""
        self._check_open()
        file = _state(self.path, whole=not self.folder.writable)
        if link.connection is not None and link.file != file:  # replaced (by rebuild) or, where read without locks, changed
            link.close()
        if link.connection is None:
            self.folder.check_same()  # a folder that was made anew has another key: nothing of ours belongs there
            link.connection = self._open() if self.folder.writable else self._open_read_only()
            link.file = _state(self.path, whole=not self.folder.writable) if -1 in file else file  # the next use sees a change
        return link.connection

    def _open(self) -> sqlite3.Connection:
        # SQLite would let others read it. Never for a file that is there: closing it would drop this process's locks on it.
        with suppress(FileExistsError):
            os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
        uri = f"{self.path.as_uri()}?mode=rw"
        try:
            return self._connect(uri, self._make)
        except sqlite3.OperationalError as error:
            if not self._unshared or _busy(error):
                raise
            return self._connect(uri, self._make, "locking_mode=EXCLUSIVE")

    def _connect(self, uri: str, prepare: Callable[[sqlite3.Connection], object], *first: str) -> sqlite3.Connection:
        connection = sqlite3.connect(uri, uri=True, timeout=BUSY_S / 2, isolation_level=None, check_same_thread=False)
        try:
            usual = ("foreign_keys=ON", "synchronous=NORMAL", "secure_delete=ON", f"cache_size=-{CACHE_KIB}", "temp_store=MEMORY")
            for setting in (*first, *usual):
                connection.execute(f"PRAGMA {setting}")
            prepare(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def _make(self, connection: sqlite3.Connection) -> None:
        """Make the tables unless they are there."""
        if self._has_tables(connection):
            return
        if self._shared and any(self.folder.blobs.glob("*/*.safetensors")) and not self._has_tables(connection):  # nor made meanwhile
            raise corrupt(self.path, "it is empty, yet there are pages")
        mode = connection.execute("PRAGMA journal_mode=WAL").fetchone()[0]
        if mode != "wal":
            raise StoreError(
                f"the file system of {str(self.path)!r} cannot share a database (journal mode {mode!r}): name a folder on a local disk"
            )
        with transaction(connection):
            if not self._has_tables(connection):
                _create(connection)
                connection.execute(f"PRAGMA application_id={APPLICATION}")
                connection.execute(f"PRAGMA user_version={VERSION}")

    def _check_tables(self, connection: sqlite3.Connection) -> None:
        if not self._has_tables(connection):
            raise corrupt(self.path, "it has no tables")

    def _has_tables(self, connection: sqlite3.Connection) -> bool:
        tables = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]  # first: another process may be making them
        application = connection.execute("PRAGMA application_id").fetchone()[0]
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        if application == APPLICATION:
            ours = _made(connection) == _meant()
            if version == VERSION:
                if not ours:
                    raise corrupt(self.path, "its tables are not those that were made")
                return True
            if not ours and 0 < version <= VERSION + FORESEEN:
                raise StoreFormatError(
                    f"{str(self.path)!r} is of version {version!r}, this one reads {VERSION!r}: name another folder, or delete it"
                )
            raise corrupt(self.path, f"it says version {version!r}, where {VERSION!r} belongs")
        if tables:
            raise corrupt(self.path, f"it is a database of something else (application {application:#x})")
        return False

    def _open_read_only(self) -> sqlite3.Connection:
        """Open it without writing: where there is a WAL, it is read along."""
        if not self.path.exists():
            return self._connect("file::memory:", _create)
        wal = Path(f"{self.path}-wal")
        logged = wal.exists() and wal.stat().st_size > 0
        return self._connect(f"{self.path.as_uri()}?mode=ro{'' if logged else '&immutable=1'}", self._check_tables)


@contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """A transaction over the block: as a whole, or not at all."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    finally:
        if connection.in_transaction:
            connection.execute("ROLLBACK")


def lock_index(folder: Folder, shared: bool = False) -> int:
    """Lock the index against all other processes that do not share it; close the descriptor to end that. StoreError if one uses it."""
    try:
        fd = os.open(folder.path / LOCK, os.O_RDWR | os.O_CREAT | PLAIN, 0o600)
    except OSError as error:
        raise StoreError(f"the index of {str(folder.path)!r} cannot be locked: {error}") from error
    try:
        lock(fd, shared=shared)
    except OSError as error:
        os.close(fd)
        raise StoreError(
            f"the index of {str(folder.path)!r} is in use or being rebuilt by another process: try again when that has ended"
        ) from error
    return fd


def _create(connection: sqlite3.Connection) -> None:
    for statement in SCHEMA.split(";;"):
        connection.execute(statement)


def _made(connection: sqlite3.Connection) -> frozenset[tuple[str, ...]]:
    """Tables, indexes and triggers as a file declares them."""
    return frozenset(connection.execute("SELECT type, name, tbl_name, sql FROM sqlite_master"))


@functools.cache
def _meant() -> frozenset[tuple[str, ...]]:
    """Tables, indexes and triggers of the schema."""
    with closing(sqlite3.connect(":memory:")) as connection:
        _create(connection)
        return _made(connection)


def _state(path: Path, whole: bool) -> tuple[int, ...]:
    """Identity of a file; whole: and of its contents, with its WAL."""
    found: list[int] = []
    for name in (path, f"{path}-wal") if whole else (path,):
        try:
            status = os.stat(name)
        except FileNotFoundError:
            found.append(-1)
            continue
        found += [status.st_dev, status.st_ino, *((status.st_size, status.st_mtime_ns) if whole else ())]
    return tuple(found)


# -- errors --------------------------------------------------------------------------------------------------------


def _busy(error: sqlite3.Error) -> bool:
    return isinstance(error, sqlite3.OperationalError) and ("locked" in str(error) or "busy" in str(error))


def corrupt(path: Path, why: str) -> StoreCorruptError:
    """The error that says so, and the way out."""
    return StoreCorruptError(f"the index {str(path)!r} is damaged: {why}; `agentcache verify --fix` makes it anew from the pages")


def _named(error: sqlite3.Error, path: Path) -> StoreError:
    said = str(error)
    if _busy(error):
        return StoreBusyError(f"the index {str(path)!r} was locked by other processes for too long: {said}")
    if "full" in said or ("disk i/o" in said.lower() and shutil.disk_usage(path.parent).free < LEAST_ROOM):
        return StoreFullError(f"the index {str(path)!r} cannot grow: {said}; make room, or prune the store")
    misused = not isinstance(error, sqlite3.DatabaseError) or isinstance(error, sqlite3.ProgrammingError)
    if misused or any(word in said.lower() for word in OUTSIDE):
        return StoreError(f"the index {str(path)!r} cannot be used: {said}")
    return corrupt(path, said)  # our statements fit our tables


# -- forks ---------------------------------------------------------------------------------------------------------

_abandoned: list[list[_Link]] = []  # referenced for ever, because dropping a connection closes it
_frozen: list[tuple[Database, list[_Link]]] = []


def _before_fork() -> None:
    """Wait until no thread uses a connection, and close all."""
    _guard.acquire()
    for database in list(_databases):
        database._lock.acquire()
        links = list(database._links)
        for link in links:
            link.lock.acquire()
            link.close()
        _frozen.append((database, links))


def _after_fork_in_parent() -> None:
    for database, links in _frozen:
        for link in links:
            link.lock.release()
        database._lock.release()
    _frozen.clear()
    _guard.release()


def _after_fork_in_child() -> None:
    for database, _ in _frozen:
        database._fresh()
        if database._use >= 0:  # a copy of the parent's: closing it leaves the parent's lock alone
            os.close(database._use)
            database._use = -1
    _frozen.clear()
    _guard.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
