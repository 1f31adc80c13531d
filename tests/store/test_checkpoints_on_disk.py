"""Checkpoints on disk: every byte counts, budgets count them, a group carries its own and no later one; damage reaches no answer."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from agentcache import StoreOptions, checkpoints
from agentcache.checkpoints import Checkpoint
from agentcache.cli.app import app
from agentcache.errors import BlobError
from agentcache.kv import Page
from agentcache.kv_spec import KVSpec
from agentcache.store.admin import archive
from agentcache.store.admin.archive import export_group, import_group
from agentcache.store.admin.check import pages_of, verify
from agentcache.store.disk import blob_files, blob_format, blob_io, checkpoint_bytes
from agentcache.store.disk.folder import Folder
from agentcache.store.disk.index import Index
from agentcache.store.disk.schema import Row
from agentcache.store.keys import Scope
from agentcache.store.tool_group import ToolGroup
from agentcache.types import PAGE_TOKENS, Reason
from tests.asking import SYSTEM, TOOLS, Asking, talk, user
from tests.store.stocked_store import manifest_of
from tests.store.stored_pages import blob_path, edit_file, fill_page, noise_page, read_page, refused_read, unstored_row

SMALL = KVSpec(2, 1, 2, torch.float32, recurrent=True)
ASKED = [SYSTEM, user("What is the tide at Port Averil? " * 6)]


@pytest.fixture(autouse=True)
def one_thread(threads: Callable[[int], None], monkeypatch: pytest.MonkeyPatch) -> None:
    threads(1)
    monkeypatch.delenv("AGENTCACHE_KEY", raising=False)


def with_states(spec: KVSpec = SMALL, tokens: int = 5, slots: tuple[int, ...] = (2, 5)) -> Page:
    """A page with noise and checkpoints of two states and a missing one."""
    page = noise_page(spec, tokens)
    page.checkpoints = {at: Checkpoint((torch.full((2, 2), 1.5 * at), None, torch.tensor([at])), (1, at)) for at in slots}
    return page


def stored(asking: Callable[..., Asking], folder: Path, family: str = "qwen3_5_text", **options: Any) -> tuple[ToolGroup, torch.Tensor]:
    """Warm a group, ask, and leave all of it on disk: the group, and the logits."""
    first = asking(family, StoreOptions(folder, **options))
    group = first.engine.warm(SYSTEM["content"], TOOLS, name="tides")
    logits = first(ASKED)[1]
    assert first.engine.flush()
    first.engine.close()
    return group, logits


# -- bytes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("encrypted", [False, True])
def test_every_byte_of_a_checkpoint_counts(tmp_path: Path, encrypted: bool) -> None:
    folder = Folder.open(tmp_path / "store", key=b"k" * 32 if encrypted else None)
    written = blob_io.write(folder, unstored_row(SMALL, 5), with_states())
    plan, file = blob_format.plan(written, encrypted), blob_path(folder, written)
    assert sorted(read_page(folder, written).checkpoints) == [2, 5]
    with open(file, "r+b", buffering=0) as raw:
        for at in [*range(0, len(plan.front), 97), *range(len(plan.front), plan.bytes)]:
            before = os.pread(raw.fileno(), 1, at)
            os.pwrite(raw.fileno(), bytes([before[0] ^ (1 << at % 8)]), at)
            page = Page(SMALL)
            with pytest.raises(BlobError):
                fill_page(folder, written, page, tokens=5, threads=1)
            assert (page.filled, page.checkpoints) == (0, {})
            os.pwrite(raw.fileno(), before, at)
    assert sorted(read_page(folder, written).checkpoints) == [2, 5]


@pytest.mark.parametrize("tokens", [1, 2, 4, 5])
def test_part_of_a_page_has_the_checkpoints_of_that_part(tmp_path: Path, tokens: int) -> None:
    folder = Folder.open(tmp_path / "store")
    written = blob_io.write(folder, unstored_row(SMALL, 5), with_states())
    found = read_page(folder, written, tokens)
    assert sorted(found.checkpoints) == [at for at in (2, 5) if at <= tokens]
    for at, known in found.checkpoints.items():
        assert known.cuts == (1, at)
        assert [None if state is None else state.tolist() for state in known.states] == [[[1.5 * at] * 2] * 2, None, [at]]


@pytest.mark.parametrize(
    "change",
    [
        lambda b: b.__setitem__(0, 255),
        lambda b: b.__setitem__(7, 1),
        lambda b: b.__setitem__(8, b"{"[0]),
        lambda b: b.__setitem__(slice(8, 60), b"[" * 52),
        lambda b: b.__setitem__(b.index(b"float32"), b"x"[0]),
        lambda b: b.__setitem__(b.index(b"[2,2]") + 1, b"-"[0]),
    ],
)
def test_bytes_that_are_no_checkpoints_are_a_bad_page(
    tmp_path: Path, change: Callable[[bytearray], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = bytearray(checkpoint_bytes.pack(with_states().checkpoints, 5))
    change(packed)
    with pytest.raises(BlobError, match="cannot be read"):
        checkpoint_bytes.unpack(bytes(packed), 5)
    monkeypatch.setattr(checkpoint_bytes, "pack", lambda checkpoints, tokens: bytes(packed))
    folder = Folder.open(tmp_path / "store")
    refused_read(folder, blob_io.write(folder, unstored_row(SMALL, 5), with_states()))


def test_what_packing_takes_is_known_before() -> None:
    for slots in ((), (2,), (2, 5), (2, 3, 5)):
        known = with_states(slots=slots).checkpoints
        for tokens in (1, 2, 4, 5):
            assert checkpoint_bytes.size(known, tokens) == len(checkpoint_bytes.pack(known, tokens))


# -- a whole store ---------------------------------------------------------------------------------------------------


def test_budgets_of_disk_and_writing_count_checkpoints(
    asking: Callable[..., Asking], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, taken = asking("qwen3_5_text", tmp_path / "store"), []
    disk = one.engine.store.disk
    assert disk is not None
    monkeypatch.setattr(disk.writer.budget, "take", lambda count: taken.append(count) or True)
    one(ASKED)
    assert one.engine.flush()
    rows = list(disk.index.rows())
    assert any(row.checkpoint_bytes for row in rows)
    assert sorted(taken) == sorted(row.bytes for row in rows)


@pytest.mark.usefixtures("pieces_matter")
def test_checkpoints_that_memory_drops_leave_the_disk(
    asking: Callable[..., Asking], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "SHARE", 0.0)
    first, messages = asking("qwen3_5_text", StoreOptions(tmp_path / "store")), [SYSTEM]
    for turn in range(8):  # in some of them the last checkpoint lies in a page that is full
        messages = [*messages, user(f"What is the tide at place {turn}? " * 15)]
        said, logits = first(messages, tokens=2)
        messages = [*messages, {"role": "assistant", "content": said.text}]
        assert first.engine.flush()
    disk = first.engine.store.disk
    assert disk is not None
    rows = list(disk.index.rows())
    last = max(row.place for row in rows)
    assert last >= 3
    assert [row.place for row in rows if row.checkpoint_bytes and row.place >= 2] == [last]
    assert disk.writer.counts["known"] > 0
    first.engine.close()
    files = list((tmp_path / "store").rglob("*.safetensors"))
    assert len(files) == len(rows)
    with Index(Folder.open(tmp_path / "store")) as index:
        assert sum(path.stat().st_size for path in files) == sum(row.bytes for row in rows) == index.total()[1]
    assert verify(Folder.open(tmp_path / "store")).sound
    again, found = asking("qwen3_5_text", StoreOptions(tmp_path / "store"))(messages[:-1], tokens=2)
    assert again.receipt.disk_tokens == again.receipt.cached_tokens > 512 * last
    assert torch.equal(found, logits)


def test_a_blob_exchanged_before_it_is_read_is_no_damage(
    asking: Callable[..., Asking], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group, expected = stored(asking, tmp_path / "store")
    other = asking("qwen3_5_text", StoreOptions(tmp_path / "store"))
    disk, read = other.engine.store.disk, blob_io.read_many
    assert disk is not None

    def late(folder: Folder, jobs: Any, **options: Any) -> Any:
        monkeypatch.setattr(blob_io, "read_many", read)
        for row, *_ in jobs:
            written = blob_io.write(folder, row, read_page(folder, row))
            gone = disk.index.exchange(row, written)
            assert (gone.blob, disk.index.exchange(row, written).blob) == (row.blob, written.blob)
            blob_files.remove(folder, [gone])
        return read(folder, jobs, **options)

    monkeypatch.setattr(blob_io, "read_many", late)
    said, logits = other(ASKED)
    assert said.receipt.disk_tokens >= group.prefix_tokens
    assert torch.equal(logits, expected[-len(logits) :])
    assert [refusal.reason for refusal in said.receipt.refusals if refusal.reason is Reason.BAD_BLOB] == []
    assert not any(row.bad for row in disk.index.rows())


@pytest.mark.parametrize("gone", [True, False])
def test_another_process_changes_a_row_amid_its_rewriting(
    gone: bool, asking: Callable[..., Asking], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gone: it deletes the row; else it writes the page again itself."""
    monkeypatch.setattr(checkpoints, "SHARE", 0.0)
    one, write, history = asking("mamba2", StoreOptions(tmp_path / "store")), blob_io.write, [SYSTEM, *ASKED[1:], *ASKED[1:]]
    one([*history, *ASKED[1:]], ())
    assert one.engine.flush()
    folder = Folder.open(tmp_path / "store")

    def late(own: Folder, row: Row, *page: Any) -> Row:
        monkeypatch.setattr(blob_io, "write", write)
        with Index(folder) as index:
            removed = index.remove([row.id], force=True) if gone else [index.exchange(row, write(folder, row, *page))]
        blob_files.remove(folder, removed)
        return write(own, row, *page)

    monkeypatch.setattr(blob_io, "write", late)
    one.engine.pin(history, ())
    assert one.engine.flush()
    assert blob_io.write is write
    found = verify(folder)
    assert found.sound
    assert len(list((tmp_path / "store").rglob("*.safetensors"))) == found.pages == 1
    one.engine.pin(history, ())
    assert one.engine.flush()
    one.engine.close()
    assert asking("mamba2", StoreOptions(tmp_path / "store")).engine.pin(history, ()).computed_tokens == 1


def test_a_damaged_checkpoint_never_reaches_an_answer(asking: Callable[..., Asking], tmp_path: Path) -> None:
    _, expected = stored(asking, tmp_path / "store")
    with Index(Folder.open(tmp_path / "store")) as index:
        for row in index.rows():
            if row.checkpoint_bytes:
                at = blob_format.plan(row, False).at(len(row.widths))
                edit_file(blob_path(index.folder, row), lambda b, at=at: b.__setitem__(at + 300, b[at + 300] ^ 1))
    said, logits = asking("qwen3_5_text", tmp_path / "store")(ASKED)
    assert torch.equal(logits, expected)
    assert said.receipt.cached_tokens == 0
    assert Reason.BAD_BLOB in [refusal.reason for refusal in said.receipt.refusals]


def test_a_checkpoint_changed_in_its_file_is_read_again(
    asking: Callable[..., Asking], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blob_files, "local", lambda path: True)
    _, expected = stored(asking, tmp_path / "store")
    later = asking("qwen3_5_text", tmp_path / "store")
    assert later(ASKED)[0].receipt.disk_tokens > 0
    entries = [entry for entry in later.engine.store.tree.entries("default") if entry.page and entry.page.checkpoints]
    copies = [entry.page.copy(entry.page.filled, "host") for entry in entries]
    assert any(known.file is not None for page in copies for known in page.checkpoints.values())
    with Index(Folder.open(tmp_path / "store")) as index:
        for row in index.rows():
            if row.checkpoint_bytes:
                with blob_path(index.folder, row).open("r+b") as file:
                    file.seek(-row.checkpoint_bytes // 2 - 4 * row.tokens, os.SEEK_END)
                    file.write(bytes(64))
    said, logits = later(ASKED)
    assert torch.equal(logits, expected)
    assert said.receipt.cached_tokens == 0
    assert Reason.BAD_BLOB in [refusal.reason for refusal in said.receipt.refusals]


@pytest.mark.parametrize("encrypted", [False, True])
def test_a_group_carries_its_checkpoints_to_another_store(asking: Callable[..., Asking], tmp_path: Path, encrypted: bool) -> None:
    key = b"k" * 32 if encrypted else None
    group, expected = stored(asking, tmp_path / "here", encryption_key=key)
    assert 0 < group.checkpoint_bytes < group.kv_bytes
    file = tmp_path / "tides.group"
    with Index(Folder.open(tmp_path / "here", key=key)) as here, Index(Folder.open(tmp_path / "there")) as there:
        export_group(here.folder, here, here.groups()[0], file, clear=True)
        import_group(there.folder, there, file)
        assert all(row is not None and row.checkpoint_bytes for row in pages_of(there, there.groups()[0])[-1:])
    assert not verify(Folder.open(tmp_path / "there")).problems
    said, logits = asking("qwen3_5_text", tmp_path / "there")(ASKED)
    assert said.receipt.disk_tokens == said.receipt.cached_tokens == group.prefix_tokens
    assert torch.equal(logits, expected)


@pytest.mark.parametrize("asked", [3, 9], ids=["longer page", "same pages"])
def test_an_import_adds_the_checkpoints_that_pages_lack(
    asked: int, asking: Callable[..., Asking], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pages came there with a longer conversation, which keeps no checkpoint where the group ends."""
    monkeypatch.setattr(checkpoints, "SHARE", 0.0)
    history = talk(6)
    one, other = (asking("mamba2", tmp_path / name) for name in ("here", "there"))
    one.engine.pin(history[:asked], name="start")
    other(history, ())
    for each in (one, other):
        each.engine.close()
    with Index(Folder.open(tmp_path / "here")) as here, Index(Folder.open(tmp_path / "there")) as there:
        export_group(here.folder, here, here.groups()[0], tmp_path / "start.group")
        before = there.total()
        assert import_group(there.folder, there, tmp_path / "start.group").written == 0
        assert there.total()[0] == before[0]
    assert verify(Folder.open(tmp_path / "there")).sound
    assert len([*(tmp_path / "there").rglob("*.safetensors")]) == before[0]
    again = asking("mamba2", tmp_path / "there")
    assert again.engine.pin(history[:asked]).computed_tokens == 1
    said, logits = again([*history, {"role": "assistant", "content": "Yes."}, user("Why?")], ())
    assert said.receipt.cached_tokens > PAGE_TOKENS, "the conversation's own checkpoint is there still"
    assert torch.equal(again([*history, {"role": "assistant", "content": "Yes."}, user("Why?")], (), reuse="off")[1], logits)


def test_a_page_of_another_process_gets_checkpoints(asking: Callable[..., Asking], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other's conversation is longer, and keeps fewer in this page."""
    one, other, history = asking("mamba2", tmp_path / "store"), asking("mamba2", tmp_path / "store"), talk(12)
    disk = one.engine.store.disk
    assert disk is not None
    monkeypatch.setattr(one.engine.store, "defer_writes", lambda busy: None)
    disk.writer.quiet.clear()  # nothing is written until the flush
    monkeypatch.setattr(checkpoints, "SHARE", 0.99)
    one(history[:15], ())
    monkeypatch.setattr(checkpoints, "SHARE", 0.0)
    other(history, ())
    assert other.engine.flush()
    before = sum(row.checkpoint_bytes for row in disk.index.rows() if not row.place)
    assert one.engine.flush()
    assert sum(row.checkpoint_bytes for row in disk.index.rows() if not row.place) > before
    assert asking("mamba2", tmp_path / "store").engine.pin(history[:9]).computed_tokens < 10, "those after the end of its last message"


@pytest.fixture
def exported(tmp_path: Path) -> Iterator[tuple[Index, Path]]:
    """An empty store, and the archive of a group whose last page is stored longer, with a checkpoint after the group's end."""
    with Index(Folder.open(tmp_path / "here")) as here, Index(Folder.open(tmp_path / "there")) as there:
        longer = replace(unstored_row(SMALL, 5), role=2)
        here.add([blob_io.write(here.folder, longer, with_states(slots=(2, 3, 5)))])
        here.put_group(manifest_of(longer.ids[:3], "tides", Scope("tests", "weights")))
        export_group(here.folder, here, here.groups()[0], tmp_path / "tides.group")
        yield there, tmp_path / "tides.group"


def test_no_state_after_a_group_leaves_with_it(exported: tuple[Index, Path]) -> None:
    there, file = exported
    assert torch.full((2, 2), 7.5).numpy().tobytes() not in file.read_bytes()
    import_group(there.folder, there, file)
    (row,) = there.rows()
    assert sorted(read_page(there.folder, row).checkpoints) == [2, 3]


def test_an_altered_archive_is_refused(exported: tuple[Index, Path]) -> None:
    there, file = exported
    state = torch.full((2, 2), 4.5).numpy().tobytes()
    edit_file(file, lambda b: b.__setitem__(b.index(state), b[b.index(state)] ^ 1))
    with pytest.raises(BlobError, match="was changed since it was written"):
        import_group(there.folder, there, file)
    assert there.total() == (0, 0)


@pytest.mark.parametrize(("old", "new", "why"), [(b"float32", b"float33", "cannot be read"), (b"\0\0\x90@", b"\0\0\xc0\x7f", "NaN")])
def test_checkpoints_of_a_forged_archive_are_refused(
    exported: tuple[Index, Path], old: bytes, new: bytes, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    there, file = exported
    pack = checkpoint_bytes.pack
    monkeypatch.setattr(archive, "pack", lambda known, tokens: pack(known, tokens).replace(old, new))  # its digests are those of its bytes
    with Index(Folder.open(file.parent / "here")) as here:
        export_group(here.folder, here, here.groups()[0], file.with_name("forged"))
    with pytest.raises(BlobError, match=why):
        import_group(there.folder, there, file.with_name("forged"))
    assert there.total() == (0, 0)
    assert not [*there.folder.blobs.rglob("*.*")]


def test_a_group_says_what_its_checkpoints_take(asking: Callable[..., Asking], tmp_path: Path) -> None:
    group, _ = stored(asking, tmp_path / "store")
    told = CliRunner().invoke(app, ["inspect", "tides", "--store", str(tmp_path / "store"), "--json"])
    about = json.loads(told.stdout)
    assert group.checkpoint_bytes <= about["checkpoint_bytes"] < about["bytes"]
