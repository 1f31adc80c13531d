"""Rows of the store's index without pages behind them, and light children. Knows no models."""

from __future__ import annotations

import multiprocessing
import os
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

import numpy as np
import pytest

from agentcache.kv import PAGE_TOKENS
from agentcache.store.disk import process_identity
from agentcache.store.disk.folder import Folder
from agentcache.store.disk.index import Index, Row
from agentcache.store.disk.leases import Leases
from agentcache.store.keys import Ids, Scope, chain

FORK = multiprocessing.get_context("fork")
forks = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # the children use neither torch nor its threads
SCOPE = Scope("ns", "fp", "")
ME = process_identity.token()
DEAD = f"1.1.{ME.rpartition('.')[2]}"  # pid 1 did not start then


def random_ids(count: int, seed: int = 0) -> Ids:
    """Token ids; the shorter of two with one seed begins the longer."""
    return np.random.default_rng(seed).integers(0, 50_000, count).astype(np.uint32)


def rows_of_prompt(ids: Ids, scope: Scope = SCOPE, **more: Any) -> list[Row]:
    """The rows of a prompt, root first."""
    rows, parent = [], scope.root
    for place, key in enumerate(chain(scope.root, ids)):
        page = ids[place * PAGE_TOKENS : (place + 1) * PAGE_TOKENS]
        values = {"numerics": frozenset({"here"}), "precision": "exact", "role": 0, "created": time.time(), "bytes": 100, **more}
        values.setdefault("blob", f"{key.hex()}-{os.urandom(4).hex()}")
        shape: dict[str, Any] = {"dtype": "bfloat16", "widths": ((1, 8, 8),) * 2}
        head = {"namespace": scope.namespace, "fingerprint": scope.fingerprint, "regime": scope.regime}
        rows.append(Row(id=0, page_key=key, parent=parent, place=place, tokens=len(page), ids=page, **head, **shape, **values))
        parent = key
    return rows


def added_rows(index: Index, ids: Ids, **more: Any) -> list[Row]:
    """Add a prompt's pages; the rows as the index has them."""
    rows = rows_of_prompt(ids, **more)
    index.add(rows)
    return [found for row in rows if (found := index.row(row.page_key, row.fingerprint, row.precision)) is not None]


def leases_of(index: Index, process: str = ME) -> Leases:
    """The leases of a process, whose jobs run at once."""
    return Leases(index, process, lambda job: job())


def run_sql(folder: Folder, sql: str, *values: object) -> list[Any]:
    """Behind the index's back."""
    with closing(sqlite3.connect(folder.index)) as connection, connection:
        return connection.execute(sql, values).fetchall()


def run_in_forks(*children: Callable[[], None]) -> None:
    """Run these in forked children at once; all must succeed."""
    workers = [FORK.Process(target=child) for child in children]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(120)
    assert [worker.exitcode for worker in workers] == [0] * len(workers)
