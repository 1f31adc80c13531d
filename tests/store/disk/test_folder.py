"""The folder of a store, the tokens of processes: what is refused, what two that start together agree on."""

from __future__ import annotations

import builtins
import os
import stat
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest

from agentcache.cli.upkeep import examine
from agentcache.errors import BlobError, ConfigError, StoreCorruptError, StoreError, StoreFormatError, StorePermissionError
from agentcache.model.kernels.object_cache import Objects
from agentcache.private import default_path
from agentcache.store.disk import folder as module
from agentcache.store.disk.folder import Folder, default_key
from tests.store.index_rows import FORK, forks

KEY, OTHER = bytes(range(32)), bytes(32)


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AGENTCACHE_DIR", raising=False)
    monkeypatch.delenv("AGENTCACHE_KEY", raising=False)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


# -- made once -----------------------------------------------------------------------------------------------------


def test_a_new_folder_is_private_and_opens_again(tmp_path: Path) -> None:
    place = tmp_path / "above" / "store"
    before = os.umask(0)
    try:
        first = Folder.open(place)
    finally:
        os.umask(before)
    assert mode(place) == 0o700
    assert mode(place / "blobs") == 0o700
    assert mode(place / "key") == 0o600
    assert (place / "format").read_text() == "agentcache store 1\n"
    assert first.writable
    assert not first.encrypted
    assert first.blobs == place / "blobs"
    again = Folder.open(place, create=False)
    assert again.key == first.key
    assert len(first.key) == 32
    assert first.key.hex() not in repr(first)
    assert repr(first.key) not in repr(first)


def test_no_store_is_made_where_none_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(StoreFormatError, match="there is no store"):
        Folder.open(tmp_path / "store", create=False)
    assert not (tmp_path / "store").exists()
    (tmp_path / "empty").mkdir(mode=0o700)
    with pytest.raises(StoreFormatError, match="there is no store"):
        Folder.open(tmp_path / "empty", create=False)
    assert not list((tmp_path / "empty").iterdir())
    (tmp_path / "documents").mkdir(mode=0o755)  # named by mistake: nobody is to change its mode
    with pytest.raises(StoreFormatError, match="there is no store at .*: `agentcache warm` or an Engine makes one"):
        Folder.open(tmp_path / "documents", create=False)


def test_the_default_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert default_path() is not None
    assert default_path().name == "agentcache"
    monkeypatch.setenv("AGENTCACHE_DIR", str(tmp_path / "mine"))
    assert default_path() == tmp_path / "mine"
    assert Folder.open().path == tmp_path / "mine"
    monkeypatch.setenv("AGENTCACHE_DIR", "")
    assert default_path() is None
    with pytest.raises(StoreError, match="AGENTCACHE_DIR=''"):
        Folder.open()


@pytest.mark.skipif(os.name == "nt", reason="homes are asked for otherwise")
@pytest.mark.parametrize("given", [None, "~/mine"])
def test_a_user_without_a_home_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch, given: str | None) -> None:
    for name in ("HOME", "XDG_CACHE_HOME", "AGENTCACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    if given:
        monkeypatch.setenv("AGENTCACHE_DIR", given)
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    with pytest.raises(StoreError, match="this user has no home: set AGENTCACHE_DIR"):
        Folder.open()
    assert Objects("a machine").find("code") is None
    assert "no home" in examine(None)["problem"]


@forks
@pytest.mark.parametrize("how", ["threads", "processes"])
def test_those_who_start_together_agree(tmp_path: Path, how: str) -> None:
    for turn in range(5):
        place, said = tmp_path / str(turn), tmp_path / f"said{turn}"
        said.mkdir()
        start: Any = FORK.Barrier(6) if how == "processes" else threading.Barrier(6)

        def run(number: int, place: Path = place, said: Path = said, start: Any = start) -> None:
            start.wait(20)
            (said / str(number)).write_bytes(Folder.open(place).key)

        workers: list[Any] = [(FORK.Process if how == "processes" else threading.Thread)(target=run, args=(i,)) for i in range(6)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(30)
        keys = [path.read_bytes() for path in said.iterdir()]
        assert len(keys) == 6
        assert set(keys) == {Folder.open(place).key}
        assert not list(place.glob("*.new"))


def test_what_was_interrupted_is_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writes: list[Path] = []
    put = module.put

    def stops(path: Path, content: bytes) -> None:
        if len(writes) == stop:
            (path.with_name(path.name + ".new")).write_bytes(b"half")
            raise KeyboardInterrupt
        writes.append(path)
        put(path, content)

    for stop in range(3):
        writes.clear()
        place = tmp_path / str(stop)
        with monkeypatch.context() as patch:
            patch.setattr(module, "put", stops)
            with pytest.raises(KeyboardInterrupt):
                Folder.open(place)
        assert not (place / "format").exists()
        with pytest.raises(StoreFormatError, match="there is no store"):
            Folder.open(place, create=False)
        assert len(Folder.open(place).key) == 32


# -- refused -------------------------------------------------------------------------------------------------------


def test_a_folder_that_is_open_to_others_is_refused(tmp_path: Path) -> None:
    place = tmp_path / "it's mine"
    Folder.open(place)
    for path, bits, mend in ((place, 0o750, "chmod 700"), (place, 0o701, "chmod 700"), (place / "key", 0o640, "chmod 600")):
        was = mode(path)
        path.chmod(bits)
        with pytest.raises(StorePermissionError, match=mend) as caught:
            Folder.open(place)
        line = str(caught.value)[str(caught.value).index("chmod") :]
        subprocess.run(line, shell=True, check=True)
        assert mode(path) == was
        Folder.open(place)


def test_an_empty_folder_that_is_open_to_others_is_refused(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o755)
    with pytest.raises(StorePermissionError, match="mode 755"):
        Folder.open(tmp_path / "shared")
    assert not list((tmp_path / "shared").iterdir())


def test_a_foreign_owner_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Folder.open(tmp_path / "store")
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(StorePermissionError, match="belongs to user"):
        Folder.open(tmp_path / "store")


@pytest.mark.parametrize("name", ["", "key", "format", "blobs", "encryption", "index.sqlite"])
def test_symbolic_links_are_refused(tmp_path: Path, name: str) -> None:
    place = tmp_path / "store"
    Folder.open(place)
    (place / "index.sqlite").touch(mode=0o600)
    moved = tmp_path / "elsewhere"
    (place / name).rename(moved)
    (tmp_path / "store" / name).symlink_to(moved)
    with pytest.raises(StorePermissionError, match="symbolic link"):
        Folder.open(place)


def test_a_file_or_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch(mode=0o600)
    with pytest.raises(StorePermissionError, match="not what it should be"):
        Folder.open(tmp_path / "file")
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    (home / "letters.txt").touch()
    with pytest.raises(StoreFormatError, match=r"letters\.txt"):
        Folder.open(home)
    assert [path.name for path in home.iterdir()] == ["letters.txt"]


@pytest.mark.parametrize("text", ["agentcache store 2\n", "", "agentcache store 1", "\udcff"])
def test_another_format_is_refused_and_not_touched(tmp_path: Path, text: str) -> None:
    place = tmp_path / "store"
    Folder.open(place)
    (place / "format").write_bytes(text.encode("utf-8", "surrogateescape"))
    (place / "key").unlink()
    before = {path: path.read_bytes() for path in place.iterdir() if path.is_file()}
    with pytest.raises(StoreFormatError, match="this version reads"):
        Folder.open(place)
    assert before == {path: path.read_bytes() for path in place.iterdir() if path.is_file()}


@pytest.mark.parametrize("damage", ["gone", "short"])
def test_a_damaged_key_is_refused(tmp_path: Path, damage: str) -> None:
    Folder.open(tmp_path)
    if damage == "gone":
        (tmp_path / "key").unlink()
    else:
        (tmp_path / "key").write_bytes(b"short")
    with pytest.raises(StoreCorruptError, match="key"):
        Folder.open(tmp_path)


def test_system_errors_come_as_ours(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="cannot be opened"):
        Folder.open(tmp_path / "file" / "store")


def test_a_read_only_folder_is_read(tmp_path: Path) -> None:
    place = tmp_path / "store"
    key = Folder.open(place).key
    place.chmod(0o500)
    try:
        opened = Folder.open(place)
        assert not opened.writable
        assert opened.key == key
    finally:
        place.chmod(0o700)
    assert Folder.open(place).writable
    (tmp_path / "nothing").mkdir(mode=0o500)
    with pytest.raises(StoreFormatError, match="there is no store"):
        Folder.open(tmp_path / "nothing")


# -- encryption ----------------------------------------------------------------------------------------------------


def test_sealed_data_opens_with_its_context_alone(tmp_path: Path) -> None:
    store = Folder.open(tmp_path / "a", key=KEY)
    other = Folder.open(tmp_path / "b", key=KEY)
    assert store.encrypted
    sealed = store.seal(b"secret words", b"here")
    assert b"secret" not in sealed
    assert sealed != store.seal(b"secret words", b"here")
    assert store.open_sealed(sealed, b"here") == b"secret words"
    assert Folder.open(tmp_path / "a", key=KEY).open_sealed(memoryview(sealed), b"here") == b"secret words"
    flipped = bytes([*sealed[:-1], sealed[-1] ^ 1])
    for opener, data, context in ((store, sealed, b"there"), (store, flipped, b"here"), (store, b"", b"here"), (other, sealed, b"here")):
        with pytest.raises(BlobError, match="damaged"):
            opener.open_sealed(data, context)


def test_a_clear_store_seals_nothing(tmp_path: Path) -> None:
    store = Folder.open(tmp_path)
    assert store.seal(memoryview(b"words"), b"x") == b"words" == store.open_sealed(b"words", b"y")


def test_the_key_must_be_given_exactly_where_it_was_used(tmp_path: Path) -> None:
    Folder.open(tmp_path / "sealed", key=KEY)
    Folder.open(tmp_path / "clear")
    with pytest.raises(StoreFormatError, match="give its key"):
        Folder.open(tmp_path / "sealed")
    with pytest.raises(StoreFormatError, match="another key"):
        Folder.open(tmp_path / "sealed", key=OTHER)
    with pytest.raises(StoreFormatError, match="not encrypted"):
        Folder.open(tmp_path / "clear", key=KEY)
    with pytest.raises(ConfigError, match="31 bytes"):
        Folder.open(tmp_path / "new", key=KEY[1:])
    assert KEY not in (tmp_path / "sealed" / "encryption").read_bytes()
    assert Folder.open(tmp_path / "sealed", key=KEY).key != (tmp_path / "sealed" / "key").read_bytes()


def test_the_key_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert default_key() is None
    monkeypatch.setenv("AGENTCACHE_KEY", KEY.hex())
    assert default_key() == KEY
    assert Folder.open(tmp_path / "store").encrypted
    for content in (KEY, KEY.hex().encode() + b"\n"):
        (tmp_path / "secret").write_bytes(content)
        monkeypatch.setenv("AGENTCACHE_KEY", str(tmp_path / "secret"))
        assert default_key() == KEY
    (tmp_path / "secret").write_bytes(b"short")
    with pytest.raises(ConfigError, match="32 bytes or 64"):
        default_key()
    monkeypatch.setenv("AGENTCACHE_KEY", KEY.hex()[1:])
    with pytest.raises(ConfigError, match="64 hexadecimal") as caught:
        default_key()
    assert KEY.hex()[1:] not in str(caught.value)  # it may be most of a key


def test_without_the_library_no_store_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any, **more: Any) -> Any:
        if name.startswith("cryptography"):
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(StoreError, match=r"agentcache-llm\[encryption\]"):
        Folder.open(tmp_path / "store", key=KEY)
    assert not (tmp_path / "store" / "format").exists()
    assert not Folder.open(tmp_path / "store").encrypted
