"""The verbs of the store: what they print, what their JSON holds, and their exit codes."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from agentcache import Engine, terminal
from agentcache.cli import app as cli
from agentcache.errors import ConfigError, StoreWarning
from agentcache.store.disk import blob_files, process_identity
from agentcache.store.disk.folder import Folder
from agentcache.store.disk.index import Index
from agentcache.store.keys import Role, Scope
from tests.checkout import ROOT
from tests.engines import TOOLS, chat, decode, long_text
from tests.store.index_rows import random_ids
from tests.store.stocked_store import manifest_of, reads_back, store_group
from tests.store.stored_pages import blob_path, edit_file

PROMPT = random_ids(1200)
Run = Callable[..., "tuple[int, str]"]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A store with the group `harbour/north` and another prompt."""
    monkeypatch.delenv("AGENTCACHE_KEY", raising=False)
    with Index(Folder.open(tmp_path / "store")) as index:
        store_group(index, PROMPT, "harbour/north")
        store_group(index, random_ids(700, 1), role=Role.TURN, scope=Scope("alice", "weights"))
        index.add_counters({"hits": 7})
        index.set_meta("read_rate", "1000000.0 1795241530.79")
    return tmp_path / "store"


def _run(*arguments: object, env: dict[str, str] | None = None) -> tuple[int, str, str]:
    done = CliRunner().invoke(cli.app, [str(argument) for argument in arguments], env={"COLUMNS": "160", "TERM": "dumb", **(env or {})})
    if done.exception and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.stdout, done.stderr


def said(*arguments: object, code: int = 0) -> str:
    """What a verb prints."""
    found, out, err = _run(*arguments)
    assert found == code, err
    return out


def told(*arguments: object, code: int = 0) -> dict[str, Any]:
    """The one JSON object a verb prints."""
    found: dict[str, Any] = json.loads(said(*arguments, "--json", code=code))
    return found


def refused(*arguments: object, env: dict[str, str] | None = None) -> str:
    """The one line with which a verb fails, with and without --json."""
    code, out, err = _run(*arguments, env=env)
    assert (code, out) == (1, "")
    assert err.startswith("agentcache: ")
    assert err.count("\n") == 1
    return err


def damage(place: Path) -> None:
    folder = Folder.open(place)
    with Index(folder) as index:
        row = next(index.rows(namespace="tests"))
    edit_file(blob_path(folder, row), lambda content: content.__setitem__(5000, content[5000] ^ 1))


# -- looking ---------------------------------------------------------------------------------------------------------


def test_ls_lists_groups(place: Path) -> None:
    out = said("ls", "--store", place)
    assert "harbour/north  tests      toy     1,200      2      3" in out
    assert out.splitlines()[-1].startswith("5 pages, ")
    assert "alice" not in out
    found = told("ls", "--store", place)
    assert found["rows"] == 5
    (group,) = found["groups"]
    assert (group["name"], group["prefix_tokens"], group["complete"], group["tools"]) == ("harbour/north", 1200, True, ["tide", "wind"])
    assert told("ls", "--store", place, "--namespace", "alice")["groups"] == []


def test_ls_tells_groups_of_one_name_apart(place: Path) -> None:
    with Index(Folder.open(place)) as index:
        assert "fingerprint" not in said("ls", "--store", place)
        (group,) = index.groups("tests", "harbour/north")
        index.put_group(replace(group, fingerprint="0123456789abcdef"))
    out = said("ls", "--store", place)
    assert "fingerprint" in out
    assert "0123456789ab " in out


def name_session(place: Path, name: str, lease_s: float) -> None:
    """Record the group's pages as those of a session too."""
    with Index(Folder.open(place)) as index:
        (group,) = index.groups("tests", "harbour/north")
        index.put_group(replace(group, name=f"session:{name}", tools=(), lease_end=group.created + lease_s))


def test_ls_shows_sessions_and_their_leases(place: Path) -> None:
    assert "leased" not in said("ls", "--store", place)
    name_session(place, "keeper", 3.2e9)
    out = said("ls", "--store", place)
    assert "session:keeper" in out
    assert "leased until" in out
    leases = {group["name"]: group["leased_until"] for group in told("ls", "--store", place)["groups"]}
    assert leases["harbour/north"] is None
    assert leases["session:keeper"] > "2070"


def test_ls_breaks_no_head_and_ends_with_tool_groups(place: Path) -> None:
    with Index(Folder.open(place)) as index:
        (group,) = index.groups("tests", "harbour/north")
        index.put_group(replace(group, model="Qwen/Qwen3-4B-Instruct-2507"))
    for number in range(3):
        name_session(place, f"{number:032}/researcher", 3.2e9)
    code, out, err = _run("ls", "--store", place, env={"COLUMNS": "80"})
    assert code == 0, err
    lines = out.splitlines()
    heads = [number for number, line in enumerate(lines) if "namespace" in line.split()]
    assert [lines[number].split() for number in heads] == [
        ["session", "namespace", "tokens", "pages", "size", "leased", "until"],
        ["tool", "group", "namespace", "model", "tokens", "tools", "pages", "size", "created"],
    ]
    assert heads[0] == 0, "and no line above that holds the rest of a head"
    assert lines[heads[1] - 1] == ""
    assert time.strftime("%Y-%m-%d", time.localtime(group.created)) in out, "no date is broken"
    assert not any("session:" in line for line in lines[heads[1] :])


def test_a_session_is_exported_pruned_and_imported(place: Path, tmp_path: Path) -> None:
    name_session(place, "keeper", 3.2e9)
    assert told("export", "session:keeper", tmp_path / "file", "--store", place)["prefix_tokens"] == 1200
    assert told("prune", "--session", "keeper", "--store", place)["groups"] == ["session:keeper"]
    assert told("ls", "--store", place)["rows"] == 5, "the tool group has the same pages"
    found = told("import", tmp_path / "file", "--name", "mate", "--store", tmp_path / "other")
    assert (found["name"], found["written"]) == ("session:mate", 3)
    assert told("prune", "--session", "mate", "--store", tmp_path / "other")["pages"] == 3
    told("export", "harbour/north", tmp_path / "group", "--store", place)
    assert "no session" in refused("import", tmp_path / "group", "--name", "session:mate", "--store", tmp_path / "other")


def test_prune_ends_leases_that_are_over(place: Path) -> None:
    name_session(place, "keeper", 1e-6)
    told("prune", "--max-size", "1GB", "--store", place)
    assert [group["name"] for group in told("ls", "--store", place)["groups"]] == ["harbour/north"]


def test_ls_of_an_empty_store(tmp_path: Path) -> None:
    Folder.open(tmp_path / "new")
    assert said("ls", "--store", tmp_path / "new").startswith("no tool groups")


def test_names_cannot_speak_to_the_terminal(place: Path) -> None:
    with Index(Folder.open(place)) as index:
        store_group(index, random_ids(100, 8), "[red]evil\x1b[31m\n")
    out = said("ls", "--store", place)
    assert "\x1b" not in out
    assert "[red]evil\\x1b[31m\\n" in out
    assert "\x1b" not in refused("inspect", "\x1b[31m", "--store", place)


def test_inspect_shows_a_group_whose_name_is_no_path(place: Path) -> None:
    out = said("inspect", "harbour/north", "--store", place)
    assert "weights" in out
    assert "tide, wind" in out
    assert "unknown" not in out
    assert "adapter" not in out
    found = told("inspect", "harbour/north", "--store", place)
    assert (found["pages"], found["pages_stored"], found["precision"]) == (3, 3, "exact")
    assert [page["tokens"] for page in found["chain"]] == [512, 512, 176]
    assert found["used_since"] == 2


def test_inspect_says_which_pages_are_gone(place: Path) -> None:
    with Index(Folder.open(place)) as index:
        index.remove([list(index.rows(namespace="tests"))[1].id], force=True)
    assert "not stored any more" in said("inspect", "harbour/north", "--store", place)
    found = told("inspect", "harbour/north", "--store", place)
    assert [page["stored"] for page in found["chain"]] == [True, False, True]
    assert not found["complete"]
    assert "2 of 3" in said("ls", "--store", place)


def test_a_name_that_several_groups_have_is_asked_about(place: Path) -> None:
    with Index(Folder.open(place)) as index:
        store_group(index, PROMPT, "harbour/north", scope=Scope("alice", "weights"))
        store_group(index, PROMPT, "harbour/north", scope=Scope("alice", "other weights"))
    for verb in (["inspect", "harbour/north"], ["export", "harbour/north", place / "file"], ["prune", "--group", "harbour/north"]):
        err = refused(*verb, "--store", place)
        assert "3 tool groups 'harbour/north'" in err
        assert "namespace 'tests'" in err
        assert "give --namespace, --fingerprint or --adapter" in err
        assert "2 tool groups" in refused(*verb, "--store", place, "--namespace", "alice")
    assert told("inspect", "harbour/north", "--store", place, "--namespace", "tests")["namespace"] == "tests"
    found = told("inspect", "harbour/north", "--store", place, "--namespace", "alice", "--fingerprint", "oth")
    assert found["fingerprint"] == "other weights"


@pytest.mark.parametrize("verb", [["inspect", "none"], ["export", "none", "file"], ["prune", "--group", "none"]])
def test_a_name_that_no_group_has(place: Path, verb: list[str]) -> None:
    assert "no tool group 'none': `agentcache ls` shows" in refused(*verb, "--store", place)
    of_session = [name.replace("none", "session:none") for name in verb]
    assert "no session 'none': `agentcache ls` shows" in refused(*of_session, "--store", place)
    assert "in namespace 'x'" in refused(*verb, "--store", place, "--namespace", "x")
    of_another = [name.replace("none", "harbour/north") for name in verb]
    assert "'harbour/north' of adapter '5e1c'" in refused(*of_another, "--store", place, "--adapter", "5e1c")
    assert "'harbour/north' of fingerprint '5e1c'" in refused(*of_another, "--store", place, "--fingerprint", "5e1c")


def test_stats_are_rounded_for_readers_only(place: Path) -> None:
    with Index(Folder.open(place)) as index:
        index.set_meta(f"compute/{process_identity.machine()}/weights", "6.123456789 1795241530.79")
        index.set_meta("read_rate", "1234567.891 1795241530.79")
    assert [line.split()[-1] for line in said("stats", "--store", place).splitlines() if "per_" in line] == ["1,234,568", "6.12"]
    assert sorted(told("stats", "--store", place)["rates"].values()) == [6.123456789, 1234567.891]


def test_stats_counts(place: Path) -> None:
    out = said("stats", "--store", place)
    assert "quarantined" in out
    found = told("stats", "--store", place)
    assert found["rows"] == 5
    assert set(found["by_role"]) == {"turn", "group"}
    assert set(found["by_namespace"]) == {"alice", "tests"}
    assert found["counters"] == {"hits": 7}
    assert found["rates"]["read_bytes_per_ms"] == 1e6
    assert found["free_bytes"] > 0


def test_verbs_that_read_the_index_load_no_torch(place: Path) -> None:
    for verb in ("ls", "stats", "inspect harbour/north", "prune --all"):
        program = (
            f"import sys; sys.argv = ['agentcache', *{verb!r}.split(), '--store', {str(place)!r}]\n"
            "import agentcache_llm\n"
            "try: agentcache_llm.main()\n"
            "except SystemExit as end: assert not end.code\n"
            "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
        )
        subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, check=True)


# -- stores that cannot be used --------------------------------------------------------------------------------------

READERS = [["ls"], ["stats"], ["inspect", "x"], ["verify"], ["prune", "--all"], ["export", "x", "file"]]


@pytest.mark.parametrize("verb", READERS)
def test_a_store_that_is_not_there_is_not_made(tmp_path: Path, verb: list[str]) -> None:
    assert "there is no store" in refused(*verb, "--store", tmp_path / "none")
    assert "there is no store" in refused(*verb, env={"AGENTCACHE_DIR": str(tmp_path / "none")})
    assert "AGENTCACHE_DIR=''" in refused(*verb, env={"AGENTCACHE_DIR": ""})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("verb", [["ls", "--namespace"], ["inspect"], ["prune", "--group"], ["prune", "--namespace"]])
def test_a_name_of_other_bytes_is_told(place: Path, verb: list[str]) -> None:
    assert refused(*verb, "half \udcff", "--store", place).startswith("agentcache: 'half \\udcff' names nothing in a store")


@pytest.mark.parametrize("verb", READERS)
def test_a_store_that_others_can_read_is_refused(place: Path, verb: list[str]) -> None:
    place.chmod(0o755)
    assert "chmod 700" in refused(*verb, "--store", place)


def test_a_damaged_index_is_named_with_the_way_out(place: Path) -> None:
    (place / "index.sqlite").write_bytes(b"nonsense" * 1000)
    for verb in (["ls"], ["stats"], ["inspect", "x"], ["prune", "--all"]):
        assert "agentcache verify --fix" in refused(*verb, "--store", place)


def test_an_encrypted_store_asks_for_its_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Index(Folder.open(tmp_path / "store", key=bytes(32))) as index:
        store_group(index, PROMPT, "harbour")
    key = {"AGENTCACHE_KEY": "00" * 32}
    assert "is encrypted: give its key" in refused("ls", "--store", tmp_path / "store")
    assert _run("ls", "--store", tmp_path / "store", env=key)[0] == 0
    assert "--clear" in refused("export", "harbour", tmp_path / "file", "--store", tmp_path / "store", env=key)
    assert _run("export", "harbour", tmp_path / "file", "--clear", "--store", tmp_path / "store", env=key)[0] == 0


# -- verify ----------------------------------------------------------------------------------------------------------


def test_verify_of_a_sound_store(place: Path) -> None:
    assert said("verify", "--store", place).endswith("checked: all sound\n")
    assert told("verify", "--store", place)["sound"] is True


def test_verify_fails_until_it_is_mended(place: Path) -> None:
    damage(place)
    out = said("verify", "--store", place, code=1)
    assert "wrong: page: blob " in out
    assert "was changed since it was written" in out
    assert out.endswith("1 wrong: --fix mends that\n")
    found = told("verify", "--store", place, code=1)
    assert (found["sound"], [problem["kind"] for problem in found["problems"]]) == (False, ["page"])
    assert said("verify", "--fix", "--store", place).endswith("checked: all sound now\n")
    assert told("verify", "--store", place)["problems"] == []
    assert told("ls", "--store", place)["rows"] == 4


def test_verify_makes_a_damaged_index_anew(place: Path) -> None:
    (place / "index.sqlite").write_bytes(b"nonsense" * 1000)
    assert told("verify", "--store", place, code=1)["problems"][0]["kind"] == "index"
    assert "index made anew with 5 rows: all sound now" in said("verify", "--fix", "--store", place)
    folder = Folder.open(place)
    with Index(folder) as index:
        assert reads_back(folder, list(index.rows()))


# -- prune -----------------------------------------------------------------------------------------------------------


def test_prune_says_what_it_would_do_and_does_it(place: Path) -> None:
    out = said("prune", "--namespace", "tests", "--dry-run", "--store", place)
    assert out.startswith("would delete: 3 pages, ")
    assert "1 tool group (harbour/north)" in out
    assert told("ls", "--store", place)["rows"] == 5
    found = told("prune", "--namespace", "tests", "--store", place)
    assert (found["pages"], found["groups"], found["left_pages"]) == (3, ["harbour/north"], 2)
    assert told("prune", "--all", "--store", place)["left_bytes"] == 0


def test_prune_deletes_all_texts_learnt_under_a_name(place: Path) -> None:
    with Index(Folder.open(place)) as index:
        for number in range(3):
            scope, pack = Scope("tests" if number < 2 else "alice", "weights"), random_ids(600, 7 + number)
            store_group(index, pack, scope=scope)
            index.put_group(replace(manifest_of(pack, f"notes/{number}", scope), sources=((f"text-{number}", "ab", 600),)))
    assert "texts 'notes' of several namespaces or models: give --namespace" in refused("prune", "--group", "notes", "--store", place)
    arguments = ("prune", "--group", "notes", "--namespace", "tests", "--store", place)
    assert "would delete: 4 pages" in said(*arguments, "--dry-run")
    found = told(*arguments)
    assert (found["pages"], sorted(found["groups"]), found["left_pages"]) == (4, ["notes/0", "notes/1"], 7)
    assert "no tool group 'notes'" in refused(*arguments)
    assert told("prune", "--group", "notes", "--store", place)["groups"] == ["notes/2"]


def test_prune_by_size_and_age(place: Path) -> None:
    total = told("ls", "--store", place)["bytes"]
    assert told("prune", "--max-size", f"{total}", "--store", place)["pages"] == 0
    found = told("prune", "--max-size", f"{total - 1} bytes".removesuffix(" bytes"), "--store", place)
    assert found["pages"] == 1
    assert found["left_bytes"] <= total - 1
    assert told("prune", "--older-than", "1h", "--namespace", "alice", "--store", place)["pages"] == 0
    time.sleep(0.01)
    assert told("prune", "--older-than", "0s", "--store", place)["left_pages"] == 0


def test_prune_spares_what_is_pinned_unless_forced(place: Path) -> None:
    with Index(Folder.open(place)) as index:
        index.pin([row.id for row in index.rows(namespace="tests")], process_identity.token())
        out = said("prune", "--group", "harbour/north", "--store", place)
        assert out.startswith("deleted: 0 pages")
        assert "kept: 3 pages" in out
        assert said("prune", "--group", "harbour/north", "--force", "--store", place).startswith("deleted: 3 pages")
        assert index.groups() == []


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--group", "x", "--session", "x"], "give one of them"),
        ([], "nothing to prune"), (["--all", "--max-size", "1GB"], "goes alone"), (["--max-size", "1GB", "--namespace", "x"], "goes alone"),
        (["--group", "x", "--older-than", "1d"], "goes alone"), (["--all", "--namespace", "x"], "goes alone"),
        (["--max-size", "big"], "5GB"), (["--all", "--fingerprint", "ab"], "with --group"),
        (["--namespace", "default", "--fingerprint", "ab"], "with --group"), (["--fingerprint", "ab"], "with --group"),
        (["--max-size", "-1"], "5GB"), (["--older-than", "30"], "30d"), (["--older-than", ""], "30d"),
    ],
)  # fmt: skip
def test_prune_asks_for_one_purpose(place: Path, options: list[str], why: str) -> None:
    assert why in refused("prune", *options, "--store", place)
    assert told("ls", "--store", place)["rows"] == 5


@pytest.mark.parametrize(("text", "wanted"), [("5GB", 5 << 30), ("500 mb", 500 << 20), ("1.5g", 3 << 29), ("4096", 4096), ("2KiB", 2048)])
def test_sizes_are_understood(text: str, wanted: int) -> None:
    assert terminal.bytes_of(text, "--max-size") == wanted


def test_sizes_and_ages_are_readable() -> None:
    assert [terminal.size(n) for n in (0, 1023, 1024, 5 << 20, 3 << 29, 5 << 40)] == [
        "0 bytes", "1023 bytes", "1.0 kB", "5.0 MB", "1.5 GB", "5120.0 GB"
    ]  # fmt: skip
    assert [terminal.seconds_of(text, "") for text in ("90s", "2m", "1.5h", "30d", "2w")] == [90, 120, 5400, 30 * 86400, 14 * 86400]
    with pytest.raises(ConfigError, match="5GB"):
        terminal.bytes_of("٥GB", "--max-size")


# -- export and import -----------------------------------------------------------------------------------------------


def test_a_group_travels(place: Path, tmp_path: Path) -> None:
    out = said("export", "harbour/north", tmp_path / "file", "--store", place)
    assert out.startswith("harbour/north: 1,200 tokens in 3 pages, ")
    assert "is there already" in refused("export", "harbour/north", tmp_path / "file", "--store", place)
    found = told("import", tmp_path / "file", "--store", tmp_path / "new", "--namespace", "bob")
    assert (found["written"], found["known"], found["namespace"]) == (3, 0, "bob")
    out = said("import", tmp_path / "file", "--store", tmp_path / "new", "--namespace", "bob")
    assert out == "harbour/north in namespace bob, of model toy: 0 pages written, 0 bytes; 3 were there\n"
    assert told("verify", "--store", tmp_path / "new")["sound"]
    assert told("export", "harbour/north", tmp_path / "again", "--store", tmp_path / "new")["bytes"] > 0


def test_import_refuses_what_is_no_archive(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"PK\x03\x04" + bytes(10_000))
    assert "is no archive" in refused("import", tmp_path / "file", "--store", tmp_path / "store")
    assert told("ls", "--store", tmp_path / "store")["rows"] == 0


# -- doctor ----------------------------------------------------------------------------------------------------------


def test_doctor_looks_at_the_store(place: Path) -> None:
    found = told("doctor", "--store", place)["store"]
    assert (found["folder"], found["mode"], found["index"], found["pages"], found["groups"]) == (str(place), "700", "ok", 5, 1)
    assert (found["encrypted"], found["writable"]) == (False, True)
    assert str(place) in said("doctor", "--store", place).replace("\n", "")


def test_doctor_makes_no_store_and_needs_none(tmp_path: Path) -> None:
    assert told("doctor", "--store", tmp_path / "none")["store"]["state"] == "not made yet"
    assert not (tmp_path / "none").exists()
    assert told("doctor")["store"] == {"folder": "none: AGENTCACHE_DIR is set to nothing"}


def test_doctor_names_what_keeps_a_store_from_being_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("a text")
    (tmp_path / "full").mkdir(mode=0o700)
    (tmp_path / "full" / "file").touch()
    (tmp_path / "open").mkdir(mode=0o755)
    whys = {"file": "is not what it should be", "file/below": "is no folder", "full": "holds 'file'", "open": "chmod 700"}
    for place, why in whys.items():
        found = told("doctor", "--store", tmp_path / place, code=1)["store"]
        assert (found["state"], why in found["problem"]) == ("not made yet", True)


def test_doctor_names_what_is_wrong_with_the_store(place: Path) -> None:
    (place / "index.sqlite").write_bytes(b"nonsense" * 1000)
    assert "verify --fix" in told("doctor", "--store", place, code=1)["store"]["problem"]
    place.chmod(0o755)
    assert "chmod 700" in told("doctor", "--store", place, code=1)["store"]["problem"]


# -- warm, and a whole journey ---------------------------------------------------------------------------------------


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    (tmp_path / "tools.json").write_text(json.dumps(TOOLS))
    return tmp_path / "tools.json"


def test_warm_computes_once_and_the_next_process_finds_it(model_folder: Path, tools: Path, tmp_path: Path) -> None:
    system = tmp_path / "system.txt"
    system.write_text(long_text(200))
    given = ["warm", model_folder, "--tools", tools, "--system", system, "--name", "a/b", "--store", tmp_path / "store"]
    first = told(*given)
    assert first["computed_tokens"] == first["prefix_tokens"] > 512
    assert first["found_tokens"] == 0
    assert first["stored_bytes"] > 0
    again = told(*given)
    assert again["computed_tokens"] <= 1
    assert "1 computed, " in said(*given)
    group = told("inspect", "a/b", "--store", tmp_path / "store")
    assert (group["prefix_tokens"], group["complete"], group["tools"]) == (first["prefix_tokens"], True, ["get_weather", "search"])
    assert group["bytes"] == first["stored_bytes"]

    said("export", "a/b", tmp_path / "file", "--store", tmp_path / "store")
    said("import", tmp_path / "file", "--namespace", "elsewhere", "--store", tmp_path / "other")
    messages = chat("Where does the wind blow from?", system=system.read_text())
    with Engine(str(model_folder), store=tmp_path / "other") as engine:
        hit = engine.generate(messages, TOOLS, sampling=decode(4), namespace="elsewhere")
        miss = engine.generate(messages, TOOLS, sampling=decode(4), reuse="off")
    assert hit.receipt.disk_tokens == hit.receipt.cached_tokens == first["prefix_tokens"]
    assert hit.ids == miss.ids


def test_warm_takes_a_text_and_needs_something(model_folder: Path, tmp_path: Path) -> None:
    found = told("warm", model_folder, "--system", "You are a keeper.", "--namespace", "x", "--store", tmp_path / "store")
    assert found["namespace"] == "x"
    assert found["name"]
    assert "nothing to warm" in refused("warm", model_folder, "--store", tmp_path / "store")


def test_warm_refuses_before_a_model_is_loaded(tools: Path, tmp_path: Path) -> None:
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "number.json").write_text("5")
    assert "cannot be read" in refused("warm", "/no/model", "--tools", tmp_path / "broken.json", "--store", tmp_path / "store")
    assert "cannot be read" in refused("warm", "/no/model", "--tools", tmp_path / "none.json", "--store", tmp_path / "store")
    assert "JSON list" in refused("warm", "/no/model", "--tools", tmp_path / "number.json", "--store", tmp_path / "store")
    for mistyped in ("promt.txt", "prompts/none"):
        assert "there is no such file" in refused("warm", "/no/model", "--system", mistyped, "--store", tmp_path / "store")
    assert "AGENTCACHE_DIR=''" in refused("warm", "/no/model", "--tools", tools, env={"AGENTCACHE_DIR": ""})
    assert "cannot be loaded" in refused("warm", "/no/model", "--tools", tools, "--store", tmp_path / "store")


def test_warm_says_when_nothing_could_be_written(model_folder: Path, tools: Path, tmp_path: Path) -> None:
    Folder.open(tmp_path / "store")
    with Index(Folder.open(tmp_path / "store")):
        pass
    os.chmod(tmp_path / "store", 0o500)
    try:
        code, out, err = _run("warm", model_folder, "--tools", tools, "--store", tmp_path / "store")
        assert (code, out) == (1, "")
        assert "not on disk as a whole: the store is read-only" in err
    finally:
        os.chmod(tmp_path / "store", 0o700)


def test_warm_says_once_that_the_disk_is_full(model_folder: Path, tools: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(blob_files, "write_from", full)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        code, _, err = _run("warm", model_folder, "--tools", tools, "--store", tmp_path / "store")
    assert code == 1
    assert err.count("No space left on device") == 1
    assert not [one for one in seen if issubclass(one.category, StoreWarning)]
