"""The index with 100,000 rows: as fast as with few, because every statement goes by an index of its table."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from agentcache.store.disk.folder import Folder
from agentcache.store.disk.index import Index
from agentcache.store.disk.schema import COLUMNS
from agentcache.store.keys import chain
from tests.store.index_rows import ME, SCOPE, leases_of, random_ids, rows_of_prompt, run_sql


def fill(folder: Folder, count: int) -> None:
    """So many rows of other prompts; a tenth of them continue one page, as those of one system prompt do."""
    shared = chain(SCOPE.root, random_ids(512))[0]
    run_sql(
        folder,
        "WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < ?) INSERT INTO pages "
        "SELECT NULL, randomblob(32), CASE WHEN i % 10 THEN randomblob(32) ELSE ? END, 'ns', 'fp', '', 1, 4, randomblob(16), 'here', "
        "'exact', i % 3, 'float32', '[[1, 1, 1]]', 0, i || '', 100, 0.0, i, 0, NULL, randomblob(8) FROM n",
        count,
        shared,
    )


def timed(folder: Folder) -> dict[str, float]:
    """The best of several, in seconds."""
    ids = np.concatenate([random_ids(512 * 4), random_ids(200, 1)])
    other = np.concatenate([ids[:2048], random_ids(200, 2)])
    calls: dict[str, Callable[[Index], object]] = {
        "open": lambda _: Index(folder).close(),
        "hit": lambda index: index.longest(SCOPE, ids, len(ids) - 1),
        "other tail": lambda index: index.longest(SCOPE, other, len(other)),
        "miss": lambda index: index.longest(SCOPE, random_ids(2000, 3), 1999),
        "total": lambda index: index.total(),
        "victims": lambda index: index.victims(1600),
        "has blobs": lambda index: index.has_blobs(["7", "none"]),
    }
    best = dict.fromkeys(calls, 1e9)
    with Index(folder) as index:
        index.add(rows_of_prompt(ids))
        assert sum(common for _, common in index.longest(SCOPE, ids, len(ids) - 1)) == len(ids) - 1
        for _ in range(15):
            for name, call in calls.items():
                began = time.perf_counter()
                call(index)
                best[name] = min(best[name], time.perf_counter() - began)
    return best


@pytest.mark.alone
def test_a_hundred_times_the_rows_cost_little_more(tmp_path: Path) -> None:
    took = {}
    for count in (1_000, 100_000):
        folder = Folder.open(tmp_path / str(count))
        with Index(folder) as index:
            assert index.total() == (0, 0)
            fill(folder, count)
            assert index.total() == (count, 100 * count)
        took[count] = timed(folder)
    for name, seconds in took[100_000].items():
        assert seconds < 8 * took[1_000][name] + 0.001, (name, took)


def test_no_lookup_walks_the_table(tmp_path: Path) -> None:
    """Every statement of a request, of making room and of a sweep goes by an index, and sorts nothing."""
    with Index(Folder.open(tmp_path / "store")) as index:
        walks(index)


def walks(index: Index) -> None:
    index.add(rows_of_prompt(random_ids(1100)))
    asked: set[str] = set()
    connection = index.database.read(lambda connection: connection)
    connection.set_trace_callback(asked.add)
    index.longest(SCOPE, random_ids(1100), 1050)
    index.row(b"k" * 32, "fp")
    index.victims(1 << 40)
    index.touch([1])
    index.pin([1], ME)
    index.add(rows_of_prompt(random_ids(800)))
    index.remove([1])
    index.total()
    index.has_blobs(["x"])
    index.quarantine(1, "x")
    index.splice("ns", b"k")
    index.put_splices([("ns", b"k", b"1234")])
    leases_of(index, ME).take(b"k", "fp")
    connection.set_trace_callback(None)
    queries = {sql for sql in asked if sql.split()[0] in ("SELECT", "UPDATE", "DELETE", "INSERT")}
    assert any(COLUMNS in sql for sql in queries)
    plans = {sql: [step[3] for step in connection.execute(f"EXPLAIN QUERY PLAN {sql}")] for sql in queries}
    for sql, steps in plans.items():
        for step in steps:
            small = any(step.startswith(f"SCAN {table}") for table in ("totals", "pins"))
            ordered = step.startswith("SCAN pages USING INDEX pages_order") or "USING INDEX pages_bad" in step
            assert small or ordered or not step.startswith("SCAN"), (sql, steps)
            assert "TEMP B-TREE" not in step or "pins" in sql or "bad IS NULL, role" in sql, (sql, steps)
    assert any("pages_under" in step for steps in plans.values() for step in steps)
