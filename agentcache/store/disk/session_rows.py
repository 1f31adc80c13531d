"""Rows of pages that sessions name: kept as a prefix is, retired once no manifest names them, leases that are over. Knows no memory.

retired    role of a turn, used longest ago: the first that go where room is short
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..keys import Role
from . import blob_files
from .index import Index


def keep(index: Index, keys: Iterable[str], fingerprint: str) -> None:
    """Let pages (keys in hexadecimal) be evicted after all turns."""
    blob_files.remove(index.folder, index.promote(_ids(index, keys, fingerprint), Role.PREFIX))


def retire(index: Index, keys: Iterable[str], fingerprint: str) -> frozenset[bytes]:
    """Let those of these pages be evicted first that no manifest names; returns their keys."""
    named = {key for group in index.groups() if group.fingerprint == fingerprint for key in group.page_keys}
    gone = [key for key in keys if key not in named]
    rows = [(int(Role.TURN), id, int(Role.GROUP)) for id in _ids(index, gone, fingerprint)]
    if rows and index.folder.writable:
        sql = "UPDATE pages SET role = ?, used = 0 WHERE id = ? AND role < ?"
        index.database.write(lambda connection: connection.executemany(sql, rows))
    return frozenset(map(bytes.fromhex, gone))


def end_leases(index: Index) -> None:
    """Forget the sessions whose lease is over, and retire their pages."""
    over = [group for group in index.groups() if group.over]
    if over and index.folder.writable:
        # one that was recorded again meanwhile has another time
        sql = "DELETE FROM groups WHERE namespace = ? AND name = ? AND fingerprint = ? AND created = ?"
        values = [(one.namespace, one.name, one.fingerprint, one.created) for one in over]
        index.database.write(lambda connection: connection.executemany(sql, values))
        for one in over:
            retire(index, (*one.page_keys, *one.superseded), one.fingerprint)


def _ids(index: Index, keys: Iterable[str], fingerprint: str) -> Sequence[int]:
    sql = "SELECT id FROM pages WHERE page_key = ? AND fingerprint = ?"
    wanted = [(bytes.fromhex(key), fingerprint) for key in keys]
    return index.database.read(lambda connection: [id for one in wanted for (id,) in connection.execute(sql, one)])
