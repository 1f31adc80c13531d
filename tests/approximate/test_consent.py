"""Approximate reuse stands beside the core: an engine whose callers never consent to it loads none of its code."""

from __future__ import annotations

from pathlib import Path

from tests.import_graph import importers
from tests.processes import program

WING = "agentcache.approximate"
PROGRAM = """
import sys, warnings
warnings.simplefilter("error")
warnings.simplefilter("ignore", EncodingWarning)  # on, for other programs
from agentcache.errors import CalibrationError
from tests.engines import chat, decode, engine

def loaded():
    return sorted(name for name in sys.modules if name.startswith("agentcache.approximate"))

with engine(store=sys.argv[1]) as running:
    for reuse in ("exact", "exact", "lossy", "off"):
        running.generate(chat("one"), sampling=decode(2), reuse=reuse)
    running.flush()
    running.forget(namespace="default")
    print(loaded())
    try:
        running.generate(chat("one"), sampling=decode(2), reuse="approximate")
    except CalibrationError:
        print("agentcache.approximate.segments" in loaded())
    running.warm("You are one.", name="group")  # a refused consent indexes no text
    running.flush()
    print("datasketch" in sys.modules)
"""


def test_without_consent_no_line_of_it_is_imported(tmp_path: Path) -> None:
    assert program(PROGRAM, tmp_path / "store")[0].splitlines() == ["[]", "True", "False"]


def test_the_core_names_it_in_one_file() -> None:
    around = ("agentcache.bench", "agentcache.cli")
    inside = {name for name in importers(WING) if name.startswith("agentcache") and not name.startswith(around)}
    assert inside == {"agentcache.engine"}, "the engine of a caller who consents"
