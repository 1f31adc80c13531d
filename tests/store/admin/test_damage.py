"""Whatever the index says, an engine starts and `verify --fix` mends it: flipped bits, tables that say what no writer wrote."""

from __future__ import annotations

import random
import re
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentcache.errors import StoreCorruptError, StoreWarning
from agentcache.store.admin.check import pages_of, verify
from agentcache.store.deletion import Deletion
from agentcache.store.disk.folder import Folder
from agentcache.store.disk.index import Index
from agentcache.store.keys import Role, Scope
from agentcache.store.store import Store
from agentcache.types import StoreOptions
from tests.engines import chat, decode, engine
from tests.store.index_rows import DEAD, leases_of, random_ids, run_sql
from tests.store.stocked_store import reads_back, store_group
from tests.store.stored_pages import noise_page

FLIPS = 48  # a tenth of a second each: a store is opened, verified, mended and verified


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of five pages with something in every table."""
    folder = Folder.open(tmp_path_factory.mktemp("made") / "store")
    with Index(folder) as index:
        rows = store_group(index, random_ids(1200), "harbour")
        store_group(index, random_ids(700, 1), role=Role.TURN)
        index.put_splices([("tests", b"k" * 32, b"abcd")])
        index.set_meta("read_rate", "1.0 2.0")
        index.add_counters({"hits": 3})
        index.pin([rows[0].id], DEAD)
        leases_of(index, DEAD).take(b"k" * 32, "weights")
    return folder.path


@pytest.fixture
def store(made: Path, tmp_path: Path) -> Folder:
    shutil.copytree(made, tmp_path / "store")
    return Folder.open(tmp_path / "store")


def starts(folder: Folder) -> bool:
    """Whether an engine's store opens it; else it opens without."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        opened = Store.open(1 << 24, 0, StoreOptions(folder.path))
    assert [warning.category for warning in said] == ([] if opened.disk else [StoreWarning])
    opened.close()
    return opened.disk is not None


def mends(folder: Folder) -> None:
    """verify names what it finds, --fix mends it, nothing is found after that, and no page is lost."""
    verify(folder)
    report = verify(folder, fix=True)
    assert report.sound, report.problems
    assert verify(folder).problems == []
    with Index(folder) as index:
        rows = list(index.rows())
        assert (len(rows), index.total()[0]) == (5, 5)
    assert reads_back(folder, rows)


def flips(content: bytes, seed: int, count: int) -> Iterator[tuple[int, int]]:
    """Byte and bit: in turn of the header, of the tables' text with what stands around it, and of any row."""
    chance = random.Random(seed)
    texts = [at for found in re.finditer(rb"CREATE [\x20-\x7e\n]+", content) for at in range(found.start() - 60, found.end())]
    rows = [at for at in range(4096, len(content)) if content[at]]
    for number in range(count):
        yield chance.choice((range(100), texts, rows)[number % 3]), chance.randrange(8)


def test_one_flipped_bit_anywhere_neither_stops_an_engine_nor_stays(store: Folder) -> None:
    good = store.index.read_bytes()
    refused = 0
    for at, bit in flips(good, 27, FLIPS):
        damaged = bytearray(good)
        damaged[at] ^= 1 << bit
        store.index.write_bytes(damaged)
        refused += not starts(store)
        mends(store)
    assert refused > FLIPS // 5, "hardly a flip hit anything: this test shows nothing"


SAID = {
    "no totals": "DELETE FROM totals",
    "two totals": "INSERT INTO totals SELECT * FROM totals",
    "totals of 2^62": "UPDATE totals SET bytes = 1 << 62",
    "totals that are text": "UPDATE totals SET clock = 'late'",
    "pages of 2^62": "UPDATE pages SET bytes = 1 << 62",
    "uses of 2^62": "UPDATE pages SET used = 1 << 62",
    "groups of 2^62": "UPDATE groups SET used = 1 << 62",
    "counters of 2^63": "UPDATE counters SET value = 0x7fffffffffffffff",
    "a process that is a number": "UPDATE pins SET process = x'31', since = 'now'",
    "a process that is no UTF-8": "UPDATE pins SET process = CAST(x'ff31' AS TEXT)",
    "a lease of a number": "UPDATE leases SET process = x'00'",
    "a name that is no UTF-8": "UPDATE groups SET name = CAST(x'ff' AS TEXT)",
    "a table more": "CREATE TABLE more (id INTEGER)",
    "a trigger less": "DROP TRIGGER pages_less",
    "an older version": "PRAGMA user_version=1",
    "a later version": "PRAGMA user_version=3",
    "no version": "PRAGMA user_version=0",
    "another program's": "PRAGMA application_id=7",
    "another fingerprint": "UPDATE pages SET regime = 'other'",
}


@pytest.mark.parametrize("said", SAID)
def test_what_no_writer_wrote_is_mended(store: Folder, said: str) -> None:
    run_sql(store, SAID[said])
    starts(store)
    mends(store)
    with Index(store) as index:
        assert index.pinned() == set()
        (group,) = index.groups() or (None,)
        assert group is not None or "name" in said or "groups" in said
        assert group is None or None not in pages_of(index, group)


@pytest.mark.parametrize("table", ["pages", "segments", "deletions"])
@pytest.mark.parametrize("number", [1 << 53, (1 << 63) - 1, -7, "'x'"])
def test_a_table_without_next_row_number_is_mended(store: Folder, table: str, number: int | str) -> None:
    with Index(store) as index:  # something in every table, and a number given last
        index.record_deletion(Deletion("nobody"))
        index.database.write(lambda c: c.execute("INSERT INTO segments VALUES (NULL, 'tests', 'w', '', x'00', x'00', 1.0, 1)"))
    run_sql(store, f"UPDATE sqlite_sequence SET seq = {number} WHERE name = '{table}'")
    assert any(table in problem.why for problem in verify(store).problems)
    mends(store)
    with Index(store) as index:
        assert len(store_group(index, random_ids(700, 3))) == 2
        index.record_deletion(Deletion("nobody"))
        assert 0 < index.generation() < 4


@pytest.mark.parametrize("said", ["totals of 2^62", "an older version", "a trigger less"])
def test_an_engine_answers_without_the_index_it_cannot_believe(store: Folder, tiny: Any, said: str) -> None:
    run_sql(store, SAID[said])
    with pytest.warns(StoreWarning, match="verify --fix"):  # noqa: SIM117
        with engine(model=tiny("qwen3"), store=store.path) as running:
            assert len(running.generate(chat("hello"), sampling=decode(2)).ids) == 2
    mends(store)


def test_values_that_cannot_be_are_damage_and_not_a_fault(store: Folder) -> None:
    with Index(store) as index:
        for wrong in (TypeError("None"), ValueError("\\xff"), OverflowError("2^64"), UnicodeDecodeError("utf-8", b"\xff", 0, 1, "no")):
            with pytest.raises(StoreCorruptError, match="verify --fix"):
                index.database.read(lambda connection, wrong=wrong: (_ for _ in ()).throw(wrong))  # type: ignore[misc]


def test_totals_that_are_too_large_cost_no_page(store: Folder) -> None:
    """Making room believed them, and evicted everything."""
    run_sql(store, "UPDATE totals SET bytes = bytes + (1 << 40)")
    opened = Store(1 << 26, options=StoreOptions(store.path, disk_bytes=1 << 30))
    assert opened.disk is not None
    opened.admit(Scope("tests", "weights"), random_ids(512, 9), [noise_page()], "n")
    assert opened.flush()
    assert opened.disk.index.total()[0] == 6
    opened.close()
    assert verify(store).problems == []
