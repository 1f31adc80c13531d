"""Blobs: what is read back is what was written, bit for bit, or an error and an empty page, whatever happened to the file or the disk."""

from __future__ import annotations

import errno
import json
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from blake3 import blake3
from safetensors import safe_open

from agentcache.errors import BlobError, StoreError, StoreFullError, StorePermissionError
from agentcache.kv import Page
from agentcache.kv_spec import KVSpec
from agentcache.store.disk import blob, blob_files, blob_format, blob_io, page_fill, process_identity
from agentcache.store.disk.folder import Folder
from tests.store.stored_pages import (
    SPEC,
    SPECS,
    blob_path,
    edit_file,
    empty_from,
    files_under_blobs,
    fill_page,
    noise_page,
    read_page,
    refused_read,
    same_numbers,
    unstored_row,
)

KINDS = {"sealed": 512, "partial": 100}
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Folder:
    monkeypatch.delenv("AGENTCACHE_KEY", raising=False)
    return Folder.open(tmp_path / "store")


# -- round trips -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("encrypted", [False, True])
@pytest.mark.parametrize("tokens", [512, 511, 65, 1])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_what_is_read_is_what_was_written(tmp_path: Path, spec: KVSpec, dtype: torch.dtype, tokens: int, encrypted: bool) -> None:
    folder = Folder.open(tmp_path / "store", key=b"k" * 32 if encrypted else None)
    spec = replace(spec, dtype=dtype)
    original = noise_page(spec)
    written = blob_io.write(folder, unstored_row(spec, tokens), original)
    assert written.bytes == blob_path(folder, written).stat().st_size
    assert blob_io.describe(folder, written.blob) == written
    assert np.array_equal(blob_io.describe(folder, written.blob).ids, written.ids)
    blob_io.verify(folder, written)
    for wanted in {tokens, max(1, tokens - 3)}:
        found = read_page(folder, written, wanted)
        assert found.filled == wanted
        assert same_numbers(found, original, wanted)
        assert empty_from(found, wanted)


def test_every_bit_pattern_survives(folder: Folder) -> None:
    spec = KVSpec(1, 1, 64, torch.bfloat16)
    original = Page(spec)
    patterns = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    original.keys.view(torch.int16).view(-1)[:] = patterns[: 64 * 512]
    original.values.view(torch.int16).view(-1)[:] = patterns[64 * 512 :]
    original.filled = 512
    found = read_page(folder, blob_io.write(folder, unstored_row(spec), original))
    assert torch.equal(found.keys.view(torch.int16), original.keys.view(torch.int16))
    assert torch.equal(found.values.view(torch.int16), original.values.view(torch.int16))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_safetensors_reads_our_files(folder: Folder, spec: KVSpec, tokens: int, dtype: torch.dtype) -> None:
    spec = replace(spec, dtype=dtype)
    original = noise_page(spec)
    written = blob_io.write(folder, unstored_row(spec, tokens, namespace="a \ud800 \" 'ü"), original)
    with safe_open(blob_path(folder, written), "pt") as found:
        for layer in range(spec.layers):
            assert torch.equal(found.get_tensor(f"keys.{layer}"), original.layer_keys[layer][..., :tokens])
            assert torch.equal(found.get_tensor(f"values.{layer}"), original.layer_values[layer][:, :tokens])
        assert found.get_tensor("ids").tolist() == written.ids.tolist()
        assert json.loads(found.metadata()["row"])["namespace"] == written.namespace


def test_the_format_is_the_documented_one(folder: Folder) -> None:
    """Files of this version stay readable: a change of these bytes is another format. See docs/format-blobs.md."""
    folder = replace(folder, key=bytes(range(32)))
    spec = KVSpec(1, 1, 2, torch.float32)
    original = Page(spec)
    original.keys[0, 0, :, :3] = torch.tensor([[1.0, 2, 3], [4, 5, 6]])
    original.values[0, 0, :3] = torch.tensor([[7.0, 8], [9, 10], [11, 12]])
    original.filled = 3
    written = blob_io.write(folder, unstored_row(spec, 3), original)
    raw = blob_path(folder, written).read_bytes()
    front, layer, ids, macs = raw[:4096], raw[4096:4144], raw[4144:4156], raw[4156:]
    assert int.from_bytes(raw[:8], "little") == 4088
    assert np.frombuffer(layer, "<f4").tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]
    assert np.frombuffer(ids, "<u4").tolist() == [0, 1, 2]
    key = written.page_key.hex()
    context = f'["agentcache section","2",false,"{key}","weights","exact",0,"float32",1,2,2,3]\n'.encode()
    assert macs[:32] == blake3(context + layer, key=folder.key).digest()
    context = f'["agentcache page","2",false,"{key}"]\n'.encode()
    assert macs[32:] == blake3(context + front + ids + macs[:32], key=folder.key).digest()
    assert blake3(raw).hexdigest(length=8) == "6bcd19342852d3d7"


def test_the_mac_of_a_layer_is_of_that_layer_only(folder: Folder) -> None:
    original = Page(SPEC)
    original.filled = 512
    raw = blob_path(folder, blob_io.write(folder, unstored_row(), original)).read_bytes()
    assert len({raw[len(raw) - 32 * at :][:32] for at in range(1, SPEC.layers + 2)}) == SPEC.layers + 1


def test_a_full_page_is_read_without_a_second_copy(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    written = blob_io.write(folder, unstored_row(), noise_page())
    monkeypatch.setattr(page_fill.Reading, "_scratch", None)
    assert read_page(folder, written).filled == 512


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_many_pages_by_several_threads(folder: Folder, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in ((blob, "PIECE"), (blob, "MAPPED_PIECE"), (page_fill, "PIECE")):
        monkeypatch.setattr(module, name, 1000)  # several pieces per layer
    originals = [noise_page(seed=seed) for seed in range(4)]
    rows = [blob_io.write(folder, unstored_row(tokens=tokens, first=tokens), p) for tokens, p in zip((512, 512, 300, 7), originals)]
    edit_file(blob_path(folder, rows[1]), lambda b: b.__setitem__(9000, b[9000] ^ 1))
    pages = [Page(SPEC) for _ in rows]
    pieces: list[int] = []
    errors = blob_io.read_many(folder, [(r, p, r.tokens) for r, p in zip(rows, pages)], threads=threads, progress=pieces.append)
    assert [type(error) for error in errors] == [type(None), BlobError, type(None), type(None)]
    assert [p.filled for p in pages] == [512, 0, 300, 7]
    assert all(same_numbers(found, original, found.filled) for found, original in zip(pages, originals))
    assert not pages[1].keys.any()
    assert max(pieces) <= 1000
    assert sum(pieces) <= SPEC.token_bytes * (512 + 512 + 300 + 7)
    assert sum(pieces) >= SPEC.token_bytes * (512 + 300 + 7)
    assert blob_io.read_many(folder, []) == []


def test_reading_stops_between_pieces(folder: Folder) -> None:
    written = blob_io.write(folder, unstored_row(), noise_page())
    stop = threading.Event()
    seen: list[int] = []

    def progress(count: int) -> None:
        seen.append(count)
        stop.set()

    refused_read(folder, written, stop=stop, progress=progress, threads=1)
    assert len(seen) == 1


def test_faults_outside_the_blob_are_no_blob_error(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    written = blob_io.write(folder, unstored_row(), noise_page())
    real = os.open

    def none_left(path: Any, *rest: Any, **more: Any) -> int:
        if str(path).endswith(".safetensors"):
            raise OSError(errno.EMFILE, "too many open files")
        return real(path, *rest, **more)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", none_left)
        assert type(refused_read(folder, written, kind=StoreError)) is StoreError

    def out_of_memory(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(blob_files, "read_into", out_of_memory)
    opened = blob.Blob(folder, written, blob_format.plan(written, False), os.dup(0), b"")
    monkeypatch.setattr(page_fill, "open_blob", lambda *_: opened)
    found = Page(SPEC)
    with pytest.raises(MemoryError):
        fill_page(folder, written, found, tokens=512)
    assert found.filled == 0


# -- writing -----------------------------------------------------------------------------------------------------------


def failing(name: str, at: int, number: int) -> Callable[..., Any]:
    """os.NAME that fails at its `at`-th call; after a failed write, some of it may be on the disk."""
    real, calls = getattr(os, name), iter(range(10**6))

    def call(*given: Any, **more: Any) -> Any:
        if next(calls) == at:
            if name == "pwritev":
                real(given[0], [given[1][0][:10]], given[2])
            raise OSError(number, os.strerror(number))
        return real(*given, **more)

    return call


CALLS = [("pwritev", at) for at in range(5)] + [("fsync", at) for at in range(3)] + [("rename", 0), ("mkdir", 0)]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
@pytest.mark.parametrize(("name", "at"), CALLS)
def test_a_failed_write_leaves_nothing(folder: Folder, name: str, at: int, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, name, failing(name, at, number))
        with pytest.raises(StoreError) as caught:
            blob_io.write(folder, unstored_row(), noise_page())
    assert type(caught.value) is (StoreError if number == errno.EIO else StoreFullError)
    assert files_under_blobs(folder) == []
    original = noise_page()
    assert same_numbers(read_page(folder, blob_io.write(folder, unstored_row(), original)), original, 512)


def test_every_call_that_can_fail_was_made_to(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = dict.fromkeys(["pwritev", "fsync", "rename", "mkdir"], 0)
    reals = {name: getattr(os, name) for name in counts}
    for name in counts:

        def counted(*given: Any, name: str = name, real: Callable[..., Any] = reals[name], **more: Any) -> Any:
            counts[name] += 1
            return real(*given, **more)

        monkeypatch.setattr(os, name, counted)
    blob_io.write(folder, unstored_row(), noise_page())
    assert counts == {name: sum(call == name for call, _ in CALLS) for name in counts}


def test_an_interrupted_write_leaves_nothing(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    (folder.blobs / "00").mkdir()
    monkeypatch.setattr(blob_files.secrets, "token_hex", lambda size: "00" * size)
    with pytest.raises(KeyboardInterrupt):
        blob_io.write(folder, unstored_row(), noise_page())
    assert files_under_blobs(folder) == []


def test_files_are_private_complete_before_they_are_named_and_flushed(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    rename, fsync = os.rename, os.fsync

    def renaming(*given: Any, **more: Any) -> None:
        (part,) = files_under_blobs(folder)
        assert part.suffix == ".part"
        assert part.stat().st_size == blob_format.plan(unstored_row(), False).bytes
        assert seen[-1] == "fsync"
        seen.append("rename")
        rename(*given, **more)

    def syncing(fd: int) -> None:
        seen.append("fsync")
        fsync(fd)

    monkeypatch.setattr(os, "rename", renaming)
    monkeypatch.setattr(os, "fsync", syncing)
    written = blob_io.write(folder, unstored_row(), noise_page())
    assert seen == ["fsync", "fsync", "rename", "fsync"]  # blobs/, the file, blobs/ab/
    assert blob_path(folder, written).stat().st_mode & 0o777 == 0o600
    assert blob_path(folder, written).parent.stat().st_mode & 0o777 == 0o700
    assert written.blob.endswith(f"-{process_identity.token()}")


def test_a_store_that_is_read_only_is_read(folder: Folder) -> None:
    written = blob_io.write(folder, unstored_row(), noise_page())
    closed = replace(folder, writable=False)
    assert read_page(closed, written).filled == 512
    with pytest.raises(StorePermissionError, match="read-only"):
        blob_io.write(closed, unstored_row(), noise_page())
    assert files_under_blobs(folder) == [blob_path(folder, written)]


def test_removing_and_sweeping(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, orphan, mine, gone = (blob_io.write(folder, unstored_row(), noise_page()) for _ in range(4))
    blob_files.remove(folder, [gone])
    blob_files.remove(folder, [gone])
    blob_files.remove(folder, [unstored_row()])
    dead = "1.2." + process_identity.token().rpartition(".")[2]  # of this boot and pid namespace, no such start time
    assert not process_identity.alive(dead)
    moved = []
    for written in (kept, orphan):
        name = f"{written.blob[:32]}-{dead}"
        blob_path(folder, written).rename(blob_path(folder, replace(written, blob=name)))
        moved.append(replace(written, blob=name))
    part = blob_path(folder, moved[0]).with_suffix(".part")
    part.write_bytes(b"12345")
    stranger = folder.blobs / "aa"
    stranger.mkdir(exist_ok=True)
    (stranger / "notes.txt").write_text("not ours")
    asked: list[list[str]] = []

    def known(names: list[str]) -> set[str]:
        asked.append(sorted(names))
        return {moved[0].blob}

    assert sorted(file.name for file in blob_files.files(folder)) == sorted([moved[0].blob, moved[0].blob, moved[1].blob, mine.blob])
    swept, left = blob_files.sweep(folder, known)
    assert (len(swept), sum(file.bytes for file in swept), left) == (2, 5 + orphan.bytes, mine.bytes)
    assert asked == [sorted(written.blob for written in (*moved, mine))]
    assert sorted(files_under_blobs(folder)) == sorted([blob_path(folder, moved[0]), blob_path(folder, mine), stranger / "notes.txt"])


# -- encryption --------------------------------------------------------------------------------------------------------


def test_nothing_of_the_prompt_is_in_an_encrypted_blob(tmp_path: Path) -> None:
    spec = KVSpec(1, 1, 16, torch.float32)
    original, made = noise_page(spec), unstored_row(spec)
    clear = Folder.open(tmp_path / "clear")
    secret = Folder.open(tmp_path / "secret", key=b"k" * 32)
    contents = {}
    for folder in (clear, secret):
        written = blob_io.write(folder, made, original)
        contents[folder] = blob_path(folder, written).read_bytes()
    for part in (made.ids[:8].tobytes(), original.keys[0, 0, 0, :8].numpy().tobytes(), original.values[0, 0, 0, :8].numpy().tobytes()):
        assert part in contents[clear]
        assert part not in contents[secret]


def test_an_encrypted_blob_needs_its_key(tmp_path: Path) -> None:
    folder = Folder.open(tmp_path / "store", key=b"k" * 32)
    other = Folder.open(tmp_path / "other", key=b"o" * 32)
    written = blob_io.write(folder, unstored_row(), noise_page())
    wrong = replace(folder, _cipher=other._cipher)  # the right key for macs, the wrong one for contents
    refused_read(wrong, written)
    refused_read(replace(folder, encrypted=False, _cipher=None), written)
    clear = blob_io.write(replace(folder, encrypted=False, _cipher=None), unstored_row(), noise_page())
    refused_read(folder, clear)
    twice = [blob_path(folder, blob_io.write(folder, unstored_row(), noise_page())).read_bytes() for _ in range(2)]
    assert twice[0][4096:8192] != twice[1][4096:8192]


# -- mapped pages ------------------------------------------------------------------------------------------------------


@pytest.fixture
def mapping(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blob_files, "local", lambda path: True)
    monkeypatch.setattr(blob_files, "in_memory", lambda fd, size: True)


def own_memory(found: Page) -> bool:
    """Whether a page lies in memory of its own, not in that of a file."""
    return found.file is None


@pytest.mark.usefixtures("mapping")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_a_full_page_lies_in_its_file(folder: Folder, spec: KVSpec, dtype: torch.dtype) -> None:
    spec = replace(spec, dtype=dtype)
    original = noise_page(spec)
    written = blob_io.write(folder, unstored_row(spec), original)
    found = read_page(folder, written)
    assert not own_memory(found)
    assert found.sealed
    assert same_numbers(found, original, 512)
    assert all(torch.equal(a, b) and a.is_contiguous() for a, b in zip(found.layer_keys, original.layer_keys, strict=True))
    assert all(torch.equal(a, b) and a.is_contiguous() for a, b in zip(found.layer_values, original.layer_values, strict=True))
    assert same_numbers(found.copy(300), original, 300)
    again = blob_io.write(folder, written, found)
    assert blob_io.describe(folder, again.blob).page_key == written.page_key
    assert same_numbers(read_page(folder, again), original, 512)


@pytest.mark.usefixtures("mapping")
def test_a_mapped_page_outlives_its_file_and_never_changes_it(folder: Folder) -> None:
    original = noise_page()
    written = blob_io.write(folder, unstored_row(), original)
    found, other = read_page(folder, written), read_page(folder, written)
    found.keys.zero_()
    blob_io.verify(folder, written)
    assert same_numbers(other, original, 512)
    blob_files.unlink(folder, written.blob)
    assert same_numbers(other, original, 512)


@pytest.mark.usefixtures("mapping")
@pytest.mark.parametrize("tokens", [511, 1])
def test_other_pages_are_copied(folder: Folder, tmp_path: Path, tokens: int) -> None:
    original = noise_page()
    assert own_memory(read_page(folder, blob_io.write(folder, unstored_row(tokens=tokens), original)))
    assert own_memory(read_page(folder, blob_io.write(folder, unstored_row(), original), tokens))
    encrypted = Folder.open(tmp_path / "encrypted", key=b"k" * 32)
    assert own_memory(read_page(encrypted, blob_io.write(encrypted, unstored_row(), original)))


def test_whole_pages_are_mapped_on_local_file_systems(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    original = noise_page()
    written = blob_io.write(folder, unstored_row(), original)
    fd, size = blob_files.open_file(folder, written.blob)
    try:
        monkeypatch.setattr(
            os, "preadv", lambda fd, buffers, at, flags=0: (_ for _ in ()).throw(BlockingIOError(errno.EAGAIN, "not there"))
        )
        assert not blob_files.in_memory(fd, size)
    finally:
        monkeypatch.undo()
        os.close(fd)
    short = blob_io.write(folder, unstored_row(tokens=100), original)
    read: list[str] = []
    for way in (into_cache := "read_into_cache", "check"):
        inner = getattr(blob.Blob, way)
        monkeypatch.setattr(blob.Blob, way, lambda self, *rest, way=way, inner=inner: (read.append(way), inner(self, *rest))[1])
    cases: list[tuple[bool, bool, list[str]]] = [
        (False, True, []),
        (False, False, []),
        (True, False, [into_cache]),
        (True, True, ["check"]),
    ]
    for local, cached, which in cases:
        monkeypatch.setattr(blob_files, "local", lambda path, local=local: local)
        monkeypatch.setattr(blob_files, "in_memory", lambda fd, size, cached=cached: cached)
        read.clear()
        found = read_page(folder, written)
        assert own_memory(found) == (not local)
        assert sorted(set(read)) == which
        assert same_numbers(found, original, 512)
        read.clear()
        part = read_page(folder, short, 100)
        assert own_memory(part)
        assert sorted(set(read)) == (["check"] if local and cached else [])
        assert same_numbers(part, original, 100)


def test_which_file_systems_are_local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Part:
        def __init__(self, mountpoint: Path, fstype: str) -> None:
            self.mountpoint, self.fstype = str(mountpoint), fstype

    base = tmp_path.resolve()
    monkeypatch.setattr(blob_files.psutil, "disk_partitions", lambda all: [Part(base, "ext4"), Part(base / "far", "nfs4")])
    blob_files.local.cache_clear()
    try:
        assert blob_files.local(tmp_path)
        assert blob_files.local(tmp_path / "near")
        assert not blob_files.local(tmp_path / "far" / "store")
    finally:
        blob_files.local.cache_clear()


@pytest.mark.usefixtures("mapping")
def test_without_room_for_maps_it_is_read(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    original = noise_page()
    written = blob_io.write(folder, unstored_row(), original)
    monkeypatch.setattr(blob_files, "map_file", lambda fd, size: (_ for _ in ()).throw(OSError(errno.ENOMEM, "too many maps")))
    found = read_page(folder, written)
    assert own_memory(found)
    assert same_numbers(found, original, 512)


@pytest.mark.skipif(sys.platform != "linux", reason="pages are mapped on Linux")
@pytest.mark.usefixtures("mapping")
def test_pages_leave_half_of_all_open_files(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    import resource

    written = blob_io.write(folder, unstored_row(), noise_page())
    fd, _ = blob_files.open_file(folder, written.blob)
    os.close(fd)  # the number that the next file gets
    monkeypatch.setattr(resource, "getrlimit", lambda _: (2 * fd + 12, 2 * fd + 12))
    pages = [read_page(folder, written) for _ in range(9)]
    assert 1 < len([page for page in pages if not own_memory(page)]) < 7
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert not own_memory(read_page(folder, written))
