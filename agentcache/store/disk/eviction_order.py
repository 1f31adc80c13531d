"""Order in which pages are evicted from disk. Knows no folders and removes nothing.

quarantined first, then by role, least recently used first; a page only once no child of it stays, in whatever precision; pinned ones never
"""

from __future__ import annotations

import heapq
import sqlite3
from collections.abc import Container, Iterator

Key = tuple[bytes, str]  # page key, fingerprint
Candidate = tuple[tuple[bool, int, int], int, int, Key, Key]  # rank, id, bytes, key, key of the parent
COLUMNS = "bad IS NULL, role, used, id, bytes, page_key, parent, fingerprint"


def _children(connection: sqlite3.Connection, key: Key) -> int:
    sql = "SELECT count(*) FROM pages WHERE parent = ? AND fingerprint = ?"
    return int(connection.execute(sql, key).fetchone()[0])


def victims(connection: sqlite3.Connection, need_bytes: int, held: Container[int]) -> list[int]:
    """Ids of the pages to evict for so many bytes, in order; all there is, if that does not suffice."""
    chosen: list[int] = []
    left: dict[Key, int] = {}  # children that stay
    passed: dict[Key, list[Candidate]] = {}  # were due, but had children
    freed: list[Candidate] = []  # were due, and lost their last child since
    freed_bytes = 0
    order = _order(connection)
    while freed_bytes < need_bytes:
        found = heapq.heappop(freed) if freed else next(order, None)
        if found is None:
            break
        _, id, size, key, parent = found
        if id in held:
            continue
        if key not in left:
            left[key] = _children(connection, key)
        if left[key]:
            passed.setdefault(key, []).append(found)
            continue
        chosen.append(id)
        freed_bytes += size
        left[parent] = left[parent] - 1 if parent in left else _children(connection, parent) - 1
        if not left[parent]:
            for due in passed.pop(parent, ()):
                heapq.heappush(freed, due)
    return chosen


def _order(connection: sqlite3.Connection) -> Iterator[Candidate]:
    for condition in ("NOT NULL", "NULL"):
        for good, role, used, id, size, key, parent, fingerprint in connection.execute(
            f"SELECT {COLUMNS} FROM pages WHERE bad IS {condition} ORDER BY role, used"
        ):
            yield (bool(good), role, used), id, size, (key, fingerprint), (parent, fingerprint)
