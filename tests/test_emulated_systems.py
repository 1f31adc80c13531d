"""The core where Python lacks what Linux has: without fcntl, forks, flags of maps and of files, an OpenMP runtime of GNU's, or oneDNN.

In a process that other systems' lacks were brought into (emulated_systems.py). No test here has run on Windows or macOS.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.checkout import ROOT
from tests.processes import program

# In memory, with reuse off, reopened from disk, after damage to the index, and from an archive in another store.
ASKED = """
import json, sys, warnings
from pathlib import Path
system, place = sys.argv[1], Path(sys.argv[2])
if system != "linux":
    from tests.emulated_systems import become
    become(system)
    warnings.filterwarnings("error", category=EncodingWarning, module="agentcache")  # text that Windows would read in another encoding

from contextlib import closing
from agentcache import Engine, Recorder, StoreOptions
from agentcache.model.kernels import jit
from agentcache.store.admin import archive, check, prune
from agentcache.store.disk import process_identity
from agentcache.store.disk.folder import Folder
from agentcache.store.disk.index import Index
from tests import models
from tests.engines import SYSTEM, TOOLS, chat, decode, long_text

model, said, tokens = models.build("qwen3"), {"compiled": jit.compiler() is not None}, []
TURNS = chat(long_text(150), "North, four.", "And the tide?")

def ask(engine, **options):
    done = engine.generate(TURNS, TOOLS, sampling=decode(6), **options)
    tokens.append(done.ids)
    return done.receipt

def opened(place):
    return Engine(model, models.toy_tokenizer(), store=StoreOptions(place, refuse_slow=False))

with opened(place / "store") as engine:
    engine.warm(SYSTEM, TOOLS, name="group")
    ask(engine, reuse="off")
    said["hit"] = ask(engine).cached_tokens > 0
    said["again"] = ask(engine).cached_tokens > 0
with opened(place / "store") as engine:
    receipt = ask(engine)
    said["disk"], said["bitwise"] = receipt.disk_tokens > 500, receipt.bitwise
folder = Folder.open(place / "store")
with closing(Index(folder)) as index:
    [group] = index.groups()
    archive.export_group(folder, index, group, place / "group.archive")
(folder.index).write_bytes(b"damaged" * 1000)
said["damage"] = bool(check.verify(folder, fix=True).problems)
with opened(place / "store") as engine:
    said["rebuilt"] = ask(engine).disk_tokens > 0
    engine.forget(older_than=0)
    said["forgotten"] = ask(engine).cached_tokens == 0
with opened(place / "other") as engine:
    pass
other = Folder.open(place / "other")
with closing(Index(other)) as index:
    archive.import_group(other, index, place / "group.archive")
with opened(place / "other") as engine:
    said["imported"] = ask(engine).disk_tokens > 0
with Recorder(place / "records.jsonl") as recorder:
    recorder.record(TURNS, TOOLS)
    recorder.record(TURNS)
said["records"] = (place / "records.jsonl").read_bytes().count(b"\\n")
said["alive"] = process_identity.alive(process_identity.token())
said["equal"] = len(set(tokens)) == 1
print(json.dumps(said | {"tokens": tokens[0]}))
"""


def asked(system: str, place: Path) -> dict[str, Any]:
    """What a process says that has become this system."""
    said, _ = program(ASKED, system, place, AGENTCACHE_DIR=str(place / "default"))
    found: dict[str, Any] = json.loads(said.splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The same on this system."""
    return asked("linux", tmp_path_factory.mktemp("linux"))


@pytest.mark.skipif(sys.platform != "linux", reason="Linux is what other systems are emulated on")
@pytest.mark.parametrize("system", ["win32", "darwin"])
def test_another_system_gives_the_same_tokens(system: str, here: dict[str, Any], tmp_path: Path) -> None:
    found = asked(system, tmp_path)
    assert not found.pop("compiled"), "kernels are compiled only where PyTorch has GNU's OpenMP runtime"
    assert found == {name: value for name, value in here.items() if name != "compiled"}
    assert all(found.values())


@pytest.mark.slow
@pytest.mark.parametrize("system", ["win32", "darwin"])
def test_types_are_right_on_another_system(system: str, tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    command = [sys.executable, "-m", "mypy", "--platform", system, "--cache-dir", str(tmp_path), "agentcache"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
