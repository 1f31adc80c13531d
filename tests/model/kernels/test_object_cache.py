"""Compiled code outlives its process, in a folder that only its owner may write; what nobody vouches for is compiled again."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from agentcache.errors import ModelLoadError, StoreWarning
from agentcache.model import loading as loading_of_models
from agentcache.model.kernels import jit, linear_compiled, object_cache
from agentcache.store.disk.folder import Folder

pytestmark = [
    pytest.mark.usefixtures("compiled_anew"),
    pytest.mark.skipif(jit.compiler() is None, reason="needs llvmlite and PyTorch's OpenMP runtime"),
]
Process = Callable[[], tuple[Any, list[str]]]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a later process looks for what an earlier one compiled."""
    monkeypatch.setenv("AGENTCACHE_DIR", str(tmp_path / "store"))
    return tmp_path / "store" / "kernels"


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Process:
    """Kernels as a new process has them, and the sources that it had to compile."""
    known = jit.compiler()
    assert known is not None

    def begin() -> tuple[Any, list[str]]:
        compiled: list[str] = []
        parse = jit.binding.parse_assembly
        monkeypatch.setattr(jit.binding, "parse_assembly", lambda text: (compiled.append(text) if text else None, parse(text))[1])
        fresh = jit.Compiler(known._team, known.lanes)
        monkeypatch.setattr(jit, "compiler", lambda: fresh)
        return fresh, compiled

    return begin


def product() -> torch.Tensor:
    torch.manual_seed(3)
    return linear_compiled.chains(torch.randn(2, 1024).half(), [(torch.randn(64, 1024).half(), None)])[0]


def flip(file: Path, at: int) -> None:
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)


def test_a_later_process_compiles_nothing_and_computes_the_same(place: Path, process: Process) -> None:
    _, compiled = process()
    expected = product()
    assert len(compiled) == len(list(place.glob("*.o"))) == 1
    _, compiled = process()
    assert torch.equal(product(), expected)
    assert compiled == []
    assert (place.stat().st_mode & 0o777, (place / "key").stat().st_mode & 0o777) == (0o700, 0o600)
    assert Folder.open(place.parent).path == place.parent, "a store is made in the same folder"


def test_nothing_is_kept_where_nothing_shall_be(tmp_path: Path, process: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTCACHE_DIR", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for _ in range(2):
        _, compiled = process()
        product()
        assert len(compiled) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("at", [0, 31, 32, 1000, -1])
def test_a_changed_byte_is_compiled_again(place: Path, process: Process, at: int) -> None:
    process()
    expected = product()
    (file,) = place.glob("*.o")
    good = file.read_bytes()
    flip(file, at)
    _, compiled = process()
    assert torch.equal(product(), expected)
    assert len(compiled) == 1
    assert file.read_bytes() == good, "the right code took its place"


def test_code_is_authenticated_under_its_name_and_key(place: Path, process: Process) -> None:
    kernels, _ = process()
    product()
    (file,) = place.glob("*.o")
    objects, code = kernels._objects, file.read_bytes()
    assert objects.find(file.stem) == code[32:]
    assert objects.find(objects.name("another source")) is None
    (place / f"{objects.name('another source')}.o").write_bytes(code)
    assert objects.find(objects.name("another source")) is None, "code of another source"
    assert objects.name("x") != object_cache.Objects("another processor").name("x")
    file.unlink()
    file.symlink_to(place / f"{objects.name('another source')}.o")
    assert objects.find(file.stem) is None
    (place / "key").write_bytes(bytes(32))
    assert object_cache.Objects(objects._machine).find(objects.name("another source")) is None


@pytest.mark.parametrize("whose", ["kernels", "kernels/key", "."])
def test_what_others_may_write_is_refused_and_said(place: Path, process: Process, whose: str) -> None:
    process()
    product()
    before = sorted(place.iterdir())
    os.chmod(place.parent / whose, 0o777)
    with pytest.warns(StoreWarning, match="compiled code is not kept on disk: .* open to other users"):
        _, compiled = process()
    product()
    assert len(compiled) == 1
    assert sorted(place.iterdir()) == before


def test_where_warnings_are_errors_a_refused_folder_costs_a_compilation(place: Path, process: Process) -> None:
    process()
    product()
    os.chmod(place.parent, 0o755)
    with warnings.catch_warnings():
        warnings.simplefilter("error", StoreWarning)
        _, compiled = process()
    product()
    assert len(compiled) == 1


def test_a_folder_that_cannot_be_made_costs_a_compilation(tmp_path: Path, process: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("AGENTCACHE_DIR", str(tmp_path / "file" / "store"))
    _, compiled = process()
    product()
    assert len(compiled) == 1


@pytest.mark.parametrize("left", [b"", b"half"])
def test_what_is_left_of_a_key_is_replaced(place: Path, process: Process, left: bytes) -> None:
    place.mkdir(mode=0o700, parents=True)
    place.parent.chmod(0o700)
    (place / "key").write_bytes(left)
    (place / "key").chmod(0o600)
    for sources in (1, 0):
        _, compiled = process()
        product()
        assert len(compiled) == sources


def test_a_full_disk_leaves_no_half_a_file(place: Path, process: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    process()

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    product()
    assert [file.name for file in place.iterdir()] == ["key"]


def test_what_was_compiled_longest_ago_goes_first(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_cache, "MOST_BYTES", 3000)
    objects = object_cache.Objects("a processor")
    for number in range(5):
        objects.keep(str(number), bytes(900))
        os.utime(place / f"{number}.o", (number, number))
    assert sorted(file.name for file in place.glob("*.o")) == ["2.o", "3.o", "4.o"]
    objects.keep("too large", bytes(3000))
    assert [objects.find(str(number)) is None for number in range(5)] == [True, True, False, False, False]


def test_products_are_compiled_while_weights_load(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = threading.Event()
    monkeypatch.setattr(linear_compiled, "compile_products", lambda int8: asked.set())

    def loading(*args: Any, **kwargs: Any) -> Any:
        assert asked.wait(20), "nothing is compiled before the weights are there"
        raise OSError("no weights")

    monkeypatch.setattr(loading_of_models.AutoModelForCausalLM, "from_pretrained", loading)
    with pytest.raises(ModelLoadError):
        loading_of_models.load("embedded")
