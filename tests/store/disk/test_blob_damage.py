"""Blobs that were damaged, forged, swapped or replaced by something else: refused, cheaply, and the page stays empty."""

from __future__ import annotations

import errno
import json
import os
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from agentcache.errors import BlobError, StoreError
from agentcache.kv import Page
from agentcache.kv_spec import KVSpec
from agentcache.store.disk import blob, blob_files, blob_format, blob_io
from agentcache.store.disk.folder import Folder
from tests.store.stored_pages import (
    SPEC,
    blob_path,
    edit_file,
    files_under_blobs,
    fill_page,
    noise_page,
    read_page,
    refused_read,
    same_numbers,
    unstored_row,
)

KINDS = {"sealed": 512, "partial": 100}


@pytest.fixture(params=["mapped", "read"])
def folder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Folder:
    """A store whose full pages are mapped, or read, wherever these tests run."""
    monkeypatch.delenv("AGENTCACHE_KEY", raising=False)
    monkeypatch.setattr(blob_files, "local", lambda path: True)
    monkeypatch.setattr(blob_files, "in_memory", lambda fd, size: request.param == "mapped")
    return Folder.open(tmp_path / "store")


# -- damage ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("widths", [(), ((1, 2, 1), (1, 1, 2))], ids=str)
def test_every_single_byte_counts(folder: Folder, widths: tuple[tuple[int, int, int], ...]) -> None:
    """A small blob, each byte flipped in turn: `verify` refuses, and so does `describe` outside the layers."""
    spec = KVSpec(2, 1, 2, torch.float32, widths=widths)
    written = blob_io.write(folder, unstored_row(spec, 5), noise_page(spec, 5))
    file = blob_path(folder, written)
    plan = blob_format.plan(written, False)
    with open(file, "r+b", buffering=0) as raw:
        for at in range(plan.bytes):
            before = os.pread(raw.fileno(), 1, at)
            os.pwrite(raw.fileno(), bytes([before[0] ^ (1 << at % 8)]), at)
            with pytest.raises(BlobError):
                blob_io.verify(folder, written)
            if not len(plan.front) <= at < plan.ids:
                with pytest.raises(BlobError):
                    blob_io.describe(folder, written.blob)
            os.pwrite(raw.fileno(), before, at)
    blob_io.verify(folder, written)


def positions(plan: blob_format.Plan) -> dict[str, int]:
    """A byte of each kind."""
    text = plan.front.rstrip()
    half = plan.size(0) // 2
    return {
        "length, low byte": 0,
        "length, high byte": 7,
        "header": 8,
        "metadata": text.index(b"weights"),
        "shape": text.index(b"shape") + 9,
        "offsets": text.index(b"data_offsets") + 16,
        "padding": len(plan.front) - 1,
        "first key": len(plan.front),
        "last value of the first layer": plan.at(1) - 1,
        "a key of the last layer": plan.at(2) + 5,
        "a value of the last layer": plan.at(2) + half + 5,
        "first id": plan.ids,
        "mac of a layer": plan.macs + 3,
        "mac of the page": plan.bytes - 1,
    }


@pytest.mark.parametrize("encrypted", [False, True])
@pytest.mark.parametrize("tokens", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("where", positions(blob_format.plan(unstored_row(), False)))
def test_a_changed_byte_or_a_cut_is_never_served(tmp_path: Path, where: str, tokens: int, encrypted: bool) -> None:
    folder = Folder.open(tmp_path / "store", key=b"k" * 32 if encrypted else None)
    written = blob_io.write(folder, unstored_row(tokens=tokens), noise_page())
    file = blob_path(folder, written)
    at = positions(blob_format.plan(written, encrypted))[where]
    whole = edit_file(file, lambda b: b.__setitem__(at, b[at] ^ 0x10))
    assert repr(written.blob) in str(refused_read(folder, written))
    with pytest.raises(BlobError):
        blob_io.verify(folder, written)
    file.write_bytes(whole[:at])
    refused_read(folder, written)
    file.write_bytes(whole[:at] + whole[at + 1 :])
    refused_read(folder, written)
    file.write_bytes(whole)
    assert read_page(folder, written).filled == tokens


@pytest.mark.parametrize("extra", [b"\0", b"x" * 5000])
def test_appended_bytes_are_refused(folder: Folder, extra: bytes) -> None:
    written = blob_io.write(folder, unstored_row(), noise_page())
    edit_file(blob_path(folder, written), lambda b: b.extend(extra))
    assert "bytes" in str(refused_read(folder, written))
    with pytest.raises(BlobError, match="bytes"):  # without a row to compare with, too
        blob_io.describe(folder, written.blob)


def test_layers_in_another_order_are_refused(folder: Folder) -> None:
    written = blob_io.write(folder, unstored_row(), noise_page())
    plan = blob_format.plan(written, False)
    file = blob_path(folder, written)

    def swap(b: bytearray, a: int, c: int, size: int) -> None:
        b[a : a + size], b[c : c + size] = b[c : c + size], b[a : a + size]

    whole = edit_file(file, lambda b: swap(b, plan.at(0), plan.at(1), plan.size(0)))
    assert "section" in str(refused_read(folder, written))
    edit_file(file, lambda b: swap(b, plan.macs, plan.macs + 32, 32))  # their macs along with them
    refused_read(folder, written)
    file.write_bytes(whole)
    read_page(folder, written)


def test_the_blob_of_another_row_is_refused(folder: Folder) -> None:
    one, other = (blob_io.write(folder, unstored_row(first=first), noise_page(seed=first)) for first in (0, 1000))
    refused_read(folder, replace(one, blob=other.blob))
    changes: dict[str, Any] = {
        "parent": bytes(32), "namespace": "x", "fingerprint": "x", "regime": "x", "place": 1, "bytes": one.bytes + 1,
        "ids": one.ids[::-1].copy(), "precision": "int8",
    }  # fmt: skip
    for name, value in changes.items():
        error = refused_read(folder, replace(one, **{name: value}))
        assert name in str(error)
        with pytest.raises(BlobError, match=name):
            blob_io.verify(folder, replace(one, **{name: value}))
    renamed = replace(one, blob=f"{one.blob[:2]}{'0' * 30}{one.blob[32:]}")
    blob_path(folder, one).rename(blob_path(folder, renamed))
    assert isinstance(refused_read(folder, one).__cause__, FileNotFoundError)
    assert read_page(folder, renamed).filled == 512  # a name means nothing


def test_a_key_that_its_ids_do_not_make_is_refused(folder: Folder) -> None:
    forged = blob_io.write(folder, replace(unstored_row(), page_key=bytes(32)), noise_page())
    with pytest.raises(BlobError, match="ids"):
        blob_io.describe(folder, forged.blob)


def test_macs_are_this_stores_own(folder: Folder) -> None:
    written = blob_io.write(folder, unstored_row(), noise_page())
    refused_read(replace(folder, key=b"x" * 32), written)


def test_the_role_may_change_in_the_index(folder: Folder) -> None:
    written = blob_io.write(folder, unstored_row(), noise_page())
    assert read_page(folder, replace(written, role=2, created=0.0, hits=5)).filled == 512


def test_numerics_of_the_index_are_not_believed(folder: Folder) -> None:
    written = blob_io.write(folder, unstored_row(), noise_page())
    refused_read(folder, replace(written, numerics=frozenset({"of another machine"})))


# -- hostile headers ---------------------------------------------------------------------------------------------------


def header(text: str | bytes, length: int | None = None, rest: bytes = b"") -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    size = -(-(8 + len(raw)) // 4096) * 4096
    return (size - 8 if length is None else length).to_bytes(8, "little") + raw.ljust(size - 8) + rest


def metadata(**changes: Any) -> str:
    """A header that says of a row what it likes, well formed."""
    found = {**json.loads(blob_format.pack(unstored_row(tokens=4))), **changes}
    return json.dumps({"__metadata__": {"agentcache": "2", "row": json.dumps(found)}})


BOMBS = {
    "empty": b"",
    "seven bytes": b"1234567",
    "length 2^60": header("{}", 1 << 60),
    "length 2^64 - 1": header("{}", (1 << 64) - 1),
    "length of the whole file": header("{}", 8192 - 8),
    "length not aligned": header("{}", 100, b"\0" * 4096),
    "length 0": header("{}", 0),
    "longer than the cap": header(" " * 70000, None, b"\0" * 4096),
    "deep lists": header("[" * 60000),
    "deep objects": header('{"a":' * 10000),
    "deep row": header(json.dumps({"__metadata__": {"row": "[" * 30000}})),
    "no json": header(b"\xff\xfe" * 100),
    "a number": header("1e999"),
    "a huge number": header("9" * 60000),
    "no metadata": header('{"keys.0":{"dtype":"F32","shape":[1,2,3],"data_offsets":[0,24]}}'),
    "row of numbers": header('{"__metadata__":{"row":5}}'),
    "too many layers": header(metadata(widths=[[1, 1, 1]] * 5000)),
    "huge shape": header(metadata(widths=[[4096, 4096, 4096]] * 1000, tokens=512)),
    "many tokens": header(metadata(tokens=513)),
    "no tokens": header(metadata(tokens=0)),
    "negative": header(metadata(place=-1)),
    "true": header(metadata(place=True)),
    "dtype": header(metadata(dtype="object")),
    "precision": header(metadata(precision="pickle")),
    "created": header(metadata(created=float("nan"))),
    "keys": header(metadata(page_key="00")),
    "names": header(metadata(namespace=["x"])),
    "numerics": header(metadata(numerics=[[]])),
    "extra": header(metadata(evil=1)),
    "widths beyond all reason": header(metadata(widths=[[2, 16, 8], [1, 4097, 16]])),
    "channels beyond all reason": header(metadata(widths=[[2, 16, 8], [32, 4096, 16]])),
    "widths of two numbers": header(metadata(widths=[[2, 16], [1, 8]])),
    "widths of nothing": header(metadata(widths=[])),
    "widths that are true": header(metadata(widths=[[2, 16, 8], [True, 8, 16], [1, 8, 8]])),
    "widths below zero": header(metadata(widths=[[2, 16, 8], [1, 8, 16], [1, 8, -8]])),
    "widths of one list": header(metadata(widths=[2, 16, 8])),
}


@pytest.mark.parametrize("name", BOMBS)
def test_hostile_headers_are_refused_before_anything_is_allocated(folder: Folder, name: str) -> None:
    written = blob_io.write(folder, unstored_row(tokens=4), noise_page())
    blob_path(folder, written).write_bytes(BOMBS[name])
    found = Page(SPEC)
    tracemalloc.start()
    try:
        for attempt in (
            lambda: blob_io.describe(folder, written.blob),
            lambda: blob_io.verify(folder, written),
            lambda: fill_page(folder, written, found, tokens=4, threads=1),
        ):
            with pytest.raises(BlobError):
                attempt()
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()
    assert found.filled == 0


@pytest.mark.parametrize("length", [0, 100, 4087, 4089, 65536 - 8 + 4096, (1 << 20) - 8, (1 << 64) - 8])
def test_a_headers_length_is_judged_before_it_is_read(length: int) -> None:
    with pytest.raises(BlobError):
        blob_files.front_bytes(length.to_bytes(8, "little"), 1 << 40, blob_format.FRONT_MOST)
    assert blob_files.front_bytes((65536 - 8).to_bytes(8, "little"), 65536, blob_format.FRONT_MOST) == 65536
    with pytest.raises(BlobError):
        blob_files.front_bytes((65536 - 8).to_bytes(8, "little"), 65535, blob_format.FRONT_MOST)


@pytest.mark.parametrize("name", ["place", "tokens", "role", "checkpoint_bytes"])
@pytest.mark.parametrize("value", [True, 1.0, "1", None, -1, 1 << 40])
def test_counts_are_counts(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=name):
        blob_format.unpack(json.dumps({**json.loads(blob_format.pack(unstored_row())), name: value}))


def test_a_header_that_contradicts_its_row_is_refused(folder: Folder) -> None:
    """Even by the one who has the key: duplicate names, overlaps, gaps, other shapes."""
    made = unstored_row(tokens=4)
    written = blob_io.write(folder, made, noise_page())
    file, plan = blob_path(folder, written), blob_format.plan(made, False)
    good, content = plan.front[8:].rstrip(), file.read_bytes()
    forged = {
        "duplicate": good.replace(b'{"__metadata__"', b'{"keys.0":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"__metadata__"'),
        "overlap": good.replace(b'"data_offsets":[256,', b'"data_offsets":[0,'),
        "shape": good.replace(b"[2,16,4]", b"[2,4,16]", 1),
        "dtype": good.replace(b"BF16", b"F16", 1),
        "order": b" " + good,
        "more": good.replace(b'"agentcache":"2"', b'"agentcache":"2","format":"pt"'),
        "version": good.replace(b'"agentcache":"2"', b'"agentcache":"3"'),
    }
    for name, text in forged.items():
        assert text != good, name
        front = header(text)
        ids, macs = content[plan.ids : plan.macs], content[plan.macs : -32]
        tail = blob.mac_of(folder.key, blob_format.tail_context(made, False), front, ids, macs)
        file.write_bytes(front + content[len(plan.front) : -32] + tail)
        assert "header" in str(refused_read(folder, written)), name


def test_a_header_too_long_to_read_is_not_written(folder: Folder) -> None:
    with pytest.raises(StoreError, match="header"):
        blob_io.write(folder, unstored_row(namespace="n" * 70000), noise_page())
    assert files_under_blobs(folder) == []


# -- files that are not what they seem ---------------------------------------------------------------------------------


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", ["symlink", "fifo", "folder", "socket", "missing", "folder linked", "device"])
def test_only_plain_files_inside_the_store_are_opened(folder: Folder, tmp_path: Path, kind: str) -> None:
    written = blob_io.write(folder, unstored_row(), noise_page())
    file = blob_path(folder, written)
    away = tmp_path / "away"
    file.rename(away)
    if kind == "symlink":
        file.symlink_to(away)
    elif kind == "fifo":
        os.mkfifo(file)
    elif kind == "folder":
        file.mkdir()
    elif kind == "socket":
        import socket

        here = os.getcwd()
        os.chdir(file.parent)  # a socket's path is short
        try:
            with socket.socket(socket.AF_UNIX) as made:
                made.bind(file.name)
        finally:
            os.chdir(here)
    elif kind == "folder linked":
        file.parent.rmdir()
        outside = tmp_path / "outside"
        outside.mkdir()
        away.rename(outside / file.name)
        file.parent.symlink_to(outside)
    elif kind == "device":
        file.symlink_to("/dev/zero")
    refused_read(folder, written)
    with pytest.raises(BlobError, match="plain file" if kind in ("fifo", "folder") else None):
        blob_io.describe(folder, written.blob)


@pytest.mark.parametrize("name", ["", "x", "../../etc/passwd", "ab/cd", f"{'0' * 32}-1.2.3", f"../{'0' * 29}-1.2.{'0' * 12}", "\0"])
def test_a_name_is_never_a_path(folder: Folder, name: str) -> None:
    with pytest.raises(BlobError, match="no name"):
        blob_io.describe(folder, name)


@pytest.mark.parametrize(("local", "after"), [*((True, n) for n in range(2, 6)), *((False, n) for n in range(2, 9))])
def test_a_file_that_shrinks_while_it_is_read(folder: Folder, local: bool, after: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blob_files, "in_memory", lambda fd, size: False)
    monkeypatch.setattr(blob_files, "local", lambda path: local)
    written = blob_io.write(folder, unstored_row(), noise_page())
    real, calls = os.preadv, iter(range(1000))

    def shrinking(fd: int, buffers: Any, at: int) -> int:
        if next(calls) == after:
            os.truncate(blob_path(folder, written), at + 10)
        return real(fd, buffers, at)

    monkeypatch.setattr(os, "preadv", shrinking)
    assert "shorter" in str(refused_read(folder, written, threads=1))


@pytest.mark.parametrize("after", range(9))
def test_a_disk_that_fails_while_it_is_read(folder: Folder, after: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blob_files, "in_memory", lambda fd, size: False)
    written = blob_io.write(folder, unstored_row(), noise_page())
    real, calls = os.preadv, iter(range(1000))

    def failing(fd: int, buffers: Any, at: int) -> int:
        if next(calls) == after:
            raise OSError(errno.EIO, "input/output error")
        return real(fd, [buffers[0][:1000]], at)  # and short reads

    monkeypatch.setattr(os, "preadv", failing)
    refused_read(folder, written)


def test_short_reads_and_writes_go_on(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blob_files, "in_memory", lambda fd, size: False)
    write, read = os.pwritev, os.preadv
    monkeypatch.setattr(os, "pwritev", lambda fd, buffers, at: write(fd, [buffers[0][:777]], at))
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, at: read(fd, [buffers[0][:999]], at))
    original = noise_page()
    assert same_numbers(read_page(folder, blob_io.write(folder, unstored_row(), original)), original, 512)
