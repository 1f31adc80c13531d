"""The check that everything is stored as it was written: finds damage, and mends it. Knows no requests, and prints nothing.

damaged index     made anew from what the pages say of themselves      page without a row      deleted once its writer is dead
changed row       made anew from what its page says of itself          unfinished page         likewise
changed page      its row and its blob deleted: it is computed again   quarantined page        deleted, it was never served
row without page  deleted
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import get_args

from ...errors import BlobError, StoreBusyError, StoreError, StoreFormatError, StoreFullError, StorePermissionError
from ...types import PAGE_TOKENS, Precision
from ..disk import blob_files
from ..disk.folder import Folder
from ..disk.index import Index
from ..disk.schema import Row
from ..keys import page_key
from ..tool_group import ToolGroup
from .rebuild import rebuild

Progress = Callable[[int, int], None]  # bytes looked at so far, of how many


@dataclass(frozen=True, slots=True)
class Problem:
    """Damage that the check found."""

    kind: str  # index, page, missing, quarantined, orphan, part or deleted
    name: str  # of the file
    why: str
    bytes: int = 0
    mended: bool = False  # it is gone, or made anew


@dataclass(slots=True)
class Report:
    """Pages that were checked, and the problems found. rebuilt: rows of the new index, None if it stayed."""

    pages: int = 0
    bytes: int = 0
    problems: list[Problem] = field(default_factory=list)
    rebuilt: int | None = None

    @property
    def sound(self) -> bool:
        """Tell whether nothing is wrong, or nothing is any more."""
        return all(problem.mended for problem in self.problems)


def verify(folder: Folder, *, fix: bool = False, progress: Progress = lambda done, total: None) -> Report:
    """Check the index, every byte of every page, and every file. fix: mend damage, and touch nothing else.

    Pages that another process evicts meanwhile are no problem; nor are files that a running process has not finished.
    """
    if fix and not folder.writable:
        raise StorePermissionError(f"the store {str(folder.path)!r} is read-only: nothing can be mended")
    report = Report()
    index = _sound_index(folder, report, fix)
    if index is None:
        _check_files(folder, report, progress)
        return report
    with index:
        _check_rows(folder, index, report, fix, progress)
        report.problems += _orphans(folder, index, fix)
    return report


# -- the index -----------------------------------------------------------------------------------------------------


def index_problems(folder: Folder, fix: bool = False) -> list[str]:
    """Problems of the index, in words. fix: whether it may be written to."""
    try:
        with Index(folder, unshared=True) as index:
            found = index.check()
            lost = int(str(index.stats()["groups"])) - len(index.groups())
            if fix:
                index.drop_dead_pins()
            return [*found, f"{lost} manifests of tool groups are damaged"] if lost > 0 else found
    except (StoreBusyError, StoreFormatError, StoreFullError):
        raise
    except StoreError as error:  # damaged, or as good as that
        return [str(error)]


def _sound_index(folder: Folder, report: Report, fix: bool) -> Index | None:
    """The index, made anew where it is damaged and that is asked for; None: it is damaged."""
    found = index_problems(folder, fix)
    problems = [Problem("index", folder.index.name, why) for why in found]
    if found and fix:
        try:
            report.rebuilt = rebuild(folder, rows_of_blobs(folder))
            problems = [replace(problem, mended=True) for problem in problems]
        except StoreError as error:  # another process is using it
            problems.append(Problem("index", folder.index.name, str(error)))
    report.problems += problems
    return Index(folder, unshared=True) if report.rebuilt is not None or not found else None


def rows_of_blobs(folder: Folder) -> Iterator[Row]:
    """The rows of all finished blobs, by their own metadata; damaged blobs are left out."""
    from ..disk import blob_io

    for file in blob_files.files(folder):
        if file.suffix == blob_files.WHOLE:
            with suppress(BlobError):
                yield blob_io.describe(folder, file.name)


# -- pages ---------------------------------------------------------------------------------------------------------


def _check_rows(folder: Folder, index: Index, report: Report, fix: bool, progress: Progress) -> None:
    total = index.total()[1]
    for row in index.rows():
        problem = _problem(folder, row)
        report.pages += 1
        report.bytes += row.bytes
        progress(report.bytes, max(total, report.bytes))
        if problem is None or not _still(index, row):
            continue
        report.problems.append(replace(problem, mended=fix and _mend(folder, index, row, problem)))


def _mend(folder: Folder, index: Index, row: Row, problem: Problem) -> bool:
    if problem.kind != "index":
        return delete(folder, index, [row.id])[0] > 0
    from ..disk import blob_io

    mended = replace(blob_io.describe(folder, row.blob), role=row.role, used=row.used, hits=row.hits)
    gone = index.remove([row.id], force=True)
    index.restore([mended])
    return bool(gone)


def _problem(folder: Folder, row: Row) -> Problem | None:
    """The problem of a page, None if it is sound. Errors that are no bad blob, such as too many open files, are raised."""
    from ..disk import blob_io

    if row.bad is not None:
        return Problem("quarantined", row.blob, row.bad, row.bytes)
    try:
        blob_io.verify(folder, row)
    except BlobError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            return Problem("missing", row.blob, "there is no such file", 0)
        with suppress(BlobError):  # the page is as it was written, and vouched for: its row is not
            blob_io.verify(folder, blob_io.describe(folder, row.blob))
            return Problem("index", row.blob, str(error), row.bytes)
        return Problem("page", row.blob, str(error), row.bytes)
    return None


def _still(index: Index, row: Row) -> bool:
    """Tell whether the row is as it was listed: others evict and replace pages while we look at them."""
    if index.folder.writable:  # a deletion whose blobs go first is waited for
        index.database.write(lambda connection: None)
    now = index.row(row.page_key, row.fingerprint, row.precision)
    return now is not None and (now.id, now.blob) == (row.id, row.blob)


def _check_files(folder: Folder, report: Report, progress: Progress) -> None:
    """Without an index: each page against itself."""
    from ..disk import blob_io

    finished = [file for file in blob_files.files(folder) if file.suffix == blob_files.WHOLE]
    total = sum(file.bytes for file in finished)
    for file in finished:
        try:
            blob_io.verify(folder, blob_io.describe(folder, file.name))
        except BlobError as error:
            report.problems.append(Problem("page", file.name, str(error), file.bytes))
        report.pages += 1
        report.bytes += file.bytes
        progress(report.bytes, total)


# -- what dead processes left --------------------------------------------------------------------------------------


def _orphans(folder: Folder, index: Index, fix: bool) -> list[Problem]:
    found, _ = (blob_files.sweep if fix else blob_files.orphans)(folder, index.has_blobs)
    words = {
        blob_files.WHOLE: ("orphan", "no row of the index names it"),
        blob_files.PART: ("part", "its writer died before it was finished"),
        blob_files.DELETED: ("deleted", "it waits to be overwritten"),
    }
    return [Problem(words[file.suffix][0], file.name, words[file.suffix][1], file.bytes, mended=fix) for file in found]


def delete(folder: Folder, index: Index, ids: Iterable[int], force: bool = True, blobs_first: bool = False) -> tuple[int, int]:
    """Remove rows, then their blobs; returns (pages, bytes). On a full disk one by one, and the blob first.

    blobs_first: a process that is killed between then leaves rows, which `finish_deletions` deletes, and no blob without a row.
    """
    wanted = list(ids)
    failed: list[StoreError] = []

    def free(row: Row) -> None:
        try:
            with suppress(BlobError, StoreBusyError):  # a name that no blob can have; a blob that waits to be overwritten
                blob_files.unlink(folder, row.blob)
        except StoreError as error:  # Windows deletes no file that is open: the others go all the same
            failed.append(error)

    try:
        gone = index.remove(wanted, force=force, freeing=free if blobs_first else None)
        left = [] if blobs_first else gone
    except StoreFullError:
        gone, left = [row for id in wanted for row in index.remove([id], force=force, freeing=free)], []
    for row in left:
        free(row)
    if failed:
        raise failed[0]
    return len(gone), sum(row.bytes for row in gone)


# -- tool groups ---------------------------------------------------------------------------------------------------


def pages_of(index: Index, group: ToolGroup, precisions: Sequence[str] = ()) -> list[Row | None]:
    """The rows of a group's pages, each in its of `precisions`, by default in the most exact one stored; None where one is missing.

    The last page may be stored with more tokens than the group has: a prompt that begins with the group went on in it.
    """
    found: list[Row | None] = []
    for at, key in enumerate(group.page_keys):
        kinds = (precisions[at],) if precisions else get_args(Precision)
        own = list(index.rows(key=bytes.fromhex(key), fingerprint=group.fingerprint))
        longer = list(grown(index, group)) if at == group.pages - 1 else []
        served = (row for rows in (own, longer) for kind in kinds for row in rows if row.precision == kind and row.bad is None)
        found.append(next(served, None))
    return found


def grown(index: Index, group: ToolGroup) -> Iterator[Row]:
    """The rows of longer pages that begin with a group's last page."""
    tokens = group.prefix_tokens - PAGE_TOKENS * (group.pages - 1)
    parent = bytes.fromhex(group.page_keys[-2]) if group.pages > 1 else group.scope.root
    for row in index.rows(parent=parent, fingerprint=group.fingerprint):
        if 0 < tokens < row.tokens and page_key(parent, row.ids[:tokens]) == group.tip:
            yield row
