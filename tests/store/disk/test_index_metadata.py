"""What the index keeps beside pages, and what deleting leaves behind: nothing."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from agentcache.errors import StoreBusyError, StoreCorruptError
from agentcache.store.admin.prune import prune
from agentcache.store.deletion import Deletion
from agentcache.store.disk import index_metadata, process_identity
from agentcache.store.disk.folder import Folder
from agentcache.store.disk.index import Index
from agentcache.store.disk.leases import Lease
from agentcache.store.keys import Scope
from agentcache.store.tool_group import ToolGroup
from tests.store.index_rows import DEAD, ME, SCOPE, added_rows, forks, leases_of, random_ids, rows_of_prompt, run_in_forks, run_sql

FOREIGN = "1.2.0123456789ab"
OTHER = Scope("other", "fp", "")
GROUP = ToolGroup("tools", "ns", "fp", "", 600, ("ab" * 32, "cd" * 32), ("b", "a"), "model", ("l0", "l1"), 5.0)


@pytest.fixture(params=["clear", "sealed"])
def folder(tmp_path: Path, request: pytest.FixtureRequest) -> Folder:
    return Folder.open(tmp_path / "store", key=bytes(range(32)) if request.param == "sealed" else None)


@pytest.fixture
def index(folder: Folder) -> Iterator[Index]:
    with Index(folder) as opened:
        yield opened


# -- pins and leases -----------------------------------------------------------------------------------------------


def test_pins_are_counted(index: Index) -> None:
    row = added_rows(index, random_ids(20))[0]
    assert index.pin([row.id, 99], ME) == [row.id]
    index.pin([row.id], ME)
    index.release_pins([row.id], ME)
    assert index.remove([row.id]) == []
    index.release_pins([row.id], DEAD)
    assert index.remove([row.id]) == []
    index.release_pins([row.id], ME)
    assert [gone.id for gone in index.remove([row.id])] == [row.id]


def test_pins_of_the_dead_are_dropped(folder: Folder, index: Index) -> None:
    first, second = added_rows(index, random_ids(600))
    index.pin([first.id], ME)
    index.pin([first.id, second.id], DEAD)
    index.pin([second.id], FOREIGN)
    assert index.drop_dead_pins() == 2
    assert run_sql(folder, "SELECT page, process FROM pins ORDER BY page") == [(first.id, ME), (second.id, FOREIGN)]
    assert index.remove([second.id]) == []
    run_sql(folder, "UPDATE pins SET since = since - 90000 WHERE process = ?", FOREIGN)  # another container: a day is believed
    assert [row.id for row in index.remove([second.id])] == [second.id]
    index.release_pins([first.id], ME)
    assert index.stats()["pins"] == 0


def test_one_computes_and_the_others_know_who(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    holder = f"{child.pid}.{process_identity._start(child.pid)}.{ME.rpartition('.')[2]}"
    try:
        began = time.time()
        assert leases_of(index, holder).take(b"key", "fp") is None
        found = leases_of(index, ME).take(b"key", "fp")
        assert found is not None
        assert found.process == holder
        assert began <= found.since <= time.time()
        assert leases_of(index, ME).take(b"key", "other") is None
        leases_of(index, ME).release(b"key", "fp")  # not its own
        assert leases_of(index, ME).take(b"key", "fp") == found
    finally:
        child.kill()
        child.wait()
    assert leases_of(index, ME).take(b"key", "fp") is None  # taken over from the dead
    again = leases_of(index, ME).take(b"key", "fp")
    assert again is not None
    assert again.process == ME
    leases_of(index, ME).release(b"key", "fp")
    assert leases_of(index, ME).take(b"key", "fp") is None


@forks
def test_of_many_who_claim_one_gets_it(folder: Folder, index: Index, tmp_path: Path) -> None:
    tried, got = tmp_path / "tried", tmp_path / "got"
    tried.mkdir()
    got.mkdir()

    def claim() -> Lease | None:
        while True:
            with suppress(StoreBusyError):  # on a loaded machine, where others hold the file for more than a moment
                return leases_of(index, process_identity.token()).take(b"key", "fp")

    def child() -> None:
        if claim() is None:
            (got / process_identity.token()).touch()
        (tried / process_identity.token()).touch()
        until = time.monotonic() + 60
        while len(os.listdir(tried)) < 4 and time.monotonic() < until:  # a lease ends with its process
            time.sleep(0.01)

    run_in_forks(*[child] * 4)
    assert len(os.listdir(got)) == 1
    assert leases_of(index, ME).take(b"key", "fp") is None


# -- tool groups, splices, rates -----------------------------------------------------------------------------------


def test_groups_by_name(index: Index) -> None:
    newer = replace(GROUP, fingerprint="fp2", page_keys=("ef" * 32,))
    elsewhere = replace(GROUP, namespace="other")
    for group in (GROUP, newer, elsewhere):
        index.put_group(group)
    assert index.group("ns", "tools", "fp") == GROUP
    assert index.group("ns", "tools", "fp2") == newer
    assert index.group("ns", "tool", "fp") is None
    assert index.groups("ns") == [GROUP, newer]
    assert index.groups() == [GROUP, newer, elsewhere]
    changed = replace(GROUP, prefix_tokens=700)
    index.put_group(changed)
    assert index.groups("ns", "tools") == [newer, changed]
    assert index.drop_group("ns", "tools", "fp") == 1
    assert index.groups("ns") == [newer]
    assert index.drop_group("ns", "tools") == 1
    assert index.drop_group("ns", "tools") == 0


def test_of_groups_without_pages_the_last_ones_stay(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_metadata, "MOST_GONE", 2)
    kept = added_rows(index, random_ids(20))[0]
    index.put_group(replace(GROUP, fingerprint=kept.fingerprint, page_keys=(kept.page_key.hex(),)))
    index.put_splices([("ns", bytes([number] * 16), b"ids") for number in range(6)])
    for number in range(6):
        index.put_group(replace(GROUP, name=f"gone {number}", splices=((bytes([number] * 16)).hex(),)))
    assert [group.name for group in index.groups()] == ["tools", "gone 4", "gone 5"]
    assert [index.splice("ns", bytes([number] * 16)) for number in (3, 4)] == [None, b"ids"]


def test_ids_that_a_fork_names_stay_with_it(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_metadata, "MOST_GONE", 1)
    index.put_splices([("ns", bytes([number] * 16), b"ids") for number in range(2)])
    names = [(bytes([number] * 16)).hex() for number in range(2)]
    index.put_group(replace(GROUP, name="alice", splices=tuple(names)))
    index.put_group(replace(GROUP, name="bob", splices=(names[1],)))
    assert [group.name for group in index.groups()] == ["bob"]
    assert [index.splice("ns", bytes([number] * 16)) for number in range(2)] == [None, b"ids"]


def test_splices(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_metadata, "MOST_SPLICES", 5)
    index.put_splices([("ns", bytes([i]), b"ids%d" % i) for i in range(5)])
    index.put_splices([("ns", bytes([0]), b"again")])
    index.put_splices([("other", bytes([0]), b"there")])
    assert index.splice("ns", bytes([0])) == b"again"
    assert index.splice("other", bytes([0])) == b"there"
    assert index.splice("ns", bytes([1])) is None  # the longest unused
    assert index.splice("ns", bytes([2])) == b"ids2"
    assert index.stats()["splices"] == 5


@pytest.mark.parametrize("how", ["flip", "swap", "text", "empty"])
def test_damaged_words_are_not_believed(folder: Folder, index: Index, how: str) -> None:
    """What no page vouches for is authenticated on its own: a flipped id of a splice would be a wrong token."""
    other = replace(GROUP, name="others")
    index.put_splices([("ns", b"a", b"1111"), ("ns", b"b", b"2222")])
    index.set_meta("a", "1.5")
    index.set_meta("b", "2.5")
    for group in (GROUP, other):
        index.put_group(group)
    places = (("splices", "ids", "key", b"a", b"b"), ("meta", "value", "key", "a", "b"), ("groups", "manifest", "name", "tools", "others"))
    for table, column, key, first, second in places:
        value, stranger = (run_sql(folder, f"SELECT {column} FROM {table} WHERE {key} = ?", name)[0][0] for name in (first, second))
        changed = {"flip": value[:-1] + bytes([value[-1] ^ 4]), "swap": stranger, "text": "text", "empty": b""}[how]
        run_sql(folder, f"UPDATE {table} SET {column} = ? WHERE {key} = ?", changed, first)
    assert index.splice("ns", b"a") is None
    assert index.splice("ns", b"b") == b"2222"
    assert index.get_meta("a") is None
    assert index.get_meta("b") == "2.5"
    assert index.groups() == [other]


def test_rates_and_counters(index: Index) -> None:
    assert index.get_meta("read_rate") is None
    index.set_meta("read_rate", "1.5")
    index.set_meta("read_rate", "2.5")
    assert index.get_meta("read_rate") == "2.5"
    index.add_counters({"hits": 2, "misses": 1})
    index.add_counters({"hits": 3})
    index.add_counters({})
    assert index.counters() == {"hits": 5, "misses": 1}


def test_stats_count_everything(index: Index) -> None:
    index.add(rows_of_prompt(random_ids(600), role=2))
    index.add(rows_of_prompt(random_ids(600, 1), OTHER, precision="int8", bytes=7))
    row = next(index.rows())
    index.pin([row.id], ME)
    index.quarantine(row.id, "x")
    leases_of(index, ME).take(b"k", "fp")
    index.put_group(GROUP)
    index.put_splices([("ns", b"a", b"1111")])
    index.add_counters({"hits": 1})
    each = {"rows": 2, "bytes": 200}, {"rows": 2, "bytes": 14}
    assert index.stats() == {
        "rows": 4, "bytes": 214, "tokens": 1200, "quarantined": 1, "groups": 1, "splices": 1, "segments": 0, "pins": 1, "leases": 1,
        "by_role": {2: each[0], 0: each[1]}, "by_precision": {"exact": each[0], "int8": each[1]},
        "by_namespace": {"ns": each[0], "other": each[1]}, "counters": {"hits": 1},
    }  # fmt: skip


# -- deleting ------------------------------------------------------------------------------------------------------


def stored(folder: Folder) -> bytes:
    return b"".join(path.read_bytes() for path in folder.path.iterdir() if path.is_file())


def test_a_namespace_is_deleted_without_a_trace(folder: Folder, index: Index) -> None:
    ids = random_ids(600)
    mine, others = added_rows(index, ids), added_rows(index, random_ids(600, 1), scope=OTHER)
    index.pin([mine[0].id], ME)
    index.put_group(GROUP)
    index.put_group(replace(GROUP, namespace="other"))
    index.put_splices([("ns", b"a", b"my own words"), ("other", b"a", b"words of others")])
    if not folder.encrypted:
        assert ids[:512].tobytes() in stored(folder)
        assert b"my own words" in stored(folder)
    assert prune(folder, index, namespace="ns", force=True).pages == len(mine)
    for trace in (ids[:512].tobytes(), ids[512:].tobytes(), b"my own words", ids[:4].tobytes()):
        assert trace not in stored(folder)
    assert [row.id for row in index.rows()] == [row.id for row in others]
    assert [group.namespace for group in index.groups()] == ["other"]
    assert index.splice("other", b"a") == b"words of others"
    assert index.stats()["pins"] == 0
    assert prune(folder, index, force=True).pages == len(others)
    assert (index.total(), index.groups(), index.splice("other", b"a")) == ((0, 0), [], None)


def test_what_is_old_is_deleted(folder: Folder, index: Index) -> None:
    index.put_splices([("ns", b"a", b"old"), ("ns", b"b", b"new")])
    run_sql(folder, "UPDATE splices SET created = created - 1000 WHERE key = ?", b"a")
    index.put_group(GROUP)  # made in 1970
    old, new = added_rows(index, random_ids(20), created=time.time() - 1000), added_rows(index, random_ids(20, 1))
    far = added_rows(index, random_ids(20), scope=OTHER, created=time.time() - 1000)
    assert prune(folder, index, namespace="ns", older_than=500).pages == len(old)
    assert {row.id for row in index.rows()} == {new[0].id, far[0].id}
    assert (index.splice("ns", b"a"), index.splice("ns", b"b"), index.groups()) == (None, b"new", [])
    assert prune(folder, index, older_than=500).pages == len(far)
    assert prune(folder, index, older_than=500).pages == 0


def test_an_encrypted_index_shows_no_ids(tmp_path: Path) -> None:
    folder = Folder.open(tmp_path / "store", key=bytes(range(32)))
    ids = random_ids(700)
    with Index(folder) as index:
        index.add(rows_of_prompt(ids))
        index.put_splices([("ns", b"a", b"my own words")])
        index.put_group(replace(GROUP, model="secret-model"))
        assert [common for _, common in index.longest(SCOPE, ids, 690)] == [512, 178]
        for trace in (ids[:4].tobytes(), b"my own words", b"secret-model"):
            assert trace not in stored(folder)


# -- deletions -----------------------------------------------------------------------------------------------------


def test_deletions_are_numbered_and_told(folder: Folder, index: Index) -> None:
    before, number = folder.generation_stat, index.generation()
    mine, old = Deletion("ns"), Deletion(None, 5.5, False)
    group = Deletion.of_group(GROUP, [replace(GROUP, name="other", page_keys=GROUP.page_keys[:1])], forced=True)
    assert group.keys == (bytes.fromhex(GROUP.page_keys[1]),), "what another group shares stays"
    for done in (mine, old, group):
        index.record_deletion(done)
        assert folder.generation_stat != before, "nobody who looks can miss it"
        before = folder.generation_stat
    assert index.generation() == number + 3
    assert index.deletions(number) == [replace(done, generation=number + at) for at, done in enumerate((mine, old, group), 1)]
    assert index.deletions(number + 3) == []
    assert index.deletions(number + 4) == [Deletion(generation=number + 3)], "another index: let go of everything"
    run_sql(folder, "UPDATE deletions SET namespace = x'00'")
    assert index.deletions(number + 2) == [Deletion(generation=number + 3)], "damaged: let go of everything"


def test_many_delete_at_once(folder: Folder, index: Index) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda at: index.record_deletion(Deletion(str(at))), range(24)))
    assert {done.namespace for done in index.deletions(0)} == {str(at) for at in range(24)}
    assert 1 <= int((folder.path / "generation").read_text()) <= 24


def test_who_missed_too_many_deletions_lets_go_of_everything(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentcache.store.disk.index_metadata.MOST", 2)
    for name in "abc":
        index.record_deletion(Deletion(name))
    assert [done.namespace for done in index.deletions(1)] == ["b", "c"]
    assert index.deletions(0) == [Deletion(generation=3)]


def test_what_was_deleted_is_not_written_after_it(index: Index) -> None:
    since = index.generation()
    index.record_deletion(Deletion("ns"))
    index.put_group(GROUP, since)
    index.put_splices([("ns", b"k" * 16, b"ids!"), ("other", b"k" * 16, b"ids!")], since, 1.0)
    assert index.groups() == []
    assert index.splice("ns", b"k" * 16) is None
    assert index.splice("other", b"k" * 16) == b"ids!"
    index.put_group(GROUP, index.generation())
    assert index.groups() == [GROUP], "what was received later is"


def test_a_manifest_holds_nothing_of_one_call() -> None:
    made = replace(GROUP, kv_bytes=4096, computed_tokens=600, warm_ms=12.5)
    wanted = (
        '{"created": 5.0, "fingerprint": "fp", "layers": ["l0", "l1"], "model": "model", "name": "tools", "namespace": "ns", '
        f'"pages": ["{"ab" * 32}", "{"cd" * 32}"], "prefix_tokens": 600, "regime": "", "tools": ["b", "a"]}}'
    )
    assert made.to_json() == GROUP.to_json() == wanted
    assert (ToolGroup.from_json(wanted), made) == (GROUP, GROUP)
    assert ToolGroup.from_json(wanted).kv_bytes == 0
    with pytest.raises(StoreCorruptError):
        ToolGroup.from_json(wanted.replace('"regime"', '"kv_bytes": 1, "regime"'))
