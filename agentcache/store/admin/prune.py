"""Deleting pages by age, namespace, tool group or down to a size, and what belongs to them. Knows no requests, and prints nothing.

Pages that a running process has pinned stay, with those that they continue, unless the caller forces it.
"""

from __future__ import annotations

import json
import math
import secrets
import time
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice

import numpy as np

from ...errors import StoreBusyError, StoreFullError, StorePermissionError
from ..deletion import Deletion
from ..disk import blob_files, process_identity, session_rows
from ..disk.folder import Folder
from ..disk.index import Index
from ..disk.index_metadata import DELETING
from ..disk.schema import Row
from ..keys import Scope
from ..tool_group import ToolGroup
from .check import delete, grown, pages_of

NO_IDS = np.zeros(0, np.uint32)
BATCH = 64  # rows removed, and blobs unlinked, in one transaction: others wait for it


@dataclass(slots=True)
class Pruned:
    """Counts of deletions, or of a dry run. kept: pages that stay, since running processes have pinned them or pages that continue
    them. orphans: files that dead processes had left, and `orphan_bytes` in them.
    """

    pages: int = 0
    bytes: int = 0
    kept: int = 0
    kept_bytes: int = 0
    groups: list[str] = field(default_factory=list)
    splices: int = 0
    orphans: int = 0
    orphan_bytes: int = 0


def prune(
    folder: Folder, index: Index, *, namespace: str | None = None, older_than: float | None = None, group: ToolGroup | str | None = None,
    max_bytes: int | None = None, force: bool = False, dry_run: bool = False,
) -> Pruned:  # fmt: skip
    """Delete pages, with their groups and the model's own ids, of a namespace and an age (None: all); or one group; or down to a size.

    older_than: seconds since a page was made; with a group, since the deletion began that `finish_deletions` resumes. group: its pages and
    those that continue them, except those that other groups share; or the digest of an adapter, whose pages and groups go. max_bytes: in
    the order of eviction. force: also pages that running processes have pinned. Leftovers of dead processes go in any case.
    """
    if not folder.writable and not dry_run:
        raise StorePermissionError(f"the store {str(folder.path)!r} is read-only: nothing can be deleted")
    before = None if older_than is None else time.time() - older_than  # once: what is made from now on stays
    # first what frees room: on a full disk nothing can be written before
    left, _ = (blob_files.orphans if dry_run else blob_files.sweep)(folder, index.has_blobs)
    if not dry_run:
        session_rows.end_leases(index)
    resumed = group is not None and before is not None  # recorded when it began: recorded again, groups warmed since would go
    unrecorded = None if dry_run or max_bytes is not None or resumed else _deletion(index, namespace, before, group, force)
    if unrecorded is not None:
        with suppress(StoreFullError):  # before any page goes: pages that running processes write until then are found below
            index.record_deletion(unrecorded)
            unrecorded = None
    unfinished = ""
    if not dry_run and max_bytes is None and unrecorded is None:
        unfinished = _record_unfinished(index, namespace, before, group, force)
    protected = set() if force else _pinned_lineage(index)
    wanted, names = (_surplus(index, max_bytes, force), []) if max_bytes is not None else _chosen(index, namespace, before, group)
    names = [found for found in names if not any(row is not None and row.id in protected for row in pages_of(index, found))]
    going = [row for row in wanted if row.id not in protected]
    done = Pruned(groups=[found.name for found in names])
    done.kept, done.kept_bytes = len(wanted) - len(going), sum(row.bytes for row in wanted if row.id in protected)
    done.orphans, done.orphan_bytes = len(left), sum(file.bytes for file in left)
    if dry_run:
        done.pages, done.bytes = len(going), sum(row.bytes for row in going)
        return done
    done.pages, done.bytes = _remove(folder, index, going, force, bool(unfinished))
    if unrecorded is not None:  # the disk was full, for all who write
        index.record_deletion(unrecorded)
    for found in names:
        until = found.created or math.inf  # not one that was recorded meanwhile, but the last but one where the last waits to be written
        index.drop_group(found.namespace, found.name, found.fingerprint, until)
    if max_bytes is None and group is None:
        done.splices = index.drop_texts("splices", namespace, before)
        index.drop_texts("segments", namespace, before)
    if isinstance(group, ToolGroup):
        others = {name for other in index.groups(group.namespace) for name in other.splices}
        done.splices = index.drop_named_splices(group.namespace, [name for name in group.splices if name not in others])
    if group is not None or before is not None:
        _drop_text(index, going)
    index.drop_dead_pins()
    if index.database.empty_log() and unfinished:  # else the next opening finishes it
        index.drop_meta(unfinished)
    _check_overwritten(folder)
    return done


def _drop_text(index: Index, gone: Iterable[Row]) -> None:
    """Forget the indexed text of these pages: rows of text may be younger than their page."""
    stood = defaultdict[tuple[str, str], set[bytes]](set)
    for row in gone:
        stood[row.namespace, row.fingerprint].add(row.parent)
    for (namespace, fingerprint), parents in stood.items():
        staying = {one: [row.ids for row in index.rows(fingerprint=fingerprint, parent=one)] for one in parents}
        index.drop_segments_under(namespace, fingerprint, staying)


def _check_overwritten(folder: Folder) -> None:
    if not folder.overwrite:
        return
    waiting = 0
    for file in blob_files.files(folder):
        if file.suffix == blob_files.DELETED:
            try:
                blob_files.unlink(folder, file.name, file.suffix)
            except StoreBusyError:
                waiting += 1
    if waiting:
        said = f"{waiting} deleted pages are not overwritten yet: running processes have them in memory until their next request"
        raise StoreBusyError(f"{said}; `agentcache prune` or opening the store after that overwrites them")


def finish_deletions(folder: Folder, index: Index) -> None:
    """Finish the deletions of processes that ended amid them."""
    for key, text in index.unfinished():
        with suppress(ValueError, KeyError):  # damaged: `verify` finds pages that stayed
            recorded = json.loads(text)
            group = ToolGroup.from_json(recorded["group"]) if recorded["group"] else recorded["adapter"]
            age = max(0.0, time.time() - recorded["before"])
            prune(folder, index, namespace=recorded["namespace"], older_than=age, group=group, force=recorded["force"])
        index.drop_meta(key)


def _record_unfinished(index: Index, namespace: str | None, before: float | None, group: ToolGroup | str | None, force: bool) -> str:
    """Write down the deletion that begins, for `finish_deletions`; returns its key, empty on a full disk."""
    before = time.time() if before is None else before  # what comes later stays
    whole, adapter = (group.to_json(), None) if isinstance(group, ToolGroup) else ("", group)
    key = f"{DELETING}/{secrets.token_hex(4)}/{process_identity.token()}"
    with suppress(StoreFullError):
        said = {"namespace": namespace, "before": before, "group": whole, "adapter": adapter, "force": force}
        index.set_meta(key, json.dumps(said))
        return key
    return ""


def _deletion(index: Index, namespace: str | None, before: float | None, group: ToolGroup | str | None, force: bool) -> Deletion:
    if isinstance(group, str):
        return Deletion(namespace, forced=force, fingerprint=f"+{group}")
    if group is None:
        return Deletion(namespace, before, force)
    return Deletion.of_group(group, (other for other in index.groups() if _group_key(other) != _group_key(group)), force)


def _light(row: Row) -> Row:
    """A row by which pages are chosen: with the ids of all, rows would be a lot of memory."""
    return replace(row, ids=NO_IDS)


def _remove(folder: Folder, index: Index, rows: Iterable[Row], force: bool, blobs_first: bool) -> tuple[int, int]:
    """Delete rows, last pages first; returns how many pages and bytes. Pages pinned since they were chosen stay."""
    left = iter(sorted(rows, key=lambda row: -row.place))
    count = size = 0
    while batch := [row.id for row in islice(left, BATCH)]:
        more, bytes = delete(folder, index, batch, force, blobs_first)
        count, size = count + more, size + bytes
        if not force and more < len(batch):  # they have continuations that stay, or are pinned now
            protected = _pinned_lineage(index)
            more, bytes = delete(folder, index, [id for id in batch if id not in protected], blobs_first=blobs_first)
            count, size = count + more, size + bytes
    return count, size


def _pinned_lineage(index: Index) -> set[int]:
    """Ids of the pages that running processes have pinned, and of those that these continue."""
    pinned = index.pinned()
    if not pinned:
        return set()
    rows: dict[tuple[str, bytes], list[Row]] = {}  # one page in several precisions
    for row in map(_light, index.rows()):
        rows.setdefault((row.fingerprint, row.page_key), []).append(row)
    protected: set[int] = set()
    due = [row for same in rows.values() for row in same if row.id in pinned]
    while due:
        row = due.pop()
        if row.id not in protected:
            protected.add(row.id)
            due += rows.get((row.fingerprint, row.parent), ())
    return protected


def _chosen(index: Index, namespace: str | None, before: float | None, group: ToolGroup | str | None) -> tuple[list[Row], list[ToolGroup]]:
    """The pages and the tool groups to delete."""
    if isinstance(group, ToolGroup):
        return _continuing(index, group, before), [group]
    rows = (row for row in index.rows(namespace=namespace, before=before) if group in (None, Scope(row.namespace, row.fingerprint).adapter))
    found = [one for one in index.groups(namespace) if group in (None, one.adapter) and (before is None or one.created < before)]
    return [_light(row) for row in rows], found


def _continuing(index: Index, group: ToolGroup, begun: float | None) -> list[Row]:
    """A group's pages and all that continue them, except those of other groups, of one recorded since the deletion `begun`, too."""
    since, blobs = math.inf if begun is None else begun, index.folder.blobs
    others = [one for one in index.groups() if (_group_key(one) != _group_key(group) or one.created >= since) and group.spares(one)]
    kept = {key for other in others for key in other.page_keys}  # not what another group's last page has become
    rows = (row for other in others for row in pages_of(index, other) if row is not None and row.page_key.hex() in kept)
    shared = {row.id for row in rows if begun is None or (blobs / row.blob[:2] / f"{row.blob}{blob_files.WHOLE}").exists()}
    below: dict[tuple[str, bytes], list[Row]] = {}
    for row in map(_light, index.rows(fingerprint=group.fingerprint)):
        below.setdefault((row.fingerprint, row.parent), []).append(row)
    own = {bytes.fromhex(key) for key in (*group.page_keys, *group.superseded)}
    found: dict[int, Row] = {}
    due = [row for same in below.values() for row in same if row.page_key in own and row.id not in shared]
    due += [_light(row) for row in grown(index, group) if row.id not in shared]
    while due:
        row = due.pop()
        if row.id not in found:
            found[row.id] = row
            due += [child for child in below.get((row.fingerprint, row.page_key), ()) if child.id not in shared]
    return list(found.values())


def _group_key(group: ToolGroup) -> tuple[str, str, str]:
    return group.namespace, group.name, group.fingerprint


def _surplus(index: Index, max_bytes: int, force: bool) -> list[Row]:
    """Pages to delete down to a size, in the store's order of eviction; forced: then pinned pages, too."""
    need = index.total()[1] - max_bytes
    if need <= 0:
        return []
    chosen = [_light(row) for row in index.victims(need)]
    need -= sum(row.bytes for row in chosen)
    if not force or need <= 0:
        return chosen
    known = {row.id for row in chosen}
    for row in sorted(index.rows(), key=lambda row: (row.role, -row.place, row.used)):
        if need > 0 and row.id not in known:
            chosen.append(_light(row))
            need -= row.bytes
    return chosen
