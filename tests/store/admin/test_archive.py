"""A tool group as one file: what comes out is what went in, and what is not as it should be is refused and leaves nothing behind."""

from __future__ import annotations

import json
import os
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from blake3 import blake3
from safetensors import safe_open

from agentcache.errors import AgentCacheError, BlobError, ConfigError, StoreError, StoreFormatError, StoreFullError, StorePermissionError
from agentcache.kv_spec import KVSpec
from agentcache.private import lock
from agentcache.store.admin import archive
from agentcache.store.admin.archive import export_group, import_group, open_archive
from agentcache.store.admin.check import pages_of
from agentcache.store.disk import blob, blob_files, blob_io, process_identity
from agentcache.store.disk.folder import Folder
from agentcache.store.disk.index import Index
from agentcache.store.disk.schema import Row
from agentcache.store.keys import Role, Scope, chain
from agentcache.types import Precision
from tests.store.index_rows import random_ids
from tests.store.stocked_store import blob_bytes, manifest_of, page_of_row, reads_back, rows_of_group, store_group
from tests.store.stored_pages import SPECS, blob_path, edit_file, read_page, same_numbers

PROMPT = random_ids(1200)
PRECISIONS: tuple[Precision, ...] = ("exact", "int8", "int4")


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    """Of a store with the group `harbour`."""
    monkeypatch.delenv("AGENTCACHE_KEY", raising=False)
    with Index(Folder.open(tmp_path / "here")) as opened:
        store_group(opened, PROMPT, "harbour")
        yield opened


@pytest.fixture
def other(tmp_path: Path, index: Index) -> Iterator[Index]:
    """Of an empty store."""
    with Index(Folder.open(tmp_path / "there")) as opened:
        yield opened


@pytest.fixture
def file(tmp_path: Path, index: Index) -> Path:
    """The group as an archive."""
    export_group(index.folder, index, index.groups()[0], tmp_path / "harbour.group")
    return tmp_path / "harbour.group"


def untouched(index: Index) -> bool:
    """Whether a store is as empty as it was made."""
    return index.total() == (0, 0) and index.groups() == [] and blob_bytes(index.folder) == {}


# -- there and back --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("known", ["shorter", "both"])
def test_a_shorter_page_that_is_mapped_fails_no_import(tmp_path: Path, file: Path, known: str) -> None:
    with Index(Folder.open(tmp_path / "there", overwrite=True)) as index, ExitStack() as readers:
        shorter = store_group(index, PROMPT[:1100], role=Role.PREFIX)[-1]
        if known == "both":
            store_group(index, PROMPT, role=Role.TURN)
        fd, _ = blob_files.open_file(index.folder, shorter.blob)
        readers.callback(os.close, fd)
        lock(fd, shared=True)  # as who maps it
        import_group(index.folder, index, file)
        assert all(pages_of(index, index.groups()[0]))
        assert index.row(shorter.page_key, shorter.fingerprint) is None
        assert [one.name for one in blob_files.files(index.folder) if one.suffix == blob_files.DELETED] == [shorter.blob]


def test_what_is_imported_is_what_was_exported(index: Index, other: Index, file: Path) -> None:
    told: list[tuple[int, int]] = []
    done = import_group(other.folder, other, file, progress=lambda at, total: told.append((at, total)))
    assert (done.written, done.known, done.bytes) == (3, 0, other.total()[1])
    assert told[-1][0] <= told[-1][1]
    here, there = index.groups()[0], other.groups()[0]
    assert replace(there, created=here.created) == here
    rows = [row for row in pages_of(other, there) if row]
    assert reads_back(other.folder, rows)
    assert [row.role for row in rows] == [Role.GROUP] * 3
    for old, new in zip(pages_of(index, here), rows, strict=True):
        assert old is not None
        assert (new.page_key, new.parent, new.numerics, new.tokens) == (old.page_key, old.parent, old.numerics, old.tokens)
        assert new.created > old.created
    hits = other.longest(Scope("tests", "weights"), PROMPT, len(PROMPT))
    assert sum(run for _, run in hits) == len(PROMPT)


def test_a_page_of_an_archive_is_a_safetensors_file(file: Path, tmp_path: Path) -> None:
    assert file.stat().st_mode & 0o777 == 0o600
    with open_archive(file) as (group, pages):
        start = pages[2].start
    assert group.name == "harbour"
    (tmp_path / "page").write_bytes(file.read_bytes()[start:])
    with safe_open(tmp_path / "page", "pt") as read:
        page = page_of_row(rows_of_group(PROMPT, Scope("tests", "weights"))[2])
        assert torch.equal(read.get_tensor("keys.1"), page.keys[1, :, :, :176])
        assert torch.equal(read.get_tensor("values.0"), page.values[0, :, :176])
        assert read.get_tensor("ids").tolist() == PROMPT[1024:].tolist()


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("kept", [1300, 1401])
def test_of_a_page_stored_longer_only_the_groups_tokens_leave(
    index: Index, other: Index, tmp_path: Path, precision: Precision, kept: int, spec: KVSpec
) -> None:
    scope, prompt = Scope("longer", "weights", precision=precision), random_ids(kept, 7)
    rows = store_group(index, prompt, scope=scope, spec=spec)
    exported = manifest_of(prompt[:1171], "harbour", scope)
    export_group(index.folder, index, exported, tmp_path / "file")
    import_group(other.folder, other, tmp_path / "file")
    row = pages_of(other, other.groups()[0])[2]
    assert row is not None
    assert (row.tokens, row.precision, row.ids.tolist(), row.widths) == (147, precision, prompt[1024:1171].tolist(), spec.layer_widths)
    assert same_numbers(read_page(index.folder, rows[2]), read_page(other.folder, row), 147)
    content = (tmp_path / "file").read_bytes()
    assert prompt[1171:1200].tobytes() not in content


def test_another_name_and_namespace_have_other_keys(other: Index, file: Path) -> None:
    done = import_group(other.folder, other, file, name="../../etc/passwd", namespace="a/b")
    assert (done.group.name, done.group.namespace) == ("../../etc/passwd", "a/b")
    scope = Scope("a/b", "weights")
    assert list(done.group.page_keys) == [key.hex() for key in chain(scope.root, PROMPT)]
    assert sum(run for _, run in other.longest(scope, PROMPT, len(PROMPT))) == len(PROMPT)
    assert other.longest(Scope("tests", "weights"), PROMPT, len(PROMPT)) == []
    assert reads_back(other.folder, list(other.rows()))
    assert {found.relative_to(other.folder.path).parts[0] for found in blob_bytes(other.folder)} == {"blobs"}


@pytest.mark.parametrize("name", [None, "papers/old", "papers/old/0a"])
def test_renamed_texts_are_learnt_under_that_name(index: Index, other: Index, tmp_path: Path, name: str | None) -> None:
    index.put_group(pack := replace(index.groups()[0], name="notes/0a", sources=(("one", "ab", 1200),)))
    export_group(index.folder, index, pack, tmp_path / "notes.group")
    group = import_group(other.folder, other, tmp_path / "notes.group", name=name).group
    assert (group.name, group.documents) == (("papers/old/0a", "papers/old") if name else ("notes/0a", "notes"))


def test_importing_twice_writes_once(other: Index, file: Path) -> None:
    import_group(other.folder, other, file)
    before = blob_bytes(other.folder)
    done = import_group(other.folder, other, file)
    assert (done.written, done.known, done.bytes) == (0, 3, 0)
    assert blob_bytes(other.folder) == before
    assert len(other.groups()) == 1


def test_only_what_is_missing_is_written(other: Index, file: Path) -> None:
    store_group(other, PROMPT[:1024], role=Role.TURN)
    first, second = other.rows()
    other.quarantine(second.id, "bad")
    done = import_group(other.folder, other, file)
    assert (done.written, done.known) == (2, 1)
    rows = [row for row in pages_of(other, done.group) if row]
    assert rows[0].id == first.id
    assert [row.role for row in rows] == [Role.GROUP] * 3
    assert len(blob_bytes(other.folder)) == other.total()[0] == 3
    assert reads_back(other.folder, rows)


def test_a_longer_last_page_is_there_already(other: Index, file: Path) -> None:
    store_group(other, random_ids(1300))
    assert import_group(other.folder, other, file).written == 0


def test_other_contents_under_the_same_name_are_refused(other: Index, file: Path) -> None:
    store_group(other, random_ids(600, 4), "harbour")
    before = blob_bytes(other.folder)
    with pytest.raises(ConfigError, match="give --name"):
        import_group(other.folder, other, file)
    assert blob_bytes(other.folder) == before
    assert import_group(other.folder, other, file, name="port").written == 3
    store_group(other, random_ids(600, 4), "port", scope=Scope("tests", "other weights"))
    assert import_group(other.folder, other, file, name="port").known == 3


# -- encryption ------------------------------------------------------------------------------------------------------


def test_an_encrypted_store_exports_only_when_told_so(tmp_path: Path, other: Index) -> None:
    folder = Folder.open(tmp_path / "sealed", key=b"k" * 32)
    with Index(folder) as index:
        store_group(index, PROMPT, "harbour")
        with pytest.raises(StoreError, match="--clear"):
            export_group(folder, index, index.groups()[0], tmp_path / "file")
        assert not (tmp_path / "file").exists()
        export_group(folder, index, index.groups()[0], tmp_path / "file", clear=True)
    import_group(other.folder, other, tmp_path / "file")
    assert reads_back(other.folder, list(other.rows()))
    with Index(Folder.open(tmp_path / "sealed too", key=b"l" * 32)) as third:
        import_group(third.folder, third, tmp_path / "file")
        assert reads_back(third.folder, list(third.rows()))
        for content in blob_bytes(third.folder).values():
            assert PROMPT[:64].tobytes() not in content


# -- exporting what is not whole -------------------------------------------------------------------------------------


def test_a_group_with_a_missing_page_is_not_exported(index: Index, tmp_path: Path) -> None:
    index.remove([list(index.rows())[1].id], force=True)
    with pytest.raises(StoreError, match="1 of 3 pages are not stored any more"):
        export_group(index.folder, index, index.groups()[0], tmp_path / "file")


def test_a_session_with_a_missing_page_is_called_a_session(index: Index, tmp_path: Path) -> None:
    group = replace(index.groups()[0], name="session:alice")
    index.remove([list(index.rows())[1].id], force=True)
    with pytest.raises(StoreError, match="^session 'alice': 1 of 3 pages are not stored any more: ask it again"):
        export_group(index.folder, index, group, tmp_path / "file")


def test_a_damaged_page_is_not_exported(index: Index, tmp_path: Path) -> None:
    edit_file(blob_path(index.folder, list(index.rows())[1]), lambda content: content.__setitem__(9000, content[9000] ^ 1))
    with pytest.raises(BlobError, match="was changed"):
        export_group(index.folder, index, index.groups()[0], tmp_path / "file")
    assert os.listdir(tmp_path) == ["here"]
    assert index.stats()["pins"] == 0


def test_a_file_that_is_there_is_not_overwritten(index: Index, file: Path) -> None:
    before = file.read_bytes()
    with pytest.raises(StoreError, match="is there already"):
        export_group(index.folder, index, index.groups()[0], file)
    with pytest.raises(StoreError, match="cannot be written"):
        export_group(index.folder, index, index.groups()[0], file / "below")
    assert file.read_bytes() == before


def test_pages_are_pinned_while_they_are_exported(index: Index, tmp_path: Path) -> None:
    def evict(done: int, total: int) -> None:
        assert index.victims(1 << 40) == []

    export_group(index.folder, index, index.groups()[0], tmp_path / "file", progress=evict)
    assert len(index.victims(1 << 40)) == 3


@pytest.mark.parametrize("again", [True, False], ids=["written again", "gone"])
def test_a_page_evicted_before_it_is_pinned(index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, again: bool) -> None:
    group, pin = index.groups()[0], index.pin

    def evicts(ids: Any, holder: str) -> list[int]:
        monkeypatch.undo()
        blob_files.remove(index.folder, index.remove([max(index.present(ids))]))
        if again:
            store_group(index, PROMPT)
        return pin(ids, holder)

    monkeypatch.setattr(index, "pin", evicts)
    with nullcontext() if again else pytest.raises(StoreError, match="1 of 3 pages are not stored any more"):
        export_group(index.folder, index, group, tmp_path / "file")
    assert (tmp_path / "file").exists() == again
    assert index.pinned() == set()


# -- hostile archives ------------------------------------------------------------------------------------------------


def spots(file: Path) -> dict[str, int]:
    """A byte of each class of an archive."""
    content = file.read_bytes()
    front = 8 + int.from_bytes(content[:8], "little")
    with open_archive(file) as (_, pages):
        first, second, third = ((page.start, page.plan) for page in pages)
    return {
        "length": 1, "length, high": 7, "brace": 8, "name of the group": content.index(b"harbour"), "digest": content.index(b"digest") + 12,
        "padding": front - 1, "length of page 0": front, "key": content.index(b"page_key") + 16,
        "offset": content.index(b"data_offsets") + 20, "padding of page 0": front + first[1].at(0) - 1, "page 0": front + first[1].at(0),
        "page 1": second[0] + second[1].at(1) + 77, "page 2": third[0] + third[1].ids - 9, "first id": first[0] + first[1].ids,
        "last id": third[0] + third[1].macs - 1, "mac": third[0] + third[1].macs, "last mac": len(content) - 1,
    }  # fmt: skip


@pytest.mark.parametrize("place", list(range(17)))
@pytest.mark.parametrize("bit", [0, 7])
def test_a_flipped_bit_is_refused_and_leaves_nothing(other: Index, file: Path, place: int, bit: int) -> None:
    name, at = list(spots(file).items())[place]
    edit_file(file, lambda changed: changed.__setitem__(at, changed[at] ^ (1 << bit)))
    with pytest.raises((BlobError, StoreFormatError)):
        import_group(other.folder, other, file)
    assert untouched(other), name


@pytest.mark.parametrize("keep", [0, 4, 8, 100, 4096, 10_000, 300_000, -200, -128, -1])
def test_a_truncated_archive_is_refused(other: Index, file: Path, keep: int) -> None:
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises((BlobError, StoreFormatError)):
        import_group(other.folder, other, file)
    assert untouched(other)


def test_an_archive_that_was_cut_off_says_the_way_out(other: Index, file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-200])
    with pytest.raises(BlobError, match="cut off or changed, copy or export it again"):
        import_group(other.folder, other, file)


def test_a_longer_archive_is_refused(other: Index, file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"\0")
    with pytest.raises(BlobError, match="in a file of 1"):
        import_group(other.folder, other, file)


def forged(file: Path, change: Callable[[dict], object]) -> None:
    """The archive with another manifest, headers or ids; what can be made to fit without its sections does."""
    content = file.read_bytes()
    with open_archive(file) as (_, pages):
        cuts = [(page.start, len(page.plan.front), page.plan) for page in pages]
    told: dict[str, Any] = {"header": json.loads(content[8 : cuts[0][0]]), "blobs": [], "pages": [], "bodies": []}
    told["group"] = json.loads(told["header"]["group"])
    for start, front, plan in cuts:
        told["blobs"].append(json.loads(content[start + 8 : start + front]))
        told["pages"].append(json.loads(told["blobs"][-1]["__metadata__"]["row"]))
        told["bodies"].append((bytearray(content[start + front : start + plan.bytes]), plan.ids - front, plan.macs - front))
    change(told)
    manifest = json.dumps(told["group"], sort_keys=True)
    told["header"].update(group=manifest, digest=blake3(manifest.encode()).hexdigest())
    made = [blob_files.front_of(told["header"])]
    for header, row, (body, ids, macs) in zip(told["blobs"], told["pages"], told["bodies"], strict=False):
        header["__metadata__"]["row"] = json.dumps(row, separators=(",", ":"))
        front = blob_files.front_of(header)
        context = f'["agentcache page","2",false,"{row["page_key"]}"]\n'.encode()
        mac = blob.mac_of(archive.PUBLIC.key, context, front, body[ids:macs], body[macs:-32])
        made += [front, bytes(body[:-32]), mac]
    file.write_bytes(b"".join(made))


FORGERIES: dict[str, Callable[[dict], object]] = {
    "another key in the manifest": lambda t: t["group"]["pages"].__setitem__(0, "00" * 32),
    "another key everywhere": lambda t: (t["group"]["pages"].__setitem__(1, "11" * 32), t["pages"][1].update(page_key="11" * 32)),
    "another parent": lambda t: t["pages"][2].update(parent="22" * 32),
    "another namespace": lambda t: t["group"].update(namespace="elsewhere"),
    "another namespace everywhere": lambda t: (t["group"].update(namespace="x"), [page.update(namespace="x") for page in t["pages"]]),
    "another regime everywhere": lambda t: (t["group"].update(regime="x"), [page.update(regime="x") for page in t["pages"]]),
    "a page of another model": lambda t: t["pages"][1].update(fingerprint="other"),
    "pages in another order": lambda t: t["pages"].reverse(),
    "another place": lambda t: t["pages"][1].update(place=5),
    "many layers": lambda t: [page.update(widths=[[2, 16, 16]] * 512) for page in t["pages"]],
    "large heads": lambda t: [page.update(widths=[[2, 4096, 4096]] * 3) for page in t["pages"]],
    "too many layers": lambda t: t["pages"][0].update(widths=[[1, 1, 1]] * 70_000),
    "many checkpoints": lambda t: t["pages"][0].update(checkpoint_bytes=1 << 31),
    "no pages": lambda t: (t["pages"].clear(), t["group"].update(pages=[])),
    "fewer pages": lambda t: (t["pages"].pop(), t["group"]["pages"].pop()),
    "many tokens": lambda t: t["group"].update(prefix_tokens=1 << 50),
    "other tokens": lambda t: t["group"].update(prefix_tokens=1199),
    "a long last page": lambda t: t["pages"][2].update(tokens=512),
    "another dtype": lambda t: [page.update(dtype="float16") for page in t["pages"]],
    "another precision": lambda t: [page.update(precision="int8") for page in t["pages"]],
    "a name that is none": lambda t: t["group"].update(name=5),
    "an unknown field": lambda t: t["group"].update(path="/etc/passwd"),
    "another version": lambda t: t["header"].update({"agentcache archive": "3"}),
    "another entry": lambda t: t["header"].update(more=1),
    "another tensor": lambda t: t["blobs"][1].update(more={"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}),
    "an overlap": lambda t: t["blobs"][0]["values.0"].update(data_offsets=t["blobs"][0]["keys.0"]["data_offsets"]),
    "a huge tensor": lambda t: t["blobs"][0]["keys.0"].update(shape=[1 << 60]),
    "more tokens than its pages have": lambda t: t["group"].update(prefix_tokens=1 << 40),
    "fewer tokens than its pages have": lambda t: t["group"].update(prefix_tokens=1),
    "heads of no model": lambda t: [page.update(widths=[[4096, 4096, 4096]]) for page in t["pages"]],
    "a tensor less": lambda t: t["blobs"][0].pop("keys.0"),
}


@pytest.mark.parametrize("what", FORGERIES)
def test_a_forged_header_is_refused_and_leaves_nothing(other: Index, file: Path, what: str) -> None:
    forged(file, FORGERIES[what])
    with pytest.raises((BlobError, StoreFormatError)):
        import_group(other.folder, other, file)
    assert untouched(other)


@pytest.mark.parametrize("checkpoints", [0, 1 << 40])
def test_a_sparse_file_is_refused_without_memory(other: Index, file: Path, checkpoints: int) -> None:
    """Such a file is as long as it likes."""
    forged(file, lambda told: told["pages"][2].update(checkpoint_bytes=checkpoints))
    os.truncate(file, 1 << 41)
    tracemalloc.start()
    try:
        with pytest.raises(BlobError):
            import_group(other.folder, other, file)
        assert tracemalloc.get_traced_memory()[1] < 3 << 20
    finally:
        tracemalloc.stop()


def test_what_forged_makes_is_read_if_nothing_is_changed(other: Index, file: Path) -> None:
    before = file.read_bytes()
    forged(file, lambda told: told["pages"])
    assert file.read_bytes() == before
    forged(file, lambda told: told["group"].update(name="a/../b\x1b[31m", model="/etc/passwd"))
    assert import_group(other.folder, other, file).group.name == "a/../b\x1b[31m"
    assert {found.relative_to(other.folder.path).parts[0] for found in blob_bytes(other.folder)} == {"blobs"}


def test_ids_that_do_not_make_the_keys_are_refused(other: Index, file: Path) -> None:
    def change(told: dict) -> None:
        body, ids, _ = told["bodies"][2]
        body[ids] ^= 1

    forged(file, change)
    with pytest.raises(BlobError, match="ids are not those of its key"):
        import_group(other.folder, other, file)


@pytest.mark.parametrize("length", [0, 7, 1 << 20, 16 << 20, 1 << 40, 1 << 63, (1 << 64) - 8])
def test_a_header_of_wrong_length_is_refused_unread(other: Index, file: Path, length: int) -> None:
    edit_file(file, lambda content: content.__setitem__(slice(0, 8), length.to_bytes(8, "little")))
    with pytest.raises((BlobError, StoreFormatError)):
        import_group(other.folder, other, file)


@pytest.mark.parametrize("text", [b"", b"null", b"[" * 100_000, b'{"__metadata__":{}}', b"\xff\xfe", b'{"agentcache archive":"2"}'])
def test_a_header_that_is_none_is_refused(other: Index, tmp_path: Path, text: bytes) -> None:
    size = -(-(8 + len(text)) // 4096) * 4096
    (tmp_path / "file").write_bytes((size - 8).to_bytes(8, "little") + text.ljust(size - 8) + bytes(1000))
    with pytest.raises(StoreFormatError, match="no archive of a tool group: give a file that `agentcache export` wrote"):
        import_group(other.folder, other, tmp_path / "file")


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
def test_what_is_no_plain_file_is_refused(other: Index, tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "file")
    with pytest.raises(StoreFormatError, match="no plain file"):
        import_group(other.folder, other, tmp_path / "file")
    with pytest.raises(StoreError, match="cannot be opened"):
        import_group(other.folder, other, tmp_path / "none")


# -- what killed processes left --------------------------------------------------------------------------------------


def test_an_export_removes_what_a_killed_one_left(index: Index, tmp_path: Path) -> None:
    target, identity = tmp_path / "har[b]our.group", process_identity.token().rpartition(".")[2]
    ends = f"7.7.{identity}", process_identity.token(), "mine"
    dead, running, others = (target.with_name(f"{target.name}.part-1-{end}") for end in ends)
    for path in (dead, running, others):
        path.touch()
    export_group(index.folder, index, index.groups()[0], target)
    assert set(tmp_path.glob("*group*")) == {target, running, others}


def test_an_import_has_the_room_of_a_killed_one(other: Index, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = other.folder.blobs / "ab" / f"ab{'0' * 30}-7.7.{process_identity.token().rpartition('.')[2]}.part"
    left.parent.mkdir()
    left.touch()
    monkeypatch.setattr(archive.shutil, "disk_usage", lambda path: SimpleNamespace(free=0 if left.exists() else 1 << 30))
    assert import_group(other.folder, other, file).written == 3


# -- a disk that is full, a name that is none --------------------------------------------------------------------------


def test_a_full_disk_is_named_before_anything_is_written(other: Index, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive.shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(StoreFullError, match="do not fit"):
        import_group(other.folder, other, file)
    assert untouched(other)


def test_a_disk_that_becomes_full_leaves_nothing(other: Index, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, left = archive.blob_io.write_sections, [2]

    def full(*given: object) -> object:
        left[0] -= 1
        if left[0] < 0:
            raise StoreFullError("no room")
        return write(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(archive.blob_io, "write_sections", full)
    with pytest.raises(StoreFullError):
        import_group(other.folder, other, file)
    assert untouched(other)


@pytest.mark.parametrize("given", [{"name": "\ud800"}, {"namespace": "\ud800"}])
def test_half_a_character_is_no_name(other: Index, file: Path, given: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="half a character"):
        import_group(other.folder, other, file, **given)  # type: ignore[arg-type]
    forged(file, lambda told: told["group"].update(name="\ud800"))
    with pytest.raises(ConfigError, match="half a character"):
        import_group(other.folder, other, file)
    assert untouched(other)


def test_a_namespace_that_no_header_can_hold(other: Index, file: Path) -> None:
    with pytest.raises(AgentCacheError, match="use shorter names"):
        import_group(other.folder, other, file, namespace="n" * 70_000)
    assert untouched(other)


def test_a_read_only_store_takes_nothing(other: Index, file: Path) -> None:
    with pytest.raises(StorePermissionError, match="read-only"):
        import_group(replace(other.folder, writable=False), other, file)


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_what_is_not_finite_is_not_imported(
    index: Index, other: Index, tmp_path: Path, precision: Precision, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt, scope = random_ids(700, 5), Scope("tests", "weights", "", precision)
    [_, wanted] = rows_of_group(prompt, scope)
    store_group(index, prompt, "spoiled", scope=scope)
    write = blob_io.write_sections

    def spoil(folder: Folder, row: Row, stored: Any) -> Row:
        def layer(at: int) -> list[memoryview]:
            buffers = [memoryview(bytearray(buffer)) for buffer in stored(at)]
            if row.page_key == wanted.page_key and at == 1:
                item = torch.bfloat16 if precision == "exact" else torch.float32  # int8 and int4 begin with a scale or a lowest value
                torch.frombuffer(buffers[0], dtype=item)[3] = value
            return buffers

        return write(folder, row, layer)

    with monkeypatch.context() as patch:  # as somebody writes it who has the key
        patch.setattr(blob_io, "write_sections", spoil)
        [row] = [row for row in index.rows() if row.page_key == wanted.page_key]
        index.remove([row.id], force=True)
        index.add([blob_io.write(index.folder, wanted, page_of_row(wanted))])
    file = tmp_path / "spoiled.group"
    export_group(index.folder, index, next(one for one in index.groups() if one.name == "spoiled"), file)
    with pytest.raises(BlobError, match="section 1 of page 1 holds NaN or infinity"):
        import_group(other.folder, other, file)
    assert untouched(other)
